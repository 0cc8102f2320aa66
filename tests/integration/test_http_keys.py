"""Keys, owners and the session cookie (PROTOCOL.md, section 12; I9)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
import pytest_asyncio

from midstream.testing.transport_dial import ADA, BOB
from midstream.wire import SESSION_COOKIE, SESSION_TERM
from tests.gateways import Http, Site, cursor, site

UNAUTHORIZED = b'{"error":"unauthorized"}'
UNKNOWN = b'{"error":"unknown_stream"}'

# Every request that names a stream, or could tell that there is one.
VERBS = (
    ("GET", "?from=start"),
    ("GET", "?cursor={cursor}"),
    ("DELETE", ""),
    ("GET", "/state"),
    ("GET", "/snapshot"),
    ("POST", "/ack"),
    ("POST", "/cancel"),
)


@pytest_asyncio.fixture
async def here(keys_file: Path) -> AsyncIterator[Site]:
    """A gateway with the keys of Ada and Bob."""
    async with site(keys_file=str(keys_file)) as running:
        yield running


async def test_stream_of_another_owner_does_not_exist_on_any_route(here: Site, ada: Http, bob: Http) -> None:
    """I9: the answers to a stranger are, byte for byte, those about a stream that never was; nothing changes."""
    stream_id, puppet = await here.open_stream("a", http=ada)
    for method, rest in VERBS:
        answers = []
        for name in (stream_id, "0" * 32):
            path = f"/v1/stream/{name}{rest.format(cursor=cursor(name, 1))}"
            answers.append(await bob.ask(method, path, json={"seq": 2}))
        assert (answers[0].status, answers[0].body) == (404, UNKNOWN)
        assert (answers[1].status, answers[1].body) == (404, UNKNOWN)
        assert sorted(answers[0].headers) == sorted(answers[1].headers)
    assert (await bob.get("/v1/streams")).json == {"streams": []}
    [state] = (await ada.get("/v1/streams")).json["streams"]
    assert (state["stream_id"], state["status"], state["acked_seq"]) == (stream_id, "open", 0)
    await puppet.finish()
    assert (await bob.get(f"/v1/stream/{stream_id}?from=start")).body == UNKNOWN


async def test_cursor_of_one_stream_opens_no_other(here: Site, ada: Http, bob: Http) -> None:
    """Two owners, one store: neither the stream in the path nor the one in the cursor comes out."""
    mine, others = await here.told("mine", http=ada), await here.told("others", http=bob)
    answer = await ada.get(f"/v1/stream/{others}?cursor={cursor(mine, 1)}")
    assert (answer.status, answer.body) == (403, b'{"error":"wrong_stream"}')
    answer = await ada.get(f"/v1/stream/{mine}?cursor={cursor(others, 1)}")
    assert (answer.status, answer.body) == (403, b'{"error":"wrong_stream"}')
    answer = await ada.get(f"/v1/stream/{others}?cursor={cursor(others, 1)}")
    assert (answer.status, answer.body) == (404, UNKNOWN)


async def test_idempotency_keys_are_each_owners_own(here: Site, ada: Http, bob: Http) -> None:
    """The same key of another owner is another key; what he sent with it does not matter, and does not show."""
    first = await here.told("a", http=ada.sending(Idempotency_Key="k"))
    second = await here.told("b", http=bob.sending(Idempotency_Key="k"), prompt="another")
    assert first != second
    assert here.puppets.begun == 2


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer nobodys-key")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer ")],
        [("Authorization", ADA)],
        [("Authorization", f"Basic {ADA}")],
        [("Authorization", f"Bearer {ADA}x")],
        [("Authorization", f"Bearer {ADA[:-1]}")],
        [("Authorization", f"Bearer {ADA.upper()}")],
        [("Authorization", f"Bearer {ADA} {ADA}")],
        [("apikey", "")],
        [("apikey", "nobodys-key")],
        [("apikey", f"Bearer {ADA}")],
        [("apikey", ADA), ("Authorization", f"Bearer {BOB}")],
        [("apikey", BOB), ("Authorization", f"Bearer {ADA}")],
        [("apikey", ADA), ("Authorization", "Bearer nobodys-key")],
        [("apikey", ADA), ("Authorization", "Bearer")],
        [("apikey", ADA), ("apikey", ADA)],
        [("Authorization", f"Bearer {ADA}"), ("Authorization", f"Bearer {ADA}")],
        [("Authorization", "Bearer \xe9\xe8")],
    ],
)
async def test_what_is_no_known_key_is_401_on_every_route(here: Site, headers: list[tuple[str, str]]) -> None:
    """Before anything else is looked at, also on routes that there are not."""
    for method, path in (
        ("POST", "/v1/stream"),
        ("GET", "/v1/streams"),
        ("GET", "/v1/stream/x?cursor=garbage"),
        ("HEAD", "/v1/stream/x"),
        ("OPTIONS", "/v1/stream/x"),
        ("PUT", "/v1/stream/x"),
        ("POST", "/v1/session"),
        ("GET", "/nowhere"),
        *((method, f"/v1/stream/x{rest}") for method, rest in VERBS),
    ):
        answer = await here.http.ask(method, path, headers)
        assert answer.status == 401
        assert answer.body == (b"" if method == "HEAD" else UNAUTHORIZED)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {ADA}"},
        {"authorization": f"bearer {ADA}"},
        {"Authorization": f"BEARER   {ADA} "},
        {"apikey": ADA},
        {"ApiKey": f" {ADA} "},
        {"apikey": ADA, "Authorization": f"Bearer {ADA}"},
    ],
)
async def test_key_travels_in_either_header(here: Site, headers: dict[str, str]) -> None:
    """Both may be sent when they are equal; names and scheme in any case."""
    stream_id = await here.told("a", http=here.http.keyed(ADA))
    answer = await here.http.get("/v1/streams", headers)
    assert [state["stream_id"] for state in answer.json["streams"]] == [stream_id]


async def test_key_in_a_url_is_no_key(here: Site) -> None:
    for name in ("key", "apikey", "access_token", "token"):
        answer = await here.http.get(f"/v1/streams?{name}={ADA}")
        assert (answer.status, answer.body) == (401, UNAUTHORIZED)


async def test_public_routes_need_no_key(here: Site) -> None:
    for path in ("/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/web/app.js"):
        assert (await here.http.get(path)).status == 200
    for path in (
        "/web/../v1/streams",
        "/web/%2e%2e/v1/streams",
        "//v1/streams",
        "/./v1/streams",
        "/healthz/../v1/streams",
    ):
        assert (await here.http.get(path)).status in (401, 404)


def reread(here: Site, keys_file: Path, text: str | None) -> None:
    """Put this into the keys file (None: it is gone), and have it read again, as SIGHUP does."""
    if text is None:
        keys_file.unlink()
    else:
        keys_file.write_text(text)
    here.gateway.gateway.reload_keys()


# --- the keys file ---------------------------------------------------------------------------------------------------


async def test_rotated_key_keeps_the_streams(here: Site, keys_file: Path, ada: Http) -> None:
    """Two lines of one name are one owner: a resume with the new key goes on where the old one's reader was cut."""
    stream_id, puppet, reader = await here.begin(ada)
    await puppet.say("a")
    reread(here, keys_file, f"ada:{ADA}\nada:ada-key-2\nbob:{BOB}\n")
    renewed = here.http.keyed("ada-key-2")
    reread(here, keys_file, f"ada:ada-key-2\nbob:{BOB}\n")
    await puppet.say("b")
    await puppet.finish()
    assert (await reader.read()).count(b"\nid: ") == 4  # who was let in stays until his stream ends
    answer = await renewed.get(f"/v1/stream/{stream_id}", {"Last-Event-ID": "2"})
    assert answer.body.count(b"\nid: ") == 2
    answer = await ada.get(f"/v1/stream/{stream_id}", {"Last-Event-ID": "2"})
    assert (answer.status, answer.body) == (401, UNAUTHORIZED)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "# nobody\n",
        "ada\n",
        "ada:\n",
        "ada:short\n",
        "a b:long-enough\n",
        ":long-enough\n",
        "é:long-enough\n",
        "ada:long enough\n",
        "ada:long-enough:root\n",
        "ada:same-key-1\nbob:same-key-1\n",
        "ada:same-key-1\nada:same-key-1:admin\n",
    ],
)
async def test_keys_file_that_is_not_good_changes_nothing(
    here: Site, keys_file: Path, ada: Http, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    """A slip of the editor locks nobody out and lets nobody in; the log names the line, never the key."""
    with caplog.at_level(logging.ERROR, "midstream"):
        reread(here, keys_file, bad)
    assert (await ada.get("/v1/streams")).status == 200
    assert (await here.http.get("/v1/streams")).status == 401
    [message] = caplog.messages
    assert "the ones before stay" in message
    for key in ("same-key-1", "long-enough", "long enough", "short"):
        assert key not in message


async def test_keys_file_that_is_gone_changes_nothing(here: Site, keys_file: Path, ada: Http) -> None:
    reread(here, keys_file, None)
    assert (await ada.get("/v1/streams")).status == 200


async def test_keys_file_takes_comments_blanks_and_admins(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# people\n\n  ada:{ADA}:admin  \r\n\tbob:{BOB}\n  # the end")
    async with site(keys_file=str(tmp_path / "keys")) as here:
        for key in (ADA, BOB):
            assert (await here.http.keyed(key).get("/v1/streams")).status == 200


async def test_open_gateway_takes_any_key_for_none() -> None:
    """SDKs insist on sending one; there is one owner, whatever they send."""
    async with site() as here:
        stream_id = await here.told("a")
        for headers in (
            {},
            {"apikey": "x"},
            {"Authorization": "Bearer y"},
            {"apikey": "x", "Authorization": "Basic z"},
        ):
            answer = await here.http.get("/v1/streams", headers)
            assert [state["stream_id"] for state in answer.json["streams"]] == [stream_id]


async def test_keys_show_in_no_answer_log_or_metric(here: Site, ada: Http, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        stream_id = await here.told("a", http=ada)
        seen = [await ada.get(path) for path in ("/v1/streams", f"/v1/stream/{stream_id}?from=start", "/metrics")]
        seen.append(await here.http.keyed("nobodys-key").get("/v1/streams"))
    for answer in seen:
        for key in (ADA, BOB, "nobodys-key"):
            assert key.encode() not in answer.body
            assert key not in str(answer.headers)
            assert key not in caplog.text
    assert ADA not in repr(here.gateway.gateway.keys)
    assert ADA not in repr(vars(here.gateway.gateway.keys))


# --- the session cookie ----------------------------------------------------------------------------------------------


async def session(http: Http, **headers: str) -> tuple[str, str]:
    """The cookie's value, and the whole header that set it."""
    answer = await http.ask("POST", "/v1/session", headers)
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["cache-control"] == "no-store"
    said = answer.headers["set-cookie"]
    return SimpleCookie(said)[SESSION_COOKIE].value, said


async def test_cookie_is_for_pages_alone(ada: Http) -> None:
    """No script reads it, no other site sends it, no other path gets it, and over TLS it stays there."""
    _, said = await session(ada)
    attributes = {part.strip().lower() for part in said.split(";")[1:]}
    assert attributes == {"httponly", "samesite=strict", "path=/v1", f"max-age={SESSION_TERM}"}
    _, said = await session(ada, **{"X-Forwarded-Proto": "https"})
    assert "secure" in {part.strip().lower() for part in said.split(";")}


async def test_cookie_counts_only_for_following_a_stream(here: Site, ada: Http) -> None:
    """EventSource cannot send a header; everything else can, and a foreign page must not act with it."""
    stream_id = await here.told("a", http=ada)
    value, _ = await session(ada)
    page = here.http.sending(Cookie=f"{SESSION_COOKIE}={value}")
    assert (await page.get(f"/v1/stream/{stream_id}?from=start")).status == 200
    for method, rest in VERBS[2:]:
        answer = await page.ask(method, f"/v1/stream/{stream_id}{rest}", json={"seq": 1})
        assert (answer.status, answer.body) == (401, UNAUTHORIZED)
    for method, path in (
        ("POST", "/v1/stream"),
        ("GET", "/v1/streams"),
        ("POST", "/v1/session"),
        ("HEAD", f"/v1/stream/{stream_id}"),
    ):
        assert (await page.ask(method, path, json={"prompt": "a"})).status == 401


async def test_cookie_is_its_owners(here: Site, ada: Http, bob: Http) -> None:
    """I9 holds for pages too; a key that is sent counts more than a cookie."""
    stream_id = await here.told("a", http=ada)
    adas, bobs = (await session(ada))[0], (await session(bob))[0]
    path = f"/v1/stream/{stream_id}?from=start"
    assert (await here.http.get(path, {"Cookie": f"{SESSION_COOKIE}={bobs}"})).body == UNKNOWN
    assert (await ada.get(path, {"Cookie": f"{SESSION_COOKIE}={bobs}"})).status == 200
    assert (await bob.get(path, {"Cookie": f"{SESSION_COOKIE}={adas}"})).body == UNKNOWN
    assert (await here.http.keyed("nobodys-key").get(path, {"Cookie": f"{SESSION_COOKIE}={adas}"})).status == 401


async def test_cookie_goes_with_its_key(here: Site, keys_file: Path, ada: Http) -> None:
    """Rotating a key ends the sessions that were begun with it, and no others."""
    stream_id = await here.told("a", http=ada)
    old = (await session(ada))[0]
    reread(here, keys_file, f"ada:{ADA}\nada:ada-key-2\nbob:{BOB}\n")
    new = (await session(here.http.keyed("ada-key-2")))[0]
    path = f"/v1/stream/{stream_id}?from=start"
    for value in (old, new):
        assert (await here.http.get(path, {"Cookie": f"{SESSION_COOKIE}={value}"})).status == 200
    reread(here, keys_file, f"ada:ada-key-2\nbob:{BOB}\n")
    assert (await here.http.get(path, {"Cookie": f"{SESSION_COOKIE}={old}"})).status == 401
    assert (await here.http.get(path, {"Cookie": f"{SESSION_COOKIE}={new}"})).status == 200


async def test_cookie_ends_after_its_term(here: Site, ada: Http) -> None:
    stream_id, _ = await here.open_stream("a", http=ada)
    value = (await session(ada))[0]
    path = f"/v1/stream/{stream_id}?cursor={cursor(stream_id, 2)}"
    for later, status in ((SESSION_TERM - 1, 200), (1, 401)):
        here.gateway.clock.advance(later)
        response = await here.http.open("GET", path, {"Cookie": f"{SESSION_COOKIE}={value}"})
        assert response.status == status
        response.close()


async def test_cookie_is_found_among_others(here: Site, ada: Http) -> None:
    """Cookies of one host are shared by all its ports: what other programs set there must not hide ours."""
    stream_id = await here.told("a", http=ada)
    ours = f"{SESSION_COOKIE}={(await session(ada))[0]}"
    path = f"/v1/stream/{stream_id}?from=start"
    for cookies in (
        f"a=b; {ours}",
        f'state={{"a":1, "b":[2]}}; {ours}',
        f"flag; {ours}; x=y",
        f"a@b=c; {ours}",
        f"{ours};",
        f"={ours[:3]}; {ours}",
        f"$Version=1; {ours}; $Path=/v1",
    ):
        answer = await here.http.get(path, {"Cookie": cookies})
        assert answer.status == 200, cookies


async def test_forged_cookie_is_401(here: Site, ada: Http, bob: Http) -> None:
    stream_id = await here.told("a", http=ada)
    adas, bobs = (await session(ada))[0], (await session(bob))[0]
    claim, _, signature = adas.partition(".")
    flipped = signature[:-2] + ("A" if signature[-2] != "A" else "B") + signature[-1]
    for value in (
        "",
        ".",
        "x",
        "x.y",
        claim,
        f"{claim}.",
        f".{signature}",
        f"{claim}.{flipped}",
        f"{claim}.{bobs.partition('.')[2]}",
        f"{bobs.partition('.')[0]}.{signature}",
        f"{claim}.{signature}.{signature}",
        f"W10.{signature}",
        "\xe9.\xe9",
        "x" * 8000,
    ):
        answer = await here.http.get(f"/v1/stream/{stream_id}?from=start", {"Cookie": f"{SESSION_COOKIE}={value}"})
        assert (answer.status, answer.body) == (401, UNAUTHORIZED)


async def test_session_needs_the_key_and_is_not_needed_without_keys(here: Site) -> None:
    assert (await here.http.post("/v1/session")).status == 401
    async with site() as without_keys:
        answer = await without_keys.http.ask("POST", "/v1/session")
        assert answer.status == 204
        assert "set-cookie" not in answer.headers
        answer = await without_keys.http.get("/v1/streams", {"Cookie": f"{SESSION_COOKIE}=x.y"})
        assert answer.status == 200
