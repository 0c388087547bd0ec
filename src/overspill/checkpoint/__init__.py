"""What is kept of a run: its directory, its identity, its checkpoints. The bytes of state are tiers/disk's."""

from overspill.checkpoint.run_directory import RunDirectory, RunIdentity, RunSummary, find_runs, new_run_path

__all__ = ["RunDirectory", "RunIdentity", "RunSummary", "find_runs", "new_run_path"]
