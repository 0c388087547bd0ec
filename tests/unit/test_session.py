"""What a session promises around a step: resume, checkpoints, tracked objects, failure, fork, budget, meta weights."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overspill import Session, attach
from overspill.errors import OverspillError
from overspill.job import OptimizerConfig
from overspill.plan import Durability, Overlap, Placement, Plan, StateFormat
from overspill.units import MiB


def net(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, 4))
    return model.to(dtype)


def plan(disk: float = 1.0, **changes: Any) -> Plan:
    base: dict[str, Any] = {
        "memory_nbytes": 4 * MiB,
        "optimizer_state": Placement(host=1 - disk, disk=disk),
        "chunk_numel": 2048,
        "staging_nbytes": 64 * 1024,
        "keep_last": 2,
    }
    return Plan(**(base | changes))


def start(directory: Path, settings: Plan, *, resume: bool | str = False) -> tuple[nn.Module, Session, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = attach(model, optimizer=optimizer, plan=settings, directory=directory / "state", resume=resume)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(session.optimizer, 0.9)
    session.track(scheduler=scheduler)
    return model, session, scheduler


def one_step(model: nn.Module, session: Session, scheduler: Any) -> float:
    """Draws from all three generators, so that a resume which loses one of them shows."""
    x = torch.randn(8, 16).bfloat16() + random.random() + float(np.random.rand())
    session.optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    session.optimizer.step()
    scheduler.step()
    session.step_boundary({"seen": session.step * 8})
    return loss.item()


def run(
    directory: Path, settings: Plan, steps: int, resume: bool | str = False
) -> tuple[list[float], list[torch.Tensor]]:
    random.seed(1)
    np.random.seed(1)
    model, session, scheduler = start(directory, settings, resume=resume)
    with session:
        if not resume:
            torch.manual_seed(5)
        else:
            session.restore_rng()
        losses = [one_step(model, session, scheduler) for _ in range(steps - session.step)]
        session.flush()
        return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("disk", [0.0, 0.6, 1.0])
def test_a_resume_goes_on_bit_for_bit_where_the_last_commit_was(tmp_path: Path, disk: float, overlap: Overlap) -> None:
    whole = run(tmp_path / "whole", plan(disk, overlap=overlap), 9)
    settings = plan(disk, overlap=overlap, durability=Durability(every_steps=2))
    first = run(tmp_path / "cut", settings, 5)
    assert first[0] == whole[0][:5]
    second = run(tmp_path / "cut", settings, 9, resume=True)
    assert second[0] == whole[0][5:], "a clean close keeps the last steps, also between two commits"
    assert all(torch.equal(a, b) for a, b in zip(second[1], whole[1], strict=True))


def test_a_resume_may_place_state_elsewhere_and_keeps_the_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", plan(1.0), 8)
    run(tmp_path / "cut", plan(1.0, durability=Durability(every_steps=4)), 4)
    for index, (disk, overlap) in enumerate([(0.0, Overlap.STEP), (0.5, Overlap.FORWARD)]):
        copied = tmp_path / f"copy{index}"
        __import__("shutil").copytree(tmp_path / "cut", copied)
        moved = run(copied, plan(disk, overlap=overlap), 8, resume=True)
        assert moved[0] == whole[0][4:]
        assert all(torch.equal(a, b) for a, b in zip(moved[1], whole[1], strict=True))


def test_a_checkpoint_can_be_gone_back_to_bit_for_bit(tmp_path: Path) -> None:
    model, session, scheduler = start(tmp_path, plan(0.5, durability=Durability(every_steps=3)))
    torch.manual_seed(5)
    random.seed(1)
    np.random.seed(1)
    losses = []
    for step in range(1, 8):
        losses.append(one_step(model, session, scheduler))
        if step in (2, 5):
            session.checkpoint(f"step-{step}")
    session.close()
    model, session, scheduler = start(tmp_path, plan(0.5), resume="step-2")
    assert session.step == 2
    assert session.restored is not None
    assert session.restored.extra == {"seen": 16}
    session.restore_rng()
    assert [one_step(model, session, scheduler) for _ in range(5)] == losses[2:]
    session.close()


def test_weights_edited_after_a_commit_are_in_the_checkpoint_and_go_on_from_there(tmp_path: Path) -> None:
    settings = plan(0.5, durability=Durability(every_steps=1))
    results = []
    for resumes in (False, True):
        directory = tmp_path / str(resumes)
        model, session, scheduler = start(directory, settings)
        torch.manual_seed(5)
        random.seed(1)
        np.random.seed(1)
        for _ in range(3):
            one_step(model, session, scheduler)
        session.flush()
        assert session.committed_step == 3
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
        session.checkpoint("edited")
        if resumes:
            session.close()
            model, session, scheduler = start(directory, settings, resume="edited")
            session.restore_rng()
        results.append([one_step(model, session, scheduler) for _ in range(3)])
        session.close()
    assert results[0] == results[1]


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    model, session, scheduler = start(tmp_path, plan(1.0, keep_last=2))
    for step in range(1, 6):
        one_step(model, session, scheduler)
        session.checkpoint(f"step-{step}")
    assert sorted(path.name for path in (tmp_path / "state" / "checkpoints").iterdir()) == ["step-4", "step-5"]
    session.close()


def test_what_was_not_tracked_is_said_to_be_incomplete(tmp_path: Path) -> None:
    model = net()
    settings = plan(1.0, durability=Durability(every_steps=1))
    session = attach(
        model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=tmp_path / "state"
    )
    model(torch.randn(4, 16).bfloat16()).float().sum().backward()
    session.optimizer.step()
    session.close()
    _, session, _ = start(tmp_path, settings, resume=True)
    assert session.restored is not None
    assert not session.restored.complete
    session.close()


def test_weights_attached_on_meta_train_as_those_attached_on_the_cpu(tmp_path: Path) -> None:
    results = []
    config = OptimizerConfig(lr=1e-2, max_grad_norm=None)
    for device in ("cpu", "meta"):
        source = net()
        model = net(device)
        session = attach(model, optimizer=config, plan=plan(1.0), directory=tmp_path / device)
        model.load_state_dict(source.state_dict())
        torch.manual_seed(4)
        for _ in range(10):
            session.optimizer.zero_grad()
            model(torch.randn(8, 16).bfloat16()).float().square().mean().backward()
            session.optimizer.step()
        session.flush()
        results.append([p.detach().clone() for p in model.parameters()])
        masters = [block.slot_name("master") for block in session.blocks]
        residuals = torch.zeros(session.blocks[0].layout.numel, dtype=torch.int16)
        session.store.read_into(masters[0], 0, memoryview(residuals.view(torch.uint8).numpy().data))
        assert residuals.count_nonzero() > 100, "the 16 bits below the weights were dropped"
        session.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("disk", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_skipped_raised_or_let_through_as_the_plan_says(
    tmp_path: Path, disk: float
) -> None:
    for policy in ("skip", "raise", "allow"):
        directory = tmp_path / policy
        model, session, scheduler = start(directory, plan(disk, nonfinite=policy, max_grad_norm=1.0))
        torch.manual_seed(5)
        one_step(model, session, scheduler)
        session.flush()
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.randn(8, 16).bfloat16()).float().mean().backward()
        next(model.parameters()).grad[0, 0] = float("nan")
        if policy == "raise":
            with pytest.raises(OverspillError, match=r"OVS502.*step 2 has 1 elements"):
                session.optimizer.step()
        else:
            session.optimizer.step()
            session.flush()
            assert session.step_facts()["skipped"] == (policy == "skip")
        changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert changed == (policy == "allow")
        if policy != "allow":
            session.optimizer.zero_grad()
            one_step(model, session, scheduler)
            assert all(bool(p.isfinite().all()) for p in model.parameters())
            assert next(float(s["step"]) for s in session.optimizer.state_dict()["state"].values()) == 2
        session.close()


def test_a_budget_that_is_too_small_names_class_need_and_limit_before_anything_moves() -> None:
    model = net(dtype=torch.float32)
    storages = [p.data_ptr() for p in model.parameters()]
    small = plan(0.0, memory_nbytes=100 * 1024)
    with pytest.raises(OverspillError, match=r"OVS301.*needs .* is left.*Raise plan.memory to") as caught:
        attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=small)
    assert caught.value.field == "plan.memory"
    assert storages == [p.data_ptr() for p in model.parameters()]


def test_a_plan_for_disk_without_a_directory_is_refused() -> None:
    model = net()
    with pytest.raises(OverspillError, match=r"OVS504.*no directory"):
        attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan(1.0))


def test_a_store_of_another_model_is_refused_with_both_sides(tmp_path: Path) -> None:
    run(tmp_path, plan(1.0, durability=Durability(every_steps=1)), 2)
    other = nn.Sequential(nn.Linear(16, 65), nn.Linear(65, 4)).bfloat16()
    with pytest.raises(OverspillError, match=r"OVS40[46]"):
        attach(
            other,
            optimizer=torch.optim.AdamW(other.parameters()),
            plan=plan(1.0),
            directory=tmp_path / "state",
            resume=True,
        )


def _run_in_child(model: nn.Module, queue: Any) -> None:
    try:
        model(torch.zeros(1, 16).bfloat16())
        queue.put("ran")
    except OverspillError as error:
        queue.put(error.code)


def test_a_forked_child_that_runs_the_model_is_told_so(tmp_path: Path) -> None:
    model, session, scheduler = start(tmp_path, plan(1.0))
    one_step(model, session, scheduler)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_run_in_child, args=(model, queue))
    child.start()
    assert queue.get(timeout=60) == "OVS503"
    child.join(60)
    one_step(model, session, scheduler)  # the parent goes on, its lock and files untouched by the child's end
    session.checkpoint("after-fork")
    session.close()


def test_the_state_dict_of_committed_state_is_mapped_and_equal_to_the_state(tmp_path: Path) -> None:
    model, session, scheduler = start(tmp_path, plan(1.0, state_format=StateFormat(master="fp32")))
    for _ in range(3):
        one_step(model, session, scheduler)
    state = session.optimizer.state_dict()["state"]
    for entry, parameter in zip(state.values(), model.parameters(), strict=True):
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "master"}
        assert entry["exp_avg"].shape == parameter.shape
        assert torch.allclose(entry["master"], parameter.float(), rtol=2**-8)
    assert session.committed_step == 3, "what is mapped is what a crash cannot lose"
    session.close()


def test_a_closed_or_failed_session_refuses_to_step(tmp_path: Path) -> None:
    model, session, scheduler = start(tmp_path, plan(1.0))
    one_step(model, session, scheduler)
    session.close()
    session.close()
    model(torch.randn(8, 16).bfloat16()).float().mean().backward()
    with pytest.raises(OverspillError, match="OVS501"):
        session.optimizer.step()


def test_stalls_and_bytes_of_a_step_are_counted(tmp_path: Path) -> None:
    model, session, scheduler = start(tmp_path, plan(1.0, overlap=Overlap.STEP))
    for _ in range(3):
        one_step(model, session, scheduler)
    session.flush()
    session.step_facts()
    one_step(model, session, scheduler)
    session.flush()
    facts = session.step_facts()
    elements = sum(block.layout.numel for block in session.blocks)
    assert facts["written_nbytes"]["disk"] == 10 * elements
    # Reads for the step after this one are under way already, as far as there are buffers.
    assert facts["read_nbytes"]["disk"] <= 2 * 10 * elements
    assert facts["held_nbytes"]["host"]["weights"] >= 2 * elements
    assert "moments" not in facts["held_nbytes"]["host"], "a class planned for disk holds no memory"
    assert set(facts["stall_seconds"]) <= {"update", "disk_read", "disk_write", "commit", "flush"}
    session.close()


def test_two_directories_share_the_state_by_their_speed(tmp_path: Path) -> None:
    disks = (tmp_path / "fast", tmp_path / "slow")
    settings = plan(1.0, directories=disks, directory_weights=(3.0, 1.0))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(12))).bfloat16()
    session = attach(
        model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=tmp_path / "state"
    )
    model(torch.randn(2, 64).bfloat16()).float().square().mean().backward()
    session.optimizer.step()
    session.checkpoint("a")
    fast, slow = (sum(f.stat().st_size for f in disk.rglob("f*.bin")) for disk in disks)
    assert 2 < fast / slow < 4.5
    session.close()


def test_state_asked_for_on_the_device_is_refused_and_not_put_elsewhere() -> None:
    model = net()
    settings = plan(1.0, optimizer_state=Placement(device=0.5, host=0.5))
    with pytest.raises(OverspillError, match=r"OVS504.*cannot be kept on the device"):
        attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings)
