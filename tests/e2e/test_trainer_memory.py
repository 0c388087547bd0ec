"""What the Trainer's own saving, wrapping and going on take in memory beside training: next to nothing.

Each case is a fresh process with a model of 52 MiB of fp32 weights and 104 MiB of optimizer state, which has trained
before anything is measured.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from overspill.units import MiB

STATE_NBYTES = 104 * MiB
HERE = Path(__file__).resolve().parent
HEAD = """
    import sys
    sys.path[:0] = {path!r}
    from pathlib import Path
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from trainer_cases import *

    torch.set_num_threads(1)
    base = Path({base!r})

    def make_large():
        config = LlamaConfig(vocab_size=VOCAB, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
                             num_attention_heads=8, tie_word_embeddings=True, pad_token_id=0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def train(session, model, steps):
        row = Sentences()[0]
        for _ in range(steps):
            model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
            session.optimizer.step()
            session.optimizer.zero_grad()
        session.flush()

    plan = make_plan({place!r}, memory_nbytes=400 * MiB, chunk_numel=1024 * 1024, staging_nbytes=24 * MiB)
    few = dict(max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    model = make_large()
"""
LOOK = """
    with tiered(model, plan, base / "state") as session:
        train(session, model, 2)
        print("READY", flush=True)
        state = session.optimizer.state_dict()
        tensors = [tensor for entry in state["state"].values() for tensor in entry.values()]
        assert sum(tensor.nbytes for tensor in tensors) > 100 * MiB
        session.optimizer.load_state_dict(state)  # what Accelerate does when it wraps an optimizer
        torch.save(state, base / "optimizer.pt")  # what the Trainer does when it saves
        model.save_pretrained(base / "model")
        if {copied!r}:
            copies = [tensor.clone() for tensor in tensors]
        print("DONE", flush=True)
"""
RESUME = """
    with tiered(model, plan, base / "state") as session:
        trainer = make_trainer(model, session.optimizer, base / "trainer", save_strategy="steps", save_steps=2, **few)
        trainer.train()
    import torch.utils.serialization
    with tiered(model, plan, base / "again") as session:
        make_trainer(model, session.optimizer, base / "warm", **few).train()  # its memory is touched from here on
        torch.utils.serialization.config.load.mmap = True
        trainer = make_trainer(model, session.optimizer, base / "trainer", **few)
        print("READY", flush=True)
        trainer.train(resume_from_checkpoint=str(base / "trainer/checkpoint-2"))
        assert trainer.state.global_step == 3
        print("DONE", flush=True)
"""


def source(body: str, base: Path, place: str, **more: object) -> list[str]:
    text = textwrap.dedent(HEAD + body)
    path = [str(HERE), str(HERE.parent.parent)]
    return [sys.executable, "-c", text.format(path=path, place=place, base=str(base), **more)]


@pytest.mark.parametrize("place", [pytest.param("host", marks=pytest.mark.slow), "disk"])
def test_state_dict_and_saving_take_no_memory_of_their_own(tmp_path: Path, place: str) -> None:
    assert growth_nbytes(source(LOOK, tmp_path, place, copied=False)) < 12 * MiB


@pytest.mark.slow
def test_a_copy_of_the_state_would_have_been_seen(tmp_path: Path) -> None:
    assert growth_nbytes(source(LOOK, tmp_path, "disk", copied=True)) > 0.9 * STATE_NBYTES


def test_going_on_takes_no_memory_for_the_state_when_torch_maps_its_files(tmp_path: Path) -> None:
    assert growth_nbytes(source(RESUME, tmp_path, "disk")) < STATE_NBYTES / 4


def growth_nbytes(command: list[str]) -> int:
    """Peak of the child's anonymous memory between READY and DONE, above what it had at READY."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        ready = next((line for line in lines if line.startswith("READY")), None)
        assert ready, process.communicate()[1]
        status = Path(f"/proc/{process.pid}/status")
        start = peak = anonymous_nbytes(status)
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            peak = max(peak, anonymous_nbytes(status))
            time.sleep(0.002)
        process.kill()
        output, errors = process.communicate()
    assert "DONE" in output, errors
    return peak - start


def anonymous_nbytes(status: Path) -> int:
    """0 when the process has just ended."""
    try:
        text = status.read_text()
    except OSError:
        return 0
    return int(text.split("RssAnon:")[1].split()[0]) * 1024 if "RssAnon:" in text else 0
