"""The SSE decoder reads event streams as WHATWG HTML says, in linear time, and never dispatches a phantom."""

import time

import pytest

from midstream.codec.sse import Decoder, Event, EventTooLarge, ping, retry


def decode(*pieces: bytes) -> list[Event]:
    decoder = Decoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


def data_of(*pieces: bytes) -> list[bytes]:
    return [event.data for event in decode(*pieces)]


def test_a_heartbeat_after_an_event_with_an_id_dispatches_nothing() -> None:
    """An id that was seen is no reason to dispatch: neither with a comment block nor with a block of only an id."""
    events = decode(b"id: 7\ndata: x\n\n", b": ping\n\n", b"id: 8\n\n", b"retry: 5\n\n", b"event: e\n\n", b"\n\n")
    assert events == [Event("message", b"x", "7")]


def test_an_id_alone_moves_the_last_event_id() -> None:
    """Without data nothing is dispatched, but the position has moved."""
    decoder = Decoder()
    assert decoder.feed(b"id: 8\n") == []
    assert decoder.last_event_id == ""
    assert decoder.feed(b"\n") == []
    assert decoder.last_event_id == "8"


@pytest.mark.parametrize("newline", [b"\n", b"\r", b"\r\n"])
def test_every_line_ending_ends_a_line(newline: bytes) -> None:
    """CR, LF and CRLF, with all fields."""
    lines = (b"event: add", b"id: 1", b"retry: 10", b": c", b"data: a", b"data: b", b"", b"data: c", b"", b"")
    assert decode(newline.join(lines)) == [Event("add", b"a\nb", "1", 10), Event("message", b"c")]


def test_a_cr_dispatches_without_waiting_for_a_lf() -> None:
    """A stream of CRs whose next byte may be long in coming."""
    decoder = Decoder()
    assert decoder.feed(b"data: a\r\r") == [Event("message", b"a")]
    assert decoder.feed(b"\ndata: b\r\n") == []
    assert decoder.feed(b"\r\n") == [Event("message", b"b")]


def test_a_crlf_cut_in_half_is_one_line_end() -> None:
    """Otherwise its LF would be a blank line, and end the event early."""
    assert decode(b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n") == [Event("message", b"a\nb")]


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_byte_order_mark_is_dropped_at_the_start_only(cut: int) -> None:
    """However it is cut; the same character inside a text stays."""
    stream = b"\xef\xbb\xbfdata: \xef\xbb\xbfx\n\n\xef\xbb\xbfdata: y\n\n"
    assert data_of(stream[:cut], stream[cut:]) == [b"\xef\xbb\xbfx"]


def test_half_a_byte_order_mark_is_part_of_the_first_line() -> None:
    """It only looked like one."""
    assert data_of(b"\xef\xbb", b"data: x\ndata: y\n\n") == [b"y"]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"data: x", b"x"),
        (b"data:x", b"x"),
        (b"data:  two", b" two"),
        (b"data:\tx", b"\tx"),
        (b"data: trailing  ", b"trailing  "),
        (b"data: a: b", b"a: b"),
        (b"data:", b""),
        (b"data", b""),
    ],
)
def test_at_most_one_space_is_taken_after_the_colon(line: bytes, value: bytes) -> None:
    """Everything else of the value is kept, and a line without a colon is a field without a value."""
    assert decode(line + b"\n\n") == [Event("message", value)]


@pytest.mark.parametrize("line", [b" data: x", b"Data: x", b"datax: x", b"foo: bar", b"\0data: x", b"data : x"])
def test_unknown_fields_are_ignored(line: bytes) -> None:
    """A name has to be exact."""
    assert decode(line + b"\n\n") == []


def test_the_first_example_of_the_standard() -> None:
    """Two events, the second of two lines; what follows has no blank line."""
    assert data_of(b"data: YHOO\ndata: +2\ndata: 10\n\n") == [b"YHOO\n+2\n10"]


def test_the_second_example_of_the_standard() -> None:
    """A comment, an event with an id, one that resets the id, one with a leading space; all with their ids."""
    stream = b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n"
    decoder = Decoder()
    assert decoder.feed(stream) == [
        Event("message", b"first event", "1"),
        Event("message", b"second event", ""),
        Event("message", b" third event"),
    ]
    assert decoder.last_event_id == ""


def test_the_third_example_of_the_standard() -> None:
    """Empty data is data; the last block is not finished."""
    assert data_of(b"data\n\ndata\ndata\n\ndata:") == [b"", b"\n"]


def test_the_fourth_example_of_the_standard() -> None:
    """With and without the space, the same."""
    assert data_of(b"data:test\n\ndata: test\n\n") == [b"test", b"test"]


def test_an_id_with_nul_is_ignored() -> None:
    """Nor does it take the place of an earlier one in the block."""
    assert decode(b"id: 1\nid: 2\0\ndata: x\n\n") == [Event("message", b"x", "1")]


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1.5", b"1 ", "٣".encode(), b"9" * 5000])
def test_a_retry_that_is_no_number_is_ignored(value: bytes) -> None:
    """ASCII digits only, and not thousands of them."""
    assert decode(b"retry: " + value + b"\ndata: x\n\n") == [Event("message", b"x")]


def test_bytes_that_are_not_utf_8_do_no_harm() -> None:
    """Data stays as it is; a name or an id is decoded with replacement."""
    assert decode(b"event: \xff\nid: \xfe\ndata: \xfd\n\n") == [Event("\ufffd", b"\xfd", "\ufffd")]


def test_a_bare_retry_line_is_known_once_the_block_or_the_connection_ends() -> None:
    """Servers send it with no blank line after it, maybe with nothing after it at all."""
    decoder = Decoder()
    decoder.feed(retry(2137))
    assert decoder.close() == b""
    assert decoder.retry == 2137
    assert decode(retry(2137), ping(), b"data: x\n\n") == [Event("message", b"x", None, 2137)]


@pytest.mark.parametrize(
    ("pieces", "rest"),
    [
        ([b"data: x\n\n"], b""),
        ([b"data: x\n\n", b": pi"], b""),
        ([b"data: x\n\n", b": ping\n"], b""),
        ([b"data: x\n\nretry: 1\n"], b""),
        ([b"data: x\n\n\n\n"], b""),
        ([b"data: x\n"], b"data: x\n"),
        ([b": c\nid: 1"], b"id: 1"),
        ([b"dat"], b"dat"),
    ],
)
def test_close_returns_the_event_that_was_cut_off(pieces: list[bytes], rest: bytes) -> None:
    """And nothing where only comments and reconnection times came after the last one."""
    decoder = Decoder()
    for piece in pieces:
        decoder.feed(piece)
    assert decoder.close() == rest


def test_a_line_of_six_mebibytes_in_small_pieces_takes_linear_time() -> None:
    """A decoder that looks at its whole buffer for each piece would take minutes."""
    decoder = Decoder()
    started = time.process_time()
    decoder.feed(b"data: ")
    for _ in range(6 * 1024):
        assert decoder.feed(b"x" * 1024) == []
    (event,) = decoder.feed(b"\n\n")
    assert len(event.data) == 6 * 2**20
    assert time.process_time() - started < 3  # quadratic, it would be minutes


def test_a_flood_of_comment_lines_takes_linear_time_and_no_memory() -> None:
    """Bare `: ping` lines begin no event and do not add up to a large one."""
    decoder = Decoder(max_event_bytes=1000)
    started = time.process_time()
    for _ in range(20):
        decoder.feed(b":\n" * 50_000)
    assert decoder.close() == b""
    assert time.process_time() - started < 3  # quadratic, it would be minutes


def test_bare_pings_between_frames_do_not_add_up() -> None:
    """Hours of silence, a line each time, cut anywhere."""
    decoder = Decoder(max_event_bytes=64)
    for _ in range(1000):
        assert decoder.feed(b": pi") == []
        assert decoder.feed(b"ng\n") == []
    assert decoder.feed(b"data: x\n\n") == [Event("message", b"x")]


@pytest.mark.parametrize("pieces", [[b"data: 1234\n\n"], [b"data: ", b"1234", b"\n\n"], [b"data: 1234\n", b"\n"]])
def test_an_event_of_exactly_the_cap_passes(pieces: list[bytes]) -> None:
    """Whether it comes whole or in pieces."""
    decoder = Decoder(max_event_bytes=10)
    assert [event.data for piece in pieces for event in decoder.feed(piece)] == [b"1234"]


@pytest.mark.parametrize("large", [b"data: 12345\n\n", b"data: 12345\ndata: ", b"data: 123456", b"x" * 100])
def test_an_event_over_the_cap_is_an_error_that_keeps_what_came_before(large: bytes) -> None:
    """Not a silent end, and nothing that was whole is lost with it."""
    decoder = Decoder(max_event_bytes=10)
    with pytest.raises(EventTooLarge, match="over 10 bytes") as caught:
        decoder.feed(b"data: a\n\ndata: b\n\n" + large)
    assert [event.data for event in caught.value.events] == [b"a", b"b"]
    assert caught.value.limit == 10


def test_what_a_server_adds_between_frames_is_a_line_without_a_blank_one() -> None:
    """A block of its own would make some clients dispatch an empty event."""
    assert ping() == b": ping\n"
    assert retry(2137) == b"retry: 2137\n"
