"""``overspill export`` and ``overspill generate``: from a checkpoint to a Hugging Face directory, and trying it.

An export streams: tensors are mapped from the checkpoint's files and written one after another, so that it takes
no more memory for a large model than for a small one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overspill.cli.console import emit, is_terminal, notice, print_json
from overspill.errors import OverspillError

if TYPE_CHECKING:
    from overspill.checkpoint import RunDirectory
    from overspill.interop.export import ExportReport, ExportTensor
    from overspill.job import Job
    from overspill.tiers.disk import StoreReader

__all__ = ["add_to"]

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_From = Annotated[str | None, typer.Option("--from", metavar="NAME", help="The checkpoint; default: the newest.")]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    checkpoint: _From = None,
    out: Annotated[Path | None, typer.Option(help="The new model directory; default: RUN/export/<checkpoint>.")] = None,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory (safetensors, config, tokenizer)."""
    from overspill.checkpoint import RunDirectory
    from overspill.units import count, format_nbytes

    report = export_run(RunDirectory.open(run), checkpoint, out)
    if as_json:
        row = {"directory": str(report.directory), "files": list(report.files), "nbytes": report.nbytes}
        print_json({**row, "tensors": report.tensors})
        return
    emit(f"Wrote {report.directory}: {count(report.tensors, 'tensor')}, {format_nbytes(report.nbytes)}.")
    emit(f'Next: overspill generate {report.directory} --prompt "…"')


def generate(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_DIR", help="A run, or a model directory.")],
    prompt: Annotated[str, typer.Option(help="What the model goes on from.")],
    checkpoint: _From = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1_000_000_000, help="Longest answer, in tokens.")] = 128,
    chat: Annotated[bool, typer.Option(help="Put the prompt through the model's chat template.")] = False,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token each time; 0.0001 to 10000 draws.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="For a temperature above 0; 0 to 2^63 - 1.")] = 0,
    as_json: _Json = False,
) -> None:
    """Try a model: print what it says after a prompt. A run's checkpoint is exported first, once."""
    from overspill.interop.sampling import refuse_odd_sampling

    refuse_odd_sampling(temperature, seed)
    directory = _model_of(source, checkpoint)
    from overspill.cli.loading import import_training

    import_training("generate")
    from overspill.interop.generate import generate_text

    stream = is_terminal() and not as_json
    echo = prompt + "\n" if chat else prompt
    if stream:
        print(f"\x1b[2m{echo}\x1b[0m", end="", flush=True)
    notes: list[str] = []
    text = generate_text(
        directory,
        prompt,
        max_new_tokens=max_new_tokens,
        chat=chat,
        temperature=temperature,
        seed=seed,
        on_text=(lambda piece: print(piece, end="", flush=True)) if stream else None,
        on_note=notes.append,
    )
    if as_json:
        print_json({"model": str(directory), "prompt": prompt, "text": text})
    else:
        emit("" if stream else echo + text)
    for note in notes:
        notice(note)


def _model_of(source: Path, checkpoint: str | None) -> str | Path:
    """A model directory or hub id as it is; a run's newest or named checkpoint, exported if it is not yet."""
    from overspill.checkpoint import RunDirectory

    if not (source / "run.json").is_file():
        if checkpoint is not None:
            raise OverspillError("OVS601", "--from needs a run directory.", field=str(source))
        return str(source)
    run = RunDirectory.open(source)
    target = run.exports / run.checkpoint(checkpoint).name
    if not (target / "config.json").is_file():
        notice(f"Exporting {target.name} to {target} first.")
        export_run(run, checkpoint, target)
    return target


def export_run(run: RunDirectory, checkpoint: str | None = None, out: Path | None = None) -> ExportReport:
    """Stream one checkpoint's weights into a model directory.

    Raises OverspillError: OVS601 without such a checkpoint or when it is dropped meanwhile, OVS4xx from the disk,
    OVS404 for damaged weights, OVS408 for a copy of a run, OVS602 when the model's config is no longer the one that
    they were trained with, OVS605 for a directory not empty or in a run's state.
    """
    from overspill.checkpoint.contents import refuse_inside_state
    from overspill.cli.jobs import load_job
    from overspill.cli.loading import import_training

    path = run.checkpoint(checkpoint)
    if out is not None:
        refuse_inside_state(out, "OVS605")
    job = load_job(run.job_file)
    import_training("export")
    from overspill.interop.config_facts import config_facts, refuse_changed_config
    from overspill.interop.export import export_safetensors
    from overspill.interop.hf import load_config, model_directory
    from overspill.tiers.disk import StoreReader

    source = model_directory(job.model.path)
    with StoreReader(path, home=run.state) as reader:
        then = reader.manifest.extra.get("extra", {}).get("config")
        if then is not None:  # what is exported is config.json as it is now
            refuse_changed_config(
                then,
                config_facts(source),
                load_config(source),
                file=source / "config.json",
                next_step="Put the old values back; the weights were trained with them.",
            )
        reader.verify()  # a model must not leave with a flipped bit in it
        return export_safetensors(
            checkpoint_tensors(reader, job, source),
            out if out is not None else run.exports / path.name,
            source_dir=source,
            tokenizer_dir=None if job.model.tokenizer is None else model_directory(job.model.tokenizer),
        )


def checkpoint_tensors(reader: StoreReader, job: Job, source: Path) -> Iterator[ExportTensor]:
    """The model's tensors in its own order: parameters from the checkpoint, persistent buffers from the source."""
    from overspill.interop.export import model_tensors
    from overspill.interop.hf import build_empty
    from overspill.interop.weights import checkpoint_entries

    slots = [slot for slot in reader.slots if slot.state_class == "weights"]
    slot_by_name = {tensor.name: slot.name for slot in slots for tensor in slot.tensors}
    model = build_empty(source, job.model.dtype)
    entries = checkpoint_entries(source) if job.model.init == "pretrained" else {}
    for name, dtype, shape, read in model_tensors(model):
        slot = slot_by_name.get(name)
        if slot is not None:
            yield name, dtype, shape, lambda slot=slot, name=name: reader.tensor(slot, name)  # type: ignore[misc]
        elif name in entries:
            from safetensors import safe_open

            with safe_open(str(entries[name].file), framework="pt") as file:
                value = file.get_tensor(name).to(dtype)
            yield name, dtype, shape, lambda value=value: value  # type: ignore[misc]
        else:
            yield name, dtype, shape, read


def add_to(app: typer.Typer) -> None:
    app.command()(export)
    app.command()(generate)
