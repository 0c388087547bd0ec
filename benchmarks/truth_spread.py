"""What a row leaves open, read in each way that it may be meant: the interval spans the readings, the first is likely.

Only for what the source did not publish; nothing here looks at a measured value. Rows like that are scored for the
coverage of their interval alone.
"""

from __future__ import annotations

import re

__all__ = ["readings", "spanned_kinds"]

#: Tokens at which a framework cuts a sequence when its user says nothing. fms-hf-tuning: DEFAULT_CONTEXT_LENGTH in
#: tuning/config/configs.py.
_LONGEST = {"fms-hf-tuning": 4096}
_SHORTEST = 2  # an input and a label


def readings(row: dict[str, str]) -> list[dict[str, str]]:
    """The row as it is, or once for each end of what it leaves open, the framework's default first."""
    if not row["seq_len"].strip():
        for framework, longest in _LONGEST.items():
            if framework in row["framework"]:
                return [{**row, "seq_len": str(length)} for length in (longest, _SHORTEST)]
    if "number of GPUs" in row["unpredictable"]:
        return [row, {**row, "n_gpus": "1", "parallelism": "none"}]
    return [row]


def spanned_kinds(row: dict[str, str]) -> tuple[str, ...]:
    """The figures that the published one may be."""
    if re.search(r"which figure .*not published", row["unpredictable"]):
        return ("allocated", "reserved")
    return (row["measure_kind"],)
