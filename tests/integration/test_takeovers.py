"""A stream whose gateways go one after the other is taken over at most twice: a poison request cannot kill them all."""

from __future__ import annotations

import asyncio

from midstream.records import Chunk, Producer, Record, StreamState
from midstream.streams import Streams
from midstream.testing.journal_writer import read_all
from midstream.testing.patience import until
from midstream.wire import MOST_TAKEOVERS
from tests.sharing import Processes, processes
from tests.valkeys import QUICK, redis_journal


async def _says_once(text: str) -> Producer:
    yield [Chunk(text)]
    await asyncio.Event().wait()


class Gateways:
    """One after the other, each of which would go on with whatever it finds."""

    def __init__(self, several: Processes) -> None:
        self._several = several
        self.continued: list[int] = []  # after which seq

    async def start(self) -> Streams:
        url = self._several.server.url(self._several.prefix)
        journal = redis_journal(url, self._several.prefix, self._several.clock, terms=QUICK)
        streams = Streams(journal, self._several.clock, proceed=self._proceed)
        await streams.start()
        return streams

    async def _proceed(self, state: StreamState) -> Producer | None:
        self.continued.append(state.highest_seq)
        return _says_once(f"heir {len(self.continued)}")


async def test_stream_is_taken_over_at_most_twice() -> None:
    """The third gateway that finds it orphaned ends it, with all that was said (I7)."""
    async with processes() as several:
        gateways = Gateways(several)
        streams = await gateways.start()
        opened = await streams.open("ada", "m", lambda *_: _says_once("first"))
        stream_id = opened.state.meta.stream_id
        for heirs in range(MOST_TAKEOVERS + 1):
            await until(lambda: streams.writers[stream_id].appended == 1, "the writer to have said its word")  # noqa: B023
            await streams.close()  # its lease is given up at once, its stream left open
            streams = await gateways.start()
            assert len(gateways.continued) == min(heirs + 1, MOST_TAKEOVERS)
        assert gateways.continued == [2, 3]
        assert stream_id not in streams.writers
        records = [Record.of(frame) for frame in await read_all(streams.journal, stream_id)]
        assert [record.json().get("delta") for record in records[1:4]] == ["first", "heir 1", "heir 2"]
        assert records[-1].json()["error"]["code"] == "writer_lost"
        await streams.close()
