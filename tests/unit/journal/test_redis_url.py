"""What a Redis URL says, and which ones say nothing good."""

from __future__ import annotations

import pytest

from midstream.journal.redis_url import Place, parse


@pytest.mark.parametrize(
    ("url", "place", "db", "prefix"),
    [
        ("redis://", Place("localhost", 6379), 0, "midstream"),
        ("redis://store", Place("store", 6379), 0, "midstream"),
        ("redis://store:7000/3", Place("store", 7000), 3, "midstream"),
        ("valkey://store/1?prefix=staging", Place("store", 6379), 1, "staging"),
        ("redis://store?db=2", Place("store", 6379), 2, "midstream"),
        ("redis://[::1]:6380", Place("::1", 6380), 0, "midstream"),
        ("unix:///run/valkey.sock?db=4", Place(path="/run/valkey.sock"), 4, "midstream"),
    ],
)
def test_url_names_a_place(url: str, place: Place, db: int, prefix: str) -> None:
    """Host, port, socket, database and the prefix of all keys."""
    access = parse(url)
    assert (access.place, access.db, access.prefix, access.tls) == (place, db, prefix, None)


def test_user_and_password_are_decoded_and_never_shown() -> None:
    """An ACL user and a password with odd characters; `repr` keeps the secret."""
    access = parse("redis://ada:p%40ss%2Fword@store")
    assert (access.username, access.password) == ("ada", "p@ss/word")
    assert "p@ss" not in repr(access)
    assert parse("redis://:secret@store").password == "secret"


def test_time_outs_are_ours_unless_told() -> None:
    """Two seconds for a connection and for a reply that is due; the client library's own defaults play no part."""
    access = parse("redis://store")
    assert (access.connect_timeout, access.reply_timeout) == (2.0, 2.0)
    access = parse("redis://store?socket_timeout=1&socket_connect_timeout=0.5")
    assert (access.connect_timeout, access.reply_timeout) == (0.5, 1.0)


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_tls_is_verified_unless_the_operator_says_otherwise(scheme: str) -> None:
    """The certificate and its name are checked."""
    tls = parse(f"{scheme}://store").tls
    assert tls is not None
    assert (tls.verify_mode.name, tls.check_hostname) == ("CERT_REQUIRED", True)
    lax = parse(f"{scheme}://store?ssl_cert_reqs=none").tls
    assert lax is not None
    assert lax.verify_mode.name == "CERT_NONE"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis:store", "is named by one of redis://"),
        ("http://store", "is named by one of redis://"),
        ("redis://store?prefx=a", "no option 'prefx'"),
        ("redis://store?max_connections=3", "no option 'max_connections'"),
        ("redis://store/three", "is a number, not 'three'"),
        ("redis://store?prefix={a}", "may not hold braces"),
        ("redis://store?ssl_cert_reqs=none", "need rediss://"),
        ("redis://store?socket_timeout=soon", "socket_timeout"),
        ("unix://", "needs the path"),
    ],
)
def test_what_cannot_be_meant_is_refused(url: str, reason: str) -> None:
    """A misspelt option is not passed over."""
    with pytest.raises(ValueError, match=reason):
        parse(url)


def test_refusal_quotes_no_password() -> None:
    """What goes to the terminal or a log keeps the secret."""
    with pytest.raises(ValueError, match="no option") as refused:
        parse("redis://ada:s3cret@store?oops=1")
    assert "s3cret" not in str(refused.value)
