"""metrics.jsonl: what is written comes back bit by bit, and no crash makes it unreadable."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.errors import OverspillError
from overspill.observe.metrics import MetricsWriter, last_row, read_metrics, row_text, truncate_metrics
from overspill.report import StepReport


def _write(file: Path, steps: range) -> None:
    with MetricsWriter(file) as out:
        for step in steps:
            out.append(StepReport(step=step, loss=step / 3, read_nbytes={"disk": step}))


@given(st.floats(allow_nan=True, allow_infinity=True, width=64), st.floats(allow_nan=False, allow_infinity=False))
def test_a_loss_comes_back_with_every_bit(loss: float, norm: float) -> None:
    back = StepReport.read(json.loads(row_text(StepReport(step=1, loss=loss, grad_norm=norm))))
    assert back.grad_norm == norm
    assert back.loss is not None
    assert back.loss == loss or (math.isnan(back.loss) and math.isnan(loss))


def test_a_diverged_loss_is_told_from_one_that_was_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as out:
        out.append(StepReport(step=1, loss=float("nan")))
        out.append(StepReport(step=2, loss=None))
    first, second = read_metrics(file)
    assert first.loss is not None and math.isnan(first.loss)
    assert second.loss is None
    for line in file.read_text().splitlines():  # strict JSON: no bare NaN
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_each_row_is_on_its_way_before_the_next_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    out = MetricsWriter(file)
    out.append(StepReport(step=1, loss=0.5))
    assert [row.step for row in read_metrics(file)] == [1]  # before close
    out.close()


def test_rows_after_the_committed_step_are_dropped_on_resume(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    _write(file, range(1, 11))
    assert truncate_metrics(file, 7) == (3, 0, 0)
    _write(file, range(8, 10))
    assert [row.step for row in read_metrics(file)] == list(range(1, 10))
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kept_nbytes", [1, 40, 100])
def test_a_row_that_a_crash_cut_short_is_no_row(tmp_path: Path, kept_nbytes: int) -> None:
    file = tmp_path / "metrics.jsonl"
    _write(file, range(1, 3))
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:kept_nbytes])
    assert [row.step for row in read_metrics(file)] == [1, 2]
    truncate_metrics(file, 2)
    assert file.read_bytes() == whole


def test_zeros_left_by_a_power_loss_do_not_stop_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    _write(file, range(1, 4))
    file.write_bytes(file.read_bytes() + b"\0" * 4096 + b"\n")
    with pytest.raises(OverspillError, match=r"OVS404.*Line 4"):
        read_metrics(file)
    assert truncate_metrics(file, 3) == (1, 1, 0)
    assert [row.step for row in read_metrics(file)] == [1, 2, 3]


def test_the_last_row_of_a_long_file_is_found_without_reading_it_all(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_row(file) is None
    _write(file, range(1, 2000))
    assert file.stat().st_size > 256 * 1024
    newest = last_row(file)
    assert newest is not None and newest.step == 1999


def test_a_directory_without_permission_gives_its_error(tmp_path: Path) -> None:
    with pytest.raises(OverspillError, match="OVS402"):
        MetricsWriter(tmp_path / "no such directory" / "metrics.jsonl")


def test_steps_without_a_row_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert truncate_metrics(file, 4) == (0, 0, 4)
    _write(file, range(1, 4))
    _write(file, range(6, 9))
    assert truncate_metrics(file, 7) == (1, 0, 2)


def test_a_full_disk_is_named_and_the_torn_row_is_dropped_later(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    _write(file, range(1, 3))
    whole = file.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with MetricsWriter(file) as out:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limit[1]))
            with pytest.raises(OverspillError, match="OVS401"):
                out.append(StepReport(step=3, loss=1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)
    assert file.stat().st_size == len(whole) + 20
    assert truncate_metrics(file, 2) == (0, 0, 0)
    assert file.read_bytes() == whole


def test_the_file_is_named_durably_and_sync_makes_its_rows_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def recording(name: str) -> None:
        real = getattr(os, name)

        def call(descriptor: int) -> None:
            real(descriptor)
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

        monkeypatch.setattr(os, name, call)

    recording("fsync")
    recording("fdatasync")
    with MetricsWriter(tmp_path / "metrics.jsonl") as out:
        assert synced == [tmp_path.name]
        out.append(StepReport(step=1, loss=1.0))
        out.sync()
        assert synced == [tmp_path.name, "metrics.jsonl"]
    truncate_metrics(tmp_path / "metrics.jsonl", 1)
    assert synced[2:] == ["metrics.jsonl.new", tmp_path.name]
