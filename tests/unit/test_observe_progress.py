"""What a person or a program sees while a run goes on."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from overspill.observe.memory import MemorySampler, anonymous_and_shared_nbytes
from overspill.observe.progress import JsonProgress, PanelProgress, PlainProgress, open_progress
from overspill.report import StepReport
from overspill.units import GiB, MiB


def _report(step: int, **changes: object) -> StepReport:
    values: dict[str, object] = {
        "step": step,
        "loss": 3.0 - step / 100,
        "grad_norm": 1.5,
        "lr": 1e-4,
        "tokens": 1000,
        "seconds": 2.0,
        "stall_seconds": {"disk_read": 0.25, "update": 0.0},
        "read_nbytes": {"disk": 10**9},
        "written_nbytes": {"disk": 2 * 10**9},
        "held_nbytes": {"host": {"weights": 64 * MiB, "gradients": 64 * MiB}, "disk": {"moments": GiB}},
    }
    return StepReport.read({**values, **changes})


def test_a_log_shows_the_first_steps_then_few_and_always_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainProgress(400)
    for step in range(1, 401):
        view.step(_report(step, eval_loss=2.5 if step == 137 else None), memory_nbytes=512 * MiB, budget_nbytes=2 * GiB)
    lines = capsys.readouterr().out.splitlines()
    assert 42 <= len(lines) <= 48
    assert lines[2].split()[:2] == ["1/400", "2.9900"]
    assert lines[-1].startswith("400/400")
    assert any("evaluation 2.5000" in line for line in lines)


def test_a_line_names_loss_speed_memory_links_and_stalls(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainProgress(10)
    view.step(_report(1), memory_nbytes=512 * MiB, budget_nbytes=2 * GiB)
    units, names, line = capsys.readouterr().out.splitlines()
    assert "MiB of 2048" in units
    assert " ".join(line.split()) == "1/10 2.9900 1.50 1.00e-04 2.00 500 512 0.50 1.00 disk_read 0.25"
    for name, value in (("loss", "2.9900"), ("tok/s*", "500"), ("out*", "1.00")):  # aligned right
        assert names.index(name) + len(name) == line.index(f"{value} ") + len(value)


def test_lines_fit_a_common_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainProgress(10_000)
    stalls = {"disk_read": 0.25, "update": 10.25, "commit": 0.01}
    view.step(_report(1, stall_seconds=stalls), memory_nbytes=99 * GiB, budget_nbytes=100 * GiB)
    view.step(_report(2, eval_loss=2.5), memory_nbytes=99 * GiB, budget_nbytes=100 * GiB)
    assert all(len(line) <= 120 for line in capsys.readouterr().out.splitlines())


def test_a_skipped_step_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainProgress(1000)
    view.step(_report(700, skipped=True, grad_norm=float("nan")), memory_nbytes=1, budget_nbytes=2)
    assert "skipped" in capsys.readouterr().out


def test_json_rows_hold_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    view = JsonProgress()
    view.note("a notice")
    view.step(_report(3), memory_nbytes=5, budget_nbytes=7)
    captured = capsys.readouterr()
    row = json.loads(captured.out)
    assert (row["event"], row["step"], row["memory_nbytes"], row["budget_nbytes"]) == ("step", 3, 5, 7)
    assert row["stall_seconds"] == {"disk_read": 0.25, "update": 0.0}
    assert captured.err == "a notice\n"


def test_the_panel_draws_memory_by_tier_and_class_and_survives_a_nan() -> None:
    view = PanelProgress(100, title="a run")
    try:
        view.step(_report(1), memory_nbytes=512 * MiB, budget_nbytes=2 * GiB)
        drawn = view._draw(_report(2, loss=float("nan")), 512 * MiB, 2 * GiB, 700 * MiB)
    finally:
        view.close()
    out = io.StringIO()
    Console(file=out, width=110).print(drawn)
    assert "now 512 MiB, peak 700 MiB, budget 2.00 GiB" in out.getvalue()
    for part in ("2/100", "weights 64.0 MiB", "moments 1.00 GiB", "disk_read 250 ms", "500 tokens/s"):
        assert part in out.getvalue()


def test_without_a_terminal_the_view_is_plain() -> None:
    assert isinstance(open_progress(10, title="", as_json=False), PlainProgress)
    assert isinstance(open_progress(10, title="", as_json=True), JsonProgress)


def test_the_sampler_sees_a_peak_that_is_gone_when_it_is_asked() -> None:
    sampler = MemorySampler(anonymous_and_shared_nbytes())
    block = bytearray(64 * MiB)  # zeroed pages: touched on allocation by CPython's calloc only when written
    block[::4096] = b"x" * len(range(0, len(block), 4096))
    peak = sampler.now_nbytes
    del block
    assert peak >= 60 * MiB
    assert sampler.now_nbytes < peak
    assert sampler.peak_nbytes >= peak
