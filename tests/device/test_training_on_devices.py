"""Training through a session, on each device: the same numbers wherever the state lives.

On the emulated accelerator the link is slow in both directions and computing takes time, so that every wait which the
session needs is needed here, and its numbers are the CPU's; tests leave out one wait at a time and see that it shows.
Another accelerator rounds as it does, so there the run with all state in host memory is what others must equal.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overspill import attach
from overspill.errors import OverspillError
from overspill.plan import Durability, Overlap, Placement, Plan
from overspill.train.transfer import DeviceLink
from overspill.units import MiB
from testing.devices import make_hostile
from testing.emulated_accelerator import Delays
from testing.emulated_accelerator.schedules import delay_schedules

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


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The run that runs on a device must equal: the CPU's, but for devices with arithmetic of their own."""
    known: dict[str, Run] = {}

    def of(device: str) -> Run:
        at = "cpu" if device == "emulated" else device
        if at not in known:
            known[at] = train(tmp_path_factory.mktemp(at), make_plan("host"), at)
            assert known[at][0][-1] < known[at][0][0], "the model did not learn"
        return known[at]

    return of


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    if torch.cuda.is_available():  # where some kernels add in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("placement", ["host", "disk", "mixed"])
def test_losses_and_weights_are_the_same_wherever_state_lives(
    device: str, reference: Callable[[str], Run], tmp_path: Path, placement: str, overlap: Overlap
) -> None:
    make_hostile(device)
    durability = Durability(every_steps=2 if placement == "mixed" else 0)
    plan = make_plan(placement, overlap=overlap, durability=durability)
    assert_same(train(tmp_path, plan, device), reference(device))


def check_under_delays(examples: int, emulated: ModuleType, directory: Path) -> None:
    numbers = itertools.count()
    expected = train(directory / "cpu", make_plan("host"), "cpu", last=3)

    @given(
        delays=delay_schedules(most_seconds=0.004, most_compute_seconds=0.0004),
        placement=st.sampled_from(["host", "disk", "mixed"]),
        overlap=st.sampled_from(list(Overlap)),
    )
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def check(delays: Delays, placement: str, overlap: Overlap) -> None:
        emulated.reset()
        make_hostile("emulated", delays)
        plan = make_plan(placement, overlap=overlap)
        assert_same(train(directory / str(next(numbers)), plan, "emulated", last=3), expected)

    check()


def test_no_schedule_of_delays_changes_a_run(emulated: ModuleType, tmp_path: Path) -> None:
    check_under_delays(5, emulated, tmp_path)


@pytest.mark.slow
def test_none_of_two_hundred_schedules_of_delays_changes_a_run(emulated: ModuleType, tmp_path: Path) -> None:
    check_under_delays(200, emulated, tmp_path)


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("what", ["compute", "h2d", "d2h", "allocation"])
def test_a_device_that_fails_ends_the_run_with_its_error_and_a_resume_gives_the_same_numbers(
    emulated: ModuleType, reference: Callable[[str], Run], tmp_path: Path, what: str, overlap: Overlap
) -> None:
    make_hostile("emulated")
    plan = make_plan("mixed", overlap=overlap, durability=Durability(every_steps=1))
    steps: list[int] = []

    def pull_the_plug(session: Any) -> None:
        steps.append(session.step)
        if session.step == 3:
            emulated.fail(what, after=5, fatal=what != "allocation")

    with pytest.raises((torch.AcceleratorError, torch.OutOfMemoryError, OverspillError), match="Emulated accelerator"):
        train(tmp_path, plan, "emulated", observe=pull_the_plug)
    assert steps == [1, 2, 3]
    emulated.reset()
    losses, weights = train(tmp_path, plan, "emulated", resume=True)
    whole = reference("emulated")
    assert_same((whole[0][: STEPS - len(losses)] + losses, weights), whole)


def test_a_run_that_stops_goes_on_with_the_devices_weights_and_random_numbers(
    device: str, reference: Callable[[str], Run], tmp_path: Path
) -> None:
    make_hostile(device)
    plan = make_plan("mixed", overlap=Overlap.FORWARD, durability=Durability(every_steps=1))
    first, _ = train(tmp_path, plan, device, last=3)
    torch.randn(7, device=device)
    rest, weights = train(tmp_path, plan, device, resume=True)
    assert_same((first + rest, weights), reference(device))


def test_optimizer_state_takes_no_device_memory(accelerator: str, tmp_path: Path) -> None:
    gc.collect()  # models of earlier tests
    before = torch.accelerator.memory_allocated()
    taken: list[int] = []

    def observe(session: Any) -> None:
        session.flush()
        taken.append(torch.accelerator.memory_allocated() - before)

    train(tmp_path, make_plan("disk"), accelerator, last=4, observe=observe)
    model = make_model("cpu")
    weights_nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    moments_nbytes = sum(p.numel() * 8 for p in model.parameters())
    assert max(taken) == taken[0]  # nothing is added from step to step
    assert weights_nbytes < taken[0] < weights_nbytes + moments_nbytes / 4


def test_gradients_go_down_and_weights_come_up_once_a_step(accelerator: str, tmp_path: Path) -> None:
    facts: list[dict[str, Any]] = []
    train(tmp_path, make_plan("disk"), accelerator, observe=lambda session: facts.append(session.step_facts()))
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
    emulated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    make_hostile("emulated")
    monkeypatch.setattr(DeviceLink, forgotten, lambda *_: None)
    if forgotten == "wait_fetched":
        monkeypatch.setattr(DeviceLink, "wait_all_fetched", lambda *_: None)
    try:
        run = train(tmp_path, make_plan("host", overlap=Overlap.FORWARD, max_grad_norm=None), "emulated")
        torch.accelerator.synchronize()
    except RuntimeError:
        return  # noticed as an error of the device
    assert not is_same(run, train(tmp_path / "cpu", make_plan("host", max_grad_norm=None), "cpu"))


def test_when_pinning_fails_training_goes_on_in_pageable_memory_and_says_so_once(
    emulated: ModuleType, reference: Callable[[str], Run], tmp_path: Path
) -> None:
    emulated.fail("pinning", after=2)
    notes: list[str] = []
    run = train(tmp_path, make_plan("disk"), "emulated", observe=lambda session: notes.extend(session.notes))
    assert len({note for note in notes if "pinned host memory is reached" in note}) == 1
    assert_same(run, reference("emulated"))
