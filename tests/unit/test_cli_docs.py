"""The pages made from the code are up to date, and the links of the documentation lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from overspill.model.read import trainable_families

REPOSITORY = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_the_reference_pages_are_as_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "make_docs.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_link_between_pages_leads_to_a_file() -> None:
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    assert len(pages) > 20
    broken = [
        f"{page.relative_to(REPOSITORY)} → {target}"
        for page in pages
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists()
    ]
    assert not broken


def test_the_readme_names_every_family_that_the_forecast_knows() -> None:
    text = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    *others, last = trainable_families()
    assert f"{', '.join(others)} or {last}" in text
