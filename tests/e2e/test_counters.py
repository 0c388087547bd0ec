"""The bytes in a step's report are those that the kernel saw, and those of the table in docs/theory.

Measured over several steps between two flushes, in steady state. What is read ahead for the step after is at most
the staging buffers, some per cent of what a step moves.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from overspill.plan import Durability, StateFormat
from overspill.train import Session
from overspill.units import MiB
from tests.e2e.session_cases import make_model, make_plan, one_step, open_session, train

STEPS = 8
CHUNK_NUMEL = 512 * 1024
TOLERANCE = 0.05


def _kernel_counters() -> tuple[int, int]:
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"]), int(rows["write_bytes"])


def _measure(directory: Path, dtype: torch.dtype, master: str, every_steps: int) -> dict[str, tuple[float, float]]:
    """Bytes read and written per parameter and step: as reported, and as the kernel saw them."""
    plan = make_plan(
        memory_nbytes=256 * MiB,
        state_format=StateFormat(master=master),  # type: ignore[arg-type]
        durability=Durability(every_steps=every_steps),
        chunk_numel=CHUNK_NUMEL,
        staging_nbytes=2 * CHUNK_NUMEL * 12,
    )
    model = make_model(width=704, layers=5, dtype=dtype)
    with open_session(model, directory, plan) as session:
        assert session.store is not None
        if not session.store.odirect:
            pytest.skip(
                f"{directory} has no O_DIRECT, so the kernel counts what its cache writes back, at another time"
            )
        train(session, model, 3)
        session.step_facts()
        read, written = _kernel_counters()
        reported = {"read": 0, "written": 0}
        for _ in range(STEPS):
            one_step(session, model)
            facts = session.step_facts()
            for way in reported:
                reported[way] += facts[f"{way}_nbytes"]["disk"]
        session.flush()
        facts = session.step_facts()
        for way in reported:
            reported[way] += facts[f"{way}_nbytes"]["disk"]
        read_now, written_now = _kernel_counters()
        share = STEPS * _numel(session)
        return {
            "reported": (reported["read"] / share, reported["written"] / share),
            "kernel": ((read_now - read) / share, (written_now - written) / share),
        }


def _numel(session: Session) -> int:
    return sum(block.layout.numel for block in session.blocks)


@pytest.mark.parametrize(
    ("dtype", "master", "every_steps", "read", "written"),
    [
        (torch.bfloat16, "split", 0, 10, 10),
        (torch.bfloat16, "split", 1, 10, 12),
        (torch.float32, "split", 0, 8, 8),
        (torch.float32, "split", 1, 8, 12),
        (torch.bfloat16, "fp32", 0, 12, 12),
        (torch.bfloat16, "fp32", 1, 12, 14),  # the bf16 weights are written beside the master that they come from
    ],
)
def test_reported_bytes_are_the_tables_and_the_kernels(
    tmp_path: Path, dtype: torch.dtype, master: str, every_steps: int, read: int, written: int
) -> None:
    measured = _measure(tmp_path / "state", dtype, master, every_steps)
    assert measured["reported"] == (pytest.approx(read, rel=TOLERANCE), pytest.approx(written, rel=TOLERANCE))
    assert measured["kernel"] == (
        pytest.approx(measured["reported"][0], rel=TOLERANCE),
        pytest.approx(measured["reported"][1], rel=TOLERANCE),
    )


@pytest.mark.parametrize("placement", ["host", "disk", "mixed"])
def test_a_class_shows_its_bytes_where_the_plan_puts_it_and_nowhere_else(tmp_path: Path, placement: str) -> None:
    model = make_model()
    with open_session(model, tmp_path / "state", make_plan(placement, durability=Durability())) as session:
        session.step_facts()  # what making the store has written
        train(session, model, 2)
        facts = session.step_facts()
        host, disk = facts["held_nbytes"]["host"], facts["held_nbytes"].get("disk", {})
        numel = _numel(session)
        resident = sum(chunk.numel for block in session.blocks for chunk in block.chunks if chunk.resident)
        assert (resident == numel, resident == 0) == (placement == "host", placement == "disk")
        page = os.sysconf("SC_PAGESIZE")
        allocations = 2 * len(session.blocks)
        assert 8 * resident <= host.get("moments", 0) <= 8 * resident + allocations * page
        assert 2 * resident <= host.get("master", 0) <= 2 * resident + allocations * page
        if placement == "host":
            assert not disk
            assert facts["read_nbytes"]["disk"] == facts["written_nbytes"]["disk"] == 0
        else:
            assert disk["moments"] >= 8 * (numel - resident) > 0
            assert disk["master"] >= 2 * (numel - resident) > 0
            assert facts["read_nbytes"]["disk"] > 0 < facts["written_nbytes"]["disk"]
