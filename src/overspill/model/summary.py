"""DecoderFacts: what the CPU memory formulas of forecast/activations.py need, where those formulas hold.

They were read off decoders whose layers are all alike and dense, on torch's CPU kernels; for any other model there is
no such summary, and a formula that needs more reads facts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from overspill.model.facts import LayerKind, ModelFacts

__all__ = ["DecoderFacts", "decoder_facts"]


@dataclass(frozen=True, slots=True)
class DecoderFacts:
    """What the CPU memory formulas need to know of a decoder.

    norm: ``rms`` (fp32 inside, weight applied in the model's dtype), ``rms_fp32`` (Gemma: weight applied in fp32),
    ``layer`` (one native kernel). fused_qkv: one projection, whose output stays alive while v is a view of it.
    mlp: ``gated`` (gate, up, down), ``fused_gated`` (one gate_up projection), ``plain`` (up, activation, down).
    attention: the CPU kernel that transformers picks: ``flash``; ``math`` (dropout in attention) and ``eager``
    (softcapping) keep scores of every pair of tokens.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm: Literal["rms", "rms_fp32", "layer"]
    norms_per_layer: int = 2
    qk_norm: bool = False
    rotary: bool = True
    fused_qkv: bool = False
    mlp: Literal["gated", "fused_gated", "plain"] = "gated"
    activation: str = "silu"
    hidden_dropout: float = 0.0
    attention: Literal["flash", "math", "eager"] = "flash"
    logits_softcap: bool = False
    parallel_residual: bool = False

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def decoder_facts(facts: ModelFacts) -> DecoderFacts | None:
    """The summary, or None where the CPU formulas were not checked: experts, latent attention, several stacks, …"""
    if facts.kind != "decoder" or len(facts.stacks) != 1:
        return None
    kinds = [_comparable(kind) for kind in facts.text.kinds]
    kind = kinds[0]
    attention, mlp = kind.attention, kind.mlp
    if any(other != kind for other in kinds) or attention is None or mlp is None:
        return None
    known = attention.kind == "full" and attention.qk_norm != "full" and not (attention.alibi or attention.is_mla)
    if not known or attention.sinks or attention.output_gate or kind.norm not in ("rms", "rms_fp32", "layer"):
        return None
    capped = attention.softcap is not None
    return DecoderFacts(
        layers=facts.text.layers,
        hidden=facts.hidden,
        intermediate=mlp.intermediate,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        vocab=facts.vocab,
        norm=kind.norm,
        norms_per_layer=kind.norms,
        qk_norm=attention.qk_norm == "head",
        rotary=facts.positions == "rotary",
        fused_qkv=attention.fused_qkv,
        mlp=mlp.kind,
        activation=mlp.activation,
        hidden_dropout=kind.residual_dropout,
        attention="eager" if capped else "math" if attention.dropout > 0 else "flash",
        logits_softcap=facts.logits_softcap is not None,
        parallel_residual=kind.parallel_residual,
    )


def _comparable(kind: LayerKind) -> LayerKind:
    """A kind without what those formulas do not read: its name, its places, its window, whether it is rotated."""
    attention = kind.attention
    if attention is not None and attention.kind in ("full", "sliding"):
        attention = replace(attention, kind="full", window=None, rotary_dim=0)
    return replace(kind, name="", positions=(), attention=attention)
