"""`midstream inspect pool`: the tables, narrow terminals, what is raw, and the watch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson
import pytest

from midstream.cli import exits
from tests.unit.cli.program import Run, on_terminal
from tests.unit.client.odd_gateway import OddGateway, in_thread

NOW = 1_790_000_000.0


def worker(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "owner": "bob",
        "models": ["home"],
        "more_models": 0,
        "agent": "",
        "threads": 1,
        "seen_at": NOW - 3,
        "here": True,
        "finished": 12,
        "lost": 1,
        "earned": 3400,
        "running": [],
        **changes,
    }


def lease(generation: str, **changes: Any) -> dict[str, Any]:
    return {
        "generation": generation,
        "request": "4f1c22aa",
        "payer": "alice",
        "worker": "kitchen",
        "model": "home",
        "max_length": 300,
        "streams": True,
        "began_at": NOW - 65,
        "cancelled": False,
        "posts": 1_007,
        "bytes": 4_096,
        "chars": 398,
        "seconds_left": 149.6,
        **changes,
    }


def waiting(request: str, position: int, **changes: Any) -> dict[str, Any]:
    return {
        "request": request,
        "position": position,
        "owner": "alice",
        "models": [],
        "more_models": 0,
        "max_length": 80,
        "streams": False,
        "waiting": 1,
        "running": 0,
        "faults": 0,
        "created_at": NOW - 200,
        **changes,
    }


def transfer(generation: str, **changes: Any) -> dict[str, Any]:
    names = {"payer": "alice", "payee": "bob", "worker": "kitchen", "model": "home"}
    return {"generation": generation, **names, "units": 50, "at": NOW - 4000, **changes}


def pool(**changes: Any) -> dict[str, Any]:
    totals = dict.fromkeys(("workers", "waiting", "running", "posts", "done", "faulted", "cancelled"), 0)
    ledger = {"sum": 0, "accounts": 0, "balances": [], "transfers": []}
    empty: dict[str, Any] = {"workers": [], "queue": [], "leases": []}
    return {"at": NOW, "totals": totals | {"units": 12_345}, "ledger": ledger, **empty, **changes}


BUSY = pool(
    workers=[
        worker("attic", here=False, seen_at=NOW - 7200),
        worker("kitchen", running=[{"generation": "8c14a0f2", "model": "home"}]),
        worker("barn", owner="carol", models=[f"m{n}" for n in range(4)], more_models=30),
    ],
    leases=[
        lease("8c14a0f2"),
        lease("d00fd00f", streams=False, posts=None, bytes=None, chars=None),
        lease("e11ee11e", chars=9_999, max_length=None, payer=None, began_at=None, cancelled=True),
    ],
    queue=[waiting("aaaa1111", 0), waiting("bbbb2222", 1, models=["huge"], waiting=3, faults=2)],
    ledger={
        "sum": 0,
        "accounts": 2,
        "balances": [{"owner": "alice", "units": -3400}, {"owner": "bob", "units": 3400}],
        "transfers": [transfer(f"{number:08x}", units=number) for number in range(12)],
    },
)


@pytest.fixture
def gateway() -> Iterator[OddGateway]:
    with in_thread(OddGateway()) as gateway:
        gateway.state = BUSY
        yield gateway


@pytest.fixture
def cli(cli: Run, gateway: OddGateway) -> Run:
    """`midstream inspect pool` of that gateway."""
    return partial(cli, "inspect", "pool", "--gateway", gateway.url)


def test_a_pool_is_tables_of_workers_jobs_queue_and_ledger(cli: Run) -> None:
    """Workers that are here come first; of a long ledger the newest transfers are shown."""
    code, out, err = cli()
    assert (code, err) == (exits.OK, "")
    head, workers, leases, queue, ledger, accounts = out.split("\n\n")
    assert head.splitlines() == [
        "0 workers here · 0 running · 0 waiting",
        "since the gateway started: 0 done, 0 lost, 0 cancelled, 12,345 units paid",
    ]
    assert workers.splitlines() == [
        "WORKER   OWNER  DOES   OFFERS                      SEEN  DONE  LOST  EARNED",
        "barn     carol  waits  m0, m1, m2, m3 and 30 more    3s    12     1   3,400",
        "kitchen  bob    home   home                          3s    12     1   3,400",
        "attic    bob    gone   home                          2h    12     1   3,400",
    ]
    assert leases.splitlines() == [
        "JOB       WORKER   MODEL  FOR    RUNS   TOKENS  POSTS    BYTES      LEASE",
        "8c14a0f2  kitchen  home   alice    1m  100/300  1,007  4.0 KiB  150s left",
        "d00fd00f  kitchen  home   alice    1m    whole      –        –  150s left",
        "e11ee11e  kitchen  home   –         –    2,500  1,007  4.0 KiB  cancelled",
    ]
    assert queue.splitlines() == [
        "PLACE  REQUEST   MODELS  OWNER  JOBS  TOKENS  WAITS  LOST",
        "    1  aaaa1111  any     alice     1      80     3m     0",
        "    2  bbbb2222  huge    alice     3      80     3m     2",
    ]
    assert ledger.splitlines()[:2] == [
        "FROM   TO   WORKER   MODEL  UNITS  AGO",
        "alice  bob  kitchen  home       0   1h",
    ]
    assert len(ledger.splitlines()) == 11
    assert accounts.splitlines() == ["OWNER   UNITS", "alice  -3,400", "bob     3,400", "sum of all accounts: 0"]


def test_an_empty_pool_says_how_to_start_a_worker(cli: Run, gateway: OddGateway) -> None:
    gateway.state = pool()
    code, out, _ = cli()
    assert code == exits.OK
    assert f"start one: midstream worker --gateway {gateway.url}\n" in out
    for words in ("nothing runs", "nothing waits", "nothing was paid yet", "sum of all accounts: 0"):
        assert f"{words}\n" in out


@pytest.mark.parametrize("columns", ["100", "60", "40"])
def test_no_line_is_broken_on_a_narrow_terminal(gateway: OddGateway, columns: str) -> None:
    """The name of a worker and what it has earned, a job's output and its lease stay to the last."""
    terminal = on_terminal("inspect", "pool", "--gateway", gateway.url, COLUMNS=columns, NO_COLOR="1")
    assert terminal.end() == exits.OK
    tables = [part.splitlines() for part in terminal.screen.decode().replace("\r\n", "\n").split("\n\n")[1:]]
    assert all(len(line) <= int(columns) for table in tables for line in table)
    assert all(len({len(line) for line in table}) == 1 for table in tables[:-1])
    heads = [table[0].split() for table in tables]
    assert {"WORKER", "DOES", "EARNED"} <= {*heads[0]}
    assert {"JOB", "WORKER", "TOKENS", "LEASE"} <= {*heads[1]}
    assert {"PLACE", "MODELS", "WAITS"} <= {*heads[2]}
    assert {"FROM", "TO", "UNITS"} <= {*heads[3]}
    assert ("OFFERS" in heads[0]) == (columns == "100")


def test_json_is_what_the_gateway_answers_on_one_line(cli: Run) -> None:
    _, out, _ = cli("--json")
    assert out.count("\n") == 1
    assert orjson.loads(out) == {**BUSY}


def test_names_of_strangers_stay_in_their_cells(cli: Run, gateway: OddGateway) -> None:
    gateway.state = pool(workers=[worker("kit\x1b[2J\nchen\t")])
    _, out, _ = cli()
    assert "\x1b" not in out
    assert "kit\\x1b[2J chen" in out


def test_a_gateway_of_another_version_that_tells_less_is_shown_as_far_as_it_goes(cli: Run, gateway: OddGateway) -> None:
    gateway.state = {"workers": [{"name": "kitchen"}], "ledger": {}, "leases": [{}], "queue": [{}]}
    code, out, _ = cli()
    assert code == exits.OK
    assert "kitchen" in out
    assert "sum of all accounts: –" in out


def test_an_answer_of_another_server_is_told(cli: Run, gateway: OddGateway) -> None:
    gateway.state = {"status": "open"}
    code, out, err = cli()
    assert (code, out) == (exits.REFUSED, "")
    assert "is this a Midstream gateway?" in err


def test_a_pool_has_no_text(cli: Run) -> None:
    code, _, err = cli("--text")
    assert code == exits.USAGE
    assert err.startswith("midstream inspect: ")


def test_the_watch_shows_the_pool_anew(gateway: OddGateway) -> None:
    terminal = on_terminal("inspect", "pool", "--gateway", gateway.url, "--watch", "--every", "0.05", LINES="60")
    terminal.see(b"kitchen")
    gateway.state = pool(workers=[worker("another")])
    terminal.see(b"another")
    terminal.press(b"\x03")
    assert terminal.end() == exits.INTERRUPTED
    assert b"\x1b[33mcancelled\x1b[0m" in terminal.screen
