"""What an operator sees: Prometheus metrics, and one structured line per stream end.

Metrics are read from plain counters at scrape time, and a histogram is told once per stream or resume: the hot path
observes nothing.  No owner, stream id or name that a client sent stands in a label.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import orjson
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from midstream.streams import Streams
from midstream.writer import Writer

if TYPE_CHECKING:
    from midstream.pool.pool import Pool

_log = logging.getLogger("midstream.streams")

# Of a model, and of our own.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Observer(Collector):
    """The metrics of one gateway."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._streams: Streams | None = None
        self._pool: Pool | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.refused: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._appended = 0
        self._first_token = Histogram(
            "midstream_upstream_first_token_seconds",
            "Time from the start of a generation to its first token",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._first_record = Histogram(
            "midstream_resume_first_record_seconds",
            "Time from a resume to its first record, where there was one to give",
            registry=self.registry,
            buckets=_SHORT_SECONDS,
        )

    def watch(self, streams: Streams) -> None:
        """Read these streams at each scrape."""
        self._streams = streams

    def watch_pool(self, pool: Pool) -> None:
        """Read this pool at each scrape."""
        self._pool = pool

    def ended(self, writer: Writer) -> None:
        """A writer has stopped: count how, and write its line."""
        how = writer.outcome or "interrupted"
        self._ended[how] = self._ended.get(how, 0) + 1
        self._appended += writer.appended
        if writer.first_token_at is not None:
            self._first_token.observe(writer.first_token_at - writer.meta.created_at)
        line = {
            "event": "stream_end",
            "stream_id": writer.meta.stream_id,
            "model": writer.meta.model,
            "status": how,
            "records": writer.next_seq - 1,
            "seconds": round(self._clock() - writer.meta.created_at, 3),
        }
        if writer.failure is not None:
            line["code"] = writer.failure.failure
            line["message"] = writer.failure.detail
        _log.info("%s", orjson.dumps(line).decode())

    def resumed(self, seconds: float) -> None:
        """A resume that stood behind was handed its first record after so long."""
        self._first_record.observe(seconds)

    def page(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        streams = self._streams
        if streams is None:
            return
        readers = [follow for several in streams.readers.values() for follow in several]
        yield _gauge("midstream_streams_open", "Open streams with a writer in this process", len(streams.writers))
        yield _gauge("midstream_readers", "Readers connected to this process", len(readers))
        yield _gauge("midstream_retained_bytes", "Bytes the journal holds", streams.journal.retained_bytes())
        yield _gauge("midstream_reader_lag_records", "Records the slowest reader is behind", _worst_lag(streams))
        yield _counter("midstream_streams_opened", "Generations begun", streams.totals.opened)
        appended = self._appended + sum(writer.appended for writer in streams.writers.values())
        yield _counter("midstream_records_appended", "Records journaled", appended)
        delivered = streams.totals.delivered + sum(follow.position - follow.first for follow in readers)
        yield _counter("midstream_records_delivered", "Records handed to readers", delivered)
        yield _counter("midstream_readers_stalled", "Readers cut off for taking nothing", streams.totals.stalled)
        available = int(streams.journal.available())
        yield _gauge("midstream_store_available", "1 while the store answers and our lease holds", available)
        trips = streams.journal.round_trips()
        yield SummaryMetricFamily(
            "midstream_store_round_trip_seconds",
            "Waits for the store: commits, pipelines, reads",
            count_value=trips.count,
            sum_value=trips.seconds,
        )
        yield _by("midstream_streams_ended", "Streams ended, by how", "status", self._ended)
        yield _by("midstream_resumes", "Resumes, by what came of them", "outcome", streams.totals.resumed)
        taken = streams.orphans.taken
        yield _by("midstream_takeovers", "Streams of processes that are gone, by what became of them", "outcome", taken)
        yield _by("midstream_refused", "Requests refused, by code", "code", self.refused)
        if self._pool is not None:
            yield from _of_pool(self._pool)


def _of_pool(pool: Pool) -> Iterator[Metric]:
    """The worker pool: what the database said a few seconds ago, and what this process has done."""
    totals = pool.totals
    workers = len(list(pool.workers()))
    yield _gauge("midstream_pool_workers", "Workers seen in the last five minutes", workers)
    yield _gauge("midstream_pool_jobs_waiting", "Generations that no worker has taken yet", totals.waiting)
    yield _gauge("midstream_pool_jobs_running", "Generations that workers have", totals.running)
    yield _gauge("midstream_pool_relays", "Requests relayed by this process", len(pool.attending))
    yield _counter("midstream_pool_progress_posts", "Batches that workers have posted here", totals.posts)
    yield _counter("midstream_pool_settled_tokens", "Tokens paid for here", totals.units)
    yield _by("midstream_pool_generations", "Generations ended here, by how", "status", totals.generations)
    yield _by("midstream_pool_requests", "Requests ended here, by how", "status", totals.requests)


def _worst_lag(streams: Streams) -> int:
    lags = (
        writer.next_seq - 1 - follow.position
        for stream_id, writer in streams.writers.items()
        for follow in streams.readers.get(stream_id, ())
    )
    return max(lags, default=0)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(name, help, value=value)


def _by(name: str, help: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, help, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family
