"""Every script in examples/ runs as its first lines say, and checks its own numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs_and_its_losses_are_bit_identical(script: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "All losses are bit-identical." in done.stdout
