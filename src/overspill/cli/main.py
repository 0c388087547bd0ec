"""The ``overspill`` command: collects the groups and turns every way of ending into an exit code.

0 done; 1 a fault of ours (the traceback is saved and named); 2 a mistake that the user can act on (one
paragraph, never a traceback); 130 interrupted. Set OVERSPILL_DEBUG=1 to let every exception through.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from overspill import __version__
from overspill.cli import forecast, model, runs, start, train
from overspill.errors import OverspillError
from overspill.files import TOO_MANY_FILES, encodes

__all__ = ["app", "main", "run"]

#: Errors that say something of the machine or of a path, not of us.
_OF_THE_MACHINE: Final = {
    errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO,
    errno.EMFILE, errno.ENFILE, errno.ENOTDIR, errno.EISDIR, errno.ESTALE,
}  # fmt: skip

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
    _print_anything()
    try:
        _refuse_undecodable(sys.argv[1:] if arguments is None else arguments)
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
        refused = _refusal(fault)
        print(refused.paragraph() if refused else _fault_paragraph(fault), file=sys.stderr)
        return 2 if refused else 1
    return 0


def _print_anything() -> None:
    """What the output's encoding lacks is printed as an escape: a message must not fail on a name that it quotes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def _refuse_undecodable(arguments: Sequence[str]) -> None:
    """Job files, manifests and tokenizers hold UTF-8. Raises OverspillError OVS107 for an argument that is none."""
    for argument in arguments:
        if not encodes(argument):
            raise OverspillError(
                "OVS107",
                "A word of the command line is not UTF-8, so no file of a run could hold it.",
                field=ascii(argument),
                next_step="Write it in UTF-8; rename the file or directory if it is a path.",
            )


def _refusal(fault: Exception) -> OverspillError | None:
    """A system call on a path of the user's that failed where no more exact error is raised."""
    if not isinstance(fault, OSError) or fault.filename is None or fault.errno not in _OF_THE_MACHINE:
        return None
    next_step = TOO_MANY_FILES if fault.errno in (errno.EMFILE, errno.ENFILE) else None
    return OverspillError(
        "OVS107",
        f"The system refused a path: {fault.strerror}.",
        field=textwrap.shorten(str(fault.filename), 200, placeholder="…"),
        next_step=next_step,
    )


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
