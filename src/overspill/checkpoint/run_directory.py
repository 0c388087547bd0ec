"""The run directory: what lies where, who it belongs to, and what can be resumed.

    RUN/run.json    identity: run id, model, versions, threads    RUN/metrics.jsonl       one row a step
    RUN/job.toml    the job, with absolute paths                  RUN/summary.json        how the last session ended
    RUN/state/      the store (tiers/disk)                        RUN/state/checkpoints/  pins, by name
    RUN/export/     exported models, by checkpoint                RUN/crash.txt           the last unexpected traceback

Pure Python: it is read without torch by `runs`, `export` and `resume` before anything heavy is loaded. Nothing
here is unpickled, and small files are replaced by a rename, so a crash leaves the old or the new one; names are
synced as well as contents, so that a power cut does not take the run from under its committed steps.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from overspill import __version__
from overspill.checkpoint.contents import refuse_inside_state
from overspill.checkpoint.removal import held_for_removal
from overspill.errors import OverspillError
from overspill.files import SCRATCH_PREFIX, disk_errors, make_directory, parse_json, replace_text, sync_directory
from overspill.job import Job, read_job
from overspill.report import Compared
from overspill.schema import Frozen
from overspill.units import count

__all__ = ["RunDirectory", "RunIdentity", "RunSummary", "find_runs", "new_run_path"]

FORMAT = 1
JOB_HEAD = "# The job of this run, with every value in effect.\n"
BEFORE_IDENTITY = {"job.toml", "job.toml.new", "run.json.new", "data", ".data.partial"}
"""What there may be of a run whose start was killed before it had its identity."""


class RunIdentity(Frozen):
    """``run.json``: what must be the same for a resume, and what should be for the bits to repeat."""

    format: int = FORMAT
    run_id: str
    created: str = Field(description="UTC, ISO 8601.")
    model: str = Field(description="As the job names it.")
    model_digest: str = Field(description="xxh3 of every parameter's name, shape and dtype.")
    numel: int = Field(ge=0, description="Parameters, tied ones once.")
    overspill: str = __version__
    torch: str = ""
    simd: str = ""
    threads: int = Field(default=1, ge=1, description="Compute threads.")

    @classmethod
    def fresh(cls, *, model: str, model_digest: str, numel: int, torch: str, simd: str, threads: int) -> RunIdentity:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(
            run_id=secrets.token_hex(8),
            created=now,
            model=model,
            model_digest=model_digest,
            numel=numel,
            torch=torch,
            simd=simd,
            threads=threads,
        )


class RunSummary(Frozen):
    """``summary.json``: how the last session on this run ended, with the forecast beside the measurement."""

    status: Literal["finished", "interrupted", "failed"]
    step: int
    total_steps: int
    steps_asked: int | None = None
    epochs_asked: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    seconds: float = 0.0
    tokens: int = 0
    comparison: tuple[Compared, ...] = ()


class RunDirectory:
    """One run on disk. Making one writes nothing; `create` and `write_*` do."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.identity_file = self.path / "run.json"
        self.job_file = self.path / "job.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.summary_file = self.path / "summary.json"
        self.state = self.path / "state"
        self.checkpoints = self.state / "checkpoints"
        self.exports = self.path / "export"
        self._made = False
        self._claim_fd = -1

    def create(self, job: Job) -> Self:
        """Make the directory for a new run and put the job into it; a start that was killed is taken over.

        Raises OverspillError: OVS602 or OVS604 when there is a run already, OVS405 when another process is about to
        make one, OVS401, OVS402 or OVS403 when it cannot be made.
        """
        self.refuse_if_taken(job)
        self._made = not self.path.exists()
        with disk_errors(self.path, "Cannot make the run directory"):
            make_directory(self.path, mode=0o700)
            self._claim()
            self.refuse_if_taken(job)  # now that nobody else can begin
            replace_text(self.job_file, job_text(job))
        return self

    def refuse_if_taken(self, job: Job) -> None:
        """Raises OVS602 where another model's run is, OVS604 where this model's run, other files or state are."""
        for place in (self.path, *map(Path, job.plan.directories)):
            refuse_inside_state(place, "OVS604")
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise OverspillError("OVS402", "The run directory's path is a file.", field=str(self.path))
        if self.identity_file.exists():
            there = self.identity()
            if there.model != job.model.path:
                raise OverspillError(
                    "OVS602",
                    "The run directory holds a run of another model.",
                    field=str(self.path),
                    value=job.model.path,
                    limit=there.model,
                    next_step="Choose another --run.",
                )
            raise OverspillError(
                "OVS604",
                "The run directory holds a run already.",
                field=str(self.path),
                next_step=f"`overspill resume {self.path}` goes on with it; or choose another --run.",
            )
        names = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(SCRATCH_PREFIX)}
        strangers = sorted(names)
        if strangers and not (names <= BEFORE_IDENTITY and self._is_our_job(names)):
            raise OverspillError(
                "OVS604",
                f"The run directory is not empty: it holds {strangers[0]}.",
                field=str(self.path),
                next_step="Choose another --run, or an empty directory.",
            )

    def _is_our_job(self, names: set[str]) -> bool:
        """The job file that `create` writes first, perhaps not yet under its name; a user's own looks different."""
        if names == {"job.toml.new"}:
            return True
        try:
            return self.job_file.read_text(encoding="utf-8").startswith(JOB_HEAD)
        except (OSError, UnicodeDecodeError):
            return False

    def _claim(self) -> None:
        """Until the run has its identity, keep others from beginning one here. The lock dies with its process."""
        self._claim_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._claim_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._give_up_claim()
            raise OverspillError(
                "OVS405", "Another process begins a run in this directory.", field=str(self.path)
            ) from None

    def _give_up_claim(self) -> None:
        if self._claim_fd >= 0:
            os.close(self._claim_fd)
            self._claim_fd = -1

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run. Raises OverspillError OVS601."""
        run = cls(path)
        if not run.identity_file.is_file() or not run.job_file.is_file():
            raise OverspillError(
                "OVS601", "This is no run directory: it has no run.json and job.toml.", field=str(run.path)
            )
        return run

    def identity(self) -> RunIdentity:
        return RunIdentity.read(self._read_json(self.identity_file), source=str(self.identity_file))

    def write_identity(self, identity: RunIdentity) -> None:
        with disk_errors(self.identity_file, "Cannot write the run's identity"):
            replace_text(self.identity_file, identity.model_dump_json(indent=2) + "\n")
        self._give_up_claim()

    def job(self) -> Job:
        return read_job(self.job_file)

    def summary(self) -> RunSummary | None:
        if not self.summary_file.exists():
            return None
        return RunSummary.read(self._read_json(self.summary_file), source=str(self.summary_file))

    def write_summary(self, summary: RunSummary) -> None:
        with disk_errors(self.summary_file, "Cannot write the run's summary"):
            replace_text(self.summary_file, summary.model_dump_json(indent=2) + "\n")

    def forget_summary(self) -> None:
        """The run goes on: how its last session ended is no longer how it stands."""
        with disk_errors(self.summary_file, "Cannot remove the run's summary"):
            self.summary_file.unlink(missing_ok=True)
            sync_directory(self.path)

    def refuse_if_finished(self, job: Job, *, from_step: int | None = None) -> None:
        """Raises OVS603 when every step that the job asks for is done; not where ``from_step`` goes back."""
        last = self.summary()
        if last is None or last.status != "finished":
            return
        if from_step is not None and from_step < last.total_steps:
            return
        if (job.train.steps, job.train.epochs) == (last.steps_asked, last.epochs_asked):
            raise OverspillError(
                "OVS603",
                f"The run is done: {count(last.total_steps, 'step')}.",
                field=str(self.path),
                next_step=f"Raise train.steps in {self.job_file} to go on, or `overspill export {self.path}`.",
            )

    def checkpoint_names(self) -> list[str]:
        """Newest last. Names are step-000100 and the like, so that their order is that of the steps."""
        if not self.checkpoints.is_dir():
            return []
        entries = [entry for entry in self.checkpoints.iterdir() if not entry.name.startswith(".")]
        return sorted(entry.name for entry in entries if (entry / "manifest.json").is_file())

    def checkpoint(self, name: str | None = None) -> Path:
        """The directory of a checkpoint, by default the newest. Raises OVS601 with the names there are."""
        names = self.checkpoint_names()
        if name is None and names:
            return self.checkpoints / names[-1]
        if name not in names or name is None:
            what = "The run has no checkpoint yet." if name is None else f"The run has no checkpoint {name!r}."
            there = (
                f"There are: {', '.join(names)}."
                if names
                else "Checkpoints come with train.save_every, at the end and at Ctrl-C."
            )
            raise OverspillError("OVS601", what, field=str(self.checkpoints), next_step=there)
        return self.checkpoints / name

    def checkpoint_step(self, name: str) -> int | None:
        """The step of a checkpoint. Raises OVS601 with the names there are, OVS404 when it is damaged."""
        from overspill.tiers.disk import StoreReader

        with StoreReader(self.checkpoint(name)) as reader:
            return reader.step

    def drop_exports_after(self, step: int) -> list[str]:
        """Remove the exports of checkpoints of later steps: those steps come again, perhaps with other content."""
        if not self.exports.is_dir():
            return []
        dropped = []
        for entry in sorted(self.exports.iterdir()):
            number = entry.name.removeprefix("step-")
            if entry.name != number and number.isdecimal() and int(number) > step and entry.is_dir():
                with disk_errors(entry, "Cannot remove an export of a step that is given up"):
                    shutil.rmtree(entry)
                dropped.append(entry.name)
        return dropped

    def nbytes(self) -> int:
        """Disk space taken by the run's directory, hard links once."""
        return _disk_nbytes([self.path])

    def state_nbytes(self) -> int:
        """Disk space taken by the store and its checkpoints, on whatever disks they are."""
        return _disk_nbytes([self.state, *self._distant_roots()])

    def refuse_removal(self, *, force: bool = False) -> None:
        """Raises what `remove` would, and removes nothing."""
        with held_for_removal(self, force=force):
            pass

    def remove(self, *, force: bool = False) -> list[Path]:
        """Delete the run with all its checkpoints, and its state on other disks, after every check.

        Returns directories on other disks that may hold state of this run and are left, where nothing tells. ``force``:
        delete also what no run has made. Raises OverspillError: OVS601 when this is no run or a link to one, OVS405
        when a process trains in it, OVS408 when its state is another run's, OVS604 when other files are in it.
        """
        with held_for_removal(self, force=force) as (own, perhaps):
            for place in (*own, self.path.resolve()):
                with disk_errors(place, "Cannot remove the run"):
                    shutil.rmtree(place)
        return perhaps

    def undo_creation(self) -> None:
        """Take back a `create` whose run never began: what was made since, and the directory if it is then empty."""
        for root in self._distant_roots():
            shutil.rmtree(root, ignore_errors=True)
        for entry in self.path.iterdir():  # the directory was empty or missing before create(): all of it is ours
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        if self._made:
            self.path.rmdir()
        self._give_up_claim()

    def _distant_roots(self) -> list[Path]:
        """Directories outside of the run (plan.directories) that the store made for itself."""
        from overspill.tiers.disk import StoreReader

        try:
            with StoreReader(self.state) as reader:
                named = [Path(directory) for directory in reader.manifest.directories]
        except OverspillError:
            return []
        return [path for path in named if path.is_absolute() and path.name.startswith("overspill-")]

    def _read_json(self, file: Path) -> dict[str, object]:
        try:
            data = parse_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OverspillError("OVS404", f"The file cannot be read: {error}.", field=str(file)) from None
        if not isinstance(data, dict):
            raise OverspillError("OVS404", "The file holds no table.", field=str(file))
        return data


def _disk_nbytes(places: list[Path]) -> int:
    seen: dict[tuple[int, int], int] = {}
    for place in places:
        for folder, _, names in os.walk(place):
            for name in names:
                try:
                    stat = (Path(folder) / name).lstat()
                except FileNotFoundError:  # a running session recycles files while we look
                    continue
                seen[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(seen.values())


def job_text(job: Job) -> str:
    """The job as TOML, every key that is set."""
    import tomlkit

    data = job.model_dump(mode="json", exclude_none=True)
    if job.optimizer.max_grad_norm is None:
        data["optimizer"]["max_grad_norm"] = 0  # leaving it out would mean the default, not "off"
    return JOB_HEAD + tomlkit.dumps(data)


def new_run_path(job_file: Path, *, parent: Path) -> Path:
    """A free directory ``parent/<job name>-NNN`` for a run without a name."""
    stem = job_file.stem
    for number in range(1, 100_000):
        path = parent / f"{stem}-{number:03d}"
        if not path.exists():
            return path
    raise OverspillError("OVS604", f"{parent} has no free name for another run of {stem}.", field=str(parent))


def find_runs(parent: Path) -> list[RunDirectory]:
    """The runs in a directory, oldest first; those whose identity cannot be read come before all others."""
    if not parent.is_dir():
        return []
    found = [RunDirectory(entry) for entry in sorted(parent.iterdir()) if (entry / "run.json").is_file()]
    return sorted(found, key=_created)


def _created(run: RunDirectory) -> str:
    try:
        return run.identity().created
    except OverspillError:
        return ""
