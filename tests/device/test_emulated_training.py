"""Training on the device: the same losses, gradients and weights as on the CPU, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint


def tiny_llama(**changes: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def loss_and_gradients(model: torch.nn.Module, device: str, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model = copy.deepcopy(model).to(device)
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1)).to(device)
    torch.manual_seed(2)
    loss = model(input_ids=ids, labels=ids, **{name: value.to(device) for name, value in inputs.items()}).loss
    loss.backward()
    return loss.item(), {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_llamas_loss_and_gradients_equal_the_cpus_bit_for_bit(
    emulated: ModuleType, dtype: torch.dtype, attention: str
) -> None:
    model = tiny_llama(attn_implementation=attention).to(dtype)
    expected, got = loss_and_gradients(model, "cpu"), loss_and_gradients(model, "emulated")
    assert got[0] == expected[0]
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(got[1][name], gradient), name


def test_a_padded_batch_gives_the_cpus_numbers_too(emulated: ModuleType) -> None:
    mask = torch.ones(2, 32, dtype=torch.int64)
    mask[0, 20:] = 0
    model = tiny_llama()
    expected = loss_and_gradients(model, "cpu", attention_mask=mask)
    got = loss_and_gradients(model, "emulated", attention_mask=mask)
    assert got[0] == expected[0]
    assert all(torch.equal(got[1][name], gradient) for name, gradient in expected[1].items())


def test_dropout_draws_the_cpus_masks_also_inside_attention(emulated: ModuleType) -> None:
    model = tiny_llama(attention_dropout=0.2)
    model.train()
    expected, got = loss_and_gradients(model, "cpu"), loss_and_gradients(model, "emulated")
    assert got[0] == expected[0]
    assert all(torch.equal(got[1][name], gradient) for name, gradient in expected[1].items())
    model.eval()
    assert loss_and_gradients(model, "cpu")[0] != expected[0]


def test_a_whole_training_step_can_be_queued_before_the_device_begins(emulated: ModuleType) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(256, 16)
            self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.head = torch.nn.Linear(16, 256)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.layer(self.embedding(ids)))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    torch.manual_seed(0)
    on_cpu = Model()
    model = copy.deepcopy(on_cpu).to("emulated")
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 256, (2, 8))
    on_device = ids.to("emulated")
    torch.accelerator.synchronize()
    emulated.reset()
    with emulated.hold("compute"):
        loss = model(on_device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        assert emulated.stats().compute_operations == 0
    expected = on_cpu(ids)
    assert loss.item() == expected.item()
    assert emulated.stats().compute_operations > 100


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
def test_training_with_adamw_and_clipping_equals_the_cpu(emulated: ModuleType, foreach: bool) -> None:
    torch.manual_seed(0)
    start = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.LayerNorm(32), torch.nn.Linear(32, 1)
    )
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)

    def train(device: str) -> Iterator[float | list[torch.Tensor]]:
        model = copy.deepcopy(start).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
        torch.manual_seed(1)
        for _ in range(5):
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            yield torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach).item()
            optimizer.step()
            yield loss.item()
        yield [p.detach().cpu() for p in model.parameters()]

    *expected, expected_weights = train("cpu")
    *got, got_weights = train("emulated")
    assert got == expected
    assert isinstance(got_weights, list)
    assert isinstance(expected_weights, list)
    assert all(torch.equal(a, b) for a, b in zip(got_weights, expected_weights, strict=True))


def offloading_hooks(wait: bool) -> torch.autograd.graph.saved_tensors_hooks:
    """Activations leave for pinned memory on a stream of their own; `wait` is what a correct unpack does."""
    side = torch.Stream("emulated")

    def pack(t: torch.Tensor) -> tuple[torch.Tensor, torch.Event]:
        side.wait_stream(torch.accelerator.current_stream())
        host = torch.empty_like(t, device="cpu", pin_memory=True)
        with side:
            host.copy_(t, non_blocking=True)
            t.record_stream(side)
        return host, side.record_event()

    def unpack(packed: tuple[torch.Tensor, torch.Event]) -> torch.Tensor:
        host, copied = packed
        if wait:
            torch.accelerator.current_stream().wait_event(copied)
        return host.to("emulated", non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def test_saved_tensors_can_leave_for_the_host_and_come_back(emulated: ModuleType) -> None:
    emulated.poison_freed(True)
    x, weight = torch.randn(4, 16, device="emulated"), torch.randn(16, 16, device="emulated", requires_grad=True)

    def gradient() -> torch.Tensor:
        weight.grad = None
        (torch.tanh(x @ weight) ** 2).sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected = gradient()
    with offloading_hooks(wait=True):
        got = gradient()
    assert torch.equal(got, expected)
    assert emulated.stats().d2h_operations >= 3


def test_saved_tensors_fetched_without_a_wait_give_wrong_gradients(emulated: ModuleType) -> None:
    x, weight = torch.randn(4, 16, device="emulated"), torch.randn(16, 16, device="emulated", requires_grad=True)
    (torch.tanh(x @ weight) ** 2).sum().backward()
    assert weight.grad is not None
    expected, weight.grad = weight.grad, None
    with emulated.hold("d2h"), offloading_hooks(wait=False):
        (torch.tanh(x @ weight) ** 2).sum().backward()
        torch.accelerator.current_stream().synchronize()
    assert not torch.equal(weight.grad, expected)


def test_fake_tensors_of_the_device_need_no_memory(emulated: ModuleType) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.accelerator.memory_allocated()
    with FakeTensorMode(), torch.device("emulated"):
        model = tiny_llama(hidden_size=1024, intermediate_size=4096)
        ids = torch.randint(0, 256, (2, 64))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    assert loss.device.type == "emulated"
    assert torch.accelerator.memory_allocated() == before


def test_the_hugging_face_trainer_logs_the_cpus_losses(
    emulated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.state import AcceleratorState, PartialState
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(0, 256, (16, 16), generator=torch.Generator().manual_seed(3)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]

    def losses(device: str) -> list[float]:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        arguments = TrainingArguments(
            output_dir=str(tmp_path / device),
            max_steps=4,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            optim="adamw_torch",
            optim_args="foreach=False",
            seed=5,
        )
        trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=data)
        assert trainer.args.device.type == device.split(":")[0]
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    try:
        expected, got = losses("cpu"), losses("emulated:0")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
    assert len(got) == 4
    assert got == expected
