"""Parameter names and shapes of known decoder families, from their config.json alone.

One function per family lists the parameters in the order of the transformers module, and states the few facts that
a memory formula needs (how the norms, the attention and the MLP are built). No torch, no transformers: a forecast
must work where neither is installed. Source: `modeling_<family>.py` of transformers 5.24; a unit test holds every
family equal to the real module on the meta device, and the saved activations were listed with saved-tensor hooks
(docs/theory/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from overspill.errors import OverspillError

__all__ = ["FAMILIES", "DecoderFacts", "Named", "decoder_of"]

Named = tuple[str, tuple[int, ...]]

#: Choices, far above every model that there is: a mistyped number is refused before it is multiplied out.
_LARGEST: Final = {"num_hidden_layers": 10_000, "n_layer": 10_000}
_LARGEST_SIZE: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class DecoderFacts:
    """What the memory formulas need to know of a decoder, in the config's own words.

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


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a family makes of a config: parameters in order, ties, facts, and the longest sequence."""

    parameters: tuple[Named, ...]
    tied: dict[str, str]
    facts: DecoderFacts
    max_positions: int | None


class _Config:
    """Reads config.json keys; a missing one that decides the shape is an error, never a guess."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def number(self, key: str) -> int:
        value = self._data.get(key)
        limit = _LARGEST.get(key, _LARGEST_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise OverspillError(
                "OVS201",
                f"The model's config.json needs a positive whole number for {key!r}.",
                field=f"config.json: {key}",
                value=str(value)[:40],
                limit=limit,
                next_step="Use the config.json that came with the weights.",
            )
        return value

    def get(self, key: str, default: Any = None) -> Any:
        value = self._data.get(key, default)
        return default if value is None else value


def decoder_of(family: str, config: dict[str, Any]) -> Decoder | None:
    """The decoder that ``config`` describes, or None for a family that is not known."""
    build = FAMILIES.get(family)
    if build is None:
        return None
    try:
        return build(_Config(config))
    except (ValueError, TypeError, ArithmeticError) as error:
        # A key that is read with a default holds something of another kind; which one, the sentence says.
        raise OverspillError(
            "OVS201",
            f"The model's config.json describes no {family}: {error}.",
            field="config.json",
            next_step="Use the config.json that came with the weights.",
        ) from None


def _linear(name: str, out: int, into: int, bias: bool = False) -> Iterator[Named]:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def _conv1d(name: str, into: int, out: int) -> Iterator[Named]:
    """GPT-2's linear layer keeps its weight transposed."""
    yield f"{name}.weight", (into, out)
    yield f"{name}.bias", (out,)


def _norm(name: str, width: int, bias: bool = False) -> Iterator[Named]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _head(
    facts: DecoderFacts, config: _Config, embedding: str, tied_by_default: bool
) -> tuple[list[Named], dict[str, str]]:
    tied = bool(config.get("tie_word_embeddings", tied_by_default))
    width = int(config.get("word_embed_proj_dim", facts.hidden))
    return [("lm_head.weight", (facts.vocab, width))], {"lm_head.weight": embedding} if tied else {}


@dataclass(frozen=True, slots=True)
class _Style:
    """How a member of the Llama line differs from Llama."""

    kv_heads_default: int | None = None  # the config class's own default where config.json leaves the key out
    head_dim_default: int | None = None
    tied_by_default: bool = False
    norm: Literal["rms", "rms_fp32"] = "rms"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: as config.attention_bias says, on all four projections
    fused: bool = False
    softcap: bool = False


def _llama_line(style: _Style) -> Callable[[_Config], Decoder]:
    def build(config: _Config) -> Decoder:
        hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
        kv_heads = int(config.get("num_key_value_heads", style.kv_heads_default or heads))
        head_dim = int(config.get("head_dim", style.head_dim_default or hidden // heads))
        softcapped = style.softcap and config.get("attn_logit_softcapping", 50.0) is not None
        dropout_in_attention = float(config.get("attention_dropout", 0.0)) > 0
        facts = DecoderFacts(
            layers=config.number("num_hidden_layers"),
            hidden=hidden,
            intermediate=config.number("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=config.number("vocab_size"),
            norm=style.norm,
            norms_per_layer=len(style.norms),
            qk_norm=style.qk_norm,
            fused_qkv=style.fused,
            mlp="fused_gated" if style.fused else "gated",
            activation=str(config.get("hidden_activation" if style.softcap else "hidden_act", "silu")),
            hidden_dropout=float(config.get("resid_pdrop", 0.0)) if style.fused else 0.0,
            attention="eager" if softcapped else "math" if dropout_in_attention else "flash",
            logits_softcap=style.softcap,
        )
        attention_bias = bool(config.get("attention_bias", False))
        qkv_bias = attention_bias if style.qkv_bias is None else style.qkv_bias
        out_bias = attention_bias if style.qkv_bias is None else False
        mlp_bias = bool(config.get("mlp_bias", False))

        def layer(index: int) -> Iterator[Named]:
            at = f"model.layers.{index}"
            if style.fused:
                yield from _linear(f"{at}.self_attn.o_proj", hidden, facts.query_width)
                yield from _linear(f"{at}.self_attn.qkv_proj", facts.query_width + 2 * facts.kv_width, hidden)
                yield from _linear(f"{at}.mlp.gate_up_proj", 2 * facts.intermediate, hidden)
            else:
                yield from _linear(f"{at}.self_attn.q_proj", facts.query_width, hidden, qkv_bias)
                yield from _linear(f"{at}.self_attn.k_proj", facts.kv_width, hidden, qkv_bias)
                yield from _linear(f"{at}.self_attn.v_proj", facts.kv_width, hidden, qkv_bias)
                yield from _linear(f"{at}.self_attn.o_proj", hidden, facts.query_width, out_bias)
                if style.qk_norm:
                    yield from _norm(f"{at}.self_attn.q_norm", head_dim)
                    yield from _norm(f"{at}.self_attn.k_norm", head_dim)
                yield from _linear(f"{at}.mlp.gate_proj", facts.intermediate, hidden, mlp_bias)
                yield from _linear(f"{at}.mlp.up_proj", facts.intermediate, hidden, mlp_bias)
            yield from _linear(f"{at}.mlp.down_proj", hidden, facts.intermediate, mlp_bias)
            for norm in style.norms:
                yield from _norm(f"{at}.{norm}", hidden)

        head, tied = _head(facts, config, "model.embed_tokens.weight", style.tied_by_default)
        parameters = [
            ("model.embed_tokens.weight", (facts.vocab, hidden)),
            *(named for index in range(facts.layers) for named in layer(index)),
            *_norm("model.norm", hidden),
            *head,
        ]
        return Decoder(tuple(parameters), tied, facts, config.get("max_position_embeddings"))

    return build


def _gpt2(config: _Config) -> Decoder:
    hidden, heads, layers = config.number("n_embd"), config.number("n_head"), config.number("n_layer")
    positions = int(config.get("n_positions", 1024))
    facts = DecoderFacts(
        layers=layers,
        hidden=hidden,
        intermediate=int(config.get("n_inner", 4 * hidden)),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.number("vocab_size"),
        norm="layer",
        rotary=False,
        fused_qkv=True,
        mlp="plain",
        activation=str(config.get("activation_function", "gelu_new")),
        hidden_dropout=float(config.get("resid_pdrop", 0.1)),
        attention="math" if float(config.get("attn_pdrop", 0.1)) > 0 else "flash",
    )

    def layer(index: int) -> Iterator[Named]:
        at = f"transformer.h.{index}"
        yield from _norm(f"{at}.ln_1", hidden, bias=True)
        yield from _conv1d(f"{at}.attn.c_attn", hidden, 3 * hidden)
        yield from _conv1d(f"{at}.attn.c_proj", hidden, hidden)
        yield from _norm(f"{at}.ln_2", hidden, bias=True)
        yield from _conv1d(f"{at}.mlp.c_fc", hidden, facts.intermediate)
        yield from _conv1d(f"{at}.mlp.c_proj", facts.intermediate, hidden)

    head, tied = _head(facts, config, "transformer.wte.weight", True)
    parameters = [
        ("transformer.wte.weight", (facts.vocab, hidden)),
        ("transformer.wpe.weight", (positions, hidden)),
        *(named for index in range(layers) for named in layer(index)),
        *_norm("transformer.ln_f", hidden, bias=True),
        *head,
    ]
    return Decoder(tuple(parameters), tied, facts, positions)


def _gpt_neox(config: _Config) -> Decoder:
    hidden, heads, layers = (
        config.number("hidden_size"),
        config.number("num_attention_heads"),
        config.number("num_hidden_layers"),
    )
    facts = DecoderFacts(
        layers=layers,
        hidden=hidden,
        intermediate=config.number("intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.number("vocab_size"),
        norm="layer",
        fused_qkv=True,
        mlp="plain",
        activation=str(config.get("hidden_act", "gelu")),
        hidden_dropout=float(config.get("hidden_dropout", 0.0)),
        attention="math" if float(config.get("attention_dropout", 0.0)) > 0 else "flash",
        parallel_residual=bool(config.get("use_parallel_residual", True)),
    )
    bias = bool(config.get("attention_bias", True))

    def layer(index: int) -> Iterator[Named]:
        at = f"gpt_neox.layers.{index}"
        yield from _norm(f"{at}.input_layernorm", hidden, bias=True)
        yield from _norm(f"{at}.post_attention_layernorm", hidden, bias=True)
        yield from _linear(f"{at}.attention.query_key_value", 3 * hidden, hidden, bias)
        yield from _linear(f"{at}.attention.dense", hidden, hidden, bias)
        yield from _linear(f"{at}.mlp.dense_h_to_4h", facts.intermediate, hidden, True)
        yield from _linear(f"{at}.mlp.dense_4h_to_h", hidden, facts.intermediate, True)

    head, tied = _head(facts, config, "gpt_neox.embed_in.weight", False)
    parameters = [
        ("gpt_neox.embed_in.weight", (facts.vocab, hidden)),
        *(named for index in range(layers) for named in layer(index)),
        *_norm("gpt_neox.final_layer_norm", hidden, bias=True),
        *head,
    ]
    return Decoder(tuple(parameters), tied, facts, config.get("max_position_embeddings"))


def _opt(config: _Config) -> Decoder:
    hidden, heads, layers = (
        config.number("hidden_size"),
        config.number("num_attention_heads"),
        config.number("num_hidden_layers"),
    )
    positions = config.number("max_position_embeddings")
    facts = DecoderFacts(
        layers=layers,
        hidden=hidden,
        intermediate=config.number("ffn_dim"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=config.number("vocab_size"),
        norm="layer",
        rotary=False,
        mlp="plain",
        activation=str(config.get("activation_function", "relu")),
        hidden_dropout=float(config.get("dropout", 0.1)),
        attention="math" if float(config.get("attention_dropout", 0.0)) > 0 else "flash",
    )
    bias = bool(config.get("enable_bias", True))
    affine = bool(config.get("layer_norm_elementwise_affine", True))
    width = int(config.get("word_embed_proj_dim", hidden))

    def norm(name: str) -> Iterator[Named]:
        return _norm(name, hidden, bias=True) if affine else iter(())

    def layer(index: int) -> Iterator[Named]:
        at = f"model.decoder.layers.{index}"
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _linear(f"{at}.self_attn.{projection}", hidden, hidden, bias)
        yield from norm(f"{at}.self_attn_layer_norm")
        yield from _linear(f"{at}.fc1", facts.intermediate, hidden, bias)
        yield from _linear(f"{at}.fc2", hidden, facts.intermediate, bias)
        yield from norm(f"{at}.final_layer_norm")

    projected = width != hidden
    final_norm = bool(config.get("do_layer_norm_before", True)) and not config.get("_remove_final_layer_norm", False)
    head, tied = _head(facts, config, "model.decoder.embed_tokens.weight", True)
    parameters = [
        ("model.decoder.embed_tokens.weight", (facts.vocab, width)),
        ("model.decoder.embed_positions.weight", (positions + 2, hidden)),
        *(_linear("model.decoder.project_out", width, hidden) if projected else ()),
        *(_linear("model.decoder.project_in", hidden, width) if projected else ()),
        *(norm("model.decoder.final_layer_norm") if final_norm else ()),
        *(named for index in range(layers) for named in layer(index)),
        *head,
    ]
    return Decoder(tuple(parameters), tied, facts, positions)


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

#: Every family whose shapes are known, by config.json's model_type.
FAMILIES: Final[dict[str, Callable[[_Config], Decoder]]] = {
    "llama": _llama_line(_Style()),
    "mistral": _llama_line(_Style(kv_heads_default=8, qkv_bias=False)),
    "qwen2": _llama_line(_Style(kv_heads_default=32, qkv_bias=True)),
    "qwen3": _llama_line(_Style(kv_heads_default=32, head_dim_default=128, qk_norm=True)),
    "smollm3": _llama_line(_Style(kv_heads_default=4, tied_by_default=True)),
    "gemma": _llama_line(_Style(kv_heads_default=16, head_dim_default=256, tied_by_default=True, norm="rms_fp32")),
    "gemma2": _llama_line(
        _Style(
            kv_heads_default=4,
            head_dim_default=256,
            tied_by_default=True,
            norm="rms_fp32",
            norms=_FOUR_NORMS,
            softcap=True,
        )
    ),
    "phi3": _llama_line(_Style(fused=True)),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}
