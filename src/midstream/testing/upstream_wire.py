"""HTTP/1.1 by hand, for an upstream that is to lie: a request read, and a script played as its answer."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from midstream.testing.upstream_script import (
    BOM,
    CloseClean,
    CloseDirty,
    Head,
    Pause,
    Raw,
    Reset,
    Script,
    Stall,
    Status,
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrived. Header names are in lower case; `at` is the event loop's time in seconds."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float

    @property
    def json(self) -> Any:
        """The body, parsed. Raises json.JSONDecodeError (a ValueError) when it is not JSON."""
        return json.loads(self.body)


class Inbound:
    """What the client sends: requests, and between their bytes and ours the end of the connection."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._data = bytearray()

    async def request(self) -> Request:
        """The next request. Raises EOFError where the client closes, ConnectionError where it resets."""
        first, *lines = (await self._upto(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        pairs = (line.split(":", 1) for line in lines)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        if headers.get("transfer-encoding") == "chunked":
            body = await self._chunks()
        else:
            body = await self._exactly(int(headers.get("content-length", "0")))
        return Request(method, path, headers, body, asyncio.get_running_loop().time())

    async def gone(self) -> None:
        """Return when the client has closed or reset the connection."""
        with suppress(EOFError, ConnectionError):
            while True:
                await self._more()

    async def _chunks(self) -> bytes:
        body = bytearray()
        while size := int((await self._upto(b"\r\n")).split(b";")[0], 16):
            body += await self._exactly(size)
            await self._upto(b"\r\n")
        await self._upto(b"\r\n")
        return bytes(body)

    async def _upto(self, mark: bytes) -> bytes:
        while (end := self._data.find(mark)) < 0:
            await self._more()
        return self._take(end, len(mark))

    async def _exactly(self, size: int) -> bytes:
        while len(self._data) < size:
            await self._more()
        return self._take(size, 0)

    def _take(self, size: int, skip: int) -> bytes:
        taken = bytes(self._data[:size])
        del self._data[: size + skip]
        return taken

    async def _more(self) -> None:
        data = await self._reader.read(65_536)
        if not data:
            raise EOFError
        self._data += data


class Answer:
    """One script, played on one connection."""

    def __init__(self, script: Script, writer: asyncio.StreamWriter) -> None:
        self.leaves_open = False
        self._script = script
        self._writer = writer
        self._compression = _Compression(script.gzip)
        self._head_sent = False

    async def play(self) -> None:
        """Take each step. `leaves_open` then says whether the connection may carry another request."""
        for step in self._script.steps:
            match step:
                case Head(status, headers):
                    await self._send_head(status, headers)
                case Raw(data):
                    await self._write(data)
                case Pause(until):
                    await (until.wait() if isinstance(until, asyncio.Event) else asyncio.sleep(until))
                case Stall():
                    await asyncio.Event().wait()
                case Status():
                    await self._send_whole(step)
                    return
                case Reset():
                    self._reset()
                    return
                case CloseDirty():
                    return
                case CloseClean():
                    break
                case _:
                    for piece in self._script.pieces(step):
                        await self._send_body(piece)
        await self._finish()

    async def _send_head(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        if self._head_sent:
            return
        self._head_sent = True
        fields: dict[str, str] = {}
        if self._script.content_type is not None:
            fields["Content-Type"] = self._script.content_type
        fields |= self._framing() | self._compression.headers
        fields.update({**self._script.headers, **(headers or {})})
        await self._write(_head(status, fields))
        if self._script.bom:
            await self._frame(self._compression.encode(BOM))

    def _framing(self) -> dict[str, str]:
        match self._script.framing:
            case "chunked":
                return {"Transfer-Encoding": "chunked"}
            case "length":
                return {"Content-Length": str(self._length() + self._script.length_lie)}
            case "close":
                return {"Connection": "close"}

    def _length(self) -> int:
        """The body's length on the wire, by rehearsal: compressed, it depends on where the pieces are cut."""
        rehearsal = _Compression(self._script.gzip)
        length = len(rehearsal.encode(BOM)) if self._script.bom else 0
        for step in self._script.steps:
            length += sum(len(rehearsal.encode(piece)) for piece in self._script.pieces(step))
        return length + len(rehearsal.finish())

    async def _send_body(self, piece: bytes) -> None:
        await self._send_head()
        await self._frame(self._compression.encode(piece))

    async def _finish(self) -> None:
        await self._send_head()
        await self._frame(self._compression.finish())
        if self._script.framing == "chunked":
            await self._write(b"0\r\n\r\n")
        self.leaves_open = self._script.framing != "close" and not self._script.length_lie

    async def _frame(self, data: bytes) -> None:
        if data and self._script.framing == "chunked":
            data = b"%x\r\n%b\r\n" % (len(data), data)
        await self._write(data)

    async def _send_whole(self, step: Status) -> None:
        body = self._compression.encode(step.body) + self._compression.finish()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        fields.update({**self._compression.headers, **self._script.headers, **step.headers})
        await self._write(_head(step.status, fields) + body)
        self.leaves_open = True

    async def _write(self, data: bytes) -> None:
        size = self._script.split or len(data) or 1
        for start in range(0, len(data), size):
            self._writer.write(data[start : start + size])
            await self._writer.drain()
            # Two turns of the loop: a client on this same loop then reads each write by itself.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _reset(self) -> None:
        # With a linger time of 0 the kernel sends RST for FIN (socket(7), SO_LINGER).
        connection: socket.socket = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


class _Compression:
    """gzip, flushed after each piece, so that it can be read before the next is written; or nothing."""

    def __init__(self, gzip: bool) -> None:
        self._gzip = zlib.compressobj(wbits=31) if gzip else None
        self.headers = {"Content-Encoding": "gzip"} if gzip else {}

    def encode(self, data: bytes) -> bytes:
        if self._gzip is None or not data:
            return data
        return self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)

    def finish(self) -> bytes:
        return b"" if self._gzip is None else self._gzip.flush()


def _head(status: int, fields: Mapping[str, str]) -> bytes:
    reason = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Odd"
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
