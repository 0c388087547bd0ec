"""``overspill new``: a starter job file with every key, made from the schema. It never overwrites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overspill.cli.console import emit, print_json
from overspill.errors import OverspillError

__all__ = ["add_to"]


def new(
    job: Annotated[Path, typer.Argument(help="The file to write.")] = Path("job.toml"),
    model: Annotated[str | None, typer.Option(help="Directory of the model, or a hub id.")] = None,
    data: Annotated[str | None, typer.Option(help="The training text: .txt or .jsonl.")] = None,
    memory: Annotated[str | None, typer.Option(help='Host memory for training, as in "8GiB".')] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a starter job file with every key and what it means."""
    from overspill.checkpoint.contents import refuse_inside_state
    from overspill.cli.starter import starter_text
    from overspill.units import parse_nbytes

    refuse_inside_state(job, "OVS105")
    if memory is not None:
        parse_nbytes(memory, "--memory")
    values = {"model.path": model, "data.path": data, "plan.memory": memory}
    text = starter_text(overrides={path: value for path, value in values.items() if value is not None})
    try:
        with job.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise OverspillError(
            "OVS105",
            "The job file exists already and is not overwritten.",
            field=str(job),
            next_step="Give another name.",
        ) from None
    except OSError as error:
        raise OverspillError("OVS402", f"Cannot write the job file: {error.strerror}.", field=str(job)) from None
    if as_json:
        print_json({"job": str(job)})
        return
    missing = [path for path in ("model.path", "data.path") if values[path] is None]
    first = f"set {' and '.join(missing)} in it, then " if missing else ""
    emit(f"Wrote {job}. Next: {first}overspill forecast {job}, then overspill train {job}.")


def add_to(app: typer.Typer) -> None:
    app.command()(new)
