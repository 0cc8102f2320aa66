"""The metrics of several processes that share a port, as one page: whichever of them a scrape gets to.

Each offers its own at a Unix socket in a directory that is theirs alone.  On the page every sample says by the label
`worker` whose it is, as nothing here can be added up without knowing what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

# Seconds that another process has to answer; one that does not is left out, as one that is gone.
_PATIENCE = 1.0
_SAMPLE = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{?)(.*)", re.DOTALL)


class Siblings:
    """One of them, `number` by number.  `own` makes its own page, in Prometheus' text format."""

    def __init__(self, directory: Path, number: int, own: Callable[[], bytes]) -> None:
        self._directory = directory
        self._place = directory / f"{number}.sock"
        self._own = own

    @contextlib.asynccontextmanager
    async def offered(self) -> AsyncIterator[None]:
        """Answer the others meanwhile."""
        self._place.unlink(missing_ok=True)  # of one that died in this place
        async with await asyncio.start_unix_server(self._offer, self._place):
            yield

    async def _offer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._own())
        writer.close()

    async def page(self) -> bytes:
        """What all that answer have to say."""
        places = sorted(self._directory.glob("*.sock"))
        pages = await asyncio.gather(*(self._page_of(place) for place in places))
        return merged({place.stem: page for place, page in zip(places, pages, strict=True)})

    async def _page_of(self, place: Path) -> bytes:
        if place == self._place:
            return self._own()
        try:
            async with asyncio.timeout(_PATIENCE):
                reader, writer = await asyncio.open_unix_connection(place)
                try:
                    return await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""


def merged(pages: Mapping[str, bytes]) -> bytes:
    """One page of several, by worker: each metric's samples stand together under its one head, as the format wants."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for worker, page in pages.items():
        name = b""
        for line in page.splitlines():
            if line.startswith(b"# "):
                name = line.split(b" ", 3)[2]
                head = heads.setdefault(name, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(name, []).append(_labelled(line, worker.encode()))
    lines = [line for name, head in heads.items() for line in (*head, *samples.get(name, ()))]
    return b"".join(line + b"\n" for line in lines)


def _labelled(sample: bytes, worker: bytes) -> bytes:
    found = _SAMPLE.fullmatch(sample)
    assert found is not None
    name, brace, rest = found.groups()
    return b'%b{worker="%b"%b%b' % (name, worker, b"," if brace else b"}", rest)
