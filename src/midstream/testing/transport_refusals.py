"""The transport contract, part 2: positions and callers that are refused, each in its own way (I4, I9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from midstream.testing.patience import soon
from midstream.testing.transport_dial import MakeStage, Stage, hear_all, refused, seqs


class RefusalLaws:
    """Never a fresh start, never a later one, never silence."""

    async def test_foreign_cursor_is_refused_loudly(self, stage: Stage) -> None:
        """A position in one stream is none in another, also where both are one owner's and the number would fit."""
        mine, other = await stage.told("a", "b"), await stage.told("c", "d")
        for position in (0, 1, 3, 4):
            await refused(stage.ada.resume(mine, position, of=other), "wrong_stream")
        await refused(stage.ada.resume(mine, 1, of="never-was"), "wrong_stream")
        assert seqs(await hear_all(await stage.ada.resume(mine, 1, of=mine))) == [2, 3, 4]

    async def test_garbage_cursor_is_a_client_error(self, stage: Stage) -> None:
        """What is no position is refused before anything else is looked at, and leaves no reader behind."""
        reader, puppet = await stage.begin()
        await stage.gateway.idle(reader.stream_id)
        for position in stage.ada.garbage:
            await refused(stage.ada.resume(reader.stream_id, position), "bad_cursor")
            await refused(stage.ada.resume("never-was", position), "bad_cursor")
        assert len(stage.gateway.readers(reader.stream_id)) == 1
        await puppet.finish()
        await hear_all(reader)

    async def test_evicted_position_tells_the_client_to_restart(self, make_stage: MakeStage) -> None:
        """R5, R7: below the oldest retained record something is lost, and the oldest is named; at it all is well."""
        stage = await make_stage(max_stream_records=5)
        stream_id = await stage.told(*"abcdefgh")
        oldest = (await stage.state(stream_id)).oldest_retained_seq
        assert oldest == 6
        for position in range(stage.ada.wire.first_position, oldest):
            await refused(stage.ada.resume(stream_id, position), "cursor_expired", oldest_available=oldest)
        for position in range(oldest, 10):
            assert seqs(await hear_all(await stage.ada.resume(stream_id, position))) == list(range(position + 1, 11))

    async def test_acked_position_is_honoured_and_those_below_are_not(self, stage: Stage) -> None:
        """R5, R6: after an ack of N a reader goes on from N; below N the records are gone."""
        stream_id = await stage.told(*"abcdefgh")
        await stage.ada.ack(stream_id, 5)
        assert (await stage.state(stream_id)).trimmed_seq == 5
        assert seqs(await hear_all(await stage.ada.resume(stream_id, 5))) == [6, 7, 8, 9, 10]
        for position in range(stage.ada.wire.first_position, 5):
            await refused(stage.ada.resume(stream_id, position), "cursor_expired", oldest_available=6)

    async def test_ack_takes_nothing_from_a_connected_reader(self, stage: Stage) -> None:
        """R6: what one reader confirms, another may still need."""
        reader, puppet = await stage.begin()
        await puppet.say("a", "b")
        await stage.gateway.idle(reader.stream_id)
        slow = await stage.ada.resume(reader.stream_id, 1)
        await stage.gateway.idle(reader.stream_id, readers=2)
        await stage.ada.ack(reader.stream_id, 3)
        await puppet.say("c")
        await puppet.finish()
        assert seqs(await hear_all(slow)) == [2, 3, 4, 5]

    async def test_ack_beyond_the_end_is_refused(self, stage: Stage) -> None:
        """R6: nobody can have read what has not been written; an older ack again is no error."""
        stream_id = await stage.told("a", "b")
        await refused(stage.ada.ack(stream_id, 5), "cursor_ahead", highest_seq=4)
        await stage.ada.ack(stream_id, 3)
        await stage.ada.ack(stream_id, 2)
        assert (await stage.state(stream_id)).acked_seq == 3

    async def test_position_beyond_the_end_is_refused(self, stage: Stage) -> None:
        """R5: a claim nobody can have earned is an error at once, naming the head, on open and ended streams."""
        reader, puppet = await stage.begin()
        await puppet.say("a", "b")
        await refused(stage.ada.resume(reader.stream_id, 480), "cursor_ahead", highest_seq=3)
        await refused(stage.ada.resume(reader.stream_id, stage.ada.wire.max_position), "cursor_ahead", highest_seq=3)
        await puppet.finish()
        await hear_all(reader)
        await refused(stage.ada.resume(reader.stream_id, 6), "cursor_ahead", highest_seq=4)

    async def test_unknown_stream_differs_from_expired(self, make_stage: MakeStage) -> None:
        """A stream that is not there, and one that has only lost its beginning, call for different things."""
        stage = await make_stage(max_stream_records=5)
        stream_id = await stage.told(*"abcdefgh")
        await refused(stage.ada.resume("0" * 32, 2), "unknown_stream")
        await refused(stage.ada.resume(stream_id, 2), "cursor_expired", oldest_available=6)

    async def test_expired_stream_is_unknown(self, stage: Stage) -> None:
        """R10: kept through its grace time, which access pushes on; after it the stream is as if it had never been."""
        stream_id = await stage.told("a")
        retain = stage.gateway.settings.retain
        stage.gateway.clock.advance(retain - 1)
        await stage.gateway.streams.pulse(0.0)
        assert seqs(await hear_all(await stage.ada.resume(stream_id, 2))) == [3]
        stage.gateway.clock.advance(retain - 1)
        await stage.gateway.streams.pulse(0.0)
        assert seqs(await hear_all(await stage.ada.resume(stream_id, 2))) == [3]
        stage.gateway.clock.advance(retain + 1)
        await stage.gateway.streams.pulse(0.0)
        await refused(stage.ada.resume(stream_id, 2), "unknown_stream")

    async def test_strangers_stream_looks_unknown_on_every_verb(self, stage: Stage) -> None:
        """I9: whatever another owner asks, he learns nothing, not even that there is something; and changes nothing."""
        reader, puppet = await stage.begin()
        await puppet.say("a", "b")
        bob = stage.bob
        verbs: list[Callable[[str], Awaitable[Any]]] = [
            lambda stream_id: bob.resume(stream_id, 1),
            lambda stream_id: bob.resume(stream_id, 480),
            lambda stream_id: bob.ack(stream_id, 2),
            lambda stream_id: bob.ack(stream_id, 480),
            bob.cancel,
        ]
        for verb in verbs:
            await refused(verb(reader.stream_id), "unknown_stream")
            await refused(verb("0" * 32), "unknown_stream")
        await puppet.say("c")
        await puppet.finish()
        heard = await hear_all(reader)
        assert (heard[-1].seq, heard[-1].event) == (5, "done")
        assert (await stage.state(reader.stream_id)).acked_seq == 0
        for verb in verbs:
            await refused(verb(reader.stream_id), "unknown_stream")

    async def test_state_is_the_owners(self, stage: Stage) -> None:
        """What a wire says of a stream's state is true, and said to its owner alone."""
        reader, puppet = await stage.begin()
        await puppet.say("a", "b")
        if not stage.ada.wire.has_state:
            with pytest.raises(NotImplementedError):
                await stage.ada.state(reader.stream_id)
        else:
            state = await soon(stage.ada.state(reader.stream_id))
            assert (state["status"], state["highest_seq"], state["model"]) == ("open", 3, "puppet")
            await refused(stage.bob.state(reader.stream_id), "unknown_stream")
            await refused(stage.ada.state("0" * 32), "unknown_stream")
        await puppet.finish()
        await hear_all(reader)
