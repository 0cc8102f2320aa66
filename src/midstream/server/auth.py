"""Who is calling: keys and their owners, the session cookie, and what a browser may do (PROTOCOL.md, "Keys").

An owner is the *name* behind a key, so that a rotation (two lines of one name) keeps his streams.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

import orjson

from midstream.errors import ForbiddenOrigin, Unauthorized, WrongHost
from midstream.transports.http import Caller
from midstream.wire import SESSION_TERM

# The one owner of a gateway without keys.
OPEN_OWNER = Caller("open", admin=True)

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """One line of the keys file.  Only the digest is kept: a dump of this process shows no key of a live session."""

    caller: Caller
    digest: bytes


class Keys:
    """The keys in force.  Empty: open mode, one owner."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = list(keys)

    @property
    def open(self) -> bool:
        return not self._keys

    def identify(self, authorization: str | None, apikey: str | None) -> Caller:
        """The caller behind `Authorization: Bearer` and `apikey`.  Raises Unauthorized."""
        if self.open:
            return OPEN_OWNER
        sent = {key for key in (_bearer(authorization), apikey) if key is not None}
        if len(sent) != 1:
            raise Unauthorized
        found = self._find(_digest(sent.pop()))
        if found is None:
            raise Unauthorized
        return found.caller

    def digest(self, authorization: str | None, apikey: str | None) -> bytes:
        """What a lease is bound to, whether the key is a good one or not; in open mode, where none counts, nothing."""
        sent = {key for key in (_bearer(authorization), apikey) if key is not None}
        return b"" if self.open or len(sent) != 1 else _digest(sent.pop())

    def _find(self, digest: bytes) -> Key | None:
        """Every key is compared, each in constant time: how long it takes tells nothing about which one is near."""
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    # --- the session cookie, for pages whose EventSource or WebSocket cannot send a header --------------------------

    def session(self, authorization: str | None, apikey: str | None, now: float) -> str | None:
        """A cookie's value for this caller; None in open mode, where none is needed.  Raises Unauthorized."""
        self.identify(authorization, apikey)
        if self.open:
            return None
        key = self._find(_digest(_bearer(authorization) or apikey or ""))
        if key is None:
            raise Unauthorized
        claim = orjson.dumps({"o": key.caller.owner, "e": int(now) + SESSION_TERM})
        return f"{_b64(claim)}.{_b64(_sign(key, claim))}"

    def of_session(self, cookie: str, now: float) -> Caller:
        """Whose cookie this is.  It is signed under the key it was made with: when that key goes, so does it."""
        try:
            claim, signature = (urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in cookie.split("."))
            fields = orjson.loads(claim)
            owner, ends = fields["o"], fields["e"]
        except (ValueError, KeyError, TypeError):
            raise Unauthorized from None
        found = None
        for key in self._keys:
            if hmac.compare_digest(_sign(key, claim), signature) and key.caller.owner == owner:
                found = key
        if found is None or not isinstance(ends, int) or ends <= now:
            raise Unauthorized
        return Caller(found.caller.owner)


def _bearer(authorization: str | None) -> str | None:
    """The key of an Authorization header (RFC 6750, section 2.1); another scheme is none of ours."""
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _sign(key: Key, claim: bytes) -> bytes:
    return hmac.digest(key.digest, b"midstream session\0" + claim, "sha256")


def _b64(raw: bytes) -> str:
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def read_keys(path: str | os.PathLike[str]) -> Keys:
    """Read a keys file: `name:key` or `name:key:admin` a line; empty lines and `#` comments are passed over.

    Raises OSError, and ValueError naming the line (never the key).
    """
    keys: list[Key] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                keys.append(_key(line.strip(), f"{path}, line {number}"))
    if not keys:
        raise ValueError(f"{path} holds no key; without keys leave --keys-file out")
    digests = {key.digest: key.caller for key in keys}
    for key in keys:
        if digests[key.digest] != key.caller:
            raise ValueError(f"{path}: {key.caller.owner!r} and {digests[key.digest].owner!r} have the same key")
    return Keys(keys)


def _key(line: str, where: str) -> Key:
    name, _, rest = line.partition(":")
    key, _, role = rest.partition(":")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}: the name must be 1 to 64 of A-Z a-z 0-9 _ . @ -")
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{where}: the key of {name!r} must be at least 8 printable ASCII characters without spaces")
    if role not in ("", "admin"):
        raise ValueError(f"{where}: after the key only `:admin` may follow")
    return Key(Caller(name, admin=role == "admin"), _digest(key))


# --- browsers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gate:
    """Which hosts and web origins are let in.  Checked before any key: a page's request carries its user's cookies."""

    cors_origins: frozenset[str]
    allowed_hosts: frozenset[str]
    any_host: bool  # with keys configured: a page that rebinds a name to us still has no key

    def check(self, host: str | None, origin: str | None) -> bool:
        """Raises WrongHost, then ForbiddenOrigin.  True: the origin is a configured one, and gets CORS headers."""
        if not self.any_host and not self._ours(host):
            raise WrongHost(f"this gateway does not answer for {host!r}; add --allowed-host to let it in")
        if origin is None:
            return False
        if origin.lower() in self.cors_origins:
            return True
        if host is None or not _same_site(origin, host):
            raise ForbiddenOrigin(f"pages of {origin} may not use this gateway; add --cors-origin to let them in")
        return False

    def _ours(self, host: str | None) -> bool:
        if not host:
            return False
        name = _hostname(host)
        return name in self.allowed_hosts or is_loopback(name)


@lru_cache(maxsize=256)
def is_loopback(name: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761, section 6.3
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


# Name or bracketed address, and port (RFC 3986, section 3.2); what merely begins like a name of ours is none.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
_ORIGIN = re.compile(r"(https?)://(.+)", re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def _hostname(host: str) -> str:
    """The name in a `Host` header, in lower case; empty when the header is none."""
    match = _HOST.fullmatch(host)
    return (match[1] or match[2]).lower() if match else ""


def _same_site(origin: str, host: str) -> bool:
    """Whether an origin's host:port is that of `Host`.  The scheme is not compared: TLS may end before us."""
    match = _ORIGIN.fullmatch(origin)
    if match is None or _HOST.fullmatch(host) is None:
        return False
    default = _DEFAULT_PORTS[match[1].lower()]
    return match[2].lower().removesuffix(default) == host.lower().removesuffix(default)
