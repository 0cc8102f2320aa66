"""The journal contract, part 5: names, owners and ids, none of which ever aliases another."""

from __future__ import annotations

import asyncio

import pytest

from midstream.codec import native
from midstream.errors import UnknownStream
from midstream.journal.base import Created, Journal
from midstream.records import StreamMeta
from midstream.testing.journal_writer import Clock, Writer, meta, read_all, seqs, text_of, written
from midstream.testing.patience import soon

# Ids that meet in one key, file name, pattern or hash slot of a store that joins its parts carelessly.
ALIKE = [*"aAä", "a\u0308", "a:b", "a_b", "../b", "{b}", "a/b", "a b", "a:", ":a", "a*", "a?", "a[b]", "a%", "a'b"]


class NamingLaws:
    """Exactly one of several racing creates wins a name; a name lives as long as its stream."""

    async def test_create_tells_the_new_stream(self, journal: Journal, clock: Clock) -> None:
        """What was given is what is kept, word for word."""
        told = meta(clock, owner="büro", model="m/ü:1", retain=12.5, abandon_after=30.0, request=b'{"a":[1]}')
        created = await journal.create(told, [native.start(told.stream_id, told.model)])
        assert created.state.meta == told
        assert created.state == await journal.state(told.stream_id)
        assert not created.existed

    async def test_name_leads_to_its_stream(self, journal: Journal, clock: Clock) -> None:
        """A stream may have several names, or none; an unbound one leads nowhere."""
        writer = await Writer.begin(journal, meta(clock), ["ada/idem/K", "ada/session/S"])
        await Writer.begin(journal, meta(clock))
        assert await journal.find("ada/idem/K") == writer.stream_id
        assert await journal.find("ada/session/S") == writer.stream_id
        assert await journal.find("ada/idem/S") is None

    async def test_one_of_racing_creates_wins_the_name(self, journal: Journal, clock: Clock) -> None:
        """A retried first request attaches instead of paying twice, also when both tries race."""

        async def attach(told: StreamMeta, name: str) -> Created:
            created = await journal.create(told, [native.start(told.stream_id, "m")], [name])
            # Whoever is told of a stream can have it at once, also when it was made by another try.
            assert seqs(await read_all(journal, created.state.meta.stream_id)) == [1]
            return created

        for _ in range(5):
            tries = [meta(clock, request=b'{"try":%d}' % number) for number in range(8)]
            name = f"ada/idem/{tries[0].stream_id}"
            made = await soon(asyncio.gather(*(attach(told, name) for told in tries)))
            winners = {created.state.meta.stream_id for created in made}
            assert [created.existed for created in made].count(False) == 1
            assert winners == {await journal.find(name)}
            for told in tries:
                if told.stream_id not in winners:
                    with pytest.raises(UnknownStream):
                        await journal.state(told.stream_id)

    async def test_losing_create_leaves_nothing(self, journal: Journal, clock: Clock) -> None:
        """Where a name was taken nothing is created or bound, not even the names that were free."""
        winner = await written(journal, meta(clock), 3)
        named = await Writer.begin(journal, meta(clock), ["ada/idem/K"])
        before = journal.retained_bytes()
        told = meta(clock)
        created = await journal.create(told, [native.start(told.stream_id, "m")], ["ada/new", "ada/idem/K", "ada/late"])
        assert created.existed
        assert created.state.meta.stream_id == named.stream_id
        assert await journal.find("ada/new") is None
        assert await journal.find("ada/late") is None
        assert {state.meta.stream_id for state in await journal.list("ada")} == {winner.stream_id, named.stream_id}
        assert journal.retained_bytes() == before

    async def test_name_of_an_ended_stream_still_leads_to_it(self, journal: Journal, clock: Clock) -> None:
        """The name is good for as long as the answer can be had."""
        writer = await Writer.begin(journal, meta(clock), ["ada/idem/K"])
        await writer.finish()
        told = meta(clock)
        created = await journal.create(told, [native.start(told.stream_id, "m")], ["ada/idem/K"])
        assert created.existed
        assert (created.state.meta.stream_id, created.state.status) == (writer.stream_id, "done")

    async def test_name_dies_with_its_stream(self, journal: Journal, clock: Clock) -> None:
        """Whether it was deleted or has expired, its names are free again."""
        for forget in (journal.expire, None):
            old = await Writer.begin(journal, meta(clock), ["ada/idem/K", "ada/session/S"])
            await old.finish()
            if forget:
                await forget(old.stream_id)
            else:
                clock.advance(601)
                assert old.stream_id in await journal.sweep()
            assert await journal.find("ada/idem/K") is None
            new = await Writer.begin(journal, meta(clock), ["ada/idem/K"])
            assert await journal.find("ada/idem/K") == new.stream_id
            assert await journal.find("ada/session/S") is None
            await journal.expire(old.stream_id)
            assert await journal.find("ada/idem/K") == new.stream_id
            await journal.expire(new.stream_id)

    async def test_list_is_the_owners_newest_first(self, journal: Journal, clock: Clock) -> None:
        """Each owner's own streams, and nobody else's (I9)."""
        owners = ["ada", "bob", "ada"]
        told = [meta(clock, owner=owner, created_at=clock() + age) for age, owner in enumerate(owners)]
        for one in told:
            await Writer.begin(journal, one)
        mine = await journal.list("ada")
        assert [state.meta for state in mine] == [told[2], told[0]]
        assert list(mine) == [await journal.state(state.meta.stream_id) for state in mine]
        assert list(await journal.list("carol")) == []

    async def test_stream_ids_never_alias(self, journal: Journal, clock: Clock) -> None:
        """Ids with separators, patterns and quotes are all different streams, and forgetting one forgets that one."""
        writers = {}
        for stream_id in ALIKE:
            writers[stream_id] = await Writer.begin(journal, meta(clock, stream_id))
            await writers[stream_id].say(f"I am {stream_id}")
            await writers[stream_id].say("and more")
        for stream_id in ALIKE[::2]:
            await journal.trim(stream_id, 2, None)
        for stream_id, writer in writers.items():
            assert await read_all(journal, stream_id, 2) == writer.frames[2:]
            assert text_of(await journal.snapshot(stream_id)) == f"I am {stream_id}and more"
        remaining = list(ALIKE)
        for stream_id in ALIKE:
            await journal.expire(stream_id)
            remaining.remove(stream_id)
            assert {state.meta.stream_id for state in await journal.list("ada")} == set(remaining)
        assert journal.retained_bytes() == 0

    async def test_names_and_owners_never_alias(self, journal: Journal, clock: Clock) -> None:
        """Nor do names and owners; a name is no stream id and no owner either."""
        writers = {name: await Writer.begin(journal, meta(clock, owner=name), [name]) for name in ALIKE}
        for name, writer in writers.items():
            assert await journal.find(name) == writer.stream_id
            assert [state.meta.stream_id for state in await journal.list(name)] == [writer.stream_id]
            assert await journal.find(writer.stream_id) is None
            with pytest.raises(UnknownStream):
                await journal.state(name)
