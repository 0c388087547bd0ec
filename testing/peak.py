"""How much memory pieces of code take at their peak, measured in a fresh process by the kernel.

``/proc/self/clear_refs`` sets the high-water mark back before each piece, so imports before it do not hide it.
Anonymous and mapped file pages both count, as they do in a cgroup.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["measure_peak_nbytes"]

_HEAD = """
from pathlib import Path as _Path

def _status(key):
    line = next(l for l in _Path("/proc/self/status").read_text().splitlines() if l.startswith(key + ":"))
    return int(line.split()[1]) * 1024

"""
_PIECE = """
_Path("/proc/self/clear_refs").write_text("5")
_start = _status("VmRSS")
{piece}
print("PEAK", _status("VmHWM") - _start)
"""


def measure_peak_nbytes(before: str, *pieces: str) -> list[int]:
    """Run ``before`` and then each piece (Python source) in one new interpreter; each piece's peak above its start."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    source = _HEAD + before + "".join(_PIECE.format(piece=piece) for piece in pieces)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("PEAK ")]
