"""What a live reader is told when the store comes back without what it has, or is away: the same on every wire."""

from __future__ import annotations

from contextlib import AsyncExitStack

from midstream.testing import connect_dial, grpc_dial, sse_dial, ws_dial
from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.gateway import RunningGateway
from midstream.testing.patience import until
from midstream.testing.transport_contract import Connect, Dial, Reader
from midstream.testing.transport_dial import ADA, hear, seqs
from midstream.testing.transport_living import heard_out
from tests.sharing import failing_over, gateway_on, journal_of, processes
from tests.valkeys import BRIEF, QUICK

WIRES: dict[str, Connect] = {
    "sse": sse_dial.connect,
    "websocket": ws_dial.connect,
    "grpc": grpc_dial.connect,
    "connect": connect_dial.connect,
    "grpc-web": connect_dial.connect_web,
}


async def on_every_wire(gateway: RunningGateway, stack: AsyncExitStack) -> dict[str, Dial]:
    return {name: await stack.enter_async_context(connect(gateway, ADA)) for name, connect in WIRES.items()}


async def readers_of(dials: dict[str, Dial], stream_id: str, upto: int) -> dict[str, Reader]:
    """A reader on each wire that has been given everything up to a seq."""
    readers = {name: await dial.resume(stream_id, 1) for name, dial in dials.items()}
    for reader in readers.values():
        assert seqs(await hear(reader, upto - 1)) == list(range(2, upto + 1))
    return readers


async def test_reader_above_the_head_of_a_store_that_fell_back_is_told_so() -> None:
    """Its writer is gone and the store lacks what it has read: a last word that says where the head is (I4, I8)."""
    async with AsyncExitStack() as stack, failing_over() as failover, AsyncExitStack() as writing:
        a = await writing.enter_async_context(gateway_on(failover.url, BRIEF))
        b = await stack.enter_async_context(gateway_on(failover.url, BRIEF))
        async with sse_dial.connect(a, ADA) as dial:
            begun = await dial.generate("Hello")
            puppet = await a.puppets.next()
            await puppet.say("a", "b", "c")
            await failover.cut_off()
            await puppet.say("d", "e")
            readers = await readers_of(await on_every_wire(b, stack), begun.stream_id, upto=6)
        await b.idle(begun.stream_id, len(readers))
        journal_of(a)._lease.holds = False  # it dies: its lease is not given up, its writer puts nothing back
        await writing.aclose()
        failover.fail_over()
        for name, reader in readers.items():
            heard, told = await heard_out(reader)
            assert heard == [], name
            assert told is not None, f"{name} was cut off without a word"
            assert (told.code, told.facts) in [("cursor_ahead", {"highest_seq": head}) for head in (4, 5)], name
        async with sse_dial.connect(b, ADA) as dial:
            (end,), _ = await heard_out(await dial.resume(begun.stream_id, 4))
            assert (end.seq, end.fields["error"]["code"]) == (5, "store_lost")


async def test_reader_that_the_store_is_away_for_is_let_go_without_an_end() -> None:
    """No terminal record can be read, and none is made up; back again, a resume gives the rest (I1, I7)."""
    async with processes() as several, FaultProxy("127.0.0.1", several.server.port) as proxy, AsyncExitStack() as stack:
        url = f"redis://127.0.0.1:{proxy.port}?prefix={several.prefix}"
        gateway = await stack.enter_async_context(gateway_on(url, QUICK))
        dials = await on_every_wire(gateway, stack)
        begun = await dials["sse"].generate("Hello")
        puppet = await gateway.puppets.next()
        await puppet.say("a", "b")
        readers = await readers_of(dials, begun.stream_id, upto=3)
        await gateway.idle(begun.stream_id, len(readers) + 1)
        await proxy.refuse()
        proxy.reset()
        for name, reader in readers.items():
            heard, told = await heard_out(reader)
            assert heard == [], name
            assert told is None or told.code == "store_unavailable", name
        await proxy.accept()
        await until(journal_of(gateway).available, "the store to be met again")
        await puppet.say("c")
        await puppet.finish()
        for name, dial in dials.items():
            heard, told = await heard_out(await dial.resume(begun.stream_id, 3))
            assert ([said.event for said in heard], told) == (["token", "done"], None), name
