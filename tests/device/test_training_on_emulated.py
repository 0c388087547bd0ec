"""Training through a session with the model on an accelerator: the CPU run's numbers, wherever the state lives.

The link is slow in both directions and computing takes time, so that every wait which the session needs is needed
here; the last tests leave out one wait at a time and see that it shows.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from overspill import attach
from overspill.plan import Durability, Overlap, Placement, Plan
from overspill.train.transfer import DeviceLink
from overspill.units import MiB

VOCAB = 96
STEPS = 6
CHUNK_NUMEL = 2048

Run = tuple[list[float], dict[str, torch.Tensor]]


def make_plan(placement: str, **changes: Any) -> Plan:
    host = {"host": 1.0, "disk": 0.0, "mixed": 0.4}[placement]
    settings: dict[str, Any] = {
        "memory_nbytes": 16 * MiB,
        "optimizer_state": Placement(host=host, disk=1 - host),
        "chunk_numel": CHUNK_NUMEL,
        "staging_nbytes": 3 * CHUNK_NUMEL * 12,
        "max_grad_norm": 0.5,
    }
    return Plan(**(settings | changes))


def make_model(device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).to(device).train()


def batch(step: int, device: str) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(step)).to(device)


def train(
    directory: Path,
    plan: Plan,
    device: str,
    *,
    last: int = STEPS,
    resume: bool = False,
    observe: Callable[[Any], None] = lambda session: None,
) -> Run:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    torch.manual_seed(2)
    with attach(model, optimizer=optimizer, plan=plan, directory=directory, resume=resume) as session:
        scheduler = torch.optim.lr_scheduler.LinearLR(session.optimizer, 0.5, 1.0, total_iters=4)
        session.track(scheduler=scheduler)
        for step in range(session.step, last):
            ids = batch(step, device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            session.optimizer.step()
            scheduler.step()
            session.optimizer.zero_grad()
            session.step_boundary()
            losses.append(loss.item())
            observe(session)
    return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}


def assert_same(got: Run, expected: Run) -> None:
    assert got[0] == expected[0]
    for name, weight in expected[1].items():
        assert torch.equal(got[1][name], weight), name


def is_same(got: Run, expected: Run) -> bool:
    return got[0] == expected[0] and all(torch.equal(got[1][name], weight) for name, weight in expected[1].items())


def make_slow(emulated: ModuleType) -> None:
    emulated.set_link(h2d_bytes_per_s=5e6, d2h_bytes_per_s=5e6)
    emulated.set_compute_delay(seconds_per_op=2e-5)
    emulated.poison_freed(True)
    emulated.poison_fresh(True)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("cpu"), make_plan("host"), "cpu")
    assert run[0][-1] < run[0][0], "the model did not learn"
    return run


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("placement", ["host", "disk", "mixed"])
def test_losses_and_weights_equal_the_cpus_wherever_state_lives(
    emulated: ModuleType, on_cpu: Run, tmp_path: Path, placement: str, overlap: Overlap
) -> None:
    make_slow(emulated)
    durability = Durability(every_steps=2 if placement == "mixed" else 0)
    plan = make_plan(placement, overlap=overlap, durability=durability)
    assert_same(train(tmp_path, plan, "emulated"), on_cpu)


def test_a_run_that_stops_goes_on_with_the_devices_weights_and_random_numbers(
    emulated: ModuleType, on_cpu: Run, tmp_path: Path
) -> None:
    make_slow(emulated)
    plan = make_plan("mixed", overlap=Overlap.FORWARD, durability=Durability(every_steps=1))
    first, _ = train(tmp_path, plan, "emulated", last=3)
    torch.randn(7, device="emulated")
    rest, weights = train(tmp_path, plan, "emulated", resume=True)
    assert_same((first + rest, weights), on_cpu)


def test_optimizer_state_takes_no_device_memory(emulated: ModuleType, tmp_path: Path) -> None:
    gc.collect()  # models of earlier tests
    before = torch.accelerator.memory_allocated()
    taken: list[int] = []

    def observe(session: Any) -> None:
        session.flush()
        taken.append(torch.accelerator.memory_allocated() - before)

    train(tmp_path, make_plan("disk"), "emulated", last=4, observe=observe)
    model = make_model("cpu")
    weights_nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    moments_nbytes = sum(p.numel() * 8 for p in model.parameters())
    assert max(taken) == taken[0]  # nothing is added from step to step
    assert weights_nbytes < taken[0] < weights_nbytes + moments_nbytes / 4


def test_gradients_go_down_and_weights_come_up_once_a_step(emulated: ModuleType, tmp_path: Path) -> None:
    facts: list[dict[str, Any]] = []
    train(tmp_path, make_plan("disk"), "emulated", observe=lambda session: facts.append(session.step_facts()))
    nbytes = sum(p.numel() * p.element_size() for p in make_model("cpu").parameters())
    for fact in facts[:-1]:
        assert fact["read_nbytes"]["device"] == nbytes
        assert fact["written_nbytes"]["device"] == nbytes


def test_no_copy_of_the_sessions_makes_the_host_wait(emulated: ModuleType, tmp_path: Path) -> None:
    waited: list[int] = []
    train(
        tmp_path,
        make_plan("disk"),
        "emulated",
        observe=lambda session: waited.append(emulated.stats().synchronous_copies),
    )
    # The batch up, the loss down, and transformers' own look at whether the batch is packed; none is the session's.
    assert {after - before for before, after in itertools.pairwise(waited)} == {3}


@pytest.mark.parametrize("forgotten", ["begin", "wait_fetched", "order_before_compute"])
def test_a_wait_left_out_of_the_session_shows(
    emulated: ModuleType, on_cpu: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    make_slow(emulated)
    monkeypatch.setattr(DeviceLink, forgotten, lambda *_: None)
    if forgotten == "wait_fetched":
        monkeypatch.setattr(DeviceLink, "wait_all_fetched", lambda *_: None)
    try:
        run = train(tmp_path, make_plan("host", overlap=Overlap.FORWARD, max_grad_norm=None), "emulated")
        torch.accelerator.synchronize()
    except RuntimeError:
        return  # noticed as an error of the device
    reference = train(tmp_path / "cpu", make_plan("host", max_grad_norm=None), "cpu")
    assert not is_same(run, reference)


def test_when_pinning_fails_training_goes_on_in_pageable_memory_and_says_so_once(
    emulated: ModuleType, on_cpu: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros
    pinned: list[int] = []

    def with_a_limit(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            if len(pinned) == 2:
                raise RuntimeError("host memory cannot be pinned: the limit is reached")
            pinned.append(1)
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", with_a_limit)
    notes: list[str] = []
    run = train(tmp_path, make_plan("disk"), "emulated", observe=lambda session: notes.extend(session.notes))
    assert len(pinned) == 2
    assert len({note for note in notes if "pinned host memory is reached" in note}) == 1
    assert_same(run, on_cpu)
