"""Facts of the user's own: read from two places, checked, and used before the catalogue's."""

from __future__ import annotations

from pathlib import Path

import pytest

from overspill.catalog.accelerators import accelerator
from overspill.catalog.user import UserCatalogue, find_accelerator, read_user_catalogue
from overspill.errors import OverspillError
from overspill.units import GiB

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "extend-the-catalogue.md"


def read(tmp_path: Path, text: str) -> UserCatalogue:
    (tmp_path / "overspill.toml").write_text(text)
    return read_user_catalogue(tmp_path, home=tmp_path / "home")


def test_without_files_there_is_nothing(tmp_path: Path) -> None:
    found = read_user_catalogue(tmp_path, home=tmp_path / "none")
    assert (found.accelerators, found.optimizers, found.architectures) == ({}, {}, {})
    assert find_accelerator("rtx4090", found) is accelerator("rtx4090")


def test_a_card_like_another_changes_what_is_given(tmp_path: Path) -> None:
    found = read(tmp_path, '[accelerator.rtx4090-48g]\nlike = "RTX 4090"\nmemory = "48GiB"\naliases = ["my card"]\n')
    card = find_accelerator("RTX4090 48G", found)
    assert card.memory_nbytes == 48 * GiB
    assert card.bandwidth_bytes_per_s == accelerator("rtx 4090").bandwidth_bytes_per_s
    assert 0.97 < card.usable_nbytes / card.memory_nbytes < 1
    assert card.source.endswith("overspill.toml")
    assert find_accelerator("My-Card", found) is card


def test_a_card_of_its_own_needs_memory_and_bandwidth(tmp_path: Path) -> None:
    text = '[accelerator.npu]\nmemory = "64GB"\nbandwidth = "1.6TB/s"\ntflops = {bf16 = 320}\nprice_usd = 5000\n'
    card = find_accelerator("npu", read(tmp_path, text))
    assert card.memory_nbytes == 64 * 1000**3
    assert card.flops_per_s == {"bf16": 320e12}
    assert 0 < card.usable_low_nbytes <= card.usable_nbytes < card.memory_nbytes
    assert card.price is not None
    assert card.price.usd == 5000
    stated = find_accelerator("npu", read(tmp_path, text + 'usable = "60GB"\n'))
    assert (stated.usable_nbytes, stated.usable_rule) == (60 * 1000**3, "stated")


def test_the_file_beside_the_job_wins_over_the_home_directory(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "b.toml").write_text("[optimizer.mine]\nstate_bytes_per_parameter = 2\n")
    (home / "a.toml").write_text(
        "[optimizer.mine]\nstate_bytes_per_parameter = 1\n[optimizer.other]\nstate_bytes_per_parameter = 4\n"
    )
    found = read_user_catalogue(None, home=home)
    assert found.optimizers["mine"].state_bytes_per_parameter == 2
    assert found.optimizers["other"].state_bytes_per_parameter == 4
    assert found.sources["optimizer.mine"] == home / "b.toml"
    found = read(tmp_path, '[optimizer.mine]\nstate_bytes_per_parameter = 8\nmaster = "fp32"\n')
    assert (found.optimizers["mine"].state_bytes_per_parameter, found.optimizers["mine"].master) == (8, "fp32")
    assert found.sources["optimizer.mine"] == tmp_path / "overspill.toml"


def test_the_home_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "overspill").mkdir()
    (tmp_path / "overspill" / "x.toml").write_text("[optimizer.mine]\nstate_bytes_per_parameter = 2\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert set(read_user_catalogue().optimizers) == {"mine"}


def test_the_recipe_of_the_documentation_is_a_file_that_works(tmp_path: Path) -> None:
    blocks = EXAMPLE.read_text(encoding="utf-8").split("```toml")[1:]
    assert len(blocks) >= 3
    found = read(tmp_path, "\n".join(block.split("```")[0] for block in blocks))
    assert found.accelerators
    assert found.optimizers
    assert found.architectures


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("[accelerator.x]\nmemory = '8GiB'\n", "OVS101", "memory and bandwidth"),
        ("[accelerator.x]\nlike = 'RTX 9090'\n", "OVS110", "Nearest"),
        ("[accelerator.x]\nmemory = 'lots'\nbandwidth = '1TB/s'\n", "OVS102", "lots"),
        ("[accelerator.x]\nmemory = '8GiB'\nbandwidth = '1TB/s'\nusable = '9GiB'\n", "OVS101", "more than memory"),
        ("[accelerator.x]\nmemmory = '8GiB'\n", "OVS101", "memory"),
        ("[accelerators.x]\nmemory = '8GiB'\n", "OVS101", "accelerator"),
        ("[optimizer.x]\nmaster = 'bf16'\nstate_bytes_per_parameter = 2\n", "OVS101", "fp32"),
        ("[optimizer.x]\n", "OVS101", "state_bytes_per_parameter"),
        ("[optimizer.x]\nstate_bytes_per_parameter = -1\n", "OVS101", "greater"),
        ("[architecture.x]\nlayers = 3\n", "OVS101", "needs config"),
        ("[architecture.x]\nlayers = 3\n[architecture.x.config]\nmodel_type = 'llama'\n", "OVS101", "not both"),
        ("[accelerator\n", "OVS111", "no valid TOML"),
        ("x = 5\n", "OVS101", "x"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path: Path, text: str, code: str, word: str) -> None:
    with pytest.raises(OverspillError) as error:
        read(tmp_path, text)
    assert error.value.code == code
    assert word in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "overspill.toml").mkdir()
    with pytest.raises(OverspillError, match=r"OVS111.*overspill\.toml"):
        read_user_catalogue(tmp_path, home=tmp_path)
