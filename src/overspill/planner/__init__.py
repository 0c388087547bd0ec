"""Decides: from a job's wishes, a machine and a model's shape to a Plan. Pure Python, no torch.

Uses the forecast's formulas and its division of a budget; knows no tensors and touches no disk.
"""

from __future__ import annotations

from overspill.planner.core import plan

__all__ = ["plan"]
