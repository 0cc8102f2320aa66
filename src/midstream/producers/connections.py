"""The connections to all upstreams of a process."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp

_READ_BUFFER: Final = 64 * 1024
# After the end of an answer its connection may come to its own end for this long, in seconds.
_LINGER: Final = 0.5


class _Response(aiohttp.ClientResponse):
    def close(self) -> None:
        # A transport that is only closed first waits until its peer has taken the rest of the request.
        if self.connection is not None and self.connection.transport is not None:
            self.connection.transport.abort()
        super().close()


class Connections:
    """One pool of connections for all upstreams of a process, made when it is first used, in the loop that uses it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._lingering: set[aiohttp.ClientResponse] = set()

    @property
    def session(self) -> aiohttp.ClientSession:
        """No cookies, no time-out of its own, nothing decompressed: all that is for who reads."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A connection per request: a server may close an idle one at any moment, and a POST that meets it there
                # must not be repeated (RFC 9110, section 9.2.2), so that a generation would fail for nothing.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                read_bufsize=_READ_BUFFER,
                response_class=_Response,
            )
        return self._session

    def linger(self, response: aiohttp.ClientResponse) -> None:
        """Let a finished answer's connection come to its end by itself, for a moment; then close it."""
        if not response.closed:
            self._lingering.add(response)
            asyncio.get_running_loop().call_later(_LINGER, self._part, response)

    def _part(self, response: aiohttp.ClientResponse) -> None:
        self._lingering.discard(response)
        response.close()

    async def close(self) -> None:
        """Close every connection, those in use too."""
        for response in list(self._lingering):
            self._part(response)
        if self._session is not None:
            await self._session.close()
            self._session = None
