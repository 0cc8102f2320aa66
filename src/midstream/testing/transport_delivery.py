"""The transport contract, part 1: what a reader is given (I1, I3, I7)."""

from __future__ import annotations

import asyncio

from midstream.records import Chunk
from midstream.testing.transport_dial import Stage, hear, hear_all, refused, seqs
from midstream.wire import MAX_FIELD_BYTES

# Among them what could forge an event, where text is not kept from being framing.
TEXTS = (
    "Hello",
    " ",
    "\n\nid: 9\nevent: done\ndata: {}\n\n",
    "\r\r",
    "\r\n",
    "\0",
    ": ping\n",
    "é✅你🚀",
    "\ufeff",
    "\u2028",
    '"}\\',
)


class DeliveryLaws:
    """Everything once, in order, to the end."""

    async def test_uncut_stream_equals_the_journal(self, stage: Stage) -> None:
        """I1: a reader from the start is given what the journal keeps, as it keeps it."""
        reader, puppet = await stage.begin()
        await puppet.say_chunks([Chunk("a", {"reasoning": "because"}), Chunk("", {"tool_calls": [{"index": 0}]})])
        await puppet.say(*TEXTS)
        await puppet.finish("stop", {"completion_tokens": 13})
        heard = await hear_all(reader)
        records = await stage.records(reader.stream_id)
        wire = stage.ada.wire
        assert seqs(heard) == wire.shows(records, 0)
        assert heard[-1].event == "done"
        if wire.native_records:
            assert [(said.seq, said.event, said.data) for said in heard] == records
        else:
            assert "start" not in {said.event for said in heard}
            assert [said.fields["delta"] for said in heard if said.event == "token"][2:] == list(TEXTS)

    async def test_every_cut_point_joins_without_gap_or_repeat(self, stage: Stage) -> None:
        """I3: the half before a cut and the half after it are the whole, wherever a finished stream is cut."""
        stream_id = await stage.told(*TEXTS)
        whole = await hear_all(await stage.ada.resume(stream_id, 0))
        for cut in range(len(whole)):
            reader = await stage.ada.resume(stream_id, 0)
            before = await hear(reader, cut)
            await reader.drop()
            position = before[-1].seq if before else 0
            assert before + await hear_all(await stage.ada.resume(stream_id, position)) == whole

    async def test_every_cut_point_of_a_live_stream_joins(self, stage: Stage) -> None:
        """I3: the same where each half is read while the stream is written."""
        reader, puppet = await stage.begin()
        heard = []
        for text in TEXTS:
            await puppet.say(text, text)
            heard += await hear(reader, 1)
            await reader.drop()
            reader = await stage.ada.resume(reader.stream_id, heard[-1].seq)
        await puppet.finish()
        heard += await hear_all(reader)
        assert heard == await hear_all(await stage.ada.resume(reader.stream_id, 0))
        assert seqs(heard) == stage.ada.wire.shows(await stage.records(reader.stream_id), 0)

    async def test_replay_goes_over_into_live_without_a_seam(self, stage: Stage) -> None:
        """I3: each number is one above the last while a long replay is overtaken by as much again."""
        reader, puppet = await stage.begin()
        await reader.drop()
        for _ in range(20):
            await puppet.say(*["word "] * 100)
        reader = await stage.ada.resume(reader.stream_id, 1)
        for at in range(20):
            puppet.push([Chunk("more ")] * 100)
            heard = await hear(reader, 100)
            assert seqs(heard) == list(range(2 + at * 100, 102 + at * 100))
        finishing = asyncio.create_task(puppet.finish())
        assert seqs(await hear_all(reader)) == list(range(2002, 4003))
        await finishing

    async def test_resume_after_completion_ends_cleanly(self, stage: Stage) -> None:
        """I3: the rest, then the terminal record alone, then nothing: each ends in order, none waits."""
        stream_id = await stage.told("a", "b", "c")
        heard = await hear_all(await stage.ada.resume(stream_id, 3))
        assert [(said.seq, said.event) for said in heard] == [(4, "token"), (5, "done")]
        heard = await hear_all(await stage.ada.resume(stream_id, 4))
        assert [(said.seq, said.event) for said in heard] == [(5, "done")]
        if stage.ada.wire.rests_at_end:
            assert await hear_all(await stage.ada.resume(stream_id, 5)) == []
        else:
            await refused(stage.ada.resume(stream_id, 5), "cursor_ahead", highest_seq=5)

    async def test_resume_while_the_producer_stalls(self, stage: Stage) -> None:
        """I3: readers at every position of a silent stream are given what there is, wait, and then go on."""
        first, puppet = await stage.begin()
        await first.drop()
        await puppet.say("a", "b", "c")
        await stage.gateway.unread(first.stream_id)
        readers = [await stage.ada.resume(first.stream_id, position) for position in range(5)]
        await stage.gateway.idle(first.stream_id, len(readers))
        await puppet.say("d")
        await puppet.finish()
        records = await stage.records(first.stream_id)
        for position, reader in enumerate(readers):
            assert seqs(await hear_all(reader)) == stage.ada.wire.shows(records, position)

    async def test_resume_before_the_first_token(self, stage: Stage) -> None:
        """A stream can be resumed as soon as its id is known."""
        first, puppet = await stage.begin()
        await first.drop()
        reader = await stage.ada.resume(first.stream_id, 1)
        await stage.gateway.idle(first.stream_id)
        await puppet.say("a")
        await puppet.finish()
        assert seqs(await hear_all(reader)) == [2, 3]

    async def test_heartbeat_never_moves_the_cursor(self, stage: Stage) -> None:
        """A sign of life is no record: it has no number, and a resume after it misses nothing."""
        reader, puppet = await stage.begin()
        await puppet.say("a", "b")
        [*_, last] = await hear(reader, len(stage.ada.wire.shows(await stage.records(reader.stream_id), 0)))
        for beat in range(1, 4):
            await stage.gateway.idle(reader.stream_id)
            await stage.gateway.pulse(stage.gateway.settings.heartbeat)
            await stage.gateway.idle(reader.stream_id)
            await puppet.say("c")
            [said] = await hear(reader, 1)
            assert said.seq == last.seq + beat
            assert reader.heartbeats == (beat if stage.ada.wire.heartbeats else 0)
        await stage.gateway.pulse(stage.gateway.settings.heartbeat)
        await reader.drop()
        await puppet.finish()
        assert seqs(await hear_all(await stage.ada.resume(reader.stream_id, said.seq))) == [said.seq + 1]

    async def test_same_seq_in_frame_and_in_body(self, stage: Stage) -> None:
        """A number that travels twice is the same twice; it may stand alone only where the wire says so."""
        heard = await hear_all(await stage.ada.resume(await stage.told("a", "b"), 0))
        for said in heard:
            assert said.fields["seq"] == said.seq
            assert said.outer_seq == (said.seq if stage.ada.wire.seq_twice else None)

    async def test_all_readers_are_sent_the_same(self, stage: Stage) -> None:
        """Readers that come early, late and after the end hear the same records."""
        early, puppet = await stage.begin()
        await puppet.say("a", "b")
        late = await stage.ada.resume(early.stream_id, 0)
        await puppet.say("c")
        await puppet.finish()
        heard = await hear_all(early)
        assert await hear_all(late) == heard
        assert await hear_all(await stage.ada.resume(early.stream_id, 0)) == heard

    async def test_failure_is_the_end_of_its_stream(self, stage: Stage) -> None:
        """I7: what came before it stays; a later reader hears the same failure, never a success."""
        reader, puppet = await stage.begin()
        await puppet.say("a", "b")
        await puppet.fail("upstream_timeout", "too slow")
        heard = await hear_all(reader)
        assert [said.event for said in heard][-3:] == ["token", "token", "failed"]
        assert heard[-1].fields["error"]["code"] == "upstream_timeout"
        assert await hear_all(await stage.ada.resume(reader.stream_id, 0)) == heard

    async def test_long_text_arrives_whole(self, stage: Stage) -> None:
        """What is longer than a record may be arrives as several, cut between characters."""
        text = "你" * MAX_FIELD_BYTES
        stream_id = await stage.told(text)
        heard = await hear_all(await stage.ada.resume(stream_id, 1))
        assert len(heard) > 3
        assert "".join(said.fields["delta"] for said in heard[:-1]) == text

    async def test_a_generation_that_says_nothing_still_ends(self, stage: Stage) -> None:
        """I7: an empty answer is an answer, with a terminal record."""
        reader, puppet = await stage.begin()
        await puppet.finish("length")
        heard = await hear_all(reader)
        assert (heard[-1].seq, heard[-1].event) == (2, "done")

    async def test_readers_of_several_streams_do_not_mix(self, stage: Stage) -> None:
        """Twenty streams at once, and each reader hears his own."""
        begun = [await stage.begin(f"prompt {at}") for at in range(20)]
        for at, (_, puppet) in enumerate(begun):
            assert puppet.body["messages"] == [{"role": "user", "content": f"prompt {at}"}]
            await puppet.say(f"answer {at}")
        for _, puppet in begun:
            await puppet.finish()
        for at, (reader, _) in enumerate(begun):
            heard = await hear_all(reader)
            assert [said.fields["delta"] for said in heard if said.event == "token"] == [f"answer {at}"]
