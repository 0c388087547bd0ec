"""Prints what pyproject.toml asks for, with the extras named, one requirement a line: for `make setup`.

The Makefile installs libraries and the compiled core in two steps, so that a changed C++ file does not ask the
package index about torch again.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for requirement in [
    *project["dependencies"],
    *(r for extra in sys.argv[1:] for r in project["optional-dependencies"][extra]),
]:
    print(requirement.replace(" ", ""))
