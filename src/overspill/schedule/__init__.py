"""The schedule: a plan and the blocks of a model, turned into operations with dependencies. Pure.

One schedule, two readers: ``train`` executes it on real buffers and ``forecast`` simulates it. If there were
two, they would drift apart, and a forecast could then not be the run.
"""

from overspill.schedule.build import ChunkPlan, StepPlan, build_step, plan_chunks
from overspill.schedule.ops import Key, Kind, Lane, Op, StepSchedule

__all__ = ["ChunkPlan", "Key", "Kind", "Lane", "Op", "StepPlan", "StepSchedule", "build_step", "plan_chunks"]
