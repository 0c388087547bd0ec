"""The layers of docs/theory/architecture.md hold: pure ones need no torch, nothing imports sideways or upwards.

Files stay short, too.
The order is written down once, here. A folder or file of src/overspill that it does not know makes the test fail, so
that a new one gets its place.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "overspill"

# From the ground up. A layer may import what stands in a lower row, and itself.
ORDER: tuple[tuple[str, ...], ...] = (
    ("_native", "errors"),
    ("units",),
    ("schema", "files"),
    ("catalog",),
    ("job", "machine", "plan", "report"),
    ("model", "probe"),
    ("schedule",),
    ("tiers", "optim", "forecast"),
    ("checkpoint", "trace", "planner"),
    ("train",),
    ("observe",),
    ("interop",),
    ("cli", "web"),
)
RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}
PURE = (
    "units",
    "errors",
    "schema",
    "catalog",
    "job",
    "machine",
    "plan",
    "report",
    "model",
    "schedule",
    "forecast",
    "planner",
)
LINES_LIMIT = 600


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem not in ("__init__",))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Modules of overspill that a file imports, wherever in it; those for type checkers only are left out."""
    found: set[str] = set()
    skipped: set[ast.AST] = set()
    package = ".".join(("overspill", *path.relative_to(PACKAGE).parts[:-1]))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found.add(base)
            if base == "overspill":
                found.update(f"overspill.{alias.name}" for alias in node.names)
    return {name for name in found if name.startswith("overspill.")}


@pytest.mark.parametrize("layer", PURE)
def test_a_pure_layer_imports_with_torch_blocked(layer: str) -> None:
    code = (
        "import importlib, pkgutil, sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        f"module = importlib.import_module('overspill.{layer}')\n"
        "for found in pkgutil.walk_packages(getattr(module, '__path__', []), module.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_folder_and_file_has_its_layer() -> None:
    assert {layer_of(path) for path in sources()} - {"__main__"} <= set(RANK)


def test_no_module_imports_sideways_or_upwards() -> None:
    wrong = []
    for path in sources():
        layer = layer_of(path)
        if layer == "__main__":
            continue
        for name in imported(path):
            other = name.split(".")[1]
            if other in RANK and other != layer and RANK[other] >= RANK[layer]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_an_import_upwards_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "overspill" / "model"
    fake.mkdir(parents=True)
    (fake / "bad.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import overspill.cli\n"
        "def late():\n    from overspill.train import attach\n    from . import blocks\n"
        "    from ..planner import plan\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "overspill")
    assert imported(fake / "bad.py") == {"overspill.train", "overspill.model", "overspill.planner"}


def test_no_source_file_is_longer_than_the_limit() -> None:
    folders = ("src", "native", "testing", "tests", "benchmarks", "examples")
    files = [
        path
        for folder in folders
        for pattern in ("*.py", "*.cpp", "*.h")
        for path in (ROOT / folder).rglob(pattern)
        if "third_party" not in path.parts
    ]
    assert files
    long = {str(path.relative_to(ROOT)): n for path in files if (n := path.read_text().count("\n")) > LINES_LIMIT}
    assert long == {}
