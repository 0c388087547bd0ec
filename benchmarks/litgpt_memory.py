"""Measure what LitGPT's own modules keep: one block and the model's end, for tests/unit/litgpt_measured.json.

Needs litgpt and lightning, which the project does not depend on; run it in an environment of its own:
``python benchmarks/litgpt_memory.py [shape …] > out.json`` prints one version's cases. A dispatch mode watches every
storage that an operation makes, on the CPU in bf16. Three operations are stand-ins for what a GPU runs: dropout is
native_dropout, which keeps one byte an element; attention lays its result out as its queries and holds what
flash-attn 2 holds (csrc/flash_attn/flash_api.cpp); the 4-bit matmul holds its input as bitsandbytes 0.42's MatMul4Bit.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"name": "Llama-2-7b-hf", "n_embd": 512, "n_head": 8, "n_query_groups": 8, "intermediate_size": 1376},
    "llama-grouped": {"name": "Llama-2-70b-hf", "n_embd": 512, "n_head": 8, "n_query_groups": 2,
                      "intermediate_size": 1792},
    "phi": {"name": "phi-1_5", "n_embd": 512, "n_head": 8, "n_query_groups": 8, "intermediate_size": 2048,
            "rotary_percentage": 0.5},
    "falcon": {"name": "falcon-7b", "n_embd": 512, "n_head": 8, "n_query_groups": 1, "intermediate_size": 2048},
    "gemma": {"name": "Gemma-2b", "n_embd": 512, "n_head": 8, "n_query_groups": 1, "intermediate_size": 2048,
              "head_size": 64},
    "stablelm": {"name": "stablelm-base-alpha-3b", "n_embd": 512, "n_head": 8, "n_query_groups": 8,
                 "intermediate_size": 2048},
}  # fmt: skip
SHAPES["gemma2"] = {"name": "Gemma-2-2b", "n_embd": 512, "n_head": 8, "n_query_groups": 4, "intermediate_size": 2048,
                    "head_size": 64}  # fmt: skip
VOCABULARY, LENGTH, RANK = 8192, 512, 8
CASES = [
    (shape, method, batch)
    for shape in SHAPES
    for method in ("lora_qv", "lora_all", "adapter", "adapter_v2", "full", "nf4")
    for batch in ((1, 2) if shape in ("llama", "llama-grouped") else (1,))
]


class Watch(TorchDispatchMode):
    """Live bytes of storages made under it, rounded as torch's CUDA allocator counts them, and their highest total."""

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.ignored, self.total, self.peak = ignored, 0, 0

    def settle(self) -> int:
        for key, (reference, nbytes) in list(self.live.items()):
            if reference.expired():
                del self.live[key]
                self.total -= nbytes
        return self.total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.settle()
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.ignored or storage._cdata in self.live:
            return
        nbytes = -(-storage.nbytes() // 512) * 512
        self.live[storage._cdata] = (StorageWeakRef(storage), nbytes)
        self.total += nbytes
        self.peak = max(self.peak, self.total)


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, _, lse = ctx.saved_tensors
        held = torch.empty(q.shape, dtype=torch.float32), torch.empty_like(lse)
        result = torch.empty_like(q), torch.empty(k.shape, dtype=k.dtype), torch.empty(v.shape, dtype=v.dtype)
        del held
        return result


class MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.tensors = (x, weight)
        return torch.nn.functional.linear(x, weight.half().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.tensors[1].half().to(grad.dtype), None, None


def _quantise(model: torch.nn.Module) -> None:
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.weight.data = module.weight.data.float()  # so that .half().to(bf16) makes both copies
            module.forward = lambda x, own=module: MatMul4Bit.apply(x, own.weight, own.bias)  # type: ignore[method-assign]


def _model(shape: str, method: str) -> Any:
    over = {key: value for key, value in SHAPES[shape].items() if key != "name"}
    over.update(n_layer=1, padded_vocab_size=VOCABULARY, block_size=LENGTH)
    name = SHAPES[shape]["name"]
    everything = method == "lora_all"
    with torch.device("cpu"):
        if method in ("lora_qv", "lora_all", "nf4"):
            from litgpt.lora import GPT, Config
            from litgpt.lora import mark_only_lora_as_trainable as mark

            over.update(lora_r=RANK, lora_alpha=16, lora_dropout=0.05, lora_query=True, lora_value=True)
            over.update({f"lora_{part}": everything for part in ("key", "projection", "mlp", "head")})
        elif method == "adapter":
            from litgpt.adapter import GPT, Config
            from litgpt.adapter import mark_only_adapter_as_trainable as mark

            over["adapter_start_layer"] = 0
        elif method == "adapter_v2":
            from litgpt.adapter_v2 import GPT, Config
            from litgpt.adapter_v2 import mark_only_adapter_v2_as_trainable as mark

            over["adapter_start_layer"] = 0
        else:
            from litgpt.config import Config
            from litgpt.model import GPT

            mark = None
        model = GPT(Config.from_name(name, **over))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.to(torch.bfloat16)
    if mark is not None:
        mark(model)
    model.cos, model.sin = model.rope_cache()
    model.train()
    if method == "nf4":
        _quantise(model)
    return model


def measure(shape: str, method: str, batch: int) -> dict[str, Any]:
    import lightning
    from litgpt.utils import chunked_cross_entropy

    model = _model(shape, method)
    hidden = model.config.n_embd
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-true")
    wrapped = fabric.setup_module(model, move_to_device=False)
    ignored = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    result: dict[str, Any] = {"shape": shape, "method": method, "batch": batch}
    cos, sin = model.cos[:LENGTH], model.sin[:LENGTH]
    if _batched_tables():
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    block = model.transformer.h[0]
    for recorded in (False, True):
        gc.collect()
        with Watch(ignored) as watch, nullcontext() if recorded else torch.no_grad():
            # no leaf, which autograd would hold until backward: in a stack it is the result of the block before
            leaf = torch.zeros(1, dtype=torch.bfloat16, requires_grad=recorded)
            x = torch.zeros(batch, LENGTH, hidden, dtype=torch.bfloat16) + leaf
            watch.settle()
            watch.peak = watch.settle()
            out = block(x, cos, sin)
            result["recorded" if recorded else "forward"] = watch.peak
            if recorded:
                edge, sizes = GradientEdge(out.grad_fn, 0), out.shape
                del out, x  # the output is the next block's input, and counted there
                result["kept"] = watch.settle()
                grad = torch.ones(sizes, dtype=torch.bfloat16)
                watch.peak = watch.settle()
                torch.autograd.backward([edge], [grad])
                result["backward"] = watch.peak
                del grad, edge
            else:
                del out, x
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    ids = torch.randint(0, 100, (batch, LENGTH))
    with Watch(ignored) as watch:
        start: list[int] = []
        model.transformer.ln_f.register_forward_pre_hook(lambda module, args: start.append(watch.settle()))
        stack = batch * LENGTH * hidden * 2
        if method == "full":
            logits = wrapped(ids)
            loss = chunked_cross_entropy(logits[..., :-1, :], ids[..., 1:])
        else:
            logits = wrapped(ids, lm_head_chunk_size=128)
            logits[-1] = logits[-1][..., :-1, :]
            loss = chunked_cross_entropy(logits, ids[..., 1:])
        result["head_kept"] = watch.settle() - start[0] + stack
        watch.peak = watch.settle()
        loss.backward()
        result["head_backward"] = watch.peak - start[0] + stack
    return result


def _batched_tables() -> bool:
    return tuple(int(part) for part in importlib.metadata.version("litgpt").split(".")[:3]) >= (0, 5, 5)


def main() -> None:
    torch.manual_seed(0)
    scale = torch.nn.functional
    scale.dropout = lambda x, p=0.5, training=True, inplace=False: torch.native_dropout(x, p, training)[0]  # type: ignore[assignment]
    scale.scaled_dot_product_attention = _attention  # type: ignore[assignment]
    from litgpt.config import name_to_config

    wanted = sys.argv[1:] or [shape for shape in SHAPES if SHAPES[shape]["name"] in name_to_config]
    cases = [measure(*case) for case in CASES if case[0] in wanted]
    versions = {name: importlib.metadata.version(name) for name in ("litgpt", "lightning", "torch")}
    settings = {"vocabulary": VOCABULARY, "length": LENGTH, "rank": RANK}
    print(json.dumps({**versions, **settings, "cases": cases}, indent=1))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return Flash.apply(q, k, v)


if __name__ == "__main__":
    main()
