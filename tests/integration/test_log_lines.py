"""No line of the log is written by a caller or an upstream: one event is one line, whatever they sent."""

from __future__ import annotations

import logging

import pytest

from midstream.testing.upstream import MisbehavingUpstream, Script, Status, error_body
from tests.gateways import cursor, site

FORGED = "x\n2026-01-01 00:00:00 ERROR midstream everything is lost"


async def test_path_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """Not before it is known whether there is such a stream, either."""
    async with site() as here:
        where = "/v1/stream/x%0A2026-01-01%2000:00:00%20ERROR%20midstream%20everything"
        answer = await here.http.get(f"{where}?cursor={cursor('other', 1)}", {"Last-Event-ID": "5"})
        assert answer.error == "wrong_stream"
    assert [message for message in caplog.messages if "everything" in message]
    assert not [message for message in caplog.messages if "\n" in message]


async def test_upstream_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream")
    refusal = Script([Status(400, body=error_body(FORGED))])
    async with MisbehavingUpstream({"m": refusal}) as upstream, site(upstream=(upstream.url,)) as here:
        response = await here.http.create(model="m")
        assert b'everything is lost","retryable"' in await response.read()
    ends = [message for message in caplog.messages if "everything is lost" in message]
    assert ends
    assert not [message for message in ends if "\n" in message]
