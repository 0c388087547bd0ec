"""--set and the paths of a job file."""

from __future__ import annotations

from pathlib import Path

import pytest

from overspill.checkpoint import number_settings, refuse_fixed_settings
from overspill.cli.jobs import load_job
from overspill.errors import OverspillError

TEXT = """
[model]
path = "{model}"
[data]
path = "text.txt"
[train]
steps = 3
[optimizer]
max_grad_norm = 0
"""


def _file(folder: Path, model: str = "m") -> Path:
    file = folder / "job.toml"
    file.write_text(TEXT.format(model=model))
    return file


def test_paths_are_relative_to_the_file_not_to_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "m").mkdir(parents=True)
    file = _file(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    job = load_job(Path("here/job.toml"))
    assert job == load_job(file)
    assert job.model.path == str(tmp_path / "here" / "m")
    assert job.data.path == (str(tmp_path / "here" / "text.txt"),)


def test_a_hub_id_stays_one_and_a_missing_directory_is_named_in_full(tmp_path: Path) -> None:
    assert load_job(_file(tmp_path, "org/name")).model.path == "org/name"
    assert load_job(_file(tmp_path, "./gone")).model.path == str(tmp_path / "gone")


def test_a_setting_replaces_a_value_and_keeps_the_others(tmp_path: Path) -> None:
    job = load_job(_file(tmp_path), ["plan.memory=2GiB", "optimizer.lr=3e-4", "model.freeze=['a', 'b']"])
    assert job.plan.memory == 2 * 1024**3
    assert job.optimizer.lr == 3e-4
    assert job.model.freeze == ("a", "b")
    assert job.optimizer.max_grad_norm is None
    assert job.train.steps == 3


def test_epochs_replace_steps(tmp_path: Path) -> None:
    train = load_job(_file(tmp_path), ["train.epochs=2"]).train
    assert (train.steps, train.epochs) == (None, 2.0)


@pytest.mark.parametrize(
    ("setting", "code", "hint"),
    [
        ("steps=3", "OVS101", "table.key=value"),
        ("train.steps", "OVS101", "table.key=value"),
        ("trian.steps=3", "OVS101", "Did you mean train"),
        ("train.stesp=3", "OVS101", "Did you mean steps"),
        ("plan.memory=2GiBs", "OVS102", "Known units"),
        ("plan.memory=2 gib", "OVS102", "Did you mean GiB"),
        ("train.steps=many", "OVS101", "train.steps"),
    ],
)
def test_a_wrong_setting_says_what_was_meant(tmp_path: Path, setting: str, code: str, hint: str) -> None:
    with pytest.raises(OverspillError) as caught:
        load_job(_file(tmp_path), [setting])
    assert caught.value.code == code
    assert hint in str(caught.value)


NOT_FINITE = [
    (key, value) for key in ("lr", "eps", "weight_decay", "momentum", "dampening") for value in ("inf", "nan", "1e39")
]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["plan.durability=-5"], "plan.durability"),
        (["plan.durability=0"], "plan.durability"),
        (["plan.durability=2.5"], "plan.durability"),
        (["plan.durability=sometimes"], "plan.durability"),
        (["optimizer.betas=[1, 2]"], "optimizer.betas"),
        (["optimizer.betas=[0.9, -0.1]"], "optimizer.betas"),
        (["optimizer.name=sgd", "optimizer.nesterov=true"], "optimizer.nesterov"),
        (
            ["optimizer.name=sgd", "optimizer.nesterov=true", "optimizer.momentum=0.9", "optimizer.dampening=0.1"],
            "nest",
        ),
        (["plan.disk_fraction=0.5"], "plan.disk_fraction"),
        (["plan.disk_fraction=0.5", "plan.optimizer_state=disk"], "plan.disk_fraction"),
        (["optimizer.momentum=0.9"], "optimizer.momentum"),
        (["optimizer.dampening=0.1"], "optimizer.dampening"),
        (["optimizer.nesterov=true"], "optimizer.nesterov"),
        (["optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]"], "optimizer.betas"),
        (["optimizer.name=lion", "optimizer.eps=1e-6"], "optimizer.eps"),
        *[([f"optimizer.{key}={value}"], f"optimizer.{key}") for key, value in NOT_FINITE],
        (["schedule.min_lr_ratio=nan"], "schedule.min_lr_ratio"),
        (["optimizer.max_grad_norm=inf"], "optimizer.max_grad_norm"),
    ],
)
def test_a_value_that_torch_or_the_plan_would_not_take_is_named_at_once(
    tmp_path: Path, settings: list[str], field: str
) -> None:
    with pytest.raises(OverspillError, match=rf"OVS101.*{field}") as raised:
        load_job(_file(tmp_path), settings)
    assert "Value error" not in str(raised.value)


def test_the_neighbours_of_refused_values_are_taken(tmp_path: Path) -> None:
    assert load_job(_file(tmp_path), ["optimizer.betas=[0, 0.999]"]).optimizer.betas == (0.0, 0.999)
    settings = ["plan.durability=1", "plan.optimizer_state=mixed", "plan.disk_fraction=0"]
    settings += ["optimizer.name=sgd", "optimizer.nesterov=true", "optimizer.momentum=0.9"]
    job = load_job(_file(tmp_path), settings)
    assert (job.plan.durability, job.plan.disk_fraction, job.optimizer.nesterov) == (1, 0, True)


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps=true",
        "train.steps='2'",
        "train.steps=2.0",
        "train.micro_batch=true",
        "train.epochs=true",
        "train.epochs='1'",
        "data.seq_len='64'",
        "data.packing=1",
        "data.shuffle='yes'",
        "data.eval_fraction=false",
        "model.gradient_checkpointing=1",
        "optimizer.lr='3e-3'",
        "optimizer.lr=true",
        "optimizer.max_grad_norm=false",
        "optimizer.betas=[0.9, true]",
        "schedule.warmup_steps=1.0",
        "plan.keep_last=true",
        "plan.keep_last='2'",
        "plan.verify_reads=1",
    ],
)
def test_a_value_of_another_type_is_refused_and_not_converted(tmp_path: Path, setting: str) -> None:
    field = setting.partition("=")[0]
    with pytest.raises(OverspillError, match=rf"OVS101.*valid.*{field}"):
        load_job(_file(tmp_path), [setting])


def test_a_duration_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OverspillError, match=r"OVS102.*plan.at_risk"):
        load_job(_file(tmp_path), ["plan.at_risk=1e400s"])


def test_every_option_at_its_default_is_taken_beside_every_optimizer(tmp_path: Path) -> None:
    for name in ("adamw", "adam", "sgd", "lion"):
        settings = [f"optimizer.name={name}", "optimizer.betas=[0.9, 0.999]", "optimizer.eps=1e-8"]
        settings += ["optimizer.momentum=0", "optimizer.dampening=0.0", "optimizer.nesterov=false", "optimizer.lr=1"]
        assert load_job(_file(tmp_path), settings).optimizer.lr == 1.0


def test_an_option_that_the_optimizer_never_read_may_leave_an_old_runs_job_file(tmp_path: Path) -> None:
    now = number_settings(load_job(_file(tmp_path)))
    refuse_fixed_settings(now | {"optimizer.momentum": 0.9}, now, job_file="job.toml")
    with pytest.raises(OverspillError, match=r"OVS602.*optimizer.eps"):
        refuse_fixed_settings(now | {"optimizer.eps": 1e-6}, now, job_file="job.toml")
