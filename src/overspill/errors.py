"""What a user's mistake looks like: one paragraph, a stable code, and the next thing to try.

Every code has a row in CODES and a page made from it in docs/reference/errors/ (``make docs``; a test
fails when they differ). ``assert`` is for our own invariants; a mistake of the user's, of the machine or of
a file is always an OverspillError. A code, once published, keeps its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

__all__ = ["CODES", "ErrorCode", "OverspillError"]


@dataclass(frozen=True)
class ErrorCode:
    """One row of the reference: what the code means, what causes it, and what to do."""

    title: str
    cause: str
    fix: str


CODES: Final[dict[str, ErrorCode]] = {
    # 1xx: the job file and the command line
    "OVS101": ErrorCode(
        "unknown or invalid key in the job file",
        "A key is misspelt, in the wrong table, or its value has the wrong type or range.",
        "Correct the value there; `overspill new FILE` writes a file with every key and what it takes.",
    ),
    "OVS102": ErrorCode(
        "a quantity cannot be read",
        "A size, rate or duration has an unknown unit, no unit where one is needed, or a negative value.",
        'Write sizes as "24GiB" or "24GB", rates as "7GB/s", durations as "10min".',
    ),
    "OVS103": ErrorCode(
        "the job file cannot be read",
        "The file does not exist, is no TOML or JSON, or is not valid UTF-8.",
        "Correct the path, or the file where reading stopped; `overspill new FILE` writes one that can be read.",
    ),
    "OVS104": ErrorCode(
        "an optional library is missing",
        "The command needs a library that the base install does not bring (torch, transformers, …).",
        "Install what a training needs: `pip install 'overspill[train,hf]'`.",
    ),
    "OVS105": ErrorCode(
        "the file exists already",
        "A command would write a new file where there is one; nothing is overwritten.",
        "Give another name, or remove the file first.",
    ),
    "OVS106": ErrorCode(
        "a question cannot be asked",
        "The command asks before it deletes, and its output is no terminal.",
        "Give --yes to answer in advance.",
    ),
    "OVS107": ErrorCode(
        "the system refused a path",
        "The path is too long, may not be read or written, goes in a circle, or its disk is full or failing.",
        "Correct the path or its permission, or free space on its disk.",
    ),
    "OVS108": ErrorCode(
        "a job that can be forecast, but not run",
        "The job holds a value that the forecast reads and `overspill train` does not carry out yet.",
        "Take the value out, or change it as the sentence above says; `overspill forecast` takes it as it is.",
    ),
    "OVS109": ErrorCode(
        "a configuration cannot be read as a job",
        "A file of another framework names no model, has a shape that its framework does not take, or is no YAML.",
        "Give what is missing as a flag, for example --model; the keys that were read are named above.",
    ),
    "OVS110": ErrorCode(
        "the accelerator is not known",
        "The name is in no catalogue, or it stands for several cards that hold different amounts of memory.",
        "Choose one of the names above, or describe your card in overspill.toml.",
    ),
    "OVS111": ErrorCode(
        "overspill.toml cannot be read",
        "A file with facts of your own, beside the job or in ~/.config/overspill, is no TOML or cannot be opened.",
        "Correct the file named above, or move it away.",
    ),
    # 2xx: the model and the data
    "OVS201": ErrorCode(
        "the model cannot be found or read",
        "The directory has no config.json, or the hub id is not in the local cache and there is no network.",
        "Give a directory with config.json, tokenizer files and *.safetensors, or a hub id that can be reached.",
    ),
    "OVS202": ErrorCode(
        "the model's weights are missing or damaged",
        "A safetensors file is truncated, has a damaged header, lacks a tensor, or holds one of another shape.",
        "Download that file again, or copy it again from where it is whole.",
    ),
    "OVS203": ErrorCode(
        "the tokenizer is missing",
        "The model directory holds no tokenizer.json or other tokenizer file that transformers can load.",
        "Copy the tokenizer files into the model directory, or set model.tokenizer to a directory that has them.",
    ),
    "OVS204": ErrorCode(
        "the training data cannot be used",
        "The data file is missing, empty, not text or JSONL, or gives no complete sequence.",
        "Correct the data there, or name another file in data.path.",
    ),
    "OVS205": ErrorCode(
        "the sequence is longer than the model's positions",
        "data.seq_len exceeds the largest position that the model was built for.",
        "Lower data.seq_len to the limit, or take a model with more positions.",
    ),
    "OVS206": ErrorCode(
        "this dtype is not supported here",
        "The kernels take weights in bf16 or fp32 and gradients in bf16 or fp32; nothing is converted silently.",
        'Set model.dtype to "bf16" or "fp32", or convert the named parameter before attaching.',
    ),
    "OVS207": ErrorCode(
        "this optimizer or option is not supported",
        "The optimizer, or one of its options (amsgrad, sparse gradients, …), has no exact kernel here.",
        "Use AdamW, Adam, SGD or Lion, without that option.",
    ),
    "OVS208": ErrorCode(
        "the model cannot be traced",
        "Its forward asks for values of tensors; a trace has their shapes only.",
        "Build it with attention that a trace knows, or register a footprint for the module that is named.",
    ),
    # 3xx: memory
    "OVS301": ErrorCode(
        "the memory budget is too small",
        "What must be in memory at once exceeds plan.memory, or a share of it that the plan gave away.",
        "Raise plan.memory to the limit, or lower train.micro_batch or data.seq_len.",
    ),
    "OVS302": ErrorCode(
        "the machine has less memory than the budget",
        "plan.memory is larger than what the machine, or this process's cgroup, can give.",
        "Lower plan.memory, or free memory first.",
    ),
    # 4xx: disk
    "OVS401": ErrorCode(
        "not enough disk space",
        "The store needs (2 + pins) times the state, preallocated when it is made, and the disk has less free.",
        "Free space, lower plan.keep_last, or give another directory in plan.directories.",
    ),
    "OVS402": ErrorCode(
        "the directory cannot be written",
        "Permission is denied, the file system is read-only, or the path is not a directory.",
        "Choose a directory that this user can write, or change its permission.",
    ),
    "OVS403": ErrorCode(
        "the disk reported an error",
        "A read, write or sync failed (EIO and the like). The last committed step is intact.",
        "Check the drive (`dmesg`, SMART); then `overspill resume RUN` goes on from the last committed step.",
    ),
    "OVS404": ErrorCode(
        "a state file is damaged",
        "A slot file or manifest is truncated or its checksum does not match what was committed.",
        "Go back to a whole checkpoint, `overspill resume RUN --from NAME`; `overspill runs show RUN` lists them.",
    ),
    "OVS405": ErrorCode(
        "the run directory is in use",
        "Another process holds the store's lock.",
        "Stop that process first, or choose another run directory.",
    ),
    "OVS406": ErrorCode(
        "the store belongs to another model or layout",
        "Names, shapes or dtypes in the manifest differ from the model that is being attached.",
        "Use the model that the run was made with, or a new run directory.",
    ),
    "OVS407": ErrorCode(
        "the store's format is not known",
        "The manifest was written by another version of the format.",
        "Use the version of Overspill that wrote it, or start a new run.",
    ),
    "OVS408": ErrorCode(
        "the state belongs to another directory",
        "The run is a copy of one that keeps its state in plan.directories, and the original is still there.",
        "Go on with the original; both are named above. A copy takes the state over once the original is moved away.",
    ),
    # 5xx: the session
    "OVS501": ErrorCode(
        "the session has failed",
        "An earlier error in a worker stopped the session; no later step is committed.",
        "Repair the first cause, then resume from the last committed step.",
    ),
    "OVS502": ErrorCode(
        "gradients are not finite",
        'The gradient norm is NaN or infinite and plan.nonfinite is "raise".',
        'Lower the learning rate, look at the data of this step, or set plan.nonfinite to "skip".',
    ),
    "OVS503": ErrorCode(
        "used after fork",
        "The model, optimizer or session was used in a forked child, where its memory is not mapped.",
        "Use them in the process that attached; DataLoader workers must not touch the model.",
    ),
    "OVS504": ErrorCode(
        "this model or call cannot be handled",
        "The model is spread by device_map, a parameter is of a kind that cannot be moved, or calls are out of order.",
        "Change that parameter or call; docs/howto/attach.md has a loop with every call in its order.",
    ),
    "OVS505": ErrorCode(
        "a wait took too long",
        "An operation did not finish within its time limit; the message lists what it waited for.",
        "Check the disk that was waited for; if it is healthy, report this text as a fault of Overspill's.",
    ),
    # 6xx: runs
    "OVS601": ErrorCode(
        "no such run or checkpoint",
        "The directory is no run directory, or it has no checkpoint of that name.",
        "`overspill runs` lists what there is.",
    ),
    "OVS602": ErrorCode(
        "the run belongs to another model or job",
        "The run directory was made with another model, or with settings that change the numbers.",
        "Use a new run directory, or the job file in the run directory.",
    ),
    "OVS603": ErrorCode(
        "the run is finished",
        "All steps of the job are done.",
        "Raise train.steps in the run's job.toml to go on, or `overspill export RUN`.",
    ),
    "OVS604": ErrorCode(
        "the run directory already exists",
        "A new run needs a new or empty directory.",
        "`overspill resume RUN` to go on with it, or choose another --run.",
    ),
    "OVS605": ErrorCode(
        "the export's directory already exists",
        "A model is written into a new or empty directory, so that it never mixes with another one.",
        "Give another --out, or remove the directory first.",
    ),
}


class OverspillError(Exception):
    """A mistake or fault that the user can act on.

    Args:
        code: a key of CODES.
        message: what is wrong, a full sentence.
        field: where: a path in the job file (``plan.memory``), a parameter or a file.
        value: what was seen.
        limit: what is allowed.
        next_step: the next thing to try, a full sentence or a command.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        value: Any = None,
        limit: Any = None,
        next_step: str | None = None,
    ) -> None:
        assert code in CODES, f"unknown error code {code}"
        self.code = code
        self.message = message
        self.field = field
        self.value = value
        self.limit = limit
        self.next_step = next_step if next_step is not None else CODES[code].fix
        super().__init__(self.paragraph())

    def paragraph(self) -> str:
        """The error as one paragraph: code, sentence, field, value, limit, next step."""
        facts = [f"{self.field}" if self.field else ""]
        if self.value is not None:
            facts.append(f"got {self.value}")
        if self.limit is not None:
            facts.append(f"limit {self.limit}")
        where = ", ".join(fact for fact in facts if fact)
        return f"[{self.code}] {self.message}" + (f" ({where})" if where else "") + f" {self.next_step}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.code, self.message, self.field, self.value, self.limit, self.next_step))


def _rebuild(code: str, message: str, field: str | None, value: Any, limit: Any, next_step: str) -> OverspillError:
    return OverspillError(code, message, field=field, value=value, limit=limit, next_step=next_step)
