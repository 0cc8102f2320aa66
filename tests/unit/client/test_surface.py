"""Addresses, requests and wording that both shells share."""

from __future__ import annotations

import socket
import ssl
from http.client import BadStatusLine, IncompleteRead, RemoteDisconnected

import orjson
import pytest

from midstream.client.steps import Record
from midstream.client.surface import address, creation, why


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8400", "http://127.0.0.1:8400"),
        ("http://127.0.0.1:8400/", "http://127.0.0.1:8400"),
        ("https://llm.example", "https://llm.example:443"),
        ("http://llm.example", "http://llm.example:80"),
        ("https://example.org/midstream/", "https://example.org:443/midstream"),
        ("http://[::1]:8400", "http://[::1]:8400"),
    ],
)
def test_an_address_is_read(given: str, url: str) -> None:
    assert address(given).url == url


@pytest.mark.parametrize(
    "given",
    ["", "localhost:8400", "ftp://x", "http://", "http://h:port", "http://h:99999", "http://u:p@h", "http://h/?a=1"],
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="address"):
        address(given)


def test_only_what_was_given_is_asked_for() -> None:
    asked = creation("hi", None, "k", {"model": None, "seed": 0})
    assert orjson.loads(asked.body) == {"prompt": "hi", "seed": 0}
    assert asked.idempotency_key == "k"


def test_a_prompt_or_messages_not_both() -> None:
    with pytest.raises(ValueError, match="either"):
        creation(None, None, "k", {})
    with pytest.raises(ValueError, match="either"):
        creation("hi", [{"role": "user", "content": "hi"}], "k", {})


def refused_by_tls(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, "x")
    error.reason = reason
    return error


def untrusted(why_not: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_message = why_not
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "connection refused"),
        (ConnectionResetError(104, "Connection reset by peer"), "the connection was reset"),
        (RemoteDisconnected("x"), "the connection was closed without an answer"),
        (IncompleteRead(b""), "the connection broke in the middle"),
        (TimeoutError(), "no answer in time"),
        (socket.gaierror(-2, "x"), "the host name is not known"),
        (OSError(113, "No route to host"), "[Errno 113] No route to host"),
        (BadStatusLine("\x00\x00\x06\x04\x00"), "what listens there speaks HTTP/2 alone, as a gRPC port does"),
        (BadStatusLine("\x15\x03\x01\x00\x02\x02F"), "what listens there speaks TLS"),
        (BadStatusLine("220 mail.example ESMTP\r\n"), "what listens there does not speak HTTP"),
        (refused_by_tls("WRONG_VERSION_NUMBER"), "what listens there speaks no TLS"),
        (untrusted("self-signed certificate"), "its certificate is not trusted: self-signed certificate"),
        (OSError(), "OSError"),
    ],
)
def test_a_broken_connection_is_told_in_plain_words(error: Exception, words: str) -> None:
    assert why(error) == words


def test_a_record_says_what_it_adds() -> None:
    assert Record(2, "token", {"seq": 2, "delta": "é", "reasoning": "hm", "choice": 1}).text == "é"
    odd = Record(2, "token", {"delta": None, "reasoning": 7, "choice": "x"})
    assert (odd.text, odd.reasoning, odd.choice, odd.terminal) == ("", "", 0, False)
