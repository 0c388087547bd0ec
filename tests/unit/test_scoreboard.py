"""The scoreboard's statistics and rules, on an invented table; and that no number of the forecast is keyed to a row.

tests/assets/scoreboard/invented.csv has the form of a table of measurements; its figures were made up for these tests.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import competitors  # noqa: E402
import components  # noqa: E402
import score_rows  # noqa: E402
import scoreboard  # noqa: E402
from score_rows import BadTable, Row, read_rows, score_row  # noqa: E402
from score_summary import summarise  # noqa: E402
from scoring import (  # noqa: E402
    Judged,
    Point,
    Span,
    _best_band,
    baseline,
    coverage,
    interval_score,
    median,
    over_sources,
    quantile,
    verdicts,
)
from truth_cards import card_of, with_capacity  # noqa: E402
from truth_spread import readings, spanned_kinds  # noqa: E402

from overspill.units import GiB  # noqa: E402

INVENTED = ROOT / "tests" / "assets" / "scoreboard" / "invented.csv"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.id: row for row in score_rows.score_rows(read_rows(INVENTED), workers=1)}


@pytest.fixture
def table(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "table.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_every_row_of_the_table_has_a_forecast_or_a_reason(rows: dict[str, Row]) -> None:
    assert len(rows) == len(INVENTED.read_text().splitlines()) - 1
    for row in rows.values():
        assert bool(row.figures) != bool(row.reason), row.id


def test_a_row_of_an_unknown_framework_or_model_or_without_a_batch_is_named_with_the_reason(
    rows: dict[str, Row],
) -> None:
    assert "framework" in rows["inv-unknown-framework"].reason
    assert "not in the catalogue" in rows["inv-unknown-model"].reason
    assert "micro_batch is not published" in rows["inv-no-batch"].reason
    assert "measured_gib is no number" in rows["inv-no-number"].reason
    assert "none of" in rows["inv-unknown-kind"].reason
    summary = summarise(list(rows.values()))
    assert summary.counts["not mapped"] == sum(not row.mapped for row in rows.values()) == 5


def test_a_row_that_says_the_same_as_another_counts_once(rows: dict[str, Row]) -> None:
    assert rows["inv-alloc-1b"].repeats == "inv-alloc-1"
    assert not rows["inv-alloc-1b"].scored
    assert rows["inv-alloc-2"].repeats == ""  # another batch
    assert rows["inv-alloc-1c"].repeats == ""  # the same batch, another value


def test_rows_of_quality_c_and_unpredictable_ones_are_forecast_and_not_scored(rows: dict[str, Row]) -> None:
    for name in ("inv-quality-c", "inv-lengths"):
        assert rows[name].figures
        assert not rows[name].scored


def test_compiled_rows_are_a_cell_of_their_own(rows: dict[str, Row]) -> None:
    eager, compiled = rows["inv-eager"], rows["inv-compiled"]
    assert eager.cell[0] == compiled.cell[0] == "torchtitan"
    assert eager.cell[1] == "full"
    assert compiled.cell[1] == "full, torch.compile"


def test_a_cell_needs_five_distinct_rows(rows: dict[str, Row]) -> None:
    one = rows["inv-alloc-1"]
    five = [replace(one, id=f"copy {number}") for number in range(5)]
    assert [cell.rows for cell in summarise(five).cells] == [5]
    assert summarise(five[:4]).cells == ()
    assert summarise([*five[:4], replace(one, id="again", repeats="copy 0")]).cells == ()


def test_cells_stand_worst_first(rows: dict[str, Row]) -> None:
    one = rows["inv-alloc-1"]
    assert one.measured is not None
    far = [replace(one, id=f"far {number}", method="lora", measured=2 * one.measured) for number in range(5)]
    near = [replace(one, id=f"near {number}") for number in range(5)]
    cells = summarise([*near, *far]).cells
    assert [cell.method for cell in cells] == ["lora", "full"]
    assert cells[0].median_error > cells[1].median_error


def test_a_source_file_weighs_the_same_however_many_rows_it_has() -> None:
    many = [Point("a", 10, Span(9, 11, 12), 10)] * 99
    few = [Point("b", 10, Span(9, 13, 14), 10)]
    assert over_sources([*many, *few], lambda some: median(abs(one.error) for one in some)) == pytest.approx(0.2)
    assert over_sources([], coverage) is None


def test_coverage_counts_the_figures_that_lie_in_the_interval() -> None:
    points = [Point("a", value, Span(9, 10, 11), 10) for value in (8, 9, 10, 11)]
    assert coverage(points) == 0.75


def test_quantiles_are_those_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert quantile(values, share) == pytest.approx(float(numpy.quantile(values, share)))
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_the_interval_score_is_the_width_and_twenty_times_what_is_missed() -> None:
    assert interval_score(8, 12, 10) == pytest.approx(0.4)
    assert interval_score(8, 12, 7) == pytest.approx((4 + 20 * 1) / 7)
    assert interval_score(8, 12, 16) == pytest.approx((4 + 20 * 4) / 16)


@given(
    measured=st.lists(st.floats(5, 20), min_size=2, max_size=8),
    others=st.lists(st.floats(5, 20), min_size=2, max_size=8),
    ratio=st.floats(0.2, 5),
)
def test_no_constant_ratio_has_a_smaller_error_than_the_fitted_one(
    measured: list[float], others: list[float], ratio: float
) -> None:
    points = [Point("left out", 10, Span(9, 10, 11), 10)]
    points += [Point("a", value, Span(9, 10, 11), 10) for value in measured]
    points += [Point("b", value, Span(9, 10, 11), 10) for value in others]
    fitted = baseline(points)
    assert fitted is not None

    def loss(one: float) -> float:
        return sum(median(abs(one * 10 / value - 1) for value in values) for values in (measured, others))

    assert loss(fitted.ratios["left out"]) <= loss(ratio) + 1e-9


@given(values=st.lists(st.floats(5, 20), min_size=1, max_size=12), low=st.floats(0.3, 2), width=st.floats(0, 2))
def test_no_constant_band_has_a_smaller_interval_score_than_the_fitted_one(
    values: list[float], low: float, width: float
) -> None:
    points = [Point("a", value, Span(9, 10, 11), 10) for value in values]

    def loss(band: tuple[float, float]) -> float:
        return sum(interval_score(band[0] * 10, band[1] * 10, value) for value in values)

    assert loss(_best_band({"a": points})) <= loss((low, low + width)) + 1e-6


def test_the_ratio_does_not_see_the_source_that_it_is_scored_on() -> None:
    points = [Point("a", 12, Span(1, 1, 1), 10)] * 3 + [Point("b", 15, Span(1, 1, 1), 10)] * 3
    fitted = baseline(points)
    assert fitted is not None
    assert fitted.ratios == {"a": pytest.approx(1.5), "b": pytest.approx(1.2)}
    assert fitted.median_error == pytest.approx((abs(15 / 12 - 1) + abs(12 / 15 - 1)) / 2)
    assert baseline(points[:3]) is None


def test_tight_counts_as_fits_and_a_confident_miss_is_counted() -> None:
    judged = [
        Judged("a", True, "fits", 0.01), Judged("a", True, "tight", 0.2), Judged("a", False, "does not fit", 0.9),
        Judged("b", False, "fits", 0.01), Judged("b", False, "tight", 0.3),
    ]  # fmt: skip
    found = verdicts(judged)
    assert found is not None
    assert found.right == pytest.approx((1.0 + 0.0) / 2)
    assert found.tight == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert (found.wrong, found.confidently_wrong, found.count) == (2, 1, 5)
    assert verdicts([]) is None


def test_virtual_cards_lie_below_what_was_allocated_and_from_what_was_shown_on(rows: dict[str, Row]) -> None:
    allocated, shown = rows["inv-alloc-1"], rows["inv-smi-1"]
    assert [(one.share, one.ran) for one in allocated.virtual] == [(0.9, False), (0.97, False)]
    assert [(one.share, one.ran) for one in shown.virtual] == [(1.0, True), (1.1, True)]
    assert rows["inv-reserved-1"].virtual == rows["inv-lengths"].virtual == ()


def test_a_virtual_card_far_below_the_forecast_does_not_fit_and_one_far_above_does() -> None:
    row = next(one for one in read_rows(INVENTED) if one["id"] == "inv-alloc-1")
    assert all(one.verdict == "does not fit" for one in score_row({**row, "measured_gib": "4"}).virtual)
    high = {**row, "measured_gib": "900", "measure_kind": "smi"}
    assert all(one.verdict == "fits" for one in score_row(high).virtual)


def test_published_and_inferred_verdicts_are_lines_of_their_own(rows: dict[str, Row]) -> None:
    lines = summarise(list(rows.values())).verdict_lines
    published, inferred = lines["published"], lines["inferred out of memory"]
    assert published is not None
    assert inferred is not None
    assert (published.count, inferred.count) == (2, 1)
    assert rows["inv-oom"].verdict == "does not fit"
    assert rows["inv-fits"].verdict in ("fits", "tight")


def test_lengths_that_are_not_published_widen_the_interval_to_the_frameworks_default(rows: dict[str, Row]) -> None:
    row = next(one for one in read_rows(INVENTED) if one["id"] == "inv-lengths")
    known = score_row({**row, "seq_len": "4096", "unpredictable": ""})
    spread = rows["inv-lengths"].spanned
    assert spread is not None
    assert known.spanned is not None
    assert spread.high == pytest.approx(known.spanned.high)
    assert spread.low < known.spanned.low


def test_an_uncertain_number_of_gpus_is_read_both_ways_and_an_unnamed_figure_spans_two() -> None:
    row = {**read_rows(INVENTED)[0], "unpredictable": "number of GPUs uncertain", "n_gpus": "4"}
    assert [one["n_gpus"] for one in readings(row)] == ["4", "1"]
    named = {**row, "unpredictable": "which figure (active, allocated, reserved) not published"}
    assert spanned_kinds(named) == ("allocated", "reserved")


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("A100-80GB", "A100 SXM 80GB", None),
        ("a100_40gb", "A100 SXM 40GB", None),
        ("H100-95.04GiB", "H100 SXM 80GB", 95.04),
        ("RTX4070TiS-16GB", "RTX 4070 Ti SUPER", None),
        ("A10G-24GB", "A10G 24GB", None),
        ("B200/GB200 (184GiB)", "B200 SXM 180GB", 184.0),
    ],
)
def test_a_card_is_found_by_what_tables_write_and_a_stated_memory_is_taken(
    text: str, name: str, gib: float | None
) -> None:
    card, reason = card_of(text)
    assert card is not None, reason
    assert card.name == name
    if gib is not None:
        assert card.usable_nbytes == round(gib * GiB)


def test_a_size_on_the_box_that_the_catalogue_lacks_is_less_what_the_driver_keeps() -> None:
    card, _ = card_of("H100-96GB(HBM2e)")
    assert card is not None
    assert 94 * GiB < card.usable_nbytes < 96 * GiB
    assert with_capacity(card, 5 * GiB).usable_nbytes == 5 * GiB


def test_a_card_that_nobody_knows_gives_figures_and_no_verdict(rows: dict[str, Row]) -> None:
    row = rows["inv-odd-card"]
    assert row.figures
    assert row.verdict is None
    assert "not in the catalogue" in row.no_verdict
    assert card_of("") == (None, "the card is not published")


def test_a_missing_column_is_named(table: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = table("id,model\n1,2\n")
    assert scoreboard.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "lacks the columns source_ref, method" in said


def test_a_table_without_rows_or_with_an_id_twice_or_not_there_is_refused(table: Callable[[str], Path]) -> None:
    lines = INVENTED.read_text().splitlines()
    with pytest.raises(BadTable, match="a header and no rows"):
        read_rows(table(lines[0] + "\n"))
    with pytest.raises(BadTable, match="used twice"):
        read_rows(table("\n".join([*lines, lines[1]])))
    with pytest.raises(BadTable, match="lacks the columns"):
        read_rows(table(""))
    with pytest.raises(BadTable, match="cannot be read"):
        read_rows("no such file.csv")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"id,model\n\xff\xfe\x00,1\n")
    with pytest.raises(BadTable, match="not a CSV file in UTF-8"):
        read_rows(path)


def test_the_report_holds_each_row_and_the_page_names_no_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {name: tmp_path / name for name in ("full.json", "small.json", "page.md")}
    arguments = [
        "--json",
        str(out["full.json"]),
        "--compact",
        str(out["small.json"]),
        "--markdown",
        str(out["page.md"]),
    ]
    assert scoreboard.main([str(INVENTED), "--workers", "1", *arguments]) == 0
    full, small = (json.loads(out[name].read_text()) for name in ("full.json", "small.json"))
    with INVENTED.open(newline="") as file:
        ids = {row["id"] for row in csv.DictReader(file)}
    assert set(full["rows"]) == set(small["rows"]) == ids
    one = full["rows"]["inv-alloc-1"]
    assert one["error"] == pytest.approx(one["allocated"]["likely_gib"] / one["measured_gib"] - 1, abs=1e-4)
    assert {"allocated", "reserved", "smi", "probability", "verdict", "interval"} <= set(one)
    assert {"kind", "source", "method", "quality", "cells"} <= set(full["summary"])
    page = out["page.md"].read_text()
    assert str(ROOT) not in page
    assert not re.search(r"(^|[\s(`])/(home|work|tmp|root)/", page)
    assert "Not run: `benchmarks/competitors.py`" in page
    assert "inv-unknown-model" in page
    assert "scored" in capsys.readouterr().out


def test_other_estimators_are_not_needed(tmp_path: Path) -> None:
    out = tmp_path / "others.json"
    assert competitors.main([str(INVENTED), "--out", str(out)]) == 0
    tools = json.loads(out.read_text())["tools"]
    assert set(tools) == set(competitors.TOOLS)
    assert all("not run" in one["note"] and one["rows"] == {} for one in tools.values())
    assert competitors.main([str(INVENTED), "--out", str(out), "--fitcheck", sys.executable]) == 0
    assert "did not run" in json.loads(out.read_text())["tools"]["fitcheck"]["note"]


def test_a_kernel_of_the_tape_needs_what_its_rule_says(table: Callable[[str], Path]) -> None:
    config = '"{""B"": 2, ""T"": 1024}"'
    head = ",".join(components.COLUMNS)
    lines = [head, f"cross_entropy,huggingface,full,V,4096,1,{config},NVIDIA A100,0.2.1"]
    lines += [f"cross_entropy,liger,full,V,4096,1,{config},NVIDIA A100,0.2.1", f"odd,liger,full,V,1,1,{config},X,0.2.1"]
    torch, liger, odd = components.score(table("\n".join(lines)))
    logits = 2 * 1024 * 4096 * 4 / 2**20
    assert torch.forecast_mib == pytest.approx(5 * logits, rel=1e-2)  # input, .grad, log-softmax, two gradients
    assert liger.forecast_mib == pytest.approx(logits, rel=1e-2)  # the gradient lies over the input
    assert odd.error is None
    assert "no composition" in odd.reason


#: What a row's id, or a file of measurements, would look like if a number were keyed to it.
_KEYED = re.compile(
    r"\b(fms|litgpt|simu|titan|tune|mpt|ao|ds|peftiss|torchao|llmf)-\d{2,}\b|a100_80gb|refs_orca|resource-tables|"
    r"b200_release|llama3_h100_\d|fms-acceleration|SimuMax|measured\.csv|source_ref",
    re.IGNORECASE,
)  # fmt: skip


def _keyed(text: str) -> list[str]:
    return [match.group(0) for match in _KEYED.finditer(text)]


def test_no_number_of_the_forecast_is_keyed_to_a_row_or_a_source_of_measurements() -> None:
    places = [ROOT / "src" / "overspill" / "forecast", ROOT / "src" / "overspill" / "catalog"]
    found = {}
    for place in places:
        for path in sorted(place.rglob("*")):
            if path.suffix not in (".py", ".toml", ".csv", ".json"):
                continue
            text = path.read_text(encoding="utf-8")
            if path.name == "empirical.py":
                text = _without_citations(text)
            if keyed := _keyed(text):
                found[str(path.relative_to(ROOT))] = keyed
    assert not found


def _without_citations(text: str) -> str:
    """empirical.py says where a term was seen as the source of a Found, nowhere else: conditions are searched."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Found":
            source = node.args[2]
            assert isinstance(source, ast.Constant) and isinstance(source.value, str)
            text = text.replace(source.value, "")
    return text


def test_a_condition_of_an_empirical_term_is_searched_and_its_citation_is_not() -> None:
    cited = 'Found("a term", "reserved", "SimuMax, a table", Range(0, 1, 1))'
    assert not _keyed(_without_citations(cited))
    assert _keyed(_without_citations(f'if job.name == "titan-021": {cited}'.replace(": F", ":\n    F")))


def test_the_mapping_of_rows_looks_at_no_measured_value_and_no_id() -> None:
    """truth.py and truth_spread.py may read a row's id to name it in a message, nothing more; never the figure."""
    for name in ("truth.py", "truth_spread.py", "truth_cards.py"):
        tree = ast.parse((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))
        words = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert "measured_gib" not in words, name
        assert "published_value" not in words, name
        assert not [
            word
            for word in words
            if _KEYED.search(word) and word not in ("fms-hf-tuning", "source_ref") and "\n" not in word
        ], name


def test_the_search_for_keyed_numbers_finds_them() -> None:
    assert _keyed('if source == "refs/a100_80gb.csv": nbytes *= 1.02')
    assert _keyed("# fitted on litgpt-013")
    assert _keyed("SPREAD = {'titan-021': 3}")
    assert not _keyed("A100 SXM 80GB, fms_norm, litgpt-style, a tuned-down value")
