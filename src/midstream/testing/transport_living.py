"""The transport contract, part 3: generations and their readers live apart (I5, I6, I7)."""

from __future__ import annotations

import asyncio

from midstream.testing.patience import soon, until
from midstream.testing.transport_dial import (
    Begun,
    Heard,
    MakeStage,
    Reader,
    Refused,
    Stage,
    hear,
    hear_all,
    refused,
    seqs,
)
from midstream.wire import SEND_STALL, SLICE_BYTES

PIECE = 128 * 1024
STREAM_BYTES = 2 * 1024 * 1024
# More than the sockets of a connection hold whose reader's is narrow: one that takes nothing is given no more.
SOCKETS = 24 * 1024 * 1024


class LivingLaws:
    """Who leaves, stalls or dawdles harms himself."""

    async def test_disconnect_does_not_stop_the_producer(self, stage: Stage) -> None:
        """I6: the last reader goes in the middle; the generation goes on, and nothing it said meanwhile is lost."""
        reader, puppet = await stage.begin()
        await puppet.say("a")
        await hear(reader, 1)
        await reader.drop()
        await stage.gateway.unread(reader.stream_id)
        await puppet.say("b", "c")
        assert not puppet.stopped.is_set()
        await puppet.finish()
        assert seqs(await hear_all(await stage.ada.resume(reader.stream_id, 1))) == [2, 3, 4, 5]

    async def test_reader_that_leaves_in_silence_is_noticed(self, stage: Stage) -> None:
        """I5, I6: before the first token too; it leaves nothing behind, and the generation stays."""
        reader, puppet = await stage.begin()
        await stage.gateway.idle(reader.stream_id)
        await reader.drop()
        await stage.gateway.unread(reader.stream_id)
        assert not puppet.stopped.is_set()
        await puppet.say("a")
        await puppet.finish()
        assert (await stage.state(reader.stream_id)).status == "done"

    async def test_cancel_stops_the_producer(self, stage: Stage) -> None:
        """I6, I7: at once, its readers hear why, and what was said before stays."""
        reader, puppet = await stage.begin()
        await puppet.say("a", "b")
        await stage.ada.cancel(reader.stream_id)
        await asyncio.wait_for(puppet.stopped.wait(), 1.0)
        heard = await hear_all(reader)
        assert (heard[-1].seq, heard[-1].event) == (4, "cancelled")
        assert await hear_all(await stage.ada.resume(reader.stream_id, 0)) == heard
        if stage.ada.wire.native_records:
            assert heard[-1].fields == {"seq": 4, "done": True, "reason": "client"}

    async def test_cancel_before_the_first_token(self, stage: Stage) -> None:
        """I6: a model that has not said a word yet is stopped as fast."""
        reader, puppet = await stage.begin()
        await stage.ada.cancel(reader.stream_id)
        await asyncio.wait_for(puppet.stopped.wait(), 1.0)
        heard = await hear_all(reader)
        assert (heard[-1].seq, heard[-1].event) == (2, "cancelled")

    async def test_cancel_may_be_repeated(self, stage: Stage) -> None:
        """I7: the second cancel, and one after the end, change nothing."""
        reader, _ = await stage.begin()
        await stage.ada.cancel(reader.stream_id)
        await stage.ada.cancel(reader.stream_id)
        assert (await stage.state(reader.stream_id)).highest_seq == 2
        done = await stage.told("a")
        await stage.ada.cancel(done)
        state = await stage.state(done)
        assert (state.status, state.highest_seq) == ("done", 3)

    async def test_shutdown_ends_readers_loudly(self, make_stage: MakeStage) -> None:
        """I4, I7: no reader takes a shutdown for the end of the answer; a shared store lets him resume elsewhere."""
        stage = await make_stage(drain=0.01)
        begun = [await stage.begin() for _ in range(3)]
        for _, puppet in begun:
            await puppet.say("a")
        await soon(stage.gateway.gateway.drain())
        await refused(stage.ada.generate("too late"), "shutting_down")
        shared = stage.gateway.streams.journal.traits.shared
        for reader, puppet in begun:
            heard, told = await heard_out(reader)
            if shared:
                assert {said.event for said in heard} <= {"start", "token"}
                assert told is None or told.code == "shutting_down"
                assert not puppet.stopped.is_set(), "others can read on: the generation has until the process ends"
            else:
                assert (heard[-1].seq, heard[-1].event) == (3, "cancelled")
                if stage.ada.wire.native_records:
                    assert heard[-1].fields["reason"] == "shutdown"
        if shared:
            await soon(stage.gateway.gateway.stop())
        for _, puppet in begun:
            await soon(puppet.stopped.wait())

    async def test_stopped_gateway_is_no_end_of_the_stream(self, stage: Stage) -> None:
        """I7: a reader whose gateway stops without a drain is cut off, and given no terminal record."""
        reader, puppet = await stage.begin()
        await puppet.say("a")
        await hear(reader, len(stage.ada.wire.shows(await stage.records(reader.stream_id), 0)))
        await stage.gateway.idle(reader.stream_id)
        await soon(stage.gateway.gateway.stop())
        heard, _ = await heard_out(reader)
        assert heard == []

    async def test_slow_reader_slows_nobody_and_costs_no_memory(self, make_stage: MakeStage) -> None:
        """I5: it holds its position and what its sockets hold; everybody else goes on, and in the end it is told."""
        stage = await make_stage(max_stream_bytes=STREAM_BYTES)
        fast, puppet = await stage.begin()
        slow = await stage.ada.resume(fast.stream_id, 1)
        await stage.gateway.idle(fast.stream_id, readers=2)
        last = len(await hear(fast, len(stage.ada.wire.shows(await stage.records(fast.stream_id), 0))))
        while not await overtaken(stage, fast.stream_id):
            await puppet.say("x" * PIECE)
            [said] = await hear(fast, 1)
            assert said.seq == max(last, 1) + 1
            last = said.seq
            assert last * PIECE < SOCKETS + STREAM_BYTES, "what a slow reader has not taken is kept for him"
        assert (await stage.state(fast.stream_id)).retained_bytes <= STREAM_BYTES
        await puppet.finish()
        await hear_all(fast)
        heard, told = await heard_out(slow)
        assert seqs(heard) == list(range(2, 2 + len(heard)))
        assert told is not None
        assert told.code == "cursor_expired"
        assert told.facts["oldest_available"] > heard[-1].seq + 1

    async def test_stalled_reader_is_cut_off(self, stage: Stage) -> None:
        """I5: a connection that takes nothing for a minute ends; its stream, its position and other readers do not."""
        begun = await stage.begin()
        await fill_sockets(stage, begun)
        other = await stage.ada.resume(begun.stream_id, (await stage.state(begun.stream_id)).highest_seq - 1)
        await hear(other, 1)
        await until(lambda: any(follow.waiting for follow in stage.gateway.readers(begun.stream_id)))
        # A minute after the last byte that it took: its socket may still have been taking some.
        for _ in range(20):
            await stage.gateway.pulse(SEND_STALL)
            if len(stage.gateway.readers(begun.stream_id)) == 1:
                break
        await until(lambda: len(stage.gateway.readers(begun.stream_id)) == 1, "the stalled reader to go")
        await begun.puppet.say("on")
        await begun.puppet.finish()
        assert [said.event for said in await hear_all(other)] == ["token", "done"]
        heard, _ = await heard_out(begun.reader)
        assert seqs(await hear_all(await stage.ada.resume(begun.stream_id, heard[-1].seq)))[0] == heard[-1].seq + 1

    async def test_many_readers_come_and_go(self, stage: Stage) -> None:
        """I5: fifty readers that leave at once leave nothing behind."""
        first, puppet = await stage.begin()
        await puppet.say("a")
        readers = [await stage.ada.resume(first.stream_id, 1) for _ in range(50)]
        await stage.gateway.idle(first.stream_id, readers=51)
        for reader in (first, *readers):
            await reader.drop()
        await stage.gateway.unread(first.stream_id)
        assert first.stream_id not in stage.gateway.streams.readers
        await puppet.finish()


async def overtaken(stage: Stage, stream_id: str) -> bool:
    """Whether the slowest reader has lost something, also if it has a page in hand that waits for its socket."""
    lowest = stage.gateway.streams.lowest(stream_id)
    in_hand = SLICE_BYTES // PIECE
    return lowest is not None and lowest + in_hand + 1 < (await stage.state(stream_id)).oldest_retained_seq


async def fill_sockets(stage: Stage, begun: Begun) -> None:
    """Say so much that the only reader, who takes nothing, cannot be given all of it."""
    for _ in range(SOCKETS // PIECE):
        await begun.puppet.say("x" * PIECE)
        if await behind(stage, begun):
            return
    raise AssertionError("a reader that takes nothing was given all there is")


async def behind(stage: Stage, begun: Begun) -> bool:
    """Whether the reader has not been given all, and is given nothing more: not only late on a busy machine."""
    follow = stage.gateway.readers(begun.stream_id)[0]
    position = follow.position
    for _ in range(10):
        if follow.position != position or position + 8 >= (await stage.state(begun.stream_id)).highest_seq:
            return False
        await asyncio.sleep(0.01)
    return True


async def heard_out(reader: Reader) -> tuple[list[Heard], Refused | None]:
    """Every record until the wire ends, however it ends, and what it said then."""
    heard: list[Heard] = []
    try:
        while (record := await soon(reader.next())) is not None:
            heard.append(record)
    except Refused as told:
        return heard, told
    return heard, None
