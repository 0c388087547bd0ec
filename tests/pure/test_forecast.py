"""The forecast: its parts agree with each other, with the plan, and with the schedule that a run executes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import overspill
from overspill.cli.forecast import print_forecast
from overspill.cli.train import _busy_line
from overspill.errors import OverspillError
from overspill.forecast import Batch, Forecast, activation_phases, forecast
from overspill.forecast.activations import saved_bytes_per_token
from overspill.forecast.simulate import Rates, simulate_step_seconds
from overspill.job import Job
from overspill.machine import Disk, Machine
from overspill.model import ModelShape
from overspill.plan import Overlap
from overspill.planner import plan
from overspill.schedule import StepPlan, plan_chunks
from overspill.units import GiB, MiB

CONFIG: dict[str, Any] = {
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
SHAPE = ModelShape.from_config(CONFIG)
MACHINE = Machine(
    memory_nbytes=24 * GiB,
    available_nbytes=20 * GiB,
    memory_bytes_per_s=2e10,
    matmul_flops_per_s=2e11,
    threads=2,
    disks=(Disk(directory=".", read_bytes_per_s=2e9, write_bytes_per_s=1.5e9, mixed_bytes_per_s=1.6e9),),
)


def job(seq_len: int = 256, **wishes: Any) -> Job:
    return Job.read(
        {
            "model": {"path": "m", "gradient_checkpointing": wishes.pop("checkpointing", False)},
            "data": {"path": "d.txt", "seq_len": seq_len},
            "train": {"steps": 10, "micro_batch": wishes.pop("micro_batch", 1)},
            "plan": wishes,
        }
    )


@pytest.mark.parametrize(
    "imports",
    [
        "import overspill; overspill.forecast",
        "import overspill.forecast",
        "import overspill; overspill.forecast; import overspill.forecast.core",
        "from overspill import forecast; import overspill",
        "import overspill.planner; import overspill",
        "from overspill.forecast import Forecast; import overspill",
    ],
)
def test_the_package_can_be_called_whatever_the_order_of_imports(imports: str) -> None:
    code = (
        f"{imports}\n"
        "from overspill.forecast import Forecast, forecast\n"
        "from overspill.errors import OverspillError\n"
        "from overspill.job import Job\nfrom overspill.machine import Machine\n"
        "job = Job.read({'model': {'path': '/nowhere'}, 'data': {'path': 'd'}, 'train': {'steps': 1}})\n"
        "for call in (overspill.forecast, forecast):\n"
        "    try:\n        call(job, Machine())\n"
        "    except OverspillError as error:\n        print(error.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["OVS201", "OVS201"], "")


def test_the_public_function_gives_a_forecast() -> None:
    made = overspill.forecast(job(), MACHINE, SHAPE)
    assert isinstance(made, Forecast)
    assert (made.parameters, made.trainable_parameters) == (134_515_008, 134_515_008)
    assert made.verdict == "fits"
    assert Forecast.model_validate_json(made.model_dump_json()) == made


def test_the_forecast_of_a_plan_holds_what_the_plan_says_within_its_budget() -> None:
    wishes = job(memory="1200MiB")
    resolved = plan(wishes, MACHINE, SHAPE)
    made = forecast(wishes, MACHINE, SHAPE, plan=resolved)
    assert made.peak_nbytes == sum(made.held_nbytes["host"].values()) <= made.budget_nbytes == 1200 * MiB
    assert made.activations_nbytes == resolved.activations_nbytes
    assert made.held_nbytes["host"]["staging"] == resolved.staging_nbytes
    assert made.read_nbytes["disk"] == sum(made.held_nbytes["disk"].values()) == made.written_nbytes["disk"]
    # A committing step also writes the weights and what was cached: 12 bytes a parameter in all.
    assert made.written_nbytes_committing["disk"] == pytest.approx(12 * made.parameters, rel=1e-2)
    assert made.disk_nbytes == 3 * made.written_nbytes_committing["disk"]


def test_a_separate_master_makes_a_committed_version_fourteen_bytes_a_parameter() -> None:
    wishes = job(memory="1400MiB", master="fp32", durability="step")
    made = forecast(wishes, MACHINE, SHAPE, plan=plan(wishes, MACHINE, SHAPE))
    assert made.written_nbytes_committing["disk"] == pytest.approx(14 * made.parameters, rel=1e-2)
    assert made.disk_nbytes == 3 * made.written_nbytes_committing["disk"]


@pytest.mark.parametrize("planned", [True, False])
def test_moments_in_bf16_are_labelled_not_exact(planned: bool) -> None:
    for moments, exact in (("fp32", True), ("bf16", False)):
        wishes = job(moments=moments)
        made = forecast(wishes, MACHINE, SHAPE, plan=plan(wishes, MACHINE, SHAPE) if planned else None)
        assert (made.exact, made.notes == ()) == (exact, exact)
        assert exact or "not exact" in made.notes[0]


def test_the_printed_forecast_says_that_bf16_moments_are_not_exact(capsys: pytest.CaptureFixture[str]) -> None:
    for moments in ("fp32", "bf16"):
        wishes = job(moments=moments)
        resolved = plan(wishes, MACHINE, SHAPE)
        print_forecast(wishes, resolved, forecast(wishes, MACHINE, SHAPE, plan=resolved))
        assert ("not exact" in " ".join(capsys.readouterr().out.split())) == (moments == "bf16")


def test_a_time_that_was_forecast_on_a_busy_machine_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for cores, said in ((0.1, False), (1.6, True)):
        machine = MACHINE.model_copy(update={"busy_cores": cores})
        resolved = plan(job(), machine, SHAPE)
        print_forecast(job(), resolved, forecast(job(), machine, SHAPE, plan=resolved))
        out = " ".join(capsys.readouterr().out.split())
        assert ("while other processes took 1.6 cores" in out) == said and "measured just now" in out


def test_a_run_on_a_busy_machine_says_why_its_time_differs() -> None:
    assert _busy_line(0.1, 0.4) == ""
    assert "took 0.1 cores while speeds were measured and 1.2 during the run" in _busy_line(0.1, 1.2)


def test_without_a_plan_the_forecast_divides_the_budget_as_the_planner_does() -> None:
    wishes = job(memory="1200MiB", durability="checkpoint")
    unplanned = forecast(wishes, MACHINE, SHAPE)
    planned = forecast(wishes, MACHINE, SHAPE, plan=plan(wishes, MACHINE, SHAPE))
    assert unplanned.held_nbytes["disk"]["moments"] == pytest.approx(planned.held_nbytes["disk"]["moments"], abs=64)
    assert unplanned.step_seconds == pytest.approx(planned.step_seconds, rel=1e-3)


def test_a_budget_that_is_too_small_is_a_verdict_and_not_an_error() -> None:
    made = forecast(job(memory="300MiB"), MACHINE, SHAPE)
    assert made.verdict == "does not fit" and "must be in memory" in made.reason
    enough = forecast(job(memory=made.smallest_budget_nbytes), MACHINE, SHAPE)
    assert enough.verdict == "tight"


def test_a_budget_beyond_the_machine_does_not_fit() -> None:
    assert forecast(job(memory="30GiB"), MACHINE, SHAPE).verdict == "does not fit"


def test_unknown_speeds_leave_the_time_unknown() -> None:
    assert forecast(job(), Machine(available_nbytes=20 * GiB), SHAPE).step_seconds is None


def test_a_module_without_known_decoder_needs_its_reserve_said() -> None:
    module = ModelShape.from_parameters([(p.name, p.shape) for p in SHAPE.owned])
    with pytest.raises(OverspillError, match="reserve_nbytes"):
        forecast(job(), MACHINE, module)
    assert forecast(job(), MACHINE, module, reserve_nbytes=64 * MiB).activations_nbytes == 64 * MiB


def test_the_peak_is_that_of_one_phase_and_never_a_sum() -> None:
    made = forecast(job(), MACHINE, SHAPE)
    assert made.peak_phase in {phase.phase for phase in made.phases}
    assert max(phase.total_nbytes for phase in made.phases) == made.peak_nbytes


def test_at_long_sequences_the_loss_is_the_peak_and_takes_twelve_bytes_a_logit() -> None:
    phases = {phase.name: phase for phase in activation_phases(SHAPE, Batch(1, 2048, 2, checkpointing=True))}
    assert max(phases.values(), key=lambda phase: phase.nbytes).name == "loss"
    assert phases["loss"].logits_nbytes == 12 * 2048 * 49152
    kept = activation_phases(SHAPE, Batch(1, 2048, 2, checkpointing=True, logits_held=True))
    assert {phase.name: phase for phase in kept}["loss"].logits_nbytes == 14 * 2048 * 49152


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        # Bytes a token in bf16, hidden 320, MLP 704, 8 heads of 40, 2 for keys: read off saved-tensor hooks.
        ("llama", {}, 2 * (1280 + 4 + 640) + 2 * 640 + 160 + 640 + 160 + 32 + 640 + 4 * 1408),
        ("gemma", {"head_dim": 48}, 2 * (1280 + 4 + 1280) + 2 * 640 + 192 + 768 + 192 + 32 + 768 + 4 * 1408),
        ("phi3", {}, 2 * (1280 + 4 + 640) + 2 * 640 + 160 + 640 + 960 + 32 + 640 + 640 + 2816 + 2 * 1408),
        ("gpt_neox", {}, 640 + 8 + 2 * 640 + 640 + 640 + 1920 + 32 + 640 + 640 + 2 * 1408),
    ],
)
def test_what_a_layer_keeps_is_what_saved_tensor_hooks_listed(
    family: str, changes: dict[str, Any], expected: int
) -> None:
    config = CONFIG | {"model_type": family, "hidden_size": 320, "intermediate_size": 704, "num_attention_heads": 8}
    facts = ModelShape.from_config(config | {"num_key_value_heads": 2} | changes).decoder
    assert facts is not None
    assert saved_bytes_per_token(facts, 2, 50) == expected


@pytest.mark.parametrize(("family", "kept"), [("llama", 12), ("gemma2", 8)])
def test_scores_that_are_mapped_count_once_and_leave_no_holes(family: str, kept: int) -> None:
    """Nearly all of this model's peak is scores: 16 heads, 1024 tokens twice, two layers."""
    config = CONFIG | {"model_type": family, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 1024}
    shape = ModelShape.from_config(config | {"attention_dropout": 0.1 if family == "llama" else 0.0})
    by_name = {phase.name: phase.nbytes for phase in activation_phases(shape, Batch(2, 1024, 2))}
    scores = 16 * 1024 * 2048
    assert 2 * kept * scores < by_name["backward of a layer"] <= (2 * kept + 8) * scores + 96 * MiB
    assert 2 * kept * scores < by_name["forward"] <= (2 * kept + 8) * scores + 96 * MiB
    assert by_name["backward of the embeddings"] < 64 * MiB  # mapped blocks are given back at once


def test_checkpointing_never_needs_more_and_more_tokens_never_need_less() -> None:
    def need(tokens: int, checkpointing: bool) -> int:
        return max(phase.nbytes for phase in activation_phases(SHAPE, Batch(1, tokens, 2, checkpointing=checkpointing)))

    for tokens in (256, 512, 1024, 2048):
        assert need(tokens, True) <= need(tokens, False)
    assert need(256, False) <= need(512, False) <= need(2048, False)


def step_plan(chunks: int, buffers: int, overlap: Overlap, resident: int = 0) -> StepPlan:
    return StepPlan(
        blocks=4,
        chunks=plan_chunks([chunks * 2048] * 4, chunk_numel=2048, resident_numel=resident * 2048),
        buffers=buffers,
        state_nbytes=10,
        weight_nbytes=2,
        update_nbytes=26,
        overlap=overlap,
    )


def rates(disk_bytes_per_s: float, compute_seconds: float) -> Rates:
    return Rates(
        read_bytes_per_s=disk_bytes_per_s,
        write_bytes_per_s=disk_bytes_per_s,
        mixed_bytes_per_s=disk_bytes_per_s,
        memory_bytes_per_s=1e15,
        forward_seconds=(compute_seconds / 12,) * 4,
        backward_seconds=(compute_seconds / 6,) * 4,
    )


def seconds(plan: StepPlan, speeds: Rates, every_steps: int = 0) -> float:
    return simulate_step_seconds(plan, speeds, read_threads=2, write_threads=2, every_steps=every_steps)


def test_a_step_is_bound_by_compute_or_by_bytes_over_the_disk_whichever_is_longer() -> None:
    plan = step_plan(8, 8, Overlap.FORWARD)
    moved = 4 * 8 * 2048 * 10 * 2  # read and written
    assert seconds(plan, rates(1e15, 1.0)) == pytest.approx(1.0, rel=1e-6)
    assert seconds(plan, rates(moved / 3.0, 0.001)) == pytest.approx(3.0, rel=0.02)


def test_overlap_with_the_forward_hides_io_that_a_step_without_it_waits_for() -> None:
    speeds = rates(4 * 8 * 2048 * 20 / 0.5, 1.0)
    hidden = seconds(step_plan(8, 8, Overlap.FORWARD), speeds)
    waited = seconds(step_plan(8, 8, Overlap.STEP), speeds)
    assert 1.0 <= hidden < waited <= 1.6


def test_more_buffers_and_more_cached_state_never_make_the_step_longer() -> None:
    speeds = rates(4 * 8 * 2048 * 20 / 1.0, 1.0)
    by_buffers = [seconds(step_plan(8, buffers, Overlap.FORWARD), speeds) for buffers in (2, 4, 12)]
    by_cache = [seconds(step_plan(8, 4, Overlap.FORWARD, resident=cached), speeds) for cached in (0, 8, 32)]
    assert by_buffers == sorted(by_buffers, reverse=True)
    assert by_cache == sorted(by_cache, reverse=True)
    assert by_cache[-1] == pytest.approx(1.0, rel=1e-6)


def test_commits_cost_their_bytes_spread_over_the_steps_between_them() -> None:
    plan, speeds = step_plan(8, 4, Overlap.STEP, resident=32), rates(1e6, 0.1)
    plain, each, seldom = (seconds(plan, speeds, every) for every in (0, 1, 10))
    assert plain == pytest.approx(0.1, rel=1e-6)
    assert each > seldom > plain
    assert seldom - plain == pytest.approx((each - plain) / 10, rel=1e-6)
