"""`midstream inspect`: the table, one stream, what is raw, and the watch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson
import pytest

from midstream.cli import exits
from midstream.cli.table import age, size
from tests.unit.cli.program import Run, finish, on_terminal, start
from tests.unit.client.odd_gateway import STREAM, OddGateway, in_thread


def state(stream_id: str, **changes: Any) -> dict[str, Any]:
    now = time.time()
    return {
        "stream_id": stream_id,
        "status": "done",
        "model": "smollm2",
        "highest_seq": 1234,
        "oldest_retained_seq": 3,
        "acked_seq": 2,
        "trimmed_seq": 2,
        "retained_records": 1232,
        "retained_bytes": 130_000,
        "readers": 0,
        "lowest_reader_seq": None,
        "created_at": now - 95,
        "last_access": now - 5,
        **changes,
    }


@pytest.fixture
def gateway() -> Iterator[OddGateway]:
    with in_thread(OddGateway()) as gateway:
        yield gateway


@pytest.fixture
def cli(cli: Run, gateway: OddGateway) -> Run:
    """`midstream inspect` of that gateway."""
    return partial(cli, "inspect", "--gateway", gateway.url)


def test_streams_are_an_aligned_table_the_newest_first(cli: Run, gateway: OddGateway) -> None:
    young = state("Zk8", status="open", created_at=time.time() - 3.5, readers=2, retained_bytes=900, model="m" * 40)
    gateway.listed = [state("a" * 22), young]
    code, out, err = cli()
    assert (code, err) == (exits.OK, "")
    assert out.splitlines() == [
        "STREAM                  STATUS  AGE  MODEL                     HIGHEST  RETAINED  ACKED  READERS      BYTES",
        "Zk8                     open     3s  mmmmmmmmmmmmmmmmmmmmmmm…    1,234     1,232      2        2      900 B",
        "aaaaaaaaaaaaaaaaaaaaaa  done     1m  smollm2                     1,234     1,232      2        0  127.0 KiB",
    ]


@pytest.mark.parametrize(
    ("columns", "header"),
    [
        ("100", "STREAM                            STATUS  AGE  MODEL    HIGHEST  RETAINED  ACKED  READERS      BYTES"),
        ("80", "STREAM                            STATUS  AGE  MODEL    HIGHEST  READERS"),
        ("60", "STREAM                            STATUS  AGE  HIGHEST"),
        ("20", "STREAM                            STATUS  HIGHEST"),
    ],
)
def test_a_narrow_terminal_goes_without_some_columns(gateway: OddGateway, columns: str, header: str) -> None:
    gateway.listed = [state("a" * 32)]
    terminal = on_terminal("inspect", "--gateway", gateway.url, COLUMNS=columns, NO_COLOR="1")
    assert terminal.end() == exits.OK
    first, row = terminal.screen.decode().splitlines()
    assert first == header
    assert len(row) == len(header)


def test_no_streams_are_told(cli: Run) -> None:
    assert cli() == (exits.OK, "no streams\n", "")


def test_one_stream_is_shown_whole(cli: Run, gateway: OddGateway) -> None:
    gateway.state |= state(STREAM, readers=2, lowest_reader_seq=1000)
    _, out, _ = cli(STREAM)
    assert out.splitlines() == [
        f"stream    {STREAM}",
        "status    done",
        "model     smollm2",
        "created   1m ago",
        "accessed  5s ago",
        "records   1,232 retained, 3 to 1,234",
        "bytes     127.0 KiB",
        "acked     up to 2",
        "trimmed   up to 2",
        "readers   2, the slowest at 1,000",
    ]


def test_json_is_what_the_gateway_answers_on_one_line(cli: Run, gateway: OddGateway) -> None:
    gateway.listed = [state("Zk8")]
    _, out, _ = cli("--json")
    assert out.count("\n") == 1
    assert orjson.loads(out) == {"streams": gateway.listed}
    _, out, _ = cli("--json", STREAM)
    assert orjson.loads(out)["stream_id"] == STREAM


def test_text_is_the_answer_so_far_raw(cli: Run, gateway: OddGateway) -> None:
    gateway.state |= {"seq": 9, "complete": False}
    code, out, err = cli("--text", STREAM)
    assert (code, out) == (exits.OK, gateway.text)
    assert "not the whole answer" in err


def test_names_of_strangers_are_made_safe(cli: Run, gateway: OddGateway) -> None:
    gateway.listed = [state("Zk8", model="m\x1b[2J")]
    _, out, _ = cli()
    assert "m\\x1b[2J" in out
    _, out, _ = cli("--json")
    assert orjson.loads(out)["streams"][0]["model"] == "m\x1b[2J"


def test_a_gateway_of_another_version_without_some_counters_is_shown_as_far_as_it_goes(
    cli: Run, gateway: OddGateway
) -> None:
    gateway.listed = [{"stream_id": "Zk8", "status": "open"}]
    code, out, _ = cli()
    assert code == exits.OK
    assert "–" in out.splitlines()[1]


@pytest.mark.parametrize("words", [["--text"], ["--text", "--watch", STREAM]])
def test_a_command_line_without_sense_is_told(cli: Run, words: list[str]) -> None:
    code, out, err = cli(*words)
    assert (code, out) == (exits.USAGE, "")
    assert err.startswith("midstream inspect: ")


def test_nobody_there_is_told_with_the_address(cli: Run, gateway: OddGateway) -> None:
    code, _, err = cli("--gateway", "http://127.0.0.1:1")
    assert code == exits.UNREACHABLE
    told = "connection refused; is the gateway running, and is this its HTTP port?"
    assert err == f"no answer from http://127.0.0.1:1: {told}\n"


def test_the_watch_redraws_a_terminal_until_ctrl_c(gateway: OddGateway) -> None:
    gateway.listed = [state(f"id{n}", status="open") for n in range(40)]
    terminal = on_terminal("inspect", "--gateway", gateway.url, "--watch", "--every", "0.05")
    terminal.see(b"\x1b[H\x1b[J")
    terminal.see(b"and 14 more")  # 30 lines: the title, the header, 26 streams, this, and the cursor's own
    gateway.listed = [state("another", status="failed")]
    terminal.see(b"another")
    terminal.press(b"\x03")
    assert terminal.end() == exits.INTERRUPTED
    assert b"\x1b[31mfailed\x1b[0m" in terminal.screen


def test_the_watch_leaves_a_terminal_as_it_was(gateway: OddGateway) -> None:
    terminal = on_terminal("inspect", "--gateway", gateway.url, "--watch", "--every", "0.05")
    terminal.see(b"\x1b[H\x1b[J")
    terminal.press(b"\x03")
    assert terminal.end() == exits.INTERRUPTED
    assert terminal.screen.count(b"\x1b[?1049h") == terminal.screen.count(b"\x1b[?1049l") == 1


def test_the_watch_waits_for_a_gateway_that_is_away() -> None:
    terminal = on_terminal("inspect", "--gateway", "http://127.0.0.1:1", "--watch", "--every", "0.05", NO_COLOR="1")
    terminal.see(b"connection refused")
    seen = len(terminal.screen)
    while len(terminal.screen) < 2 * seen:
        assert terminal.more()
    terminal.press(b"\x03")
    assert terminal.end() == exits.INTERRUPTED


def test_a_full_disk_is_told(gateway: OddGateway) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = finish(start("inspect", "--gateway", gateway.url, stdout=full))
    assert (code, err) == (exits.OUTPUT_FAILED, "cannot write: No space left on device\n")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-1, "0s"), (0, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (3600, "1h"), (86_399, "23h"), (200_000, "2d")],
)
def test_an_age_is_told_in_its_largest_unit(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (8 * 2**20, "8.0 MiB"), (2**42, "4096.0 GiB")],
)
def test_a_size_is_told_in_powers_of_1024(count: float, shown: str) -> None:
    assert size(count) == shown
