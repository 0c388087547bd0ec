"""An unmodified `transformers.Trainer` whose optimizer state lives on disk: what Overspill adds is marked with a #.

A small Llama learns Macbeth for 24 steps. Then the run goes back to the checkpoint of step 12, in a new session with a
new model, and logs the same losses once more. Runs in seconds on a laptop; nothing of it is special to small models.

    python examples/hf_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.utils import logging

import overspill
from overspill.interop.trainer import TieredCallback
from overspill.job import OptimizerConfig
from overspill.plan import Overlap, Placement, Plan

ASSETS = Path(__file__).parent.parent / "tests/assets/tiny"
SEQ_LEN, STEPS = 64, 24


def load_rows() -> list[dict[str, list[int]]]:
    tokens = AutoTokenizer.from_pretrained(ASSETS)((ASSETS / "macbeth.txt").read_text())["input_ids"]
    rows = [tokens[i : i + SEQ_LEN] for i in range(0, len(tokens) - SEQ_LEN, SEQ_LEN)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(run: Path, resume: str | None = None) -> list[float]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ASSETS), dtype=torch.bfloat16)
    plan = Plan(  #
        memory_nbytes="16MiB",  # weights, gradients and buffers come out of this, or training is refused
        optimizer_state=Placement(disk=1.0),  #
        staging_nbytes="4MiB",  #
        chunk_numel=65536,  #
        overlap=Overlap.FORWARD,  # updates run behind the next forward
        keep_last=2,  # as many as save_total_limit
    )
    session = overspill.attach(  #
        model, optimizer=OptimizerConfig(lr=3e-3), plan=plan, directory=run / "state", resume=resume or False
    )
    arguments = TrainingArguments(
        output_dir=str(run / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        warmup_steps=4,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=12,
        save_total_limit=2,
        save_only_model=True,  # the optimizer's state is pinned in the store, not written a second time
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=load_rows(),
        optimizers=(session.optimizer, None),  #
        callbacks=[TieredCallback(session)],  # commits with generators and schedule; a pin at each save
    )
    trainer.train(resume_from_checkpoint=str(run / "trainer" / resume) if resume else None)
    for tier, by_class in session.step_facts()["held_nbytes"].items():  #
        print(f"{tier}: " + ", ".join(f"{name} {nbytes / 2**20:.1f} MiB" for name, nbytes in by_class.items()))
    session.close()  #
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = train(Path(folder))
        resumed = train(Path(folder), resume="checkpoint-12")
    print(f"loss: {undisturbed[0]:.4f} … {undisturbed[-1]:.4f}")
    assert undisturbed[-1] < undisturbed[0], "the model must learn"
    assert resumed == undisturbed, "going on from a checkpoint must not change a single bit"
    print("All losses are bit-identical.")


if __name__ == "__main__":
    main()
