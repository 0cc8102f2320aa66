"""Chat chunks: the gateway beside itself, where the same streams are read as they are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from bench.figures import Budget, Figure
from bench.measurements import Plan, Seen, compared, costs
from bench.programs import load
from bench.servers import Server, gateway, upstream

_NATIVE = "native"


@contextmanager
def native(upstream: Server | None = None) -> Iterator[Server]:
    """The gateway, to be read in its own format."""
    with gateway(upstream=upstream) as server:
        yield replace(server, name=_NATIVE)


def chat_relay(plan: Plan) -> list[Figure]:
    """Chat front: 200 streams at 60,000 chunks a second, read as chat chunks and as records."""

    def measure(server: Server) -> Seen:
        names = server.streams(200)
        server.feed(names, 60_000)
        wanted = "" if server.name == _NATIVE else "&format=openai"
        paths = [path + wanted for path in server.paths(names, 1)]
        return costs(load("live", server, paths, conns=200, first=2, warm=plan.warm, window=plan.window))

    title = "chat front, 200 streams, 60,000 chunks/s"
    return compared(
        plan,
        {
            "cpu": Figure(title, "CPU per chunk", "µs", budget=Budget(1.5, of="ratio"), beside=_NATIVE),
            "rate": Figure(title, "delivered", "chunks/s", beside=_NATIVE),
            "gaps": Figure(title, "gaps", "ids", budget=Budget(0, of="worst"), beside=_NATIVE),
            "p50": Figure(title, "append to reader, median", "ms", beside=_NATIVE),
            "p99": Figure(title, "append to reader, p99", "ms", beside=_NATIVE),
        },
        measure,
        theirs=native,
    )


def chat_first_chunk(plan: Plan) -> list[Figure]:
    """Chat front: from a request to its first token, less the same over the native route."""
    asked = {"model": "bench", "messages": [{"role": "user", "content": "tokens=1 every_us=0"}], "stream": True}

    def measure(server: Server) -> Seen:
        path = "/v1/stream" if server.name == _NATIVE else "/v1/chat/completions"
        body = json.dumps(asked)
        seen = load("replay", server, [path], conns=1, body=body, expect=2, first=1, warm=0.5, window=plan.window)
        return {"first": seen.time("whole_us", "p50") / 1000, "waited": seen.server_waited}

    title = "chat front, first token"
    first = Figure(title, "request to first token, median", "ms", beside=_NATIVE)
    with upstream() as up:
        compared(plan, {"first": first}, measure, ours=lambda: gateway(upstream=up), theirs=lambda: native(up))
    more = [ours - theirs for ours, theirs in zip(first.values, first.floor, strict=True)]
    return [Figure(title, "later than the native one", "ms", more, budget=Budget(1)), first]


CHAT: dict[str, Callable[[Plan], list[Figure]]] = {"chat": chat_relay, "chat-first": chat_first_chunk}
