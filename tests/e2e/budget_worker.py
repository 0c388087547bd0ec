"""One process inside a memory group: measures its base, sets the limit to it, and does one thing within that.

``base`` is anonymous plus file memory after importing torch and transformers and loading the tokenizer. The limit is
(base + budget) x 1.05; what is done then is a training, a resume, an export, or a run of transformers' Trainer.
``cli`` runs a command line as it is.
The request is a JSON file; the answer, written next to it, says base, limit and highest use.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from overspill.checkpoint import RunDirectory
from overspill.cli.assemble import assemble
from overspill.cli.jobs import load_job
from overspill.cli.main import run as command_line
from overspill.interop.hf import load_tokenizer
from overspill.observe.metrics import MetricsWriter
from overspill.plan import Plan
from overspill.report import StepReport
from testing.cgroup import limit_here, reset_peak_here, use_here

SLACK = 0.05


def anonymous_nbytes() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:")) * 1024


def train(request: dict[str, Any], plan: Plan, *, resume: bool) -> None:
    run = RunDirectory(request["run"])
    job = run.job() if resume else load_job(Path(request["job"]), [])
    if not resume:
        run.create(job)
    planted: list[bytes] = []
    with assemble(run, job, plan, resume=resume) as parts, MetricsWriter(run.metrics_file) as metrics:

        def on_step(report: StepReport) -> None:
            metrics.append(report)
            if not planted and request.get("plant"):
                planted.append(b"x" * request["plant"])
            if report.step == request.get("stop_after"):
                parts.stop.request()

        parts.loop(on_step, before_commit=metrics.sync).run()


def use_trainer(request: dict[str, Any], plan: Plan, *, accelerate: bool) -> None:
    """A Trainer (or a plain loop after accelerator.prepare) with our optimizer, which also saves."""
    from overspill import attach

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.bfloat16)
    session = attach(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        plan=plan,
        directory=Path(request["run"]) / "state",
    )
    rows = torch.randint(0, model.config.vocab_size, (16, request["seq_len"]))
    if accelerate:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        prepared, optimizer = accelerator.prepare(model, session.optimizer)
        for index in range(4):
            optimizer.zero_grad()
            batch = rows[index : index + 1]
            accelerator.backward(prepared(input_ids=batch, labels=batch).loss)
            optimizer.step()
        accelerator.save_model(prepared, str(Path(request["run"]) / "model"))
    else:
        arguments = transformers.TrainingArguments(
            output_dir=str(Path(request["run"]) / "trainer"),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=4,
            save_steps=2,
            save_total_limit=1,
            logging_steps=1,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=data, optimizers=(session.optimizer, None)
        )
        trainer.train()
    session.close()


def main() -> None:
    file = Path(sys.argv[1])
    request = json.loads(file.read_text())
    tokenizer = load_tokenizer(request["model"])
    transformers.AutoModelForCausalLM, transformers.Trainer  # noqa: B018 - transformers imports at first use
    del tokenizer
    group = Path(request["group"])
    anonymous, mapped = anonymous_nbytes(), use_here(group)["mapped"]
    plan = Plan.read(request["plan"])
    limit = int((anonymous + mapped + plan.memory_nbytes) * (1 + SLACK))
    if request.get("limit", True):
        limit_here(group, limit)
    reset_peak_here(group)
    answer = {"anonymous_nbytes": anonymous, "file_nbytes": mapped, "limit_nbytes": limit}
    file.with_suffix(".answer").write_text(json.dumps(answer))
    do = request["do"]
    if do in ("train", "resume"):
        train(request, plan, resume=do == "resume")
    elif do == "cli":
        assert command_line(request["arguments"]) == 0
    else:
        use_trainer(request, plan, accelerate=do == "accelerate")
    answer["end_anonymous_nbytes"] = anonymous_nbytes()
    answer["end"] = use_here(group)
    file.with_suffix(".answer").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
