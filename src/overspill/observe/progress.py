"""The live view of a run: a panel for a person at a terminal, a line now and then in a log, JSON rows for a program.

All three show the same step reports; none of them holds state that the run needs. Heavy drawing is rich's, and is
loaded only when there is a terminal.
"""

from __future__ import annotations

import collections
import json
import sys
from typing import TYPE_CHECKING, Any, Protocol

from overspill.observe.metrics import row_text
from overspill.report import StepReport
from overspill.units import MiB, format_bytes_per_s, format_nbytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["JsonProgress", "PanelProgress", "PlainProgress", "Progress", "open_progress", "step_head", "step_line"]

WINDOW_STEPS = 8  # over which rates are averaged: a checkpoint or an evaluation makes single steps jump


class Progress(Protocol):
    """What the commands tell while a run goes on."""

    def note(self, text: str) -> None: ...
    def step(self, report: StepReport, *, memory_nbytes: int, budget_nbytes: int, peak_nbytes: int = 0) -> None: ...
    def close(self) -> None: ...


class Rates:
    """Averages over the last few steps."""

    def __init__(self) -> None:
        self._recent: collections.deque[StepReport] = collections.deque(maxlen=WINDOW_STEPS)

    def add(self, report: StepReport) -> None:
        self._recent.append(report)

    def _per_second(self, amount: float) -> float:
        seconds = sum(r.seconds for r in self._recent)
        return amount / seconds if seconds > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._per_second(sum(r.tokens for r in self._recent))

    @property
    def step_seconds(self) -> float:
        return sum(r.seconds for r in self._recent) / max(1, len(self._recent))

    def link_bytes_per_s(self, tier: str) -> tuple[float, float]:
        """Read from, and written to, a tier."""
        read = sum(r.read_nbytes.get(tier, 0) for r in self._recent)
        written = sum(r.written_nbytes.get(tier, 0) for r in self._recent)
        return self._per_second(read), self._per_second(written)

    def stall_seconds(self) -> dict[str, float]:
        """Per step, by cause; causes that never stalled are left out."""
        total: collections.Counter[str] = collections.Counter()
        for report in self._recent:
            total.update(report.stall_seconds)
        return {cause: s / len(self._recent) for cause, s in total.most_common() if s > 0}


_STEP_COLUMNS = (
    ("loss", 7),
    ("norm", 5),
    ("lr", 8),
    ("seconds", 7),
    ("tok/s*", 6),
    ("MiB", 6),
    ("in*", 5),
    ("out*", 5),
)
"""Names and widths of a log's columns; a column has one unit. The star marks means over the last steps."""


def step_head(*, total_steps: int, budget_nbytes: int) -> str:
    """What stands above the lines of a log: what a star means, and the columns' names."""
    names = "  ".join(name.rjust(width) for name, width in _STEP_COLUMNS)
    return (
        f"* mean of the last {WINDOW_STEPS} steps. Memory: MiB of {budget_nbytes / MiB:.0f}. "
        "Disk in and out: GB/s. Waited: seconds.\n"
        f"{'step':>{2 * len(str(total_steps)) + 1}}  {names}  waited"
    )


def step_line(report: StepReport, rates: Rates, *, total_steps: int, memory_nbytes: int) -> str:
    """One step as one line of a log, in the columns of `step_head`."""
    read, written = rates.link_bytes_per_s("disk")
    cells = (
        "-" if report.loss is None else f"{report.loss:.4f}",
        "-" if report.grad_norm is None else f"{report.grad_norm:.2f}",
        f"{report.lr:.2e}",
        f"{report.seconds:.2f}",
        f"{rates.tokens_per_s:.0f}",
        f"{memory_nbytes / MiB:.0f}",
        f"{read / 1e9:.2f}",
        f"{written / 1e9:.2f}",
    )
    stalls = {cause: s for cause, s in report.stall_seconds.items() if s >= 0.005}
    rest = [", ".join(f"{cause} {s:.2f}" for cause, s in stalls.items())] if stalls else []
    if report.eval_loss is not None:
        rest.append(f"evaluation {report.eval_loss:.4f}")
    if report.skipped:
        rest.append("skipped (gradient not finite)")
    line = "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, _STEP_COLUMNS, strict=True))
    return "  ".join([f"{report.step:>{len(str(total_steps))}}/{total_steps}", line, *rest])


class PlainProgress:
    """A line for the first steps and then about forty over the run; evaluations and the last step always."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._every = max(1, total_steps // 40)
        self._has_head = False
        self._rates = Rates()

    def note(self, text: str) -> None:
        print(text, flush=True)

    def step(self, report: StepReport, *, memory_nbytes: int, budget_nbytes: int, peak_nbytes: int = 0) -> None:
        self._rates.add(report)
        due = report.step <= 3 or report.step % self._every == 0 or report.step == self._total_steps
        if due or report.eval_loss is not None or report.skipped:
            if not self._has_head:
                print(step_head(total_steps=self._total_steps, budget_nbytes=budget_nbytes))
                self._has_head = True
            line = step_line(report, self._rates, total_steps=self._total_steps, memory_nbytes=memory_nbytes)
            print(line, flush=True)

    def close(self) -> None:
        pass


class JsonProgress:
    """Each step as one JSON object on standard output; notices to standard error."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, report: StepReport, *, memory_nbytes: int, budget_nbytes: int, peak_nbytes: int = 0) -> None:
        row: dict[str, Any] = {"event": "step", "memory_nbytes": memory_nbytes, "budget_nbytes": budget_nbytes}
        print(json.dumps(row)[:-1] + ", " + row_text(report)[1:], flush=True)

    def close(self) -> None:
        pass


class PanelProgress:
    """A panel that redraws itself: progress, losses, memory per tier against its budget, links, stalls."""

    def __init__(self, total_steps: int, *, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._total_steps = total_steps
        self._title = title
        self._rates = Rates()
        self._losses: list[float] = []
        self._peak_nbytes = 0
        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def step(self, report: StepReport, *, memory_nbytes: int, budget_nbytes: int, peak_nbytes: int = 0) -> None:
        self._rates.add(report)
        if report.loss is not None:
            self._losses.append(report.loss)
        self._live.update(self._draw(report, memory_nbytes, budget_nbytes, peak_nbytes))

    def close(self) -> None:
        self._live.stop()

    def _draw(self, report: StepReport, memory_nbytes: int, budget_nbytes: int, peak_nbytes: int = 0) -> RenderableType:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rates = self._rates
        peak = self._peak_nbytes = max(self._peak_nbytes, memory_nbytes, peak_nbytes)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        grid.add_column()
        left = rates.step_seconds * (self._total_steps - report.step)
        grid.add_row(
            "step",
            ProgressBar(total=self._total_steps, completed=report.step, width=32),
            f"{report.step}/{self._total_steps}, {format_seconds(left)} left",
        )
        loss = "-" if report.loss is None else f"{report.loss:.4f}"
        more = f"evaluation {report.eval_loss:.4f}, " if report.eval_loss is not None else ""
        norm = f"gradient norm {report.grad_norm:.2f}" if report.grad_norm is not None else ""
        grid.add_row("loss", Text(_sparkline(self._losses, width=32)), f"{loss}  {more}{norm}")
        grid.add_row("speed", f"{rates.tokens_per_s:.0f} tokens/s", f"{format_seconds(rates.step_seconds)} a step")
        grid.add_row(
            "memory",
            ProgressBar(total=max(1, budget_nbytes), completed=memory_nbytes, width=32),
            f"now {format_nbytes(memory_nbytes)}, peak {format_nbytes(peak)}, budget {format_nbytes(budget_nbytes)}",
        )
        for tier, classes in report.held_nbytes.items():
            held = ", ".join(f"{name} {format_nbytes(n)}" for name, n in classes.items() if n)
            # In host memory these are the shares of the budget, of which activations are used only for a moment.
            grid.add_row(
                "on disk" if tier == "disk" else f"shares of {tier} memory", format_nbytes(sum(classes.values())), held
            )
        read, written = rates.link_bytes_per_s("disk")
        grid.add_row("disk", f"{format_bytes_per_s(read)} in", f"{format_bytes_per_s(written)} out")
        stalls = rates.stall_seconds()
        grid.add_row(
            "stalls",
            format_seconds(sum(stalls.values())) + " a step",
            ", ".join(f"{cause} {format_seconds(s)}" for cause, s in stalls.items()) or "none",
        )
        return Panel(grid, title=self._title, title_align="left")


def _sparkline(values: list[float], *, width: int) -> str:
    """The course of the loss in eighths of a line, averaged to ``width`` columns."""
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if not finite:
        return ""
    columns = min(width, len(finite))
    means = []
    for i in range(columns):
        part = finite[i * len(finite) // columns : (i + 1) * len(finite) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (m - low) / (high - low)) if high > low else 0] for m in means)


def open_progress(total_steps: int, *, title: str, as_json: bool) -> Progress:
    """The view that fits where the output goes."""
    if as_json:
        return JsonProgress()
    if sys.stdout.isatty():
        return PanelProgress(total_steps, title=title)
    return PlainProgress(total_steps)
