"""Which process is at the other end of a connection: for tests of several processes on one port (Linux)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from midstream.testing.patience import until
from tests.gateways import Wire


def children(pid: int) -> set[int]:
    """Processes that this one has started and that live."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # gone meanwhile
        if int(parent) == pid and state != "Z":
            found.add(int(status.parent.name))
    return found


def _sockets(port: int, peer: int) -> set[str]:
    """The sockets whose own port is `port` and that are connected to the loopback port `peer`; 0: that listen."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, remote, _, _, _, _, _, _, inode, *_ = line.split()
            if (int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)) == (port, peer):
                found.add(f"socket:[{inode}]")
    return found


def listeners(port: int) -> set[str]:
    """The sockets that listen on the port, whoever has them."""
    return _sockets(port, 0)


def holder(pids: set[int], port: int, peer: int) -> int | None:
    """Which of the processes has accepted the connection from `peer` to `port` (0: listens there); None: nobody yet."""
    wanted = _sockets(port, peer)
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                if os.readlink(descriptor) in wanted:
                    return pid
            except OSError:
                continue
    return None


@asynccontextmanager
async def wire_to(wanted: int, pids: set[int], port: int) -> AsyncIterator[Wire]:
    """A connection that this one of the processes has accepted; which gets one is the kernel's choice."""
    for _ in range(200):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            if await _accepted(reader, writer, pids, port) == wanted:
                yield Wire(reader, writer)
                return
        finally:
            writer.transport.abort()
    raise AssertionError(f"process {wanted} was given none of 200 connections")


async def _accepted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pids: set[int], port: int
) -> int | None:
    """By which of them; None where the one that was to has died."""
    mine: socket.socket = writer.get_extra_info("socket")
    peer = mine.getsockname()[1]
    await until(
        lambda: holder(pids, port, peer) is not None or reader.at_eof() or reader.exception(), "somebody to accept"
    )
    return holder(pids, port, peer)
