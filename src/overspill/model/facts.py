"""What is known of a model beside its parameters: each distinct kind of layer once, with what a memory formula needs.

Frozen records, no arithmetic beyond sums of shapes. A model has one stack of layers (a decoder), two (encoder and
decoder) or one more for a vision tower; a stack names each *kind* of layer once with the positions that have it, so
that a forecast costs as many evaluations as there are kinds and not as there are layers. Widths are in elements,
rates and factors are plain numbers. Where the facts come from: docs/theory/models.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

__all__ = [
    "AttentionFacts",
    "AttentionKind",
    "LayerKind",
    "LinearShape",
    "MlpFacts",
    "ModelFacts",
    "MoeFacts",
    "Named",
    "NormKind",
    "Stack",
    "VisionFacts",
]

#: A parameter's name and shape.
Named = tuple[str, tuple[int, ...]]

#: ``rms``: RMSNorm in Python, fp32 inside, its weight applied in the model's dtype. ``rms_fp32``: the weight is applied
#: in fp32 as well. ``layer``: torch's LayerNorm, one kernel. ``layer_fp32``: a mean-centred norm with the input cast
#: to fp32 first. ``none``: no norm there.
NormKind = Literal["rms", "rms_fp32", "layer", "layer_fp32", "none"]

#: ``full`` and ``sliding`` and ``chunked`` are softmax attention; ``linear`` is a gated delta rule with a recurrent
#: state; ``ssm`` is a selective state space; ``sparse`` is latent attention over tokens that an indexer selects.
AttentionKind = Literal["full", "sliding", "chunked", "linear", "ssm", "sparse"]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One matrix that tokens are multiplied with.

    kind: ``linear`` (torch.nn.Linear), ``conv1d`` (GPT-2's transposed one; adapters know both), or ``experts``: a bare
    3-D parameter that holds the matrix of every routed expert, which is *not* an nn.Linear: adapters and quantisers
    that look for modules do not see it. name: the module's path (the parameter's, for ``experts``), inside its layer
    for a layer's linear, from the root for one outside. bias: one of ``out_features`` (for each expert).
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    kind: Literal["linear", "conv1d", "experts"] = "linear"
    experts: int = 1

    @property
    def is_expert(self) -> bool:
        """Whether only the tokens that a router sends there pass through."""
        return self.kind == "experts"

    @property
    def leaf(self) -> str:
        """The last part of the name, which is what an adapter's target list usually holds: ``"q_proj"``."""
        return self.name.rpartition(".")[2]

    @property
    def weight_numel(self) -> int:
        return self.experts * self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """One token mixer.

    heads, kv_heads, head_dim, v_head_dim: of queries, of keys and values; head_dim is that of q·k.
    window: tokens that a ``sliding`` or ``chunked`` one looks back over, else None.
    qk_norm: over each head (``head``), over the whole projection (``full``), or none.
    norm: kind of those norms. rotary_dim: dimensions of a head that are rotated; 0 for none. softcap: scores are
    capped by tanh at this value. softmax_fp32: written-out attention takes its softmax
    in fp32, else in its dtype. sinks: a learned logit a head joins the softmax. output_gate: the output is
    multiplied with a gate from the input. fused_qkv: one projection gives q, k and v, which are views of its output.
    q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim: latent attention (MLA); 0 where it has none, and
    q_lora_rank is 0 where queries are not compressed. dropout: on attention weights. For ``linear`` and ``ssm``,
    conv_kernel is the width of the causal convolution and state_dim the recurrent state's, a head. For ``sparse``, an
    indexer of index_heads heads of index_head_dim scores all tokens, and index_topk of them are attended; index_heads
    is 0 in a layer that takes over the choice of the one before.
    """

    kind: AttentionKind = "full"
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None
    causal: bool = True
    qk_norm: Literal["none", "head", "full"] = "none"
    norm: NormKind = "rms"
    rotary_dim: int = 0
    alibi: bool = False
    relative_bias: bool = False
    softcap: float | None = None
    softmax_fp32: bool = True
    sinks: bool = False
    output_gate: bool = False
    fused_qkv: bool = False
    bias: bool = False
    dropout: float = 0.0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    conv_kernel: int = 0
    state_dim: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        return self.kv_heads * self.v_head_dim

    @property
    def output_width(self) -> int:
        """Width of what the output projection reads."""
        return self.heads * self.v_head_dim

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0


@dataclass(frozen=True, slots=True)
class MlpFacts:
    """A dense MLP. kind: ``gated`` (gate, up, down), ``fused_gated`` (one gate_up projection), ``plain``."""

    kind: Literal["gated", "fused_gated", "plain"]
    intermediate: int
    activation: str
    bias: bool = False
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class MoeFacts:
    """Experts of which a router picks ``top_k`` for each token.

    expert: one routed expert's MLP. shared: the MLP that every token passes beside them (its intermediate is the sum
    over shared experts), or None. shared_gate: a learned gate scales it. router_fp32: the router's logits are computed
        in fp32 rather than the model's dtype; weights_fp32: routing weights stay fp32; scores: how they become
    weights. capacity_factor: tokens an expert takes
    at most, as a multiple of the even share; None drops none, as all of transformers' do.
    """

    experts: int
    top_k: int
    expert: MlpFacts
    shared: MlpFacts | None = None
    shared_gate: bool = False
    router_fp32: bool = False
    weights_fp32: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    capacity_factor: float | None = None


@dataclass(frozen=True)
class LayerKind:
    """One distinct kind of layer, and where it stands in its stack.

    parameters, linears: names inside the layer (``self_attn.q_proj.weight``, ``self_attn.q_proj``), in the module's
    order. norm, norms: kind and number of the norms over the residual stream's width. parallel_residual: attention and
    MLP read the same residual. residual_dropout: on what attention and MLP add to it. residual_scaled: what they add is
    multiplied with a constant or a learned vector first. mlp is None where the layer is a mixture of experts, whose
    shared expert is in ``moe``.
    """

    name: str
    positions: tuple[int, ...]
    hidden: int
    parameters: tuple[Named, ...]
    linears: tuple[LinearShape, ...]
    norm: NormKind
    norms: int
    attention: AttentionFacts | None = None
    cross_attention: AttentionFacts | None = None
    mlp: MlpFacts | None = None
    moe: MoeFacts | None = None
    parallel_residual: bool = False
    residual_dropout: float = 0.0
    residual_scaled: bool = False

    @property
    def count(self) -> int:
        return len(self.positions)

    @cached_property
    def numel(self) -> int:
        """Elements of one layer of this kind."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    @cached_property
    def expert_numel(self) -> int:
        """Those of them that belong to routed experts."""
        if self.moe is None:
            return 0
        own = {linear.name for linear in self.linears if linear.is_expert}
        return sum(math.prod(shape) for name, shape in self.parameters if name.removesuffix("_bias") in own)

    @property
    def active_numel(self) -> int:
        """Elements that one token passes: routed experts count ``top_k / experts`` of theirs."""
        if self.moe is None:
            return self.numel
        return self.numel - self.expert_numel + self.expert_numel * self.moe.top_k // self.moe.experts


@dataclass(frozen=True)
class Stack:
    """Layers one after the other. prefix: the path that an index follows: ``"model.layers"``."""

    role: Literal["decoder", "encoder", "vision"]
    prefix: str
    hidden: int
    kinds: tuple[LayerKind, ...]
    final_norm: NormKind = "none"

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @cached_property
    def sequence(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        by_position = {position: kind for kind in self.kinds for position in kind.positions}
        return tuple(by_position[position] for position in range(self.layers))


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """How an image becomes tokens. patches_per_side is None where the image's own size decides.

    merged: patches a side that one token of the text model stands for. temporal_patch: frames that one patch spans.
    tokens_per_image: what a full-sized image adds to the text model's sequence, None where its size decides.
    """

    patch_size: int
    channels: int = 3
    image_size: int | None = None
    merged: int = 1
    temporal_patch: int = 1
    tokens_per_image: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A model: its stacks, and what stands outside them.

    outer: parameters outside all stacks, by full name; outer_linears: the linear modules among them, the head
    included. positions: how order enters. embedding_scaled: embeddings are multiplied with a constant.
    logits_softcap: logits are capped by tanh. logits_scaled: multiplied with a constant. head: the module that gives
    logits, None where there is none. ties: (parameter, the parameter whose storage it shares).
    """

    family: str
    kind: Literal["decoder", "encoder", "encoder-decoder", "vision-language", "vision"]
    stacks: tuple[Stack, ...]
    hidden: int
    vocab: int
    outer: tuple[Named, ...]
    outer_linears: tuple[LinearShape, ...]
    ties: tuple[tuple[str, str], ...]
    positions: Literal["rotary", "learned", "sinusoidal", "alibi", "relative", "none"]
    max_positions: int | None = None
    head: str | None = None
    embedding_dropout: float = 0.0
    embedding_scaled: bool = False
    embedding_norm: bool = False
    logits_softcap: float | None = None
    logits_scaled: bool = False
    vision: VisionFacts | None = None

    @cached_property
    def tied(self) -> dict[str, str]:
        """Parameter → the parameter whose storage it shares."""
        return dict(self.ties)

    @property
    def embedding(self) -> Named | None:
        """The token embeddings: the first matrix of ``vocab`` rows outside the layers that is not the head."""
        head = f"{self.head}.weight"
        return next(
            (named for named in self.outer if named[0] != head and len(named[1]) == 2 and named[1][0] == self.vocab),
            None,
        )

    def stack(self, role: str) -> Stack | None:
        """The stack of that role, or None."""
        return next((stack for stack in self.stacks if stack.role == role), None)

    @property
    def text(self) -> Stack:
        """The stack whose output becomes logits: the decoder, else the encoder, else the only one."""
        return self.stack("decoder") or self.stack("encoder") or self.stacks[0]

    @property
    def is_moe(self) -> bool:
        return any(kind.moe is not None for stack in self.stacks for kind in stack.kinds)

    @cached_property
    def active_numel(self) -> int:
        """Elements that one token passes: all of them but the routed experts that it is not sent to; a tied one once.

        Embeddings are counted whole, as model cards count them.
        """
        outer = sum(math.prod(shape) for name, shape in self.outer if name not in self.tied)
        return outer + sum(kind.count * kind.active_numel for stack in self.stacks for kind in stack.kinds)

    def linears(self) -> Iterator[LinearShape]:
        """Every linear module of the model by its full name, in order of stacks, then those outside.

        As many as the model has: a forecast should go by kinds instead.
        """
        for stack in self.stacks:
            for position, kind in enumerate(stack.sequence):
                for linear in kind.linears:
                    yield replace(linear, name=f"{stack.prefix}.{position}.{linear.name}")
        yield from self.outer_linears
