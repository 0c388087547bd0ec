"""What rests on one rank between steps: weights, adapters, optimizer state, buffers. Formulas of docs/theory/states.md.

Everything is counted per kind of layer, so that a model of a hundred layers costs as little as one of ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from overspill.errors import OverspillError
from overspill.forecast.device.settings import OptimizerFacts, Resolved
from overspill.forecast.layers.litgpt import FIRST_PROMPT, PROMPT_TOKENS
from overspill.forecast.layers.roles import roles_of
from overspill.job import Job
from overspill.model.facts import LayerKind, LinearShape, ModelFacts

__all__ = ["QUANTISED_BYTES", "Unit", "Units", "build_units", "optimizer_nbytes", "targets_of"]

#: Bytes per element of a quantised matrix, scales included.
#: nf4, fp4: 4 bits and one fp32 scale per 64 (bitsandbytes Params4bit, blocksize 64); with double quantisation the
#: scale is one byte and an fp32 per 256 of them. gptq4, awq4: 4 bits; scales and zeros by group come on top.
#: int8: one byte, one fp32 a row. mxfp4: 4 bits and one byte per 32. aqlm2: 2 bits and codebooks. hqq4: as gptq4, 64.
QUANTISED_BYTES = {
    "nf4": 0.5 + 4 / 64,
    "fp4": 0.5 + 4 / 64,
    "nf4-dq": 0.5 + 1 / 64 + 4 / (64 * 256),
    "fp4-dq": 0.5 + 1 / 64 + 4 / (64 * 256),
    "gptq4": 0.5,
    "awq4": 0.5,
    "hqq4": 0.5 + 4 / 64,
    "int8": 1.0,
    "fp8": 1.0,
    "mxfp4": 0.5 + 1 / 32,
    "aqlm2": 0.25 + 0.02,
}
#: Buffers of a bitsandbytes 4-bit module that do not grow with it: the code of 16 fp32, the nested one of 256, offset.
_MODULE_BUFFERS_NBYTES = {"nf4": 512, "fp4": 512, "nf4-dq": 512 + 1024 + 512, "fp4-dq": 512 + 1024 + 512}


@dataclass(frozen=True, slots=True)
class Unit:
    """One layer of a kind, or what stands outside the layers, on one rank before data-parallel sharding.

    numels: trained (base weights that are trained), frozen (unquantised and not trained), adapter (LoRA and the like),
    quantised: bytes. matrices: (rows, columns) of trained matrices, for optimizers that treat them apart. largest: the
    largest trained tensor. expert_numel: of trained, what expert parallelism has already divided.
    """

    name: str
    trained_numel: int
    frozen_numel: int
    adapter_numel: int
    quantised_nbytes: int
    quantised_numel: int
    largest_numel: int
    matrices: tuple[tuple[int, int], ...] = ()
    expert_numel: int = 0
    tensors: int = 0

    @property
    def numel(self) -> int:
        """Elements that a gathered unit holds, quantised storage not counted."""
        return self.trained_numel + self.frozen_numel + self.adapter_numel


@dataclass(frozen=True)
class Units:
    """The layers' units, one for each kind with its count on this rank, and the root's."""

    layers: tuple[tuple[LayerKind, int, Unit], ...]
    embedding: Unit
    head: Unit
    root: Unit

    def total(self, what: Callable[[Unit], float]) -> float:
        return sum(count * what(unit) for _, count, unit in self.layers) + sum(
            what(unit) for unit in (self.embedding, self.head, self.root)
        )


_DEFAULT_TARGETS = {  # peft's TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, by the names that a family has
    ("q_proj", "v_proj"), ("query_key_value",), ("c_attn",), ("qkv_proj",), ("query", "value"), ("q", "v"), ("Wqkv",),
}  # fmt: skip


def targets_of(job: Job, facts: ModelFacts) -> Callable[[str], bool]:
    """Whether a linear of that name gets an adapter. Raises OverspillError OVS101 where no name matches."""
    method = job.method
    linears = list(_linears(facts))
    if method.kind != "lora":
        return lambda name: False
    wanted: tuple[str, ...] = method.targets
    head = facts.head or "lm_head"
    if job.framework.name == "litgpt":
        return _litgpt_targets(wanted or ("query", "value"), facts)
    if wanted == ("all-linear",) or wanted == ("all_linear",):
        return lambda name: name not in (head, "head")
    if not wanted:
        leaves = {linear.leaf for linear in linears}
        wanted = next((names for names in sorted(_DEFAULT_TARGETS, reverse=True) if set(names) <= leaves), ())
    found = tuple(name for name in wanted if any(_ends(linear.name, name) for linear in linears))
    if not found:
        raise OverspillError(
            "OVS101",
            "No module of this model is a LoRA target.",
            field="method.targets",
            value=", ".join(method.targets) or "the default",
            limit="one of " + ", ".join(sorted({linear.leaf for linear in linears})),
        )
    return lambda name: any(_ends(name, wanted_name) for wanted_name in found) or (name == "head" and head in found)


_LITGPT_PARTS = {
    "q": "query", "k": "key", "v": "value", "o": "projection", "gate": "mlp", "up": "mlp", "down": "mlp",
    "gate_up": "mlp",
}  # fmt: skip


def _litgpt_targets(wanted: tuple[str, ...], facts: ModelFacts) -> Callable[[str], bool]:
    """LitGPT names parts (query, key, value, projection, mlp, head), whatever the checkpoint's modules are called."""
    known = {*_LITGPT_PARTS.values(), "head"}
    for name in wanted:
        if name not in known:
            raise OverspillError(
                "OVS101", "No such part.", field="method.targets", value=name, limit=", ".join(sorted(known))
            )
    chosen = {role for role, part in _LITGPT_PARTS.items() if part in wanted}
    names = {"head"} if "head" in wanted else set()
    names |= {facts.head} if "head" in wanted and facts.head else set()
    for stack in facts.stacks:
        for kind in stack.kinds:
            for part in roles_of(kind).values():
                names |= {linear.name for role, linear in part.items() if role in chosen}
    names |= {f"litgpt.{role}" for role in chosen}
    return lambda name: name in names


def _linears(facts: ModelFacts) -> Iterable[LinearShape]:
    for stack in facts.stacks:
        for kind in stack.kinds:
            yield from kind.linears
    yield from facts.outer_linears


def _ends(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith("." + wanted)


def build_units(job: Job, facts: ModelFacts, resolved: Resolved, counts: dict[str, int]) -> Units:
    """counts: layers of each kind on this rank (a pipeline stage has some). One rank's tensor- and expert-parallel
    share; data-parallel sharding is applied by who reads it."""
    targeted = targets_of(job, facts)
    full = job.method.kind == "full"
    layers = []
    for stack in facts.stacks:
        frozen_tower = stack.role == "vision" and job.method.freeze_vision and not full
        for kind in stack.kinds:
            count = counts.get(f"{stack.role}:{kind.name}", 0)
            if count:
                unit = _layer_unit(job, kind, resolved, targeted, trained=full and not frozen_tower)
                layers.append((kind, count, unit))
    return Units(
        layers=tuple(layers),
        embedding=_outer_unit("embedding", facts, job, resolved, targeted, full=full),
        head=_outer_unit("head", facts, job, resolved, targeted, full=full),
        root=_outer_unit("root", facts, job, resolved, targeted, full=full),
    )


def _layer_unit(
    job: Job, kind: LayerKind, resolved: Resolved, targeted: Callable[[str], bool], *, trained: bool
) -> Unit:
    method = job.method
    quantised_as = _quantisation(job)
    split, expert = resolved.tensor, resolved.expert * resolved.expert_tensor
    trained_numel = frozen = adapter = quantised_numel = largest = expert_numel = tensors = 0
    quantised = 0.0
    matrices = []
    linears = {linear.name: linear for linear in kind.linears}
    roles = roles_of(kind)["attention"]
    second = method.kind == "adapter_v2"
    for name, shape in kind.parameters:
        numel = math.prod(shape)
        owner = linears.get(name.removesuffix(".weight")) or linears.get(name)
        is_expert = owner is not None and owner.is_expert
        share = expert if is_expert else split if len(shape) > 1 else 1
        numel = -(-numel // share)
        is_matrix = owner is not None and len(shape) > 1
        as_linear = is_matrix and (not is_expert or resolved.style.expert_linears)
        if quantised_as and as_linear and not trained:
            quantised_numel += numel
            quantised += numel * QUANTISED_BYTES[quantised_as] + _MODULE_BUFFERS_NBYTES.get(quantised_as, 0) * (
                owner.experts if owner else 1
            )
            if quantised_as in ("gptq4", "awq4") and owner is not None:
                groups = owner.in_features / (method.group_size or owner.in_features)
                quantised += 2.5 * groups * numel / owner.in_features  # an fp16 scale and a 4-bit zero
                quantised += 4 * owner.in_features * owner.experts if quantised_as == "gptq4" else 0  # g_idx, int32
        elif trained or (second and _is_adapter_norm(name, kind, linears)):
            trained_numel += numel
            expert_numel += numel if is_expert else 0
            largest = max(largest, numel)
            tensors += 1
            if len(shape) > 1:
                matrices.append((numel // shape[-1], shape[-1]))
        else:
            frozen += numel
        is_packed = owner is not None and job.framework.name == "litgpt" and roles.get("qkv") is owner
        if is_packed and owner is not None and kind.attention is not None and method.kind == "lora":
            widths = (kind.attention.query_width, kind.attention.key_width, kind.attention.value_width)
            chosen = [width for role, width in zip("qkv", widths, strict=True) if targeted(f"litgpt.{role}")]
            adapter += method.rank * (len(chosen) * owner.in_features + sum(chosen)) * (len(shape) > 1)
        elif owner is not None and method.kind == "lora" and as_linear and _expert_targeted(owner, targeted):
            pairs = owner.experts
            pair = method.rank * (owner.in_features + owner.out_features)
            adapter += pairs * (pair // share if is_expert else pair)
            if method.dora:
                adapter += pairs * owner.out_features
            tensors += 2 * pairs
    return Unit(
        name=kind.name,
        trained_numel=trained_numel,
        frozen_numel=frozen,
        adapter_numel=adapter + _prompt_numel(job, kind),
        quantised_nbytes=round(quantised),
        quantised_numel=quantised_numel,
        largest_numel=largest,
        matrices=tuple(matrices),
        expert_numel=expert_numel,
        tensors=tensors,
    )


def _is_adapter_norm(name: str, kind: LayerKind, linears: dict[str, LinearShape]) -> bool:
    """adapter_v2 trains the norms before attention and MLP: not those after them, nor those of queries and keys."""
    owner = name.rpartition(".")[0]
    after = kind.norms > 2 and owner.startswith("post_")
    return owner not in linears and "." not in owner and not after


def _prompt_numel(job: Job, kind: LayerKind) -> int:
    """LLaMA-Adapter: a prompt and a gate a head; v2: a bias and a scale for each linear's output besides."""
    if job.method.kind not in ("adapter", "adapter_v2") or kind.attention is None:
        return 0
    linears = sum(2 * linear.out_features for linear in kind.linears) if job.method.kind == "adapter_v2" else 0
    prompt = (PROMPT_TOKENS * kind.hidden + kind.attention.heads) * sum(at >= FIRST_PROMPT for at in kind.positions)
    return prompt // kind.count + linears  # the first layers have no prompt: a unit is the mean of its kind


def _expert_targeted(owner: LinearShape, targeted: Callable[[str], bool]) -> bool:
    if not owner.is_expert:
        return targeted(owner.name)
    # Before transformers 5 each expert's matrices were modules of their own, named w1, w2, w3 or gate_proj, …
    return any(targeted(f"experts.0.{leaf}") for leaf in ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"))


def _quantisation(job: Job) -> str | None:
    base = job.method.base
    if base is None:
        return None
    return f"{base}-dq" if base in ("nf4", "fp4") and job.method.double_quant else base


def _outer_unit(
    which: str, facts: ModelFacts, job: Job, resolved: Resolved, targeted: Callable[[str], bool], *, full: bool
) -> Unit:
    head = facts.head
    numel = largest = tensors = 0
    matrices = []
    adapter = 0
    for name, shape in facts.outer:
        if name in facts.tied and not resolved.unties:
            continue
        is_head = head is not None and name.startswith(head + ".")
        is_embedding = not is_head and len(shape) == 2 and shape[0] >= facts.vocab
        part = "head" if is_head else "embedding" if is_embedding else "root"
        if part != which:
            continue
        count = math.prod(shape)
        if part in ("head", "embedding"):
            if job.method.resized_vocab:
                count = count // shape[0] * job.method.resized_vocab
            count = -(-count // resolved.tensor)
        numel += count
        largest = max(largest, count)
        tensors += 1
        if len(shape) == 2:
            matrices.append((count // shape[1], shape[1]))
    if which == "head" and head is not None and job.method.kind == "lora" and targeted(head):
        adapter = job.method.rank * (facts.hidden + facts.vocab)
        tensors += 2
    second = job.method.kind == "adapter_v2"
    if which == "head" and head is not None and second:
        adapter = 2 * facts.vocab
        tensors += 2
    saved = which in ("head", "embedding") and any(
        word in ("lm_head", "embed_tokens", "head", "embeddings", "wte", "embed_out")
        and (word in ("lm_head", "head", "embed_out")) == (which == "head")
        for word in job.method.modules_to_save
    )
    if which == "head" and resolved.quantises_head and not full:
        quantised_as = _quantisation(job)
        assert quantised_as is not None
        return Unit(which, 0, 0, adapter, round(numel * QUANTISED_BYTES[quantised_as]), numel, 0, (), 0, tensors)
    if saved:
        return Unit(which, numel, numel, adapter, 0, 0, largest, tuple(matrices), 0, tensors)
    if full or (which == "root" and second):
        return Unit(which, numel, 0, adapter, 0, 0, largest, tuple(matrices), 0, tensors)
    return Unit(which, 0, numel, adapter, 0, 0, 0, (), 0, tensors)


def optimizer_nbytes(
    unit: Unit, facts: OptimizerFacts, trained_share: float, adapter_share: float, expert_share: float = 1.0
) -> float:
    """State and master of one unit on one rank, in bytes; shares: 1 / ranks over which each is split."""
    trained = (unit.trained_numel - unit.expert_numel) * trained_share + unit.expert_numel * expert_share
    adapters = unit.adapter_numel * adapter_share
    if facts.per_row or facts.per_column:
        small = sum(4 * (facts.per_row * rows + facts.per_column * columns) for rows, columns in unit.matrices)
        vectors = unit.trained_numel - sum(rows * columns for rows, columns in unit.matrices)
        return small * trained_share + max(0, vectors) * trained_share * 4 + trained * facts.master
    return (trained + adapters) * (facts.state + facts.master)
