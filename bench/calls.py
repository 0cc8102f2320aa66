"""gRPC: the gateway beside a bare grpcio.aio server that writes the same messages, in one run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

from bench.figures import Budget, Figure
from bench.machine import cores, pinned
from bench.measurements import Plan, Seen, compared, costs
from bench.programs import Load, LoadFailed
from bench.servers import Server, bare_grpc, gateway_with_grpc

# As the replay of HTTP: ten records behind.
_BEHIND = 10


def grpc_relay(plan: Plan) -> list[Figure]:
    """200 calls over gRPC at 10,000 chunks a second, beside a bare grpcio.aio server that writes the same messages."""

    def measure(server: Server) -> Seen:
        names = server.streams(200)
        server.feed(names, 10_000)
        return costs(_calls("live", server, names, plan))

    title = "gRPC, 200 streams, 10,000 chunks/s"
    return compared(
        plan,
        {
            "cpu": Figure(title, "CPU per chunk", "µs", budget=Budget(1.3, of="ratio"), beside="bare"),
            "rate": Figure(title, "delivered", "chunks/s", beside="bare"),
            "gaps": Figure(title, "gaps", "ids", budget=Budget(0, of="worst"), beside="bare"),
            "p50": Figure(title, "append to reader, median", "ms", beside="bare"),
            "p99": Figure(title, "append to reader, p99", "ms", beside="bare"),
        },
        measure,
        ours=gateway_with_grpc,
        theirs=bare_grpc,
    )


def grpc_resume(plan: Plan) -> list[Figure]:
    """Calls that resume ten tokens behind, one after the other, while 20 streams go on at 50 tokens a second each."""

    def measure(server: Server) -> Seen:
        names = server.streams(20, chunks=200)
        server.feed(names, 1000)
        seen = _calls("resume", server, names, plan, wanted=200 - _BEHIND)
        return {
            "p50": seen.time("first_frame_us", "p50") / 1000,
            "p99": seen.time("first_frame_us", "p99") / 1000,
            "waited": seen.waited,
        }

    title = "gRPC, resume to first token"
    return compared(
        plan,
        {
            "p50": Figure(title, "median", "ms", budget=Budget(3), beside="bare"),
            "p99": Figure(title, "p99", "ms", beside="bare"),
        },
        measure,
        ours=gateway_with_grpc,
        theirs=bare_grpc,
    )


def _calls(mode: str, server: Server, names: Sequence[str], plan: Plan, wanted: int = 0) -> Load:
    """Run the client on its core.  Raises LoadFailed when calls were refused, cut or never answered."""
    command = [sys.executable, "-m", "bench.grpc_load", mode, "--port", str(server.grpc_port), "--pid", str(server.pid)]
    command += ["--wanted", str(wanted), "--warm", str(plan.warm), "--window", str(plan.window)]
    done = subprocess.run(
        pinned(cores().client, command),
        input="\n".join(names),
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    seen = json.loads(done.stdout) if done.stdout else {"errors": f"exit status {done.returncode}"}
    if seen["errors"]:
        raise LoadFailed(f"gRPC {mode}: {seen['errors']} errors")
    return Load(seen)


CALLS: dict[str, Callable[[Plan], list[Figure]]] = {"calls": grpc_relay, "call-resume": grpc_resume}
