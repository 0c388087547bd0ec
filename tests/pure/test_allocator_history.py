"""A recorded history of the CUDA allocator becomes events, and what was recorded on GPUs is replayed here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from overspill.forecast.allocator import replay
from overspill.forecast.allocator_settings import AllocatorSettings
from overspill.forecast.events import BlockMisuse
from overspill.forecast.history import compact, read_history
from overspill.units import MiB

RECORDED = sorted((Path(__file__).parents[1] / "assets" / "histories").glob("*.json.gz"))

SNAPSHOT = {
    "device_traces": [
        [
            {"action": "free_completed", "addr": 1, "size": 512, "stream": 0},
            {"action": "segment_alloc", "addr": 4096, "size": 20 * MiB, "stream": 0},
            {"action": "alloc", "addr": 4096, "size": 5 * MiB, "stream": 0, "frames": []},
            {"action": "free_requested", "addr": 4096, "size": 5 * MiB, "stream": 0},
            {"action": "alloc", "addr": 4096 + 5 * MiB, "size": 2 * MiB, "stream": 0},
            {"action": "free_completed", "addr": 4096, "size": 5 * MiB, "stream": 0},
            {"action": "alloc", "addr": 4096, "size": 6 * MiB, "stream": 0},
            {"action": "snapshot"},
        ]
    ]
}


def test_a_history_becomes_events_whose_replay_holds_what_the_device_held() -> None:
    history = read_history(compact(SNAPSHOT))
    assert [event.kind.name for event in history.events] == [
        "MALLOC",
        "FREE_REQUESTED",
        "MALLOC",
        "FREE_COMPLETED",
        "MALLOC",
    ]
    assert len({event.block for event in history.events}) == 3, "an address that comes again is another block"
    result = replay(history.events)
    assert result.allocated_peak_nbytes == 8 * MiB
    assert result.reserved_peak_nbytes == history.reserved_peak_nbytes == history.reserved_end_nbytes == 20 * MiB


def test_what_is_no_history_is_refused() -> None:
    with pytest.raises(BlockMisuse):
        read_history([["alloc", 1]])


@pytest.mark.skipif(not RECORDED, reason="no history has been recorded on a GPU yet (make test-gpu records them)")
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_histories_replay_as_they_were(path: Path) -> None:
    found = json.loads(gzip.decompress(path.read_bytes()))
    result = replay(read_history(found["rows"]).events, AllocatorSettings.parse(found["settings"]))
    assert result.allocated_peak_nbytes == found["allocated_peak_nbytes"]
    assert result.reserved_peak_nbytes == pytest.approx(found["reserved_peak_nbytes"], rel=0.03)
