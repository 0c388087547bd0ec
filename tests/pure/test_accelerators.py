"""The catalogue of accelerators: rows with sources, usable memory by rules that say so, names as people type them."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.catalog.accelerators import Accelerator, accelerator, accelerators, best_matches, usable_of
from overspill.catalog.names import squeeze
from overspill.catalog.overheads import context, cublas_workspace, facts, nccl_channel, nccl_communicator
from overspill.errors import OverspillError
from overspill.units import GiB, MiB


def test_there_are_at_least_140_with_what_a_forecast_needs() -> None:
    cards = accelerators()
    assert len(cards) >= 140
    assert len({card.name for card in cards}) == len(cards)
    for card in cards:
        assert card.source, card.name
        assert card.memory_nbytes >= 4 * GiB, card.name
        assert card.bandwidth_bytes_per_s > 5e10, card.name
        assert 0 < card.usable_low_nbytes <= card.usable_nbytes <= card.usable_high_nbytes, card.name
        assert card.usable_nbytes <= card.seen_nbytes <= card.memory_nbytes, card.name
        assert card.usable_rule, card.name
        assert card.year >= 2016
        if card.confidence == "A":
            assert "http" in card.source or "stas00" in card.source or "huggingface" in card.source, card.name


def test_prices_say_where_and_when() -> None:
    priced = [card for card in accelerators() if card.price or card.cloud_per_hour]
    assert len(priced) > 60
    for card in priced:
        for price in (card.price, card.cloud_per_hour):
            assert price is None or (price.usd > 0 and len(price.source) > 8), card.name


def test_what_was_stated_is_not_changed() -> None:
    assert accelerator("rtx 4090").seen_nbytes == 24564 * MiB
    assert accelerator("t4").usable_nbytes == round(14.75 * GiB)
    assert accelerator("h100 sxm").usable_nbytes == round(79.11 * GiB)
    assert accelerator("h100 sxm").usable_rule == "stated"
    assert accelerator("b300").seen_nbytes == 275040 * MiB


@pytest.mark.parametrize("card", accelerators(), ids=lambda card: card.name)
def test_a_derived_figure_lies_near_those_that_were_stated(card: Accelerator) -> None:
    """Cards whose ECC lies in their memory keep a sixteenth of it; what is left goes to the driver."""
    if card.unified:
        return
    share = card.usable_nbytes / card.memory_nbytes
    inline_ecc = card.name.split()[0] in ("P40", "T4", "A2", "A10", "A10G", "A16", "A40", "L4", "L40", "L40S")
    if inline_ecc:
        assert 0.90 < share < 0.94
    elif card.arch.startswith("Blackwell Ultra"):
        assert 0.92 < share < 0.94
    else:
        assert 0.93 < share < 1.0


def test_the_rule_leaves_each_stated_card_out_and_still_finds_it() -> None:
    """Of the cards that state what the runtime offers: usable_of(what the driver shows) is within 2 %."""
    stated = [card for card in accelerators() if card.usable_rule == "stated" and card.vendor == "NVIDIA"]
    assert len(stated) >= 12
    for card in stated:
        usable, low, high = usable_of(card.seen_nbytes)
        assert low <= card.usable_nbytes <= high, card.name
        assert abs(usable - card.usable_nbytes) < 0.02 * card.usable_nbytes, card.name


@given(st.integers(1, 1000 * GiB))
def test_usable_memory_grows_with_the_total_and_never_exceeds_it(total: int) -> None:
    usable, low, high = usable_of(total)
    assert 0 <= low <= usable <= high <= total
    assert usable_of(total + GiB)[0] >= usable


def test_geforce_figures_are_with_fp32_accumulation() -> None:
    card = accelerator("rtx 4090")
    assert card.flops_per_s["bf16"] == 165e12
    assert "bf16" not in accelerator("v100 16gb").flops_per_s  # Volta has no bf16 units
    assert accelerator("v100 sxm2 16gb").flops_per_s["fp16"] == 125e12


def test_links_are_in_one_direction() -> None:
    assert accelerator("h100").gpu_bytes_per_s == 450e9
    assert accelerator("rtx 4090").host_bytes_per_s == pytest.approx(31.5e9, rel=0.01)
    assert accelerator("gh200 96gb").host_bytes_per_s == 450e9


def test_a_board_of_two_dies_is_one_device_each() -> None:
    card = accelerator("mi250x")
    assert card.memory_nbytes == 64 * GiB
    assert card.bandwidth_bytes_per_s == 1640e9


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rtx4090", "RTX 4090"), ("RTX 4090", "RTX 4090"), ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090 laptop", "RTX 4090 Laptop"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("3090", "RTX 3090"), ("2080ti", "RTX 2080 Ti"), ("rtx 3080 12gb", "RTX 3080 12 GB"), ("3080", "RTX 3080"),
        ("A100-80GB", "A100 SXM 80GB"), ("a100 80gb", "A100 SXM 80GB"), ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"), ("a100-40gb", "A100 SXM 40GB"), ("H100", "H100 SXM 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"), ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("h100 nvl", "H100 NVL 94GB"),
        ("NVIDIA H200", "H200 SXM 141GB"), ("NVIDIA GH200 480GB", "GH200 96GB (HBM3)"), ("l40s", "L40S 48GB"),
        ("NVIDIA L4", "L4 24GB"), ("Tesla T4", "T4 16GB"), ("t4", "T4 16GB"), ("a10g", "A10G 24GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"), ("NVIDIA RTX A6000", "RTX A6000"), ("a6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada Generation"), ("6000 ada", "RTX 6000 Ada Generation"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation"),
        ("AMD Instinct MI300X", "Instinct MI300X 192GB"), ("7900xtx", "Radeon RX 7900 XTX 24GB"),
        ("m3 ultra", "Apple M3 Ultra"), ("4060 ti 16gb", "RTX 4060 Ti 16 GB"), ("dgx spark", "GB10 (DGX Spark) 128GB"),
        ("arc b580", "Arc B580 12GB"), ("w7900", "Radeon PRO W7900 48GB"), ("tpu v5e", "TPU v5e"),
    ],
)  # fmt: skip
def test_what_people_type_finds_the_card(typed: str, meant: str) -> None:
    assert accelerator(typed).name == meant


@pytest.mark.parametrize("card", accelerators(), ids=lambda card: card.name)
def test_every_card_is_found_by_its_own_name_however_it_is_written(card: Accelerator) -> None:
    for written in (card.name, card.name.lower(), card.name.replace(" ", "-"), card.name.upper()):
        assert accelerator(written) is card


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("A100", ["A100 SXM 40GB", "A100 SXM 80GB"]),
        ("v100", ["V100 SXM2 16GB", "V100 SXM2 32GB"]),
        ("4060 ti", ["RTX 4060 Ti 8 GB", "RTX 4060 Ti 16 GB"]),
        ("gh200", ["GH200 96GB (HBM3)", "GH200 144GB (HBM3e)"]),
        ("rtx 6000", ["RTX 6000 Ada Generation"]),
        ("rtx9090", ["RTX 4090", "RTX 5090"]),
        ("quadro rtx 9000", ["Quadro RTX 8000"]),
        ("rtx 4090 48gb", ["RTX 4090"]),
        ("80gb", []),
        ("", []),
        ("???", []),
    ],
)
def test_a_name_of_several_or_of_none_is_refused_with_names(typed: str, offered: list[str]) -> None:
    with pytest.raises(OverspillError) as error:
        accelerator(typed)
    assert error.value.code == "OVS110"
    for name in offered:
        assert name in error.value.next_step


def test_the_memory_that_a_driver_reports_decides_between_sizes() -> None:
    assert accelerator("A100", memory_nbytes=81920 * MiB).name == "A100 SXM 80GB"
    assert accelerator("NVIDIA GeForce RTX 3060 Ti", memory_nbytes=8192 * MiB).name == "RTX 3060 Ti"
    assert accelerator("4060ti", memory_nbytes=16380 * MiB).name == "RTX 4060 Ti 16 GB"


@given(st.text(max_size=30))
def test_any_text_is_found_or_refused_in_words(text: str) -> None:
    assert re.fullmatch(r"[a-z0-9]*", squeeze(text))
    try:
        card = accelerator(text)
    except OverspillError as error:
        assert error.code == "OVS110"
        return
    assert card in accelerators()
    assert best_matches(text)


def test_a_look_up_is_fast_enough_for_a_command_line() -> None:
    accelerators()
    accelerator("rtx4090")
    begin = time.perf_counter()
    for _ in range(100):
        accelerator("a100 80gb")
    assert (time.perf_counter() - begin) / 100 < 0.002


# Beside the tensors ------------------------------------------------------------------------------------------------


def test_every_overhead_has_a_source_and_a_mechanism() -> None:
    for fact in facts():
        assert fact.nbytes > 0
        assert len(fact.source) > 15
        assert len(fact.mechanism) > 15
    assert {fact.kind for fact in facts()} == {"context", "cublas_workspace", "nccl_channel", "nccl_communicator"}


def test_a_context_was_larger_before_kernels_were_loaded_lazily() -> None:
    new, old = context(torch="2.6.0+cu124"), context(torch="1.12.1")
    assert 200 * MiB < new.low_nbytes < new.high_nbytes < 600 * MiB < old.low_nbytes
    assert context(torch="2.6", loading="eager").low_nbytes > new.high_nbytes


def test_the_cublas_workspace_follows_card_and_version() -> None:
    assert cublas_workspace(capability="8.9", torch="2.6").low_nbytes == 2 * 4096 * 1024 + 8 * 16 * 1024
    hopper = cublas_workspace(capability="9.0", torch="2.6")
    assert hopper.low_nbytes == hopper.high_nbytes == 32 * MiB
    assert cublas_workspace(capability="12.0", torch="2.8").high_nbytes == 8_519_680
    between = cublas_workspace(capability="12.0", torch="2.11")
    assert (between.low_nbytes, between.high_nbytes) == (8_519_680, 32 * MiB)
    assert cublas_workspace(capability="12.0", torch="2.13.0").low_nbytes == 32 * MiB
    assert cublas_workspace(capability="gfx942").facts == ()
    assert cublas_workspace(capability=None).high_nbytes == 32 * MiB


def test_nccl_holds_buffers_for_each_channel_and_more_as_a_whole() -> None:
    assert nccl_channel().low_nbytes == 4 * MiB
    assert nccl_channel().high_nbytes == 10 * MiB
    assert nccl_communicator().low_nbytes > 16 * nccl_channel().low_nbytes
