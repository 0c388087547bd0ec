"""What is kept of a run: its directory, its identity, its checkpoints. The bytes of state are tiers/disk's."""

from overspill.checkpoint.run_directory import RunDirectory, RunIdentity, RunSummary, find_runs, new_run_path
from overspill.checkpoint.settings import applied_settings, number_settings, refuse_fixed_settings

__all__ = [
    "RunDirectory",
    "RunIdentity",
    "RunSummary",
    "applied_settings",
    "find_runs",
    "new_run_path",
    "number_settings",
    "refuse_fixed_settings",
]
