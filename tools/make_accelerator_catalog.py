"""Makes src/overspill/catalog/accelerators.csv from a folder that holds gpus.csv, a table of published card facts.

    python tools/make_accelerator_catalog.py DIR

It keeps every row with its source, splits free texts into figures (what nvidia-smi and what torch report, what a link
moves in one direction), adds compute capabilities, and drops no row and invents none: an empty cell stays empty.
Figures that the table's own notes call recalled, not looked up, are listed in the column `recalled`.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = REPOSITORY / "src" / "overspill" / "catalog" / "accelerators.csv"

COLUMNS = (
    "name", "vendor", "arch", "compute_capability", "year", "memory_gib", "memory_kind", "smi_mib", "runtime_gib",
    "usable_source", "bandwidth_gb_s", "fp32_tflops", "tf32_tflops", "fp16_tflops", "bf16_tflops", "fp8_tflops",
    "measured_bf16_tflops", "tdp_w", "host_link", "host_gb_s", "gpu_link", "gpu_gb_s", "price_usd", "price_source",
    "cloud_usd_per_hour", "cloud_source", "source", "confidence", "recalled", "notes",
)  # fmt: skip

#: developer.nvidia.com/cuda-gpus and /cuda-legacy-gpus (read 2026); ROCm's documentation of LLVM targets for AMD.
CAPABILITY_BY_NAME = (
    (r"^P100", "6.0"), (r"^P40|GTX 1080", "6.1"), (r"^V100|TITAN V$", "7.0"),
    (r"^T4|RTX 20|Quadro RTX|TITAN RTX", "7.5"),
    (r"^A100|^A30|^A800", "8.0"), (r"Jetson .*Orin", "8.7"), (r"^GB10", "12.1"), (r"Jetson AGX Thor", "11.0"),
    (r"^(B100|B200|GB200)", "10.0"), (r"^(B300|GB300)", "10.3"), (r"MI100", "gfx908"), (r"MI2[15]0", "gfx90a"),
    (r"MI3[02]", "gfx942"), (r"MI35", "gfx950"), (r"7900|W7900|W7800", "gfx1100"), (r"9070", "gfx1201"),
    (r"9060", "gfx1200"), (r"8060S", "gfx1151"),
)  # fmt: skip
CAPABILITY_BY_ARCH = {"Ampere": "8.6", "Ada Lovelace": "8.9", "Hopper": "9.0", "Hopper + Grace": "9.0",
                      "Blackwell 2.0": "12.0"}  # fmt: skip

#: PCI Express Base Specification: GT/s a lane, and the share that encoding leaves (128b/130b; FLIT mode from 6.0 on).
PCIE_GB_S_PER_LANE = {
    "3.0": 8 * 128 / 130 / 8,
    "4.0": 16 * 128 / 130 / 8,
    "5.0": 32 * 128 / 130 / 8,
    "6.0": 64 * 242 / 256 / 8,
}

#: What torch called the total, in GiB, in public reports of out-of-memory errors that name the card (read 2026-11-30).
RUNTIME_SEEN = {
    "A100 PCIe 40GB": (39.50, "TianheWu/CoSeR#10"),
    "A100 SXM 40GB": (39.50, "TianheWu/CoSeR#10"),
    "A100 PCIe 80GB": (79.25, "levihsu/OOTDiffusion#235"),
    "A100 SXM 80GB": (79.25, "levihsu/OOTDiffusion#235"),
    "A30 24GB": (23.53, "google/RB-Modulation#5"),
    "RTX A4000": (15.61, "DengKaiCQ/VGGT-Long#6"),
    "RTX 3080": (9.78, "zai-org/CogVideo#34"),
    "RTX 5090": (31.37, "Wan-Video/Wan2.1#465"),
}

#: Architectures without bf16 matrix units: the table's figure is that of fp16.
NO_BF16 = ("Pascal", "Volta", "Turing")


def capability(name: str, arch: str) -> str:
    found = next((value for pattern, value in CAPABILITY_BY_NAME if re.search(pattern, name)), "")
    return found or CAPABILITY_BY_ARCH.get(arch, "")


def seen_mib(detail: str) -> str:
    """What nvidia-smi calls the total, in MiB; the smallest where several were seen."""
    by_smi = re.search(r"nvidia-smi (\d{4,6})", detail)
    found = by_smi or re.search(r"\((\d{4,6}) MiB", detail)
    if by_smi is None and "by nvidia-smi" in detail:  # the MiB are the vendor's there; nvidia-smi's figure is in GiB
        gib = re.search(r"([\d.]+) by nvidia-smi", detail)
        return str(round(float(gib[1]) * 1024)) if gib else ""
    return found[1] if found else ""


def runtime_gib(detail: str) -> str:
    """What torch calls the total, in GiB; the middle where a range was seen."""
    found = re.search(r"torch(?:/CUDA)? ([\d.]+)(?:-([\d.]+))?", detail) or re.search(r"^([\d.]+) \(torch", detail)
    if not found:
        return ""
    low = float(found[1])
    high = float(found[2]) if found.lastindex == 2 and found[2] else low
    return f"{(low + high) / 2:.4g}"


def host_gb_s(link: str) -> str:
    """GB/s in one direction, in theory."""
    pcie = re.search(r"PCIe (\d\.0) x(\d+)", link)
    if pcie:
        return f"{PCIE_GB_S_PER_LANE[pcie[1]] * int(pcie[2]):.4g}"
    chip = re.search(r"NVLink-C2C (\d+)", link)
    return f"{int(chip[1]) / 2:.4g}" if chip else ""


def gpu_gb_s(link: str) -> str:
    """GB/s in one direction: the table's figure is that of both."""
    found = re.search(r"(\d+(?:\.\d+)?)$", link)
    return f"{float(found[1]) / 2:.4g}" if found and link != "NVLink" else ""


def row_of(row: dict[str, str]) -> dict[str, str]:
    detail, tensor, arch = row["usable_detail"], row["fp16_bf16_dense_tflops"], row["arch"]
    seen = RUNTIME_SEEN.get(row["name"])
    if seen and "torch" not in detail:
        detail = "; ".join(filter(None, [detail, f"torch {seen[0]} ({seen[1]})"]))
    cells = {
        "name": row["name"],
        "vendor": row["vendor"],
        "arch": arch,
        "compute_capability": capability(row["name"], arch),
        "year": row["year"],
        "memory_gib": f"{float(row['memory_gib']):g}",
        "memory_kind": row["memory_kind"],
        "smi_mib": seen_mib(detail),
        "runtime_gib": runtime_gib(detail),
        "usable_source": detail,
        "bandwidth_gb_s": row["bandwidth_gb_s"],
        "fp32_tflops": row["fp32_tflops"],
        "tf32_tflops": row["tf32_tflops"] if arch not in NO_BF16 else "",
        "fp16_tflops": tensor,
        "bf16_tflops": "" if arch in NO_BF16 else tensor,
        "fp8_tflops": row["fp8_dense_tflops"],
        "measured_bf16_tflops": row["mamf_bf16_tflops"],
        "tdp_w": row["tdp_w"],
        "host_link": row["host_link"],
        "host_gb_s": host_gb_s(row["host_link"]),
        "gpu_link": row["gpu_link"],
        "gpu_gb_s": gpu_gb_s(row["gpu_link"]),
        "price_usd": row["street_or_list_price_usd"],
        "price_source": row["price_detail"],
        "cloud_usd_per_hour": row["cloud_usd_per_hour"],
        "cloud_source": row["cloud_detail"],
        "source": "recalled, not looked up" if row["source"] == "memory" else row["source"],
        "confidence": row["confidence"],
        "recalled": row["b_fields"],
        "notes": re.sub(r" \(\w+\.md\)", "", row["notes"]),
    }
    assert tuple(cells) == COLUMNS
    return _one_device(cells) if "(2 GCD)" in row["name"] else cells


def _one_device(cells: dict[str, str]) -> dict[str, str]:
    """A board of two dies, each of which is a device of its own: half of everything but the link to the host."""
    halved = ("memory_gib", "bandwidth_gb_s", "fp32_tflops", "tf32_tflops", "fp16_tflops", "bf16_tflops", "tdp_w")
    half = {key: f"{float(cells[key]) / 2:g}" if cells[key] else "" for key in halved}
    name = re.sub(r" \d+GB \(2 GCD\)", f" {half['memory_gib']}GB (per GCD, 2 on board)", cells["name"])
    return cells | half | {"name": name}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="holds gpus.csv")
    source = parser.parse_args().directory / "gpus.csv"
    with source.open(encoding="utf-8", newline="") as file:
        rows = [row_of(row) for row in csv.DictReader(file)]
    assert len({row["name"] for row in rows}) == len(rows), "a name stands twice"
    with OUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {len(rows)} accelerators to {OUT.relative_to(REPOSITORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
