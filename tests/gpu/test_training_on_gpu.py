"""Training with the model on a real accelerator: the same numbers wherever the optimizer state lives.

Needs a device that torch.accelerator finds; `make test-gpu` runs it there, elsewhere it is skipped with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from overspill import attach
from overspill.plan import Durability, Overlap, Placement, Plan
from overspill.units import MiB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA or ROCm device"),
]

VOCAB = 512


def train(directory: Path, share: float, overlap: Overlap, **changes: Any) -> tuple[list[float], list[torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).to("cuda").train()
    plan = Plan(
        memory_nbytes=512 * MiB,
        optimizer_state=Placement(host=share, disk=1 - share),
        overlap=overlap,
        chunk_numel=1 << 18,
        staging_nbytes=16 * MiB,
        max_grad_norm=1.0,
        **changes,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(1)
    with attach(model, optimizer=optimizer, plan=plan, directory=directory) as session:
        data = torch.Generator().manual_seed(2)
        for _ in range(10):
            ids = torch.randint(0, VOCAB, (4, 64), generator=data).to("cuda")
            session.optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            session.optimizer.step()
            session.step_boundary()
            losses.append(loss.item())
        session.flush()
        torch.accelerator.synchronize()
        facts = session.step_facts()
        assert facts["read_nbytes"]["device"] > 0, "no gradient came down from the device"
        return losses, [p.detach().cpu() for p in model.parameters()]


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_ten_steps_are_bit_identical_over_placements_and_overlaps(tmp_path: Path) -> None:
    runs = [train(tmp_path / f"{share}-{overlap}", share, overlap) for share in (1.0, 0.0, 0.5) for overlap in Overlap]
    assert runs[0][0][-1] < runs[0][0][0], "the model did not learn"
    for losses, weights in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(a, b) for a, b in zip(weights, runs[0][1], strict=True))


def test_commits_in_between_change_nothing(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", 0.0, Overlap.FORWARD)
    durable = train(tmp_path / "durable", 0.0, Overlap.FORWARD, durability=Durability(every_steps=3))
    assert plain[0] == durable[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], durable[1], strict=True))
