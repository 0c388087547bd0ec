"""The training loop over a real session: what a step's loss is, what is drawn, saved, and repeated after a stop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from overspill.errors import OverspillError
from overspill.job import OptimizerConfig, ScheduleConfig
from overspill.plan import Durability, Overlap, Placement, Plan
from overspill.report import StepReport
from overspill.train import attach
from overspill.train.data.dataset import IGNORED
from overspill.train.executor import SubmittedStep
from overspill.train.loop import Batch, LoopSettings, StopFlag, TrainingLoop, seed_all
from overspill.train.lr import lr_scheduler
from overspill.train.session import Session

VOCABULARY, WIDTH, SEQ_LEN = 32, 16, 12


class Model(nn.Module):
    """Embedding, dropout, head; the loss as transformers computes it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | None = None
    ) -> SimpleNamespace:
        logits = self.head(self.dropout(self.embed(input_ids))).float()
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction=reduction
        )
        return SimpleNamespace(loss=loss if num_items_in_batch is None else loss / num_items_in_batch)


class Source:
    """Micro-batches that depend on nothing but their number."""

    def __init__(self, rows: int) -> None:
        self.rows, self.consumed = rows, 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            generator = torch.Generator().manual_seed(self.consumed)
            tokens = torch.randint(VOCABULARY, (self.rows, SEQ_LEN), generator=generator)
            labels = tokens.clone()
            labels[:, : int(torch.randint(SEQ_LEN - 2, (), generator=generator))] = IGNORED
            self.consumed += 1
            yield {"input_ids": tokens, "labels": labels}

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]


def _plan(disk: bool = False, durability: int = 0) -> Plan:
    return Plan(
        memory_nbytes=32 * 1024**2,
        optimizer_state=Placement(disk=1.0) if disk else Placement(host=1.0),
        overlap=Overlap.FORWARD,
        durability=Durability(every_steps=durability),
        max_grad_norm=1.0,
        chunk_numel=2048,
        staging_nbytes="1MiB",
    )


class Run:
    """A session with its loop, and the reports it gave."""

    def __init__(
        self,
        plan: Plan,
        directory: Path | None,
        settings: LoopSettings,
        *,
        dropout: float = 0.2,
        rows: int = 4,
        resume: bool = False,
        evaluate: bool = False,
    ) -> None:
        seed_all(7)
        model = Model(dropout)
        self.session: Session = attach(
            model, optimizer=OptimizerConfig(lr=1e-2), plan=plan, directory=directory, resume=resume
        )
        self.source = Source(rows)
        schedule = ScheduleConfig(warmup_steps=2)
        scheduler = lr_scheduler(self.session.optimizer, schedule, total_steps=settings.total_steps)
        self.session.track(scheduler=scheduler, data=self.source)
        self.reports: list[StepReport] = []
        self.loss_before: list[float] = []
        self.synced: list[tuple[int, int | None]] = []
        self.stop = StopFlag()
        self.stop_after: int | None = None
        held_out = [next(iter(Source(3))) for _ in range(2)]
        self.loop = TrainingLoop(
            self.session,
            model,
            self.source,
            settings=settings,
            scheduler=scheduler,
            eval_batches=(lambda: held_out) if evaluate else None,
            on_step=self._on_step,
            on_first_eval=self.loss_before.append,
            before_commit=lambda: self.synced.append((self.session.step, self.session.committed_step)),
            stop=self.stop,
        )

    def _on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        if report.step == self.stop_after:
            self.stop.request()

    @property
    def losses(self) -> list[float | None]:
        return [report.loss for report in self.reports]


def test_accumulated_micro_batches_equal_one_large_batch_however_labels_are_spread() -> None:
    def losses(rows: int, accumulation: int) -> list[float | None]:
        run = Run(_plan(), None, LoopSettings(3, accumulation), dropout=0.0, rows=rows)
        if accumulation == 1:
            small = Source(2)

            def joined() -> Iterator[Batch]:
                stream = iter(small)
                while True:
                    parts = [next(stream) for _ in range(4)]
                    yield {name: torch.cat([p[name] for p in parts]) for name in ("input_ids", "labels")}

            run.loop._batches = joined()
        _without_checkpoint(run)
        return run.losses

    apart, together = losses(2, 4), losses(8, 1)
    assert apart == pytest.approx(together, rel=1e-6)
    assert len(set(apart)) == 3


def _without_checkpoint(run: Run) -> None:
    """Sessions without a directory cannot save; the loop's last act is then refused, after the last step."""
    with pytest.raises(OverspillError, match="OVS504"):
        run.loop.run()
    run.session.close()


def test_the_loop_says_how_it_ended_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    run = Run(_plan(disk=True), tmp_path, LoopSettings(5, 2, eval_every=2, save_every=3), evaluate=True)
    result = run.loop.run()
    run.session.close()
    assert (result.step, result.finished, result.checkpoint) == (5, True, "step-000005")
    assert result.loss == run.losses[-1]
    assert result.tokens == 5 * 2 * 4 * SEQ_LEN == sum(report.tokens for report in run.reports)
    assert [report.step for report in run.reports if report.eval_loss is not None] == [2, 4, 5]
    assert result.eval_loss == run.reports[-1].eval_loss
    assert sum(report.seconds for report in run.reports) <= result.seconds
    assert [report.lr for report in run.reports][:2] == [0.005, 0.01]


def test_what_the_model_could_before_the_first_step_is_measured_once(tmp_path: Path) -> None:
    settings = LoopSettings(6, eval_every=3)
    first = Run(_plan(disk=True), tmp_path, settings, evaluate=True)
    first.stop_after = 3
    before = first.loop.run().eval_loss_before
    first.session.close()
    assert before is not None and first.loss_before == [before]
    assert before > first.reports[2].eval_loss  # type: ignore[operator]
    second = Run(_plan(disk=True), tmp_path, settings, evaluate=True, resume=True)
    assert second.loop.run().eval_loss_before is None and second.loss_before == []
    second.session.close()
    without = Run(_plan(), None, settings)
    _without_checkpoint(without)
    assert without.loss_before == []


def test_before_each_step_that_is_committed_its_row_can_be_made_durable(tmp_path: Path) -> None:
    run = Run(_plan(disk=True, durability=2), tmp_path, LoopSettings(7, save_every=3))
    run.stop_after = 5
    run.loop.run()
    run.session.close()
    first = dict(reversed(run.synced))  # the earliest call of each step
    assert sorted(first) == [2, 3, 4, 5]
    assert all(committed is None or committed < step for step, committed in first.items())


def test_a_stop_between_steps_saves_and_a_resume_repeats_the_undisturbed_run(tmp_path: Path) -> None:
    settings = LoopSettings(8, 2, eval_every=3)
    whole = Run(_plan(disk=True), tmp_path / "whole", settings, evaluate=True)
    whole.loop.run()
    whole.session.close()

    first = Run(_plan(disk=True), tmp_path / "cut", settings, evaluate=True)
    first.stop_after = 3
    result = first.loop.run()
    first.session.close()
    assert (result.step, result.finished, result.checkpoint) == (3, False, "step-000003")

    second = Run(_plan(disk=True), tmp_path / "cut", settings, evaluate=True, resume=True)
    assert second.session.restored is not None and second.session.restored.step == 3
    second.loop.run()
    second.session.close()
    assert first.losses + second.losses == whole.losses
    assert [r.eval_loss for r in first.reports + second.reports] == [r.eval_loss for r in whole.reports]
    assert [r.lr for r in first.reports + second.reports] == [r.lr for r in whole.reports]


def test_a_finished_run_does_no_further_step(tmp_path: Path) -> None:
    run = Run(_plan(disk=True), tmp_path, LoopSettings(2))
    run.loop.run()
    run.session.close()
    again = Run(_plan(disk=True), tmp_path, LoopSettings(2), resume=True)
    assert again.loop.run().step == 2
    assert again.reports == []
    again.session.close()


def test_no_committed_step_lacks_its_row(tmp_path: Path) -> None:
    run = Run(_plan(disk=True, durability=1), tmp_path, LoopSettings(6))
    committed_when_reported: list[tuple[int, int | None]] = []
    inner = run._on_step

    def on_step(report: StepReport) -> None:
        committed_when_reported.append((report.step, run.session.committed_step))
        inner(report)

    run.loop._on_step = on_step
    run.loop.run()
    run.session.close()
    assert len(committed_when_reported) == 6
    assert all(committed is None or committed < step for step, committed in committed_when_reported)


def test_a_step_without_a_single_target_trains_nothing_and_has_no_loss(tmp_path: Path) -> None:
    run = Run(_plan(disk=True), tmp_path, LoopSettings(1), dropout=0.0)
    tokens = torch.randint(VOCABULARY, (2, SEQ_LEN))
    run.loop._batches = [{"input_ids": tokens, "labels": torch.full_like(tokens, IGNORED)}]
    run.loop.run()
    run.session.close()
    assert run.losses == [None]
    assert run.reports[0].grad_norm == 0.0


def test_a_model_attached_on_meta_trains_to_the_same_bits_as_one_attached_with_its_weights() -> None:
    def train(on_meta: bool) -> tuple[list[float], list[torch.Tensor]]:
        seed_all(3)
        real = Model(0.0).to(torch.bfloat16)
        values = {name: parameter.detach().clone() for name, parameter in real.named_parameters()}
        model = Model(0.0).to(torch.bfloat16).to_empty(device="meta") if on_meta else real
        plan = _plan()
        # Steps so small that nearly all of each lands in the 16 bits that complete a bf16 weight.
        session = attach(model, optimizer=OptimizerConfig(lr=1e-5), plan=plan)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
        batches, losses = iter(Source(4)), []
        for _ in range(30):
            batch = next(batches)
            loss = model(**batch, num_items_in_batch=10).loss
            loss.backward()
            session.optimizer.step()
            losses.append(loss.item())
        session.flush()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        session.close()
        return losses, weights

    losses, weights = train(on_meta=False)
    meta_losses, meta_weights = train(on_meta=True)
    assert losses == meta_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, meta_weights, strict=True))


def test_an_edit_of_one_parameter_is_no_edit_of_its_neighbours() -> None:
    model = Model(0.0).to_empty(device="meta")
    session = attach(model, optimizer=OptimizerConfig(), plan=_plan())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    before = [parameter._version for parameter in model.parameters()]
    with torch.no_grad():
        model.embed.weight.add_(1)
    after = [parameter._version for parameter in model.parameters()]
    session.close()
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 0]


def test_steps_that_are_over_leave_nothing_behind(tmp_path: Path) -> None:
    run = Run(_plan(disk=True), tmp_path, LoopSettings(25))
    alive: list[int] = []

    def on_step(report: StepReport) -> None:
        gc.collect()
        alive.append(sum(type(item) is SubmittedStep for item in gc.get_objects()))

    run.loop._on_step = on_step
    run.loop.run()
    run.session.close()
    assert max(alive[5:]) <= 4  # the one under way, the one before it, the one handed over ahead
