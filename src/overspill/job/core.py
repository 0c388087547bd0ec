"""Job: what is to be trained, on what, and how. One TOML (or JSON) file drives every command.

A job says what the user wants; a Plan (plan.py) says how this machine does it. ``plan.*`` here are wishes
(``optimizer_state = "auto"``), resolved by `planner`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from overspill.errors import OverspillError
from overspill.files import parse_json, refuse_odd_texts
from overspill.job.layout import (
    DeviceConfig,
    EvaluationConfig,
    FrameworkConfig,
    KernelConfig,
    MethodConfig,
    OffloadConfig,
    ParallelConfig,
    TaskConfig,
)
from overspill.schema import Frozen, Nbytes, Seconds

__all__ = [
    "DataConfig",
    "Job",
    "ModelConfig",
    "OptimizerConfig",
    "PlanConfig",
    "ScheduleConfig",
    "TrainConfig",
    "read_job",
    "unread_options",
]

#: Options of the optimizer table that not every optimizer reads, with those that do.
_READ_BY: Final[dict[str, tuple[str, ...]]] = {
    "betas": ("adamw", "adam", "lion"),
    "eps": ("adamw", "adam"),
    "momentum": ("sgd",),
    "dampening": ("sgd",),
    "nesterov": ("sgd",),
}
_RUNNING: Final = ("adamw", "adam", "sgd", "lion")
_LARGEST: Final = 3.4e38  # what fp32 holds, in which the kernels compute


def unread_options(optimizer: str) -> tuple[str, ...]:
    """The options that this optimizer does not read; another value than the default is refused beside it."""
    return tuple(option for option, readers in _READ_BY.items() if optimizer not in readers)


class JobTable(Frozen):
    """A table of the job file: what is written is what is meant. No text, 2.0 or true where a whole number is asked
    for, and no number that is not finite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


class ModelConfig(JobTable):
    """The model: a directory in Hugging Face form, or a hub id."""

    path: str = Field(description="Directory with config.json, tokenizer and *.safetensors; or a hub id.")
    tokenizer: str | None = Field(default=None, description="Directory of the tokenizer, when not model.path.")
    dtype: Literal["bf16", "fp32", "fp16"] = Field(default="bf16", description="dtype of weights and computation.")
    autocast: Literal["bf16", "fp16", "fp8"] | None = Field(
        default=None, description="Computation under autocast (mixed precision), in a dtype other than the weights'."
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained", description="Load weights, or start from random ones."
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in backward.")
    freeze: tuple[str, ...] = Field(default=(), description="Glob patterns of parameter names that are not trained.")


class DataConfig(JobTable):
    """The text: a .txt file, or .jsonl with text, prompt/completion or chat messages."""

    path: tuple[str, ...] | str = Field(default=(), description="File or files; .txt or .jsonl.")
    format: Literal["auto", "text", "completion", "chat"] = Field(
        default="auto", description="What a row of .jsonl holds."
    )
    seq_len: int = Field(default=512, ge=2, description="Tokens per sequence.")
    packing: bool = Field(default=True, description="Fill sequences with several documents.")
    lengths: tuple[int, ...] = Field(
        default=(), description="Lengths of the sequences, where they are padded and not packed; for a forecast."
    )
    train_on_prompt: bool = Field(default=False, description="Count the loss on prompts too, not only on answers.")
    eval_fraction: float = Field(default=0.0, ge=0, lt=1, description="Share of the sequences held out for evaluation.")
    shuffle: bool = Field(default=True, description="Shuffle the sequences, anew each epoch, by train.seed.")
    num_workers: int = Field(default=0, ge=0, description="DataLoader worker processes.")


OptimizerName = Literal[
    "adamw", "adam", "sgd", "lion", "adamw_8bit", "adamw_4bit", "adamw_fp8", "lion_8bit", "sgd_8bit", "adafactor",
    "adagrad", "rmsprop", "muon", "galore", "apollo", "lomo", "adalomo", "badam", "sophia", "schedule_free",
]  # fmt: skip


class OptimizerConfig(JobTable):
    """The optimizer, in torch.optim's words where torch has it."""

    name: OptimizerName = Field(
        default="adamw", description="adamw, adam, sgd or lion run; the others are for a forecast."
    )
    implementation: Literal["auto", "foreach", "fused", "for_loop"] = Field(
        default="auto", description="Of torch.optim's step; for a forecast, Overspill has its own kernel."
    )
    paged: bool = Field(default=False, description="State in unified memory that may leave the GPU (bitsandbytes).")
    in_backward: bool = Field(default=False, description="Each parameter is updated in backward; gradients go at once.")
    state_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="dtype of moments where the optimizer leaves a choice; for a forecast."
    )
    master_dtype: Literal["auto", "fp32", "none"] = Field(
        default="auto", description="A separate copy of the weights in the optimizer; for a forecast."
    )
    rank: int = Field(default=128, ge=1, description="galore, apollo: rank of the projected state.")
    ema: bool = Field(default=False, description="An exponential average of the weights is kept beside them.")
    lr: float = Field(default=1e-4, ge=0, le=_LARGEST, description="Learning rate at the top of the schedule.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="Decay of the two moments; not for sgd.")
    eps: float = Field(default=1e-8, ge=0, le=_LARGEST, description="Added to the root of exp_avg_sq; adam and adamw.")
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        le=_LARGEST,
        description="Decoupled in adamw and lion, added to the gradient in adam and sgd.",
    )
    momentum: float = Field(default=0.0, ge=0, le=_LARGEST, description="sgd only.")
    dampening: float = Field(default=0.0, ge=-_LARGEST, le=_LARGEST, description="sgd only.")
    nesterov: bool = Field(default=False, description="sgd only.")
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="Clip the gradient's global norm to this; 0 = off."
    )
    no_decay: tuple[str, ...] = Field(
        default=("*bias", "*norm*"), description="Glob patterns of names without weight decay."
    )

    @model_validator(mode="before")
    @classmethod
    def _zero_turns_clipping_off(cls, data: Any) -> Any:
        norm = data.get("max_grad_norm") if isinstance(data, dict) else None
        if isinstance(norm, int | float) and not isinstance(norm, bool) and norm == 0:
            return {**data, "max_grad_norm": None}
        return data

    @field_validator("betas")
    @classmethod
    def _betas_decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("Each of the two must be at least 0 and below 1")
        return betas

    @field_validator("nesterov")
    @classmethod
    def _nesterov_as_in_torch(cls, nesterov: bool, others: ValidationInfo) -> bool:
        if nesterov and (not others.data.get("momentum") or others.data.get("dampening")):
            raise ValueError("It needs a momentum above 0 and no dampening")
        return nesterov

    @field_validator(*_READ_BY)
    @classmethod
    def _read_by_this_optimizer(cls, value: Any, others: ValidationInfo) -> Any:
        name, option = others.data.get("name"), others.field_name
        assert option is not None
        if name in _RUNNING and name not in _READ_BY[option] and value != cls.model_fields[option].default:
            readers = ", ".join(_READ_BY[option])
            raise ValueError(f'It is for {readers}, and optimizer.name = "{name}" does not read it; leave it out')
        return value


class ScheduleConfig(JobTable):
    """The learning rate over the steps: linear warm-up, then the named decay."""

    kind: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="Decay after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps over which lr rises from 1/n to 1.")
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Learning rate at the last step, as a share of lr."
    )


class TrainConfig(JobTable):
    """How long, in what portions, and what is written down."""

    steps: int | None = Field(default=None, ge=1, description="Optimizer steps; or give epochs.")
    epochs: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Passes over the training sequences; or give steps."
    )
    micro_batch: int = Field(default=1, ge=1, description="Sequences per forward.")
    accumulation: int = Field(default=1, ge=1, description="Micro-batches per optimizer step.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of dropout, shuffling and random weights.")
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Compute threads, of torch and of the updates; part of what makes bits repeat.",
    )
    eval_every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only at the end.")
    save_every: int = Field(default=0, ge=0, description="Steps between checkpoints; 0: only at the end.")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either train.steps or train.epochs")
        return self


class PlanConfig(JobTable):
    """Wishes for the plan; what is left out is chosen for the machine."""

    memory: Nbytes | None = Field(
        default=None,
        description="Host memory for training, above interpreter and libraries; default: 90 % of what is free.",
    )
    optimizer_state: Literal["auto", "host", "disk", "mixed"] = Field(
        default="auto", description="Where optimizer state lives."
    )
    disk_fraction: float | None = Field(
        default=None, ge=0, le=1, description='Share on disk, with optimizer_state = "mixed".'
    )
    master: Literal["split", "fp32"] = Field(
        default="split", description="split: 16 bits beside each bf16 weight, lossless; fp32: a separate copy."
    )
    moments: Literal["fp32", "bf16"] = Field(default="fp32", description="bf16 halves the bytes and is not exact.")
    overlap: Literal["step", "forward"] = Field(
        default="forward", description="When updates run: inside the step, or before each block's next use."
    )
    durability: int | Literal["step", "checkpoint", "auto"] = Field(
        default="auto",
        description='"step", a number of steps, "checkpoint", or "auto": at most at_risk of work is lost.',
    )
    at_risk: Seconds = Field(default=600.0, description='With durability = "auto": work that a crash may cost.')
    keep_last: int = Field(default=1, ge=1, description="Checkpoints kept.")
    directories: tuple[str, ...] = Field(
        default=(), description="Where disk state lives; default: in the run directory."
    )
    nonfinite: Literal["allow", "skip", "raise"] = Field(
        default="raise", description="What to do when the gradient norm is NaN or infinite."
    )
    grad_dtype: Literal["param", "fp32"] = Field(
        default="param", description="dtype that gradients are kept and accumulated in."
    )
    verify_reads: bool = Field(
        default=False, description="Check the checksum of every read of disk state, not only at resume."
    )

    @field_validator("disk_fraction")
    @classmethod
    def _fraction_of_a_mix(cls, fraction: float | None, others: ValidationInfo) -> float | None:
        if fraction is not None and others.data.get("optimizer_state", "mixed") != "mixed":
            raise ValueError('It is for optimizer_state = "mixed" and says nothing beside another')
        return fraction

    @field_validator("durability", mode="before")
    @classmethod
    def _a_number_of_steps(cls, durability: Any) -> Any:
        words = ("step", "checkpoint", "auto")
        whole = isinstance(durability, int) and not isinstance(durability, bool)
        if durability not in words and not (whole and durability >= 1):
            raise ValueError('It is "step", "checkpoint", "auto", or a number of steps, at least 1')
        return durability


class Job(Frozen):
    """One training job, as in job.toml."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)
    method: MethodConfig = Field(default_factory=MethodConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    kernels: KernelConfig = Field(default_factory=KernelConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    framework: FrameworkConfig = Field(default_factory=FrameworkConfig)
    device: DeviceConfig = Field(default_factory=DeviceConfig)


def read_job(path: str | Path) -> Job:
    """Read a job file (.toml, or .json). Paths inside it are relative to the file.

    Raises OverspillError: OVS103 for a file that cannot be read, OVS101 or OVS102 for a wrong key or value.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        data: Any = parse_json(text) if file.suffix == ".json" else tomllib.loads(text)
        refuse_odd_texts(data)
    except OSError as error:
        raise OverspillError("OVS103", f"Cannot read the job file: {error.strerror}.", field=str(file)) from None
    except UnicodeDecodeError as error:
        raise OverspillError("OVS103", f"The job file is not UTF-8: {error.reason}.", field=str(file)) from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise OverspillError("OVS103", f"The job file is not valid {kind}: {why}.", field=str(file)) from None
    if not isinstance(data, dict):
        raise OverspillError("OVS103", "The job file holds no table at its top.", field=str(file))
    return Job.read(data, source=str(file))
