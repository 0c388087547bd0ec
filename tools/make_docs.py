"""Writes the reference pages that are made from the code: errors, the job file, the command line, metrics, Python.

Each page has one source: errors.CODES, the pydantic schemas, the typer commands, docstrings. `make docs` writes them;
`--check` fails and names the first page that differs, which is what the test does. Nothing else is generated.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "src"))

from overspill.cli.main import app  # noqa: E402
from overspill.cli.starter import job_tables, starter_text, toml_value  # noqa: E402
from overspill.errors import CODES  # noqa: E402
from overspill.forecast.activations import KEPT_BY_ACTIVATION  # noqa: E402
from overspill.model.read import trainable_families  # noqa: E402
from overspill.report import StepReport  # noqa: E402

REFERENCE = REPOSITORY / "docs" / "reference"
MARK = "<!-- Made by tools/make_docs.py; do not edit. -->\n"
GROUP_BY_DIGIT = {
    "1": "The job file and the command line",
    "2": "The model and the data",
    "3": "Memory",
    "4": "Disk",
    "5": "The session",
    "6": "Runs",
}


def error_pages() -> dict[Path, str]:
    pages = {}
    index = [MARK, "# Errors\n", "Every error that a user can act on has a code. A code keeps its meaning.\n"]
    group = ""
    for code, row in sorted(CODES.items()):
        if code[3] != group:
            group = code[3]
            index += [f"\n## {GROUP_BY_DIGIT[group]}\n"]
        index.append(f"- [{code}](errors/{code}.md): {row.title}")
        pages[REFERENCE / "errors" / f"{code}.md"] = (
            f"{MARK}\n# {code}: {row.title}\n\n**Why.** {row.cause}\n\n**What to do.** {row.fix}\n\n"
            "[All errors](../errors.md)\n"
        )
    pages[REFERENCE / "errors.md"] = "\n".join(index) + "\n"
    return pages


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def job_page() -> str:
    lines = [
        MARK,
        "# The job file",
        "",
        "One TOML file (JSON is read as well) says what is trained, on what and how; every command reads it.",
        "`overspill new` writes one with every key. Unknown keys are errors that name the nearest known one.",
        'Sizes carry a unit: `"24GiB"` is 24·1024³ bytes, `"24GB"` is 24·1000³. Paths are relative to the file',
        "(also in a run's own job.toml); `model.path` is a hub id where there is no such directory beside the file.",
    ]
    for table in job_tables():
        lines += ["", f"## [{table.name}]", "", table.description, ""]
        lines += ["| key | type | default | |", "|---|---|---|---|"]
        for key in table.keys:
            default = (
                "**required**" if key.required else "not set" if key.default is None else f"`{toml_value(key.default)}`"
            )
            lines.append(f"| `{key.name}` | {_cell(key.kind)} | {default} | {_cell(key.description)} |")
    lines += ["", "## A file with every key", "", "```toml", starter_text().rstrip(), "```", ""]
    return "\n".join(lines)


def models_page() -> str:
    native = ", ".join(f"`{name}`" for name in sorted(KEPT_BY_ACTIVATION))
    lines = [
        MARK,
        "# Models",
        "",
        "`overspill train`, and a forecast of a run on this machine, take the families whose activations on a CPU are",
        "known. A model's family is `model_type` in its config.json:",
        "",
        *(f"- `{family}`" for family in trainable_families()),
        "",
        f"Of activation functions, {native} keep what torch's own functions keep; any other is counted as",
        "one that is written in Python, which keeps more. Weights are safetensors, not quantised, and no code of a",
        "model directory is run. The forecast of activations is for training on a CPU",
        "([memory](../theory/memory.md)).",
        "",
        "Any other family is refused before anything is loaded, with [OVS201](errors/OVS201.md). It can still be",
        "trained: `overspill.attach` takes any torch module ([attach to your own loop](../howto/attach.md)); there",
        "you say in `plan.activations_nbytes` what its activations take.",
    ]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    lines = [
        MARK,
        "# metrics.jsonl",
        "",
        inspect.cleandoc(StepReport.__doc__ or "").replace("``", "`"),
        "",
        "One JSON object a line, one line an optimizer step, in order. A number that is not finite stands as the text",
        '`"NaN"`, `"Infinity"` or `"-Infinity"`, since JSON has none. A resume cuts the file back to the',
        "committed step.",
        "",
        "| key | type | |",
        "|---|---|---|",
    ]
    for name, info in StepReport.model_fields.items():
        kind = str(info.annotation).replace("<class '", "").replace("'>", "")
        lines.append(f"| `{name}` | {_cell(kind)} | {_cell(info.description or '')} |")
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    import typer.main

    root = typer.main.get_command(app)
    lines = [
        MARK,
        "# The command line",
        "",
        "Exit codes: 0 done; 1 a fault of Overspill's (the message names the file with the traceback); 2 a mistake",
        "that you can act on (one paragraph with a code, see [errors](errors.md)); 130 interrupted by Ctrl-C.",
        "With `--json` results are JSON on standard output, notices go to standard error.",
    ]
    for path, command in _walk(root, ("overspill",)):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = [_argument(p) if p.required else f"[{_argument(p)}]" for p in arguments]
        lines += ["", f"## {' '.join([*path, *usage])}", "", (command.help or "").strip()]
        rows = [p for p in command.params if p.param_type_name in ("option", "argument") and p.name != "help"]
        if rows:
            lines += ["", "| | |", "|---|---|"]
            for parameter in rows:
                is_option = parameter.param_type_name == "option"
                name = ", ".join(f"`{o}`" for o in parameter.opts) if is_option else f"`{_argument(parameter)}`"
                lines.append(f"| {name} | {_cell(getattr(parameter, 'help', None) or '')} |")
    return "\n".join(lines) + "\n"


#: What a user writes in Python, in the order in which it is needed; of a class, the members that are theirs to call.
PYTHON: dict[str, dict[str, tuple[str, ...]]] = {
    "overspill": {
        "attach": (),
        "Session": (
            "flush",
            "track",
            "step_boundary",
            "checkpoint",
            "expect_checkpoint",
            "restore_rng",
            "committed_step",
            "step_facts",
            "measure_norm",
            "close",
        ),
        "TieredOptimizer": ("step", "state_dict", "load_state_dict", "add_param_group"),
        "Plan": (),
        "forecast": (),
        "Forecast": (),
        "Job": (),
        "Machine": (),
        "StepReport": (),
        "OverspillError": ("paragraph",),
    },
    "overspill.plan": {"Placement": (), "StateFormat": (), "Overlap": (), "Durability": ()},
    "overspill.job": {"OptimizerConfig": (), "read_job": ()},
    "overspill.planner": {"plan": ()},
    "overspill.probe": {"probe": ()},
}


def python_page() -> str:
    lines = [
        MARK,
        "# Python",
        "",
        "`import overspill` loads nothing heavy; torch comes with the first name that needs it. How they go together:",
        "[attach to your own loop](../howto/attach.md), [use the Trainer](../howto/trainer.md).",
    ]
    for module, names in PYTHON.items():
        home = importlib.import_module(module)
        for name, members in names.items():
            one = getattr(home, name)
            if inspect.ismodule(one):  # overspill.forecast is a package that can be called
                one = getattr(one, name)
            lines += ["", f"## {module}.{name}", "", *_described(one, name)]
            for member in members:
                lines += ["", f"### {name}.{member}", "", *_described(inspect.getattr_static(one, member), member)]
    return "\n".join(lines) + "\n"


def _described(one: Any, name: str) -> list[str]:
    """The signature of what is called, the docstring, and the fields of a value."""
    lines = []
    if isinstance(one, property):
        lines += ["*(a property)*", ""]
    elif not isinstance(one, type):
        signature = inspect.signature(one)
        shown = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "self"])
        text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", f"{name}{shown}")  # annotations are texts in our modules
        lines += ["```python", text if len(text) < 100 else text.replace(", ", ",\n    "), "```", ""]
    text = inspect.cleandoc(one.__doc__ or "").replace("``", "`")
    lines += [_section(line) for line in text.splitlines()]
    fields = getattr(one, "model_fields", {}) if isinstance(one, type) else {}
    if fields:
        lines += ["", "| field | type | default | |", "|---|---|---|---|"]
    for key, info in fields.items():
        bare = re.sub(r"Annotated\[([^,\[]+), \w+\(func=.*?\)\]", r"\1", str(info.annotation))
        kind = re.sub(r"<\w+ '(.*?)'>|typing\.|overspill(\.\w+)*\.(?=[A-Z])", r"\1", bare)
        default = "**required**" if info.is_required() else f"`{_shown(info.get_default(call_default_factory=True))}`"
        lines.append(f"| `{key}` | {_cell(kind)} | {_cell(default)} | {_cell(info.description or '')} |")
    return lines


def _shown(default: Any) -> str:
    return repr(str(default)) if isinstance(default, enum.Enum) else repr(default)


def _section(line: str) -> str:
    """One line of a docstring as Markdown: section heads in bold, their entries as a list."""
    if line in ("Args:", "Raises:", "Returns:", "Attributes:"):
        return f"**{line[:-1]}**\n"
    entry = re.match(r"    (\w[\w, ]*): (.*)", line)
    return f"- `{entry[1]}`: {entry[2]}" if entry else line.removeprefix("    ") if not line.strip() else line


def _argument(parameter) -> str:  # type: ignore[no-untyped-def]
    return (parameter.metavar or parameter.name).upper().strip("[]")


def _walk(command, path):  # type: ignore[no-untyped-def]
    """The commands below, in the order they were added, groups before their members."""
    for name, child in getattr(command, "commands", {}).items():
        yield (*path, name), child
        yield from _walk(child, (*path, name))


def pages() -> dict[Path, str]:
    return {
        **error_pages(),
        REFERENCE / "job.md": job_page(),
        REFERENCE / "models.md": models_page(),
        REFERENCE / "metrics.md": metrics_page(),
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "python.md": python_page(),
    }


def stale() -> list[Path]:
    """Pages that differ from what the code gives, and error pages whose code is gone."""
    wanted = pages()
    differ = [file for file, text in wanted.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    return differ + [file for file in (REFERENCE / "errors").glob("*.md") if file not in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    options = parser.parse_args()
    if options.check:
        for file in stale():
            print(f"stale: {file.relative_to(REPOSITORY)}; run make docs", file=sys.stderr)
        return 1 if stale() else 0
    wanted = pages()
    for file in stale():
        if file not in wanted:
            file.unlink()
    for file, text in wanted.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    print(f"wrote {len(wanted)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
