"""A small model trained over a session in this process, for tests of what happens around the steps.

The batch and its order come from the step's number alone, so that a run can be cut anywhere; dropout draws from
torch's generator, which the session's commits keep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from overspill import attach
from overspill.plan import Durability, Placement, Plan
from overspill.train import Session
from overspill.units import MiB

VOCAB = 96


class SmallModel(nn.Module):
    """Embedding, layers with dropout and norms, tied head; odd sizes."""

    def __init__(self, width: int = 24, layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        inner = width + width // 2 + 1
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, width)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make_model(**changes: Any) -> SmallModel:
    torch.manual_seed(0)
    return SmallModel(**changes)


def make_plan(placement: str = "disk", **changes: Any) -> Plan:
    host = {"host": 1.0, "disk": 0.0, "mixed": 0.4}[placement]
    settings: dict[str, Any] = {
        "memory_nbytes": 16 * MiB,
        "optimizer_state": Placement(host=host, disk=1 - host),
        "durability": Durability(every_steps=1),
        "chunk_numel": 2048,
        "staging_nbytes": 3 * 2048 * 12,
        "max_grad_norm": 1.0,
        "keep_last": 2,
    }
    return Plan(**(settings | changes))


def open_session(model: nn.Module, directory: Path | None, plan: Plan, *, resume: bool | str = False) -> Session:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    session = attach(model, optimizer=optimizer, plan=plan, directory=directory, resume=resume)
    if session.restored is None:
        torch.manual_seed(2)
    return session


def one_step(session: Session, model: nn.Module) -> float:
    """The session's next step; returns its loss."""
    generator = torch.Generator().manual_seed(session.step)
    ids = torch.randint(0, VOCAB, (2, 17), generator=generator)
    session.optimizer.zero_grad()
    logits = model(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    session.optimizer.step()
    session.step_boundary()
    return loss.item()


def train(session: Session, model: nn.Module, until: int) -> list[float]:
    """Losses of the steps up to ``until``, which are finished and written on return."""
    losses = [one_step(session, model) for _ in range(session.step, until)]
    session.flush()
    return losses


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def undisturbed(steps: int, **changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run with all state in memory and no store."""
    model = make_model(**changes)
    plan = make_plan("host", memory_nbytes=512 * MiB, durability=Durability())
    with open_session(model, None, plan) as session:
        losses = train(session, model, steps)
        return losses, weights_of(model)
