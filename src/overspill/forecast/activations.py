"""Activations, logits and scratch of one micro-batch on a CPU, phase by phase: what torch takes from malloc.

Each function is one named formula of docs/theory/memory.md; the names there are those in the docstrings here. Read
off the tensors that transformers 5.24 and torch 2.13 save (saved-tensor hooks) and off the profiler's memory events;
benchmarks/activations.py measures the peak in a fresh process and prints it beside these. It knows decoders with
torch's own cross-entropy on the CPU, and assumes that freed memory goes back to the kernel ([Note: Malloc]).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from overspill.model import DecoderFacts, ModelShape
from overspill.units import MiB

__all__ = [
    "KEPT_BY_ACTIVATION",
    "Batch",
    "Phase",
    "activation_phases",
    "boundary_bytes_per_token",
    "saved_bytes_per_token",
]

# [Note: Malloc] glibc (seen: 2.36) cannot give a freed aligned block to the next request of the same size, so a
# heap of activations grows to 1.2 to 1.4 times what is alive, and keeps it. A session therefore maps large blocks
# (M_MMAP_THRESHOLD) and trims when memory nears its limit (train/governor.py); `overspill train`, like the benchmark,
# also trims before each loss (train/malloc.py). Measured so, the peak at the loss is what is alive plus two runs of the
# heap that are partly in use. During the forward and a recomputation the holes are still there.
MMAP_THRESHOLD_NBYTES: Final = 8 * MiB
HEAP_RUNS: Final = 2
# [Note: Fitted] Three figures here are fitted and not derived, on the cases of benchmarks/activations.py that are not
# held out; docs/theory/memory.md (`fitted`) has what was seen, and the held-out cases.
#: Share of the saved activations that freed blocks between them add where the heap was not trimmed since, by bytes
#: per element. Seen: 0.39 to 0.50 in bf16, 0.12 to 0.24 in fp32.
HEAP_HOLES: Final = {2: 0.60, 4: 0.30}
#: Copies of the scores in fp32 beside what is kept, where they come from that heap; where they are mapped, the scores
#: (or their gradient) and the softmax's. Seen where they are most of the peak: 1.0 (math) and 1.9 (eager).
SCORE_COPIES_IN_HEAP: Final = 3
SCORE_COPIES: Final = 2
#: Fresh gradients are freed one by one and leave holes that the next does not fit: in layers' gradients, during a
#: layer's backward, and after all of them. Seen: up to 3.2 after all, wandering from step to step.
GRADIENT_HOLES_IN_LAYER: Final = 2
GRADIENT_HOLES_AFTER_LAYERS: Final = 4

_FP32: Final = 4
_INT64: Final = 8
# Tensors as wide as the MLP that an activation function keeps, its output included. relu keeps its output alone;
# functions written in Python (gelu_new and others) keep what each operation needs.
KEPT_BY_ACTIVATION: Final = {"relu": 1, "gelu": 2, "gelu_pytorch_tanh": 2, "silu": 2, "swish": 2}
KEPT_BY_PYTHON_ACTIVATION: Final = 5


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, and how it is run. element_nbytes: of weights and activations (bf16: 2, fp32: 4).

    logits_held: the caller keeps the model's output, and so the logits, alive during backward.
    """

    sequences: int
    seq_len: int
    element_nbytes: int
    checkpointing: bool = False
    logits_held: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len


@dataclass(frozen=True, slots=True)
class Phase:
    """What is alive at the worst instant of one phase, in bytes."""

    name: str
    activations_nbytes: int = 0
    logits_nbytes: int = 0
    scratch_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.activations_nbytes + self.logits_nbytes + self.scratch_nbytes


def norm_bytes_per_token(facts: DecoderFacts, element: int, width: int, rows: int = 1) -> int:
    """Formula `norm`: kept by one normalisation over ``width`` values in ``rows`` groups, its output left out."""
    if facts.norm == "layer":
        return element * width + 2 * element * rows  # the input; mean and rstd
    normed = _FP32 if facts.norm == "rms_fp32" else element
    return _FP32 * width + _FP32 * rows + normed * width  # the input in fp32; rsqrt; the normed value


def scores_bytes_per_token(facts: DecoderFacts, element: int, seq_len: int) -> int:
    """Formula `scores`: what attention keeps of each pair of tokens; nothing in the flash kernel."""
    pairs = facts.heads * seq_len
    if facts.attention == "math":
        return _FP32 * 3 * pairs  # softmax, dropout mask and dropped weights, all in fp32
    if facts.attention == "eager":
        cast = element if element != _FP32 else 0  # the weights, where they are not the softmax itself
        return (element + _FP32 + cast) * pairs  # capped scores; softmax in fp32
    return 0


def attention_bytes_per_token(facts: DecoderFacts, element: int, seq_len: int) -> int:
    """Formula `attention`: kept by projections and attention, the input of the projections left out."""
    query, kv = facts.query_width, facts.kv_width
    scores = scores_bytes_per_token(facts, element, seq_len)
    norms = 0
    if facts.qk_norm:
        norms = norm_bytes_per_token(facts, element, query, facts.heads)
        norms += norm_bytes_per_token(facts, element, kv, facts.kv_heads)
    if facts.attention == "math":
        # q, k, v in fp32 with k, v repeated; the output.
        return norms + _FP32 * 3 * query + scores + element * query
    if facts.attention == "eager":
        # q, repeated k and v, output.
        return norms + element * 4 * query + scores
    projected = element * (query + 2 * kv)
    if facts.fused_qkv and facts.rotary:
        # v keeps the whole projection alive; rotated q and k; a copy of the output, whose layout follows q.
        projected += element * (query + kv) + element * query
    return norms + projected + element * query + _FP32 * facts.heads


def mlp_bytes_per_token(facts: DecoderFacts, element: int) -> int:
    """Formula `mlp`: kept by the MLP, its input left out."""
    if facts.mlp != "plain":
        return element * 4 * facts.intermediate  # gate, act(gate), up, product
    return element * KEPT_BY_ACTIVATION.get(facts.activation, KEPT_BY_PYTHON_ACTIVATION) * facts.intermediate


def saved_bytes_per_token(facts: DecoderFacts, element: int, seq_len: int) -> int:
    """Formula `layer`: what one decoder layer keeps for its backward, without checkpointing."""
    norms = facts.norms_per_layer * norm_bytes_per_token(facts, element, facts.hidden)
    if facts.norm == "layer" and facts.parallel_residual:
        norms -= element * facts.hidden  # both norms have the same input
    inputs = 2 * element * facts.hidden  # of the attention's and of the MLP's projections
    masks = 2 * element * facts.hidden if facts.hidden_dropout > 0 else 0
    attention = attention_bytes_per_token(facts, element, seq_len)
    return norms + inputs + masks + attention + mlp_bytes_per_token(facts, element)


def boundary_bytes_per_token(facts: DecoderFacts, element: int) -> int:
    """Formula `boundary`: what a checkpointed layer keeps: its input."""
    return element * facts.hidden


def scores_are_mapped(facts: DecoderFacts, batch: Batch) -> bool:
    """Whether each block of scores is mapped on its own, and so leaves no holes; see [Note: Malloc].

    At the threshold itself they count as the heap's: so high was the peak that was seen there (gpt2-512-fp32).
    """
    if facts.attention == "flash":
        return False
    element = batch.element_nbytes if facts.attention == "eager" else _FP32
    return element * facts.heads * batch.seq_len * batch.tokens > MMAP_THRESHOLD_NBYTES


def score_scratch_bytes_per_token(facts: DecoderFacts, batch: Batch) -> int:
    """Formula `score scratch`: copies of the scores beside the kept ones, in the forward and in a layer's backward."""
    if facts.attention == "flash":
        return 0
    copies = SCORE_COPIES if scores_are_mapped(facts, batch) else SCORE_COPIES_IN_HEAP
    return copies * _FP32 * facts.heads * batch.seq_len


def layer_scratch_bytes_per_token(facts: DecoderFacts, batch: Batch) -> int:
    """Formula `layer scratch`: gradients of activations alive at once in one layer's backward, an upper bound."""
    element = batch.element_nbytes
    wide = 3 if facts.mlp != "plain" else KEPT_BY_ACTIVATION.get(facts.activation, KEPT_BY_PYTHON_ACTIVATION)
    mlp = element * (wide * facts.intermediate + 2 * facts.hidden)
    norm = 4 * _FP32 * facts.hidden + 3 * element * facts.hidden
    attention = element * (4 * facts.query_width + 2 * facts.hidden) + score_scratch_bytes_per_token(facts, batch)
    return max(mlp, norm, attention)


def activation_phases(shape: ModelShape, batch: Batch) -> tuple[Phase, ...]:
    """Formula `phases`: the worst instant of each phase of a micro-batch, and of an evaluation.

    Needs a shape whose decoder is known; asserts it.
    """
    facts = shape.decoder
    assert facts is not None, "the decoder of this module is not known"
    element, tokens, seq_len = batch.element_nbytes, batch.tokens, batch.seq_len
    layer = saved_bytes_per_token(facts, element, seq_len) * tokens
    kept = boundary_bytes_per_token(facts, element) * tokens if batch.checkpointing else layer
    head = (norm_bytes_per_token(facts, element, facts.hidden) + element * facts.hidden) * tokens
    fixed = _fixed_nbytes(facts, batch)
    saved = facts.layers * kept + head + fixed
    # Blocks that are mapped on their own leave no holes.
    small = element * facts.hidden * tokens < MMAP_THRESHOLD_NBYTES
    holes = HEAP_HOLES[element] if small else 0.0
    mapped = scores_bytes_per_token(facts, element, seq_len) * tokens if scores_are_mapped(facts, batch) else 0
    in_heap = kept if batch.checkpointing else layer - mapped  # of what a layer keeps
    recomputed = layer + round(holes * (layer - mapped)) if batch.checkpointing else 0
    scores = score_scratch_bytes_per_token(facts, batch) * tokens
    forward = Phase("forward", saved + recomputed, 0, round(holes * facts.layers * in_heap) + scores + _heap_nbytes())
    logit = tokens * facts.vocab

    capped = element * logit if facts.logits_softcap else 0
    held = (element * logit if batch.logits_held else 0) + capped
    # Loss: log_softmax, the loss's gradient and log_softmax's gradient in fp32 at once; before that, in the forward,
    # logits, their fp32 copy and log_softmax, which is less.
    freed_logits = element * logit if element * logit < MMAP_THRESHOLD_NBYTES else 0
    loss = Phase("loss", saved, 3 * _FP32 * logit + held, freed_logits + _heap_nbytes())

    head_weight = element * _numel_of_head(shape) if _head_trained(shape) else 0
    into_head = max((_FP32 + element) * logit, element * logit + head_weight + element * facts.hidden * tokens)
    head_backward = Phase("backward of the head", saved, held, into_head + _heap_nbytes())

    # From here on a tied head's gradient waits for that of the embeddings.
    waiting = head_weight if shape.tied_head else 0
    layer_weights = element * _largest_layer(shape)
    layer_scratch = layer_scratch_bytes_per_token(facts, batch) * tokens
    layer_backward = Phase(
        "backward of a layer",
        facts.layers * kept + recomputed + fixed,
        held - capped,
        layer_scratch + GRADIENT_HOLES_IN_LAYER * layer_weights + waiting + _heap_nbytes(),
    )
    embedding = element * _numel_of_embedding(shape)
    # The sum with a tied head's gradient is a third tensor. What the layers freed is still the heap's, untrimmed.
    summed = embedding if waiting else 0
    again = recomputed - mapped if batch.checkpointing else 0
    freed = facts.layers * in_heap + again + GRADIENT_HOLES_AFTER_LAYERS * layer_weights if small else 0
    embedding_backward = Phase(
        "backward of the embeddings",
        fixed,
        held - capped,
        embedding + waiting + summed + freed + 2 * element * facts.hidden * tokens + _heap_nbytes(),
    )
    evaluation = Phase(
        "evaluation",
        layer + fixed,
        (element if element != _FP32 else 0) * logit + 2 * _FP32 * logit + capped,
        _heap_nbytes(),
    )
    return (forward, loss, head_backward, layer_backward, embedding_backward, Phase("update"), evaluation)


def _heap_nbytes() -> int:
    """Formula `heap`: see [Note: Malloc]."""
    return HEAP_RUNS * MMAP_THRESHOLD_NBYTES


def _fixed_nbytes(facts: DecoderFacts, batch: Batch) -> int:
    """Ids, labels, shifted labels and positions; cos and sin with their fp32 sources; the embeddings' dropout mask."""
    ids = 4 * _INT64 * batch.tokens
    rotary = 2 * (batch.element_nbytes + 2 * _FP32) * batch.seq_len * facts.head_dim if facts.rotary else 0
    mask = batch.element_nbytes * facts.hidden * batch.tokens if facts.hidden_dropout > 0 else 0
    pairs = batch.seq_len * batch.seq_len * batch.element_nbytes if facts.attention != "flash" else 0
    return ids + rotary + mask + pairs


def _head_trained(shape: ModelShape) -> bool:
    head = shape.parameters[-1]
    owner = head.tied_to or head.name
    return any(p.name == owner and p.trainable for p in shape.owned)


def _numel_of_head(shape: ModelShape) -> int:
    assert shape.decoder is not None
    return shape.decoder.vocab * shape.decoder.hidden


def _numel_of_embedding(shape: ModelShape) -> int:
    return max((p.numel for p in shape.owned if p.trainable and p.block == 0), default=0)


def _largest_layer(shape: ModelShape) -> int:
    """Formula `layer gradients`: a layer's gradients are one by one handed out as fresh tensors and freed."""
    layers = [block.parameter_numel for block in shape.blocks() if block.name not in ("embeddings", "head")]
    return max(layers, default=0)
