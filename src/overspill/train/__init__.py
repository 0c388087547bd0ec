"""Training: attach() puts a model's state where a plan says, and a Session executes the schedule on it."""

from overspill.train.build import attach
from overspill.train.optimizer import TieredOptimizer
from overspill.train.session import Session

__all__ = ["Session", "TieredOptimizer", "attach"]
