"""The model of the caching allocator: its rules one by one, and what must hold for any history."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.errors import OverspillError
from overspill.forecast.allocator import CachingAllocator, replay
from overspill.forecast.allocator_settings import AllocatorSettings
from overspill.forecast.events import BlockMisuse, Category, Event, Kind, peaks_by_phase
from overspill.units import GiB, KiB, MiB

PLAIN = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def malloc(block: int, nbytes: int, stream: int = 0) -> Event:
    return Event(Kind.MALLOC, block, nbytes, stream=stream)


def free(block: int, kind: Kind = Kind.FREE) -> Event:
    return Event(kind, block, 0)


def reserved(*events: Event, settings: AllocatorSettings = PLAIN) -> list[int]:
    result = replay(events, settings)
    assert result.out_of_memory is None
    return list(result.reserved_nbytes)


def test_a_small_request_takes_a_segment_of_2_mib_and_shares_it() -> None:
    assert reserved(malloc(0, 1), malloc(1, MiB), malloc(2, MiB)) == [2 * MiB, 2 * MiB, 4 * MiB]


def test_a_request_of_1_to_10_mib_takes_a_segment_of_20_mib_and_shares_it() -> None:
    assert reserved(malloc(0, 2 * MiB), malloc(1, 9 * MiB), malloc(2, 9 * MiB + 512)) == [20 * MiB, 20 * MiB, 40 * MiB]


def test_a_larger_request_takes_a_segment_of_its_own_rounded_to_2_mib() -> None:
    assert reserved(malloc(0, 10 * MiB)) == [10 * MiB]
    assert reserved(malloc(0, 10 * MiB + 1)) == [12 * MiB]


def test_pools_and_streams_share_nothing() -> None:
    assert reserved(malloc(0, 20 * MiB), free(0), malloc(1, KiB)) == [20 * MiB, 20 * MiB, 22 * MiB]
    assert reserved(malloc(0, 20 * MiB), free(0), malloc(1, 20 * MiB, stream=1))[-1] == 40 * MiB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    history = [malloc(0, 40 * MiB), malloc(1, 30 * MiB), free(0), free(1), malloc(2, 25 * MiB), malloc(3, 40 * MiB)]
    assert reserved(*history)[-1] == 70 * MiB


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left() -> None:
    wide = [malloc(0, 12 * MiB), free(0)]
    assert replay([*wide, malloc(1, 11 * MiB)]).allocated_nbytes[-1] == 12 * MiB, "1 MiB is not split off"
    assert replay([*wide, malloc(1, 11 * MiB - 512)]).allocated_nbytes[-1] == 11 * MiB - 512
    assert replay([*wide, malloc(1, 11 * MiB)], EXPANDABLE).allocated_nbytes[-1] == 11 * MiB


def test_a_small_block_is_split_if_512_bytes_are_left() -> None:
    result = replay([malloc(0, 2 * KiB), malloc(1, 512), free(0), malloc(2, 1536), malloc(3, 512)])
    assert list(result.allocated_nbytes) == [2048, 2560, 512, 2048, 2560]


def test_free_neighbours_are_one_block_again() -> None:
    parts = [malloc(i, 5 * MiB) for i in range(4)]
    assert reserved(*parts, free(1), free(2), malloc(9, 10 * MiB))[-1] == 20 * MiB
    assert reserved(*parts, free(0), free(2), malloc(9, 10 * MiB))[-1] == 30 * MiB, "a hole apart does not help"


def test_a_full_device_gives_cached_segments_back_and_tries_again() -> None:
    settings = AllocatorSettings(capacity_nbytes=100 * MiB)
    result = replay([malloc(0, 60 * MiB), free(0), malloc(1, 80 * MiB)], settings)
    assert list(result.reserved_nbytes) == [60 * MiB, 60 * MiB, 80 * MiB]
    assert (result.retries, result.out_of_memory) == (1, None)


def test_a_split_segment_cannot_be_given_back_and_that_is_out_of_memory() -> None:
    settings = AllocatorSettings(capacity_nbytes=100 * MiB)
    history = [malloc(0, 60 * MiB), free(0), malloc(1, 2 * MiB), malloc(2, 60 * MiB)]
    result = replay(history, settings)
    assert result.out_of_memory is not None
    assert (result.out_of_memory.event, result.out_of_memory.reserved_nbytes) == (3, 60 * MiB)
    with_pages = replay(history, AllocatorSettings(capacity_nbytes=100 * MiB, expandable_segments=True))
    assert with_pages.out_of_memory is None


def test_expandable_segments_grow_instead_of_leaving_holes() -> None:
    history = [malloc(0, 30 * MiB), free(0), malloc(1, 50 * MiB), free(1), malloc(2, 70 * MiB)]
    assert reserved(*history) == [30 * MiB, 30 * MiB, 80 * MiB, 80 * MiB, 150 * MiB]
    assert reserved(*history, settings=EXPANDABLE) == [40 * MiB, 40 * MiB, 60 * MiB, 60 * MiB, 80 * MiB]


def test_expandable_segments_give_back_whole_pages_under_pressure() -> None:
    settings = AllocatorSettings(capacity_nbytes=100 * MiB, expandable_segments=True)
    history = [malloc(0, 50 * MiB), malloc(1, 5 * MiB), free(0), malloc(2, 30 * MiB, stream=1)]
    result = replay(history, settings)
    assert result.out_of_memory is None
    # Of 60 MiB in pages of 20, the first two are free; then the other stream gets 40.
    assert list(result.reserved_nbytes) == [60 * MiB, 60 * MiB, 60 * MiB, 100 * MiB]
    more = replay([*history, malloc(3, 30 * MiB, stream=1)], settings)
    assert more.out_of_memory is None
    assert (more.retries, more.reserved_nbytes[-1]) == (1, 80 * MiB)


def test_max_split_size_keeps_large_blocks_whole_and_out_of_small_hands() -> None:
    settings = AllocatorSettings.parse("max_split_size_mb:32")
    assert reserved(malloc(0, 64 * MiB), free(0), malloc(1, 11 * MiB), settings=settings)[-1] == 75 * MiB + MiB
    near = [malloc(0, 64 * MiB), free(0), malloc(1, 50 * MiB)]
    assert reserved(*near, settings=settings)[-1] == 64 * MiB, "within 20 MiB a larger block will do"
    assert replay(near, settings).allocated_nbytes[-1] == 64 * MiB, "and is not split"
    far = [malloc(0, 64 * MiB), free(0), malloc(1, 44 * MiB)]
    assert reserved(*far, settings=settings)[-1] == 108 * MiB


def test_oversized_blocks_are_released_before_everything_is() -> None:
    settings = AllocatorSettings.parse("max_split_size_mb:32", capacity_nbytes=120 * MiB)
    history = [malloc(0, 64 * MiB), malloc(1, 20 * MiB), free(0), free(1), malloc(2, 100 * MiB)]
    result = replay(history, settings)
    assert (result.out_of_memory, result.retries, result.reserved_nbytes[-1]) == (None, 1, 100 * MiB)
    result = replay([malloc(0, 64 * MiB), malloc(1, 20 * MiB), free(0), free(1), malloc(2, 90 * MiB)], settings)
    assert (result.retries, result.reserved_nbytes[-1]) == (1, 90 * MiB)
    only = replay([malloc(0, 100 * MiB), malloc(1, 20 * MiB), free(0), free(1), malloc(2, 60 * MiB)], settings)
    assert (only.retries, only.reserved_nbytes[-1]) == (0, 80 * MiB), "the oversized one was enough"


def test_garbage_collection_releases_old_segments_before_the_device_is_full() -> None:
    history = [malloc(0, 40 * MiB), malloc(1, 20 * MiB), free(0), free(1), malloc(2, 50 * MiB)]
    without = AllocatorSettings(capacity_nbytes=200 * MiB)
    assert reserved(*history, settings=without)[-1] == 110 * MiB
    settings = AllocatorSettings.parse(
        "garbage_collection_threshold:0.25", capacity_nbytes=200 * MiB, memory_fraction=1.0
    )
    assert reserved(*history, settings=settings)[-1] == 50 * MiB
    unset = AllocatorSettings.parse("garbage_collection_threshold:0.25", capacity_nbytes=200 * MiB)
    assert reserved(*history, settings=unset)[-1] == 110 * MiB, "without a memory fraction it does nothing"


def test_a_block_that_another_stream_uses_is_reusable_later() -> None:
    history = [malloc(0, 20 * MiB), free(0, Kind.FREE_REQUESTED), malloc(1, 20 * MiB), free(0, Kind.FREE_COMPLETED)]
    result = replay([*history, malloc(2, 20 * MiB)])
    assert list(result.allocated_nbytes) == [20 * MiB, 0, 20 * MiB, 20 * MiB, 40 * MiB]
    assert list(result.reserved_nbytes) == [20 * MiB, 20 * MiB, 40 * MiB, 40 * MiB, 40 * MiB]


def test_a_retry_waits_for_other_streams() -> None:
    settings = AllocatorSettings(capacity_nbytes=30 * MiB)
    history = [malloc(0, 20 * MiB), free(0, Kind.FREE_REQUESTED), malloc(1, 30 * MiB), free(0, Kind.FREE_COMPLETED)]
    result = replay(history, settings)
    assert (result.out_of_memory, result.retries, result.reserved_nbytes[-1]) == (None, 1, 30 * MiB)


@pytest.mark.parametrize(
    ("nbytes", "divisions", "expected"),
    [(1200, 4, 1536), (5000, 4, 5120), (5121, 4, 6144), (4096, 4, 4096), (100, 4, 512), (3 * MiB + 1, 2, 4 * MiB)],
)
def test_roundup_power2_divisions_round_in_steps_between_powers_of_two(
    nbytes: int, divisions: int, expected: int
) -> None:
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{divisions}")
    assert CachingAllocator(settings).round_size(nbytes) == expected


def test_divisions_may_differ_by_size() -> None:
    settings = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert [settings.divisions(n * MiB) for n in (1, 256, 300, 512, 1024, 2047, 2048, 5000)] == [1, 1, 1, 2, 4, 4, 8, 8]
    gaps = AllocatorSettings.parse("roundup_power2_divisions:[256:2,1024:4]")
    assert [gaps.divisions(n * MiB) for n in (1, 511, 512, 1024, 2048)] == [2, 2, 0, 4, 0]


def test_a_configuration_is_read_as_torch_reads_it() -> None:
    found = AllocatorSettings.parse(
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "pinned_num_register_threads:4",
        capacity_nbytes=GiB,
    )
    assert found == AllocatorSettings(
        expandable_segments=True,
        max_split_nbytes=128 * MiB,
        garbage_collection_threshold=0.8,
        capacity_nbytes=GiB,
    )
    assert AllocatorSettings.parse("") == AllocatorSettings()


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:20",
        "expandable_segments:yes",
        "garbage_collection_threshold:1.5",
        "nonsense:1",
        "backend",
        "backend:cudaMallocAsync",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:2]",
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(OverspillError):
        AllocatorSettings.parse(text)


def test_no_history_is_no_replay() -> None:
    with pytest.raises(BlockMisuse):
        replay([free(0)])
    with pytest.raises(BlockMisuse):
        replay([malloc(0, 1), malloc(0, 1)])
    with pytest.raises(BlockMisuse):
        peaks_by_phase([free(0)])


def test_the_peak_of_a_phase_counts_what_was_alive_before_it() -> None:
    events = [
        Event(Kind.MALLOC, 0, 1000, Category.WEIGHTS, "load"),
        Event(Kind.MALLOC, 1, 10, Category.TEMPORARIES, "step"),
        Event(Kind.FREE, 1, 10, Category.TEMPORARIES, "step"),
        Event(Kind.FREE, 0, 1000, Category.WEIGHTS, "end"),
    ]
    load, step, end = peaks_by_phase(events)
    assert (load.nbytes, step.nbytes, end.nbytes) == (1024, 1536, 1024)
    assert step.by_category == ((Category.WEIGHTS, 1024), (Category.TEMPORARIES, 512))


# ---- any history ----

sizes = st.one_of(st.integers(1, 4 * KiB), st.integers(1, 3 * MiB), st.integers(MiB, 64 * MiB))


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """A random history with frees in any order, on two streams, some of them late."""
    chooser = random.Random(draw(st.integers(0, 2**32)))
    events: list[Event] = []
    live: list[int] = []
    late: list[int] = []
    for name, nbytes in enumerate(draw(st.lists(sizes, min_size=1, max_size=60))):
        events.append(malloc(name, nbytes, stream=chooser.randrange(2)))
        live.append(name)
        while live and chooser.random() < 0.4:
            block = live.pop(chooser.randrange(len(live)))
            if chooser.random() < 0.2:
                late.append(block)
                events.append(free(block, Kind.FREE_REQUESTED))
            else:
                events.append(free(block))
        while late and chooser.random() < 0.4:
            events.append(free(late.pop(0), Kind.FREE_COMPLETED))
    return events


any_settings = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_nbytes=st.sampled_from([None, 24 * MiB, 48 * MiB]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.5]),
    memory_fraction=st.sampled_from([None, 1.0]),
    capacity_nbytes=st.sampled_from([None, 256 * MiB, GiB]),
    roundup_power2_divisions=st.sampled_from([(), ((0, 4),)]),
)


def live_after_each(events: list[Event], chosen: AllocatorSettings) -> list[int]:
    """What is allocated, by rounding alone."""
    alive: dict[int, int] = {}
    found = []
    for event in events:
        if event.kind is Kind.MALLOC:
            alive[event.block] = CachingAllocator(chosen).round_size(event.nbytes)
        elif event.kind is not Kind.FREE_COMPLETED:
            del alive[event.block]
        found.append(sum(alive.values()))
    return found


def check_blocks(allocator: CachingAllocator) -> None:
    end = total = used = 0
    for address, nbytes, is_allocated in allocator.blocks():
        assert address >= end, "blocks overlap"
        assert nbytes > 0
        end = address + nbytes
        total += nbytes
        used += nbytes if is_allocated else 0
    assert total == allocator.reserved_nbytes, "mapped blocks are what is reserved"
    assert used == allocator.allocated_nbytes


@settings(max_examples=150, deadline=None)
@given(histories(), any_settings)
def test_blocks_never_overlap_and_add_up_whatever_happens(events: list[Event], chosen: AllocatorSettings) -> None:
    allocator = CachingAllocator(chosen)
    for event in events:
        if event.kind is Kind.MALLOC:
            if not allocator.malloc(event.block, event.nbytes, event.stream):
                break
        elif event.kind is Kind.FREE:
            allocator.free(event.block)
        elif event.kind is Kind.FREE_REQUESTED:
            allocator.request_free(event.block)
        else:
            allocator.complete_free(event.block)
        check_blocks(allocator)
        assert allocator.allocated_nbytes <= allocator.reserved_nbytes
        if chosen.capacity_nbytes is not None:
            assert allocator.reserved_nbytes <= chosen.capacity_nbytes


@settings(max_examples=100, deadline=None)
@given(histories(), st.booleans())
def test_allocated_is_the_sum_of_rounded_requests_but_for_what_is_not_split_off(
    events: list[Event], expandable: bool
) -> None:
    chosen = AllocatorSettings(expandable_segments=expandable)
    result = replay(events, chosen)
    expected = live_after_each(events, chosen)
    for got, want, index in zip(result.allocated_nbytes, expected, range(len(events)), strict=True):
        assert want <= got, index
        if expandable:
            assert got == want, "with expandable segments every block is split"
        else:
            assert got <= want + MiB * (index + 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=60))
def test_without_frees_expandable_segments_reserve_no_more_than_plain_ones_and_a_page_each(requests: list[int]) -> None:
    events = [malloc(i, nbytes) for i, nbytes in enumerate(requests)]
    plain, expandable = replay(events, PLAIN), replay(events, EXPANDABLE)
    assert expandable.reserved_peak_nbytes <= plain.reserved_peak_nbytes + 22 * MiB


@settings(max_examples=60, deadline=None)
@given(histories())
def test_more_capacity_never_makes_a_history_fail(events: list[Event]) -> None:
    free_run = replay(events, PLAIN)
    roomy = replay(events, AllocatorSettings(capacity_nbytes=free_run.reserved_peak_nbytes))
    assert roomy.out_of_memory is None
    assert roomy.retries == 0
    assert list(roomy.reserved_nbytes) == list(free_run.reserved_nbytes)
