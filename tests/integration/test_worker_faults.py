"""A worker whose pool, whose line to it, or whose local server is away for a while, and one that is told to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from midstream.testing.fault_proxy import FaultProxy
from midstream.testing.patience import soon, until
from midstream.testing.upstream import Pause, Reset, Script, Stall, chat_answer, chat_event
from midstream.testing.upstream_script import ROLE
from midstream.worker.pool import PoolRefused
from midstream.worker.times import Times
from tests.gateways import site
from tests.kobold import Kobold
from tests.pools import CAT, MODEL, Reading
from tests.workers import NEVER, TIMES, Seen, Shop, once, shop


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Shop]:
    async with shop(tmp_path) as running:
        yield running


# --- the line to the pool --------------------------------------------------------------------------------------------


async def test_a_post_whose_answer_was_lost_is_repeated_and_read_once(here: Shop) -> None:
    here.upstream.script(MODEL, Script(chat_answer("The ", "cat ", "sat")))
    here.line.lose_reply(b'"seq":1,')
    async with here.worker():
        reading = await here.ask()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert here.line.lost == 1
    first, second = here.tap.batches[:2]
    assert first == second
    once(reading)
    assert reading.text == "The cat sat"


async def test_a_post_that_hangs_is_sent_again(here: Shop) -> None:
    """When the line goes on it may bring both, and the reader has it once."""
    more = asyncio.Event()
    here.upstream.script(MODEL, Script([ROLE, Pause(more), chat_event("The cat "), *chat_answer("sat")]))
    async with here.worker(times=replace(TIMES, post=0.1, alive=60.0)):
        reading = await here.ask()
        await until(lambda: here.asked, "the job to be running")
        here.line.stall()
        more.set()
        lines = here.line.connections
        await until(lambda: here.line.connections > lines + 1, "another try")
        here.line.resume()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert reading.text == "The cat sat"
    once(reading)


async def test_a_gateway_that_is_away_for_a_while_gets_the_whole_answer(here: Shop) -> None:
    """The model goes on meanwhile, and what it says then is posted too."""
    more = asyncio.Event()
    here.upstream.script(MODEL, Script([ROLE, chat_event("one "), Pause(more), *chat_answer("two ", "three")]))
    async with here.worker() as worker:
        reading = await here.ask()
        assert await reading.read(1) == "one "
        await here.line.refuse()
        here.line.reset()
        more.set()
        await until(lambda: worker.trouble, "the worker to notice")
        assert worker.trouble.startswith("the pool does not answer: ")
        [job] = worker.running.values()
        await until(lambda: job.answer.finish, "the model to end")
        await here.line.accept()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
        assert worker.trouble == ""
    assert reading.text == "one two three"
    once(reading)


async def test_a_pool_that_answers_500_is_one_that_is_away(here: Shop) -> None:
    for route in ("pop", "progress", "submit"):
        here.tap.answer(route, 500, b"<html>Bad Gateway</html>")
        here.tap.answer(route, 503, {"message": "the pool's store does not answer", "rc": "StoreUnavailable"})
    async with here.worker():
        reading = await here.ask()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert reading.text == "Hello, world"


async def test_a_lease_that_was_lost_in_a_long_silence_ends_in_a_submit(here: Shop) -> None:
    """Nobody would take a post any more; the reply may still come in time."""
    more = asyncio.Event()
    here.upstream.script(MODEL, Script([ROLE, chat_event("one "), Pause(more), *chat_answer("two")]))
    async with here.worker(times=replace(TIMES, lease=0.5)) as worker:
        reading = await here.ask()
        assert await reading.read(1) == "one "
        await here.line.refuse()
        here.line.reset()
        await until(lambda: worker.trouble, "the worker to notice")
        posts = len(here.tap.posts)
        [job] = worker.running.values()
        assert job._posting is not None
        await until(job._posting.done, "the worker to give up its posts")
        more.set()
        await here.line.accept()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert reading.text == "one two"
    assert len(here.tap.posts) == posts


async def test_a_proxy_that_answers_in_the_pools_place_loses_no_answer(here: Shop) -> None:
    """Its 404 is not the pool's, which would end the job."""
    here.tap.answer("progress", 404, b"default backend")
    here.tap.answer("submit", 404, b"default backend")
    async with here.worker():
        reading = await here.ask()
        assert (await reading.end())[0] == "done"
        assert (await here.over()).outcome == "done"
    assert reading.text == "Hello, world"
    assert len(here.tap.submits) == 2


async def test_a_submit_whose_answer_was_lost_is_done(here: Shop) -> None:
    """The second one is told that it was submitted already."""
    here.line.lose_reply(b'"native_finish_reason"')
    async with here.worker() as worker:
        reading = await here.ask()
        assert (await reading.end())[0] == "done"
        result = await here.over()
    assert here.line.lost == 1
    assert len(here.tap.submits) == 2
    assert (result.outcome, result.why) == ("done", "")
    assert worker.tally.jobs == {"done": 1}
    assert await here.site.balances() == (-20, 20, 0)


async def test_one_broken_connection_is_no_news(here: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Servers close idle ones.  Two in a row are told once, and so is the end of it."""
    async with here.worker() as worker:
        await until(lambda: len(here.tap.seen) > 1, "pops")
        here.line.reset()
        seen = len(here.tap.seen)
        await until(lambda: len(here.tap.seen) > seen + 1, "pops")
        assert not [message for message in caplog.messages if "the pool" in message]
        await here.line.refuse()
        here.line.reset()
        await until(lambda: worker.trouble, "the worker to notice")
        await here.line.accept()
        await until(lambda: not worker.trouble, "the pool to answer")
    told = [message for message in caplog.messages if "the pool" in message]
    assert len(told) == 2
    assert told[0].startswith("the pool does not answer: ")
    assert told[1] == "the pool answers again"


# --- pools that refuse -----------------------------------------------------------------------------------------------


async def refused(here: Shop, **worker: str) -> str:
    """Why the pool will not have this worker, which ends at once."""
    with pytest.raises(PoolRefused) as caught:
        async with here.worker(**worker) as refusing:  # type: ignore[arg-type]
            await until(refusing._stopping.is_set, "the refusal")
    return str(caught.value)


async def test_a_key_that_nobody_has_is_refused(here: Shop) -> None:
    assert await refused(here, key="wrong") == "no user has this API key (status 401)"


async def test_a_name_of_another_owner_is_refused(here: Shop) -> None:
    await here.site.hand("kitchen", CAT).look()
    assert "(status 403)" in await refused(here)


async def test_a_gateway_without_a_pool_is_told_from_one_that_is_away(here: Shop) -> None:
    async with site() as other:
        reason = await refused(here, url=other.gateway.address)
    assert reason.startswith("there is no pool at this address: ")


async def test_what_is_no_pool_at_all_is_refused(here: Shop) -> None:
    async with Served(web.Response(text="<html>Welcome</html>")) as url:
        assert await refused(here, url=url) == "what answers at this address is no pool (status 200)"


async def test_a_redirect_is_told_and_not_followed(here: Shop) -> None:
    """The key would follow."""
    to = {"Location": "https://pool.example/api/v2/generate/text/pop"}
    async with Served(web.Response(status=308, headers=to)) as url:
        assert await refused(here, url=url) == "it redirects to https://pool.example: give that address"


async def test_a_refusal_lets_the_other_threads_give_back(here: Shop) -> None:
    here.upstream.script(MODEL, Script([Stall()]))

    async def work() -> None:
        async with here.worker(threads=2) as worker:
            await here.ask()
            await until(lambda: worker.running, "a job")
            here.tap.answer("pop", 401, {"message": "gone", "rc": "InvalidAPIKey"})
            await until(lambda: here.ended, "the job to be given back")

    with pytest.raises(PoolRefused):
        await work()
    assert here.outcomes == ["faulted"]
    assert here.tap.submits[0]["state"] == "faulted"


async def test_a_pool_that_was_one_is_waited_for_whatever_answers_in_its_place(here: Shop) -> None:
    async with here.worker() as worker:
        await until(lambda: here.site.pool.serves(MODEL), "the worker")
        for _ in range(3):
            here.tap.answer("pop", 404, b"default backend")
        await until(lambda: worker.trouble, "the worker to notice")
        await until(lambda: not worker.trouble, "the pool")
        assert (await (await here.ask()).end())[0] == "done"


# --- the local server ------------------------------------------------------------------------------------------------


async def queued(here: Shop) -> Reading:
    """A reader of a model whose worker takes no jobs now."""
    await here.site.hand("another").look()
    return await here.ask()


async def test_a_local_server_that_is_not_there_is_waited_for_without_a_job(here: Shop) -> None:
    async with FaultProxy("127.0.0.1", here.upstream.port) as door:
        await door.refuse()
        async with here.worker(local=f"http://127.0.0.1:{door.port}/v1") as worker:
            await until(lambda: worker.trouble, "the worker to notice")
            assert worker.trouble.startswith("the local server does not answer: ")
            reading = await queued(here)
            assert here.ended == []
            await door.accept()
            assert (await reading.end())[0] == "done"
            await here.over()
    assert here.outcomes == ["done"]


async def test_a_local_server_that_goes_while_there_is_no_work_costs_no_job(here: Shop) -> None:
    assert Times().fresh == 10.0
    door = FaultProxy("127.0.0.1", here.upstream.port)
    wary = replace(TIMES, fresh=0.0)
    async with door, here.worker(local=f"http://127.0.0.1:{door.port}/v1", times=wary) as worker:
        await until(lambda: here.tap.calls("pop"), "a pop")
        await door.refuse()
        await until(lambda: worker.trouble, "the worker to notice")
        reading = await here.ask()
        await door.accept()
        assert (await reading.end())[0] == "done"
        await here.over()
    assert here.outcomes == ["done"]


async def test_a_local_server_that_has_gone_costs_one_job(here: Shop) -> None:
    """What it holds is given back at once, and nothing is taken until it is there again."""
    async with FaultProxy("127.0.0.1", here.upstream.port) as door:
        here.upstream.script(MODEL, Script([Stall()]), Script(chat_answer("back")))
        async with here.worker(local=f"http://127.0.0.1:{door.port}/v1") as worker:
            reading = await here.ask()
            await until(lambda: here.asked, "the job to be running")
            await door.refuse()
            door.reset()
            assert (await here.over()).outcome == "faulted"
            await until(lambda: worker.trouble, "the worker to notice")
            await door.accept()
            assert (await reading.end())[0] == "done"
            await here.over(2)
    assert here.outcomes == ["faulted", "done"]
    assert reading.text == "back"


async def test_a_local_server_that_fails_every_job_gets_them_later_and_later(here: Shop) -> None:
    here.upstream.script(MODEL, Script([Reset()]))
    paused: list[float] = []
    async with here.worker() as worker:
        pause = worker._pause

        async def noted(seconds: float) -> None:
            paused.append(seconds)
            await pause(0.0)

        worker._pause = noted  # type: ignore[method-assign]
        for _ in range(2):
            assert (await (await here.ask()).end())[0] == "failed"
        await here.over(6)
        assert worker.trouble == "pausing: 6 jobs in a row have failed here"
    waits = [seconds for seconds in paused if seconds != TIMES.pop]
    assert waits[:5] == [0.04, 0.08, 0.1, 0.1, 0.1]


async def test_a_cancel_stops_a_server_that_goes_on_without_a_reader(here: Shop) -> None:
    """It is told to abort that generation, and asked until it is idle: the next job is never met with "busy"."""
    async with Kobold() as kobold, here.worker(local=kobold.url):
        reading = await here.ask()
        while len(reading.tokens) < 1:
            await reading.next()
        assert (await here.site.ada.post(f"/v1/stream/{reading.stream_id}/cancel")).status == 200
        assert (await here.over()).outcome == "cancelled"
        [job], kobold.length = [job for job, _ in here.ended], 3
        assert kobold.aborted == [job.task.id]
        another = await here.ask()
        assert (await another.end())[0] == "done"
        await here.over(2)
        assert another.text == "0 1 2 "
        assert kobold.busy == 0
        assert kobold.failures == []
    assert here.outcomes == ["cancelled", "done"]


async def test_a_server_whose_other_jobs_run_on_is_not_waited_for(here: Shop) -> None:
    """It is never idle then: another thread of the same worker keeps it busy."""
    async with Kobold(slots=2) as kobold, here.worker(local=kobold.url, threads=2) as worker:
        first, second = await here.ask(), await here.ask()
        await until(lambda: len(worker.running) == 2, "two jobs")
        await soon(first.next())
        await here.site.ada.post(f"/v1/stream/{first.stream_id}/cancel")
        assert (await here.over()).outcome == "cancelled"
        [other] = worker.running.values()
        assert kobold.aborted == [here.ended[0][0].task.id]
        kobold.length = 0
        assert (await second.end())[0] == "done"
        await here.over(2)
        assert here.ended[1][0] is other


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_a_worker_that_ends_gives_back_first_and_waits_for_no_idle_server(here: Shop) -> None:
    async with Kobold(stubborn=True) as kobold:
        async with here.worker(local=kobold.url) as worker:
            await here.ask()
            await until(lambda: worker.running and kobold.running, "the job")
            worker.stop()
            assert (await here.over()).why == "the worker stops"
        assert [submit["state"] for submit in here.tap.submits] == ["faulted"]
        assert kobold.aborted == [here.tap.submits[0]["id"]]
    assert worker.tally.lost == 0


async def test_a_worker_that_ends_does_not_wait_for_a_post_that_hangs(here: Shop) -> None:
    here.upstream.script(MODEL, Script([Stall()]))
    here.tap.answer("progress", NEVER)
    async with here.worker() as worker:
        await here.ask()
        await until(lambda: here.tap.posts, "a post")
        worker.stop()
        assert (await here.over()).why == "the worker stops"
    assert [submit["state"] for submit in here.tap.submits] == ["faulted"]


async def test_a_whole_answer_is_handed_in_even_by_a_worker_that_ends(here: Shop) -> None:
    async with here.worker() as worker:
        here.tap.answer("progress", 503, {}, lambda call: call.body["seq"] > 0)
        reading = await here.ask()
        await until(lambda: any(job.answer.finish for job in worker.running.values()), "the model to end")
        worker.stop()
        assert (await here.over()).outcome == "done"
        assert (await reading.end())[0] == "done"
    assert reading.text == "Hello, world"


async def test_a_worker_ends_in_time_without_its_pool(here: Shop) -> None:
    here.upstream.script(MODEL, Script([Stall()]))
    async with here.worker(times=replace(TIMES, give_back=0.1)) as worker:
        await here.ask()
        await until(lambda: here.tap.posts, "the job to be running")
        await here.line.refuse()
        here.line.reset()
        await until(lambda: worker.trouble, "the worker to notice")
    assert worker.tally.lost == 1
    await here.upstream.idle(within=10)


async def test_a_job_that_comes_with_the_last_pop_is_given_back(here: Shop) -> None:
    """The pool hands it out while the worker is told to end."""
    await here.site.hand("another").look()
    reading = await here.ask()
    async with here.worker() as worker:

        def stopped(_: Seen) -> bool:
            worker.stop()
            return False

        here.tap.answer("pop", 500, holds=stopped)
        assert (await here.over()).why == "the worker stops"
    here.tap.instead.clear()
    assert here.asked == []
    async with here.worker("second", key=CAT):
        assert (await reading.end())[0] == "done"


class Served:
    """A web server that has one answer to everything."""

    def __init__(self, answer: web.Response) -> None:
        self._server = web.Server(lambda _: self._answer())
        self._body, self._status, self._headers = answer.body, answer.status, answer.headers

    async def _answer(self) -> web.Response:
        return web.Response(body=self._body, status=self._status, headers=self._headers)

    async def __aenter__(self) -> str:
        self._runner = web.ServerRunner(self._server)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
