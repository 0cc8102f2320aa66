"""A TCP proxy that fails on purpose: cuts, resets, stalls, delays, splits, and loses the reply to one command.

    async with FaultProxy("127.0.0.1", server_port) as proxy:
        client = connect("127.0.0.1", proxy.port)
        proxy.delay = 0.05                 # from now on, both ways
        proxy.lose_reply(b"XADD")          # the next command with this in it arrives, what is answered does not
        proxy.cut(after=1000)              # the next connection ends after so many bytes from the server
        proxy.stall(); proxy.resume()      # nothing goes through; then all of it does
        proxy.reset()                      # every open connection ends at once, as by a pulled plug
        await proxy.refuse(); await proxy.accept()   # nobody listens; somebody listens again, at the same port
        proxy.retarget("127.0.0.1", other_port)      # new connections go to another server, as after a fail-over

Works at the level of bytes: whatever speaks TCP can be put behind it.  Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType

_CHUNK = 64 * 1024
# With a linger of zero a close sends RST instead of FIN (POSIX, SO_LINGER).
_RESET = struct.pack("ii", 1, 0)


class _Line:
    """One connection through the proxy: a client's half and the server's."""

    def __init__(self, proxy: FaultProxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.client, self.server = client, server
        self.left = proxy._take_cut()
        self.mute = False  # what the server answers is swallowed
        self.tasks: list[asyncio.Task[None]] = []

    async def pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, answers: bool) -> None:
        """Forward one direction until it ends."""
        try:
            while data := await source.read(_CHUNK):
                await self.proxy._pass.wait()
                if self.proxy.delay:
                    await asyncio.sleep(self.proxy.delay)
                if not answers:
                    self._listen_for(data)
                elif self.mute:
                    self.end(reset=True)
                    return
                if not await self._write(target, data, answers=answers):
                    return
            if target.can_write_eof():
                target.write_eof()
        except (ConnectionError, OSError):
            self.end(reset=True)

    def _listen_for(self, data: bytes) -> None:
        for mark in self.proxy._marks:
            if mark in data:
                self.proxy._marks.remove(mark)
                self.mute = True
                self.proxy.lost += 1
                return

    async def _write(self, target: asyncio.StreamWriter, data: bytes, *, answers: bool) -> bool:
        """Forward; False once the connection was cut for it."""
        if answers and self.left is not None:
            data, self.left = data[: self.left], max(self.left - len(data), 0)
        piece = self.proxy.split or len(data) or 1
        for at in range(0, len(data), piece):
            target.write(data[at : at + piece])
            await target.drain()
            if self.proxy.split:
                await asyncio.sleep(0)  # a write of its own, which the other side may see alone
        if answers and self.left == 0:
            self.end(reset=False)
            return False
        return True

    def end(self, *, reset: bool) -> None:
        """End both halves: by RST, or in order."""
        for writer in (self.client, self.server):
            if reset:
                peer: socket.socket | None = writer.get_extra_info("socket")
                if peer is not None and not writer.is_closing():
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            else:
                writer.close()


class FaultProxy:
    """Listens on a free loopback port and forwards to `host` and `port`.  An async context manager.

    `delay` holds each piece of data up by so many seconds; `split` writes it in pieces of so many bytes; both can be
    set at any time.  `connections` counts those that were accepted, `lost` the replies that were lost.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.port = 0
        self.delay = 0.0
        self.split = 0
        self.connections = 0
        self.lost = 0
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()
        self._marks: list[bytes] = []
        self._cuts: list[int] = []
        self._pass = asyncio.Event()
        self._pass.set()

    async def __aenter__(self) -> FaultProxy:
        await self.accept()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.refuse()
        tasks = [task for line in self._lines for task in line.tasks]
        self.reset()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- faults -----------------------------------------------------------------------------------------------------

    def cut(self, after: int) -> None:
        """End the next connection in order once so many bytes have come from the server (0: before the first)."""
        self._cuts.append(after)

    def lose_reply(self, mark: bytes) -> None:
        """Forward the next data from a client that holds `mark`, and reset its connection when it is answered."""
        self._marks.append(mark)

    def reset(self) -> None:
        """End every open connection by RST."""
        for line in list(self._lines):
            line.end(reset=True)

    def stall(self) -> None:
        """Forward nothing more, either way; connections stay open and new ones are accepted."""
        self._pass.clear()

    def resume(self) -> None:
        """Forward what was held up, and go on."""
        self._pass.set()

    def retarget(self, host: str, port: int) -> None:
        """Forward connections that are made from now on to another server."""
        self._target = (host, port)

    async def refuse(self) -> None:
        """Stop listening: who connects is refused.  Open connections stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def accept(self) -> None:
        """Listen (again), at the same port."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    def turn_to(self, host: str, port: int) -> None:
        """Forward connections that are made from now on to another server."""
        self._target = (host, port)

    def _take_cut(self) -> int | None:
        return self._cuts.pop(0) if self._cuts else None

    # --- forwarding -------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        line = _Line(self, writer, far_writer)
        self._lines.add(line)
        try:
            if line.left == 0:
                line.end(reset=False)
            line.tasks = [
                asyncio.create_task(line.pump(reader, far_writer, answers=False)),
                asyncio.create_task(line.pump(far_reader, writer, answers=True)),
            ]
            await asyncio.wait(line.tasks)
        finally:
            self._lines.discard(line)
            line.end(reset=False)
