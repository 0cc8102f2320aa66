"""The pages of docs/reference say what the code says."""

from __future__ import annotations

import argparse
import importlib
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from midstream import cli
from midstream.journal.memory import MemoryJournal
from midstream.pool.jobs import Jobs
from midstream.pool.leases_memory import MemoryLeases
from midstream.pool.pool import Pool
from midstream.server.observe import Observer
from midstream.streams import Streams
from tests.docs.markdown import name, pages, plain, table
from tools.reference import PAGES, REFERENCE

METRICS = (REFERENCE / "metrics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    """Whoever changes a setting or an exit code runs `python tools/reference.py`."""
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name]()


def observed() -> dict[str, tuple[str, set[str]]]:
    """Every metric by the name it has on the page: its type and its labels."""
    streams = Streams(MemoryJournal(time.time), time.time)
    observer = Observer(time.time)
    observer.watch(streams)
    observer.watch_pool(Pool(Jobs("sqlite:///not-opened.db", time.time), MemoryLeases(time.time), time.time))
    found = {}
    for family in observer.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, set(getattr(family, "_labelnames", ())))
    for family in text_string_to_metric_families(observer.page().decode()):
        if family.type == "histogram":
            found[family.name] = (family.type, set())
    return found


def test_the_table_of_metrics_is_complete() -> None:
    """Names, types and labels, and no metric that is not there."""
    told = {plain(name): (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in table(METRICS)}
    assert told == observed()


def test_metrics_named_in_the_advice_exist() -> None:
    """Nobody should set an alert on a metric that is not there."""
    named = set(re.findall(r"midstream_\w+", METRICS))
    assert named <= set(observed())


def flags() -> set[str]:
    """Every flag of every command."""
    found = {"--help", "--version"}
    for verb in cli.VERBS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"midstream.cli.{verb}").add_arguments(parser)
        found |= {flag for action in parser._actions for flag in action.option_strings}
    return found


# Of curl, timeout, mypy and our own tools.
OTHERS = {
    "--fail-with-body",
    "--signal",
    "--strict",
    "--check",
    "--timeout-graceful-shutdown",
    "--retry",
    "--retry-connrefused",
    "--retry-delay",
    "--rm",
}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_no_page_names_a_flag_that_is_not_there(page: Path) -> None:
    """Nobody should have to find out by trying."""
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", page.read_text(encoding="utf-8")))
    assert named - flags() - OTHERS == set()
