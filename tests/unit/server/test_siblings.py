"""Metrics of several processes on one page: as Prometheus reads it, nothing is lost and nothing added up."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from midstream.server.siblings import Siblings, merged

PAGE = b"""# HELP midstream_readers Readers
# TYPE midstream_readers gauge
midstream_readers 3.0
# HELP midstream_resumes_total Resumes
# TYPE midstream_resumes_total counter
midstream_resumes_total{outcome="at the end"} 1.0
midstream_resumes_total{outcome="live"} 2e+03
"""


def samples(page: bytes) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_every_sample_says_whose_it_is() -> None:
    page = merged({"1": PAGE, "2": PAGE.replace(b" 3.0", b" 4.0"), "3": b""})
    assert samples(page) == {
        ("midstream_readers", "1"): 3.0,
        ("midstream_readers", "2"): 4.0,
        ("midstream_resumes_total", "1", "at the end"): 1.0,
        ("midstream_resumes_total", "1", "live"): 2000.0,
        ("midstream_resumes_total", "2", "at the end"): 1.0,
        ("midstream_resumes_total", "2", "live"): 2000.0,
    }
    assert page.count(b"# TYPE midstream_readers gauge\n") == 1, "a metric stands once, or the page is none"


async def test_who_is_gone_is_left_out(tmp_path: Path) -> None:
    """A process that died leaves its socket behind; one in its place takes it over."""
    one, two = [Siblings(tmp_path, number, lambda: PAGE) for number in (1, 2)]
    (tmp_path / "2.sock").touch()
    async with one.offered():
        assert {key[1] for key in samples(await one.page())} == {"1"}
        async with two.offered():
            pages = await asyncio.gather(one.page(), two.page())
        assert pages[0] == pages[1]
        assert {key[1] for key in samples(pages[0])} == {"1", "2"}
