"""Links between the pages lead to pages and headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """What GitHub calls a page's headings: in lower case, with hyphens, numbered where one comes again."""
    found: dict[str, int] = {}
    names = set()
    for heading in _HEADING.findall(_CODE.sub("", text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names


def lost(page: Path) -> list[str]:
    """The links of a page to files of the repository, or to headings in them, that are not there."""
    missing = []
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            missing.append(link)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    assert lost(page) == []


def test_a_link_to_no_page_or_to_no_heading_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A page, `named`\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-page-named) [c](there.md#twice-1) [d](https://nowhere.test/#x)\n"
        "[e](gone.md) [f](there.md#gone) [g](#gone)\n"
    )
    assert lost(page) == ["gone.md", "there.md#gone", "#gone"]
