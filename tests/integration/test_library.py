"""The library in an ASGI app of somebody's own: his generator, our journal, any server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Scope

from midstream import Chunk, Cursor, Finish, Limits, Midstream, ProducerFailed
from midstream.codec.sse import Decoder, Event
from midstream.errors import TooManyStreams, Unauthorized, UnknownStream
from midstream.testing.patience import soon, until
from midstream.wire import H_STREAM_ID

WORDS = ["One ", "two ", "three ", "four."]
Lines = Sequence[str | Chunk | list[Chunk] | Finish | Exception]


class Teller:
    """A generator of text as a user writes one; it says each line when it is told to, and knows when it was closed."""

    def __init__(self, lines: Lines = WORDS) -> None:
        self.told = asyncio.Semaphore(0)
        self.closed = asyncio.Event()
        self.begun = False
        self._lines = lines

    async def tokens(self) -> AsyncGenerator[Any, None]:
        self.begun = True
        try:
            for line in self._lines:
                await self.told.acquire()
                if isinstance(line, Exception):
                    raise line
                yield line
            await self.told.acquire()
        finally:
            self.closed.set()

    def tell(self, count: int = 1) -> None:
        for _ in range(count):
            self.told.release()

    def tell_all(self) -> None:
        self.tell(len(self._lines) + 1)


def owner_of(scope: Scope) -> str:
    """Whose request it is, by the app's own way to know its users."""
    for name, value in scope["headers"]:
        if name == b"x-user":
            return str(value.decode())
    raise Unauthorized


class Site:
    """The app of the library's docstring, on a server of its own; `teller` says what is asked for next."""

    def __init__(self, streams: Midstream) -> None:
        self.streams = streams
        self.teller = Teller()
        self.address = ""
        self.places = False  # whether its answers say where they are resumed
        self.served: list[str] = []
        self.opened: list[aiohttp.ClientResponse] = []
        self.session: aiohttp.ClientSession
        self.app = Starlette(
            routes=[
                Route("/ask", self._ask, methods=["POST"]),
                Route("/ask/{stream_id}", self._resume, name="resume"),
                Mount("/midstream", streams.asgi(owner_of)),
                Mount("/of/{team}", routes=[Mount("/streams", streams.asgi(owner_of))]),
            ],
            lifespan=streams.lifespan,
        )

    def _place(self, request: Request, stream_id: str) -> Any:
        return request.url_for("resume", stream_id=stream_id) if self.places else None

    async def _ask(self, request: Request) -> Response:
        owner = owner_of(request.scope)
        name = request.headers.get("idempotency-key")
        stream_id = await self.streams.open(self.teller.tokens(), owner=owner, name=name)
        response = self.streams.response(stream_id, owner=owner, location=self._place(request, stream_id))
        response.set_cookie("last", stream_id)
        response.headers["Cache-Control"] = "no-store, private"
        response.background = BackgroundTask(self.served.append, stream_id)
        return response

    async def _resume(self, request: Request) -> Response:
        stream_id = request.path_params["stream_id"]
        owner = owner_of(request.scope)
        return self.streams.resume(stream_id, owner=owner, location=self._place(request, stream_id))

    async def open(self, method: str, path: str, user: str = "ada", **more: Any) -> aiohttp.ClientResponse:
        headers = {"X-User": user} | more.pop("headers", {})
        response = await soon(self.session.request(method, self.address + path, headers=headers, **more))
        self.opened.append(response)
        return response

    async def ask(self, **more: Any) -> tuple[str, aiohttp.ClientResponse]:
        response = await self.open("POST", "/ask", **more)
        assert response.status == 200
        return response.headers[H_STREAM_ID], response

    async def told(self, *lines: Any) -> str:
        """The id of a stream that this generator has told to its end."""
        self.teller = Teller(lines or WORDS)
        self.teller.tell_all()
        stream_id, response = await self.ask()
        await soon(response.read())
        return stream_id


@asynccontextmanager
async def serving(site: Site, root_path: str = "") -> AsyncIterator[Site]:
    """On uvicorn as it comes, without anything of the gateway's server."""
    server = uvicorn.Server(
        uvicorn.Config(site.app, root_path=root_path, lifespan="on", log_config=None, timeout_graceful_shutdown=5)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        site.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = asyncio.create_task(server.serve([listener]))
        await until(lambda: server.started or running.done(), "the server")
        async with aiohttp.ClientSession() as site.session:
            yield site
            for response in site.opened:
                response.close()
        server.should_exit = True
        await soon(running)


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    async with serving(Site(Midstream())) as site:
        yield site


def events(body: bytes) -> list[Event]:
    return Decoder().feed(body)


def texts(body: bytes) -> list[str]:
    return [orjson.loads(event.data)["delta"] for event in events(body) if event.event == "token"]


async def read_upto(response: aiohttp.ClientResponse, seq: int) -> bytes:
    """The body up to the end of this record."""
    body = b""
    while b"id: %d\n" % seq not in body or not body.endswith(b"\n\n"):
        body += await soon(response.content.readany())
    return body


async def test_the_two_halves_of_a_cut_answer_are_the_whole(site: Site) -> None:
    """I3, I6: the reader goes after each record in turn, the generator goes on, and the rest is what he lacks."""
    whole = events(await soon((await site.open("GET", f"/ask/{await site.told()}?from=start")).read()))
    assert [event.event for event in whole] == ["start", *["token"] * 4, "done"]
    for cut in range(1, len(whole)):
        site.teller = Teller()
        site.teller.tell(cut - 1)
        stream_id, response = await site.ask()
        first = events(await read_upto(response, cut))
        response.close()
        site.teller.tell_all()
        rest = await site.open("GET", f"/ask/{stream_id}?cursor={Cursor(stream_id, cut).encode()}")
        second = events(await soon(rest.read()))
        assert [event.id for event in first + second] == [event.id for event in whole]
        assert [event.data for event in (first + second)[1:]] == [event.data for event in whole[1:]]


async def test_records_come_while_the_generator_speaks(site: Site) -> None:
    """Nothing waits for the end."""
    _, response = await site.ask()
    await read_upto(response, 1)
    for seq in range(2, 6):
        site.teller.tell()
        await read_upto(response, seq)
    site.teller.tell()
    assert b"event: done" in await soon(response.read())


async def test_what_a_generator_may_yield(site: Site) -> None:
    """Text, a chunk with more than text, several at once, and how it ended; after that it is asked for no more."""
    said = ["a", Chunk("b", {"reasoning": "hm"}), [Chunk("c"), Chunk("d")], Finish("length", {"total_tokens": 4})]
    stream_id = await site.told(*said, "never said")
    body = await soon((await site.open("GET", f"/ask/{stream_id}?from=start")).read())
    assert texts(body) == ["a", "b", "c", "d"]
    done = orjson.loads(events(body)[-1].data)
    assert (done["finish_reason"], done["usage"]) == ("length", {"total_tokens": 4})
    await soon(site.teller.closed.wait())


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (
            ProducerFailed("upstream_error", "my model is down", status=503, retryable=True),
            {"code": "upstream_error", "message": "my model is down", "retryable": True, "status": 503},
        ),
        (
            KeyError("a secret"),
            {"code": "producer_error", "message": "KeyError in the producer", "retryable": False},
        ),
        (
            UnknownStream("of another one"),
            {"code": "producer_error", "message": "UnknownStream in the producer", "retryable": False},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_generator_that_raises_ends_its_stream(site: Site, fault: Exception, error: dict[str, Any]) -> None:
    """I7: with what it had said before, and by the words it chose itself, if it chose any."""
    stream_id = await site.told("a", fault)
    body = await soon((await site.open("GET", f"/ask/{stream_id}?from=start")).read())
    assert texts(body) == ["a"]
    assert orjson.loads(events(body)[-1].data)["error"] == error


async def test_a_name_finds_the_stream_of_the_first_try(site: Site) -> None:
    """The second generator is closed and has not run; another owner's name is another's."""
    first = site.teller
    stream_id, _ = await site.ask(headers={"Idempotency-Key": "k"})
    second = site.teller = Teller(["never"])
    again, response = await site.ask(headers={"Idempotency-Key": "k"})
    assert again == stream_id
    assert not second.begun
    first.tell_all()
    assert texts(await soon(response.read())) == WORDS
    site.teller.tell_all()
    bobs, _ = await site.ask(user="bob", headers={"Idempotency-Key": "k"})
    assert bobs != stream_id


async def test_cancel_closes_the_generator(site: Site) -> None:
    """I6: and its reader hears why."""
    stream_id, response = await site.ask()
    site.teller.tell()
    await read_upto(response, 2)
    await site.streams.cancel(stream_id, owner="ada")
    await soon(site.teller.closed.wait())
    assert b'"reason":"client"' in await soon(response.read())


async def test_a_strangers_stream_is_none(site: Site) -> None:
    """I9: on every verb."""
    stream_id = await site.told()
    answer = await site.open("GET", f"/ask/{stream_id}?from=start", user="bob")
    assert (answer.status, await answer.json()) == (404, {"error": "unknown_stream"})
    for verb in (
        site.streams.answer(stream_id, owner="bob"),
        site.streams.cancel(stream_id, owner="bob"),
        site.streams.ack(stream_id, owner="bob", seq=1),
    ):
        with pytest.raises(UnknownStream):
            await verb
    assert (await site.streams.answer(stream_id, owner="ada")).fold.choices[0].text == "".join(WORDS).encode()


@pytest.mark.parametrize(("query", "code"), [("", "bad_cursor"), ("?cursor=x", "bad_cursor"), ("?x=1", "bad_request")])
async def test_refusals_are_those_of_the_protocol(site: Site, query: str, code: str) -> None:
    """Also where no part of the gateway stands around the app."""
    answer = await site.open("GET", f"/ask/{await site.told()}{query}")
    assert (answer.status, (await answer.json())["error"]) == (400, code)


async def test_an_ack_lets_records_go(site: Site) -> None:
    """R6: who resumes below it is told, and goes on from the answer as it is kept."""
    stream_id = await site.told()
    await site.streams.ack(stream_id, owner="ada", seq=3)
    answer = await site.open("GET", f"/ask/{stream_id}?from=start")
    assert (answer.status, (await answer.json())["error"]) == (409, "cursor_expired")


async def test_the_native_contract_can_be_mounted(site: Site) -> None:
    """All but creating; the app's own users are the owners, and who is none is refused."""
    stream_id = await site.told()
    base = f"/midstream/v1/stream/{stream_id}"
    state = await (await site.open("GET", f"{base}/state")).json()
    assert (state["status"], state["highest_seq"]) == ("done", 6)
    assert (await (await site.open("GET", f"{base}/snapshot")).json())["text"] == "".join(WORDS)
    assert texts(await soon((await site.open("GET", f"{base}?from=start")).read())) == WORDS
    listed = await (await site.open("GET", "/midstream/v1/streams")).json()
    assert [one["stream_id"] for one in listed["streams"]] == [stream_id]
    acked = await (await site.open("POST", f"{base}/ack", json={"seq": 2})).json()
    assert acked["acked_seq"] == 2
    assert (await site.open("GET", f"{base}/state", user="bob")).status == 404
    nobody = await soon(site.session.get(f"{site.address}{base}/state"))
    assert (nobody.status, await nobody.json()) == (401, {"error": "unauthorized"})
    create = await site.open("POST", "/midstream/v1/stream", json={"prompt": "x"})
    assert (create.status, (await create.json())["error"]) == (404, "not_found")


async def test_a_mounted_route_says_where_it_is_itself(site: Site) -> None:
    """Below whatever the app is mounted at, in either format, as a path that can be asked for as it stands."""
    stream_id = await site.told()
    for mounted in ("/midstream", "/of/ops%20%26%20%C3%BC/streams"):
        for query in ("", "?format=openai"):
            more = "&" if query else "?"
            answer = await site.open("GET", f"{mounted}/v1/stream/{stream_id}{query}{more}from=start")
            place = answer.headers["Location"]
            assert place == f"{mounted}/v1/stream/{stream_id}{query}"
            again = await site.open("GET", f"{place}{more}from=start")
            told, told_again = [events(await soon(one.read())) for one in (answer, again)]
            assert [event.data for event in told_again] == [event.data for event in told]


async def test_a_mounted_route_counts_what_a_proxy_has_cut_off() -> None:
    """A reader behind it must be told the path that the proxy knows."""
    async with serving(Site(Midstream()), root_path="/api") as site:
        stream_id = await site.told()
        answer = await site.open("GET", f"/midstream/v1/stream/{stream_id}?from=start")
        assert answer.headers["Location"] == f"/api/midstream/v1/stream/{stream_id}"


async def test_an_answer_of_the_apps_own_names_no_route_of_the_gateways(site: Site) -> None:
    """It has none; where it says itself where it resumes, that is told, and goes on."""
    site.teller.tell_all()
    stream_id, answer = await site.ask()
    resumed = await site.open("GET", f"/ask/{stream_id}?from=start")
    assert "Location" not in answer.headers
    assert "Location" not in resumed.headers
    site.places = True
    site.teller = Teller()
    site.teller.tell_all()
    stream_id, answer = await site.ask()
    place = answer.headers["Location"]
    assert place == f"{site.address}/ask/{stream_id}"
    resumed = await soon(site.session.get(place, headers={"X-User": "ada", "Last-Event-ID": "3"}))
    assert resumed.headers["Location"] == place
    assert texts(await soon(resumed.read())) == WORDS[2:]


async def test_an_answer_of_the_apps_own_comes_as_chunks_where_that_is_asked(site: Site) -> None:
    """The same that the mounted route gives; the place that is told goes on in the same format."""
    site.places = True
    site.teller.tell_all()
    stream_id, _ = await site.ask()
    await until(lambda: not site.streams.streams.writers)
    mounted = await site.open("GET", f"/midstream/v1/stream/{stream_id}?format=openai&from=start")
    answer = await site.open("GET", f"/ask/{stream_id}?format=openai&from=start")
    assert answer.headers["Location"] == f"{site.address}/ask/{stream_id}?format=openai"
    body = await soon(answer.read())
    assert body == await soon(mounted.read())
    assert body.endswith(b"data: [DONE]\n\n")
    again = await site.open("GET", f"{answer.headers['Location'].removeprefix(site.address)}&from=start")
    assert await soon(again.read()) == body
    wrong = await site.open("GET", f"/ask/{stream_id}?format=xml&from=start")
    assert (wrong.status, (await wrong.json())["error"]) == (400, "bad_request")


async def test_a_head_does_not_follow_the_stream(site: Site) -> None:
    """Starlette gives each GET route a HEAD."""
    stream_id, answer = await site.ask()
    for path, methods in ((f"/ask/{stream_id}", "GET"), (f"/midstream/v1/stream/{stream_id}", "DELETE, GET")):
        head = await site.open("HEAD", f"{path}?from=start")
        assert (head.status, head.headers["Allow"]) == (405, methods)
    site.teller.tell_all()
    await soon(answer.read())


async def test_an_answer_is_a_response_like_any_other(site: Site) -> None:
    """FastAPI makes JSON of whatever is none; what is set on it is sent, and its background runs once it is over."""
    assert isinstance(site.streams.response("x", owner="ada"), Response)
    assert isinstance(site.streams.resume("x", owner="ada"), Response)
    stream_id, answer = await site.ask()
    assert answer.cookies["last"].value == stream_id
    assert answer.headers.getall("Cache-Control") == ["no-store, private"]
    assert answer.headers.getall("Content-Type") == ["text/event-stream; charset=utf-8"]
    assert "Content-Length" not in answer.headers
    assert site.served == []
    site.teller.tell_all()
    await soon(answer.read())
    await until(lambda: site.served == [stream_id], "the background task")


async def test_the_app_ends_its_streams_with_itself() -> None:
    """I7: at the lifespan's end what is open is told so; there is no cut without a word."""
    streams = Midstream()
    async with serving(Site(streams)) as site:
        site.teller.tell()
        _, response = await site.ask()
        await read_upto(response, 2)
        await streams.stop(drain=0.01)
        assert b'"reason":"shutdown"' in await soon(response.read())
        await soon(site.teller.closed.wait())


async def test_a_durable_journal_outlives_the_app(tmp_path: Path) -> None:
    """I1: the next process of the same app resumes what this one wrote."""
    url = f"sqlite:///{tmp_path}/streams.db"
    async with serving(Site(Midstream(url))) as site:
        stream_id = await site.told()
    async with serving(Site(Midstream(url))) as site:
        rest = await site.open("GET", f"/ask/{stream_id}?cursor={Cursor(stream_id, 3).encode()}")
        assert texts(await soon(rest.read())) == WORDS[2:]


async def test_limits_are_the_apps_own() -> None:
    """One too many is refused, and its generator is closed without having run."""
    async with Midstream(limits=Limits(max_streams=1)) as streams:
        first, second = Teller(), Teller()
        await streams.open(first.tokens(), owner="ada")
        with pytest.raises(TooManyStreams):
            await streams.open(second.tokens(), owner="ada")
        assert not second.begun
        first.tell_all()
        await soon(first.closed.wait())
