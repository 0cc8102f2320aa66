"""What the browser tests stand on: a gateway process, an upstream that speaks when told, and the page."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from playwright.sync_api import (
    APIResponse,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    Route,
    WebSocketRoute,
    expect,
)

from midstream.testing.upstream import MisbehavingUpstream, Pause, Script, Step, chat_answer

T = TypeVar("T")

# A name that the page takes for a simulation, as it is one.
MODEL = "scripted-by-test"
WITHIN = 10.0  # seconds for anything that a test waits for
LAUNCH_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

FIRST = (*(f" one{i}" for i in range(12)), " né", " 你好", "\n\n", "  two ", "🚀")
SECOND = (*(f" two{i}" for i in range(12)), "\n", "ü", " end.")
ALL = "".join(FIRST + SECOND)
# The start record is seq 1, so the n-th token has seq n + 1.
LAST_OF_FIRST = len(FIRST) + 1
FIRST_OF_SECOND = LAST_OF_FIRST + 1
TERMINAL = len(FIRST) + len(SECOND) + 2


class Upstream:
    """A `MisbehavingUpstream` in a thread with a loop of its own: Playwright's sync API holds the test's."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server = MisbehavingUpstream()

    def __enter__(self) -> Upstream:
        self._thread.start()
        self._call(self._server.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._server.__aexit__(kind, error, trace))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def generations(self) -> int:
        """How often the model was asked."""
        return sum(request.method == "POST" for request in self._server.requests)

    def says(self, *steps: Step) -> None:
        """What every generation from now on is."""
        self._server.script(MODEL, Script(steps))

    def says_in_two_parts(self) -> Gate:
        """`FIRST`, then `SECOND` once the gate is opened."""
        gate = Gate(self._loop)
        steps = chat_answer(*FIRST, *SECOND)
        steps.insert(1 + len(FIRST), Pause(gate.event))
        self.says(*steps)
        return gate

    def left(self, count: int) -> None:
        """Wait until the gateway has closed so many connections in mid-answer. Raises TimeoutError."""
        self._call(self._server.disconnected(count, within=WITHIN))

    @property
    def abandoned(self) -> int:
        """How many connections the gateway has closed in mid-answer."""
        return sum(closed.by_client and closed.mid_answer for closed in self._server.closed)

    def _call(self, verb: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(verb, self._loop).result(WITHIN)


class Gate:
    """Holds a generation until a test opens it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.event = asyncio.Event()
        self._loop = loop

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self.event.set)


class GatewayProcess:
    """`midstream serve` as a process. `address` is where it listens."""

    def __init__(self, *flags: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "midstream", "serve", "--port", str(port), "--grpc-port", "0", *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.address = self._announced()

    def _announced(self) -> str:
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if match := re.search(r"serves (http://\S+)", line):
                return match[1]
        self.kill()
        raise AssertionError(f"the gateway did not start: {''.join(said)}")

    @property
    def port(self) -> int:
        port = urlsplit(self.address).port
        assert port is not None
        return port

    def reload(self) -> None:
        """SIGHUP: the keys file is read again."""
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """SIGKILL: no farewell to anyone. Once more does nothing."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


@contextmanager
def gateway(*flags: str, port: int = 0) -> Iterator[GatewayProcess]:
    process = GatewayProcess(*flags, port=port)
    try:
        yield process
    finally:
        process.kill()


class Playground:
    """The page in a browser context of its own, and everything it asked the gateway for or complained about."""

    def __init__(self, context: BrowserContext, address: str, query: str) -> None:
        self.context = context
        self.address = address
        self.requests: list[Request] = []
        self.complaints: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(WITHIN * 1000)
        context.on("request", lambda request: self.requests.append(request))
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.goto(f"{address}/{query}")

    def _heard(self, message: ConsoleMessage) -> None:
        # The browser itself logs each answer that is no 2xx; /v1/models is looked for and need not be there.
        path = urlsplit(message.location.get("url", "")).path
        if message.type in ("error", "warning") and path != "/v1/models":
            self.complaints.append(f"{path}: {message.text}")

    def complained_of(self, *words: str) -> None:
        """Assert that each complaint so far has one of these words in it, and forget them."""
        assert [said for said in self.complaints if not any(word in said for word in words)] == []
        self.complaints.clear()

    def leave(self) -> None:
        """Close the page, before a gateway that ends: what it would ask of that is no complaint."""
        self.context.close()

    # What a user does.

    def ask(self, prompt: str = "Go on") -> None:
        self.page.get_by_role("textbox", name="Prompt").fill(prompt)
        self.page.get_by_role("button", name="Send").click()

    def click(self, name: str, reader: int | None = None) -> None:
        place = self.page if reader is None else self.reader(reader)
        place.get_by_role("button", name=name, exact=True).click()

    # What a user sees.

    def reader(self, number: int = 1) -> Locator:
        return self.page.locator(f"article[data-reader='{number}']")

    def text(self, number: int = 1) -> str:
        """The answer as the page has it, character by character."""
        return self.reader(number).locator(".transcript").text_content() or ""

    def reads(self, text: str, number: int = 1) -> None:
        """Wait until the reader has this text, then compare exactly (Playwright's own look ignores white space)."""
        expect(self.reader(number).locator(".transcript")).to_have_text(text, timeout=WITHIN * 1000)
        assert self.text(number) == text

    def is_in(self, phase: str, number: int = 1) -> None:
        """Wait until the reader's state is this one."""
        expect(self.reader(number)).to_have_attribute("data-phase", phase, timeout=WITHIN * 1000)

    def segments(self, number: int = 1) -> list[str]:
        """The text of each connection."""
        return self.reader(number).locator(".segment").all_text_contents()

    def seams(self, number: int = 1) -> list[int]:
        """The seq at each seam."""
        seams = self.reader(number).locator(".seam").all()
        return [int(seam.get_attribute("data-seq") or 0) for seam in seams]

    def facts(self, number: int = 1) -> list[dict[str, str]]:
        """What is told about each connection."""
        return [
            dict(zip(item.locator("dt").all_text_contents(), item.locator("dd").all_text_contents(), strict=True))
            for item in self.reader(number).locator(".connections li").all()
        ]

    def counts(self, name: str, value: str) -> None:
        """Wait until the journal's legend says this number."""
        expect(self.page.locator(f"[data-count={name}]")).to_have_text(value, timeout=WITHIN * 1000)

    def draws(self, part: str, first: int, last: int) -> None:
        """Wait until this part of the journal is drawn from one record to another, with some width."""
        drawn = self.page.locator(f".tape .region.{part}[data-from='{first}'][data-to='{last}']")
        expect(drawn).to_be_visible(timeout=WITHIN * 1000)

    # What the wire saw.

    def posts(self, path: str = "/v1/stream") -> int:
        return sum(request.method == "POST" and urlsplit(request.url).path == path for request in self.requests)

    @property
    def stream_id(self) -> str:
        """The stream that the page asked about last."""
        paths = [urlsplit(request.url).path.split("/") for request in self.requests]
        return next(path[3] for path in reversed(paths) if path[:3] == ["", "v1", "stream"] and len(path) > 3)

    def get(self, verb: str) -> dict[str, Any]:
        """`state` or `snapshot` of that stream, from the gateway itself."""
        return _body(self.context.request.get(f"{self.address}/v1/stream/{self.stream_id}/{verb}"))

    def post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.address}/v1/stream/{self.stream_id}/{verb}"
        return _body(self.context.request.post(url, data=body))


def _body(response: APIResponse) -> dict[str, Any]:
    assert response.ok, response.text()
    return response.json()


@contextmanager
def without_complaints() -> Iterator[list[Playground]]:
    """Takes pages; at the end none may have complained, of the content security policy for one."""
    opened: list[Playground] = []
    yield opened
    for page in opened:
        page.context.close()
    assert [page.complaints for page in opened] == [[] for _ in opened]


def halfway(page: Playground, upstream: Upstream, prompt: str = "Go on") -> Gate:
    """Ask, and wait until the page has read the first of two parts; the gate holds the second."""
    gate = upstream.says_in_two_parts()
    page.ask(prompt)
    page.reads("".join(FIRST))
    return gate


def keys_file(directory: Path, lines: Sequence[str]) -> Path:
    path = directory / "keys"
    path.write_text("\n".join(lines) + "\n")
    return path


def hold_sockets(page: Page, word: str) -> list[Callable[[], None]]:
    """Messages on WebSockets that hold this word are held back until a test lets each go on.

    It takes hold of pages that are loaded from now on.
    """
    held: list[Callable[[], None]] = []

    def opened(socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()

        def said(message: str | bytes) -> None:
            if isinstance(message, str) and word in message:
                held.append(lambda: server.send(message))
            else:
                server.send(message)

        socket.on_message(said)

    page.route_web_socket(re.compile(r"/v1/ws$"), opened)
    return held


def hold(page: Page, pattern: str) -> list[Route]:
    """Requests that match are held back until a test lets them go on."""
    held: list[Route] = []
    page.route(re.compile(pattern), lambda route: held.append(route))
    return held
