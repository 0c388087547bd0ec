"""``overspill train`` and ``overspill resume``: forecast, run with live progress, compare, say what comes next.

This file is the course of events and what is printed; `assemble` builds the parts, train/loop.py trains.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.console import emit, notice, print_json, print_table
from overspill.cli.crash import crashes_go_to
from overspill.errors import OverspillError

if TYPE_CHECKING:
    from overspill.checkpoint import RunDirectory
    from overspill.cli.assemble import Parts
    from overspill.forecast import Forecast
    from overspill.job import Job
    from overspill.plan import Plan
    from overspill.report import Compared
    from overspill.train.loop import LoopResult, StopFlag

__all__ = ["add_to"]

_LONG_DATA_NBYTES = 16_000_000  # some five seconds with a fast tokenizer
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

_Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object for the forecast, each step, the end.")]


def train(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")],
    run: Annotated[Path | None, typer.Option(help="The new run directory; default: runs/<job>-NNN.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the job file.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Print the forecast, train, and compare. Ctrl-C saves a checkpoint and says how to go on."""
    from overspill.checkpoint import RunDirectory, new_run_path
    from overspill.cli.jobs import load_job, refuse_missing_data
    from overspill.job.runs import refuse_what_does_not_run

    job = load_job(job_file, settings or [])
    refuse_what_does_not_run(job)
    refuse_missing_data(job)
    path = run if run is not None else new_run_path(job_file, parent=Path("runs"))
    RunDirectory(path).refuse_if_taken(job)  # before the seconds that importing torch takes
    raise typer.Exit(
        _run(RunDirectory(path), job, base=job_file.parent, resume=False, checkpoint=None, as_json=as_json)
    )


def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    checkpoint: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="A checkpoint; default: the newest committed step.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Go on with a run that was interrupted, from its last committed step, bit for bit."""
    from overspill.checkpoint import RunDirectory
    from overspill.cli.jobs import load_job

    run = RunDirectory.open(path)
    job = load_job(run.job_file)
    # A wrong name is an error before anything is loaded.
    run.refuse_if_finished(job, from_step=None if checkpoint is None else run.checkpoint_step(checkpoint))
    raise typer.Exit(_run(run, job, base=path, resume=True, checkpoint=checkpoint, as_json=as_json))


def _run(run: RunDirectory, job: Job, *, base: Path, resume: bool, checkpoint: str | None, as_json: bool) -> int:
    """The whole course of a run, new or resumed; returns the exit code. ``base``: of the job file's paths."""
    from overspill.cli.forecast import forecast_json, print_forecast, resolve

    plan, forecast = resolve(job, run.state, base=base)
    if as_json:
        print_json({"event": "forecast", "run": str(run.path), **forecast_json(plan, forecast)})
    else:
        print_forecast(job, plan, forecast)
        emit("Loading the model and the data …" + _long_data(job))
    from overspill.cli.assemble import assemble

    if not resume:
        run.create(job)
    training = False
    try:
        with crashes_go_to(run.path), assemble(run, job, plan, resume=resume, checkpoint=checkpoint) as parts:
            for note in parts.notes:
                notice(note)
            if not as_json:
                emit(_data_line(job, parts))
            if resume:
                run.forget_summary()
            training = True
            return _train(run, job, plan, forecast, parts, as_json=as_json)
    except OverspillError as error:
        if training and not run.state.is_dir():
            raise _gone(run) from error
        raise


def _gone(run: RunDirectory) -> OverspillError:
    """Whatever failed, this is why."""
    return OverspillError(
        "OVS404",
        "The run's directory is no longer there: it was moved or removed while the run trained.",
        field=str(run.path),
        next_step="Where it was moved, `overspill resume` with its new path goes on from the last committed step.",
    )


def _long_data(job: Job) -> str:
    """What takes longest before the first step, where the user would wonder."""
    from overspill.units import format_nbytes

    names = (job.data.path,) if isinstance(job.data.path, str) else job.data.path
    nbytes = sum(Path(name).stat().st_size for name in names if Path(name).is_file())
    return f" {format_nbytes(nbytes)} of text become tokens once for this run." if nbytes > _LONG_DATA_NBYTES else ""


def _data_line(job: Job, parts: Parts) -> str:
    """How much there is to train on, and how often the run goes through it."""
    data, settings = parts.data, parts.settings
    from overspill.units import count

    a_step = job.train.micro_batch * settings.accumulation
    held_out = f", {len(data.evaluation)} more held out" if data.evaluation is not None else ""
    return (
        f"Data: {count(len(data.train), 'sequence')} of {job.data.seq_len} tokens{held_out}; "
        f"{count(settings.total_steps, 'step')} of {a_step} for "
        f"{settings.total_steps * a_step / len(data.train):.3g} epochs."
    )


def _train(run: RunDirectory, job: Job, plan: Plan, forecast: Forecast, parts: Parts, *, as_json: bool) -> int:
    from overspill.cli.forecast import comparison as compare
    from overspill.observe.metrics import MetricsWriter
    from overspill.observe.progress import open_progress
    from overspill.probe import OthersLoad
    from overspill.report import StepReport

    steps = parts.settings.total_steps
    view = open_progress(steps, title=f"{Path(job.model.path).name} in {run.path}", as_json=as_json)
    with MetricsWriter(run.metrics_file) as metrics, _stop_on_signals(parts.stop):

        def on_step(report: StepReport) -> None:
            metrics.append(report)
            parts.measured.add(report)
            memory = parts.memory
            view.step(
                report,
                memory_nbytes=memory.now_nbytes,
                budget_nbytes=plan.memory_nbytes,
                peak_nbytes=memory.peak_nbytes,
            )

        def on_first_eval(loss: float) -> None:
            view.note(f"evaluation before the first step: {loss:.4f}")

        others = OthersLoad()
        try:
            result = parts.loop(on_step, on_first_eval, metrics.sync).run()
        except BaseException:
            view.close()
            if not run.path.is_dir():
                raise
            try:
                _save_summary(run, job, parts, None, [])
            except OverspillError as second:  # the same full disk, say: what stopped the run is the error to show
                notice(second.message)
            raise
        view.close()
    busy_cores = (forecast.busy_cores, others.cores() or 0.0)
    parts.measured.finish(parts.memory.peak_nbytes)
    comparison = compare(plan, forecast, parts.measured, run.state_nbytes())
    _save_summary(run, job, parts, result, comparison)
    _say_end(run, parts, result, comparison, busy_cores, as_json=as_json)
    return 0 if result.finished else INTERRUPTED


def _save_summary(
    run: RunDirectory, job: Job, parts: Parts, result: LoopResult | None, comparison: list[Compared]
) -> None:
    from overspill.checkpoint import RunSummary

    run.write_summary(
        RunSummary(
            status="failed" if result is None else "finished" if result.finished else "interrupted",
            step=parts.session.step,
            total_steps=parts.settings.total_steps,
            steps_asked=job.train.steps,
            epochs_asked=job.train.epochs,
            loss=result.loss if result else None,
            eval_loss=result.eval_loss if result else None,
            seconds=result.seconds if result else 0.0,
            tokens=result.tokens if result else 0,
            comparison=tuple(comparison),
        )
    )


def _busy_line(then: float, now: float) -> str:
    """Why the time of a step may differ from its forecast; empty on a machine that others left alone."""
    from overspill.cli.forecast import BUSY_CORES

    if max(then, now) < BUSY_CORES:
        return ""
    return (
        f"  Other processes took {then:.1f} cores while speeds were measured and {now:.1f} during the run, so the time "
        "per step may differ."
    )


def _say_end(
    run: RunDirectory,
    parts: Parts,
    result: LoopResult,
    comparison: list[Compared],
    busy_cores: tuple[float, float],
    *,
    as_json: bool,
) -> None:
    from overspill.observe.compare import comparison_table
    from overspill.units import count, format_seconds

    if as_json:
        end: dict[str, Any] = {"event": "end", "run": str(run.path), "finished": result.finished, "step": result.step}
        end |= {"loss": result.loss, "eval_loss": result.eval_loss, "checkpoint": result.checkpoint}
        end |= {"eval_loss_before": result.eval_loss_before, "busy_cores": busy_cores[1]}
        rows = [row.model_dump() for row in comparison]
        print_json({**end, "tokens": result.tokens, "seconds": result.seconds, "comparison": rows})
        return
    print_table(*comparison_table(comparison), title="\nForecast and measurement")
    if busy := _busy_line(*busy_cores):
        emit(busy)
    began = parts.session.restored.step if parts.session.restored else 0
    work = f"{count(result.tokens, 'token')} in {format_seconds(result.seconds)}"
    work += f", {result.tokens / result.seconds:.0f} tokens/s" if result.seconds else ""
    emit()
    if result.eval_loss_before is not None and result.eval_loss is not None:
        emit(f"Evaluation loss: {result.eval_loss_before:.4f} before the first step, {result.eval_loss:.4f} now.")
    if result.finished:
        done, now = count(result.step, "step"), count(result.step - began, "step")
        emit(f"Done: {done}, {work}." if began == 0 else f"Done: {done}; in this session {now}, {work}.")
        emit(f"Next: overspill export {run.path}")
        emit(f'      overspill generate {run.path} --prompt "…"')
    elif result.checkpoint is None:
        emit(f"Stopped before the first step. Start anew with: overspill resume {run.path}")
    else:
        emit(f"Stopped after step {result.step} of {parts.settings.total_steps}; saved as {result.checkpoint}.")
        emit(f"Go on with: overspill resume {run.path}")


@contextmanager
def _stop_on_signals(stop: StopFlag) -> Iterator[None]:
    """First Ctrl-C (or SIGTERM): finish the step and save. Second: leave at once; the store is valid at any instant."""

    def handler(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            # No clean-up: threads may be in the middle of a write, and the store is made for exactly that.
            with suppress(OSError):
                os.write(2, b"\nStopped at once. What was committed is safe; overspill resume goes on from there.\n")
            os._exit(INTERRUPTED)
        stop.request()
        # Not through a stream or the live view: the handler may have come in the middle of their own write.
        with suppress(OSError):
            os.write(2, b"\nStopping after this step and saving a checkpoint. Ctrl-C again stops at once.\n")

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def add_to(app: typer.Typer) -> None:
    app.command()(train)
    app.command()(resume)
