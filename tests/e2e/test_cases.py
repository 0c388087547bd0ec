"""Public bug reports on tiered training state that no other test covers; tests/CASES.md maps every row to its test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overspill import _native, attach
from overspill.errors import OverspillError
from overspill.plan import Durability, Placement, Plan
from overspill.train.governor import anonymous_nbytes
from overspill.units import MiB
from tests.e2e.session_cases import (
    VOCAB,
    make_model,
    make_plan,
    one_step,
    open_session,
    same_weights,
    train,
    undisturbed,
    weights_of,
)

PLACEMENTS = ("host", "disk", "mixed")


def test_a_model_with_far_more_parameters_than_buffers_finishes(tmp_path: Path) -> None:  # A8
    model = make_model(layers=30)
    plan = make_plan("disk", staging_nbytes=2 * 2048 * 10)
    with open_session(model, tmp_path / "state", plan) as session:
        assert len(list(model.parameters())) > 10 * len(session.staging) > 0
        assert train(session, model, 4) == undisturbed(4, layers=30)[0]


@pytest.mark.parametrize("placement", ["disk", "mixed"])
def test_a_parameter_larger_than_all_buffers_together_streams_in_pieces(tmp_path: Path, placement: str) -> None:  # A9
    model = make_model(width=400)
    plan = make_plan(placement, memory_nbytes=64 * MiB)
    with open_session(model, tmp_path / "state", plan) as session:
        room = sum(buffer.arrays["master"].numel() for buffer in session.staging)
        assert model.embed.weight.numel() > room
        losses = train(session, model, 4)
    wanted_losses, wanted_weights = undisturbed(4, width=400)
    assert losses == wanted_losses
    assert same_weights(weights_of(model), wanted_weights)


def test_clipping_disk_and_checkpoint_together_equal_the_run_in_memory(tmp_path: Path) -> None:  # A16
    losses, weights = undisturbed(8)
    model = make_model()
    with open_session(model, tmp_path / "state", make_plan("disk", max_grad_norm=1.0)) as session:
        ours = train(session, model, 4)
        assert session.step_facts()["clip_factor"] < 1, "the limit is not reached, so the test shows nothing"
        session.checkpoint("half")
    again = make_model()
    with open_session(again, tmp_path / "state", make_plan("mixed", max_grad_norm=1.0), resume="half") as session:
        ours += train(session, again, 8)
    assert ours == losses
    assert same_weights(weights_of(again), weights)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_small_model_learns_a_batch_by_heart(tmp_path: Path, placement: str) -> None:  # C3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCAB)).bfloat16()
    ids = torch.randperm(VOCAB)
    plan = make_plan(placement, durability=Durability())
    with attach(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan, directory=tmp_path) as one:
        for _ in range(120):
            one.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids[:-1]).float(), ids[1:])
            loss.backward()  # type: ignore[no-untyped-call]
            one.optimizer.step()
    assert loss.item() < 0.05


class Experts(nn.Module):
    """A routed layer: expert ``k`` sees the rows whose first number is in its part of the line."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(rows)
        chosen = (rows[:, 0] * 4).long().clamp(0, 3)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().squeeze(-1)
            if len(mine):
                out = out.index_add(0, mine, expert(rows[mine]))
        return self.head(out)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_expert_without_tokens_keeps_its_state_and_makes_no_nan(tmp_path: Path, placement: str) -> None:  # C7
    torch.manual_seed(0)
    ours, theirs = Experts(), Experts()
    theirs.load_state_dict(ours.state_dict())
    torch_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    plan = make_plan(placement, max_grad_norm=None, durability=Durability())
    with attach(ours, optimizer=optimizer, plan=plan, directory=tmp_path) as session:
        for step in range(8):
            rows = torch.rand(16, 8)
            if step in (0, 3, 4):
                rows[:, 0] /= 4  # only the first expert has tokens
            for model, stepped in ((ours, session.optimizer), (theirs, torch_optimizer)):
                stepped.zero_grad()
                model(rows).square().mean().backward()
                idle = [name for name, p in model.named_parameters() if p.grad is None]
                before = {name: dict(model.named_parameters())[name].detach().clone() for name in idle}
                stepped.step()
                session.flush()
                assert all(torch.equal(before[name], dict(model.named_parameters())[name]) for name in idle)
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.isfinite(mine).all()
            assert (mine - other).norm() <= 1e-5 * other.norm(), name
        steps = {live.place.name: live.steps for live in session.live_parameters}
    assert steps["experts.3.weight"] == 5 and steps["experts.0.weight"] == 8


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_three_groups_and_an_empty_one_keep_their_own_settings(tmp_path: Path, placement: str) -> None:  # D3, D4
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.parameters())
        return [
            {"params": named[0:2], "lr": 1e-2, "betas": (0.8, 0.9)},
            {"params": [], "lr": 7e-3},
            {"params": named[2:5], "lr": 1e-3, "weight_decay": 0.3},
            {"params": named[5:], "lr": 3e-3, "betas": (0.5, 0.99), "eps": 1e-6},
        ]

    torch.manual_seed(0)
    models = [Experts(), Experts()]
    models[1].load_state_dict(models[0].state_dict())
    theirs = torch.optim.AdamW(groups(models[1]))
    plan = make_plan(placement, max_grad_norm=None, durability=Durability())
    with attach(models[0], optimizer=torch.optim.AdamW(groups(models[0])), plan=plan, directory=tmp_path) as session:
        assert len(session.optimizer.param_groups) == 4
        for _ in range(6):
            rows = torch.rand(32, 8)
            for model, optimizer in zip(models, (session.optimizer, theirs), strict=True):
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                optimizer.step()
            for ours, other in zip(session.optimizer.param_groups, theirs.param_groups, strict=True):
                ours["lr"], other["lr"] = ours["lr"] * 0.9, other["lr"] * 0.9
        session.flush()
        for (name, mine), other_p in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert (mine - other_p).norm() <= 1e-5 * other_p.norm(), name


def test_host_memory_stays_flat_over_steps_of_any_length(tmp_path: Path) -> None:  # E7
    model = make_model()
    # torch keeps compiled kernels for each shape of bf16 product, whoever trains: few lengths, all of them seen early.
    lengths = torch.randint(1, 13, (400,), generator=torch.Generator().manual_seed(0)).mul(16).tolist()
    held = []
    with open_session(model, tmp_path / "state", make_plan("disk", durability=Durability())) as session:
        for index, length in enumerate(lengths):
            session.optimizer.zero_grad()
            model(torch.randint(0, VOCAB, (4, length))).float().logsumexp(-1).mean().backward()
            session.optimizer.step()
            session.step_boundary()
            if index in (150, 399):
                session.flush()
                _native.malloc_trim()
                held.append(anonymous_nbytes() or 0)
    assert held[0] > 0
    assert held[1] - held[0] < 4 * MiB


def _many(count: int, numel: int) -> nn.Module:
    model = nn.Module()
    model.many = nn.ParameterList([nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16)) for _ in range(count)])
    return model


def _zero_gradient_session(model: nn.Module, directory: Path) -> Any:
    plan = Plan(memory_nbytes=512 * MiB, optimizer_state=Placement(disk=1.0), keep_last=1)
    session = attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan, directory=directory)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return session


def test_ten_thousand_small_tensors_cost_the_operations_and_bytes_of_one_large(tmp_path: Path) -> None:  # F4
    counted = []
    for name, model in (("many", _many(10_000, 1024)), ("one", _many(1, 10_000 * 1024))):
        with _zero_gradient_session(model, tmp_path / name) as session:
            session.flush()
            session.step_facts()
            session.optimizer.step()
            session.flush()
            written = session.step_facts()["written_nbytes"]["disk"]
            counted.append((len(session.step_plan.chunks), len(session.blocks), written))
    assert counted[0] == counted[1]
    assert counted[0][0] == 10


def test_without_the_compiled_core_the_message_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:  # G1
    from overspill.cli.loading import import_training

    monkeypatch.setitem(sys.modules, "overspill._native", None)
    with pytest.raises(OverspillError, match=r"OVS104.*compiled core.*make setup"):
        import_training("train")


def test_state_on_disk_needs_no_library_for_asynchronous_io(tmp_path: Path) -> None:  # G2
    model = make_model()
    with open_session(model, tmp_path / "state", make_plan("disk")) as session:
        train(session, model, 2)
    maps = Path("/proc/self/maps").read_text()
    assert "libaio" not in maps
    assert "liburing" not in maps


def test_weights_edited_by_hand_are_in_the_commit_also_where_no_gradient_came(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Experts()
    plan = make_plan("mixed", durability=Durability(every_steps=1))
    rows = torch.rand(16, 8) * 0.2  # the last expert never has tokens
    with attach(model, optimizer=torch.optim.AdamW(model.parameters()), plan=plan, directory=tmp_path) as session:
        for step in range(3):
            if step == 1:
                with torch.no_grad():
                    model.experts[3].weight.fill_(7)
                    model.experts[3].bias.fill_(5)
            session.optimizer.zero_grad()
            model(rows).square().mean().backward()
            session.optimizer.step()
            session.step_boundary()
        session.flush()
        assert session.committed_step == 3
        wanted = weights_of(model)
    again = Experts()
    with attach(again, optimizer=torch.optim.AdamW(again.parameters()), plan=plan, directory=tmp_path, resume=True):
        assert same_weights(weights_of(again), wanted)


def test_the_model_that_is_trained_is_the_one_that_is_reported(tmp_path: Path) -> None:  # I3
    """Bytes that the plan asks to have on disk are there from the first step's report on."""
    model = make_model()
    with open_session(model, tmp_path / "state", make_plan("mixed", durability=Durability())) as session:
        one_step(session, model)
        session.flush()
        facts = session.step_facts()["held_nbytes"]
        numel = sum(block.layout.numel for block in session.blocks)
        in_memory = facts["host"]["moments"] + facts["host"]["master"]
        planned = session.plan.optimizer_state.host * numel * 10
        assert abs(in_memory - planned) <= 2048 * 10 + 3 * len(session.blocks) * 4096
        assert facts["disk"]["moments"] + facts["disk"]["master"] >= 10 * numel - planned
