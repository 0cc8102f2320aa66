"""A process that writes a stream on a shared store, does what its standard input says, and tells what came of it.

Each line on standard output is JSON. It begins with `{"stream_id": …}`; to each line of input it answers `{"did": …}`,
which is "ok" or the code of the refusal, with the streams that its listener was told are no longer its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from midstream.journal.redis import RedisJournal
from midstream.journal.redis_url import parse
from midstream.testing.journal_writer import Writer, meta
from tests.sharing import Told, refusal_of
from tests.valkeys import BRIEF


class _Clock:
    def __call__(self) -> float:
        return time.time()

    def advance(self, seconds: float) -> None:
        raise NotImplementedError


def say(**told: object) -> None:
    print(json.dumps(told), flush=True)


async def main(url: str) -> None:
    told = Told()
    journal = RedisJournal(parse(url), time.time, terms=BRIEF)
    journal.listen(told)
    await journal.open()
    writer = await Writer.begin(journal, meta(_Clock()))
    await writer.say("first")
    say(stream_id=writer.stream_id)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        outcome = await refusal_of(writer.say(line.strip()))
        say(did="ok" if outcome == "nothing" else outcome, gone=told.gone)


asyncio.run(main(sys.argv[1]))
