"""What the browser's client knows by heart is what the wire says."""

from __future__ import annotations

import re
from importlib.resources import files

from midstream.wire import FAILURES, STATUS


def test_the_browser_knows_the_failures_of_a_generation_and_no_others() -> None:
    """The store's own codes are also those of a gateway that is only away: these it asks again."""
    source = (files("midstream") / "web" / "wire.js").read_text(encoding="utf-8")
    listed = re.search(r"const FAILURES = new Set\(\[(.*?)\]\)", source, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r'"(\w+)"', listed[1])) == FAILURES.keys() - STATUS.keys()
