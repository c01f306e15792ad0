"""The pages hang together: links lead somewhere, and the words of types.py are explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep import types

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_front_page_leads_to_every_page() -> None:
    front = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [
        page.name
        for page in PAGES
        if page.parent.parent == ROOT / "docs" and f"/{page.name})" not in front
    ]
    assert missing == []


def test_the_words_of_types_are_explained() -> None:
    assert types.__doc__ is not None
    [cited] = re.findall(r"docs/\S+\.md", types.__doc__)
    page = (ROOT / cited).read_text(encoding="utf-8")
    words = [*types.Rung, *(stage.replace("_", " ") for stage in types.Stage)]
    assert [word for word in words if word not in page] == []
