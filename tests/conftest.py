"""What every test needs: one OpenMP thread, since small tensors on two threads mostly wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
