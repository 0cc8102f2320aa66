"""A Redis journal's URL says where the store is, how to get in, and how long a lease is."""

from __future__ import annotations

import pytest

from midstream.journal.redis_url import Place, parse


def test_everything_may_stand_in_the_url() -> None:
    """Address, name, password, database; the rest in its query."""
    access = parse("redis://ada:s3cret@store:7000/2?prefix=p&socket_timeout=4&socket_connect_timeout=3&lease=6")
    assert access.place == Place("store", 7000)
    assert (access.username, access.password, access.db, access.prefix) == ("ada", "s3cret", 2, "p")
    assert (access.reply_timeout, access.connect_timeout) == (4.0, 3.0)
    assert "s3cret" not in repr(access)


@pytest.mark.parametrize(("url", "lease"), [("redis://store", 15.0), ("valkey://store?lease=6", 6.0)])
def test_a_lease_is_renewed_three_times_in_its_term(url: str, lease: float) -> None:
    """15 seconds where nothing else is said."""
    terms = parse(url).terms
    assert (terms.lease, terms.renew) == (lease, lease / 3)


@pytest.mark.parametrize("url", ["redis://s?lease=0", "redis://s?lease=301", "redis://s?lease=x", "redis://s?leash=5"])
def test_what_cannot_be_meant_is_refused(url: str) -> None:
    """At start, and not when a gateway is lost."""
    with pytest.raises(ValueError, match=r"leas|float"):
        parse(url)
