"""The protocol's constants agree with each other and with the errors."""

from __future__ import annotations

import typing

import grpc
from connectrpc.code import Code

from midstream import errors, wire
from tests.unit.test_errors import classes

# Not answers to a caller's request: a writer, the process that opens the store, or the stream's own record hears them.
WITHIN: list[type[errors.MidstreamError]] = [*classes(errors.WriterError), errors.JournalInUse, errors.JournalCorrupt]


def test_every_code_a_caller_can_meet_has_one_status() -> None:
    """The table is complete, and holds nothing that no error says."""
    met: list[type[errors.MidstreamError]] = [
        errors.RequestError,
        errors.PositionError,
        errors.Busy,
        errors.JournalError,
    ]
    codes = {leaf.code for branch in met for leaf in classes(branch) if leaf not in WITHIN}
    assert set(wire.HTTP_STATUS) == codes | {errors.MidstreamError.code}
    assert not {leaf.code for leaf in WITHIN} & set(wire.HTTP_STATUS)


def test_status_is_of_the_class_that_the_action_promises() -> None:
    """What the caller must mend is 4xx, what it may retry as it is says so by 429 or 503 (RFC 9110, RFC 6585)."""
    for leaf in classes(errors.RequestError):
        assert 400 <= wire.HTTP_STATUS[leaf.code] < 500
    for leaf in classes(errors.PositionError):
        assert wire.HTTP_STATUS[leaf.code] == 409
    for leaf in classes(errors.Busy):
        assert wire.HTTP_STATUS[leaf.code] in {429, 503}


def test_every_grpc_status_is_one() -> None:
    """Names of google.rpc.Code, which Connect has too; none of them means that all is well."""
    names = {*wire.GRPC_STATUS.values(), *wire.GRPC_ENDS.values()}
    assert names <= {status.name for status in grpc.StatusCode} - {"OK", "UNKNOWN"}
    assert {name.replace("CANCELLED", "CANCELED") for name in names} <= set(Code.__members__)
    assert set(wire.GRPC_ENDS) == wire.TERMINAL - {wire.DONE}


def test_grpc_status_is_of_the_kind_that_the_action_promises() -> None:
    """A client of gRPC repeats what is UNAVAILABLE by itself, and what is RESOURCE_EXHAUSTED after a while."""
    for leaf in classes(errors.Busy):
        assert wire.GRPC_STATUS[leaf.code] in {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
    for leaf in classes(errors.PositionError):
        assert wire.GRPC_STATUS[leaf.code] == "OUT_OF_RANGE"
    for leaf in classes(errors.RequestError):
        assert wire.GRPC_STATUS[leaf.code] not in {"UNAVAILABLE", "OUT_OF_RANGE", "INTERNAL"}


def test_exact_bodies_are_of_known_errors() -> None:
    """The position errors are those that say `restart`."""
    assert set(wire.HTTP_STATUS) >= wire.BARE_ERRORS
    assert {leaf.code for leaf in classes(errors.PositionError)} == wire.POSITION_ERRORS


def test_terminal_events_are_the_statuses_of_an_ended_stream() -> None:
    """A stream's status is its terminal record's event, and `open` before."""
    assert set(typing.get_args(wire.Status)) == wire.TERMINAL | {wire.OPEN}


def test_no_event_is_one_of_the_browsers_own() -> None:
    """EventSource dispatches `open`, `message` and `error` itself (WHATWG HTML, 9.2)."""
    events = {wire.START, wire.TOKEN, wire.EXPIRED, *wire.TERMINAL}
    assert len(events) == 6
    assert not events & {"open", "message", "error"}


def test_largest_seq_is_exact_in_every_json_reader() -> None:
    """A double holds integers up to 2^53 (RFC 8259, section 6)."""
    assert float(wire.MAX_SEQ) == wire.MAX_SEQ == 2**53 - 1
    assert len(str(wire.MAX_SEQ)) == 16


def test_a_field_fits_into_a_slice() -> None:
    """A record split at its field's bound still travels as one write."""
    assert wire.MAX_FIELD_BYTES <= wire.SLICE_BYTES


def test_browsers_may_send_and_see_our_headers() -> None:
    """A header that CORS does not name does not exist for a page."""
    allowed, exposed = wire.CORS_ALLOW.split(", "), wire.CORS_EXPOSE.split(", ")
    assert {"Authorization", "Content-Type", wire.H_LAST_EVENT_ID, wire.H_IDEMPOTENCY, wire.H_STREAM_ID} <= {*allowed}
    assert {wire.H_STREAM_ID, wire.H_HEARTBEAT, "Location", "Retry-After"} <= {*exposed}
