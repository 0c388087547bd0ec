"""What the nouns share: frozen pydantic models, quantities with units, errors with a field path.

Job, Machine, Plan, Forecast and StepReport are values: they are compared, written to JSON and handed to
another process, never changed. A wrong key or value becomes an OverspillError that names the key's path and
the nearest known key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Self, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from overspill.errors import OverspillError
from overspill.units import parse_bytes_per_s, parse_nbytes, parse_seconds

__all__ = ["BytesPerSecond", "Frozen", "Nbytes", "Seconds"]


class Frozen(BaseModel):
    """A value: frozen, no unknown keys, no silent coercion of texts to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @classmethod
    def read(cls, data: dict[str, Any], *, source: str = "") -> Self:
        """Build from plain data. Raises OverspillError OVS101 or OVS102 naming the first wrong key."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _as_overspill_error(cls, error.errors(), source) from None


def _quantity(parse: Any) -> Any:
    def read(value: Any) -> Any:
        if value is None:
            return None
        try:
            return parse(value)
        except OverspillError as error:
            raise PydanticCustomError(
                "OVS102", "{sentence}", {"sentence": error.message, "next_step": error.next_step}
            ) from None

    return BeforeValidator(read)


Nbytes = Annotated[int, _quantity(parse_nbytes)]
BytesPerSecond = Annotated[float, _quantity(parse_bytes_per_s)]
Seconds = Annotated[float, _quantity(parse_seconds)]


def _known_keys(model: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """The keys of the table at ``path``, following nested models, also by name in a dict, as far as they go."""
    here: Any = model
    named: Any = None  # the model of a dict's values, when the next part is the name of one
    for part in path:
        if named is not None:
            here, named = named, None
            continue
        field = getattr(here, "model_fields", {}).get(part)
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        here = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        named = here if get_origin(field.annotation) is dict else None
    return list(getattr(here, "model_fields", {}))


def _as_overspill_error(model: type[BaseModel], errors: list[ErrorDetails], source: str) -> OverspillError:
    first = errors[0]
    path = ".".join(str(part) for part in first["loc"])
    where = f" in {source}" if source else ""
    more = f" ({len(errors) - 1} more after this one.)" if len(errors) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _known_keys(model, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else f"Known keys there: {', '.join(known)}."
        return OverspillError("OVS101", f"Unknown key{where}.{more}", field=path, next_step=hint)
    if first["type"] == "OVS102":
        context = first.get("ctx", {})
        return OverspillError(
            "OVS102",
            f"{context.get('sentence', first['msg'])}{where and ' It stands' + where + '.'}{more}",
            field=path,
            value=first["input"],
            next_step=context.get("next_step"),
        )
    if first["type"] == "missing":
        return OverspillError("OVS101", f"A key is missing{where}.{more}", field=path, next_step=f"Add {path}.")
    said = first["msg"].removeprefix("Value error, ").rstrip(".")  # of our own validators
    seen = None if isinstance(first["input"], dict) else first["input"]  # a whole table says nothing
    # "2" where 2 is meant: the quotes are what is wrong.
    value = repr(seen) if isinstance(seen, str) and first["type"].endswith("_type") else seen
    return OverspillError("OVS101", f"{said}{where}.{more}", field=path, value=value)
