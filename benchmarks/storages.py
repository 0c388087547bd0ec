"""Bytes that real modules have alive, read on the CPU: what tests/data/storages.toml was made with.

The profiler reports every allocation and release; sizes are rounded up to 512 bytes as the caching allocator of CUDA
does. (A TorchDispatchMode would change what it watches: under one, autograd adds gradients out of place.)
Run `python benchmarks/storages.py torchtune` where torchtune (0.6.1), torchao (0.9.0) and torch (2.13.0) are installed,
or `python benchmarks/storages.py fsdp2` with torch alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_ROUNDING_NBYTES = 512


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ROUNDING_NBYTES) * _ROUNDING_NBYTES


def alive(
    phases: Iterable[tuple[str, Callable[[], object]]], marks: tuple[str, ...] = ()
) -> dict[str, tuple[int, int]]:
    """Run the phases one after the other. For each: (highest, last) bytes alive, above those before the first.

    marks: names of profiled ranges; what is alive when each begins for the last time comes twice.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for name, run in phases:
            with record_function(f"phase {name}"):
                run()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    spans = [(one.start_ns(), one.end_ns(), one.name()[6:]) for one in events if one.name().startswith("phase ")]
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    result: dict[str, tuple[int, int]] = {}
    total = place = 0
    for begin, end, name in sorted(spans):
        highest = total
        while place < len(changes) and changes[place][0] <= end:
            moment, nbytes = changes[place]
            place += 1
            if moment >= begin or place > 1:
                total += _rounded(nbytes) if nbytes > 0 else -_rounded(-nbytes)
                highest = max(highest, total)
        result[name] = (highest, total)
    for name in marks:
        moment = max(one.start_ns() for one in events if one.name() == name)
        here = sum(_rounded(nbytes) if nbytes > 0 else -_rounded(-nbytes) for when, nbytes in changes if when < moment)
        result[name] = (here, here)
    return result


@contextmanager
def bf16_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _step(model: torch.nn.Module, ids: torch.Tensor, loss_of: Any) -> dict[str, int]:
    """Kept after the loss, the highest instants of forward and backward, and the gradients that stay."""
    box: list[torch.Tensor] = []
    seen = alive((("forward", lambda: box.append(loss_of(model, ids))), ("backward", lambda: box.pop().backward())))
    return {"forward": seen["forward"][0], "kept": seen["forward"][1], "backward": seen["backward"][0],
            "left": seen["backward"][1]}  # fmt: skip


def torchtune() -> None:
    """Llama 3.2's decoder of torchtune in small: tied embeddings; plain and chunked cross-entropy; LoRA and NF4."""
    from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    shape = {"vocab_size": 8192, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 512,
             "max_seq_len": 256, "intermediate_dim": 1024}  # fmt: skip
    ids = torch.randint(0, 8192, (2, 256))

    def plain(model: Any, ids: Any) -> Any:
        logits = model(ids).reshape(-1, 8192)
        loss = torch.nn.functional.cross_entropy(logits, ids.reshape(-1))
        del logits
        return loss

    chunked = CEWithChunkedOutputLoss(num_output_chunks=8)

    def in_chunks(model: Any, ids: Any) -> Any:
        logits = model(ids)
        loss = chunked(logits, ids)
        del logits
        return loss

    for name, loss_of, chunks in (("plain", plain, 0), ("chunked", in_chunks, 8)):
        with bf16_default():
            model = llama3_2(**shape)
        model.set_num_output_chunks(chunks) if chunks else None
        print(f"[torchtune.full_{name}]", _step(model, ids, loss_of))
    from torchao.dtypes.nf4tensor import linear_nf4, to_nf4

    weight = to_nf4(torch.randn(1024, 1024, dtype=torch.bfloat16))
    x, box = torch.randn(8, 1024, dtype=torch.bfloat16, requires_grad=True), list[torch.Tensor]()
    seen = alive((("forward", lambda: box.append(linear_nf4(x, weight))), ("backward", partial(_backward_of_sum, box))))
    print("[torchtune.nf4_linear]", {"numel": 2**20, **{name: found[0] for name, found in seen.items()}})
    for quantised in (False, True):
        with bf16_default():
            model = lora_llama3_2(
                ["q_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, lora_rank=16, lora_alpha=16,
                quantize_base=quantised, **shape,
            )  # fmt: skip
        set_trainable_params(model, get_adapter_params(model))
        model.set_num_output_chunks(8)
        print(f"[torchtune.{'qlora' if quantised else 'lora'}_chunked]", _step(model, ids, in_chunks))


class _Block(torch.nn.Module):
    """Four square matrices with nothing between them that keeps much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class _Stack(torch.nn.Module):
    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, width)
        self.layers = torch.nn.ModuleList(_Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().sum()


def _forward(model: torch.nn.Module, ids: torch.Tensor, box: list[torch.Tensor]) -> None:
    box.append(model(ids))


def _backward(box: list[torch.Tensor]) -> None:
    box.pop().backward()


def _backward_of_sum(box: list[torch.Tensor]) -> None:
    box.pop().sum().backward()


def _fsdp(kind: str, ranks: int = 8) -> None:
    """One rank of several, whose collectives do nothing (torch's fake process group): gloo makes copies of its own."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    width, layers, vocab = 512, 6, 1024
    model: torch.nn.Module = _Stack(width, layers, vocab)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        names = tuple(f"FSDP::post_backward_accumulate (layers.{number})" for number in reversed(range(layers)))
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({_Block}), use_orig_params=True, device_id=torch.device("cpu"),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )  # fmt: skip
        names = ()
    ids = torch.randint(0, vocab, (1, 8))
    box: list[torch.Tensor] = []
    for _ in range(2):
        box: list[torch.Tensor] = []
        phases = (("forward", partial(_forward, model, ids, box)), ("backward", partial(_backward, box)))
        seen = alive(phases, names)
        model.zero_grad()
    unit, root = 4 * width * width, 2 * vocab * width
    figures = {name: found[0] for name, found in seen.items()}
    print(f"[{kind}]", {"unit_numel": unit, "root_numel": root, "ranks": ranks, **figures})


def fsdp2() -> None:
    """A stack of equal units: what one rank has alive, activations being next to nothing."""
    _fsdp("fsdp2")


def fsdp1() -> None:
    """As `fsdp2`, with FullyShardedDataParallel."""
    _fsdp("fsdp1")


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
