"""What the disk store promises when nothing goes wrong: versions, ranges, checkpoints, shapes, several disks."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from disk_cases import SLOTS, commit, create, names_in, random_content, read, slot, write
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.errors import OverspillError
from overspill.tiers.disk import DiskStore, StoreReader, TensorSpec
from overspill.tiers.disk.layout import file_name, spread
from testing.faultyio import FaultyIO


def test_what_is_committed_is_read_back_after_a_new_open(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        assert store.committed_step is None
        content = commit(store, 7)
    with DiskStore.open(tmp_path / "s", slots=SLOTS) as store:
        assert (store.committed_step, store.extra, store.identity) == (7, {"step": 7}, {"model": "tiny"})
        assert read(store) == content


def test_a_range_comes_from_the_working_version_only_where_that_is_written(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        old = commit(store, 1)["b0000.exp_avg"]
        store.write_from("b0000.exp_avg", 8192, bytearray(b"n" * 4096), checksum=True)
        assert read(store)["b0000.exp_avg"] == old[:8192] + b"n" * 4096 + old[12288:]


def test_a_slot_that_no_step_touched_keeps_its_committed_version(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        content = commit(store, 1)
        new = random_content(SLOTS[:1], seed=9)
        write(store, new)
        store.commit(store.prepare(2, {}))
        assert read(store) == content | new


def test_a_slot_that_is_written_in_part_cannot_be_committed(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        content = commit(store, 1)
        store.write_from("b0001.exp_avg", 0, bytearray(4096), checksum=True)
        with pytest.raises(OverspillError, match=r"OVS504.*b0001\.exp_avg.*bytes 4096 to 8192"):
            store.prepare(2, {})
        store.rollback()
        assert read(store) == content


def test_a_working_version_may_be_rewritten_in_place_until_it_is_committed(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        commit(store, 1)
        names = names_in(tmp_path / "s" / "slots")
        for seed in range(3, 6):
            content = random_content(SLOTS, seed)
            write(store, content)
            assert read(store) == content
        store.commit(store.prepare(2, {}))
        assert read(store) == content
        assert names_in(tmp_path / "s" / "slots") == names


def test_abandon_and_rollback_go_back_to_the_committed_step(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        content = commit(store, 1)
        write(store, random_content(SLOTS, 5))
        store.abandon(store.prepare(2, {}))
        assert (read(store), store.committed_step) == (content, 1)
        write(store, random_content(SLOTS, 6))
        store.rollback()
        assert read(store) == content
    with DiskStore.open(tmp_path / "s") as store:
        assert (read(store), store.committed_step) == (content, 1)


def test_the_next_step_may_be_written_while_a_prepared_one_waits_for_its_decision(tmp_path: Path) -> None:
    with create(tmp_path / "s", versions=3) as store:
        commit(store, 1)
        second, third = random_content(SLOTS, 2), random_content(SLOTS, 3)
        write(store, second)
        prepared = store.prepare(2, {})
        write(store, third)
        assert read(store) == third
        store.commit(prepared)
        assert (store.committed_step, read(store)) == (2, third)
        store.rollback()
        assert read(store) == second


def test_a_prepared_step_is_committed_at_open_where_another_rank_has_decided_so(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        commit(store, 1)
        content = random_content(SLOTS, 2)
        write(store, content)
        store.prepare(2, {})
    with DiskStore.open(tmp_path / "s", on_prepared="commit") as store:
        assert (store.committed_step, read(store)) == (2, content)


def test_a_checkpoint_copies_no_state_and_outlives_later_steps(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        content = commit(store, 1)
        written = store.bytes_written
        path = store.pin("step-000001")
        assert store.bytes_written - written < 20_000  # a manifest
        assert store.notes == []
        for step in (2, 3, 4):
            commit(store, step)
        with StoreReader(path) as reader:
            reader.verify()
            assert reader.step == 1
            for spec in SLOTS:
                assert reader.array(spec.name).tobytes() == content[spec.name]
        store.restore_pin("step-000001")
        assert (store.committed_step, read(store)) == (1, content)


def test_dropping_a_checkpoint_gives_its_files_back_to_the_store(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        commit(store, 1)
        store.pin("a")
        commit(store, 2)
        store.unpin("a")
        assert len(names_in(tmp_path / "s" / "slots")) == 3 * len(SLOTS)
        assert store.pins() == []
        for step in (3, 4, 5):
            commit(store, step)
        assert len(names_in(tmp_path / "s" / "slots")) == 3 * len(SLOTS)


def test_a_checkpoint_that_somebody_reads_is_not_overwritten_when_it_is_dropped(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        content = commit(store, 1)
        store.pin("a")
        commit(store, 2)
        with store.open_pin("a") as reader:
            arrays = {spec.name: reader.array(spec.name) for spec in SLOTS}
            store.unpin("a")
            for step in (3, 4, 5):
                commit(store, step)
            assert {name: array.tobytes() for name, array in arrays.items()} == content


def test_a_link_that_the_user_made_keeps_its_bytes(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        content = commit(store, 1)
        path = store.pin("a")
        mine = tmp_path / "mine"
        with store.open_pin("a") as reader:
            mine.hardlink_to(reader.file("b0001.exp_avg"))
        commit(store, 2)
        store.unpin("a")
        for step in (3, 4, 5):
            commit(store, step)
        assert mine.read_bytes() == content["b0001.exp_avg"]
        assert not path.exists()


def test_a_mapped_tensor_keeps_its_values_while_training_goes_on(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        content = commit(store, 1)
        mapped = store.map_tensor("b0000.exp_avg", "b0000.exp_avg.p0")
        assert not mapped.flags.writeable
        assert mapped.dtype == np.float32
        for step in (2, 3, 4):
            commit(store, step)
        assert mapped.tobytes() == content["b0000.exp_avg"]


def test_a_mapped_tensor_keeps_its_values_when_the_checkpoint_that_shares_its_file_is_dropped(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        content = commit(store, 1)
        mapped = store.map_tensor("b0000.exp_avg")
        store.pin("a")
        commit(store, 2)
        store.unpin("a")
        for step in (3, 4, 5):
            commit(store, step)
        assert mapped.tobytes() == content["b0000.exp_avg"]


def test_a_second_pin_of_the_same_step_is_the_same_and_of_another_step_is_refused(tmp_path: Path) -> None:
    with create(tmp_path / "s", pins=2) as store:
        commit(store, 1)
        assert store.pin("a") == store.pin("a")
        commit(store, 2)
        with pytest.raises(OverspillError, match="OVS604"):
            store.pin("a")
        store.pin("b")
        assert [(pin.name, pin.step) for pin in store.pins()] == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("name", ["../up", "", ".hidden", "a/b", "x" * 100, "nul\0"])
def test_a_checkpoint_name_that_is_no_plain_name_is_refused(name: str, tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        commit(store, 1)
        with pytest.raises(OverspillError, match="OVS504"):
            store.pin(name)


def test_another_dtype_is_refused_before_any_read_and_both_sides_are_named(tmp_path: Path) -> None:
    with create(tmp_path / "s", [slot("b0000.exp_avg", 1000, "bfloat16")]) as store:
        commit(store, 1)
    io = FaultyIO()
    with pytest.raises(OverspillError) as caught:
        DiskStore.open(tmp_path / "s", slots=[slot("b0000.exp_avg", 1000)], io=io)
    text = str(caught.value)
    assert caught.value.code == "OVS406"
    assert all(part in text for part in ("b0000.exp_avg.p0", "bfloat16", "2000 bytes", "float32", "4000 bytes"))
    assert io.calls.count("read") == 1  # the manifest, and no state


def test_every_difference_between_store_and_model_is_named(tmp_path: Path) -> None:
    first = SLOTS[0]
    tensor = first.tensors[0]
    changed = [
        (replace(first, tensors=(replace(tensor, shape=(50, 100)),)), "b0000.exp_avg, tensor b0000.exp_avg.p0"),
        (replace(first, tensors=(*first.tensors, TensorSpec("extra", 0, (1,), "float32"))), "extra"),
        (replace(first, tensors=()), "b0000.exp_avg, tensor b0000.exp_avg.p0"),
        (replace(first, state_class="master"), "b0000.exp_avg"),
        (replace(first, rank=1, world_size=2), "rank 1 of 2"),
        (replace(first, name="b0009.exp_avg"), "b0000.exp_avg"),
    ]
    create(tmp_path / "s").close()
    for spec, named in changed:
        with pytest.raises(OverspillError, match=f"OVS406.*{named}"):
            DiskStore.open(tmp_path / "s", slots=[spec, *SLOTS[1:]])


def test_ten_thousand_parameters_have_short_file_names_of_one_width(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.a_rather_long_parameter_name.weight" for i in range(10_000)]
    tensors = tuple(TensorSpec(name, i * 256, (64,), "float32") for i, name in enumerate(names))
    spec = replace(slot("b0000.exp_avg", 640_000), tensors=tensors)
    with create(tmp_path / "s", [spec, replace(spec, name="b0000.exp_avg_sq")]) as store:
        commit(store, 1)
        store.pin("a")
    found = [file.name for file in (tmp_path / "s").rglob("*")]
    assert max(map(len, found)) < 100
    assert {len(name) for name in found if name.startswith("f")} == {len(file_name(0))}
    with DiskStore.open(tmp_path / "s") as store:
        assert store.slots[0].tensors == tensors


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        commit(store, 1)
        store.pin("a")
        for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path


@settings(max_examples=60, deadline=None)
@given(
    numel=st.one_of(st.sampled_from([1, 2, 1023, 1024, 1025, 4099]), st.integers(1, 9000)),
    dtype=st.sampled_from(["float32", "bfloat16", "uint8"]),
    cuts=st.lists(st.integers(0, 36000), max_size=6),
    shift=st.integers(0, 600),
    checksum=st.booleans(),
    direct=st.booleans(),
    data=st.data(),
)
def test_any_length_and_alignment_is_written_and_read_exactly(
    numel: int,
    dtype: str,
    cuts: list[int],
    shift: int,
    checksum: bool,
    direct: bool,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    spec = slot("b0000.exp_avg", numel, dtype)
    path = tmp_path_factory.mktemp("any") / "s"
    content = random_content([spec], numel)[spec.name]
    edges = sorted({0, spec.nbytes, *(cut for cut in cuts if cut < spec.nbytes)})
    with create(path, [spec], pins=0, request_nbytes=4096, io=FaultyIO(direct=direct)) as store:
        for start, end in data.draw(st.permutations(list(pairwise(edges)))):
            memory = bytearray(shift + end - start)
            memory[shift:] = content[start:end]
            store.write_from(spec.name, start, memoryview(memory)[shift:], checksum=checksum)
        store.commit(store.prepare(1, {}))
        for start, end in pairwise(edges):
            memory = bytearray(shift + end - start)
            store.read_into(spec.name, start, memoryview(memory)[shift:], verify=True)
            assert memory[shift:] == content[start:end]
    with DiskStore.open(path) as store:
        assert read(store)[spec.name] == content


def test_threads_that_meet_inside_a_page_do_not_lose_each_others_bytes(tmp_path: Path) -> None:
    spec = slot("b0000.exp_avg", 64 * 1024, "uint8")
    with create(tmp_path / "s", [spec]) as store:
        content = random_content([spec], 1)[spec.name]
        edges = [0, *range(1000, spec.nbytes, 1500), spec.nbytes]
        ranges = list(pairwise(edges))

        def work(mine: list[tuple[int, int]]) -> None:
            for start, end in mine:
                store.write_from(spec.name, start, bytearray(content[start:end]), checksum=False)

        threads = [threading.Thread(target=work, args=(ranges[index::4],)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.commit(store.prepare(1, {}))
        assert read(store)[spec.name] == content


def test_slots_are_spread_in_proportion_to_the_speed_of_the_disks(tmp_path: Path) -> None:
    slots = [slot(f"b{i:04d}.exp_avg", 1024) for i in range(30)]
    disks = [tmp_path / "fast", tmp_path / "slow"]
    with create(tmp_path / "s", slots, directories=disks, weights=[2e9, 1e9]) as store:
        content = commit(store, 1)
        store.pin("a")
        commit(store, 2)
        counts = [len(list(disk.glob("overspill-*/slots/*.bin"))) for disk in disks]
        assert counts == [2 * 20 + 0, 2 * 10 + 0]
        assert [len(list(disk.glob("overspill-*/checkpoints/a/*.bin"))) for disk in disks] == [20, 10]
    with DiskStore.open(tmp_path / "s") as store:
        store.restore_pin("a")
        assert read(store) == content
        store.unpin("a")
        assert [len(list(disk.glob("overspill-*/slots/*.bin"))) for disk in disks] == [60, 30]


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=60), st.lists(st.floats(0.1, 10), min_size=1, max_size=4))
def test_no_disk_is_more_than_one_slot_ahead_of_its_share(nbytes: list[int], weights: list[float]) -> None:
    places = spread(nbytes, weights)
    seconds = [
        sum(length for length, at in zip(nbytes, places, strict=True) if at == index) / weight
        for index, weight in enumerate(weights)
    ]
    assert max(seconds) <= sum(nbytes) / sum(weights) + max(nbytes) / min(weights) + 1e-6


def test_state_that_appears_late_gets_slots_of_its_own(tmp_path: Path) -> None:
    late = slot("b0002.exp_avg", 777)
    with create(tmp_path / "s") as store:
        commit(store, 1)
        store.pin("before")
        store.add_slots([late])
        assert not store.is_written(late.name)
        content = commit(store, 2)
        assert store.is_written(late.name)
    with DiskStore.open(tmp_path / "s", slots=[*SLOTS, late]) as store:
        assert read(store) == content
        store.restore_pin("before")
        assert not store.is_written(late.name)


def test_the_counters_are_what_the_kernel_saw(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from disk_cases import slot, create, commit, read
def kernel():
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["rchar"]), int(facts["wchar"])
store = create(Path({str(tmp_path / "s")!r}), [slot("b0000.exp_avg", 1 << 20)], piece_nbytes=1 << 20)
read_before, written_before, kernel_before = store.bytes_read, store.bytes_written, kernel()
commit(store, 1, part_nbytes=1 << 20); read(store)
read_after, written_after = kernel()
for counted, seen in (store.bytes_read - read_before, read_after - kernel_before[0]), (
    store.bytes_written - written_before, written_after - kernel_before[1]):
    assert 4 << 20 <= counted <= seen <= 1.05 * counted, (counted, seen)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_no_more_than_a_bounded_number_of_descriptors_stays_open(tmp_path: Path) -> None:
    slots = [slot(f"b{i:04d}.exp_avg", 16) for i in range(300)]
    with create(tmp_path / "s", slots, pins=0) as store:
        before = len(names_in(Path("/proc/self/fd")))
        commit(store, 1)
        read(store)
        assert len(names_in(Path("/proc/self/fd"))) - before <= 128
    assert len(names_in(Path("/proc/self/fd"))) < before


def test_the_disk_tier_imports_no_torch() -> None:
    script = f"import sys; sys.path[:0] = {sys.path!r}; sys.modules['torch'] = None; import overspill.tiers.disk"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_disk_benchmark_prints_one_line_of_json_for_each_result(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "disk.py"
    command = [sys.executable, str(script), "--gb", "0.06", "--reps", "1", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["op"] for result in results] == ["write", "read", "mixed"]
    assert all(result["GBps"] > 0 for result in results)
    assert list(tmp_path.iterdir()) == []
