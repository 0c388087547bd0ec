"""Placement never changes the numbers: losses and weights are bit-identical wherever state lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from overspill import attach
from overspill.job import OptimizerConfig
from overspill.plan import Durability, Overlap, Placement, Plan, StateFormat
from overspill.units import MiB

STEPS = 20
VOCAB = 96


class TinyModel(nn.Module):
    """A small language model with what makes training awkward: dropout, tied weights, norms, a bias, odd shapes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 37), nn.GELU(), nn.Dropout(0.1), nn.Linear(37, 24))
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def make_plan(placement: str, **changes: Any) -> Plan:
    share = {"host": 1.0, "disk": 0.0, "mixed": 0.4}[placement]
    settings: dict[str, Any] = {
        "memory_nbytes": 8 * MiB,
        "optimizer_state": Placement(host=share, disk=1 - share),
        "chunk_numel": 2048,
        "staging_nbytes": 3 * 2048 * 12,
    }
    return Plan(**(settings | changes))


def train(
    directory: Path,
    plan: Plan,
    *,
    dtype: torch.dtype = torch.bfloat16,
    accumulation: int = 1,
    steps: int = STEPS,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = TinyModel(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    with attach(model, optimizer=optimizer, plan=plan, directory=directory / "state") as session:
        data = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        for _ in range(steps):
            total = 0.0
            session.optimizer.zero_grad()
            for _ in range(accumulation):
                ids = torch.randint(0, VOCAB, (2, 17), generator=data)
                logits = model(ids[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) / accumulation
                loss.backward()
                total += loss.item()
            session.optimizer.step()
            session.step_boundary()
            losses.append(total)
        session.flush()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, weights


def assert_same(a: tuple[list[float], dict[str, torch.Tensor]], b: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    assert a[0] == b[0]
    for name, weight in a[1].items():
        assert torch.equal(weight, b[1][name]), name


@pytest.mark.parametrize("clip", [None, 0.5], ids=["no clip", "clip"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "forms"),
    [
        (torch.bfloat16, ("split", "fp32")),  # the two forms of a master agree with each other too
        (torch.float32, ("split",)),  # fp32 weights are their own master, whatever form is asked for
    ],
    ids=["bf16", "fp32"],
)
def test_twenty_steps_are_bit_identical_over_placements_and_overlaps(
    tmp_path: Path, clip: float | None, accumulation: int, dtype: torch.dtype, forms: tuple[str, ...]
) -> None:
    reference = None
    for form in forms:
        for placement in ("host", "disk", "mixed"):
            for overlap in Overlap:
                plan = make_plan(
                    placement,
                    overlap=overlap,
                    max_grad_norm=clip,
                    state_format=StateFormat(master=form),
                    durability=Durability(every_steps=7 if placement == "mixed" else 0),
                )
                place = tmp_path / f"{form}-{placement}-{overlap}"
                run = train(place, plan, dtype=dtype, accumulation=accumulation)
                reference = reference or run
                assert_same(run, reference)
    assert reference is not None
    assert reference[0][-1] < reference[0][0], "the model did not learn"


class Borrowing(nn.Module):
    """Uses weights of modules that it does not call: one of a child's child, one tied head, attention's projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 48), "down": nn.Linear(48, 32)}) for _ in range(4)
        )
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in reversed(self.layers):  # not the order of the names
            hidden = nn.functional.linear(x, layer["up"].weight, layer["up"].bias).relu()
            x = x + nn.functional.linear(hidden, layer["down"].weight, layer["down"].bias)
        x, _ = self.attention(x, x, x)
        return nn.functional.linear(x * self.scale, self.embed.weight)


def _run_with_probe(model: nn.Module, ids: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
    return model(ids) + probe


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
def test_weights_used_outside_their_own_module_are_updated_in_time(tmp_path: Path, checkpointing: str) -> None:
    results = []
    for overlap in Overlap:
        torch.manual_seed(0)
        model = Borrowing()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = make_plan("disk", overlap=overlap)
        with attach(model, optimizer=optimizer, plan=plan, directory=tmp_path / str(overlap)) as session:
            data = torch.Generator().manual_seed(1)
            losses = []
            for _ in range(8):
                ids = torch.randint(0, VOCAB, (2, 9), generator=data)
                session.optimizer.zero_grad()
                if checkpointing == "none":
                    logits = model(ids)
                else:
                    # A reentrant checkpoint needs an input that requires a gradient; weights alone do not count.
                    probe = torch.zeros((), requires_grad=True)
                    logits = torch.utils.checkpoint.checkpoint(
                        _run_with_probe, model, ids, probe, use_reentrant=checkpointing == "reentrant"
                    )
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
                loss.backward()
                session.optimizer.step()
                losses.append(loss.item())
            session.flush()
            results.append((losses, {name: p.detach().clone() for name, p in model.named_parameters()}))
    assert_same(*results)


@pytest.mark.parametrize("kind", ["adam", "sgd", "lion"])
def test_other_optimizers_are_bit_identical_over_placements_too(tmp_path: Path, kind: str) -> None:
    options = {"momentum": 0.9} if kind == "sgd" else {"betas": (0.9, 0.99)}
    config = OptimizerConfig.read({"name": kind, "lr": 1e-3, "weight_decay": 0.1, **options})
    results = []
    for placement in ("host", "disk", "mixed"):
        torch.manual_seed(0)
        model = TinyModel(torch.bfloat16)
        plan = make_plan(placement, overlap=Overlap.FORWARD, max_grad_norm=1.0)
        with attach(model, optimizer=config, plan=plan, directory=tmp_path / placement) as session:
            assert len(session.optimizer.param_groups) == 2
            for _ in range(6):
                session.optimizer.zero_grad()
                model(torch.randint(0, VOCAB, (2, 9))).float().square().mean().backward()
                session.optimizer.step()
            session.flush()
            results.append(([], {name: p.detach().clone() for name, p in model.named_parameters()}))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_accumulating_in_fp32_is_bit_identical_over_placements_and_nearer_to_the_truth(tmp_path: Path) -> None:
    runs = [
        train(tmp_path / f"{placement}-{grad_dtype}", make_plan(placement, grad_dtype=grad_dtype), accumulation=4)
        for grad_dtype in ("fp32", "param")
        for placement in ("host", "disk")
    ]
    assert_same(runs[0], runs[1])
    assert_same(runs[2], runs[3])
    assert runs[0][0] != runs[2][0], "fp32 gradients were asked for and made no difference"
