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
    target: Annotated[
        str | None,
        typer.Argument(help="A model's name or directory, a job file, or another framework's configuration."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of the job.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model's name or directory.")] = None,
    params: Annotated[str | None, typer.Option(help="Instead of a model, its size: 7B.")] = None,
    method: Annotated[str | None, typer.Option(help="full, lora or qlora.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of LoRA pairs.")] = None,
    targets: Annotated[str | None, typer.Option(help="LoRA targets, with commas between; or all-linear.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The card, as rtx4090.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Number of cards.")] = None,
    shard: Annotated[
        str | None, typer.Option(help="How ranks share state: ddp, zero1, zero2, zero3, fsdp1, fsdp2.")
    ] = None,
    tensor: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences per forward.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="As adamw, adamw_8bit, adafactor.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights: bf16, fp32, fp16.")] = None,
    autocast: Annotated[str | None, typer.Option(help="Compute dtype under autocast: bf16, fp16; or none.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Gradient checkpointing.")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="eager, sdpa, flash, flex.")] = None,
    loss: Annotated[str | None, typer.Option(help="plain, fused, fused_linear, chunked.")] = None,
    framework: Annotated[str | None, typer.Option(help="As trl, torchtune, deepspeed, megatron.")] = None,
    data: Annotated[Path | None, typer.Option(help="The data file: its sequence lengths are read.")] = None,
    headroom: Annotated[float | None, typer.Option(help="Share of the card that is to stay free.")] = None,
    held: Annotated[str | None, typer.Option(help="Memory that others hold on the card, as 1GiB.")] = None,
    alloc_conf: Annotated[str | None, typer.Option(help="PYTORCH_CUDA_ALLOC_CONF.")] = None,
    format: Annotated[
        str | None, typer.Option(help="Of another framework's file, where it is not seen from it.")
    ] = None,
    diff: Annotated[str | None, typer.Option(help="A second target, to compare with.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every term with its numbers.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write memory over the step to FILE (.svg or .png).")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, one line a phase.")] = False,
    as_json: _Json = False,
) -> None:
    """What a job will need, before it starts: memory of a card by phase, or of this machine by tier. Loads no model."""
    flags: dict[str, Any] = {
        "model.path": model, "params": params, "method.rank": rank, "device.gpu": gpu, "parallel.gpus": gpus,
        "parallel.data": shard, "parallel.tensor": tensor, "parallel.pipeline": pipeline,
        "train.micro_batch": micro_batch, "data.seq_len": seq_len, "optimizer.name": optimizer, "model.dtype": dtype,
        "model.autocast": autocast, "model.gradient_checkpointing": checkpointing, "kernels.attention": attention,
        "kernels.loss": loss, "framework.name": framework, "device.headroom": headroom, "device.held_nbytes": held,
        "device.alloc_conf": alloc_conf, **_method(method),
    }  # fmt: skip
    if targets is not None:
        flags["method.targets"] = tuple(part.strip() for part in targets.split(",") if part.strip())
    asked_for_a_card = any(value is not None for value in flags.values()) or diff or explain or plot or as_csv or data
    if target is not None and not asked_for_a_card and Path(target).suffix in (".toml", ".json"):
        from overspill.cli.jobs import load_job, refuse_missing_data

        if _is_this_machines(Path(target), settings):
            job = load_job(Path(target), settings or [])
            refuse_missing_data(job)
            plan, forecast = resolve(job, Path("runs"), base=Path(target).parent)
            print_json(forecast_json(plan, forecast)) if as_json else print_forecast(job, plan, forecast)
            return
    _forecast_card(target, flags, settings or [], format, diff, data, plot=plot, explain=explain, as_csv=as_csv,
                   as_json=as_json)  # fmt: skip


def _method(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    known: dict[str, dict[str, Any]] = {
        "full": {"method.kind": "full"},
        "lora": {"method.kind": "lora"},
        "qlora": {"method.kind": "lora", "method.base": "nf4", "method.double_quant": True},
    }
    from overspill.errors import OverspillError

    if name.lower() not in known:
        raise OverspillError("OVS101", "No such method.", field="--method", value=name, limit=", ".join(known))
    return known[name.lower()]


def _is_this_machines(file: Path, settings: list[str] | None) -> bool:
    """A job file that names no card and nothing that only a GPU framework does: a run of `overspill train` here."""
    from overspill.cli.device import is_own_job
    from overspill.cli.jobs import load_job

    if file.suffix == ".json" and not is_own_job(file):
        return False
    job = load_job(file, settings or [])
    return job.device.gpu is None and job.parallel.gpus == 1 and job.framework.name in ("torch", "overspill")


def _forecast_card(
    target: str | None,
    flags: dict[str, Any],
    settings: list[str],
    format: str | None,
    diff: str | None,
    data: Path | None,
    *,
    plot: Path | None,
    explain: bool,
    as_csv: bool,
    as_json: bool,
) -> None:
    from overspill.cli import device
    from overspill.forecast.device.result import forecast_device

    asked = device.make(target, flags, settings, format=format)
    if data is not None:
        device.read_lengths(asked, data)
    bare = target is not None and not any(
        flags.get(name) is not None for name in ("method.kind", "model.gradient_checkpointing")
    )
    is_model = target is None or not Path(target).is_file()
    if bare and is_model and not (as_json or as_csv or explain or diff or plot):
        device.print_grid(asked)
        return
    forecast = forecast_device(asked.job, asked.shape, asked.card, name=asked.name)
    if diff is not None:
        other = device.make(diff, flags, settings, format=format)
        second = forecast_device(other.job, other.shape, other.card, name=other.name)
        device.compare((target or asked.name, forecast), (diff, second))
        return
    if plot is not None:
        device.write_plot(asked, forecast, plot)
    if as_csv:
        print(device.to_csv(forecast), end="")
    elif as_json:
        device.print_as_json(asked, forecast)
    else:
        device.print_one(asked, forecast, explain=explain)


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
