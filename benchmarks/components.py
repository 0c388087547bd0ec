"""Kernel-level memory that Liger-Kernel published, of its own kernels and torch's, against the forecast's tape.

Each kernel is run as the published benchmark does it (benchmark/scripts of linkedin/Liger-Kernel): ten times, so that
gradients of the round before are there; with retain_graph, so that nothing saved goes while backward runs; the median
of max_memory_allocated. What a layer of the forecast does is called, not copied; the compositions written here (partial
sums of norms, rotary embedding in place) follow the kernel's published autograd function, named beside each.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from score_rows import BadTable

from overspill.catalog.overheads import cublas_workspace
from overspill.forecast.layers import head, parts
from overspill.forecast.layers.parts import Layer
from overspill.forecast.layers.style import Style
from overspill.forecast.tape import Tape, Tensor, ops
from overspill.forecast.tape.core import Node
from overspill.model.facts import LinearShape
from overspill.units import MiB

__all__ = ["INFERRED", "Kernel", "score"]

COLUMNS = ("kernel", "provider", "mode", "x_name", "x_value", "memory_mb", "config", "gpu", "version")
FP32, BF16, INT64 = 4, 2, 8
#: What was not read in code of the release that was measured, but concluded from its figures.
INFERRED = (
    "Liger's RMS norm 0.2 keeps the weight's gradient by rows in the weight's dtype",
    "Liger's layer norm 0.6 has no partial sums",
    "the benchmark of the fused linear loss builds both heads, Liger's and torch's",
    "the gradient of Liger's cross-entropy and of its RMS norm stays where it was written, as .grad",
)
#: Streaming multiprocessors: NVIDIA's architecture papers for A100 and H100 (SXM).
_MULTIPROCESSORS = {"A100": 108, "H100": 132}
_CAPABILITY = {"A100": "8.0", "H100": "9.0"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One published figure. forecast_mib: None where the kernel is not known, with the reason."""

    kernel: str
    provider: str
    mode: str
    x_name: str
    x_value: float
    version: str
    measured_mib: float
    forecast_mib: float | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        return None if self.forecast_mib is None else self.forecast_mib / self.measured_mib - 1


@dataclass(frozen=True, slots=True)
class Bench:
    """What a benchmark is told: sizes by name, and where it ran."""

    liger: bool
    forward_only: bool
    sizes: dict[str, int]
    dtype: int
    version: tuple[int, ...]
    multiprocessors: int
    workspace_nbytes: int

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]


def score(path: str | Path) -> list[Kernel]:
    """Every row of a components file. Raises BadTable."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            rows = list(reader)
    except OSError as error:
        raise BadTable(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadTable(f"{path} is not a CSV file in UTF-8: {error}.") from None
    if missing:
        raise BadTable(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}.")
    if not rows:
        raise BadTable(f"{path} has a header and no rows.")
    return [_scored(row) for row in rows]


def _scored(row: dict[str, str]) -> Kernel:
    names = {key: row[key] for key in ("kernel", "provider", "mode", "x_name", "version")}
    measured, x = float(row["memory_mb"]), float(row["x_value"])
    run = _KERNELS.get(row["kernel"])
    if run is None or row["provider"] not in ("liger", "huggingface"):
        reason = f"no composition for {row['kernel']} of {row['provider']}"
        return Kernel(**names, x_value=x, measured_mib=measured, forecast_mib=None, reason=reason)
    return Kernel(**names, x_value=x, measured_mib=measured, forecast_mib=run(_bench(row)) / MiB)


def _bench(row: dict[str, str]) -> Bench:
    config: dict[str, Any] = json.loads(row["config"])
    sizes = {key: int(value) for key, value in config.items() if isinstance(value, int)}
    sizes[row["x_name"]] = int(float(row["x_value"]))
    card = next((name for name in _MULTIPROCESSORS if name in row["gpu"]), "A100")
    return Bench(
        liger=row["provider"] == "liger",
        forward_only=row["mode"] == "forward" and row["kernel"] in _TAKES_A_MODE,
        sizes=sizes,
        dtype=BF16 if "bfloat16" in str(config.get("dtype", "")) else FP32,
        version=tuple(int(part) for part in row["version"].split(".")),
        multiprocessors=_MULTIPROCESSORS[card],
        workspace_nbytes=cublas_workspace(capability=_CAPABILITY[card]).high_nbytes,
    )


def _peak(
    tape: Tape,
    held: Sequence[Tensor],
    forward: Callable[[], Tensor],
    gradient: Callable[[Tensor], Tensor],
    *,
    forward_only: bool,
) -> int:
    """The highest instant of a step. held: what is there before it; gradient: of the output, made or given."""
    assert held
    tape.memory.mark()
    out = forward()
    if forward_only:
        return tape.memory.peak_nbytes
    kept = _saved(out)  # retain_graph
    given = gradient(out)  # Engine::execute holds it until backward is done
    tape.backward(out, given)
    del kept, given
    return tape.memory.peak_nbytes


def _saved(root: Tensor) -> list[Tensor]:
    waiting: list[object] = [root.node]
    kept: list[Tensor] = []
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or id(node) in seen:
            continue
        seen.add(id(node))
        kept += [Tensor(one.storage, one.numel, one.itemsize) for one in node.saved]
        waiting += list(node.inputs)
    return kept


def _one(tape: Tape) -> Callable[[Tensor], Tensor]:
    return lambda out: tape.new(1, FP32)


def _cross_entropy(bench: Bench) -> int:
    """Logits in fp32, a leaf. Liger writes the gradient over them, so that .grad is the same storage."""
    tape = Tape()
    rows = bench["B"] * bench["T"]
    logits = tape.leaf(rows * bench["V"], FP32, requires_grad=True)
    held = [logits, tape.new(rows, INT64)]
    if bench.liger:
        held.append(tape.new(rows, FP32))  # loss_1d
        return _peak(tape, held, lambda: head._over_itself(tape, logits), _one(tape), forward_only=False)
    held.append(tape.new(logits.numel, FP32))  # .grad of the round before
    return _peak(tape, held, lambda: head._cross_entropy(tape, logits), _one(tape), forward_only=False)


def _fused_linear_cross_entropy(bench: Bench) -> int:
    """Input and head in bf16. Both modules, Liger's and torch's, are built (inferred): two heads."""
    tape = Tape()
    rows, hidden, vocab = bench["BT"], bench["H"], bench["V"]
    x = tape.leaf(rows * hidden, bench.dtype, requires_grad=True)
    held = [x, tape.new(rows * hidden, bench.dtype), tape.new(rows, INT64), *_workspaces(tape, bench)]
    held += [tape.new(hidden * vocab, bench.dtype) for _ in range(3)]  # two heads, one .grad
    layer = _layer(tape, bench, rows, {"head": LinearShape("head", hidden, vocab)})
    if bench.liger:
        return _peak(tape, held, lambda: head._fused_linear(layer, x, vocab), _one(tape), forward_only=False)

    def forward() -> Tensor:
        logits = ops.linear(tape, x, layer.parameter("head.weight", hidden * vocab), rows * vocab)
        return head._cross_entropy(tape, logits)

    # y.backward() without retain_graph
    tape.memory.mark()
    out = forward()
    tape.backward(out, tape.new(1, FP32))
    return tape.memory.peak_nbytes


def _gated(bench: Bench) -> int:
    """LlamaMLP, or Liger's: gate, up, the activation's product, down; all in bf16."""
    tape = Tape()
    hidden, inner = bench["hidden_size"], bench["intermediate_size"]
    rows = bench.sizes.get("B", bench.sizes.get("bsz", 1)) * bench["T"]
    names = {name: name for name in ("gate", "up", "down")}
    shapes = {
        "gate": LinearShape("gate", hidden, inner), "up": LinearShape("up", hidden, inner),
        "down": LinearShape("down", inner, hidden),
    }  # fmt: skip
    x = tape.leaf(rows * hidden, bench.dtype, requires_grad=True)
    held = [x, tape.new(3 * hidden * inner, bench.dtype), *_workspaces(tape, bench)]
    if not bench.forward_only:
        held += [tape.new(rows * hidden, bench.dtype), tape.new(3 * hidden * inner, bench.dtype)]  # .grad
    layer = _layer(tape, bench, rows, shapes, mlp="recompute" if bench.liger else "python")
    return _peak(
        tape, held, lambda: parts.gated_mlp(layer, x, names, inner), lambda out: tape.new(out.numel, out.itemsize),
        forward_only=bench.forward_only,
    )  # fmt: skip


def _rms_norm(bench: Bench) -> int:
    """x in bf16, weights in fp32: two modules of one vector each. Liger 0.2: y and dx as x, the latter over dy
    (LigerRMSNormFunction), dW as x in the weight's dtype (inferred) and then summed over rows."""
    tape = Tape()
    numel = bench["M"] * bench["H"]
    x = tape.leaf(numel, bench.dtype, requires_grad=True)
    dy = tape.new(numel, bench.dtype)
    held = [x, dy, *(tape.new(bench["H"], FP32) for _ in range(3))]
    if bench.liger:
        held.append(tape.new(numel, bench.dtype))  # y
        held += [tape.new(bench["M"], FP32), tape.new(numel, FP32), tape.new(bench["H"], FP32)]  # rstd, dW, its sum
        held.append(tape.scratch(_column_sum_nbytes(bench["M"], bench["H"], FP32, bench.multiprocessors)))
        return tape.memory.peak_nbytes
    held.append(tape.new(numel, bench.dtype))
    layer = _layer(tape, bench, bench["M"], {}, norm="python", weight=FP32)
    # dy is bf16 and the output fp32: autograd casts it
    return _peak(
        tape, held, lambda: parts.norm(layer, x, "norm", "rms", bench["H"]),
        lambda out: dy if out.itemsize == dy.itemsize else tape.new(numel, out.itemsize), forward_only=False,
    )  # fmt: skip


def _column_sum_nbytes(rows: int, columns: int, itemsize: int, multiprocessors: int) -> int:
    """What torch sets aside to sum a matrix over its rows when blocks share a column: setReduceConfig and
    ReduceConfig::global_memory_size of aten/src/ATen/native/cuda/Reduce.cuh, with vectors of four outputs."""
    vector, threads, warp = 4, 512, 32
    height = (threads // vector) // warp
    each = -(-rows // height)
    grid = -(-columns // (vector * warp))
    target = multiprocessors * (2048 // (warp * height))
    if each < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-each // 16)), -(-each // 256))
    return itemsize * columns * blocks * warp * vector if blocks > 1 else 0


def _layer_norm(bench: Bench) -> int:
    """All in fp32, two modules with weight and bias. Liger before 0.6 keeps a row of partial sums for each
    multiprocessor and vector (layer_norm_backward); 0.6 shows none (inferred)."""
    tape = Tape()
    rows, width = bench["M"], bench["N"]
    x = tape.leaf(rows * width, bench.dtype, requires_grad=True)
    dy = tape.new(rows * width, bench.dtype)
    held = [x, dy, tape.new(rows * width, bench.dtype)]
    held += [tape.new(width, FP32) for _ in range(4 + 2 + 1)]  # weights and biases; their .grad; the bias's new one
    if bench.liger and bench.version < (0, 6):
        held += [tape.new(bench.multiprocessors * width, FP32) for _ in range(2)]
    layer = _layer(tape, bench, rows, {}, norm="python", weight=FP32)
    return _peak(
        tape, held, lambda: parts.norm(layer, x, "norm", "layer", width), lambda out: dy, forward_only=False
    )  # fmt: skip


def _rope(bench: Bench) -> int:
    """q and k with their gradients, cos and sin. Liger rotates in place, forward and backward."""
    tape = Tape()
    hidden = bench.sizes.get("hidden_size", bench.sizes.get("H", 0))
    tokens = bench.sizes.get("seq_len", bench.sizes.get("T", 0))
    head_dim = hidden // bench["num_q_heads"]
    q_numel, k_numel = tokens * hidden, tokens * head_dim * bench["num_kv_heads"]
    q, k = (tape.leaf(numel, bench.dtype, requires_grad=True) for numel in (q_numel, k_numel))
    dq, dk = tape.new(q_numel, bench.dtype), tape.new(k_numel, bench.dtype)
    held = [q, k, dq, dk, tape.new(tokens, INT64), *(tape.new(tokens * head_dim, bench.dtype) for _ in range(2))]
    held.append(tape.scratch(bench.workspace_nbytes))  # cos and sin come from one small matmul
    layer = _layer(tape, bench, tokens, {}, rope="in_place" if bench.liger else "python")
    if bench.liger:
        assert parts._rotate(layer, q) is q
        return tape.memory.peak_nbytes

    def forward() -> Tensor:
        turned = parts._rotate(layer, q), parts._rotate(layer, k)

        def backward(tape: Tape, grad: Tensor) -> tuple[Tensor, Tensor]:
            return dq, dk

        return tape.record(turned, turned, backward, tape.new(1, FP32))

    return _peak(tape, held, forward, _one(tape), forward_only=False)


def _workspaces(tape: Tape, bench: Bench) -> list[Tensor]:
    """cuBLAS keeps one for the thread of the forward and one for autograd's."""
    return [tape.scratch(bench.workspace_nbytes) for _ in range(2)]


def _layer(
    tape: Tape, bench: Bench, rows: int, linears: dict[str, LinearShape], weight: int = 0, **style: Any
) -> Layer:
    return Layer(
        tape=tape,
        style=Style(residual=bench.dtype, compute=bench.dtype, weight=weight or bench.dtype, **style),
        tokens=rows,
        seq_len=rows,
        trained=lambda name: True,
        targeted=lambda name: False,
        linears=linears,
        keeps_grads=False,  # .grad of the round before is held: the new one is added to it and goes
    )


_KERNELS: dict[str, Callable[[Bench], int]] = {
    "cross_entropy": _cross_entropy,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "geglu": _gated,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _gated,
}
#: Of the others the published memory is that of a whole step, whatever the mode says.
_TAKES_A_MODE = ("geglu", "swiglu")
