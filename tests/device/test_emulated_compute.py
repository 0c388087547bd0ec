"""Computing on the device: asynchronous, in order, equal to the CPU, and strict about where operands are."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def test_the_host_goes_on_while_the_device_computes(emulated: ModuleType) -> None:
    x = torch.ones(4, 4, device="emulated")
    torch.accelerator.synchronize()
    with emulated.hold("compute"):
        y = (x @ x).relu_() + 1
        z = torch.nn.functional.layer_norm(y, (4,))
        event = torch.accelerator.current_stream().record_event()
        assert not event.query()
    assert y.tolist() == [[5.0] * 4] * 4
    assert z.tolist() == [[0.0] * 4] * 4
    assert event.query()


def test_computations_queue_in_order_on_their_stream(emulated: ModuleType) -> None:
    emulated.set_compute_delay(seconds_per_op=0.001)
    x = torch.zeros(1, dtype=torch.int64, device="emulated")
    for i in range(20):
        x.mul_(3).add_(i).remainder_(1000)
    expected = 0
    for i in range(20):
        expected = (expected * 3 + i) % 1000
    assert x.item() == expected


def test_results_of_each_kind_of_operator_equal_the_cpus(emulated: ModuleType) -> None:
    torch.manual_seed(0)
    x, y, index = torch.randn(6, 8), torch.randn(8, 6), torch.tensor([3, 1, 4])
    functions = {
        "in place": lambda a, b, i: a.clone().add_(1).mul_(2),
        "reduction": lambda a, b, i: (a.sum(1), a.mean(), a.max(0).values, a.std()),
        "matmul": lambda a, b, i: (a @ b, torch.addmm(a @ b, a, b), torch.einsum("ij,jk->ki", a, b)),
        "views": lambda a, b, i: (a.t().contiguous(), a[1:4, ::2].clone(), a.unfold(1, 3, 2).sum(-1), a.view(4, 12)),
        "indexing": lambda a, b, i: (a[i], a[a > 0], a.index_add(0, i, a[:3]), a.gather(1, i.expand(6, 3))),
        "dtypes": lambda a, b, i: (a.bfloat16() @ b.bfloat16(), a.double(), a.to(torch.int32), a > 0.5),
        "joins": lambda a, b, i: (torch.cat([a, a]), torch.stack([a, a]), *a.chunk(2), *torch.split(a, 4)),
        "data-dependent": lambda a, b, i: (a.nonzero(), torch.unique(i), a.masked_select(a > 0)),
        "sort": lambda a, b, i: (*a.sort(1), *a.topk(2)),
        "norms": lambda a, b, i: torch.nn.functional.layer_norm(a, (8,)),
        "scalars": lambda a, b, i: (a + 1, 2 / (a.abs() + 1), a**2, a.clamp(-1, 1), torch.where(a > 0, a, 0.0)),
        "factories": lambda a, b, i: (
            torch.arange(5, device=a.device),
            torch.eye(3, device=a.device),
            torch.full((2,), 7.0, device=a.device),
            torch.tril_indices(3, 3, device=a.device),
        ),
        "foreach": lambda a, b, i: (
            *torch._foreach_mul([a, b], 2.0),
            *torch._foreach_norm([a, b]),
            torch.nn.utils.get_total_norm([a, b]),
        ),
    }
    for name, function in functions.items():
        on_cpu = function(x, y, index)
        on_device = function(x.to("emulated"), y.to("emulated"), index.to("emulated"))
        for expected, got in zip(
            on_cpu if isinstance(on_cpu, tuple) else (on_cpu,),
            on_device if isinstance(on_device, tuple) else (on_device,),
            strict=True,
        ):
            assert got.device.type == "emulated", name
            assert got.dtype == expected.dtype, name
            assert torch.equal(got.cpu(), expected), name


def test_empty_out_tensors_take_the_shape_of_the_result_and_others_must_have_it(emulated: ModuleType) -> None:
    x = torch.arange(6.0, device="emulated").reshape(2, 3)
    out = torch.empty(0, device="emulated")
    assert torch.add(x, 1, out=out) is out
    assert out.tolist() == [[1, 2, 3], [4, 5, 6]]
    torch.add(x, 1, out=torch.zeros(4, device="emulated"))
    with pytest.raises(RuntimeError, match="not empty is not resized"):
        torch.accelerator.synchronize()


def test_operators_whose_shape_depends_on_data_are_named(emulated: ModuleType) -> None:
    torch.tensor([0, 1, 0, 2], device="emulated").nonzero()
    assert "aten::nonzero" in emulated.stats().host_synchronous_operators


def test_a_scalar_from_the_host_counts_with_its_value_at_the_call(emulated: ModuleType) -> None:
    x, scale = torch.ones(4, device="emulated"), torch.tensor(2.0)
    torch.accelerator.synchronize()
    with emulated.hold("compute"):
        y = x * scale
        scale.fill_(5.0)
    assert y.tolist() == [2, 2, 2, 2]


def test_an_error_inside_a_kernel_is_raised_where_the_host_synchronises(emulated: ModuleType) -> None:
    x, index = torch.ones(4, device="emulated"), torch.tensor([9], device="emulated")
    y = x.index_select(0, index)
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        torch.accelerator.synchronize()
    assert y.shape == (1,)


def test_with_blocking_launches_an_error_is_raised_at_its_call(emulated: ModuleType) -> None:
    emulated.set_launch_blocking(True)
    x, index = torch.ones(4, device="emulated"), torch.tensor([9], device="emulated")
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        x.index_select(0, index)


def test_random_numbers_are_seeded_and_equal_the_cpus(emulated: ModuleType) -> None:
    def draw(device: str) -> list[torch.Tensor]:
        torch.manual_seed(7)
        x = torch.empty(100, device=device)
        return [
            torch.randn(100, device=device),
            torch.rand(5, device=device),
            torch.randperm(20, device=device),
            torch.randint(0, 9, (7,), device=device),
            x.bernoulli_(0.3).clone(),
            torch.multinomial(torch.ones(9, device=device), 4),
            torch.nn.functional.dropout(torch.ones(1000, device=device), 0.1),
            torch.nn.init.trunc_normal_(x).clone(),
        ]

    for expected, got, again in zip(draw("cpu"), draw("emulated"), draw("emulated"), strict=True):
        assert torch.equal(expected, got.cpu())
        assert torch.equal(got, again)


def test_slowness_is_counted_for_computing_only(emulated: ModuleType) -> None:
    begin, end = torch.Event("emulated", enable_timing=True), torch.Event("emulated", enable_timing=True)
    x = torch.zeros(250_000, device="emulated")
    torch.accelerator.synchronize()
    emulated.set_compute_delay(bytes_per_s=100e6)
    begin.record()
    x.add_(1)  # 1 MB at 100 MB/s
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 10
