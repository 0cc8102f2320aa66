"""The asyncio client against a gateway that misbehaves on a real socket."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator

import pytest

from midstream.client import AsyncClient, Cursor, GaveUp, Lost, Patience, Resumed, UnexpectedAnswer, Unreachable
from midstream.client.aio import AsyncStream
from midstream.errors import BadCursor, CursorExpired, Unauthorized
from midstream.testing.upstream_script import Head, Pause, Script, Send, Stall
from tests.unit.client.odd_gateway import ENDINGS, STREAM, OddGateway, in_thread, refusal, stream

HASTE = Patience(base=0.001, cap=0.002, attempts=5, unreached=2)
PING = Send(b": ping\n")


@pytest.fixture
async def gateway() -> AsyncIterator[OddGateway]:
    async with OddGateway(last=9) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: OddGateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.url, patience=HASTE) as client:
        yield client


async def seqs(stream: AsyncStream) -> list[int]:
    return [record.seq async for record in stream]


WHOLE = list(range(1, 10))


async def test_an_answer_is_read_to_its_end(client: AsyncClient, gateway: OddGateway) -> None:
    answer = await client.generate("hi", model="m", seed=7)
    assert answer.stream_id == STREAM
    assert "".join([record.text async for record in answer]) == gateway.text
    assert answer.outcome is not None
    assert answer.outcome.data["finish_reason"] == "stop"
    assert answer.position == Cursor(STREAM, 9)
    assert gateway.requests[0].json == {"prompt": "hi", "model": "m", "seed": 7}


@pytest.mark.parametrize("cut", range(9))
@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_connection_cut_after_any_record_is_mended(
    client: AsyncClient, gateway: OddGateway, cut: int, ending: str
) -> None:
    """I3 for every position: what was dispatched before and after the cut is the whole, once each."""
    gateway.then(stream(Send(b"retry: 2000\n"), gateway.after(0, cut), *ENDINGS[ending]))
    assert await seqs(await client.generate("hi")) == WHOLE
    # A reset may throw away what was not read yet.
    again = "POST" if cut == 0 else str(cut)
    assert gateway.asked[1:] == [again] or ending == "reset"


async def test_what_may_pass_is_waited_out(client: AsyncClient, gateway: OddGateway) -> None:
    html = refusal(502, b"<html>")
    gateway.then(refusal(503, retry_after="0"), stream(gateway.after(0, 3)), html, refusal(429, b"{}"), html)
    assert await seqs(await client.generate("hi")) == WHOLE
    assert gateway.asked == ["POST", "POST", "3", "3", "3", "3"]
    keys = {request.headers["idempotency-key"] for request in gateway.requests[:2]}
    assert len(keys) == 1


async def test_only_heartbeats_are_given_up_in_the_end_and_the_position_is_told(
    client: AsyncClient, gateway: OddGateway
) -> None:
    gateway.then(stream(gateway.after(0, 4)), *[stream(PING)] * 100)
    answer = await client.generate("hi")
    with pytest.raises(GaveUp, match="5 attempts") as caught:
        await seqs(answer)
    assert caught.value.cursor == answer.cursor == Cursor(STREAM, 4).encode()
    assert len(gateway.requests) == 5


async def test_one_record_per_connection_is_enough_to_go_on(gateway: OddGateway) -> None:
    gateway.then(*[lambda after: stream(gateway.after(after, after + 1))] * 9)
    async with AsyncClient(gateway.url, patience=Patience(base=0.001, attempts=2)) as client:
        assert await seqs(await client.generate("hi")) == WHOLE


async def test_silence_counts_as_a_drop(client: AsyncClient, gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 5), Stall(), heartbeat=0.02))
    assert await seqs(await client.generate("hi")) == WHOLE
    assert gateway.asked == ["POST", "5"]


async def test_204_too_early_is_an_error(client: AsyncClient, gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 5)), refusal(204))
    answer = await client.generate("hi")
    with pytest.raises(UnexpectedAnswer, match="204 after seq 5"):
        await seqs(answer)


async def test_a_position_that_has_gone_is_the_callers_to_decide_on(client: AsyncClient, gateway: OddGateway) -> None:
    gone = b'{"error":"cursor_expired","oldest_available":7,"action":"restart"}'
    gateway.then(stream(gateway.after(0, 2)), refusal(409, gone))
    answer = await client.generate("hi")
    with pytest.raises(CursorExpired) as caught:
        await seqs(answer)
    assert caught.value.oldest_available == 7
    assert (await answer.snapshot())["text"] == gateway.text
    assert len(gateway.asked) == 2


async def test_a_refused_key_is_raised_once_by_generate(client: AsyncClient, gateway: OddGateway) -> None:
    gateway.then(refusal(401, b'{"error":"unauthorized"}'))
    with pytest.raises(Unauthorized):
        await client.generate("hi")
    assert len(gateway.requests) == 1


async def test_the_key_is_asked_for_at_each_attempt(gateway: OddGateway) -> None:
    keys = iter(["old", "new", "newer"])

    async def key() -> str:
        return next(keys)

    gateway.then(stream(gateway.after(0, 5)))
    async with AsyncClient(gateway.url, key=key, patience=HASTE) as client:
        answer = await client.generate("hi")
        assert await seqs(answer) == WHOLE
        await answer.ack()
    sent = [request.headers["authorization"] for request in gateway.requests]
    assert sent == ["Bearer old", "Bearer new", "Bearer newer"]


async def test_a_redirect_does_not_carry_the_key_away(gateway: OddGateway) -> None:
    async with OddGateway() as elsewhere, AsyncClient(gateway.url, key="k", patience=HASTE) as client:
        gateway.then(Script([Head(307, {"Location": elsewhere.url + "/v1/stream"})]))
        with pytest.raises(UnexpectedAnswer, match="307"):
            await client.generate("hi")
        assert elsewhere.requests == []


async def test_an_answer_that_never_begins_is_given_up(gateway: OddGateway) -> None:
    gateway.then(Script([Stall()]), Script([Stall()]))
    async with AsyncClient(gateway.url, patience=HASTE, timeout=0.05) as client:
        with pytest.raises(GaveUp, match="no answer in time"):
            await client.generate("hi")


async def test_nobody_there_is_told_soon() -> None:
    async with OddGateway() as gone:
        url = gone.url
    async with AsyncClient(url, patience=HASTE) as client:
        with pytest.raises(GaveUp, match="connection refused"):
            await client.generate("hi")
        with pytest.raises(Unreachable, match="connection refused"):
            await client.streams()


async def test_a_stream_has_a_name_also_behind_a_proxy_that_takes_headers_away(
    client: AsyncClient, gateway: OddGateway
) -> None:
    gateway.then(Script([gateway.after(0)]))
    answer = await client.generate("hi")
    assert answer.position == Cursor(STREAM, 0)
    assert await seqs(answer) == WHOLE


async def test_a_loop_left_early_goes_on_in_the_next_one(client: AsyncClient, gateway: OddGateway) -> None:
    answer = await client.generate("hi")
    async for record in answer:
        if record.seq == 3:
            break
    assert answer.position.seq == 3
    assert await seqs(answer) == WHOLE[3:]
    assert gateway.asked == ["POST", "3"]


async def test_a_position_goes_on_in_another_client(client: AsyncClient, gateway: OddGateway) -> None:
    assert await seqs(client.resume(Cursor(STREAM, 6).encode())) == [7, 8, 9]
    assert await seqs(client.resume(Cursor(STREAM, 9))) == []
    with pytest.raises(BadCursor):
        client.resume("nonsense!")


@pytest.mark.parametrize("keep", [True, False])
async def test_fifty_loops_left_early_leave_no_connection(gateway: OddGateway, keep: bool) -> None:
    """With two connections allowed, and whether or not the streams are held on to.  Warnings are errors here."""
    asyncio.get_running_loop().set_debug(True)  # aiohttp warns of what is left open in this mode only
    gateway.then(*[stream(gateway.after(0, 4), Stall())] * 50)
    kept = []
    async with AsyncClient(gateway.url, patience=HASTE, connections=2, timeout=5) as client:
        for _ in range(50):
            answer = await client.generate("hi")
            if keep:
                kept.append(answer)
            async for record in answer:
                assert record.seq == 1
                break
        assert await seqs(await client.generate("hi")) == WHOLE
    del answer, kept
    gc.collect()
    assert gateway.peak <= 3  # a closed one may be seen as open for a moment


async def test_a_stream_that_is_never_read_gives_its_connection_back(gateway: OddGateway) -> None:
    gateway.then(*[stream(gateway.after(0, 4), Stall())] * 5)
    async with AsyncClient(gateway.url, connections=1, timeout=5) as client:
        for _ in range(5):
            await client.generate("hi")
        assert await seqs(await client.generate("hi")) == WHOLE


def test_a_client_that_is_closed_leaves_no_connection_open() -> None:
    """Nor those of streams that nobody has read to their end: a warning of the library's would be an error here."""
    kept: list[AsyncStream] = []

    async def use(url: str) -> None:
        async with AsyncClient(url, patience=HASTE) as client:
            kept.extend([await client.generate("hi"), await client.generate("hi")])
            assert (await anext(aiter(kept[1]))).seq == 1

    with in_thread(OddGateway(last=9)) as running:
        running.then(*[stream(running.after(0, 4), Stall())] * 2)
        asyncio.run(use(running.url))
        kept.clear()
        gc.collect()


async def test_a_stream_goes_on_after_its_client_was_closed(gateway: OddGateway) -> None:
    """From the position, on a connection of its own."""
    gateway.then(stream(gateway.after(0, 4), Stall()))
    client = AsyncClient(gateway.url, patience=HASTE)
    answer = await client.generate("hi")
    await client.aclose()
    assert await seqs(answer) == WHOLE
    await client.aclose()


async def test_calls_do_not_wait_behind_streams(gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 4), Stall()))
    async with AsyncClient(gateway.url, connections=1, timeout=5) as client:
        answer = await client.generate("hi")
        async for record in answer:
            if record.seq == 4:
                break
            await answer.ack()
            await answer.cancel()
    bodies = [request.json for request in gateway.requests if request.path.endswith("/ack")]
    assert bodies == [{"seq": 1}, {"seq": 2}, {"seq": 3}]


async def test_a_wait_that_is_cut_short_loses_nothing(client: AsyncClient, gateway: OddGateway) -> None:
    told = asyncio.Event()
    gateway.then(lambda after: stream(gateway.after(0, 3), Pause(told), gateway.after(3)))
    reading = aiter(await client.generate("hi"))
    given = [(await anext(reading)).seq for _ in range(3)]
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(reading), 0.02)
    told.set()
    given += [record.seq async for record in reading]
    assert given == WHOLE
    assert gateway.asked == ["POST"]


async def test_a_closed_stream_says_so_to_a_loop_that_still_reads_it(client: AsyncClient, gateway: OddGateway) -> None:
    gateway.then(stream(gateway.after(0, 1), Stall()))
    answer = await client.generate("hi")
    reading = aiter(answer)
    assert (await anext(reading)).seq == 1
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    answer.close()
    with pytest.raises(RuntimeError, match="closed"):
        await waiting
    assert await seqs(answer) == WHOLE[1:]


async def test_losses_and_the_return_are_told(gateway: OddGateway) -> None:
    told: list[Lost | Resumed] = []
    gateway.then(stream(gateway.after(0, 3)))
    async with AsyncClient(gateway.url, patience=HASTE, notify=told.append) as client:
        await seqs(await client.generate("hi"))
    assert [type(each) for each in told] == [Lost, Resumed]


def test_one_client_works_in_several_loops_and_threads() -> None:
    given: list[list[int]] = []

    async def use() -> None:
        async with shared:
            given.append(await seqs(await shared.generate("hi")))

    def work() -> None:
        for _ in range(2):
            asyncio.run(use())

    with in_thread(OddGateway(last=9)) as gateway:
        shared = AsyncClient(gateway.url, patience=HASTE)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert given == [WHOLE] * 8
