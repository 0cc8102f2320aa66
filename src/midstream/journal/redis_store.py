"""The servers of a store: which one has a stream's keys, and what to do when it answers with an excuse.

Every script may be sent again when its reply is lost (each says how in its file), so a command is repeated until its
patience is over, and what is told then is StoreUnavailable.  A refusal that no repeat can change is told at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from hiredis import ReplyError
from redis.crc import key_slot

from midstream.errors import JournalError, StoreUnavailable
from midstream.journal.base import RoundTrips
from midstream.journal.redis_keys import SHARDS, Space
from midstream.journal.redis_link import Lost
from midstream.journal.redis_node import Node
from midstream.journal.redis_scripts import SCRIPTS, Script, command
from midstream.journal.redis_url import Access, Place, Terms

logger = logging.getLogger(__name__)

_ASKING = command("ASKING")
_SLOTS = [key_slot(b"%d" % shard) for shard in range(SHARDS)]
# Pause before a command is sent again to a store that is busy with itself, in seconds.
_PAUSE = 0.05
# Replies that a moment may change, and those that only an operator can.
_PASSING = frozenset({"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "BUSY", "READONLY"})
_LASTING = frozenset({"OOM", "MISCONF", "NOREPLICAS", "NOPERM", "NOAUTH", "WRONGPASS"})


class Store:
    """All servers of one store.  The `on_…` attributes are told what happens; they must be cheap and not raise.

    `scripts` are all that are ever called: each server is given them before anything else.
    """

    def __init__(
        self, access: Access, space: Space, terms: Terms, trips: RoundTrips, scripts: Sequence[Script] = SCRIPTS
    ) -> None:
        self.access, self.space, self.terms, self.trips, self.scripts = access, space, terms, trips, scripts
        self._loop = asyncio.get_running_loop()
        self.clustered = False
        self.on_message: Callable[[bytes, bytes], None] = lambda channel, message: None
        self.on_ready: Callable[[bytes], None] = lambda channel: None
        self.on_deaf: Callable[[Node], None] = lambda node: None
        self.on_up: Callable[[Node], None] = lambda node: None
        self.on_down: Callable[[Node], None] = lambda node: None
        self.on_restart: Callable[[Node], None] = lambda node: None
        self.on_moved: Callable[[list[int]], None] = lambda shards: None
        self._nodes: dict[Place, Node] = {}
        self._by_shard: list[Node] = []
        self._ranges: list[tuple[int, int, Node]] = []
        self._moved: dict[int, Node] = {}  # what redirections said since the map was last asked for
        self._mapping: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._mapped_at = float("-inf")

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self) -> bool:
        """Connect to the first server; False when it does not answer now.  It goes on being tried."""
        seed = self._node(self.access.place)
        self._by_shard = [seed] * SHARDS
        try:
            async with asyncio.timeout(self.terms.patience):
                await seed.met()
        except TimeoutError:
            return False
        if self._mapping is not None:
            await asyncio.wait([self._mapping])
        return True

    def greeted(self, node: Node) -> None:
        """A server has said what it is."""
        self.clustered = self.space.clustered = node.clustered
        if self.clustered:
            self._map_soon()

    def _node(self, place: Place) -> Node:
        if place not in self._nodes:
            self._nodes[place] = Node(self, place)
        return self._nodes[place]

    async def settle(self) -> None:
        """Wait for what was appended.  Raises StoreUnavailable."""
        for node in self.nodes():
            if node.appends.open:
                try:
                    await node.appends.send(command("PING"))
                except Lost as lost:
                    raise StoreUnavailable(str(lost)) from lost

    async def close(self) -> None:
        if self._mapping is not None:
            self._mapping.cancel()
            await asyncio.wait([self._mapping])
        for node in self._nodes.values():
            await node.close()
        if self._leaving:
            await asyncio.wait(self._leaving)

    def node(self, where: int) -> Node:
        """The server of a tag, or of a slot given as SHARDS + slot."""
        if not self._by_shard:
            raise StoreUnavailable("the journal is not open")
        if where < SHARDS:
            return self._by_shard[where]
        if (moved := self._moved.get(where)) is not None:
            return moved
        slot = where - SHARDS
        return next((node for first, last, node in self._ranges if first <= slot <= last), self._by_shard[0])

    def refusal(self) -> str:
        """Why the store will not let us in, so that trying again is of no use; empty where it is not that."""
        return next((node.calls.refusal for node in self._nodes.values() if node.calls.refusal), "")

    def policy(self) -> str:
        """What the store does when its memory is full."""
        return next((node.policy for node in self._nodes.values() if node.policy != "noeviction"), "noeviction")

    def answers(self) -> bool:
        """Is there a connection to every server that has some of our keys?"""
        return all(node.calls.open and node.appends.open for node in self._by_shard)

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def shards_of(self, node: Node) -> list[int]:
        return [shard for shard in range(SHARDS) if self._by_shard[shard] is node]

    # --- commands ---------------------------------------------------------------------------------------------------

    async def append(self, shard: int, packed: bytes) -> Any:
        """The reply of a script on the lane for appends.  Raises StoreUnavailable, JournalError."""
        started = self._loop.time()
        try:
            reply = await self._by_shard[shard].appends.send(packed)
            if not isinstance(reply, ReplyError):
                return reply
        except Lost as lost:
            reply = lost
        return await self._again(shard, lambda node: node.appends.send(packed), reply, started)

    async def run(self, shard: int, packed: bytes) -> Any:
        """The reply to one command.  Raises StoreUnavailable, JournalError."""
        return await self._tried(shard, lambda node: node.calls.send(packed))

    async def run_on(self, key: bytes, packed: bytes) -> Any:
        """The same, for a key that carries none of our tags."""
        return await self._tried(SHARDS + key_slot(key), lambda node: node.calls.send(packed))

    async def together(self, shard: int, *commands: bytes) -> list[Any]:
        """The replies to several commands, all of one instant.  Raises StoreUnavailable, JournalError."""
        block = [_MULTI, *commands, _EXEC]
        replies: list[Any] = await self._tried(shard, lambda node: _executed(node.calls.block(block)))
        return replies

    async def each(self, commands: Iterable[tuple[int, bytes]]) -> list[Any]:
        """The reply to each of these commands, which go out together.  Raises StoreUnavailable, JournalError."""
        return await asyncio.gather(*(self.run(shard, packed) for shard, packed in commands))

    async def _tried(self, shard: int, send: Callable[[Node], Awaitable[Any]]) -> Any:
        started = self._loop.time()
        try:
            reply = await send(self.node(shard))
        except Lost as lost:
            return await self._again(shard, send, lost, started)
        if isinstance(reply, ReplyError):
            return await self._again(shard, send, reply, started)
        return reply

    async def _again(self, shard: int, send: Callable[[Node], Awaitable[Any]], problem: object, started: float) -> Any:
        """Send until it is answered, or patience is over."""
        try:
            async with asyncio.timeout_at(started + self.terms.patience):
                while True:
                    sending = await self._mend(shard, send, problem)
                    try:
                        reply = await sending(self.node(shard))
                    except Lost as lost:
                        reply = lost
                    if not isinstance(reply, ReplyError | Lost):
                        return reply
                    problem = reply
        except TimeoutError:
            raise StoreUnavailable(f"the store does not do what it should: {problem}", 2) from None

    async def _mend(
        self, shard: int, send: Callable[[Node], Awaitable[Any]], problem: object
    ) -> Callable[[Node], Awaitable[Any]]:
        """Do what the problem calls for; how to send the command the next time."""
        word, _, rest = str(problem).partition(" ")
        if isinstance(problem, Lost):
            await asyncio.sleep(0)
            return send
        if word == "NOSCRIPT":
            await self._load(self.node(shard))
        elif word in ("MOVED", "ASK"):
            place = self._place(shard, rest.rpartition(" ")[2])
            if word == "ASK":
                return lambda _: _asked(self._node(place), send)
            self._moved[shard] = self._node(place)
            if shard < SHARDS:
                self._assign({shard: self._node(place)})
            self._map_soon()
        elif word in _PASSING:
            await self._wait_out(shard, word)
        elif word in _LASTING:
            logger.error("the store refuses: %s", problem)
            raise StoreUnavailable(f"the store refuses: {problem}", 5)
        else:
            raise JournalError(f"the store answered: {problem}")
        return send

    async def _wait_out(self, shard: int, word: str) -> None:
        if word == "READONLY":
            self.node(shard).drop()
        if self.clustered:
            self._map_soon()
        await asyncio.sleep(_PAUSE)

    async def _load(self, node: Node) -> None:
        for script in self.scripts:
            await node.calls.send(command("SCRIPT", "LOAD", script.text))

    # --- cluster ----------------------------------------------------------------------------------------------------

    def _place(self, shard: int, told: str) -> Place:
        """`host:port` as a redirection says it; without a host it is the one that said it."""
        host, _, port = told.rpartition(":")
        return Place(host.strip("[]") or self.node(shard).place.host, int(port))

    def _map_soon(self) -> None:
        now = self._loop.time()
        if self._mapping is None and now - self._mapped_at > _PAUSE:
            self._mapped_at = now
            self._mapping = asyncio.create_task(self._map())
            self._mapping.add_done_callback(self._mapped)

    def _mapped(self, task: asyncio.Task[None]) -> None:
        self._mapping = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("the cluster does not tell its slots: %s", error)

    async def _map(self) -> None:
        """Ask, of the servers we know, the first that answers for the map of slots."""
        for node in sorted(self._nodes.values(), key=lambda node: not node.calls.open):
            try:
                ranges = await node.calls.send(command("CLUSTER", "SLOTS"))
            except (Lost, StoreUnavailable):
                continue
            if isinstance(ranges, list) and ranges:
                self._take(node, ranges)
                return

    def _take(self, asked: Node, ranges: Sequence[Any]) -> None:
        self._moved.clear()
        self._ranges = []
        for first, last, (host, port, *_), *_ in ranges:
            place = Place(host.decode() if host and host != b"?" else asked.place.host, port)
            self._ranges.append((first, last, self._node(place)))
        self._assign({shard: self.node(SHARDS + slot) for shard, slot in enumerate(_SLOTS)})
        serving = {node for _, _, node in self._ranges}
        for node in [node for node in self._nodes.values() if node not in serving]:
            if node.place != self.access.place:  # that one is who is asked when all others are gone
                del self._nodes[node.place]
                leaving = asyncio.create_task(node.close())
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)

    def _assign(self, nodes: dict[int, Node]) -> None:
        moved = [shard for shard, node in nodes.items() if self._by_shard[shard] is not node]
        for shard in moved:
            self._by_shard[shard] = nodes[shard]
        self.on_moved(moved)

    # --- messages ---------------------------------------------------------------------------------------------------

    def listen(self, shard: int, channel: bytes | None = None) -> None:
        """Hear this channel of a tag, its own unless told otherwise, where the tag is now and nowhere else."""
        channel, here = channel or self.space.channel(shard), self.node(shard)
        for node in self._nodes.values():
            if node is here:
                node.ears.listen(channel)
            else:
                node.ignore(channel)

    def ignore(self, channel: bytes) -> None:
        for node in self._nodes.values():
            node.ignore(channel)


_MULTI, _EXEC = command("MULTI"), command("EXEC")


async def _executed(block: Awaitable[list[Any]]) -> Any:
    """What EXEC answered; the error of the command that kept it from being executed."""
    replies = await block
    told = replies[-1]
    if isinstance(told, list):
        return next((reply for reply in told if isinstance(reply, ReplyError)), told)
    return next((reply for reply in replies if isinstance(reply, ReplyError)), told)


async def _asked(node: Node, send: Callable[[Node], Awaitable[Any]]) -> Any:
    """Send to a server that is about to have the slot.  Nothing may come between: `send` queues at once."""
    asking = node.calls.send(_ASKING)
    appends = node.appends.send(_ASKING)
    reply = await send(node)
    await asking
    await appends
    return reply
