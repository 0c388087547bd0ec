"""The tape by itself: lifetimes are Python's, order and accumulation are torch's, sizes are an accelerator's.

That whole layers and steps agree with torch: tests/unit/test_tape_matches_torch.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.forecast.events import Kind
from overspill.forecast.tape import Category, Memory, Parameter, Tape, Tensor, ops

KiB = 1024


def trained(numel: int, itemsize: int = 2) -> Parameter:
    return Parameter(numel, itemsize, trained=True)


def test_a_tensor_lives_as_long_as_python_holds_it() -> None:
    tape = Tape()
    x = tape.new(1024, 4)
    assert tape.memory.total_nbytes == 4 * KiB
    y = x
    del x
    assert tape.memory.total_nbytes == 4 * KiB
    del y
    assert tape.memory.total_nbytes == 0


@given(st.integers(1, 10_000), st.sampled_from([1, 2, 4, 8]))
def test_sizes_are_rounded_up_to_512_bytes(numel: int, itemsize: int) -> None:
    tape = Tape()
    held = tape.new(numel, itemsize)
    assert tape.memory.total_nbytes % 512 == 0
    assert 0 <= tape.memory.total_nbytes - held.nbytes < 512


def test_a_view_owns_the_storage_with_its_base_and_costs_nothing() -> None:
    tape = Tape()
    x = tape.new(1024, 4)
    part = tape.view(x, 256)
    assert tape.memory.total_nbytes == 4 * KiB
    del x
    assert tape.memory.total_nbytes == 4 * KiB, "the view keeps all of it"
    assert part.nbytes == KiB


def test_the_peak_is_that_since_the_last_mark_with_its_categories() -> None:
    memory = Memory()
    tape = Tape(memory)
    held = tape.new(1024, 4)
    gone = tape.new(2048, 4, Category.LOGITS)
    del gone
    assert memory.peak_nbytes == 12 * KiB
    assert memory.at_peak[Category.LOGITS] == 8 * KiB
    memory.mark()
    assert memory.peak_nbytes == held.nbytes
    assert memory.at_peak[Category.LOGITS] == 0


def test_the_log_has_every_block_come_and_go_once() -> None:
    memory = Memory()
    memory.log = []
    tape = Tape(memory)
    x = tape.new(1024, 4)
    y = tape.new(512, 4)
    del x, y
    came = [event.block for event in memory.log if event.kind is Kind.MALLOC]
    assert came == [event.block for event in memory.log if event.kind is Kind.FREE] == [1, 2]


def test_without_recording_nothing_is_kept() -> None:
    tape = Tape()
    tape.grad_enabled = False
    x = tape.leaf(1024, 4, requires_grad=True)
    y = ops.silu(tape, ops.linear(tape, x, trained(1024 * 1024), 1024))
    assert y.node is None
    assert not y.requires_grad
    del x
    assert tape.memory.total_nbytes == y.nbytes


def test_what_needs_no_gradient_is_not_recorded() -> None:
    tape = Tape()
    x = tape.leaf(1024, 4, requires_grad=False)
    y = ops.linear(tape, x, Parameter(1024 * 1024, 4, trained=False), 1024)
    assert y.node is None


#: By operation: it, and what it keeps beside its result for an input of 1024 fp32 (KiB).
KEPT: dict[str, tuple[Callable[[Tape, Tensor], Tensor], float]] = {
    "cast": (lambda tape, x: ops.cast(tape, x, 2), 0),
    "scale": (ops.scale, 0),
    "add": (lambda tape, x: ops.add(tape, x, x), 0),
    "silu": (ops.silu, 4),
    "mul": (lambda tape, x: ops.mul(tape, x, x), 4),
    "mean_of_square": (lambda tape, x: ops.mean_of_square(tape, x, 1), 4),
    "dropout": (lambda tape, x: ops.dropout(tape, x, 0.1), 1),
    "linear, weight trained": (lambda tape, x: ops.linear(tape, x, trained(4096, 4), 2048), 4),
    "linear, weight frozen": (lambda tape, x: ops.linear(tape, x, Parameter(4096, 4, trained=False), 2048), 0),
    "mul_weight, trained": (lambda tape, x: ops.mul_weight(tape, x, trained(16, 4)), 4),
    "mul_weight, frozen": (lambda tape, x: ops.mul_weight(tape, x, Parameter(16, 4, trained=False)), 0),
    "matmul": (lambda tape, x: ops.matmul(tape, x, x, 512), 4),
    "split": (lambda tape, x: ops.split(tape, x, (512, 512))[0], 4),
    "fused": (lambda tape, x: ops.fused(tape, (x,), 256, 2, saves=(x,), extra_saved_nbytes=KiB), 5),
}


@pytest.mark.parametrize("name", list(KEPT))
def test_an_operation_keeps_what_its_backward_reads(name: str) -> None:
    operation, kept = KEPT[name]
    tape = Tape()
    out = operation(tape, tape.leaf(1024, 4, requires_grad=True))
    node, shares = out.node, name == "split"
    result = 0 if shares else -(-out.nbytes // 512) * 512
    assert tape.memory.total_nbytes == kept * KiB + result
    del out
    assert tape.memory.total_nbytes == (0 if shares else kept * KiB)
    del node
    assert tape.memory.total_nbytes == 0


def test_softmax_keeps_its_result_and_converts_its_input_meanwhile() -> None:
    tape = Tape()
    x = tape.leaf(1024, 2, requires_grad=True)
    tape.memory.mark()
    out = ops.softmax(tape, x, itemsize=4)
    assert tape.memory.peak_nbytes == x.nbytes + 4 * KiB + out.nbytes
    del x
    assert tape.memory.total_nbytes == out.nbytes
    node = out.node
    del out
    assert tape.memory.total_nbytes == 4 * KiB
    del node


def backward(tape: Tape, out: Tensor) -> None:
    numel, size, node = out.numel, out.itemsize, out.node
    del out
    tape.backward(Tensor(None, numel, size, node=node), tape.new(numel, size, Category.TEMPORARIES))


def test_backward_runs_the_newest_first_and_lets_go_of_what_each_has_kept() -> None:
    tape = Tape()
    order: list[str] = []
    alive: list[int] = []

    def step(name: str, *inputs: Tensor) -> Tensor:
        count = len(inputs)

        def run(tape: Tape, grad: Tensor) -> tuple[Tensor, ...]:
            order.append(name)
            alive.append(tape.memory.live[Category.ACTIVATIONS])
            return tuple(tape.new(grad.numel, 4, Category.TEMPORARIES) for _ in range(count))

        kept = tape.new(1024, 4)
        return tape.record(inputs, (kept,), run, tape.new(1024, 4))

    x = tape.leaf(1024, 4, requires_grad=True)
    left = step("left", x)
    right = step("right", x)
    out = step("join", left, right)
    del x, left, right
    root = Tensor(None, out.numel, 4, node=out.node)
    del out
    tape.backward(root, tape.new(1024, 4, Category.TEMPORARIES))
    assert order == ["join", "right", "left"]
    assert alive == [12 * KiB, 8 * KiB, 4 * KiB]
    assert tape.memory.live[Category.ACTIVATIONS] == 0


def test_a_node_waits_for_all_who_use_its_result() -> None:
    tape = Tape()
    x = ops.scale(tape, tape.leaf(1024, 4, requires_grad=True))
    out = ops.add(tape, ops.silu(tape, x), ops.silu(tape, ops.silu(tape, x)))
    del x
    backward(tape, out)
    del out
    assert len(tape.leaf_grads) == 1
    assert tape.memory.total_nbytes == 4 * KiB


def test_gradients_that_meet_are_added_in_place_where_nobody_else_holds_the_first() -> None:
    tape = Tape()
    held, grad = tape.new(1024, 4), tape.new(1024, 4)
    before = tape.memory.total_nbytes
    assert tape.accumulate(held, grad) is held
    assert tape.memory.total_nbytes == before
    other = tape.view(held)
    summed = tape.accumulate(held, grad)
    assert summed is not held
    assert tape.memory.total_nbytes == before + 4 * KiB
    del other, summed


def test_a_parameters_first_gradient_is_taken_over_without_a_copy() -> None:
    tape = Tape()
    out = ops.linear(tape, tape.leaf(1024, 2, requires_grad=False), trained(2048), 512)
    backward(tape, out)
    del out
    assert tape.memory.live[Category.GRADIENTS] == tape.memory.total_nbytes == 4 * KiB


def test_a_parameters_gradient_outlives_the_graph_until_the_tape_lets_it_go() -> None:
    """What a layer's gradients add to the backward of the layers before it."""
    tape = Tape()
    out = ops.linear(tape, tape.leaf(1024, 2, requires_grad=False), trained(2048), 512)
    backward(tape, out)
    del out
    assert tape.memory.live[Category.GRADIENTS] == 4 * KiB
    tape.gradients.clear()
    assert tape.memory.total_nbytes == 0


def test_a_gradient_of_another_dtype_than_its_parameter_is_copied() -> None:
    """Under autocast: the product's gradient is bf16, the weight's fp32."""
    tape = Tape()
    weight = trained(2048, 4)
    out = ops.linear(tape, tape.leaf(1024, 2, requires_grad=False), weight, 512)
    tape.memory.mark()
    backward(tape, out)
    del out
    assert tape.memory.live[Category.GRADIENTS] == 8 * KiB
    # both, and the result that the caller holds; what the product had kept is gone by then
    assert tape.memory.peak_nbytes == 8 * KiB + 4 * KiB + KiB


def test_a_gradient_that_is_handed_on_does_not_stay() -> None:
    tape = Tape()
    weight = Parameter(2048, 2, trained=True, keeps_grad=False)
    out = ops.linear(tape, tape.leaf(1024, 2, requires_grad=False), weight, 512)
    backward(tape, out)
    del out
    assert tape.memory.total_nbytes == 0
    assert tape.gradients == []


def test_an_input_that_needs_no_gradient_gets_none() -> None:
    tape = Tape()
    weight = trained(2048)
    out = ops.linear(tape, tape.leaf(1024, 2, requires_grad=False), weight, 512)
    backward(tape, out)
    assert tape.leaf_grads == []


def test_parts_of_a_split_go_back_joined_by_one_cat() -> None:
    tape = Tape()
    x = tape.leaf(1024, 4, requires_grad=True)
    first, second = ops.split(tape, x, (512, 512))
    out = ops.add(tape, ops.silu(tape, first), ops.silu(tape, second))
    del x, first, second
    tape.memory.mark()
    backward(tape, out)
    del out
    # what is kept (4), the gradient that both silus pass (2), theirs (2 + 2), the whole (4)
    assert tape.memory.peak_nbytes <= (4 + 2 + 2 + 2 + 4) * KiB
    assert tape.memory.peak_nbytes >= (2 + 2 + 4) * KiB
    assert [one.numel for one in tape.leaf_grads] == [1024]
    assert tape.memory.total_nbytes == 4 * KiB


def test_slices_go_back_into_zeros_of_the_whole_size_each() -> None:
    peaks = []
    for slices in (False, True):
        tape = Tape()
        parts = ops.split(tape, tape.leaf(4096, 4, requires_grad=True), (2048, 1024, 1024), slices=slices)
        out = ops.mul(tape, parts[1], parts[2])
        del parts
        tape.memory.mark()
        backward(tape, out)
        del out
        peaks.append(tape.memory.peak_nbytes)
    assert peaks[1] >= peaks[0] + 8 * KiB


def test_a_graph_cannot_be_run_twice() -> None:
    tape = Tape()
    out = ops.silu(tape, tape.leaf(1024, 4, requires_grad=True))
    backward(tape, out)
    with pytest.raises(AssertionError, match="twice"):
        backward(tape, out)


@given(st.lists(st.sampled_from(["silu", "scale", "linear", "add", "softmax", "dropout"]), min_size=1, max_size=12))
def test_whatever_the_chain_backward_leaves_only_gradients(chain: list[str]) -> None:
    tape = Tape()
    x: Tensor = tape.leaf(1024, 2, requires_grad=True)
    linears = 0
    for name in chain:
        if name == "linear":
            x, linears = ops.linear(tape, x, trained(2048), 1024), linears + 1
        elif name == "add":
            x = ops.add(tape, x, ops.silu(tape, x))
        elif name == "softmax":
            x = ops.cast(tape, ops.softmax(tape, x, itemsize=4), 2)
        else:
            x = ops.dropout(tape, x, 0.5) if name == "dropout" else getattr(ops, name)(tape, x)
    backward(tape, x)
    del x
    assert tape.memory.live[Category.ACTIVATIONS] == 0
    assert tape.memory.total_nbytes == 4 * KiB * linears + 2 * KiB
