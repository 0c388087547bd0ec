"""``overspill runs``: list, show and remove runs. Reads small files only; it never opens the state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.console import emit, is_terminal, notice, print_json, print_table
from overspill.errors import OverspillError

if TYPE_CHECKING:
    from overspill.checkpoint import RunDirectory

__all__ = ["add_to"]

app = typer.Typer(help="List, show and remove runs.", invoke_without_command=True)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Parent = Annotated[Path, typer.Option("--in", help="The directory that holds the runs.")]
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")]


@app.callback()
def _default(context: typer.Context) -> None:
    """List, show and remove runs."""
    if context.invoked_subcommand is None:
        list_runs()


@app.command("list")
def list_runs(parent: _Parent = Path("runs"), as_json: _Json = False) -> None:
    """The runs in a directory, oldest first."""
    from overspill.checkpoint import find_runs
    from overspill.units import format_nbytes

    rows, unreadable = [], []
    for run in find_runs(parent):
        try:
            rows.append(_facts(run))
        except OverspillError as error:
            unreadable.append({"run": str(run.path), "status": "cannot be read", "problem": error.paragraph()})
    if as_json:
        print_json([*rows, *unreadable])
        return
    for one in unreadable:
        notice(f"{one['run']} cannot be read: {one['problem']}")
    if not rows and not unreadable:
        emit(f"No runs in {parent}.")
    elif rows:
        print_table(
            ("run", "model", "step", "status", "loss", "on disk"),
            [
                (
                    r["run"],
                    Path(r["model"]).name,
                    f"{r['step']}" + (f"/{r['total_steps']}" if _is_within(r) else ""),
                    r["status"],
                    "" if r["loss"] is None else f"{r['loss']:.4f}",
                    format_nbytes(r["nbytes"]),
                )
                for r in rows
            ],
        )


@app.command("show")
def show(path: _Run, as_json: _Json = False) -> None:
    """What a run is, how far it came, its checkpoints, and the forecast beside what was measured."""
    from overspill.checkpoint import RunDirectory
    from overspill.units import format_nbytes

    run = RunDirectory.open(path)
    facts = _facts(run)
    if as_json:
        print_json(facts)
        return
    print_table(
        ("", ""),
        [
            ("run", facts["run"]),
            ("model", facts["model"]),
            ("parameters", f"{facts['numel']:,}"),
            ("created", facts["created"]),
            ("status", facts["status"]),
            ("step", f"{facts['step']}" + (f" of {facts['total_steps']}" if _is_within(facts) else "")),
            ("loss", "" if facts["loss"] is None else f"{facts['loss']:.4f}"),
            ("evaluation loss", "" if facts["eval_loss"] is None else f"{facts['eval_loss']:.4f}"),
            ("checkpoints", ", ".join(facts["checkpoints"]) or "none"),
            ("on disk", format_nbytes(facts["nbytes"])),
        ],
    )
    summary = run.summary()
    if summary is not None and summary.comparison:
        from overspill.observe.compare import comparison_table

        print_table(*comparison_table(summary.comparison), title="\nForecast and measurement")


@app.command("rm")
def remove(
    path: _Run,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete also what no run makes.")] = False,
    as_json: _Json = False,
) -> None:
    """Delete a run with all its checkpoints. Asks first; refuses a run that is in use."""
    from overspill.checkpoint import RunDirectory
    from overspill.units import format_nbytes

    run = RunDirectory.open(path)
    run.refuse_removal(force=force)
    nbytes = run.nbytes()
    if not yes:
        if not is_terminal():
            raise OverspillError(
                "OVS106",
                "Nobody is there to be asked whether the run may be deleted.",
                field=str(path),
                next_step=f"`overspill runs rm --yes {path}` deletes it without asking.",
            )
        typer.confirm(f"Delete {path} ({format_nbytes(nbytes)}) with all its checkpoints?", abort=True)
    left = run.remove(force=force)
    for root in left:
        notice(f"{root} may hold state of this run, whose manifest is gone; remove it by hand if no other run uses it.")
    if as_json:
        print_json({"removed": str(path), "nbytes": nbytes, "left": [str(root) for root in left]})
    else:
        emit(f"Removed {path}, {format_nbytes(nbytes)}.")


def _facts(run: RunDirectory) -> dict[str, Any]:
    from overspill.observe.metrics import last_row

    identity, summary, row = run.identity(), run.summary(), last_row(run.metrics_file)
    return {
        "run": str(run.path),
        "run_id": identity.run_id,
        "model": identity.model,
        "numel": identity.numel,
        "created": identity.created,
        "status": summary.status if summary else "not ended",
        "step": row.step if row else 0,
        "total_steps": summary.total_steps if summary else run.job().train.steps,
        "loss": row.loss if row else None,
        "eval_loss": summary.eval_loss if summary else None,
        "checkpoints": run.checkpoint_names(),
        "nbytes": run.nbytes(),
        "comparison": [row.model_dump() for row in summary.comparison] if summary else [],
    }


def _is_within(facts: dict[str, Any]) -> bool:
    """The job's length is known, and was not cut to less than what is done."""
    return facts["total_steps"] is not None and facts["step"] <= facts["total_steps"]


def add_to(parent: typer.Typer) -> None:
    parent.add_typer(app, name="runs")
