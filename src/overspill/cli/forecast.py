"""``overspill forecast`` and ``overspill doctor``, and the forecast that `train` prints before it begins.

What a job needs comes from the forecast's formulas, what the machine has from `probe`; nothing is computed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.cli.console import emit, print_json, print_table
from overspill.errors import OverspillError

if TYPE_CHECKING:
    from overspill.forecast import Forecast
    from overspill.job import Job
    from overspill.plan import Plan
    from overspill.report import Compared

__all__ = ["BUSY_CORES", "add_to", "comparison", "forecast_json", "print_forecast", "resolve"]

#: A choice: from so many cores on, what other processes take is said beside a time.
BUSY_CORES = 0.5

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def forecast_command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the job file.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """What a job will need: memory by class and tier, disk, bytes per step, steps at risk. Loads no model."""
    from overspill.cli.jobs import load_job, refuse_missing_data

    job = load_job(job_file, settings or [])
    refuse_missing_data(job)
    plan, forecast = resolve(job, Path("runs"), base=job_file.parent)
    if as_json:
        print_json(forecast_json(plan, forecast))
    else:
        print_forecast(job, plan, forecast)


def resolve(job: Job, state: Path, *, base: Path | None = None) -> tuple[Plan, Forecast]:
    """The plan for this machine and its forecast.

    Args:
        state: where disk state will live if the job names no place.
        base: what the job file's paths are relative to, for an error that says where a model was looked for.

    Raises OverspillError: OVS201 for the model, OVS301 and OVS302 for the budget.
    """
    from overspill.forecast import forecast
    from overspill.planner import plan as make_plan
    from overspill.probe import probe

    job = _with_local_model(job, base)
    machine = probe(job.plan.directories or [state])
    plan = make_plan(job, machine)
    return plan, forecast(job, machine, plan=plan)


def _with_local_model(job: Job, base: Path | None) -> Job:
    """A hub id is resolved to its directory: the forecast reads config.json."""
    if Path(job.model.path).is_dir():
        return job
    from overspill.interop.hf import model_directory

    try:
        path = str(model_directory(job.model.path))
    except OverspillError as error:
        if base is None or Path(job.model.path).is_absolute():
            raise
        tried = f"There is no directory {base.resolve() / job.model.path} either."
        raise OverspillError(
            error.code,
            f"{error.message.rstrip('.')}. {tried}",
            field=error.field,
            value=error.value,
            next_step="Correct model.path: it is relative to the job file, or a hub id that can be reached.",
        ) from None
    return job.model_copy(update={"model": job.model.model_copy(update={"path": path})})


def forecast_json(plan: Plan, forecast: Forecast) -> dict[str, Any]:
    return {"plan": plan.model_dump(mode="json"), "forecast": forecast.model_dump(mode="json")}


def print_forecast(job: Job, plan: Plan, forecast: Forecast) -> None:
    from overspill.units import format_nbytes, format_seconds

    held = forecast.held_nbytes
    names = list(dict.fromkeys(name for classes in held.values() for name in classes))
    rows = [
        (name, *(format_nbytes(n) if (n := held.get(tier, {}).get(name, 0)) else "" for tier in ("host", "disk")))
        for name in names
        if any(classes.get(name) for classes in held.values())
    ]
    host, disk = (sum(held.get(tier, {}).values()) for tier in ("host", "disk"))
    rows.append(("total", format_nbytes(host), format_nbytes(disk) if disk else ""))
    rows.append(("budget", format_nbytes(plan.memory_nbytes), ""))
    emit(
        f"{Path(job.model.path).name}: {forecast.parameters:,} parameters, {forecast.trainable_parameters:,} trained "
        f"in {job.model.dtype} with {job.optimizer.name}."
    )
    print_table(("training state", "memory", "disk"), rows)
    versions = 2 + plan.keep_last
    seconds = forecast.step_seconds
    busy = f", while other processes took {forecast.busy_cores:.1f} cores" if forecast.busy_cores >= BUSY_CORES else ""
    lasting = "" if seconds is None else f", about {format_seconds(seconds)} (speeds measured just now{busy})"
    facts = [
        f"peak in {forecast.peak_phase}; interpreter and libraries come on top ({format_nbytes(forecast.base_nbytes)})",
        f"a commit writes {format_nbytes(forecast.disk_nbytes / versions)}, weights and all state; {versions} versions "
        f"(committed, under way, {plan.keep_last} checkpoint{'s' if plan.keep_last > 1 else ''}) take "
        f"{format_nbytes(forecast.disk_nbytes)} of disk",
        f"per step: {forecast.tokens_per_step} tokens, disk {format_nbytes(_read(forecast))} read and "
        f"{format_nbytes(_written(plan, forecast))} written{lasting}",
        f"at risk in a crash: {_at_risk(job, plan)}",
        *forecast.notes,
        f"{forecast.verdict}: {forecast.reason}",
    ]
    for fact in facts:
        emit(f"  {fact}")
    emit()


def _at_risk(job: Job, plan: Plan) -> str:
    """What a crash may cost, in steps; a checkpoint commits as well."""
    steps = job.train.steps
    periods = [period for period in (plan.durability.every_steps, job.train.save_every) if period]
    every = min(periods, default=0)
    if every == 1:
        return "at most the step under way"
    if every == 0 or (steps is not None and every >= steps):
        return "the whole run: nothing is committed before the end (Ctrl-C commits too)"
    return f"at most {every} steps"


def _read(forecast: Forecast) -> int:
    return forecast.read_nbytes.get("disk", 0)


def _written(plan: Plan, forecast: Forecast) -> int:
    """Of the usual step: one that commits where every step does."""
    by_tier = forecast.written_nbytes_committing if plan.durability.every_steps == 1 else forecast.written_nbytes
    return by_tier.get("disk", 0)


def comparison(plan: Plan, forecast: Forecast, measured: Any, disk_nbytes: int) -> list[Compared]:
    """The forecast beside what was measured (observe.compare.Measured)."""
    from overspill.report import Compared

    rows = [Compared(what="memory, peak", unit="bytes", forecast=forecast.peak_nbytes, measured=measured.peak_nbytes)]
    pool = {**measured.held_nbytes("host"), "activations": measured.activations_nbytes}
    for name, nbytes in forecast.held_nbytes.get("host", {}).items():
        if nbytes or pool.get(name):
            row = Compared(what=f"memory, {name}", unit="bytes", forecast=nbytes, measured=pool.get(name, 0))
            rows.append(row)
    rows.append(
        Compared(
            what="memory, base (not in the budget)",
            unit="bytes",
            forecast=forecast.base_nbytes,
            measured=measured.base_nbytes,
        )
    )
    rows.append(Compared(what="disk space", unit="bytes", forecast=forecast.disk_nbytes, measured=disk_nbytes))
    step = measured.per_step()
    if step is not None:
        read, written, seconds = step
        rows += [
            Compared(what="disk read per step", unit="bytes", forecast=_read(forecast), measured=read),
            Compared(what="disk written per step", unit="bytes", forecast=_written(plan, forecast), measured=written),
            Compared(what="time per step", unit="seconds", forecast=forecast.step_seconds, measured=seconds),
        ]
    return rows


def doctor(
    directory: Annotated[Path, typer.Argument(help="Where disk state would live.")] = Path(),
    as_json: _Json = False,
) -> None:
    """What this machine has for training, and what is wrong with it."""
    from overspill.probe import doctor as examine

    findings = examine([directory])
    if as_json:
        print_json([finding.model_dump() for finding in findings])
        return
    for finding in findings:
        emit(f"{finding.status:>4}  {finding.name}: {finding.what}")
        if finding.status != "ok":
            emit(f"      {finding.why} {finding.what_to_do}")
    bad = [finding.name for finding in findings if finding.status == "fail"]
    if bad:
        emit(f"\nTraining will not work before this is repaired: {', '.join(bad)}.")
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    app.command("forecast")(forecast_command)
    app.command()(doctor)
