"""The planner: budgets hold, more memory never means more disk, and what is short is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.errors import OverspillError
from overspill.forecast.budget import divide, smallest_budget
from overspill.forecast.core import reserve_of
from overspill.forecast.state import StateBytes, TrainingState, training_state
from overspill.job import Job
from overspill.machine import Disk, Machine
from overspill.model import ModelShape
from overspill.plan import Plan
from overspill.planner import plan
from overspill.units import GiB, MiB

SHAPE = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }
)
MACHINE = Machine(
    memory_nbytes=24 * GiB,
    available_nbytes=20 * GiB,
    memory_bytes_per_s=2e10,
    matmul_flops_per_s=2e11,
    physical_cores=2,
    threads=2,
    disks=(Disk(directory=".", read_bytes_per_s=2e9, write_bytes_per_s=1.5e9, mixed_bytes_per_s=1.6e9),),
)


def job(**wishes: Any) -> Job:
    return Job.read(
        {
            "model": {"path": "m", **wishes.pop("model", {})},
            "data": {"path": "d.txt", "seq_len": wishes.pop("seq_len", 256)},
            "train": {"steps": 10},
            "plan": wishes,
        }
    )


def test_without_a_budget_nine_tenths_of_what_is_free_beside_the_base_is_used() -> None:
    resolved = plan(job(), MACHINE, SHAPE, base_nbytes=300 * MiB)
    assert resolved.memory_nbytes == int(0.9 * (20 * GiB - 300 * MiB))
    assert resolved.optimizer_state.host == 1 and not resolved.uses_disk


def test_a_budget_too_small_for_the_optimizer_state_puts_a_part_of_it_on_disk() -> None:
    resolved = plan(job(memory="1300MiB"), MACHINE, SHAPE, directories=["run/state"])
    assert 0 < resolved.optimizer_state.disk < 1
    assert [str(one) for one in resolved.directories] == ["run/state"]
    assert resolved.staging_nbytes >= 4 * resolved.chunk_numel * 10


def test_a_budget_below_the_smallest_names_the_largest_need_and_the_smallest_budget_that_works() -> None:
    with pytest.raises(OverspillError) as caught:
        plan(job(memory="400MiB"), MACHINE, SHAPE)
    error = caught.value
    assert error.code == "OVS301" and error.field == "plan.memory" and error.value == "400 MiB"
    assert "largest need is" in str(error) and "gradients" in str(error)
    smallest = error.next_step.split('"')[1]
    assert plan(job(memory=smallest), MACHINE, SHAPE).uses_disk
    one_less = f"{int(smallest.removesuffix('MiB')) - 1}MiB"
    with pytest.raises(OverspillError, match="OVS301"):
        plan(job(memory=one_less), MACHINE, SHAPE)


def test_data_workers_that_are_the_largest_need_are_named_with_their_bytes() -> None:
    wishes = job(memory="4GiB")
    many = wishes.model_copy(update={"data": wishes.data.model_copy(update={"num_workers": 1000})})
    with pytest.raises(OverspillError, match=r"OVS301.*largest need is data workers with 15.6[0-9] GiB") as caught:
        plan(many, MACHINE, SHAPE)
    assert "lower data.num_workers: each of the 1000 takes 16.0 MiB" in str(caught.value)
    assert "train.micro_batch" not in str(caught.value)


def test_any_finite_work_at_risk_is_a_number_of_steps() -> None:
    assert plan(job(durability="auto", at_risk=1.7e308), MACHINE, SHAPE).durability.every_steps == 2**53


def test_state_wished_on_the_host_is_not_moved_to_disk_silently() -> None:
    with pytest.raises(OverspillError, match="optimizer state"):
        plan(job(memory="1GiB", optimizer_state="host"), MACHINE, SHAPE)


def test_a_budget_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(OverspillError) as caught:
        plan(job(memory="21GiB"), MACHINE, SHAPE)
    assert caught.value.code == "OVS302"


def test_sequences_longer_than_the_models_positions_are_refused() -> None:
    with pytest.raises(OverspillError) as caught:
        plan(job(seq_len=4096), MACHINE, SHAPE)
    assert caught.value.code == "OVS205" and caught.value.limit == 2048


def test_state_wished_on_disk_goes_there_though_memory_would_hold_it() -> None:
    resolved = plan(job(memory="8GiB", optimizer_state="disk"), MACHINE, SHAPE)
    assert resolved.optimizer_state.disk == 1


def test_a_wished_share_on_disk_is_kept() -> None:
    resolved = plan(job(memory="8GiB", optimizer_state="mixed", disk_fraction=0.25), MACHINE, SHAPE)
    assert resolved.optimizer_state.disk == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize(("wish", "steps"), [("step", 1), ("checkpoint", 0), (7, 7)])
def test_a_wished_durability_is_kept(wish: object, steps: int) -> None:
    assert plan(job(durability=wish), MACHINE, SHAPE).durability.every_steps == steps


def test_the_work_at_risk_bounds_the_steps_between_commits() -> None:
    short = plan(job(at_risk="1min"), MACHINE, SHAPE).durability.every_steps
    long = plan(job(at_risk="10min"), MACHINE, SHAPE).durability.every_steps
    assert 1 <= short < long


def test_the_jobs_threads_are_also_the_kernels() -> None:
    asked = Job.read({**job().model_dump(), "train": {"steps": 10, "threads": 3}})
    assert plan(asked, MACHINE, SHAPE).kernel_threads == 3
    assert plan(job(), MACHINE, SHAPE).kernel_threads == MACHINE.physical_cores


@pytest.mark.parametrize("wish", [True, False])
def test_a_job_may_ask_for_every_read_to_be_checked(wish: bool) -> None:
    assert plan(job(verify_reads=wish), MACHINE, SHAPE).verify_reads is wish
    assert not plan(job(), MACHINE, SHAPE).verify_reads


def test_directories_share_the_state_by_their_measured_speed() -> None:
    fast, slow = (
        Disk(directory=name, read_bytes_per_s=2e9, write_bytes_per_s=1e9, mixed_bytes_per_s=speed)
        for name, speed in (("/fast", 3e9), ("/slow", 1e9))
    )
    unmeasured = Disk(directory="/slow")
    wishes = job(directories=("/slow", "/fast"))
    for disks, weights in (
        ((fast, slow), (1e9, 3e9)),  # in the order of the directories, not of the machine's disks
        ((fast, unmeasured), ()),  # nothing to compare with: equal shares
        ((fast,), ()),
    ):
        machine = MACHINE.model_copy(update={"disks": disks})
        resolved = plan(wishes, machine, SHAPE)
        assert [str(one) for one in resolved.directories] == ["/slow", "/fast"]
        assert resolved.directory_weights == weights


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, 2.0, 3.0), (float("inf"), 1.0)])
def test_weights_that_do_not_fit_the_directories_are_refused(weights: tuple[float, ...]) -> None:
    fields = {"memory_nbytes": 1 * GiB, "directories": (Path("/a"), Path("/b"))}
    assert Plan.read(fields | {"directory_weights": (1.0, 2.0)}).directory_weights == (1.0, 2.0)
    with pytest.raises(OverspillError, match="directory_weights"):
        Plan.read(fields | {"directory_weights": weights})


def test_where_speeds_are_not_known_every_step_is_made_durable() -> None:
    unknown = Machine(memory_nbytes=24 * GiB, available_nbytes=20 * GiB)
    assert plan(job(), unknown, SHAPE).durability.every_steps == 1


def test_frozen_parameters_hold_no_gradients_and_no_state() -> None:
    everything = training_state(job(), SHAPE)
    frozen = training_state(job(), SHAPE.freeze(["model.layers.*"]))
    layers = sum(p.numel for p in SHAPE.owned if ".layers." in p.name)
    # Blocks are padded to whole sectors; 30 layers of them.
    assert layers <= everything.numel - frozen.numel < layers + 30 * 2048 + 30 * 9 * 64
    assert frozen.weights_nbytes == pytest.approx(everything.weights_nbytes, rel=1e-3)


def test_the_kernels_and_disks_traffic_is_the_table_of_the_theory() -> None:
    bytes_of = {
        "split": training_state(job(), SHAPE).per_element,
        "fp32 master": training_state(job(master="fp32"), SHAPE).per_element,
        "fp32 weights": training_state(job(model={"dtype": "fp32"}), SHAPE).per_element,
    }
    table = {name: (one.optimizer, one.version, one.update) for name, one in bytes_of.items()}
    assert table == {"split": (10, 12, 26), "fp32 master": (12, 14, 28), "fp32 weights": (8, 12, 28)}


states = st.builds(
    TrainingState,
    per_element=st.builds(
        StateBytes,
        weights=st.sampled_from([2, 4]),
        gradients=st.sampled_from([2, 4]),
        master=st.sampled_from([0, 2, 4]),
        moments=st.sampled_from([0, 4, 8]),
    ),
    block_numels=st.lists(st.integers(1, 3000).map(lambda n: n * 2048), max_size=12).map(tuple),
    frozen_nbytes=st.integers(0, 10**6),
)
wishes = st.sampled_from(
    [("auto", None), ("host", None), ("disk", None), ("mixed", None), ("mixed", 0.0), ("mixed", 0.4)]
)


@settings(deadline=None)
@given(states, st.integers(0, 10**9), wishes, st.integers(0, 3 * 10**8))
def test_a_division_never_exceeds_its_budget_and_exists_from_the_smallest_one_on(
    state: TrainingState, reserve: int, wish: tuple[Any, float | None], extra: int
) -> None:
    smallest = smallest_budget(state, reserve, *wish)
    assert divide(state, reserve, smallest - 1, *wish) is None
    division = divide(state, reserve, smallest + extra, *wish)
    assert division is not None
    cached = division.cached_numel * state.per_element.optimizer
    assert division.resident_nbytes + division.staging_nbytes + cached <= smallest + extra
    assert 0 <= division.cached_numel <= division.numel == state.numel
    assert division.chunk_numel % 2048 == 0 and division.chunk_numel >= 2048
    if division.cached_numel < division.numel:
        assert division.staging_nbytes >= division.chunk_numel * state.per_element.optimizer
    if wish[0] == "host":
        assert division.disk_fraction == 0


@settings(deadline=None)
@given(states, st.integers(0, 10**8), wishes, st.integers(0, 2 * 10**8), st.integers(0, 10**7))
def test_more_memory_never_puts_more_on_disk(
    state: TrainingState, reserve: int, wish: tuple[Any, float | None], extra: int, more: int
) -> None:
    smallest = smallest_budget(state, reserve, *wish)
    less = divide(state, reserve, smallest + extra, *wish)
    richer = divide(state, reserve, smallest + extra + more, *wish)
    assert less is not None and richer is not None
    assert richer.disk_fraction <= less.disk_fraction


@settings(deadline=None, max_examples=25)
@given(st.integers(700, 4000))
def test_a_plans_parts_fit_its_budget_and_its_shares_add_up(mebibytes: int) -> None:
    try:
        resolved = plan(job(memory=f"{mebibytes}MiB"), MACHINE, SHAPE)
    except OverspillError as error:
        assert error.code == "OVS301"
        return
    state = training_state(job(), SHAPE)
    placed = resolved.optimizer_state
    assert placed.host + placed.disk == pytest.approx(1, abs=1e-9) and placed.device == 0
    staging = resolved.staging_nbytes if resolved.uses_disk else 0
    cached = placed.host * state.optimizer_nbytes
    held = state.weights_nbytes + state.gradients_nbytes + reserve_of(job(), SHAPE) + staging + cached
    assert held <= resolved.memory_nbytes + state.per_element.optimizer


def test_each_data_worker_has_its_share_of_the_reserve() -> None:
    alone = job()
    two = Job.read({**alone.model_dump(), "data": {**alone.data.model_dump(), "num_workers": 2}})
    assert reserve_of(two, SHAPE) - reserve_of(alone, SHAPE) == 32 * MiB
