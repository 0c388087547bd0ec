"""Sessions in unexpected hands: edits at a bad moment, refused groups, early commits, late boundaries."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overspill import attach
from overspill.errors import OverspillError
from overspill.plan import Durability, Overlap, Placement, Plan, StateFormat
from overspill.tiers.disk import DiskStore
from overspill.units import MiB

EVERY_STEP = Durability(every_steps=1)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)).to(dtype)


def plan(disk: float = 1.0, **changes: Any) -> Plan:
    base: dict[str, Any] = {
        "memory_nbytes": 8 * MiB,
        "optimizer_state": Placement(host=1 - disk, disk=disk),
        "chunk_numel": 2048,
        "staging_nbytes": 64 * 1024,
    }
    return Plan(**(base | changes))


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    model(x).float().square().mean().backward()


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk so slow that what is written late is still being written when step() returns."""
    write = DiskStore.write_from

    def late(self: DiskStore, slot: str, offset: int, buffer: memoryview, *, checksum: bool) -> None:
        time.sleep(0.01)
        write(self, slot, offset, buffer, checksum=checksum)

    monkeypatch.setattr(DiskStore, "write_from", late)


@pytest.mark.usefixtures("slow_writes")
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_weights_edited_right_after_a_step_that_is_committed_do_not_reach_its_commit(
    tmp_path: Path, master: str
) -> None:
    settings = plan(0.5, durability=EVERY_STEP, state_format=StateFormat(master=master))
    model = net(torch.bfloat16)
    session = attach(
        model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), plan=settings, directory=tmp_path / "s"
    )
    backward(model)
    session.optimizer.step()
    committed = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    session.flush()
    assert session.committed_step == 1
    for live, expected in zip(session.live_parameters, committed, strict=True):
        mapped = session.store.map_tensor(live.block.slot_name("weights"), live.place.name)
        assert mapped.tobytes() == expected.view(torch.int16).numpy().tobytes(), live.place.name
    session.close()
    again = net(torch.bfloat16)
    session = attach(
        again, optimizer=torch.optim.AdamW(again.parameters()), plan=settings, directory=tmp_path / "s", resume=True
    )
    tripled = [parameter * 3 for parameter in committed]
    assert all(torch.equal(a, b) for a, b in zip(tripled, again.parameters(), strict=True)), "a clean close keeps edits"
    session.close()


@pytest.mark.usefixtures("slow_writes")
def test_weights_edited_while_they_are_written_stop_the_commit_instead_of_tearing_it(tmp_path: Path) -> None:
    settings = plan(1.0, durability=EVERY_STEP, overlap=Overlap.FORWARD)
    model = net()
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=tmp_path / "s")
    backward(model)
    session.optimizer.step()
    with torch.no_grad():
        next(model.parameters()).mul_(3)  # without flush()
    with pytest.raises(OverspillError, match=r"OVS504.*edited while step 1.*flush"):
        session.flush()
    session.close()
    model = net()
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=tmp_path / "s2")
    backward(model)
    session.optimizer.step()
    model.load_state_dict(net().state_dict())  # says so itself
    session.flush()
    assert session.committed_step == 1
    session.close()


def test_a_weight_used_before_its_own_module_runs_is_updated_in_time(tmp_path: Path) -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.linear(x, self.layers[3].weight)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    results = []
    for overlap in Overlap:
        model = Early()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        session = attach(model, optimizer=optimizer, plan=plan(overlap=overlap), directory=tmp_path / str(overlap))
        for step in range(6):
            session.optimizer.zero_grad()
            backward(model, step)
            session.optimizer.step()
        session.flush()
        results.append([p.detach().clone() for p in model.parameters()])
        session.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_group_that_does_not_fit_is_refused_and_training_goes_on_without_it(tmp_path: Path) -> None:
    model = net()
    model.add_module("late", nn.Linear(1024, 1024))
    trained = [p for name, p in model.named_parameters() if not name.startswith("late")]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    # Room for the new weights and not for their gradients.
    settings = plan(memory_nbytes=9 * MiB + MiB // 2)
    session = attach(model, optimizer=optimizer, plan=settings, directory=tmp_path / "s")
    held = session.pool.held_nbytes
    assert 4 * MiB < session.pool.free_nbytes < 8 * MiB
    with pytest.raises(OverspillError, match="OVS301"):
        session.optimizer.add_param_group({"params": list(model.late.parameters())})
    assert len(session.optimizer.param_groups) == 1
    assert session.pool.held_nbytes == held, "what the refused group had already been given was not given back"
    before = [p.detach().clone() for p in trained]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    session.optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, trained, strict=True)), "a step was swallowed"
    session.close()


@pytest.mark.parametrize("disk", [0.0, 0.5, 1.0])
def test_a_commit_before_the_first_update_of_some_block_is_whole(tmp_path: Path, disk: float) -> None:
    settings = plan(disk, durability=EVERY_STEP, nonfinite="skip", max_grad_norm=1.0)
    model = net()
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=tmp_path / "s")
    backward(model)
    next(model.parameters()).grad[0, 0] = float("nan")
    session.optimizer.step()
    session.flush()
    assert session.committed_step == 1
    for step in range(2):
        session.optimizer.zero_grad()
        backward(model, step)
        session.optimizer.step()
    session.close()
    again = net()
    session = attach(
        again, optimizer=torch.optim.AdamW(again.parameters()), plan=settings, directory=tmp_path / "s", resume=True
    )
    assert session.step == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    session.close()


def test_running_means_and_edited_frozen_weights_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        model[2].requires_grad_(False)
        return model

    model = build()
    settings = plan(keep_last=2)
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=tmp_path / "s")
    for step in range(3):
        backward(model, step)
        session.optimizer.step()
    session.step_boundary()
    session.checkpoint("a")
    with torch.no_grad():
        model[2].weight.add_(1)
    backward(model, 9)
    session.optimizer.step()
    session.step_boundary()
    session.checkpoint("b")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    session.close()
    again = build()
    session = attach(
        again, optimizer=torch.optim.AdamW(again.parameters()), plan=settings, directory=tmp_path / "s", resume="b"
    )
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name
    session.close()


def test_a_boundary_that_comes_after_the_state_was_asked_for_still_counts(tmp_path: Path) -> None:
    settings = plan(durability=EVERY_STEP)
    model = net()
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=tmp_path / "s")
    backward(model)
    session.optimizer.step()
    session.optimizer.state_dict()
    session.step_boundary({"seen": 8})
    session.close()
    again = net()
    session = attach(
        again, optimizer=torch.optim.AdamW(again.parameters()), plan=settings, directory=tmp_path / "s", resume=True
    )
    assert session.restored is not None
    assert session.restored.complete
    assert session.restored.extra == {"seen": 8}
    session.close()


def test_tracked_state_that_nobody_claims_on_a_resume_is_named(tmp_path: Path) -> None:
    settings = plan(durability=EVERY_STEP)
    model = net()
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=tmp_path / "s")
    session.track(warmup=torch.optim.lr_scheduler.LinearLR(session.optimizer))
    backward(model)
    session.optimizer.step()
    session.step_boundary()
    session.close()
    model = net()
    session = attach(
        model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=tmp_path / "s", resume=True
    )
    backward(model)
    session.optimizer.step()
    assert any("warmup" in note for note in session.notes)
    session.close()


def test_a_session_that_is_let_go_of_gives_its_lock_back(tmp_path: Path) -> None:
    for resume in (False, True):
        model = net()
        session = attach(
            model,
            optimizer=torch.optim.AdamW(model.parameters()),
            plan=plan(durability=EVERY_STEP),
            directory=tmp_path / "s",
            resume=resume,
        )
        backward(model)
        session.optimizer.step()
        gone = weakref.ref(session)
        del session, model
        for _ in range(100):  # a lane may be at work for it just now, and tensors come back from a first collection
            gc.collect()
            if gone() is None:
                break
            time.sleep(0.05)
        assert gone() is None


def test_unfreezing_late_keeps_the_overlap(tmp_path: Path) -> None:
    model = net()
    model[3].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = attach(model, optimizer=optimizer, plan=plan(overlap=Overlap.FORWARD), directory=tmp_path / "s")
    for step in range(4):
        model[3].requires_grad_(step >= 2)
        session.optimizer.zero_grad()
        backward(model, step)
        session.optimizer.step()
    assert session.waits_before_the_model == ()
    session.close()


def test_a_parameter_taken_out_of_its_group_is_left_alone(tmp_path: Path) -> None:
    model = net()
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan(0.0))
    last = session.optimizer.param_groups[0]["params"].pop()
    before = last.detach().clone()
    backward(model)
    session.optimizer.step()
    assert torch.equal(before, last)
    session.close()


def test_gradients_put_behind_or_exchanged_between_parameters_are_the_ones_used(tmp_path: Path) -> None:
    models = [net(), net()]
    session = attach(
        models[0],
        optimizer=torch.optim.AdamW(models[0].parameters(), lr=1e-2),
        plan=plan(),
        directory=tmp_path / "s",
    )
    reference = torch.optim.AdamW(models[1].parameters(), lr=1e-2)
    for step in range(4):
        for model, optimizer in zip(models, (session.optimizer, reference), strict=True):
            optimizer.zero_grad()
            backward(model, step)
            a, b = model[2].weight, model[2].bias
            if step == 1:
                for parameter in model.parameters():
                    parameter.grad.data = parameter.grad.data * 0.1
            if step == 2:
                twin = torch.nn.Parameter(a.detach().clone())
                twin.grad = a.grad.clone()
                a.grad, model[0].weight.grad = twin.grad, model[0].weight.grad.flip(0)
                b.grad = b.grad.flip(0)
            optimizer.step()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    session.close()


def test_gradients_swapped_between_two_parameters_are_swapped(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    session = attach(models[0], optimizer=torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9), plan=plan(0.0))
    reference = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    for model, optimizer in zip(models, (session.optimizer, reference), strict=True):
        backward(model)
        a, b = model[0].weight, model[1].weight
        a.grad, b.grad = b.grad, a.grad
        optimizer.step()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    session.close()


def test_a_wrong_value_in_a_group_counts_no_step(tmp_path: Path) -> None:
    model = net()
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan(0.0))
    backward(model)
    session.optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(ValueError, match="much"):
        session.optimizer.step()
    session.optimizer.param_groups[0]["lr"] = 1e-2
    session.optimizer.step()
    steps = [float(entry["step"]) for entry in session.optimizer.state_dict()["state"].values()]
    assert steps == [1.0] * len(steps)
    session.close()


def test_a_model_can_be_copied_after_attach(tmp_path: Path) -> None:
    model = net()
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan(0.0))
    again = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    session.close()


def test_a_run_in_which_a_layer_was_unfrozen_can_be_gone_on_with(tmp_path: Path) -> None:
    settings = plan(0.5, durability=EVERY_STEP)

    def start(*, resume: bool, frozen: bool) -> tuple[nn.Sequential, Any]:
        model = net()
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, attach(model, optimizer=optimizer, plan=settings, directory=tmp_path / "s", resume=resume)

    reference = net()
    reference[0].requires_grad_(False)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    model, session = start(resume=False, frozen=True)
    for step in range(8):
        if step in (4, 6):  # once as it is by then, once frozen as it was when the run began
            session.close()
            model, session = start(resume=True, frozen=step == 6)
        for each, optimizer in ((model, session.optimizer), (reference, theirs)):
            each[0].requires_grad_(step >= 2)
            optimizer.zero_grad()
            backward(each, step)
            optimizer.step()
    session.flush()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, expected, atol=1e-6)
    session.close()


@pytest.mark.parametrize("disk", [0.0, 1.0])
def test_a_state_dict_without_state_for_a_parameter_starts_it_afresh_as_in_torch(tmp_path: Path, disk: float) -> None:
    models = [net(), net()]
    session = attach(
        models[0],
        optimizer=torch.optim.AdamW(models[0].parameters(), lr=1e-2),
        plan=plan(disk),
        directory=tmp_path / "s",
    )
    optimizers = [session.optimizer, torch.optim.AdamW(models[1].parameters(), lr=1e-2)]
    empty = [optimizer.state_dict() for optimizer in optimizers]
    for step in range(6):
        for model, optimizer, before in zip(models, optimizers, empty, strict=True):
            if step == 3:
                optimizer.load_state_dict(before)
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    session.flush()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    session.close()


def test_frozen_weights_of_any_dtype_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        model = net()
        model.add_module("table", nn.Embedding(5, 3, dtype=torch.float64))
        model.table.requires_grad_(False)
        model.register_parameter("none", nn.Parameter(torch.zeros(0)))
        return model

    model = build()
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan(), directory=tmp_path / "s")
    with torch.no_grad():
        model.table.weight.fill_(1 / 3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    session.optimizer.step()
    session.checkpoint("a")
    session.close()
    again = build()
    session = attach(
        again, optimizer=torch.optim.AdamW(again.parameters()), plan=plan(), directory=tmp_path / "s", resume="a"
    )
    assert torch.equal(again.table.weight, torch.full((5, 3), 1 / 3, dtype=torch.float64))
    session.close()


def test_what_attach_would_lose_is_refused(tmp_path: Path) -> None:
    model = net()
    hooked = torch.optim.AdamW(model.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(OverspillError, match=r"OVS207.*session.optimizer"):
        attach(model, optimizer=hooked, plan=plan(0.0))
    tied = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8, bias=False))
    tied[1].weight.data = tied[0].weight.data
    with pytest.raises(OverspillError, match=r"OVS504.*share memory: 0.weight and 1.weight"):
        attach(tied, optimizer=torch.optim.AdamW(tied.parameters()), plan=plan(0.0))
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan(0.0))
    with pytest.raises(OverspillError, match=r"OVS504.*attached to a session already"):
        attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan(0.0))
    session.close()
    attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan(0.0)).close()


def test_an_optimizer_without_state_trains_whatever_share_is_planned_for_disk(tmp_path: Path) -> None:
    models = [net(), net()]
    session = attach(
        models[0],
        optimizer=torch.optim.SGD(models[0].parameters(), lr=0.1),
        plan=plan(1.0),
        directory=tmp_path / "s",
    )
    for model, optimizer in zip(
        models, (session.optimizer, torch.optim.SGD(models[1].parameters(), lr=0.1)), strict=True
    ):
        backward(model)
        optimizer.step()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    session.close()
