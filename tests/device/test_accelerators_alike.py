"""What the emulated accelerator and CUDA have in common: a difference shows where there is a GPU."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

MIB = 1 << 20


def test_values_go_to_the_device_and_come_back(accelerator: str) -> None:
    x = torch.arange(6.0).to(accelerator)
    assert x.device == torch.device(accelerator, 0)
    assert (x * 2).cpu().tolist() == [0, 2, 4, 6, 8, 10]
    assert str(torch.ones(2, device=accelerator)) == f"tensor([1., 1.], device='{accelerator}:0')"


def test_the_accelerator_is_what_torch_accelerator_finds(accelerator: str) -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() >= 1
    assert torch.accelerator.current_accelerator() == torch.device(accelerator)
    assert torch.accelerator.current_device_index() == 0


def test_a_tensor_kept_until_the_other_stream_was_waited_for_needs_no_record_stream(accelerator: str) -> None:
    side = torch.Stream(accelerator)
    host = torch.zeros(4).pin_memory()
    for _ in range(20):
        x = torch.ones(4, device=accelerator)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(x, non_blocking=True)
        torch.accelerator.current_stream().wait_stream(side)
        del x
    torch.accelerator.synchronize()
    assert host.tolist() == [1, 1, 1, 1]


def test_a_storage_resized_to_nothing_gives_its_memory_back(accelerator: str) -> None:
    p = torch.nn.Parameter(torch.ones(1024, device=accelerator))
    before = torch.accelerator.memory_allocated()
    p.untyped_storage().resize_(0)
    assert before - torch.accelerator.memory_allocated() == 4096
    p.untyped_storage().resize_(4096)
    assert torch.accelerator.memory_allocated() == before
    p.data.copy_(torch.arange(1024.0))
    assert p.sum().item() == 1023 * 512


def test_a_storage_that_grows_keeps_its_values(accelerator: str) -> None:
    x = torch.arange(4.0, device=accelerator)
    x.untyped_storage().resize_(64)
    assert x.tolist() == [0, 1, 2, 3]
    x.resize_(8)
    assert x[:4].tolist() == [0, 1, 2, 3]


def test_swap_tensors_moves_a_parameter_between_host_and_device(accelerator: str) -> None:
    on_host, on_device = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4, device=accelerator))
    torch.utils.swap_tensors(on_host, on_device)
    assert on_host.device.type == accelerator
    assert on_device.device.type == "cpu"
    assert on_host.tolist() == [1, 1, 1, 1]


def test_pinned_memory_is_known_as_pinned(accelerator: str) -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True)[1:].is_pinned()
    assert not torch.ones(3).is_pinned()
    torch.accelerator.empty_host_cache()


def test_strided_and_converting_copies_cross_the_link(accelerator: str) -> None:
    host = torch.arange(12.0).reshape(3, 4)
    x = torch.zeros(4, 3, device=accelerator)
    x.copy_(host.t())
    assert x.tolist() == host.t().tolist()
    half = torch.empty(3, 4, dtype=torch.bfloat16, device=accelerator)
    half.copy_(host)
    assert half.float().cpu().tolist() == host.tolist()
    back = torch.zeros(3, 4, dtype=torch.float64)
    back[:, ::2].copy_(x.t()[:, ::2])
    assert back[:, ::2].tolist() == host[:, ::2].tolist()


def test_the_current_stream_is_each_threads_own_and_restored(accelerator: str) -> None:
    default = torch.accelerator.current_stream()
    side = torch.Stream(accelerator)
    with side:
        assert torch.accelerator.current_stream() == side
    assert torch.accelerator.current_stream() == default
    torch.accelerator.set_stream(side)
    assert torch.accelerator.current_stream() == side
    torch.accelerator.set_stream(default)


def test_an_operand_left_on_the_host_is_refused(accelerator: str) -> None:
    x, host = torch.ones(4, device=accelerator), torch.ones(4)
    for use in (lambda: x + host, lambda: host @ x, lambda: x.add_(host), lambda: torch.cat([x, host])):
        with pytest.raises(RuntimeError, match="same device"):
            use()
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3, 3]  # a scalar may be anywhere, as on CUDA
    assert x[torch.tensor([0, 2])].tolist() == [1, 1]  # and so may an index


def test_a_wrong_shape_is_refused_at_the_call(accelerator: str) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(2, 3, device=accelerator) @ torch.ones(2, 3, device=accelerator)


def test_the_devices_generator_is_apart_from_the_cpus(accelerator: str) -> None:
    torch.manual_seed(3)
    first = torch.randn(4)
    torch.manual_seed(3)
    torch.randn(4, device=accelerator)
    assert torch.equal(torch.randn(4), first)


def test_random_state_can_be_saved_and_restored(accelerator: str) -> None:
    module = torch.get_device_module(accelerator)
    state = module.get_rng_state()
    first = torch.randn(4, device=accelerator)
    module.set_rng_state(state)
    assert torch.equal(torch.randn(4, device=accelerator), first)
    with torch.random.fork_rng([0], device_type=accelerator):
        torch.randn(4, device=accelerator)
    second = torch.randn(4, device=accelerator)
    module.set_rng_state(state)
    torch.randn(4, device=accelerator)
    assert torch.equal(torch.randn(4, device=accelerator), second)


def test_a_generator_of_ones_own_works_and_one_of_the_cpu_is_refused(accelerator: str) -> None:
    own = torch.Generator(accelerator).manual_seed(5)
    first = torch.randn(4, device=accelerator, generator=own)
    again = torch.randn(4, device=accelerator, generator=torch.Generator(accelerator).manual_seed(5))
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="generator"):
        torch.empty(4, device=accelerator).normal_(generator=torch.Generator())


def test_autocast_computes_in_low_precision_and_leaves_losses_in_fp32(accelerator: str) -> None:
    x, w = torch.randn(4, 4, device=accelerator), torch.randn(4, 4, device=accelerator, requires_grad=True)
    with torch.autocast(accelerator, dtype=torch.bfloat16):
        y = x @ w
        loss = torch.nn.functional.mse_loss(y, torch.zeros_like(y))
    assert y.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.float32


def test_a_module_that_moves_keeps_its_parameters_and_their_ties(accelerator: str) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([1])).sum().backward()
    assert before.grad is not None
    on_cpu = before.grad.clone()
    model.to(accelerator)
    assert model[0].weight is before
    assert model[1].weight is before
    assert before.device.type == accelerator
    assert before.grad is not None
    assert torch.equal(before.grad.cpu(), on_cpu)  # it has moved
    before.grad = None
    model(torch.tensor([1], device=accelerator)).sum().backward()
    torch.testing.assert_close(before.grad.cpu(), on_cpu)
    optimizer.step()
    model.to("cpu")
    assert model[1].weight is before
    assert before.device.type == "cpu"


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["no reentry", "reentry"])
def test_checkpointing_recomputes_with_the_same_dropout(accelerator: str, use_reentrant: bool) -> None:
    weight = torch.randn(8, 8, device=accelerator, requires_grad=True)
    x = torch.randn(4, 8, device=accelerator, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.tanh(x @ weight), 0.5)

    def gradients(checkpointed: bool) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(4)
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant) if checkpointed else layer(x)
        torch.randn(3, device=accelerator)  # the recomputation must not depend on where the generator is by now
        weight.grad = x.grad = None
        y.square().sum().backward()
        assert weight.grad is not None
        assert x.grad is not None
        return weight.grad, x.grad

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        assert plain.device.type == accelerator
        assert torch.equal(plain, again)


def test_state_is_saved_through_the_host(accelerator: str, tmp_path: Path) -> None:
    x = torch.ones(2, device=accelerator)
    torch.save({"x": x.cpu()}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")["x"]
    assert loaded.device.type == "cpu"
    assert torch.equal(loaded.to(accelerator), x)


def test_a_pinning_data_loader_with_workers_feeds_the_device(accelerator: str) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(32.0))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1, pin_memory=True)
    total = 0.0
    for (batch,) in loader:
        assert batch.is_pinned()
        total += batch.to(accelerator, non_blocking=True).sum().item()
    assert total == 31 * 16


def test_asking_for_more_than_there_is_is_an_out_of_memory_error(accelerator: str) -> None:
    ooms = torch.accelerator.memory_stats()["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory. Tried to allocate 1048576.00 GiB"):
        torch.empty(1 << 50, dtype=torch.uint8, device=accelerator)
    assert torch.accelerator.memory_stats()["num_ooms"] == ooms + 1


def test_statistics_are_kept_by_pool_and_requests_up_to_a_mebibyte_are_of_the_small_one(accelerator: str) -> None:
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_stats()
    kept = [torch.empty(nbytes, dtype=torch.uint8, device=accelerator) for nbytes in (700, MIB, MIB + 1)]
    after = torch.accelerator.memory_stats()
    added = {name: after[name] - before[name] for name in before if isinstance(before[name], int)}
    for stat, small, large in (
        ("allocation", 2, 1),
        ("active", 2, 1),
        ("allocated_bytes", 1024 + MIB, MIB + 512),
        ("active_bytes", 1024 + MIB, MIB + 512),
        ("requested_bytes", 700 + MIB, MIB + 1),
    ):
        for metric in ("current", "allocated"):
            assert added[f"{stat}.small_pool.{metric}"] == small, stat
            assert added[f"{stat}.large_pool.{metric}"] == large, stat
            assert added[f"{stat}.all.{metric}"] == small + large, stat
        assert after[f"{stat}.all.peak"] >= after[f"{stat}.all.current"]
    del kept
    torch.accelerator.synchronize()
    freed = torch.accelerator.memory_stats()
    assert freed["allocated_bytes.all.freed"] - after["allocated_bytes.all.freed"] == 2 * MIB + 1536
    assert freed["allocation.large_pool.current"] == before["allocation.large_pool.current"]
    names = {"num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"}
    assert names | {"max_split_size", "inactive_split_bytes.all.current", "oversize_segments.current"} <= set(after)


def test_allocations_are_counted_in_units_of_512_bytes(accelerator: str) -> None:
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    kept = [torch.empty(n, dtype=torch.uint8, device=accelerator) for n in (1, 512, 513)]
    assert torch.accelerator.memory_allocated() - before == 512 + 512 + 1024
    del kept
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 2048
