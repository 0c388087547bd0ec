"""How units of sharded state come and go on a rank, for the replay: which block on which stream, and when it is free.

The caching allocator keeps a pool for each stream: what a collective's stream lets go serves no computation. FSDP
gathers and reduces on streams of their own, so the shards of gradients, too, lie in a pool that activations cannot use.
Blocks that another stream uses when they are let go (record_stream) are free when that stream has passed.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py (torch 2.4 to 2.13);
torch/distributed/fsdp/_runtime_utils.py and _limiter_utils.py (2.1 to 2.13); deepspeed/runtime/zero/
partition_parameters.py and stage3.py (0.9 to 0.19). docs/theory/reserved.md has the functions.
"""

from __future__ import annotations

from collections import deque

from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Unit, Units
from overspill.forecast.device.stream_state import Pieces
from overspill.forecast.device.zero import gathered_nbytes
from overspill.forecast.tape import Category, Tape, Tensor

__all__ = ["COMPUTE", "GATHER", "REDUCE", "Exchange"]

COMPUTE, GATHER, REDUCE = 0, 1, 2
#: _FreeEventQueue of _limiter_utils.py: the host is let so many gathered units ahead of the device.
_INFLIGHT = 2


class Exchange:
    """Gathers, lets go and reduces units."""

    def __init__(self, tape: Tape, units: Units, resolved: Resolved) -> None:
        self.tape, self.units, self.resolved = tape, units, resolved
        self.sharding = resolved.sharding
        self._fetched: dict[str, Tensor] = {}
        self._flat: Tensor | None = None
        self._reducing: deque[list[Tensor]] = deque()
        self._passing: deque[list[int]] = deque()

    def new(self, nbytes: float, stream: int) -> Tensor:
        """A block of a collective's on one of the streams."""
        memory = self.tape.memory
        memory.stream = stream
        made = self.tape.new(round(nbytes), 1, Category.COMMUNICATION)
        memory.stream = COMPUTE
        return made

    # ---- weights ----

    def gather(
        self, unit: Unit, pieces: tuple[Pieces, ...], *, forward: bool, following: Unit | None = None
    ) -> list[Tensor]:
        """A unit's whole weights, until `let_go`. following: the unit that backward fetches ahead."""
        sharding = self.sharding
        if not sharding.splits_weights:
            return []
        if sharding.kind == "fsdp2":
            return self._gather_fsdp2(unit, pieces, following, forward=forward)
        self._wait()
        if sharding.kind == "zero3":
            ahead = gathered_nbytes(self.units, unit, sharding) - self._gathered_nbytes(unit)
            blocks = [self.new(nbytes, GATHER) for nbytes in self._parts(pieces)]
            return [*blocks, self.new(ahead, GATHER)] if ahead > 0 else blocks
        whole = self._fetched.pop(unit.name, None) or self._gather_fsdp1(unit)
        if following is not None and sharding.prefetched_units and following.name not in self._fetched:
            self._fetched[following.name] = self._gather_fsdp1(following)
        return [whole]

    def _gathered_nbytes(self, unit: Unit) -> int:
        return unit.numel * self.sharding.gathered_itemsize + unit.quantised_nbytes

    def _parts(self, pieces: tuple[Pieces, ...]) -> list[float]:
        size = self.sharding.gathered_itemsize
        return [numel * size if numel else nbytes for one in pieces for numel, nbytes, _ in one.weights]

    def _gather_fsdp1(self, unit: Unit) -> Tensor:
        cast = self._cast_shard(unit)
        whole = self.new(self._gathered_nbytes(unit), GATHER)
        del cast
        return whole

    def _gather_fsdp2(
        self, unit: Unit, pieces: tuple[Pieces, ...], following: Unit | None, *, forward: bool
    ) -> list[Tensor]:
        """One buffer on the gather's stream, copied out into parameters of the computation's."""
        flat = self._fetched.pop(unit.name, None) or self._collective(unit)
        if forward or self.sharding.copied_in_backward:
            self._flat = None  # of the unit before: its copies are under way once this one's collective is
        copies = [self.new(nbytes, COMPUTE) for nbytes in self._parts(pieces)]
        if forward or self.sharding.copied_in_backward:
            self._flat = flat
        del flat
        if following is not None:
            self._fetched[following.name] = self._collective(following)
        return copies

    def _collective(self, unit: Unit) -> Tensor:
        cast = self._cast_shard(unit)
        flat = self.new(self._gathered_nbytes(unit), GATHER)
        del cast
        return flat

    def _cast_shard(self, unit: Unit) -> Tensor | None:
        """The shard in the compute dtype, where it rests in another."""
        sharding = self.sharding
        if not unit.trained_numel or self.resolved.trained_itemsize == sharding.gathered_itemsize:
            return None
        return self.new(unit.trained_numel / sharding.ranks * sharding.gathered_itemsize, GATHER)

    def let_go(self, blocks: list[Tensor]) -> None:
        """The unit is sharded again. FSDP1 and ZeRO 3: the computation may still run, so the blocks are recorded."""
        if self.sharding.kind != "fsdp2":
            self._record(blocks)
        blocks.clear()

    def _record(self, blocks: list[Tensor]) -> None:
        passing = [one.storage.block for one in blocks if one.storage is not None]
        self.tape.memory.recorded.update(passing)
        self._passing.append(passing)

    def _wait(self) -> None:
        """The host waits until the device has let go what lies two units back."""
        while len(self._passing) >= _INFLIGHT:
            for block in self._passing.popleft():
                self.tape.memory.completed(block)

    # ---- gradients ----

    def reduce(self, pieces: tuple[Pieces, ...], grads: list[Tensor]) -> list[Tensor]:
        """From a unit's whole gradients, which go, to this rank's shards."""
        resolved, sharding = self.resolved, self.sharding
        units = [one.unit for one in pieces]
        trained = sum(unit.trained_numel + unit.adapter_numel for unit in units)
        if not trained:
            grads.clear()
            return []
        shard = sum(sum(one.shards(resolved)) for one in pieces)
        if sharding.kind == "fsdp2":
            return self._reduce_fsdp2(trained, shard, grads)
        if sharding.kind == "fsdp1":
            if sharding.flat_gradients:
                trained = sum(unit.numel for unit in units)
                shard = trained / sharding.ranks
            flat = self.new(trained * sharding.gathered_itemsize, COMPUTE)
            grads.clear()
            wide = None
            if sharding.reduce_itemsize != sharding.gathered_itemsize:
                wide = self.new(trained * sharding.reduce_itemsize, REDUCE)
            out = self.new(shard * sharding.reduce_itemsize, REDUCE)
            self._record([flat])
            del flat, wide
            return [self._as_gradient(out, shard)]
        grads.clear()
        if resolved.gradients_at_rest or resolved.gradients_on_host:
            return []
        where = REDUCE if sharding.overlap_comm else COMPUTE
        return [self.new(numel * resolved.gradient_itemsize, where) for one in pieces for numel in one.shards(resolved)]

    def _reduce_fsdp2(self, trained: int, shard: float, grads: list[Tensor]) -> list[Tensor]:
        """From torch 2.5 on the input is the computation's and the one before is let go first; before, it was the
        reduction's, and it and the gradients were held until the next unit's (pytorch#129721)."""
        sharding = self.sharding
        behind = sharding.reduces_one_behind
        if behind:
            self._reducing.clear()
        source = self.new(trained * sharding.reduce_itemsize, COMPUTE if behind else REDUCE)
        held = [source] if behind else [*grads, source]
        grads.clear()
        self._reducing.append(held)
        while len(self._reducing) > 1:
            self._reducing.popleft()
        del held, source
        out = self.new(shard * sharding.reduce_itemsize, REDUCE)
        return [self._as_gradient(out, shard)]

    def _as_gradient(self, out: Tensor, shard: float) -> Tensor:
        if self.sharding.reduce_itemsize == self.resolved.gradient_itemsize:
            return out
        return self.new(shard * self.resolved.gradient_itemsize, REDUCE)

    def finish(self) -> None:
        """The end of a backward: the computation waits for the collectives."""
        self._fetched.clear()
        self._flat = None
        self._reducing.clear()
        while self._passing:
            for block in self._passing.popleft():
                self.tape.memory.completed(block)
