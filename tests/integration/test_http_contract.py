"""The table of checks of a resume, in its order, with its exact bodies (PROTOCOL.md, section 7)."""

from __future__ import annotations

import json
import logging
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from midstream.testing.transport_dial import ADA, BOB, KEYS
from midstream.wire import H_STREAM_ID
from tests.gateways import Http, Site, cursor, site, wire

# The three places in which a position may stand, each as the request that says "after seq N of this stream".
Place = Callable[[str, int], dict[str, Any]]
PLACES: dict[str, Place] = {
    "cursor": lambda stream_id, seq: {"query": f"?cursor={cursor(stream_id, seq)}"},
    "header": lambda stream_id, seq: {"headers": {"Last-Event-ID": cursor(stream_id, seq)}},
    "from": lambda stream_id, seq: {"query": f"?from={cursor(stream_id, seq)}"},
}

# Positions that are none.  In a header a proxy or parser strips outer blanks, so that " 5" can only stand in a query.
GARBAGE = (
    "garbage",
    "5-",
    "1e3",
    "-1",
    "0x5",
    "5.0",
    "%D9%A5",  # an Arabic five
    "W10",  # []
    "W10=",
    "NQ",  # 5
    "eyJ2Ijo5OX0",  # {"v":99}
    "eyJ2IjoxLCJzIjoieCJ9",  # {"v":1,"s":"x"}
    "eyJ2IjoxLCJzIjoiIiwibCI6MX0",  # {"v":1,"s":"","l":1}
    "eyJ2IjoxLCJzIjoxLCJsIjoxfQ",  # {"v":1,"s":1,"l":1}
    "eyJ2IjoxLCJzIjoieCIsImwiOiIxIn0",  # {"v":1,"s":"x","l":"1"}
    "eyJ2IjoxLCJzIjoieCIsImwiOnRydWV9",  # {"v":1,"s":"x","l":true}
    "eyJ2IjoxLCJzIjoieCIsImwiOi0xfQ",  # {"v":1,"s":"x","l":-1}
    "eyJ2IjoxLCJzIjoieCIsImwiOjEuMH0",  # {"v":1,"s":"x","l":1.0}
    "eyJ2IjoxLCJzIjoieCIsImwiOjkwMDcxOTkyNTQ3NDA5OTJ9",  # {"v":1,"s":"x","l":9007199254740992}
    "eyJ2Ijp0cnVlLCJzIjoieCIsImwiOjF9",  # {"v":true,"s":"x","l":1}
    "9007199254740992",
    "9" * 5000,
    "A" * 60_000,
)
QUERY_GARBAGE = (
    "",
    "5",
    "+5",
    "%205",
    "%20",
    "%",
    "%00",
    "5%00",
    "5%0D%0A",
    "%0D%0A%0D%0Aid:%205%0D%0A",
    "%FF",
    "start",
)


@pytest_asyncio.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Site]:
    """A gateway with the keys of two owners; streams of 5 records at most."""
    (tmp_path / "keys").write_text(KEYS)
    async with site(keys_file=str(tmp_path / "keys"), max_stream_records=5) as running:
        yield running


@pytest.fixture
def ada(keyed: Site) -> Http:
    return keyed.http.keyed(ADA)


@pytest_asyncio.fixture
async def here() -> AsyncIterator[Site]:
    async with site() as running:
        yield running


def at(stream_id: str, query: str = "", **more: Any) -> dict[str, Any]:
    return {"method": "GET", "path": f"/v1/stream/{stream_id}{query}", **more}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
async def test_first_row_that_fails_answers(keyed: Site, ada: Http, place: Place) -> None:
    """Rows 1 to 8: each request fails its row and whatever of the later ones it can, and is answered by its own."""
    lost = await keyed.told(*"abcdefgh", http=ada)  # records 6 to 10 are retained
    strangers = await keyed.told("a", http=keyed.http.keyed(BOB))
    never = "0" * 32
    unkeyed, bad = keyed.http, {"query": "?cursor=garbage"}

    answer = await unkeyed.ask(**at(never, **bad))
    assert (answer.status, answer.body) == (401, b'{"error":"unauthorized"}')
    answer = await ada.ask(**at(never, **bad))
    assert (answer.status, answer.error) == (400, "bad_cursor")
    assert sorted(answer.json) == ["detail", "error"]
    for seq in (0, 480):
        answer = await ada.ask(**at(never, **place(strangers, seq)))
        assert (answer.status, answer.body) == (403, b'{"error":"wrong_stream"}')
        for nobodys in (never, strangers):
            answer = await ada.ask(**at(nobodys, **place(nobodys, seq)))
            assert (answer.status, answer.body) == (404, b'{"error":"unknown_stream"}')
    for seq in range(6):
        answer = await ada.ask(**at(lost, **place(lost, seq)))
        expired = b'{"error":"cursor_expired","oldest_available":6,"action":"restart"}'
        assert (answer.status, answer.body) == (409, expired)
    for seq in (11, 480, 2**53 - 1):
        answer = await ada.ask(**at(lost, **place(lost, seq)))
        ahead = b'{"error":"cursor_ahead","highest_seq":10,"action":"restart"}'
        assert (answer.status, answer.body) == (409, ahead)
    answer = await ada.ask(**at(lost, **place(lost, 10)))
    assert (answer.status, answer.body) == (204, b"")
    answer = await ada.ask(**at(lost, **place(lost, 8)))
    assert answer.status == 200
    assert [line for line in answer.body.splitlines() if line.startswith(b"id:")] == [b"id: 9", b"id: 10"]


async def test_host_and_origin_come_before_the_key(keyed: Site) -> None:
    """421 and 403 stand before row 1; no key is looked at for a page that may not ask."""
    foreign = {"Origin": "https://elsewhere.example"}
    answer = await keyed.http.get("/v1/stream/x?cursor=garbage", foreign)
    assert (answer.status, answer.error) == (403, "forbidden_origin")
    async with site() as without_keys:
        answer = await without_keys.http.get("/v1/stream/x?cursor=garbage", foreign | {"Host": "rebound.example"})
        assert (answer.status, answer.error) == (421, "wrong_host")


async def test_garbage_is_refused_before_any_byte_of_a_stream(here: Site) -> None:
    """Row 2: no reader is left behind, and the detail says what is wrong without repeating what was sent."""
    stream_id, puppet, reader = await here.begin()
    await here.gateway.idle(stream_id)
    answers = [await here.http.get(f"/v1/stream/{stream_id}?cursor={value}") for value in (*GARBAGE, *QUERY_GARBAGE)]
    answers += [
        await here.http.get(f"/v1/stream/{stream_id}?from={value}") for value in (*GARBAGE, *QUERY_GARBAGE[:-1])
    ]
    for value in GARBAGE:
        if len(value) < 8000:  # longer header lines than that are refused below us
            answers.append(await here.http.get(f"/v1/stream/{stream_id}", {"Last-Event-ID": value}))
    for answer in answers:
        assert (answer.status, answer.error) == (400, "bad_cursor")
        assert len(answer.body) < 300
    assert len(here.gateway.readers(stream_id)) == 1
    await puppet.finish()
    reader.close()


async def test_what_is_no_http_is_refused_in_the_usual_shape(here: Site) -> None:
    """A request line that the parser refuses (100 kB of cursor, a raw character beyond ASCII) is a JSON 400 too."""
    for path in (f"/v1/stream/x?cursor={'A' * 100_000}", "/v1/stream/x?cursor=\xa7"):
        async with wire(here.gateway) as peer:
            peer.request("GET", path)
            status, headers = await peer.head()
            assert (status, dict(headers)["content-type"]) == (400, "application/json")
            assert json.loads(await peer.rest())["error"] == "bad_request"


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?cursor=",
        "?from=",
        "?cursor=A&cursor=A",
        "?from=start&from=start",
        "?cursor=A&from=start",
        "?cursor=&from=",
    ],
)
async def test_position_that_is_absent_empty_or_doubled_is_refused(here: Site, query: str) -> None:
    """Row 2: which one is meant cannot be known, and a fresh start is never assumed (I4)."""
    stream_id = await here.told("a")
    good = cursor(stream_id, 1)
    answer = await here.http.get(f"/v1/stream/{stream_id}{query.replace('A', good)}")
    assert (answer.status, answer.error) == (400, "bad_cursor")


async def test_header_that_stands_twice_is_refused(here: Site) -> None:
    """Row 2, also when both say the same, and when a good cursor would make it unneeded."""
    stream_id = await here.told("a")
    for query in ("", "?from=start", f"?cursor={cursor(stream_id, 1)}"):
        answer = await here.http.get(f"/v1/stream/{stream_id}{query}", [("Last-Event-ID", "1"), ("Last-Event-ID", "1")])
        assert (answer.status, answer.error) == (400, "bad_cursor")


async def test_bad_cursor_is_not_passed_over_for_a_good_header(here: Site) -> None:
    """The position that is used must be good; nothing lower stands in for it."""
    stream_id = await here.told(*"abcdefghij")
    for query in ("?cursor=garbage", "?cursor="):
        answer = await here.http.get(f"/v1/stream/{stream_id}{query}", {"Last-Event-ID": "5"})
        assert (answer.status, answer.error) == (400, "bad_cursor")
    answer = await here.http.get(f"/v1/stream/{stream_id}?from=start", {"Last-Event-ID": "garbage"})
    assert (answer.status, answer.error) == (400, "bad_cursor")


@pytest.mark.parametrize(
    ("query", "header", "first"),
    [
        ("?cursor={7}", "5", 8),
        ("?cursor={7}", "{5}", 8),
        ("?cursor={7}", "garbage", 8),
        ("?cursor={7}", "", 8),
        ("?cursor={7}", "{7}", 8),
        ("?cursor={7}", "7", 8),
        ("", "5", 6),
        ("", "0", 1),
        ("", "007", 8),
        ("", "{5}", 6),
        ("?from=start", "5", 6),
        ("?from={3}", "5", 6),
        ("?from=start", None, 1),
        ("?from={3}", None, 4),
        ("?cursor={0}", None, 1),
    ],
)
async def test_explicit_cursor_wins_then_the_header_then_from(
    here: Site, caplog: pytest.LogCaptureFixture, query: str, header: str | None, first: int
) -> None:
    """A browser's own header must win over where its page began; what else differs from the cursor logs one line."""
    stream_id = await here.told(*"abcdefghij")

    def filled(text: str) -> str:
        for seq in (0, 3, 5, 7):
            text = text.replace(f"{{{seq}}}", cursor(stream_id, seq))
        return text

    headers = {} if header is None else {"Last-Event-ID": filled(header)}
    with caplog.at_level(logging.WARNING, "midstream"):
        answer = await here.http.get(f"/v1/stream/{stream_id}{filled(query)}", headers)
    assert answer.status == 200
    ids = [int(line[4:]) for line in answer.body.splitlines() if line.startswith(b"id: ")]
    assert ids == list(range(first, 13))
    mismatches = [line for line in caplog.messages if "cursor_mismatch" in line]
    assert len(mismatches) == (query == "?cursor={7}" and header not in ("7", "{7}"))
    assert all(stream_id in line and "\n" not in line for line in mismatches)


async def test_cursor_with_padding_and_unknown_fields_is_good(here: Site) -> None:
    """Writers of clients may pad, and later versions may add fields."""
    stream_id = await here.told("a", "b")
    token = cursor(stream_id, 2)
    answer = await here.http.get(f"/v1/stream/{stream_id}?cursor={token + '=' * (-len(token) % 4)}")
    assert answer.status == 200
    richer = urlsafe_b64encode(json.dumps({"l": 2, "x": [1], "s": stream_id, "v": 1}).encode()).decode()
    answer = await here.http.get(f"/v1/stream/{stream_id}?cursor={richer}")
    assert answer.status == 200


@pytest.mark.parametrize("other", ["a:b", "a_b", "../b", "{b}", "a/../b", "b\0", "a%2Fb"])
async def test_ids_with_separators_never_alias(here: Site, other: str) -> None:
    """Row 3 compares text with text: no id is cut, joined or resolved to mean another stream."""
    stream_id = await here.told("a")
    for inner in (other, f"{stream_id}/{other}", f"{other}{stream_id}", f"{stream_id}\0", f" {stream_id}"):
        answer = await here.http.get(f"/v1/stream/{stream_id}?cursor={cursor(inner, 1)}")
        assert (answer.status, answer.body) == (403, b'{"error":"wrong_stream"}')


@pytest.mark.parametrize(
    "path", ["%2e%2e%2f", "..%2F..%2Fetc", "a%00b", "a%0d%0aX-Forged:%201", "%E2%82%AC", "{b}", "a:b"]
)
async def test_ids_of_any_shape_are_only_unknown(here: Site, path: str) -> None:
    """No id in a path reaches a file, a header or a log as anything but an unknown stream."""
    for rest in ("?from=start", "/state", "/snapshot"):
        answer = await here.http.get(f"/v1/stream/{path}{rest}")
        assert answer.status == 404
        assert answer.error in ("unknown_stream", "not_found")
        assert "x-forged" not in answer.headers


async def test_resume_around_the_end_and_after_the_grace_time(here: Site) -> None:
    """Within the grace time the rest, the terminal record, then 204; after it the stream is unknown, without a loop."""
    stream_id = await here.told(*["word "] * 18)  # 1 to 20, the last is `done`
    for seq, ids in ((17, [18, 19, 20]), (18, [19, 20]), (19, [20])):
        answer = await here.http.get(f"/v1/stream/{stream_id}", {"Last-Event-ID": str(seq)})
        assert [int(line[4:]) for line in answer.body.splitlines() if line.startswith(b"id: ")] == ids
    answer = await here.http.get(f"/v1/stream/{stream_id}", {"Last-Event-ID": "20"})
    assert (answer.status, answer.headers[H_STREAM_ID.lower()]) == (204, stream_id)
    here.gateway.clock.advance(here.gateway.settings.retain + 1)
    await here.gateway.streams.pulse(0.0)
    for seq in (18, 20, 21):
        answer = await here.http.get(f"/v1/stream/{stream_id}", {"Last-Event-ID": str(seq)})
        assert (answer.status, answer.body) == (404, b'{"error":"unknown_stream"}')


async def test_position_beyond_the_head_is_told_at_once(here: Site) -> None:
    """A client above the head, as after a restart of a memory journal, hears it instead of heartbeats."""
    stream_id, puppet = await here.open_stream(*["x"] * 14)
    answer = await here.http.get(f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 480)}")
    assert (answer.status, answer.json) == (409, {"error": "cursor_ahead", "highest_seq": 15, "action": "restart"})
    assert not here.gateway.readers(stream_id)
    await puppet.finish()
