"""``overspill forecast`` for GPUs: from a model's name, a job file or another framework's configuration to a verdict.

What is asked comes from the arguments, what a job needs from forecast/device, what a card has from the catalogue or the
driver. The verdict is the first line; tables follow; a command to copy is the last.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overspill.cli.console import emit, notice, print_json, print_table
from overspill.errors import OverspillError

if TYPE_CHECKING:
    from overspill.catalog.accelerators import Accelerator
    from overspill.forecast.device.result import DeviceForecast
    from overspill.job import Job
    from overspill.model import ModelShape

__all__ = [
    "Asked", "compare", "is_own_job", "make", "print_as_json", "print_grid", "print_one", "read_lengths", "to_csv",
    "write_plot",
]  # fmt: skip

#: Cards to show where none is named or found: sizes that people have.
COMMON_CARDS = ("RTX 3060 12GB", "RTX 4080", "RTX 4090", "RTX 5090", "A100 80GB", "H100 SXM", "B200")
_BAR_WIDTH = 28


@dataclass
class Asked:
    """One forecast that was asked for: the job, its model, the card, and how each came to be."""

    job: Job
    shape: ModelShape
    name: str
    card: Accelerator | None
    card_from: str = ""
    assumed: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make(target: str | None, flags: Mapping[str, Any], settings: Sequence[str], *, format: str | None = None) -> Asked:
    """What the arguments ask for.

    Raises OverspillError: OVS101 for flags that no job takes, OVS109 for a configuration that misses something, OVS110
    for a card, OVS201 for a model.
    """
    job, assumed, notes = _job(target, dict(flags), settings, format)
    shape, name, more = _shape(job)
    notes += more
    job = _within_positions(job, shape, assumed)
    card, where = _card(job, target)
    if where.startswith("found"):
        notes.append(where)
    return Asked(job, shape, name, card, where, assumed, notes)


def _job(
    target: str | None, flags: dict[str, Any], settings: Sequence[str], format: str | None
) -> tuple[Job, list[tuple[str, str, str]], list[str]]:
    from overspill.cli.jobs import load_job, with_settings
    from overspill.job import Job

    assumed: list[tuple[str, str, str]] = []
    notes: list[str] = []
    path = Path(target) if target is not None else None
    if path is not None and path.is_file() and path.name != "config.json":
        job = None
        if format is None and (path.suffix == ".toml" or is_own_job(path)):
            job = _changed(load_job(path), flags)
        else:
            from overspill.interop.configs import read_config

            given = {key: value for key, value in flags.items() if value is not None}
            reading = read_config(path, given, format=format)
            notes += [*reading.notes, *_key_notes(reading)]
            assumed += [(name, str(one.value), one.why) for name, one in reading.assumed.items()]
            if not reading.trains:
                raise OverspillError("OVS109", "The file describes no training.", field=str(path))
            if reading.job is None:
                raise OverspillError(
                    "OVS109", "The configuration leaves out what a forecast needs.", field=str(path),
                    limit=", ".join(reading.missing), next_step="Give it as a flag, for example --model.",
                )  # fmt: skip
            job = reading.job
    else:
        model = target if target is not None else flags.get("model.path")
        if model is None and flags.get("params") is None:
            raise OverspillError(
                "OVS101", "Nothing to forecast was named.", field="TARGET",
                next_step="overspill forecast meta-llama/Llama-3.1-8B, or a job file, or --params 7B.",
            )  # fmt: skip
        if path is not None and path.suffix in (".toml", ".yaml", ".yml") and not path.exists():
            raise OverspillError("OVS103", "There is no such file.", field=str(path))
        job = Job.read({"model": {"path": str(model or f"{flags['params']} parameters")}}, source="the arguments")
        named = {key: value for key, value in flags.items() if key != "model.path" and value is not None}
        job = _changed(job, {**_usual(named, assumed), **named})
    return with_settings(job, settings) if settings else job, assumed, notes


def is_own_job(path: Path) -> bool:
    """A job in JSON has our tables; a configuration of another framework has not."""
    if path.suffix != ".json":
        return path.suffix == ".toml"
    from overspill.files import parse_json

    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and isinstance(data.get("model"), dict) and "path" in data["model"]


def _usual(flags: Mapping[str, Any], assumed: list[tuple[str, str, str]]) -> dict[str, Any]:
    """What a fine-tune that names only its model is taken to be."""
    usual: dict[str, Any] = {
        "framework.name": ("trl", "the most common trainer"),
        "model.gradient_checkpointing": (True, "the usual choice where memory is short"),
        "model.autocast": ("bf16", "bf16 = true"),
        "data.seq_len": (2048, "a usual length"),
        "train.micro_batch": (1, "the smallest"),
        "kernels.attention": ("sdpa", "transformers' default"),
    }
    taken = {}
    for name, (value, why) in usual.items():
        if flags.get(name) is None:
            taken[name] = value
            assumed.append((name, str(value), why))
    return taken


def _changed(job: Job, flags: Mapping[str, Any]) -> Job:
    from overspill.forecast.device.advice import with_fields

    fields = {name: value for name, value in flags.items() if value is not None and "." in name}
    return with_fields(job, fields) if fields else job


def _key_notes(reading: Any) -> list[str]:
    notes = []
    if reading.unknown:
        notes.append("Keys that are not understood, and left out: " + ", ".join(reading.unknown) + ".")
    return notes


def _shape(job: Job) -> tuple[ModelShape, str, list[str]]:
    from overspill.model import read_model, shape_of_size
    from overspill.units import parse_count

    path = job.model.path
    if path.endswith(" parameters"):
        sized = shape_of_size(parse_count(path.removesuffix(" parameters")))
        return sized.shape, path, list(sized.assumptions)
    found = read_model(path)
    return found.shape, found.name, [found.note] if found.note else []


def _within_positions(job: Job, shape: ModelShape, assumed: list[tuple[str, str, str]]) -> Job:
    """A length that was assumed is cut to the positions that a model has learned; one that was asked for is refused."""
    from overspill.forecast.device.advice import with_fields
    from overspill.forecast.device.result import refuse_long

    name, limit = "data.seq_len", shape.max_positions
    taken = [one for one in assumed if one[0] == name]
    if limit and taken and job.data.seq_len > limit and shape.facts is not None and shape.facts.positions == "learned":
        assumed[assumed.index(taken[0])] = (name, str(limit), "all positions that the model has learned")
        return with_fields(job, {name: limit})
    refuse_long(job, shape)
    return job


def _card(job: Job, target: str | None) -> tuple[Accelerator | None, str]:
    from overspill.catalog.user import find_accelerator, read_user_catalogue

    user = read_user_catalogue(Path(target).parent if target and Path(target).is_file() else None)
    if job.device.gpu is not None:
        return find_accelerator(job.device.gpu, user), "named"
    from overspill.probe.gpus import card_of, find_gpus

    for gpu in find_gpus() or ():
        card = card_of(gpu, user)
        if card is not None:
            return card, f"found in this machine: {gpu.name}"
    return None, "no card is named, and none was found"


def print_one(asked: Asked, forecast: DeviceForecast, *, explain: bool = False) -> None:
    """The verdict, the three figures, the phases with bars, what would help."""
    from overspill.forecast.device.advice import changes, largest_micro_batch, longest_seq_len
    from overspill.units import format_nbytes

    job = asked.job
    emit(verdict_line(forecast))
    emit()
    counts = f"{forecast.parameters:,} parameters, {forecast.trainable_parameters:,} trained"
    emit(f"{forecast.model}: {counts}; {describe(job)}")
    figures = (
        ("allocated (alive tensors)", forecast.allocated),
        ("reserved (torch's allocator)", forecast.reserved),
        ("nvidia-smi", forecast.smi),
    )
    print_table(
        ("memory of one card", "likely", "90 % between", "and"),
        [
            (name, format_nbytes(one.likely_nbytes), format_nbytes(one.low_nbytes), format_nbytes(one.high_nbytes))
            for name, one in figures
        ],
    )
    emit(f"  at rest {format_nbytes(forecast.resting_nbytes)}; the peak is in {forecast.peak_phase}, "
         f"most of it {forecast.peak_category}")  # fmt: skip
    emit()
    _bars(forecast)
    if forecast.host_pinned_nbytes or forecast.host_pageable_nbytes or forecast.disk_nbytes:
        emit(
            f"  off the card, for each rank: {format_nbytes(forecast.host_pinned_nbytes)} of pinned DRAM, "
            f"{format_nbytes(forecast.host_pageable_nbytes)} pageable, {format_nbytes(forecast.disk_nbytes)} of disk"
        )
    if forecast.gpus > 1:
        emit(
            f"  of the peak {format_nbytes(forecast.shrinks['with more ranks'])} are split over the ranks, "
            f"{format_nbytes(forecast.shrinks['whatever their number'])} are not"
        )
    if asked.card is not None:
        batch = largest_micro_batch(job, asked.shape, asked.card)
        length = longest_seq_len(job, asked.shape, asked.card)
        most = f"micro-batch {batch or 'none'}, or sequences of {length or 'no'} tokens"
        emit(f"  what just fits, the rest unchanged: {most}")
    found = changes(job, asked.shape, asked.card)
    if found:
        emit()
        print_table(
            ("what would help", "saves", "then", "price"),
            [
                (f"{one.name}{' (fits)' if one.fits and forecast.verdict == 'does not fit' else ''}",
                 format_nbytes(one.saved_nbytes), format_nbytes(one.allocated_nbytes), one.price)
                for one in found[:6]
            ],
        )  # fmt: skip
    if explain:
        emit()
        _explain(asked)
    _assumptions(asked, forecast)


def verdict_line(forecast: DeviceForecast) -> str:
    if forecast.verdict is None:
        from overspill.units import format_nbytes

        return f"{format_nbytes(forecast.needed.likely_nbytes)} are needed; name a card with --gpu for a verdict."
    chance = f" Probability of running out: {forecast.probability:.0%}; headroom asked for: {forecast.headroom:.0%}."
    return f"{forecast.verdict.upper()}: {forecast.reason}{chance}"


def describe(job: Job) -> str:
    method = {"full": "full fine-tune", "lora": "LoRA"}.get(job.method.kind, job.method.kind)
    if job.method.kind == "lora" and job.method.base:
        method = f"QLoRA ({job.method.base})"
    parts = [
        method,
        f"micro-batch {job.train.micro_batch} × {job.data.seq_len} tokens",
        f"{job.model.dtype}" + (f" under {job.model.autocast} autocast" if job.model.autocast else ""),
        "checkpointing" if job.model.gradient_checkpointing else "no checkpointing",
        job.optimizer.name,
        job.framework.name,
    ]
    if job.parallel.gpus > 1:
        parts.append(f"{job.parallel.gpus} GPUs ({job.parallel.data})")
    return ", ".join(parts) + "."


def _bars(forecast: DeviceForecast) -> None:
    from overspill.units import format_nbytes

    top = max([phase.total_nbytes for phase in forecast.phases] + [forecast.usable_nbytes or 0])
    for phase in forecast.phases:
        length = round(_BAR_WIDTH * phase.total_nbytes / top) if top else 0
        parts = sorted(((n, name) for name, n in phase.by_category.items() if n), reverse=True)[:3]
        said = ", ".join(f"{name} {format_nbytes(n)}" for n, name in parts)
        mark = "*" if phase.phase == forecast.peak_phase else " "
        emit(f" {mark}{phase.phase:<26} {'█' * length:<{_BAR_WIDTH}} {format_nbytes(phase.total_nbytes):>11}  {said}")
    if forecast.usable_nbytes:
        length = round(_BAR_WIDTH * forecast.usable_nbytes / top)
        emit(f"  {'the card':<26} {'─' * length:<{_BAR_WIDTH}} {format_nbytes(forecast.usable_nbytes):>11}")


def _assumptions(asked: Asked, forecast: DeviceForecast) -> None:
    rows = [*asked.assumed, *((one.field, one.value, one.why) for one in forecast.assumed)]
    if rows:
        emit()
        emit("assumed:")
        for name, value, why in dict.fromkeys(rows):
            emit(f"  {name} = {value} ({why})")
    for note in (*asked.notes, *forecast.notes):
        notice(f"note: {note}")


def _explain(asked: Asked) -> None:
    from overspill.forecast.device.explain import terms

    emit("every term of the peak:")
    for line in terms(asked.job, asked.shape):
        emit(f"  {line}")


def print_grid(asked: Asked) -> None:
    """The first minute: every method beside every card that matters, and a command to copy."""
    from overspill.catalog.accelerators import accelerator
    from overspill.forecast.device.advice import method_grid
    from overspill.units import format_nbytes

    cards = [asked.card] if asked.card is not None else [accelerator(name) for name in COMMON_CARDS]
    columns = []
    for card in cards:
        columns.append([cell.verdict for cell in method_grid(asked.job, asked.shape, card)])
    cells = method_grid(asked.job, asked.shape, None)
    words = {"fits": "fits", "tight": "tight", "does not fit": "no"}
    rows = []
    for number, cell in enumerate(cells):
        label = f"{cell.method}, {'checkpointing' if cell.checkpointing else 'no checkpointing'}"
        rows.append(
            (label, format_nbytes(cell.allocated_nbytes), *(words[column[number] or "fits"] for column in columns))
        )
    best = next((cell for number, cell in enumerate(cells) if columns[0][number] in ("fits", "tight")), None)
    first = cards[0].name
    where = f"On the {first}" if asked.card is not None else f"On the smallest common card, the {first}"
    if best is None:
        emit(f"{where}, none of full, LoRA and QLoRA of {asked.name} fits at {describe(asked.job).split(', ')[1]}.")
    else:
        emit(f"{where}, {best.method} of {asked.name} fits at {describe(asked.job).split(', ')[1]}.")
    emit()
    print_table(("", "needs", *(card.name for card in cards)), rows)
    emit()
    chosen = best or cells[-1]
    command = f"overspill forecast {asked.name} --method {chosen.method.lower()} --gpu '{first}'"
    command += f" --micro-batch {asked.job.train.micro_batch} --seq-len {asked.job.data.seq_len}"
    emit("more of one of them:")
    emit(f"  {command}{' --checkpointing' if chosen.checkpointing else ' --no-checkpointing'}")
    for note in asked.notes:
        notice(f"note: {note}")


def to_csv(forecast: DeviceForecast) -> str:
    """One line a phase, bytes by category."""
    out = io.StringIO()
    writer = csv.writer(out)
    names = list(forecast.phases[0].by_category)
    writer.writerow(["phase", "total_nbytes", *names])
    for phase in forecast.phases:
        writer.writerow([phase.phase, phase.total_nbytes, *(phase.by_category[name] for name in names)])
    return out.getvalue()


def compare(first: tuple[str, DeviceForecast], second: tuple[str, DeviceForecast]) -> None:
    """Two jobs side by side, and where the difference lies."""
    from overspill.units import format_nbytes

    (name_a, a), (name_b, b) = first, second
    rows = [
        (what, format_nbytes(x), format_nbytes(y), _signed(y - x))
        for what, x, y in (
            ("allocated", a.allocated.likely_nbytes, b.allocated.likely_nbytes),
            ("reserved", a.reserved.likely_nbytes, b.reserved.likely_nbytes),
            ("nvidia-smi", a.smi.likely_nbytes, b.smi.likely_nbytes),
            ("at rest", a.resting_nbytes, b.resting_nbytes),
        )
    ]
    at_a = next(phase for phase in a.phases if phase.phase == a.peak_phase)
    at_b = next(phase for phase in b.phases if phase.phase == b.peak_phase)
    for category in at_a.by_category:
        x, y = at_a.by_category[category], at_b.by_category[category]
        if x or y:
            rows.append((f"at the peak: {category}", format_nbytes(x), format_nbytes(y), _signed(y - x)))
    emit(f"{name_a}: {verdict_line(a)}")
    emit(f"{name_b}: {verdict_line(b)}")
    emit()
    print_table(("", name_a, name_b, "difference"), rows)
    emit(f"  the peak is in {a.peak_phase} and in {b.peak_phase}")


def _signed(nbytes: int) -> str:
    from overspill.units import format_nbytes

    return f"{'+' if nbytes >= 0 else '-'}{format_nbytes(abs(nbytes))}"


def read_lengths(asked: Asked, file: Path) -> None:
    """The lengths of the sequences in a data file, which set the batch's length where nothing is packed.

    With a tokenizer beside the model its tokens are counted; else four characters count as a token, and it is said.
    Raises OverspillError OVS204 for a file that holds no text.
    """
    from overspill.forecast.device.advice import with_fields
    from overspill.forecast.device.lengths import token_lengths

    lengths, how = token_lengths(file, asked.job.model.path, asked.job.data.seq_len)
    asked.assumed.append(("data.lengths", f"{len(lengths)} rows, {min(lengths)} to {max(lengths)} tokens", how))
    asked.job = with_fields(asked.job, {"data.lengths": tuple(sorted(set(lengths))), "data.packing": False})


def write_plot(asked: Asked, forecast: DeviceForecast, file: Path) -> None:
    """Memory over the step, by category, as a picture. Raises OverspillError OVS104 without matplotlib for a .png."""
    from overspill.forecast.device.plot import svg_of

    if file.suffix == ".svg":
        file.write_text(svg_of(forecast), encoding="utf-8")
        return
    try:
        import matplotlib

        matplotlib.use("Agg")
        from overspill.forecast.device.picture import save_picture
    except ImportError:
        raise OverspillError(
            "OVS104",
            "A .png needs matplotlib.",
            field="--plot",
            next_step="Give FILE.svg, or pip install 'overspill[plot]'.",
        ) from None
    save_picture(forecast, file)


def print_as_json(asked: Asked, forecast: DeviceForecast) -> None:
    document = forecast.model_dump(mode="json")
    document["assumed"] = [
        {"field": name, "value": value, "why": why} for name, value, why in asked.assumed
    ] + document["assumed"]  # fmt: skip
    document["notes"] = [*asked.notes, *document["notes"]]
    document["job"] = asked.job.model_dump(mode="json")
    print_json(document)
