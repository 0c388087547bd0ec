"""What a commit holds beside state: it is strict JSON, and comes back as it was."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from overspill.errors import OverspillError
from overspill.train.snapshot import decode, encode

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_KEYS = st.text() | st.integers() | st.sampled_from(["__tensor__", "__array__", "__tuple__", "__items__", "__float__"])
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(_KEYS, inner),
    max_leaves=12,
)


def _through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@given(_VALUES)
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    back = _through_json(value)
    assert back == value
    assert repr(back) == repr(value)  # 1 and True, 0.0 and -0.0, list and tuple


@pytest.mark.parametrize("value", [math.inf, -math.inf, np.float32("inf"), np.float64("-inf")])
def test_an_infinite_number_comes_back(value: float) -> None:
    assert _through_json({"best": [value]}) == {"best": [float(value)]}


def test_no_number_comes_back_as_none() -> None:
    assert math.isnan(_through_json(math.nan)) and math.isnan(_through_json(np.float32("nan")))


def test_a_scheduler_that_begins_with_infinity_comes_back() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    assert scheduler.state_dict()["best"] == math.inf
    assert _through_json(scheduler.state_dict()) == scheduler.state_dict()


def test_what_json_cannot_hold_is_refused_where_it_stands() -> None:
    with pytest.raises(OverspillError, match=r"OVS504.*loader\.seen\[1\].*complex"):
        encode({"seen": [1, np.complex128(1j)]}, "loader")
