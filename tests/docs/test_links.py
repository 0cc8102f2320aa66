"""A reader who follows a link arrives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import anchors, links, name, pages


@pytest.mark.parametrize("page", pages(), ids=name)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    """The file is there, and so is the heading."""
    for link in links(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"no such heading: {link}"


def test_the_index_leads_to_every_page() -> None:
    """Nothing was written that nobody can find."""
    index = next(page for page in pages() if name(page) == "docs/index.md")
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links(index.read_text(encoding="utf-8"))}
    decisions = index.parent / "decisions" / "README.md"
    linked |= {(decisions.parent / link).resolve() for link in links(decisions.read_text(encoding="utf-8"))}
    unlinked = [name(page) for page in pages() if page.is_relative_to(index.parent) and page not in linked | {index}]
    assert unlinked == []
