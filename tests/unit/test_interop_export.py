"""What is exported loads in transformers with the same logits, and a killed export leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from overspill.errors import OverspillError
from overspill.interop.export import export_safetensors, model_tensors
from overspill.interop.safetensors_file import read_entries
from testing.peak import measure_peak_nbytes
from testing.tiny import make_tiny_model

TOKENS = torch.arange(2 * 19).reshape(2, 19) * 7 % 1000


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_nbytes", [2**31, 150_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_exported_model_computes_the_same_logits_in_transformers(tmp_path, tied, shard_nbytes, dtype):
    source = make_tiny_model(tmp_path / "source", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    report = export_safetensors(model_tensors(model), tmp_path / "out", source_dir=source, shard_nbytes=shard_nbytes)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert loaded.dtype == dtype
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(_logits(loaded), _logits(model))
    assert report.nbytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert (len(report.files) > 1) == (shard_nbytes == 150_000)
    stored = [name for file in report.files for name in read_entries(tmp_path / "out" / file)]
    assert len(stored) == len(set(stored)) == report.tensors
    assert ("lm_head.weight" in stored) != tied
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert ours("Hail, king!").input_ids == AutoTokenizer.from_pretrained(source)("Hail, king!").input_ids
    assert ours.chat_template == AutoTokenizer.from_pretrained(source).chat_template


def test_shards_stay_below_their_limit_and_the_index_names_them(tmp_path, source):
    model = AutoModelForCausalLM.from_pretrained(source)
    report = export_safetensors(model_tensors(model), tmp_path / "out", source_dir=source, shard_nbytes=200_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.nbytes
    for file in report.files:
        entries = read_entries(tmp_path / "out" / file)
        assert sum(entry.nbytes for entry in entries.values()) <= 200_000 or len(entries) == 1
        assert all(index["weight_map"][name] == file for name in entries)


def test_numpy_arrays_of_raw_bf16_and_strided_tensors_are_written_as_they_are(tmp_path, source):
    bf16 = torch.randn(6, 4).to(torch.bfloat16)
    strided = torch.randn(4, 6).t()
    raw = bf16.view(torch.int16).numpy().view(np.uint16)
    export_safetensors(
        [
            ("raw", torch.bfloat16, (6, 4), lambda: raw),
            ("strided", torch.float32, (6, 4), lambda: strided),
            ("scalar", torch.float32, (), lambda: torch.tensor(2.5)),
            ("empty", torch.float32, (0, 3), lambda: torch.empty(0, 3)),
        ],
        tmp_path / "out",
        source_dir=source,
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["raw"], bf16) and torch.equal(stored["strided"], strided)
    assert stored["scalar"].item() == 2.5 and stored["empty"].shape == (0, 3)


def test_an_export_killed_in_the_middle_leaves_no_model_and_the_next_one_succeeds(tmp_path, source):
    script = f"""
import os, signal, torch
from overspill.interop.export import export_safetensors
def die():
    os.kill(os.getpid(), signal.SIGKILL)
tensors = [("a", torch.float32, (1000,), lambda: torch.ones(1000)), ("b", torch.float32, (1000,), die)]
export_safetensors(tensors, {str(tmp_path / "out")!r}, source_dir={str(source)!r}, shard_nbytes=4000)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.partial" / "model-00001-of-00002.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(source)
    export_safetensors(model_tensors(model), tmp_path / "out", source_dir=source)
    assert torch.equal(_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), _logits(model))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failing_export_cleans_up_after_itself(tmp_path, source):
    def fail():
        raise RuntimeError("the state cannot be read")

    with pytest.raises(RuntimeError):
        export_safetensors([("a", torch.float32, (2,), fail)], tmp_path / "out", source_dir=source)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_something_is_not_overwritten(tmp_path, source):
    (tmp_path / "out").mkdir()
    export_safetensors([("a", torch.float32, (2,), lambda: torch.ones(2))], tmp_path / "out", source_dir=source)
    with pytest.raises(OverspillError, match="not empty") as caught:
        export_safetensors([], tmp_path / "out", source_dir=source)
    assert caught.value.code == "OVS605"


def test_two_exports_to_one_directory_do_not_mix(tmp_path, source):
    caught: list[OverspillError] = []

    def second_export():
        with pytest.raises(OverspillError) as error:
            export_safetensors([], tmp_path / "out", source_dir=source)
        caught.append(error.value)
        return torch.ones(2)

    export_safetensors([("a", torch.float32, (2,), second_export)], tmp_path / "out", source_dir=source)
    assert [error.code for error in caught] == ["OVS405"]
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].tolist() == [1, 1]


def test_a_path_below_a_file_is_no_directory_to_export_to(tmp_path, source):
    (tmp_path / "file").write_text("")
    with pytest.raises(OverspillError) as caught:
        export_safetensors([], tmp_path / "file" / "out", source_dir=source)
    assert caught.value.code == "OVS402"


def test_more_than_the_disk_holds_is_refused_before_anything_is_written(tmp_path, source):
    huge = [("a", torch.float32, (2**50,), lambda: None)]
    with pytest.raises(OverspillError, match="do not fit") as caught:
        export_safetensors(huge, tmp_path / "out", source_dir=source)
    assert caught.value.code == "OVS401"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_is_named_as_such(tmp_path, source, monkeypatch):
    def write(descriptor: int, data: memoryview, real=os.write) -> int:
        with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123 (the kernel's own ENOSPC)
            return real(full.fileno(), data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OverspillError) as caught:
        export_safetensors([("a", torch.float32, (2,), lambda: torch.ones(2))], tmp_path / "out", source_dir=source)
    assert caught.value.code == "OVS401"
    assert list(tmp_path.iterdir()) == []


def test_exporting_takes_one_tensor_of_memory(tmp_path, source):
    # As in a session, large blocks are mapped. Else glibc's heap keeps up to three of the tensors that this test
    # makes (a plain loop of torch.full does the same), and they would be taken for the export's.
    before = """
import torch
from overspill.interop.export import export_safetensors
from overspill.train.malloc import map_large_blocks
map_large_blocks()
torch.zeros(1000).numpy()
"""
    piece = f"""
tensors = [(f"t{{i}}", torch.float32, (4 * 2**20,), lambda i=i: torch.full((4 * 2**20,), float(i))) for i in range(12)]
export_safetensors(tensors, {str(tmp_path / "out")!r}, source_dir={str(source)!r}, shard_nbytes=80 * 2**20)
"""
    (peak,) = measure_peak_nbytes(before, piece)
    assert 14 * 2**20 < peak < 28 * 2**20  # a tensor has 16 MiB, all have 192
    with safe_open(tmp_path / "out" / "model-00003-of-00003.safetensors", "pt") as file:
        assert file.get_slice("t11")[-1].item() == 11


# The format: whatever bytes a file holds, it is read rightly or refused by name


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_refused_and_never_misread(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}, file)
    good = bytearray(file.read_bytes())
    whole = read_entries(file)
    assert {name: entry.shape for name, entry in whole.items()} == {"a": (2, 3), "b": (5,)}
    begin = data.draw(st.integers(0, len(good) - 1))
    good[begin : begin + data.draw(st.integers(0, 12))] = data.draw(st.binary(max_size=12))
    file.write_bytes(good)
    try:
        entries = read_entries(file)
    except OverspillError as error:
        assert error.code == "OVS202" and "fuzzed.safetensors" in error.message
    else:
        size = file.stat().st_size
        assert all(entry.begin >= 8 and entry.begin + entry.nbytes <= size for entry in entries.values())


def test_headers_that_lie_about_lengths_are_refused(tmp_path):
    def header(**rows: object) -> bytes:
        text = json.dumps(rows).encode()
        return len(text).to_bytes(8, "little") + text

    row = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    lies = {
        "hole": header(a=row, b={**row, "data_offsets": [12, 20]}) + bytes(20),
        "overlap": header(a=row, b={**row, "data_offsets": [4, 12]}) + bytes(12),
        "negative": header(a={**row, "data_offsets": [-8, 0]}),
        "fraction": header(a={**row, "shape": [2.0]}) + bytes(8),
        "product": header(a={**row, "shape": [2**40, 2**40]}) + bytes(8),
        "dtype": header(a={**row, "dtype": "F3"}) + bytes(8),
        "long": header(a=row) + bytes(9),
        "list": header(a=[1, 2]),
        "huge header": (2**63).to_bytes(8, "little") + b"{}",
    }
    for name, content in lies.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OverspillError) as caught:
            read_entries(tmp_path / name)
        assert caught.value.code == "OVS202", name
