"""`python -m bench [NAME …] [--quick] [--rounds N] [--json FILE]`: measure, and print the table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bench.calls import CALLS
from bench.chat import CHAT
from bench.figures import Figure, table
from bench.machine import cores, describe, stolen_ticks
from bench.measurements import ALL as OVER_HTTP
from bench.measurements import Plan
from bench.pool import LEASES
from bench.pool_http import POOL
from bench.programs import LoadFailed, program
from bench.responses import RESPONSES
from bench.shared_store import SHARED

ALL = OVER_HTTP | CALLS | POOL | LEASES | CHAT | RESPONSES | SHARED
_QUICK = Plan(rounds=1, warm=0.5, window=1.5)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure the gateway beside a server that does nothing but the wire.",
        epilog="Names: " + ", ".join(f"{name} ({_first_line(name)})" for name in ALL),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="measure only these (default: all)")
    parser.add_argument("--quick", action="store_true", help="one short round each: a look, not a figure")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"pairs of runs (default {Plan().rounds})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figure there too")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(ALL)):
        parser.error(f"no such measurement: {', '.join(unknown)}; there are {', '.join(ALL)}")
    return arguments


def _first_line(name: str) -> str:
    return (ALL[name].__doc__ or "").splitlines()[0].rstrip(".")


def _header() -> dict[str, str]:
    about = describe()
    place = cores()
    about["server on core"] = str(place.server)
    about["client and upstream on"] = f"{place.client}, {place.upstream}"
    about["load average before"] = f"{os.getloadavg()[0]:.2f}"
    about["begun"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return about


def _measure(names: list[str], plan: Plan) -> tuple[list[Figure], dict[str, str]]:
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    for at, name in enumerate(names, 1):
        print(f"[{at}/{len(names)}] {_first_line(name)}", file=sys.stderr, flush=True)
        try:
            figures += ALL[name](plan)
        except (LoadFailed, RuntimeError, OSError) as error:
            failed[name] = str(error)
            print(f"    could not be measured: {error}", file=sys.stderr, flush=True)
    return figures, failed


def main() -> None:
    arguments = _arguments()
    if sys.platform != "linux":
        raise SystemExit("The benchmarks need Linux: epoll, core pinning, and the accounts in /proc.")
    if len(os.sched_getaffinity(0)) < 2:
        print("Only one core: client and server share it, and the figures mean little.", file=sys.stderr)
    plan = _QUICK if arguments.quick else Plan()
    if arguments.rounds:
        plan = plan._replace(rounds=arguments.rounds)
    about = _header()
    for name in ("load", "upstream"):
        program(name)
    begin, stolen = time.monotonic(), stolen_ticks()
    figures, failed = _measure(arguments.names or list(ALL), plan)
    lost = (stolen_ticks() - stolen) / 100 / (time.monotonic() - begin)
    about["stolen by the hypervisor"] = f"{lost:.1%} of a core"

    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    print(f"{plan.rounds} rounds of {plan.window:g} s: median (lowest–highest); ratios are per round")
    print("kept waiting: the most that others kept server or client off its core; past a few per cent it tells\n")
    print(table(figures))
    for name, why in failed.items():
        print(f"not measured: {name}: {why}")
    if arguments.json:
        told = [figure.json() for figure in figures]
        report = {"about": about, "plan": plan._asdict(), "figures": told, "failed": failed}
        arguments.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
