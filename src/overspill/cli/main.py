"""The ``overspill`` command: collects the groups and turns every way of ending into an exit code.

0 done; 1 a fault of ours (the traceback is saved and named); 2 a mistake that the user can act on (one
paragraph, never a traceback); 130 interrupted. Set OVERSPILL_DEBUG=1 to let every exception through.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from overspill import __version__
from overspill.cli import forecast, model, runs, start, train
from overspill.errors import OverspillError

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="overspill",
    help="Train models that do not fit in memory: forecast first, then run, then compare.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"overspill {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train models that do not fit in memory: forecast first, then run, then compare."""


start.add_to(app)
forecast.add_to(app)
train.add_to(app)
model.add_to(app)
runs.add_to(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code instead of leaving the process."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="overspill")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except OverspillError as mistake:
        if os.environ.get("OVERSPILL_DEBUG") == "1":
            raise
        print(mistake.paragraph(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as fault:
        if os.environ.get("OVERSPILL_DEBUG") == "1":
            raise
        print(_fault_paragraph(fault), file=sys.stderr)
        return 1
    return 0


def _fault_paragraph(fault: Exception) -> str:
    from overspill.cli.crash import save_traceback

    file = save_traceback(fault)
    kind = type(fault).__name__
    return (
        f"overspill stopped on an unexpected {kind}: {fault}. This is a fault of Overspill's; what is committed on "
        f"disk stays valid. The traceback is in {file}; please report it with that file."
    )


def main() -> None:
    sys.exit(run())
