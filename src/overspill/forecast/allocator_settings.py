"""Settings of the CUDA caching allocator, as PYTORCH_CUDA_ALLOC_CONF writes them.

Names, units and defaults are those of torch's c10/cuda/CUDAAllocatorConfig.cpp and of the page "CUDA semantics, memory
management" of its documentation. Keys that change nothing about sizes are accepted and left alone; any other key is
an error, since a forecast under a setting that was not understood would be wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from overspill.errors import OverspillError
from overspill.units import MiB

__all__ = ["AllocatorSettings"]

_ENVIRONMENT: Final = "PYTORCH_CUDA_ALLOC_CONF"
_WITHOUT_EFFECT: Final = frozenset(
    {
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_max_register_threads",
        "graph_capture_record_stream_reuse",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    }
)
_SMALLEST_SPLIT_MIB: Final = 20


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """How the caching allocator behaves, and the memory that it may take.

    ``capacity_nbytes``: what the device can give to this process (None: no end). ``memory_fraction``: what
    ``set_per_process_memory_fraction`` set, without which ``garbage_collection_threshold`` does nothing.
    ``roundup_power2_divisions``: (from this size in MiB up, divisions) pairs, ascending; 0 divisions is off.
    """

    max_split_nbytes: int | None = None
    max_non_split_rounding_nbytes: int = 20 * MiB
    roundup_power2_divisions: tuple[tuple[int, int], ...] = ()
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    capacity_nbytes: int | None = None
    memory_fraction: float | None = None

    @classmethod
    def parse(
        cls, text: str, *, capacity_nbytes: int | None = None, memory_fraction: float | None = None
    ) -> AllocatorSettings:
        """Reads a value of PYTORCH_CUDA_ALLOC_CONF, for example ``expandable_segments:True,max_split_size_mb:128``.

        Raises OverspillError OVS101 for a key that is not known and OVS102 for a value out of range.
        """
        found: dict[str, object] = {}
        for part in _parts(text):
            key, colon, value = (piece.strip() for piece in part.partition(":"))
            if not colon or not value:
                raise _wrong(f"`{part}` is not of the form key:value", part)
            if key == "max_split_size_mb":
                found["max_split_nbytes"] = _mib(key, value, above=_SMALLEST_SPLIT_MIB)
            elif key == "max_non_split_rounding_mb":
                found["max_non_split_rounding_nbytes"] = _mib(key, value, above=_SMALLEST_SPLIT_MIB)
            elif key == "expandable_segments":
                found["expandable_segments"] = _truth(key, value)
            elif key == "garbage_collection_threshold":
                found["garbage_collection_threshold"] = _share(key, value)
            elif key == "per_process_memory_fraction":
                memory_fraction = _share(key, value, one=True)
            elif key == "roundup_power2_divisions":
                found["roundup_power2_divisions"] = _divisions(value)
            elif key == "backend":
                if value != "native":
                    raise _wrong(f"the backend {value} keeps its memory by other rules than the native allocator", key)
            elif key not in _WITHOUT_EFFECT:
                raise OverspillError(
                    "OVS101",
                    f"`{key}` is no key of {_ENVIRONMENT} that the allocator's model knows.",
                    field=f"{_ENVIRONMENT}.{key}",
                    next_step="Remove it, or ask for it with what it does.",
                )
        return cls(capacity_nbytes=capacity_nbytes, memory_fraction=memory_fraction, **found)  # type: ignore[arg-type]

    def divisions(self, nbytes: int) -> int:
        """How many steps lie between powers of two for requests of this size; 0 and 1 are off."""
        found = 0
        for from_mib, divisions in self.roundup_power2_divisions:
            if nbytes >= from_mib * MiB:
                found = divisions
        return found


def _parts(text: str) -> list[str]:
    """Splits at commas that are not inside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _wrong(what: str, key: str) -> OverspillError:
    return OverspillError("OVS102", f"{_ENVIRONMENT}: {what}.", field=f"{_ENVIRONMENT}.{key}")


def _mib(key: str, value: str, *, above: int) -> int:
    if not value.isdigit() or int(value) <= above:
        raise _wrong(f"{key} is a whole number of MiB above {above}, not {value}", key)
    return int(value) * MiB


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _wrong(f"{key} is True or False, not {value}", key)
    return value == "True"


def _share(key: str, value: str, *, one: bool = False) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not (0 < share < 1 or (one and share == 1)):
        raise _wrong(f"{key} lies between 0 and 1, not {value}", key)
    return share


def _divisions(value: str) -> tuple[tuple[int, int], ...]:
    """``4``, or ``[256:1,512:2,1024:4,>:8]``: sizes up to each limit in MiB, the last for all above.

    torch keeps one entry for each power of two: those below the first limit have its value, those between two that
    are not neighbours and those above the last have none, unless ``>`` gives it.
    """
    if not value.startswith("["):
        return ((0, _power_of_two(value)),)
    limits: list[tuple[int, int]] = []
    rest: int | None = None
    for part in value.strip("[]").split(","):
        limit, _, divisions = (piece.strip() for piece in part.partition(":"))
        if limit == ">":
            rest = _power_of_two(divisions)
        elif limit.isdigit() and int(limit) >= 1 and int(limit) & (int(limit) - 1) == 0:
            limits.append((int(limit), _power_of_two(divisions)))
        else:
            raise _wrong(f"`{part}` is not of the form power-of-two:divisions", "roundup_power2_divisions")
    limits.sort()
    steps = [(0, limits[0][1] if limits else rest or 0)]
    for limit_mib, steps_between in limits:
        steps += [(limit_mib, steps_between), (limit_mib * 2, 0)]
    if rest is not None and limits:
        steps.append((limits[-1][0] * 2, rest))
    return tuple(steps)


def _power_of_two(text: str) -> int:
    if not text.isdigit() or (int(text) and int(text) & (int(text) - 1)):
        raise _wrong(f"divisions are a power of two, not {text}", "roundup_power2_divisions")
    return int(text)
