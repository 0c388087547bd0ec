"""Builds the parts of a run: model, data, session, schedule, loop. It prints nothing and takes no decision.

Order: what is cheap and can be wrong comes first (tokenizer, data), then the empty model, then attach(), which gives
parameters their place within the budget, and only then the weights, straight from their files into that place.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.checkpoint import (
    RunDirectory,
    RunIdentity,
    applied_settings,
    number_settings,
    refuse_fixed_settings,
)
from overspill.cli.loading import import_training
from overspill.errors import OverspillError
from overspill.job import Job
from overspill.observe.compare import Measured
from overspill.observe.memory import MemorySampler, anonymous_and_shared_nbytes
from overspill.observe.metrics import last_row, truncate_metrics
from overspill.plan import Plan
from overspill.report import StepReport
from overspill.units import count

import_training("train")

import torch  # noqa: E402 - after the check that gives a clear error when it is missing
import xxhash  # noqa: E402

from overspill import _native  # noqa: E402
from overspill.interop.config_facts import config_facts, refuse_changed_config  # noqa: E402
from overspill.interop.hf import (  # noqa: E402
    build_empty,
    load_config,
    load_tokenizer,
    max_positions,
    model_directory,
)
from overspill.interop.weights import checkpoint_entries, initialise_weights, load_weights  # noqa: E402
from overspill.tiers.disk import StoreReader  # noqa: E402
from overspill.tiers.disk.manifest import MANIFEST  # noqa: E402
from overspill.train import Session, attach  # noqa: E402
from overspill.train.data import BatchSource, PreparedData, eval_batches, prepare_data, steps_in  # noqa: E402
from overspill.train.loop import LoopSettings, StopFlag, TrainingLoop, seed_all  # noqa: E402
from overspill.train.lr import lr_scheduler  # noqa: E402
from overspill.train.malloc import trim_before_logits  # noqa: E402
from overspill.train.snapshot import decode  # noqa: E402

__all__ = ["Parts", "assemble"]


@dataclass(eq=False)
class Parts:
    """What a run is made of. ``committed``: of the job and its model, what each commit holds beside state; ``notes``:
    what the user should know, one sentence each."""

    session: Session
    model: Any
    source: BatchSource
    data: PreparedData
    settings: LoopSettings
    committed: dict[str, Any]
    scheduler: torch.optim.lr_scheduler.LRScheduler
    micro_batch: int
    memory: MemorySampler
    measured: Measured
    stop: StopFlag = field(default_factory=StopFlag)
    notes: list[str] = field(default_factory=list)

    def loop(
        self,
        on_step: Callable[[StepReport], None],
        on_first_eval: Callable[[float], None] = lambda loss: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> TrainingLoop:
        evaluation = self.data.evaluation
        return TrainingLoop(
            self.session,
            self.model,
            self.source,
            settings=self.settings,
            scheduler=self.scheduler,
            eval_batches=eval_batches(evaluation, self.micro_batch) if evaluation is not None else None,
            on_step=on_step,
            on_first_eval=on_first_eval,
            before_commit=before_commit,
            extra=lambda: {"epoch": self.source.epoch, **self.committed},
            stop=self.stop,
        )


@contextmanager
def assemble(
    run: RunDirectory, job: Job, plan: Plan, *, resume: bool = False, checkpoint: str | None = None
) -> Iterator[Parts]:
    """The parts of a new or resumed run; on leaving, workers, session and store are closed.

    Raises OverspillError: OVS2xx for model and data, OVS3xx and OVS4xx from attach(), OVS602 when the run belongs to
    another model, data or settings; nothing of a resumed run has been changed then. A new run that fails before its
    parts are complete leaves nothing behind.
    """
    built = False
    try:
        with _built(run, job, plan, resume=resume, checkpoint=checkpoint) as parts:
            built = True
            yield parts
    except BaseException:
        if not resume and not built:
            run.undo_creation()
        raise


@contextmanager
def _built(run: RunDirectory, job: Job, plan: Plan, *, resume: bool, checkpoint: str | None) -> Iterator[Parts]:
    numbers = number_settings(job)
    done, saved = committed_step(run, checkpoint) if resume else (0, {})
    before: dict[str, Any] = saved.get("extra", {})
    then: dict[str, Any] = before.get("settings", {})
    refuse_fixed_settings(then, numbers, job_file=str(run.job_file))
    position = decode(saved.get("tracked", {}).get("data"))
    # Adding in another order gives other bits, so the number is part of what makes a run repeat.
    torch.set_num_threads(job.train.threads or plan.kernel_threads)
    if job.model.init == "pretrained":
        checkpoint_entries(model_directory(job.model.path))  # a missing or damaged file is known in milliseconds
    config = load_config(job.model.path)
    committed = {"settings": numbers, **_model_facts(job)}
    if "config" in before:
        refuse_changed_config(
            before["config"],
            committed["config"],
            config,
            file=model_directory(job.model.path) / "config.json",
            next_step="Put the old values back, or start a new run from an export of this one.",
        )
    tokenizer = load_tokenizer(job.model.tokenizer or job.model.path)
    seed_all(job.train.seed)
    model = build_empty(config, job.model.dtype, gradient_checkpointing=job.model.gradient_checkpointing)
    freeze(model, job.model.freeze)
    # Interpreter, libraries and the model's code, without a parameter: what the budget does not have to hold.
    base_nbytes = anonymous_and_shared_nbytes()
    data = prepare_data(
        job.data,
        tokenizer,
        run.path / "data",
        max_positions=max_positions(config),
        expected_key=position["data"] if position else None,
    )
    del tokenizer
    settings = loop_settings(job, data)
    refuse_past_the_end(run, done, settings.total_steps)
    identity = _identity(job, model)
    if resume and (there := run.identity()).model_digest != identity.model_digest:
        raise OverspillError(
            "OVS602",
            "The run was made with another model: names, shapes or dtypes of its parameters differ.",
            field=job.model.path,
            value=identity.model_digest,
            limit=there.model_digest,
        )
    if not resume:
        run.write_identity(identity)
    # A start that was killed before its store stood has nothing to come back to. One that has rows or checkpoints had a
    # store, and when its manifest is gone, attach() says which checkpoint there is.
    has_store = (run.state / MANIFEST).exists() or last_row(run.metrics_file) is not None or run.checkpoint_names()
    from_store = resume and bool(has_store)
    with ExitStack() as closing:
        source = BatchSource(
            data.train,
            micro_batch=job.train.micro_batch,
            seed=job.train.seed,
            shuffle=job.data.shuffle,
            num_workers=job.data.num_workers,
        )
        closing.callback(source.close)
        if position:
            source.check(position)
        memory = MemorySampler(base_nbytes)
        memory.start()
        closing.callback(memory.close)
        # The last check and the first change: the store is compared and verified before it goes back to a checkpoint.
        session = attach(
            model, optimizer=job.optimizer, plan=plan, directory=run.state, resume=checkpoint or from_store
        )
        closing.callback(session.close)
        trim_before_logits(model)
        unused: list[str] = []
        if session.restored is None:
            unused = fill(model, job)
            # Only now: what building and filling drew from the generators must not decide what training draws.
            seed_all(job.train.seed)
        scheduler = lr_scheduler(session.optimizer, job.schedule, total_steps=settings.total_steps)
        session.track(scheduler=scheduler, data=source)
        session.expect_checkpoint(settings.save_every, at=(settings.total_steps,))
        notes = [*data.notes, *unused, *session.notes]
        if resume:
            notes += _resume_notes(run, session, back=checkpoint is not None)
            notes += _changed_facts(before, committed)
            notes += give_up_the_future(run, session)
            if changed := applied_settings(then, numbers):
                notes.append("Settings have changed: " + "; ".join(changed) + ".")
        yield Parts(
            session=session,
            model=model,
            source=source,
            data=data,
            settings=settings,
            committed=committed,
            scheduler=scheduler,
            micro_batch=job.train.micro_batch,
            memory=memory,
            measured=Measured(base_nbytes=base_nbytes),
            notes=notes,
        )


def committed_step(run: RunDirectory, checkpoint: str | None) -> tuple[int, dict[str, Any]]:
    """The commit that a resume comes back to: its step, and what it holds beside state (settings, data position)."""
    place = run.checkpoint(checkpoint) if checkpoint is not None else run.state
    # A missing or damaged manifest is attach()'s to say: it knows the newest checkpoint that is whole.
    with suppress(OverspillError), StoreReader(place) as reader:
        return reader.step or 0, dict(reader.manifest.extra)
    return 0, {}


def refuse_past_the_end(run: RunDirectory, step: int, total_steps: int) -> None:
    """Raises OVS603 where the job was cut to fewer steps than the run has done."""
    if step > total_steps:
        raise OverspillError(
            "OVS603",
            f"The run is at step {step}, and its job asks for {count(total_steps, 'step')}: nothing is left to do.",
            field=str(run.path),
            next_step=f"Raise train.steps in {run.job_file} to go on, go back with `overspill resume {run.path} --from "
            f"NAME`, or `overspill export {run.path}`.",
        )


def _model_facts(job: Job) -> dict[str, Any]:
    """What decides the numbers of the model's own code: its config, and the library that computes by it."""
    import transformers

    return {"config": config_facts(model_directory(job.model.path)), "transformers": transformers.__version__}


def _changed_facts(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    if not before:  # nothing was committed yet
        return []
    if "config" not in before:
        return [
            "This run was begun before commits held the model's config; whether config.json is as it was is not known."
        ]
    if before["transformers"] != now["transformers"]:
        return [
            f"Bits may differ from an undisturbed run: transformers was {before['transformers']}, is "
            f"{now['transformers']}."
        ]
    return []


def give_up_the_future(run: RunDirectory, session: Session) -> list[str]:
    """Drop checkpoints and exports of steps after the one that the run has come back to: those steps come again, under
    the same names and perhaps with other content. Says what was dropped. Exports go first, so that a crash in between
    leaves the checkpoint, which brings the next resume here again.
    """
    store = session.store
    if store is None or session.restored is None:
        return []
    exports = run.drop_exports_after(session.step)
    later = [pin.name for pin in store.pins() if pin.step is not None and pin.step > session.step]
    for name in later:
        store.unpin(name)
    said = (("Checkpoints", later), ("Exports", exports))
    return [
        f"{what} of the steps that are done again were dropped: {', '.join(names)}." for what, names in said if names
    ]


def _resume_notes(run: RunDirectory, session: Session, *, back: bool) -> list[str]:
    """Cut the metrics back to where the session is, and say what that means. ``back``: the user chose to go back."""
    dropped, damaged, missing = truncate_metrics(run.metrics_file, session.step)
    restored = session.restored
    if restored is None:
        return ["No step of this run was committed yet; it starts from the beginning."]
    one = dropped == 1
    why = f"{'is' if one else 'are'} given up" if back else f"{'was' if one else 'were'} not committed"
    again = f" {count(dropped, 'step')} after it {why} and {'is' if one else 'are'} done again." if dropped else ""
    notes = [f"Going on from step {restored.step}.{again}"]
    if damaged:
        rows = count(damaged, "damaged row")
        notes.append(f"Dropped from the metrics: {rows}; the state is checked on its own.")
    if missing:
        have = "has" if missing == 1 else "have"
        notes.append(f"{count(missing, 'step')} {have} no row in the metrics; the state is checked on its own.")
    if restored.differs:
        notes.append("Bits may differ from an undisturbed run: " + "; ".join(restored.differs) + ".")
    return notes


def loop_settings(job: Job, data: PreparedData) -> LoopSettings:
    train = job.train
    steps = train.steps
    if steps is None:
        assert train.epochs is not None
        steps = steps_in(
            data.train, epochs=train.epochs, micro_batch=train.micro_batch, accumulation=train.accumulation
        )
    return LoopSettings(
        total_steps=steps,
        accumulation=train.accumulation,
        eval_every=train.eval_every,
        save_every=train.save_every,
    )


def freeze(model: Any, patterns: tuple[str, ...]) -> None:
    """Turn off training of the parameters that match. Raises OverspillError OVS101 for a pattern that matches none."""
    for pattern in patterns:
        hits = [parameter for name, parameter in model.named_parameters() if fnmatch.fnmatch(name, pattern)]
        if not hits:
            raise OverspillError(
                "OVS101",
                "The pattern matches no parameter.",
                field="model.freeze",
                value=pattern,
                next_step=f"Names look like {next(iter(dict(model.named_parameters())))!r}; * stands for any text.",
            )
        for parameter in hits:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OverspillError("OVS101", "No parameter is left to train.", field="model.freeze", next_step="Freeze less.")


def fill(model: Any, job: Job) -> list[str]:
    """Put weights into the parameters' places: from files, or random ones by the job's seed. Returns notes."""
    if job.model.init == "random":
        initialise_weights(model, seed=job.train.seed)
    else:
        report = load_weights(model, job.model.path)
        if report.unused:
            return [
                f"Not trained, since the model that config.json describes has no place for them: "
                f"{count(len(report.unused), 'tensor')} of the model's files, the first {report.unused[0]}."
            ]
    return []


def _identity(job: Job, model: Any) -> RunIdentity:
    digest = xxhash.xxh3_64()
    numel = 0
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        numel += parameter.numel()
    return RunIdentity.fresh(
        model=str(Path(job.model.path)) if Path(job.model.path).is_dir() else job.model.path,
        model_digest=digest.hexdigest(),
        numel=numel,
        torch=str(torch.__version__),
        simd=_native.simd_level(),
        threads=torch.get_num_threads(),
    )
