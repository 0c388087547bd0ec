"""The tiered optimizer behaves as torch's own: groups, schedulers, accumulation, clipping, scaling, graphs, state."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from overspill import Session, attach
from overspill.errors import OverspillError
from overspill.plan import Overlap, Placement, Plan, StateFormat
from overspill.units import MiB

Build = Callable[..., tuple[nn.Module, torch.optim.Optimizer, Session | None]]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 3))


def plan(place: str = "host", **changes: Any) -> Plan:
    share = {"host": 1.0, "disk": 0.0}[place]
    base: dict[str, Any] = {
        "memory_nbytes": 4 * MiB,
        "optimizer_state": Placement(host=share, disk=1 - share),
        "chunk_numel": 2048,
        "staging_nbytes": 128 * 1024,
    }
    return Plan(**(base | changes))


PLACES = [("host", Overlap.STEP), ("disk", Overlap.STEP), ("disk", Overlap.FORWARD)]


@pytest.fixture(params=PLACES, ids=lambda p: f"{p[0]}-{p[1]}")
def tiered(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """attach() with a placement and an overlap; sessions are closed at the end."""
    place, overlap = request.param
    sessions: list[Session] = []

    def build(model: nn.Module, optimizer: Any, **changes: Any) -> Session:
        directory = tmp_path / f"state{len(sessions)}"
        session = attach(model, optimizer=optimizer, plan=plan(place, overlap=overlap, **changes), directory=directory)
        sessions.append(session)
        return session

    yield build
    for session in sessions:
        session.close()


def batches(count: int, seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(count)]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def assert_close(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a - b).norm() <= tolerance * b.norm().clamp(min=1e-12), name


def test_twenty_fp32_steps_follow_torch_adamw(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1))
    for batch in batches(20):
        losses = []
        for model, optimizer in ((ours, session.optimizer), (theirs, reference)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 1e-6
    session.flush()
    assert_close(ours, theirs)


def test_two_groups_and_a_scheduler_follow_torch(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        return [
            {"params": weights, "weight_decay": 0.2},
            {"params": biases, "weight_decay": 0.0, "lr": 3e-2, "betas": (0.8, 0.9)},
            {"params": []},
        ]

    reference = torch.optim.AdamW(groups(theirs), lr=1e-2)
    session = tiered(ours, torch.optim.AdamW(groups(ours), lr=1e-2))
    assert len(session.optimizer.param_groups) == 3, "an empty group was dropped"
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.02, 0.01], total_steps=12)
        for o in (session.optimizer, reference)
    ]
    for batch in batches(10):
        for model, optimizer, scheduler in zip((ours, theirs), (session.optimizer, reference), schedulers, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()
        assert [g["lr"] for g in session.optimizer.param_groups] == [g["lr"] for g in reference.param_groups]
    session.flush()
    assert_close(ours, theirs)


def test_a_learning_rate_set_by_hand_takes_effect_in_the_next_step(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    for i, batch in enumerate(batches(6)):
        for model, optimizer in ((ours, session.optimizer), (theirs, reference)):
            optimizer.param_groups[0]["lr"] = 0.03 / (i + 1)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 100.0  # must not reach the step that was just taken
    session.flush()
    assert_close(ours, theirs)


def test_micro_batches_add_up_as_one_batch(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for x, y in batches(5):
        session.optimizer.zero_grad()
        for part in range(4):
            (loss_of(ours, (x[part * 2 : part * 2 + 2], y[part * 2 : part * 2 + 2])) / 4).backward()
        session.optimizer.step()
        reference.zero_grad()
        loss_of(theirs, (x, y)).backward()
        reference.step()
    session.flush()
    assert_close(ours, theirs, tolerance=1e-4)


def test_torch_clipping_before_step_is_seen(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for batch in batches(6):
        norms = []
        for model, optimizer in ((ours, session.optimizer), (theirs, reference)):
            optimizer.zero_grad()
            (100 * loss_of(model, batch)).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    session.flush()
    assert_close(ours, theirs)


def test_the_sessions_norm_is_torchs_for_fp32_and_the_fp64_norm_for_bf16(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = net().to(dtype)
        session = attach(
            model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan(max_grad_norm=0.05), directory=None
        )
        x, y = batches(1)[0]
        (30 * nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))).backward()
        exact = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
        theirs = nn.utils.get_total_norm([p.grad.float() for p in model.parameters()])
        session.optimizer.step()
        facts = session.step_facts()
        assert facts["grad_norm"] == pytest.approx(float(exact), rel=1e-12)
        assert facts["grad_norm"] == pytest.approx(float(theirs), rel=1e-5)
        assert facts["clip_factor"] == pytest.approx(0.05 / (float(exact) + 1e-6), rel=1e-12)
        session.close()


def test_gradients_edited_or_replaced_before_step_are_the_ones_used(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for batch in batches(4):
        for model, optimizer in ((ours, session.optimizer), (theirs, reference)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            first, *_, last = model.parameters()
            first.grad.mul_(-0.5)
            last.grad = torch.ones_like(last)
            optimizer.step()
    session.flush()
    assert_close(ours, theirs)


def test_a_discarded_backward_leaves_no_trace(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for i, batch in enumerate(batches(6)):
        if i % 2:
            loss_of(ours, batch).backward()
            ours.zero_grad(set_to_none=i % 4 == 1)
        for model, optimizer in ((ours, session.optimizer), (theirs, reference)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    session.flush()
    assert_close(ours, theirs)


def test_unused_parameters_are_skipped_and_their_steps_do_not_count(tiered: Callable[..., Session]) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(12, 3), nn.Linear(12, 3)

        def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
            return self.b(x) if use_b else self.a(x)

    ours, theirs = Branching(), Branching()
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(batches(9)):
        for model, optimizer in ((ours, session.optimizer), (theirs, reference)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x, i % 3 == 2), y).backward()
            optimizer.step()
    session.flush()
    assert_close(ours, theirs)
    steps = [float(entry["step"]) for entry in session.optimizer.state_dict()["state"].values()]
    assert steps == [float(entry["step"]) for entry in reference.state_dict()["state"].values()] == [6, 6, 3, 3]


def test_grad_scaler_unscales_and_skips_as_with_torch(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for i, batch in enumerate(batches(6)):
        for model, optimizer, scaler in zip((ours, theirs), (session.optimizer, reference), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if i == 3:
                next(model.parameters()).grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    session.flush()
    assert_close(ours, theirs)


def test_an_average_of_the_weights_sees_every_step(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    averages = [
        torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for m in (net(), net())
    ]
    for batch in batches(5):
        for model, optimizer, average in zip((ours, theirs), (session.optimizer, reference), averages, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if optimizer is session.optimizer:
                session.flush()  # what reads weights outside a forward says so; a no-op with overlap = step
            average.update_parameters(model)
    assert_close(averages[0].module, averages[1].module)


def test_weights_edited_in_place_are_the_ones_trained_on(tiered: Callable[..., Session]) -> None:
    ours, theirs = net(), net()
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for i, batch in enumerate(batches(6)):
        for model, optimizer in ((ours, session.optimizer), (theirs, reference)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            session.flush()
            if i == 2:
                model.load_state_dict(net(seed=9).state_dict())
            if i == 4:
                next(model.parameters()).data = torch.full((33, 12), 0.05)
    session.flush()
    assert_close(ours, theirs)


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_weights_edited_through_data_are_trained_on_with_either_master(tmp_path: Path, master: str) -> None:
    model = net().to(torch.bfloat16)
    form = StateFormat(master=master)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session = attach(model, optimizer=optimizer, plan=plan("disk", state_format=form), directory=tmp_path / "state")
    for batch in batches(3):
        session.optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0].bfloat16()).float(), batch[1]).backward()
        session.optimizer.step()
    edited = [p.data.mul_(1.5).clone() for p in model.parameters()]
    session.optimizer.step()
    for before, after in zip(edited, model.parameters(), strict=True):
        assert torch.allclose(before.float(), after.float(), atol=2e-3, rtol=2**-7)
    session.close()


def test_a_graph_from_before_a_step_raises_in_backward(tiered: Callable[..., Session]) -> None:
    model = net()
    session = tiered(model, torch.optim.AdamW(model.parameters()))
    batch = batches(1)[0]
    stale = loss_of(model, batch)
    loss_of(model, batch).backward()
    session.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_retain_graph_adds_the_gradient_twice(tiered: Callable[..., Session]) -> None:
    model, other = net(), net()
    tiered(model, torch.optim.AdamW(model.parameters()))
    for m in (model, other):
        loss = loss_of(m, batches(1)[0])
        loss.backward(retain_graph=True)
        loss.backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_loader_with_two_workers_trains_and_its_workers_hold_none_of_the_pool(tiered: Callable[..., Session]) -> None:
    model, other = net(), net()
    session = tiered(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    reference = torch.optim.AdamW(other.parameters(), lr=1e-2)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(4), strict=True)))
    for batch in DataLoader(data, batch_size=8, num_workers=2):
        for m, optimizer in ((model, session.optimizer), (other, reference)):
            optimizer.zero_grad()
            loss_of(m, batch).backward()
            optimizer.step()
    session.flush()
    assert_close(model, other)


def test_state_goes_to_torch_and_comes_back(tiered: Callable[..., Session]) -> None:
    ours = net()
    session = tiered(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1))
    stream = batches(9)
    for batch in stream[:3]:
        session.optimizer.zero_grad()
        loss_of(ours, batch).backward()
        session.optimizer.step()
    session.flush()
    theirs = copy.deepcopy(nn.Sequential(*net()))
    theirs.load_state_dict(ours.state_dict())
    reference = torch.optim.AdamW(theirs.parameters(), lr=7.0)
    reference.load_state_dict(copy.deepcopy(session.optimizer.state_dict()))
    for batch in stream[3:6]:
        for model, optimizer in ((ours, session.optimizer), (theirs, reference)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    session.flush()
    assert_close(ours, theirs)
    # Back from torch into a session that is somewhere else.
    session.optimizer.load_state_dict(reference.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for batch in stream[6:]:
        for model, optimizer in ((ours, session.optimizer), (theirs, reference)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    session.flush()
    assert_close(ours, theirs)


def test_a_group_added_later_and_a_layer_unfrozen_later_are_trained(tiered: Callable[..., Session]) -> None:
    models = [net(), net()]
    for model in models:
        model[2].requires_grad_(False)
    reference = torch.optim.AdamW([{"params": list(models[1][0].parameters())}], lr=1e-2)
    start = torch.optim.AdamW([{"params": list(models[0][0].parameters())}], lr=1e-2)
    session = tiered(models[0], start)
    moments = session.pool.held_nbytes_by_class()
    optimizers = [session.optimizer, reference]
    for i, batch in enumerate(batches(9)):
        for model, optimizer in zip(models, optimizers, strict=True):
            if i == 3:
                optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 2e-2})
            if i == 6:
                model[2].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[2].parameters()), "weight_decay": 0.3})
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    session.flush()
    assert_close(*models)
    assert len(session.optimizer.param_groups) == 3
    assert session.pool.held_nbytes_by_class()["weights"] > moments["weights"]


def test_a_parameter_in_a_group_from_the_start_can_be_unfrozen(tiered: Callable[..., Session]) -> None:
    models = [net(), net()]
    for model in models:
        model[2].requires_grad_(False)
    session = tiered(models[0], torch.optim.AdamW(models[0].parameters(), lr=1e-2))
    reference = torch.optim.AdamW(models[1].parameters(), lr=1e-2)
    for i, batch in enumerate(batches(6)):
        for model, optimizer in zip(models, (session.optimizer, reference), strict=True):
            model[2].requires_grad_(i >= 3)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    session.flush()
    assert_close(*models)


def test_frozen_parameters_hold_no_gradient_and_no_state() -> None:
    model = net()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = session.pool.held_nbytes_by_class()
    pages = 3 * 4096 * 4  # each allocation is rounded up to blocks and pages
    assert held["gradients"] <= trained * 4 + 2048 * 4 * 2 + pages
    assert held["moments"] <= trained * 8 + 2048 * 8 * 2 + pages
    session.close()


def test_tied_weights_are_one_slot_and_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    with torch.device("meta"):
        empty = Tied()
    empty.head.weight = empty.embed.weight
    session = attach(
        empty,
        optimizer=__import__("overspill.job", fromlist=["OptimizerConfig"]).OptimizerConfig(),
        plan=plan("disk"),
        directory=tmp_path / "state",
    )
    assert empty.head.weight is empty.embed.weight
    nn.init.normal_(empty.embed.weight)
    assert sum(len(block.parameters) for block in session.blocks) == 1
    before = empty.head.weight.clone()
    empty(torch.arange(10)).logsumexp(-1).sum().backward()
    session.optimizer.step()
    session.flush()
    assert not torch.equal(before, empty.head.weight)
    assert empty.head.weight is empty.embed.weight
    session.close()


def test_a_script_that_ends_without_flush_still_finishes_its_last_update(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, torch
        sys.path.insert(0, sys.argv[1])
        from test_like_torch import batches, loss_of, net, plan
        from overspill import attach
        from overspill.plan import Durability, Overlap
        model = net()
        settings = plan("disk", overlap=Overlap.FORWARD, durability=Durability(every_steps=1))
        session = attach(
            model, optimizer=torch.optim.AdamW(model.parameters()), plan=settings, directory=sys.argv[2]
        )
        for batch in batches(3):
            loss_of(model, batch).backward()
            session.optimizer.step()
        """
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = net()
    session = attach(
        model,
        optimizer=torch.optim.AdamW(model.parameters()),
        plan=plan("disk"),
        directory=tmp_path / "state",
        resume=True,
    )
    assert session.step == session.committed_step == 3
    session.close()


def test_options_without_an_exact_kernel_are_refused() -> None:
    model = net()
    with pytest.raises(OverspillError, match=r"OVS207.*amsgrad"):
        attach(model, optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True), plan=plan())
    with pytest.raises(OverspillError, match=r"OVS207.*Adagrad"):
        attach(model, optimizer=torch.optim.Adagrad(model.parameters()), plan=plan())
    half = net().half()
    with pytest.raises(OverspillError, match=r"OVS206.*float16"):
        attach(half, optimizer=torch.optim.AdamW(half.parameters()), plan=plan())


def test_a_model_spread_by_device_map_is_refused_with_the_recipe() -> None:
    model = net()
    model.hf_device_map = {"0": 0, "2": "cpu"}  # type: ignore[assignment]
    with pytest.raises(OverspillError, match=r"OVS504.*device_map.*Load the model without"):
        attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan())
