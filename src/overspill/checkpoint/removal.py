"""May this directory be deleted? Every check before the first file goes, and the locks meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from overspill.checkpoint.contents import first_stranger, first_stranger_elsewhere
from overspill.errors import OverspillError

if TYPE_CHECKING:
    from overspill.checkpoint.run_directory import RunDirectory

__all__ = ["held_for_removal"]


@contextmanager
def held_for_removal(run: RunDirectory, *, force: bool) -> Iterator[tuple[list[Path], list[Path]]]:
    """Within it nobody else opens the run. Gives its directories on other disks: its own, and those that may be.

    Raises what `RunDirectory.remove` says. ``force``: files in its directory that no run makes are no hindrance.
    """
    from overspill.tiers.disk import FileIO
    from overspill.tiers.disk.lock import LOCK, Locks
    from overspill.tiers.disk.owner import claim, own_roots

    if run.path.is_symlink():
        raise OverspillError(
            "OVS601",
            "This is a link to a run, not the run.",
            field=str(run.path),
            next_step=f"`overspill runs rm {run.path.resolve()}` removes the run; `rm` removes the link.",
        )
    _refuse_no_run(run)
    directories: list[Path] = []
    with suppress(OverspillError):  # a job file that cannot be read is no reason to keep the rest
        directories = [Path(name) for name in run.job().plan.directories]
    io, home = FileIO(), run.state.resolve()
    own, perhaps = own_roots(io, home, directories)
    elsewhere = first_stranger_elsewhere(own)
    stranger = elsewhere or (None if force else first_stranger(run.path.resolve(), own))
    if stranger is not None:
        raise OverspillError(
            "OVS604",
            "The run's directory, or its state on another disk, holds what no run makes; nothing was removed.",
            field=str(stranger),
            next_step="Move it elsewhere first"
            + ("." if elsewhere else ", or give --force to delete everything in the run's directory."),
        )
    with ExitStack() as held:
        if home.is_dir():
            locks = Locks(io, home / LOCK)
            held.callback(locks.release)
            claim(io, locks, own, home)
        yield own, perhaps


def _refuse_no_run(run: RunDirectory) -> None:
    """Raises OVS601 where run.json is not what a run has written: the directory may be anything."""
    run.open(run.path)
    try:
        run.identity()
    except OverspillError as error:
        raise OverspillError(
            "OVS601",
            f"This is no run directory, or a damaged one: {error.message}",
            field=str(run.identity_file),
            next_step=f"If it is a run, remove {run.path} by hand.",
        ) from error
