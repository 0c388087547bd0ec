"""The typed stub says what the built module has: the same names, the same arguments, the same defaults."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import overspill
from overspill import _native

STUB = ast.parse((Path(overspill.__file__).parent / "_native.pyi").read_text(encoding="utf-8"))


def test_the_stub_names_exactly_what_the_module_has() -> None:
    stubbed = {node.name for node in STUB.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stubbed |= {
        node.target.id
        for node in STUB.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is None
    }
    assert stubbed == {name for name in dir(_native) if not name.startswith("_")}


def test_the_stub_gives_each_function_its_arguments_and_defaults() -> None:
    for node in STUB.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        first_line = getattr(_native, node.name).__doc__.splitlines()[0]
        assert not re.search(r"\(arg", first_line), f"{node.name} has an unnamed argument"
        for argument in node.args.args:
            assert re.search(rf"[(\s]{argument.arg}: ", first_line), (node.name, argument.arg)
        count = first_line.count(": ")
        assert len(node.args.args) == len(re.findall(r"(?:\(|, )(\w+): ", first_line)), (node.name, count)
        defaults = [ast.literal_eval(default) for default in node.args.defaults]
        shown = re.findall(r" = ('\w+'|True|False)", first_line)
        assert [ast.literal_eval(text) for text in shown] == defaults, node.name
