"""How much memory one micro-batch really takes on a CPU, beside what the forecast's formulas say.

Each case runs in a fresh process: a random model of the family, resident weights and gradients, forward and backward;
the peak is VmHWM, reset before the step, less what was resident. malloc is set as a session sets it. Prints one JSON
line a case. The quick suite runs a few of these cases (tests/unit/test_forecast_activations.py).

    python benchmarks/activations.py            all cases, about a minute on two idle cores
    python benchmarks/activations.py smol-128   one case
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

Q: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
SMOL = Q | {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
GPT2 = {"n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 8000, "n_positions": 1024}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
NEOX = {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 2048, "num_attention_heads": 8}
NEOX |= {"vocab_size": 8000}
SMALL_VOCABULARY = Q | {"vocab_size": 512}
GEMMA = Q | {"vocab_size": 8000, "head_dim": 64, "tie_word_embeddings": True}
DROPOUT = Q | {"attention_dropout": 0.1, "vocab_size": 8000}
# Nearly all of the peak is scores, of every pair of tokens.
SCORES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 16}
SCORES |= {"num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096}
GEMMA_SCORES = SCORES | {"intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}

#: name: (family, sizes, dtype, gradient checkpointing, sequences, tokens a sequence)
CASES: dict[str, tuple[str, dict[str, Any], str, bool, int, int]] = {
    "qwen2-128": ("qwen2", Q, "bf16", False, 1, 128),
    "qwen2-512": ("qwen2", Q, "bf16", False, 1, 512),
    "qwen2-512-checkpointing": ("qwen2", Q, "bf16", True, 1, 512),
    "qwen2-512-fp32": ("qwen2", Q, "fp32", False, 1, 512),
    "qwen2-4x512": ("qwen2", Q, "bf16", False, 4, 512),
    "qwen2-small-vocabulary": ("qwen2", SMALL_VOCABULARY, "bf16", False, 2, 512),
    "qwen2-small-vocabulary-checkpointing": ("qwen2", SMALL_VOCABULARY, "bf16", True, 2, 512),
    "qwen3-small-vocabulary-fp32": ("qwen3", SMALL_VOCABULARY, "fp32", False, 2, 256),
    "smol-128": ("llama", SMOL, "bf16", False, 1, 128),
    "smol-512": ("llama", SMOL, "bf16", False, 1, 512),
    "smol-512-checkpointing": ("llama", SMOL, "bf16", True, 1, 512),
    "smol-256-fp32-checkpointing": ("llama", SMOL, "fp32", True, 1, 256),
    "gpt2-512-fp32": ("gpt2", GPT2, "fp32", False, 1, 512),
    "gpt2-512-checkpointing": ("gpt2", GPT2, "bf16", True, 1, 512),
    "gpt_neox-512": ("gpt_neox", NEOX, "bf16", False, 1, 512),
    "gemma2-512": ("gemma2", GEMMA | {"tie_word_embeddings": False}, "bf16", False, 1, 512),
    "gemma-512": ("gemma", GEMMA, "bf16", False, 1, 512),
    # Attention that keeps scores: with dropout in it (math), and with softcapping (eager).
    "dropout-512": ("llama", DROPOUT, "bf16", False, 1, 512),
    "dropout-1024": ("llama", DROPOUT, "bf16", False, 1, 1024),
    "dropout-1024-fp32": ("llama", DROPOUT, "fp32", False, 1, 1024),
    "dropout-1024-checkpointing": ("llama", DROPOUT, "bf16", True, 1, 1024),
    "dropout-2x1024-scores": ("llama", SCORES | {"attention_dropout": 0.1}, "bf16", False, 2, 1024),
    "gemma2-1024": ("gemma2", GEMMA | {"tie_word_embeddings": False}, "bf16", False, 1, 1024),
    "gemma2-1024-fp32": ("gemma2", GEMMA | {"tie_word_embeddings": False}, "fp32", False, 1, 1024),
    "gemma2-1024-checkpointing": ("gemma2", GEMMA | {"tie_word_embeddings": False}, "bf16", True, 1, 1024),
    "gemma2-4x256": ("gemma2", GEMMA | {"tie_word_embeddings": False}, "bf16", False, 4, 256),
    "gemma2-2x1024-scores": ("gemma2", GEMMA_SCORES, "bf16", False, 2, 1024),
}
# Chosen before any of them was run, to see the formulas where their fitted figures were not set. Set none by these.
HELD_OUT: dict[str, tuple[str, dict[str, Any], str, bool, int, int]] = {
    "held-out-mistral": (
        "mistral",
        Q
        | {"hidden_size": 768, "num_hidden_layers": 6, "intermediate_size": 2048, "num_attention_heads": 12}
        | {"num_key_value_heads": 4},
        "bf16",
        False,
        2,
        256,
    ),
    "held-out-phi3": (
        "phi3",
        Q
        | {"hidden_size": 640, "intermediate_size": 1728, "num_attention_heads": 10, "num_key_value_heads": 10}
        | {"vocab_size": 32064, "pad_token_id": 0},
        "bf16",
        False,
        1,
        384,
    ),
    "held-out-opt": (
        "opt",
        {"hidden_size": 512, "num_hidden_layers": 6, "ffn_dim": 2048, "num_attention_heads": 8, "vocab_size": 50272}
        | {"word_embed_proj_dim": 512},
        "bf16",
        False,
        1,
        256,
    ),
    "held-out-qwen3-tied": (
        "qwen3",
        Q
        | {"hidden_size": 384, "num_hidden_layers": 8, "intermediate_size": 1024, "num_attention_heads": 6}
        | {"head_dim": 64, "vocab_size": 151936, "tie_word_embeddings": True},
        "bf16",
        False,
        1,
        256,
    ),
    "held-out-llama-fp32": (
        "llama",
        Q
        | {"hidden_size": 640, "num_hidden_layers": 8, "intermediate_size": 1728, "num_attention_heads": 10}
        | {"vocab_size": 16000},
        "fp32",
        False,
        1,
        384,
    ),
    "held-out-smollm3-checkpointing": (
        "smollm3",
        Q | {"num_hidden_layers": 12, "vocab_size": 64000, "tie_word_embeddings": True, "pad_token_id": 0},
        "bf16",
        True,
        1,
        1024,
    ),
}
_STEPS = 8  # the heap's part of a peak wanders by several percent from step to step


def measure(name: str) -> dict[str, Any]:
    """Run one case in a fresh process. Gives name, measured_nbytes, forecast_nbytes and the phase of the peak."""
    done = subprocess.run(
        [sys.executable, __file__, "--in-this-process", name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measure_here(name: str) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from overspill import _native
    from overspill.forecast import Batch, activation_phases
    from overspill.model import ModelShape
    from overspill.train.malloc import map_large_blocks, trim_before_logits

    family, sizes, dtype, checkpointing, sequences, seq_len = (CASES | HELD_OUT)[name]
    map_large_blocks()  # as a session does
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    resident = {parameter: torch.ones_like(parameter) for parameter in model.parameters()}

    def to_resident(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        resident[parameter].copy_(parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(to_resident)

    assert trim_before_logits(model) is not None  # as `overspill train` does

    def step(batch: int, tokens: int) -> None:
        ids = torch.randint(0, config.vocab_size, (batch, tokens))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step(1, 16)  # loads what torch and oneDNN load at first use
    _native.malloc_trim()
    before = _status("VmRSS")
    peaks = []
    for _ in range(_STEPS):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        step(sequences, seq_len)
        peaks.append(_status("VmHWM") - before)
    phases = activation_phases(
        ModelShape.from_config(config.to_dict()),
        Batch(sequences, seq_len, 2 if dtype == "bf16" else 4, checkpointing=checkpointing),
    )
    highest = max(phases, key=lambda phase: phase.nbytes)
    return {
        "name": name,
        "measured_nbytes": max(peaks),
        "forecast_nbytes": highest.nbytes,
        "ratio": round(highest.nbytes / max(peaks), 4),
        "phase": highest.name,
        "peaks_nbytes": peaks,
    }


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-this-process"]:
        print(json.dumps(_measure_here(sys.argv[2])))
    else:
        for case in sys.argv[1:] or [*CASES, *HELD_OUT]:
            print(json.dumps(measure(case)), flush=True)
