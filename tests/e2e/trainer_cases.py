"""A Trainer run as a user has it, with torch's optimizer or a tiered one: what the tests of the Trainer compare.

The Trainer is transformers' own. Only its arguments, the model and ``optimizers=`` are given here; losses and gradient
norms are taken as it logs them, in full precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from overspill import Session, attach
from overspill.plan import Overlap, Placement, Plan
from overspill.units import MiB

SEQ_LEN = 24
VOCAB = 96
PLACEMENTS = ("host", "disk")


class Sentences(Dataset):  # type: ignore[type-arg]
    """Rows with a pattern that can be learnt."""

    def __init__(self, count: int = 64, seed: int = 7) -> None:
        generator = np.random.default_rng(seed)
        starts = generator.integers(0, VOCAB, count)
        strides = generator.integers(1, 4, count)
        self.rows = torch.tensor((starts[:, None] + strides[:, None] * np.arange(SEQ_LEN)) % VOCAB)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_model(dtype: torch.dtype = torch.float32, *, dropout: float = 0.1, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make_plan(placement: str, overlap: Overlap = Overlap.STEP, **changes: Any) -> Plan:
    share = {"host": 1.0, "disk": 0.0, "mixed": 0.4}[placement]
    settings: dict[str, Any] = {
        "memory_nbytes": 8 * MiB,
        "optimizer_state": Placement(host=share, disk=1 - share),
        "overlap": overlap,
        "chunk_numel": 2048,
        "staging_nbytes": 3 * 2048 * 12,
    }
    return Plan(**(settings | changes))


def make_arguments(directory: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(directory),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 11,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(settings | changes))


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Two groups with and without weight decay, as the Trainer makes them."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=5e-3
    )


@contextlib.contextmanager
def tiered(model: torch.nn.Module, plan: Plan, directory: Path, **options: Any) -> Iterator[Session]:
    with attach(model, optimizer=make_optimizer(model), plan=plan, directory=directory, **options) as session:
        yield session


def make_trainer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path, **changes: Any) -> Trainer:
    callbacks = changes.pop("callbacks", None)
    return Trainer(
        model=model,
        args=make_arguments(directory, **changes),
        train_dataset=Sentences(),
        eval_dataset=Sentences(12, seed=8),
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )


def logged(trainer: Trainer, key: str) -> list[float]:
    return [float(row[key]) for row in trainer.state.log_history if key in row]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
