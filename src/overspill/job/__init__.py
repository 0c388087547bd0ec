"""The job: what is to be trained, on what, and how. core.py holds what a run needs, layout.py what a forecast adds."""

from overspill.job.core import (
    DataConfig,
    Job,
    ModelConfig,
    OptimizerConfig,
    PlanConfig,
    ScheduleConfig,
    TrainConfig,
    read_job,
    unread_options,
)
from overspill.job.layout import (
    DeviceConfig,
    EvaluationConfig,
    FrameworkConfig,
    KernelConfig,
    MethodConfig,
    OffloadConfig,
    ParallelConfig,
    TaskConfig,
)

__all__ = [
    "DataConfig",
    "DeviceConfig",
    "EvaluationConfig",
    "FrameworkConfig",
    "Job",
    "KernelConfig",
    "MethodConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlanConfig",
    "ScheduleConfig",
    "TaskConfig",
    "TrainConfig",
    "read_job",
    "unread_options",
]
