"""Which gateway a verb talks to, by which key, and what is said when it does not answer as one.

The same for all that are its clients.
"""

from __future__ import annotations

import argparse
import os
from typing import Final

from midstream.cli import exits
from midstream.client import GaveUp, UnexpectedAnswer, Unreachable
from midstream.client.surface import (
    CERTIFICATE,
    DEFAULT_GATEWAY,
    GRPC_THERE,
    NO_HTTP_THERE,
    NO_TLS_THERE,
    TLS_THERE,
    address,
)
from midstream.errors import MidstreamError, NotFound, PositionError, ProducerFailed, Unauthorized

GATEWAY_VARIABLE: Final = "MIDSTREAM_GATEWAY"
KEY_VARIABLE: Final = "MIDSTREAM_KEY"

_IS_IT_ONE: Final = "is this the address of a Midstream gateway?"
# What to do about a port that answers, and not as a gateway does over HTTP.
_ADVICE: Final = {
    GRPC_THERE: "give --gateway the HTTP port, 8400 where nothing else was chosen",
    TLS_THERE: "write https://",
    NO_TLS_THERE: "write http://",
    NO_HTTP_THERE: _IS_IT_ONE,
}
_NOBODY: Final = "is the gateway running, and is this its HTTP port?"
# What an SDK of OpenAI's wants at the end of an address, and a gateway's own clients do not.
_SDK_PATH: Final = "/v1"


def add_gateway(parser: argparse.ArgumentParser, *, key: str = "your key, where the gateway asks for one") -> None:
    """The flags of a verb that talks to a gateway.  A flag wins over its variable; `key` says whose key is meant."""
    parser.add_argument(
        "--gateway",
        default=os.environ.get(GATEWAY_VARIABLE) or DEFAULT_GATEWAY,
        metavar="URL",
        help=f"the gateway's address, http://HOST:PORT, also {GATEWAY_VARIABLE} (default: %(default)s)",
    )
    parser.add_argument(
        "--key", metavar="KEY", help=f"{key}; better in {KEY_VARIABLE}, which other users of this machine cannot see"
    )


def key_of(args: argparse.Namespace) -> str | None:
    """The user's key, if there is one.  Raises ValueError for what cannot stand in a header."""
    key: str = (args.key or os.environ.get(KEY_VARIABLE) or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the key has characters that cannot be sent; is it really the key?")
    return key or None


def code_of(error: MidstreamError) -> int:
    """The exit code for what a client raised."""
    if isinstance(error, Unreachable):
        return exits.UNREACHABLE
    if isinstance(error, ProducerFailed):
        return exits.GENERATION_FAILED
    return exits.POSITION_GONE if isinstance(error, PositionError) else exits.REFUSED


def refusal(error: MidstreamError, args: argparse.Namespace) -> str:
    """What the gateway said; where it asks for a key and there is none, how to give one; where it is none, that."""
    if isinstance(error, Unauthorized) and key_of(args) is None:
        return f"the gateway asks for a key: set {KEY_VARIABLE}"
    if isinstance(error, NotFound) or (isinstance(error, UnexpectedAnswer) and "status" in error.facts):
        return f"{args.gateway} does not answer as a gateway does: {error}; {path_advice(args) or _IS_IT_ONE}"
    return str(error)


def path_advice(args: argparse.Namespace) -> str:
    """How to write an address that goes on with the path that SDKs want; nothing where it does not."""
    where = address(args.gateway)
    if not where.prefix.endswith(_SDK_PATH):
        return ""
    return f"write it without {_SDK_PATH}: --gateway {where._replace(prefix=where.prefix[: -len(_SDK_PATH)]).url}"


def silence(error: Unreachable, place: str, hint: str = _NOBODY) -> str:
    """Why nothing usable came from `place`, and what to do: the hint, where the reason has no advice of its own."""
    reason = error.reason if isinstance(error, GaveUp) else str(error)
    tried = ""
    if isinstance(error, GaveUp):
        tried = " (1 attempt)" if error.attempts == 1 else f" ({error.attempts} attempts)"
    if reason.startswith(CERTIFICATE):
        hint = "SSL_CERT_FILE=FILE names the authorities to trust"
    elif reason.startswith("status "):  # an answer, if only that of a proxy: it says itself what is wrong
        return f"{place}: {reason}{tried}"
    return f"{place}: {reason}{tried}; {_ADVICE.get(reason, hint)}"
