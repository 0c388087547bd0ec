"""Storage accounting and a reverse-mode engine with torch's rules, over tensors that hold no data.

A `Tensor` owns a storage through a reference; when Python drops the last one the storage's bytes are given back, as
in torch under CPython. An operation appends a `Node` with what it saves; `Tape.backward` runs nodes in torch's order:
highest sequence number first, a node's saved tensors released after it ran, gradients that meet at one tensor added in
place when nothing else owns the first (torch/csrc/autograd/engine.cpp and input_buffer.cpp, torch 2.0 to 2.13).

Sizes are rounded up to 512 bytes, which is how torch.cuda.max_memory_allocated counts. Not modelled: the caching
allocator, which is forecast/allocator.py's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from enum import IntEnum

from overspill.forecast.events import Event, Kind

__all__ = ["Category", "Memory", "Node", "Parameter", "Selection", "Tape", "Tensor"]

_ROUNDING_NBYTES = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp


class Category(IntEnum):
    """What a byte is for. Order is that of reports."""

    WEIGHTS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    LOGITS = 4
    COMMUNICATION = 5
    TEMPORARIES = 6


class Memory:
    """Live bytes by category, and the highest total since the last `mark`."""

    __slots__ = ("at_peak", "count", "live", "log", "peak_nbytes", "recorded", "stream", "total_nbytes")

    def __init__(self) -> None:
        #: With a list here every allocation is written down as it comes and as it goes.
        self.log: list[Event] | None = None
        #: Of the device: where allocations are made, for the log.
        self.stream = 0
        #: Blocks that another stream uses when their owner lets go (record_stream): `completed` follows.
        self.recorded: set[int] = set()
        self.count = 0
        self.live = [0] * len(Category)
        self.total_nbytes = 0
        self.mark()

    def mark(self) -> None:
        """Forget the peak: from here on it is that of what follows."""
        self.peak_nbytes = self.total_nbytes
        self.at_peak = list(self.live)

    def add(self, category: int, nbytes: int) -> int:
        self.count += 1
        if self.log is not None:
            self.log.append(Event(Kind.MALLOC, self.count, nbytes, stream=self.stream))
        self.live[category] += nbytes
        self.total_nbytes += nbytes
        if self.total_nbytes > self.peak_nbytes:
            self.peak_nbytes = self.total_nbytes
            self.at_peak = list(self.live)
        return self.count

    def give_back(self, category: int, nbytes: int, block: int) -> None:
        if self.log is not None:
            self.log.append(Event(Kind.FREE_REQUESTED if block in self.recorded else Kind.FREE, block, 0))
        self.live[category] -= nbytes
        self.total_nbytes -= nbytes

    def completed(self, block: int) -> None:
        """The other stream has passed a recorded block: it can be used again once its owner has let go."""
        self.recorded.discard(block)
        if self.log is not None:
            self.log.append(Event(Kind.FREE_COMPLETED, block, 0))


class _Storage:
    __slots__ = ("block", "category", "memory", "nbytes", "owners")

    def __init__(self, memory: Memory, nbytes: int, category: int) -> None:
        self.memory, self.category = memory, category
        self.nbytes = -(-nbytes // _ROUNDING_NBYTES) * _ROUNDING_NBYTES
        self.owners = 0
        self.block = memory.add(category, self.nbytes)

    def move_to(self, category: int) -> None:
        self.memory.live[self.category] -= self.nbytes
        self.memory.live[category] += self.nbytes
        self.category = category

    def __del__(self) -> None:
        self.memory.give_back(self.category, self.nbytes, self.block)


class Tensor:
    """``numel`` elements of ``itemsize`` bytes in a storage. ``node`` made it; None for a leaf or without gradient."""

    __slots__ = ("itemsize", "node", "numel", "requires_grad", "storage")

    def __init__(
        self,
        storage: _Storage | None,
        numel: int,
        itemsize: int,
        *,
        requires_grad: bool = False,
        node: Node | None = None,
    ) -> None:
        self.storage, self.numel, self.itemsize = storage, numel, itemsize
        self.requires_grad, self.node = requires_grad, node
        if storage is not None:
            storage.owners += 1

    def __del__(self) -> None:
        if self.storage is not None:
            self.storage.owners -= 1

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class Parameter:
    """A leaf whose bytes are counted elsewhere (forecast/state.py); its gradient is allocated here when trained.

    grad_itemsize: bytes per element of the gradient that stays; None: it is handed on at once (a sharded gradient, or
    an optimizer in backward) and counted by who takes it.
    """

    __slots__ = ("grad", "itemsize", "keeps_grad", "numel", "summed", "trained")

    def __init__(self, numel: int, itemsize: int, *, trained: bool, keeps_grad: bool = True) -> None:
        self.numel, self.itemsize, self.trained, self.keeps_grad = numel, itemsize, trained, keeps_grad
        self.grad: Tensor | None = None
        self.summed = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class Selection:
    """Results that selective checkpointing keeps of one layer: attention's, and every second matmul's.

    torchtitan's policy ("op") counts matmuls from one and keeps the odd ones (models/llama3/parallelize.py,
    _get_custom_policy, 0.0.1 to 0.2); torch/utils/checkpoint.py hands them out again, in order.
    """

    __slots__ = ("_kept", "_matmuls", "recomputes")

    def __init__(self) -> None:
        self.recomputes = False
        self._kept: list[Tensor] = []
        self._matmuls = 0

    def _chosen(self, what: str) -> bool:
        if what != "matmul":
            return True
        self._matmuls += 1
        return self._matmuls % 2 == 1

    def take(self, what: str) -> Tensor | None:
        """The kept result, where this is a recomputation and the policy chose it."""
        return self._kept.pop(0) if self.recomputes and self._chosen(what) and self._kept else None

    def put(self, what: str, made: Tensor) -> Tensor:
        """Keeps a result of the first forward if the policy chooses it; gives it back."""
        if not self.recomputes and self._chosen(what):
            self._kept.append(Tensor(made.storage, made.numel, made.itemsize))
        return made

    def drop_last(self) -> None:
        """The layer is compiled: its last product is in no backward, and is not kept."""
        if self._matmuls % 2:
            self._kept.pop()

    def again(self) -> None:
        """From here on: the recomputation."""
        self.recomputes, self._matmuls = True, 0


Backward = Callable[["Tape", Tensor], "Sequence[Tensor | None]"]


class Node:
    """One operation in the graph: its inputs' nodes (or parameters), what it saved, how it goes backward."""

    __slots__ = ("backward", "inputs", "number", "saved")

    def __init__(
        self,
        number: int,
        inputs: tuple[Node | Parameter | None, ...],
        saved: tuple[Tensor, ...],
        backward: Backward,
    ) -> None:
        self.number, self.inputs, self.backward = number, inputs, backward
        self.saved: tuple[Tensor, ...] = saved


class Tape:
    """The allocations of one forward and backward. ``grad_enabled`` False: nothing is saved, as under no_grad."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory or Memory()
        self.grad_enabled = True
        self.leaf_grads: list[Tensor] = []
        self.outliving: list[Tensor] = []  # held by nodes as attributes: until the graph is dropped, not only run
        #: Selective checkpointing: in forward the results that are kept go in, in the recomputation they come out.
        self.selection: Selection | None = None
        self.on_collective: Callable[[Tensor], None] | None = None
        self.gradients: list[Tensor] = []  # of parameters, which nobody else may hold
        self._number = 0

    def next_number(self) -> int:
        """A sequence number, as each recorded operation gets one."""
        self._number += 1
        return self._number

    def new(self, numel: int, itemsize: int, category: int = Category.ACTIVATIONS) -> Tensor:
        """A fresh tensor without history."""
        return Tensor(_Storage(self.memory, numel * itemsize, category), numel, itemsize)

    def leaf(self, numel: int, itemsize: int, *, requires_grad: bool) -> Tensor:
        """An input of a piece of graph; if ``requires_grad``, its gradient is computed and ends in `leaf_grads`."""
        out = self.new(numel, itemsize)
        if requires_grad:
            self._number += 1
            out.node = Node(self._number, (), (), _keep)
            out.requires_grad = True
        return out

    def result(self, numel: int, itemsize: int, what: str) -> Tensor:
        """A fresh tensor, or, in a recomputation, the one that selective checkpointing kept. what: `Selection`'s."""
        if self.selection is None:
            return self.new(numel, itemsize)
        return self.selection.take(what) or self.selection.put(what, self.new(numel, itemsize))

    def crosses(self, tensor: Tensor) -> Tensor:
        """The tensor goes into a collective, or comes out of one."""
        if self.on_collective is not None:
            self.on_collective(tensor)
        return tensor

    def scratch(self, nbytes: int) -> Tensor:
        """Working memory of a kernel, alive as long as the caller keeps it."""
        return self.new(nbytes, 1, Category.TEMPORARIES)

    def record(
        self,
        inputs: Sequence[Tensor | Parameter],
        saved: Sequence[Tensor],
        backward: Backward,
        out: Tensor,
    ) -> Tensor:
        """Make ``out`` the result of an operation. ``backward(tape, grad)`` gives one gradient (or None) per input."""
        needs = self.grad_enabled and any(
            one.trained if isinstance(one, Parameter) else one.requires_grad for one in inputs
        )
        if not needs:
            return out
        edges = tuple(
            (one if one.trained else None) if isinstance(one, Parameter) else (one.node if one.requires_grad else None)
            for one in inputs
        )
        self._number += 1
        # Aliases without history: a node that saved its own result would otherwise keep itself alive.
        kept = tuple(Tensor(one.storage, one.numel, one.itemsize) for one in saved)
        out.node = Node(self._number, edges, kept, backward)
        out.requires_grad = True
        return out

    def view(self, tensor: Tensor, numel: int | None = None) -> Tensor:
        """The same storage; gradients pass as they are."""
        out = Tensor(tensor.storage, tensor.numel if numel is None else numel, tensor.itemsize)
        return self.record((tensor,), (), lambda tape, grad: (grad,), out)

    def backward(self, root: Tensor, grad: Tensor) -> None:
        """Run the graph behind ``root``. Parameters' gradients stay (or pass, see `Parameter.keeps_grad`)."""
        assert root.node is not None, "the root has no history"
        waiting = _dependencies(root.node)
        buffers: dict[int, Tensor] = {id(root.node): grad}
        ready = [(-root.node.number, id(root.node), root.node)]
        del root, grad
        while ready:
            node = heapq.heappop(ready)[2]
            self._step(node, buffers, waiting, ready)

    def _step(
        self, node: Node, buffers: dict[int, Tensor], waiting: dict[int, int], ready: list[tuple[int, int, Node]]
    ) -> None:
        grads = list(node.backward(self, buffers.pop(id(node))))
        node.saved = ()
        node.backward = _released
        for index, edge in enumerate(node.inputs):
            grad, grads[index] = grads[index], None
            if edge is None:
                continue
            if isinstance(edge, Parameter):
                if grad is not None:
                    self._accumulate_parameter(edge, grad)
                continue
            if grad is not None:
                held = buffers.get(id(edge))
                buffers[id(edge)] = grad if held is None else self.accumulate(held, grad)
                del held
            waiting[id(edge)] -= 1
            if waiting[id(edge)] == 0 and id(edge) in buffers:
                heapq.heappush(ready, (-edge.number, id(edge), edge))
            del grad
        node.inputs = ()

    def accumulate(self, held: Tensor, grad: Tensor) -> Tensor:
        """Sum of two gradients: in place when the first one's storage has no other owner."""
        if held.storage is not None and held.storage.owners == 1:
            return held
        return self.new(held.numel, max(held.itemsize, grad.itemsize), Category.TEMPORARIES)

    def _accumulate_parameter(self, parameter: Parameter, grad: Tensor) -> None:
        if not parameter.keeps_grad:
            return  # handed on
        if parameter.grad is not None:
            # The first came as a view (of the transposed product), which keeps its base: two owners, so the engine
            # adds into a third tensor; what follows is added to that in place (input_buffer.cpp, accumulate).
            if not parameter.summed:
                first = parameter.grad
                parameter.grad = self.new(parameter.numel, parameter.itemsize, Category.GRADIENTS)
                self.gradients = [parameter.grad if one is first else one for one in self.gradients]
                parameter.summed = True
            return
        storage = grad.storage
        if storage is not None and storage.owners == 1 and grad.itemsize == parameter.itemsize:
            storage.move_to(Category.GRADIENTS)
            parameter.grad = Tensor(storage, grad.numel, grad.itemsize)
        else:
            parameter.grad = self.new(parameter.numel, parameter.itemsize, Category.GRADIENTS)
        self.gradients.append(parameter.grad)


def _keep(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
    tape.leaf_grads.append(Tensor(grad.storage, grad.numel, grad.itemsize))
    return ()


def _released(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
    raise AssertionError("a node ran twice")


def _dependencies(root: Node) -> dict[int, int]:
    """How many consumers each node waits for."""
    waiting: dict[int, int] = {}
    seen = {id(root)}
    stack = [root]
    while stack:
        for edge in stack.pop().inputs:
            if isinstance(edge, Node):
                waiting[id(edge)] = waiting.get(id(edge), 0) + 1
                if id(edge) not in seen:
                    seen.add(id(edge))
                    stack.append(edge)
    return waiting
