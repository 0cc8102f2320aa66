"""How a call ends: the status, the text and the details, from the error alone."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from midstream import errors
from midstream.errors import CursorAhead, CursorExpired, MidstreamError, ProducerFailed, TooManyStreams
from midstream.transports.inference import Refusal, refusal
from midstream.wire import GRPC_STATUS
from tests.unit.test_errors import classes


def refused_for(error: Exception) -> Refusal:
    return refusal(error, {})


def unpacked(told: Refusal) -> list[Message]:
    kinds = {kind.DESCRIPTOR.full_name: kind for kind in (ErrorInfo, RetryInfo)}
    return [kinds[detail.TypeName()].FromString(detail.value) for detail in told.details]


def info(told: Refusal) -> tuple[str, dict[str, str]]:
    """The reason and the facts."""
    [found] = [detail for detail in unpacked(told) if isinstance(detail, ErrorInfo)]
    assert found.domain == "midstream"
    return found.reason, dict(found.metadata)


def made(kind: type[MidstreamError]) -> MidstreamError:
    arguments: dict[type[MidstreamError], Any] = {CursorExpired: 812, CursorAhead: 640}
    return kind(arguments[kind]) if kind in arguments else kind("what happened")


@pytest.mark.parametrize("kind", [kind for kind in classes(MidstreamError) if vars(kind).get("code") in GRPC_STATUS])
def test_error_becomes_the_status_of_the_table_and_names_its_code(kind: type[MidstreamError]) -> None:
    """A client needs no text to know what happened."""
    told = refused_for(made(kind))
    assert told.status == GRPC_STATUS[kind.code]
    assert info(told)[0] == kind.code.upper()
    assert told.message


def test_facts_stand_in_the_details() -> None:
    """As text, which is all that ErrorInfo takes; what is not known is left out."""
    assert info(refused_for(CursorExpired(812))) == ("CURSOR_EXPIRED", {"oldest_available": "812"})
    assert info(refused_for(CursorExpired(None))) == ("CURSOR_EXPIRED", {})
    assert info(refused_for(CursorAhead(640))) == ("CURSOR_AHEAD", {"highest_seq": "640"})


def test_what_may_pass_says_when_to_come_back() -> None:
    """As google.rpc.RetryInfo, which clients know."""
    told = refused_for(TooManyStreams("full", 7))
    [found] = [detail for detail in unpacked(told) if isinstance(detail, RetryInfo)]
    assert found.retry_delay.seconds == 7
    assert not [detail for detail in unpacked(refused_for(errors.UnknownStream())) if isinstance(detail, RetryInfo)]


def test_failure_before_there_was_a_stream_is_aborted() -> None:
    """With the upstream's code, like one after some tokens."""
    told = refused_for(ProducerFailed("upstream_unreachable", "no connection", retryable=True, status=502))
    assert (told.status, told.message) == ("ABORTED", "no connection")
    assert info(told) == ("UPSTREAM_UNREACHABLE", {"retryable": "true", "status": "502"})


@pytest.mark.parametrize("text", ["x" * 100_000, "你" * 100_000, "\u0000" * 1000])
def test_long_text_does_not_burst_the_metadata(text: str) -> None:
    """A status travels as metadata, escaped; clients take 8 KiB of it and break off the call for more."""
    told = refused_for(ProducerFailed("upstream_error", text, retryable=False, said=text, nested={"text": text}))
    size = len(told.message.encode()) * 3 + sum(len(detail.SerializeToString()) for detail in told.details) * 4 / 3
    assert size < 4096
    told.message.encode()


def test_refusals_are_counted_by_code_and_ends_of_streams_are_none() -> None:
    """What a stream came to is no refusal of the call."""
    counts: dict[str, int] = {}
    refusal(errors.UnknownStream(), counts)
    refusal(errors.UnknownStream(), counts)
    ended = Refusal("ABORTED", "too slow")
    assert refusal(ended, counts) is ended
    assert counts == {"unknown_stream": 2}


def test_fault_of_ours_tells_the_caller_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The cause is for the log."""
    told = refused_for(RuntimeError("secret"))
    assert (told.status, info(told)) == ("INTERNAL", ("INTERNAL_ERROR", {}))
    assert "secret" not in told.message
    assert "secret" in caplog.text


def test_short_text_is_told_as_it_is() -> None:
    """To the last character."""
    assert refused_for(errors.BadRequest("é" * 300)).message == "é" * 300
    assert refused_for(errors.BadRequest("é" * 301)).message == "é" * 300 + "…"
