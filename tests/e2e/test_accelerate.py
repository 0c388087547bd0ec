"""accelerate's own loop over tiered state: prepare, accumulate, clip, mixed precision, save_state and load_state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.utils.data import DataLoader, Subset
from trainer_cases import Sentences, assert_same_weights, make_model, make_optimizer, make_plan, tiered, weights_of

from overspill import Session
from overspill.plan import Overlap

PLACES = [("host", Overlap.STEP), ("host", Overlap.FORWARD), ("disk", Overlap.STEP), ("disk", Overlap.FORWARD)]
STEPS = 8


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """accelerate keeps its settings in process-wide singletons."""
    yield
    AcceleratorState._reset_state()
    PartialState._reset_state()


class Loop:
    """A user's loop as accelerate's documentation writes it. It knows nothing of sessions."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(5)).tolist()
        loader = DataLoader(Subset(Sentences(64), order), batch_size=2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, *, after: int = 0, steps: int = STEPS) -> None:
        loader = self.accelerator.skip_first_batches(self.loader, 2 * after) if after else self.loader
        for batch in loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if len(self.norms) == steps:
                break


@pytest.fixture(scope="module")
def with_torch() -> Loop:
    model = make_model()
    torch.manual_seed(3)
    loop = Loop(model, make_optimizer(model))
    loop.train()
    return loop


@pytest.mark.parametrize(("place", "overlap"), PLACES)
def test_a_prepared_loop_gives_torchs_losses_and_norms(
    tmp_path: Path, with_torch: Loop, place: str, overlap: Overlap
) -> None:
    model = make_model()
    with tiered(model, make_plan(place, overlap), tmp_path / "state") as session:
        torch.manual_seed(3)
        loop = Loop(model, session.optimizer)
        loop.train()
        assert session.step == STEPS
    assert max(with_torch.norms) > 1, "there was nothing to clip"
    assert len(loop.losses) == 2 * STEPS
    assert loop.losses == pytest.approx(with_torch.losses, abs=1e-6)
    assert loop.norms == pytest.approx(with_torch.norms, rel=1e-5)


def test_mixed_precision_gives_the_same_bits_for_every_placement(tmp_path: Path) -> None:
    runs = []
    for place, overlap in PLACES:
        model = make_model()
        with tiered(model, make_plan(place, overlap), tmp_path / f"{place}{overlap}") as session:
            torch.manual_seed(3)
            loop = Loop(model, session.optimizer, mixed_precision="bf16")
            loop.train()
            session.flush()
            runs.append((loop, weights_of(model)))
    first, weights = runs[0]
    for loop, theirs in runs[1:]:
        assert loop.losses == first.losses
        assert loop.norms == first.norms
        assert_same_weights(theirs, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("place", "overlap"), [PLACES[0], PLACES[3]])
def test_load_state_goes_on_from_save_state_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, place: str, overlap: Overlap
) -> None:
    model = make_model(dtype)
    with tiered(model, make_plan(place, overlap), tmp_path / "whole") as session:
        torch.manual_seed(3)
        whole = Loop(model, session.optimizer)
        whole.train(steps=3)
        whole.accelerator.save_state(str(tmp_path / "saved"))
        whole.train(after=3)
        session.flush()
        weights = weights_of(model)
    model = make_model(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # nothing may come from here
    with tiered(model, make_plan(place, overlap), tmp_path / "again") as session:
        loop = Loop(model, session.optimizer)
        loop.accelerator.load_state(str(tmp_path / "saved"))
        loop.norms += whole.norms[:3]
        loop.train(after=3)
        session.flush()
        assert loop.losses == whole.losses[6:]
        assert loop.norms == whole.norms
        assert_same_weights(weights_of(model), weights)


def test_wrapping_a_resumed_optimizer_checks_its_state_and_writes_nothing(tmp_path: Path) -> None:
    def steps(model: nn.Module, session: Session, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            row = Sentences(4, seed=seed)[0]
            loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step_boundary()
            losses.append(loss.item())
        return losses

    plan = make_plan("disk", Overlap.FORWARD)
    model = make_model(torch.bfloat16)
    with tiered(model, plan, tmp_path / "state") as session:
        steps(model, session, session.optimizer, range(3))
        session.checkpoint("three")
        whole = steps(model, session, session.optimizer, range(3, 6))
    model = make_model(torch.bfloat16)
    with tiered(model, plan, tmp_path / "state", resume="three") as session:
        session.step_facts()
        prepared_model, optimizer = Accelerator(cpu=True).prepare(model, session.optimizer)
        assert session.step_facts()["written_nbytes"]["disk"] == 0
        assert session.step == 3
        assert steps(prepared_model, session, optimizer, range(3, 6)) == whole
