"""An unmodified transformers.Trainer over tiered state: the same numbers, its own saving, going on and options."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from trainer_cases import (
    VOCAB,
    Sentences,
    assert_same_weights,
    logged,
    make_model,
    make_optimizer,
    make_plan,
    make_trainer,
    tiered,
    weights_of,
)
from transformers import Trainer

from overspill import Session
from overspill.errors import OverspillError
from overspill.interop.trainer import TieredCallback
from overspill.plan import Overlap, StateFormat

PLACES = [(place, overlap) for place in ("host", "disk") for overlap in Overlap]
FORMS = [(torch.float32, "split"), (torch.bfloat16, "split"), (torch.bfloat16, "fp32")]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No progress bars of saving, and no log rows on stdout."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    yield


def run(
    directory: Path,
    place: str,
    overlap: Overlap,
    *,
    dtype: torch.dtype = torch.float32,
    master: str = "split",
    resume: str | None = None,
    **arguments: Any,
) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Train with tiered state; ``directory / "trainer"`` is the Trainer's, a fresh store beside it."""
    model = make_model(dtype)
    if resume:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)  # nothing of the resumed run may come from here
    store = directory / ("again" if resume else "state")
    plan = make_plan(place, overlap, state_format=StateFormat(master=master))
    with tiered(model, plan, store) as session:
        trainer = make_trainer(model, session.optimizer, directory / "trainer", **arguments)
        trainer.train(resume_from_checkpoint=str(directory / "trainer" / resume) if resume else None)
        session.flush()
        return trainer, weights_of(model)


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    model = make_model()
    trainer = make_trainer(model, make_optimizer(model), tmp_path_factory.mktemp("torch"), dataloader_num_workers=2)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("place", "overlap"), PLACES)
def test_the_trainer_logs_what_it_logs_with_torch_adamw(
    tmp_path: Path, with_torch: Trainer, place: str, overlap: Overlap
) -> None:
    trainer, _ = run(tmp_path, place, overlap, dataloader_num_workers=2)
    losses, norms = logged(with_torch, "loss"), logged(with_torch, "grad_norm")
    assert len(losses) == 8
    assert max(norms) > 1, "the clipping of the Trainer had nothing to do"
    assert logged(trainer, "loss") == pytest.approx(losses, abs=1e-6)
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=1e-5)
    assert logged(trainer, "learning_rate") == logged(with_torch, "learning_rate")


def test_a_bf16_model_logs_the_same_bits_for_every_placement_and_evaluates_the_same(tmp_path: Path) -> None:
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    runs = [
        run(tmp_path / f"{place}{overlap}", place, overlap, dtype=torch.bfloat16, **evaluating)
        for place, overlap in [*PLACES, ("mixed", Overlap.FORWARD)]
    ]
    first, weights = runs[0]
    assert len(logged(first, "eval_loss")) == 4
    for trainer, theirs in runs[1:]:
        for key in ("loss", "grad_norm", "eval_loss"):
            assert logged(trainer, key) == logged(first, key)
        assert_same_weights(theirs, weights)


@pytest.mark.parametrize(("dtype", "master"), FORMS)
@pytest.mark.parametrize(("place", "overlap"), [("host", Overlap.STEP), ("disk", Overlap.FORWARD)])
def test_the_trainer_goes_on_from_its_own_checkpoint_as_if_nothing_had_happened(
    tmp_path: Path, dtype: torch.dtype, master: str, place: str, overlap: Overlap
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "dtype": dtype, "master": master}
    whole, weights = run(tmp_path, place, overlap, **saving)
    resumed, theirs = run(tmp_path, place, overlap, resume="checkpoint-3", **saving)
    assert resumed.state.global_step == 8
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert logged(resumed, "grad_norm") == logged(whole, "grad_norm")
    assert_same_weights(theirs, weights)


def test_a_checkpoint_saved_while_updates_are_pending_holds_the_finished_weights(tmp_path: Path) -> None:
    for overlap in Overlap:
        run(tmp_path / str(overlap), "disk", overlap, save_strategy="steps", save_steps=1)
    for step in range(1, 9):
        ours, theirs = (
            safetensors.torch.load_file(tmp_path / str(overlap) / f"trainer/checkpoint-{step}/model.safetensors")
            for overlap in Overlap
        )
        assert_same_weights(ours, theirs)


def step_once(model: nn.Module, session: Session, seed: int = 0) -> None:
    row = Sentences(4, seed=seed)[0]
    model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
    session.optimizer.step()


def test_weights_loaded_while_updates_are_pending_stay_as_loaded(tmp_path: Path) -> None:
    model = make_model(dropout=0.0)
    with tiered(model, make_plan("disk", Overlap.FORWARD), tmp_path / "state") as session:
        for seed in range(6):
            step_once(model, session, seed)
            wanted = {name: torch.full_like(value, 0.01 * seed) for name, value in model.state_dict().items()}
            step_once(model, session, seed)
            model.load_state_dict(wanted)
            session.flush()
            assert_same_weights(weights_of(model), {name: wanted[name] for name in weights_of(model)})


def test_a_master_of_weights_that_were_edited_since_is_not_saved(tmp_path: Path) -> None:
    model = make_model(torch.bfloat16)
    with tiered(model, make_plan("disk"), tmp_path / "state") as session:
        step_once(model, session)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2)
        order = [p for group in session.optimizer.param_groups for p in group["params"]]
        state = session.optimizer.state_dict()["state"]
        without = [order[i] for i, entry in state.items() if "master" not in entry]
        assert len(state) == len(order)
        assert [id(p) for p in without] == [id(model.model.layers[0].mlp.up_proj.weight)]


class Branching(nn.Module):
    """Has parameters that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.branches = nn.ModuleList(nn.Linear(16, VOCAB) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.branches[int(input_ids[0, 0]) % 3](self.embed(input_ids[:, :-1]))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


@pytest.mark.parametrize("overlap", Overlap)
def test_parameters_without_a_gradient_in_some_steps_are_skipped_as_torch_does(
    tmp_path: Path, overlap: Overlap
) -> None:
    ours, theirs = Branching(), Branching()
    few = {"gradient_accumulation_steps": 1, "max_steps": 12, "remove_unused_columns": False}
    reference = make_optimizer(theirs)
    plain = make_trainer(theirs, reference, tmp_path / "torch", **few)
    plain.train()
    with tiered(ours, make_plan("disk", overlap), tmp_path / "state") as session:
        trainer = make_trainer(ours, session.optimizer, tmp_path / "trainer", **few)
        trainer.train()
        steps = [float(entry["step"]) for entry in session.optimizer.state_dict()["state"].values()]
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-6)
    assert logged(trainer, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    assert sorted(steps) == sorted(float(entry["step"]) for entry in reference.state_dict()["state"].values())
    assert min(steps) < 12, "every batch used every branch"


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_bit(tmp_path: Path, reentrant: bool) -> None:
    checkpointing = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain, weights = run(tmp_path / "plain", "host", Overlap.STEP, dtype=torch.bfloat16)
    for place, overlap in PLACES:
        trainer, theirs = run(tmp_path / f"{place}{overlap}", place, overlap, dtype=torch.bfloat16, **checkpointing)
        assert logged(trainer, "loss") == logged(plain, "loss")
        assert_same_weights(theirs, weights)


@pytest.mark.slow
def test_a_compiled_model_trains_with_the_same_numbers(tmp_path: Path) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3}
    model = make_model(dropout=0.0)
    plain = make_trainer(model, make_optimizer(model), tmp_path / "torch", **compiled)
    plain.train()
    for place, overlap in [("host", Overlap.STEP), ("disk", Overlap.FORWARD)]:
        torch._dynamo.reset()
        model = make_model(dropout=0.0)
        with tiered(model, make_plan(place, overlap), tmp_path / f"{place}") as session:
            trainer = make_trainer(model, session.optimizer, tmp_path / "trainer", **compiled)
            trainer.train()
        assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-6)


def test_the_optimizer_cannot_be_pickled_or_copied_and_says_what_to_do(tmp_path: Path) -> None:
    model = make_model()
    with tiered(model, make_plan("disk"), tmp_path / "state") as session:
        for attempt in (pickle.dumps, copy.deepcopy, copy.copy):
            with pytest.raises(OverspillError, match=r"OVS504.*state_dict\(\)"):
                attempt(session.optimizer)
        with pytest.raises(OverspillError, match="OVS504"):
            torch.save(session.optimizer, tmp_path / "optimizer.pt")


# -- the callback -------------------------------------------------------------------------------------------------

RHYTHMS: dict[str, dict[str, Any]] = {
    "in the middle of an epoch": {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2},
    "at the end of an epoch": {
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "max_steps": -1,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 8,
    },
}


@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_a_pin_beside_the_trainers_checkpoint_is_all_that_going_on_needs(tmp_path: Path, rhythm: str) -> None:
    """The Trainer writes weights only; state, schedule and generators come from the session."""
    arguments = RHYTHMS[rhythm] | {"save_only_model": True}
    runs = []
    for resume in (None, "checkpoint-4"):
        model = make_model(torch.bfloat16)
        plan = make_plan("disk", Overlap.FORWARD, keep_last=3)
        with tiered(model, plan, tmp_path / "state", resume=resume or False) as session:
            trainer = make_trainer(
                model,
                session.optimizer,
                tmp_path / "trainer",
                callbacks=[TieredCallback(session)],
                **arguments,
            )
            trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / resume) if resume else None)
            assert session.committed_step == session.step == 8
            runs.append((trainer, weights_of(model)))
    (whole, weights), (resumed, theirs) = runs
    names = {path.name for path in (tmp_path / "trainer").iterdir()}
    assert names == {path.name for path in (tmp_path / "state" / "checkpoints").iterdir()}
    assert "checkpoint-4" in names
    assert not list((tmp_path / "trainer").rglob("optimizer.pt"))
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert logged(resumed, key) == logged(whole, key)
    assert_same_weights(theirs, weights)


def test_every_commit_under_the_callback_is_complete(tmp_path: Path) -> None:
    from overspill.plan import Durability

    model = make_model()
    plan = make_plan("disk", Overlap.FORWARD, durability=Durability(every_steps=1))
    with tiered(model, plan, tmp_path / "state") as session:
        evaluating = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
        make_trainer(
            model, session.optimizer, tmp_path / "trainer", callbacks=[TieredCallback(session)], **evaluating
        ).train()
    with tiered(make_model(), plan, tmp_path / "state", resume=True) as session:
        assert session.restored is not None
        assert session.restored.step == 4
        assert session.restored.complete
        assert session.restored.extra == {"trainer_step": 4}


def test_a_trainer_that_goes_on_from_another_step_than_its_session_is_refused(tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "save_only_model": True}

    def train(resume: str | bool, checkpoint: str | None) -> None:
        model = make_model()
        directory = tmp_path / ("state" if resume or checkpoint is None else "empty")
        with tiered(model, make_plan("disk", keep_last=3), directory, resume=resume) as session:
            trainer = make_trainer(
                model, session.optimizer, tmp_path / "trainer", callbacks=[TieredCallback(session)], **arguments
            )
            trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / "trainer" / checkpoint))

    train(False, None)
    with pytest.raises(OverspillError, match=r'OVS602.*step 2.*step 4.*resume="checkpoint-2"'):
        train("checkpoint-4", "checkpoint-2")
    with pytest.raises(OverspillError, match=r'OVS602.*without optimizer state.*resume="checkpoint-2"'):
        train(False, "checkpoint-2")


def test_a_gradient_that_two_would_clip_is_refused(tmp_path: Path) -> None:
    model = make_model()
    with tiered(model, make_plan("host", max_grad_norm=0.5), tmp_path / "state") as session:
        trainer = make_trainer(model, session.optimizer, tmp_path / "trainer", callbacks=[TieredCallback(session)])
        with pytest.raises(OverspillError, match=r"OVS504.*1\.0 in the Trainer, 0\.5 in the plan"):
            trainer.train()
