"""Responses events: the gateway beside itself, where the same streams are read as they are kept."""

from __future__ import annotations

import json
from collections.abc import Callable

from bench.chat import native
from bench.figures import Budget, Figure
from bench.measurements import Plan, Seen, compared, costs
from bench.programs import load
from bench.servers import Server

_NATIVE = "native"
_ASKED = json.dumps({"route": "/v1/responses", "body": {"model": "bench", "input": "Hello"}, "digest": ""})


def responses_relay(plan: Plan) -> list[Figure]:
    """200 streams at 20,000 chunks a second, read as Responses events and as records."""

    def measure(server: Server) -> Seen:
        names = server.streams(200, request=_ASKED)
        server.feed(names, 20_000)
        native = server.name == _NATIVE
        paths = server.paths(names, 1) if native else [f"/v1/responses/resp_{name}?stream=true" for name in names]
        count = "id" if native else "data"
        return costs(load("live", server, paths, conns=200, first=2, count=count, warm=plan.warm, window=plan.window))

    title = "Responses events, 200 streams, 20,000 chunks/s"
    return compared(
        plan,
        {
            "cpu": Figure(title, "CPU per chunk", "µs", budget=Budget(2.5, of="ratio"), beside=_NATIVE),
            "rate": Figure(title, "delivered", "chunks/s", beside=_NATIVE),
            "p50": Figure(title, "append to reader, median", "ms", beside=_NATIVE),
            "p99": Figure(title, "append to reader, p99", "ms", beside=_NATIVE),
        },
        measure,
        theirs=native,
    )


RESPONSES: dict[str, Callable[[Plan], list[Figure]]] = {"responses": responses_relay}
