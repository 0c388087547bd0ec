"""The cards of this machine, from nvidia-smi or rocm-smi: stand-ins on PATH say what real ones were seen to say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overspill.probe.gpus import Gpu, card_of, find_gpus
from overspill.units import MiB


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but what a test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def put(folder: Path, name: str, output: str, *, status: int = 0, seconds: float = 0) -> None:
    script = folder / name
    said = folder / f"{name}.said"
    said.write_text(output)
    script.write_text(
        f"#!{sys.executable}\nimport sys, time\ntime.sleep({seconds})\n"
        f"open({str(folder / (name + '.asked'))!r}, 'w').write(' '.join(sys.argv[1:]))\n"
        f"sys.stdout.write(open({str(said)!r}).read())\nsys.exit({status})\n"
    )
    script.chmod(0o755)


def test_without_a_tool_there_is_no_gpu(tools: Path) -> None:
    assert find_gpus() is None


def test_nvidia_smi_gives_name_memory_and_what_others_hold(tools: Path) -> None:
    put(tools, "nvidia-smi", "0, NVIDIA GeForce RTX 4090, 24564, 1312, 550.54.15\n1, Tesla T4, 15360, 0, 550.54.15\n")
    found = find_gpus()
    assert found == (
        Gpu(index=0, name="NVIDIA GeForce RTX 4090", vendor="NVIDIA", memory_nbytes=24564 * MiB,
            held_nbytes=1312 * MiB, driver="550.54.15"),
        Gpu(index=1, name="Tesla T4", vendor="NVIDIA", memory_nbytes=15360 * MiB, driver="550.54.15"),
    )  # fmt: skip
    assert [card.name for gpu in found if (card := card_of(gpu))] == ["RTX 4090", "T4 16GB"]
    assert (tools / "nvidia-smi.asked").read_text() == (
        "--query-gpu=index,name,memory.total,memory.used,driver_version --format=csv,noheader,nounits"
    )


def test_visible_devices_choose_and_order(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tools, "nvidia-smi", "0, Tesla T4, 15360, 0, 550\n1, NVIDIA L4, 23034, 0, 550\n2, NVIDIA L4, 23034, 0, 550\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert [gpu.index for gpu in find_gpus() or ()] == [2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a31")
    assert len(find_gpus() or ()) == 3


def test_unified_memory_that_the_tool_does_not_count_is_zero(tools: Path) -> None:
    put(tools, "nvidia-smi", "0, NVIDIA GB10, [N/A], [N/A], 580.95.05\n")
    found = find_gpus()
    assert found is not None
    assert found[0].memory_nbytes == 0
    card = card_of(found[0])
    assert card is not None
    assert card.name == "GB10 (DGX Spark) 128GB"


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9),
        ("No devices were found\n", 0),
        ("", 0),
        ("garbage, with, five, odd, cells\n", 0),
        ("0, half a row\n", 0),
    ],
)
def test_a_tool_that_fails_means_no_gpu(tools: Path, output: str, status: int) -> None:
    put(tools, "nvidia-smi", output, status=status)
    assert find_gpus() is None


def test_a_tool_that_hangs_is_not_waited_for(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.probe.gpus._WAIT_SECONDS", 0.3)
    put(tools, "nvidia-smi", "0, Tesla T4, 15360, 0, 550\n", seconds=30)
    begin = time.monotonic()
    assert find_gpus() is None
    assert time.monotonic() - begin < 10


def test_rocm_smi_is_asked_where_there_is_no_nvidia_card(tools: Path) -> None:
    said = {
        "card0": {
            "Card Series": "AMD Instinct MI300X",
            "VRAM Total Memory (B)": "206141652992",
            "VRAM Total Used Memory (B)": "297791488",
        },
        "card1": {"Card series": "Radeon RX 7900 XTX", "VRAM Total Memory (B)": "25753026560"},
        "system": {"Driver version": "6.8.5"},
    }
    put(tools, "rocm-smi", json.dumps(said))
    found = find_gpus()
    assert found is not None
    assert [(gpu.vendor, gpu.memory_nbytes, gpu.held_nbytes) for gpu in found] == [
        ("AMD", 206141652992, 297791488),
        ("AMD", 25753026560, 0),
    ]
    assert [card.name for gpu in found if (card := card_of(gpu))] == [
        "Instinct MI300X 192GB",
        "Radeon RX 7900 XTX 24GB",
    ]
    put(tools, "rocm-smi", "not json")
    assert find_gpus() is None


def test_a_card_that_the_catalogue_does_not_know_is_still_found(tools: Path) -> None:
    put(tools, "nvidia-smi", "0, NVIDIA Prototype 123, 1024, 5, 999.1\n")
    found = find_gpus()
    assert found is not None
    assert card_of(found[0]) is None


def test_looking_for_cards_needs_no_torch(tools: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from overspill.probe.gpus import find_gpus\nassert find_gpus() is None"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
