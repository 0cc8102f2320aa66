"""Which gateway a verb talks to, and by which key: the same for all that are its clients."""

from __future__ import annotations

import argparse
import os
from typing import Final

from midstream.client.surface import DEFAULT_GATEWAY
from midstream.errors import MidstreamError, Unauthorized

GATEWAY_VARIABLE: Final = "MIDSTREAM_GATEWAY"
KEY_VARIABLE: Final = "MIDSTREAM_KEY"


def add_gateway(parser: argparse.ArgumentParser) -> None:
    """The flags of a verb that talks to a gateway.  A flag wins over its variable."""
    parser.add_argument(
        "--gateway",
        default=os.environ.get(GATEWAY_VARIABLE) or DEFAULT_GATEWAY,
        metavar="URL",
        help=f"its address, also {GATEWAY_VARIABLE} (default: %(default)s)",
    )
    parser.add_argument(
        "--key", metavar="KEY", help=f"the caller's key; better in {KEY_VARIABLE}, which other users cannot see"
    )


def key_of(args: argparse.Namespace) -> str | None:
    """The caller's key, if there is one.  Raises ValueError for what cannot stand in a header."""
    key: str = (args.key or os.environ.get(KEY_VARIABLE) or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the key has characters that cannot be sent; is it really the key?")
    return key or None


def refusal(error: MidstreamError, args: argparse.Namespace) -> str:
    """What the gateway said, or, where it asks for a key and there is none, how to give one."""
    if isinstance(error, Unauthorized) and key_of(args) is None:
        return f"the gateway asks for a key: set {KEY_VARIABLE}"
    return str(error)
