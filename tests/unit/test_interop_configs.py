"""Configurations of other frameworks: real files give a job, each key meets one fate, bad files are refused in words.

The files are in tests/assets/configs (SOURCES.md says from where), what became of each key in config_results; here are
the rules that hold for all of them, and files made to break them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overspill.errors import OverspillError
from overspill.interop.configs import FORMATS, ConfigReading, read_config
from overspill.interop.configs.core import key_paths
from overspill.interop.configs.files import read_table
from overspill.job import Job

REPOSITORY = Path(__file__).resolve().parents[2]
ASSETS = REPOSITORY / "tests" / "assets" / "configs"
FILES = sorted(path for path in ASSETS.glob("*/*") if path.is_file())
FLAGS: dict[str, dict[str, Any]] = tomllib.loads((ASSETS / "flags.toml").read_text())

#: Keys that stand in a committed file and in no schema of its framework.
UNDOCUMENTED = {"full_finetune"}


def name_of(file: Path) -> str:
    return str(file.relative_to(ASSETS))


def fates(reading: ConfigReading, path: str) -> list[str]:
    """The entries of used, ignored and unknown that stand for a key: itself, or a table that it lies in."""
    entries = [*reading.used, *reading.ignored, *reading.unknown]
    return [one for one in entries if path == one or path.startswith(f"{one}.")]


def assert_every_key_has_one_fate(reading: ConfigReading, data: dict[str, Any]) -> None:
    paths = key_paths(data)
    for path in paths:
        assert len(fates(reading, path)) == 1, path
    for entry in [*reading.used, *reading.ignored, *reading.unknown]:
        if ":" not in entry:  # a key of another file, named by this one
            assert any(path == entry or path.startswith(f"{entry}.") for path in paths), entry


def test_there_are_the_files_that_the_results_are_about() -> None:
    assert len(FILES) == 104
    assert set(FLAGS) <= {name_of(file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_that_people_use_gives_a_job_or_says_that_it_trains_nothing(file: Path) -> None:
    reading = read_config(file, FLAGS.get(name_of(file), {}))
    assert reading.missing == ()
    if not reading.trains:
        assert reading.job is None
        assert any("no training job" in note for note in reading.notes)
        return
    assert reading.job is not None
    assert reading.job.model.path
    said = {field for fields in reading.used.values() for field in fields.split(", ")} | set(reading.assumed)
    given_fields = {"micro-batch": "train.micro_batch", "seq-len": "data.seq_len", "model": "model.path"}
    said |= {field for flag, field in given_fields.items() if flag in FLAGS.get(name_of(file), {})}
    assert {"model.path", "train.micro_batch", "data.seq_len"} <= said
    again = Job.read(json.loads(reading.job.model_dump_json()))
    assert again == reading.job


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_key_of_a_file_is_used_or_ignored_or_unknown(file: Path) -> None:
    reading = read_config(file, FLAGS.get(name_of(file), {}))
    assert_every_key_has_one_fate(reading, read_table(file))
    assert set(reading.unknown) <= UNDOCUMENTED


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_format_is_seen_from_the_keys(file: Path) -> None:
    assert read_config(file, FLAGS.get(name_of(file), {})).format == file.parent.name


def test_without_its_flags_a_file_names_what_is_missing() -> None:
    lacking = [name for name, row in FLAGS.items() if {"model", "seq-len", "deepspeed"} & set(row)]
    assert len(lacking) > 40
    for name in lacking:
        reading = read_config(ASSETS / name)
        assert reading.job is None, name
        assert reading.missing, name
        assert any("is missing" in note for note in reading.notes)


def test_the_committed_results_are_as_the_readers_say() -> None:
    tool = REPOSITORY / "tools" / "make_config_results.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_reader_needs_torch_and_json_needs_no_yaml() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from overspill.interop.configs import read_config\n"
        f"read_config({str(ASSETS / 'deepspeed' / 'axolotl__zero2.json')!r})\n"
        "assert 'yaml' not in sys.modules\n"
        f"read_config({str(ASSETS / 'axolotl' / 'mistral__lora.yml')!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Any keys, any values ----------------------------------------------------------------------------------------------


def _all_keys() -> dict[str, list[str]]:
    """For each format, every key of its files, as dotted paths."""
    keys: dict[str, set[str]] = {}
    for file in FILES:
        keys.setdefault(file.parent.name, set()).update(
            path for path in key_paths(read_table(file)) if '"' not in path and "<" not in path
        )
    return {name: sorted(found) for name, found in keys.items()}


KEYS = _all_keys()
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70_000),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(
        ["auto", "true", "no", "bf16", "lora", "nf4", "cpu", "FULL_SHARD", "adamw_torch", "cosine", "all", ""]
    ),
    st.text(max_size=8).filter(lambda text: text.isprintable()),
    st.lists(st.sampled_from(["q_proj", "v_proj", 1, None]), max_size=3),
    st.dictionaries(st.sampled_from(["enabled", "stage", "a.b", "_component_"]), st.integers(0, 3), max_size=2),
)


def _table(rows: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for path, value in rows:
        *above, last = path.split(".")
        here: Any = table
        for part in above:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                break
        if isinstance(here, dict):
            here[last] = value
    return table


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(KEYS)))
    known = st.tuples(st.sampled_from(KEYS[name]), VALUES)
    strange = st.tuples(st.text("abc_", min_size=1, max_size=6), VALUES)
    rows = draw(st.lists(known | strange, min_size=1, max_size=25))
    return name, _table(rows)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tables())
def test_any_table_of_keys_is_read_or_refused_in_words(case: tuple[str, dict[str, Any]]) -> None:
    name, data = case
    file = Path(_FOLDER) / "any.yaml"
    file.write_text(yaml.safe_dump(data))
    try:
        reading = read_config(file, {"model": "m", "seq_len": 64, "micro_batch": 1}, format=name)
    except OverspillError as error:
        assert error.code in ("OVS101", "OVS102", "OVS109")
        return
    assert_every_key_has_one_fate(reading, read_table(file))
    for key in data:
        if set(key) <= set("abc_"):  # made up here: only a file that trains nothing may shrug it off
            assert not reading.trains or all(one.split(".")[0] != key for one in reading.used)


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _FOLDER
    _FOLDER = str(tmp_path_factory.mktemp("configs"))


_FOLDER = ""


@pytest.mark.parametrize("name", sorted(KEYS))
def test_a_key_that_is_left_empty_is_still_understood(name: str, tmp_path: Path) -> None:
    wrong = []
    for file in (one for one in FILES if one.parent.name == name):
        data = read_table(file)
        text = json.dumps(data, default=str)
        named = read_config(file).trains  # without a component's name there is nothing to read
        for key in key_paths(data) if named else ():
            if key.endswith("_component_"):
                continue
            emptied = json.loads(text)
            *above, last = key.split(".")
            table = emptied
            for part in above:
                table = table[part]
            table[last] = None
            (tmp_path / "one.json").write_text(json.dumps(emptied))
            flags = FLAGS.get(name_of(file), {}) | {"deepspeed": None}
            reading = read_config(tmp_path / "one.json", flags, format=name)
            wrong += [f"{file.name}: {one}" for one in reading.unknown if one not in UNDOCUMENTED and ":" not in one]
    assert sorted(set(wrong)) == []


def test_each_format_has_a_reader() -> None:
    assert set(FORMATS) == {"accelerate", "axolotl", "deepspeed", "hf", "llamafactory", "torchtune", "trl"}
