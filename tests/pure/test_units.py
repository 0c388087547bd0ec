"""Quantities as people write them: GB and GiB are never confused, and what cannot be read is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.errors import CODES, OverspillError
from overspill.units import format_nbytes, format_seconds, parse_bytes_per_s, parse_nbytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("1.5 MiB", 3 * 2**19), ("0B", 0), ("7kB", 7000), (512, 512)],
)
def test_bytes_are_read_with_their_own_unit(text: str | int, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("24Gib", "GiB"),
        ("24gb", "GB"),
        ("24G", "GB"),
        ("24 parsecs", "Known units"),
        ("8", '"8GiB"'),
        (" 0 ", '"0B"'),
        ("-1GiB", ""),
        ("", ""),
        ("1e999GB", ""),
    ],
)
def test_a_wrong_quantity_is_named_with_the_nearest_unit(text: str, hint: str) -> None:
    with pytest.raises(OverspillError) as caught:
        parse_nbytes(text, "plan.memory")
    assert caught.value.code == "OVS102"
    assert caught.value.field == "plan.memory"
    assert hint in caught.value.next_step


@pytest.mark.parametrize("value", [-1, 1.5, True, None, float("nan"), float("inf"), [3]])
def test_what_is_no_count_of_bytes_is_refused(value: object) -> None:
    with pytest.raises(OverspillError, match="OVS102"):
        parse_nbytes(value)  # type: ignore[arg-type]


def test_rates_and_durations() -> None:
    assert parse_bytes_per_s("7GB/s") == 7e9
    assert parse_bytes_per_s(1234.5) == 1234.5
    assert parse_seconds("10min") == 600
    assert parse_seconds("250ms") == 0.25
    for wrong in ("7GB", -1.0, float("inf"), True):
        with pytest.raises(OverspillError, match="OVS102"):
            parse_bytes_per_s(wrong)


@given(st.integers(0, 2**60))
def test_printing_bytes_and_reading_them_back_differs_by_rounding_only(nbytes: int) -> None:
    back = parse_nbytes(format_nbytes(nbytes))
    assert abs(back - nbytes) <= max(0.05 * nbytes, 1)


@given(st.floats(0, 1e7))
def test_durations_are_printed_without_error(seconds: float) -> None:
    assert format_seconds(seconds)


def test_an_error_survives_being_sent_to_another_process_and_says_all_it_knows() -> None:
    import pickle

    error = OverspillError(
        "OVS301", "Too small.", field="plan.memory", value="1 GiB", limit="2 GiB", next_step="Raise it."
    )
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "[OVS301] Too small. (plan.memory, got 1 GiB, limit 2 GiB) Raise it."
    assert all(code.title and code.cause and code.fix for code in CODES.values())
