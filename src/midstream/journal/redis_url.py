"""What a `redis://` URL and a process say about a store: where it is, how to get in, and how long to wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import SSLConnection, parse_url

SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
_TAKEN = {"db", "host", "port", "path", "username", "password", "prefix", "lease"}
_TAKEN |= {"socket_timeout", "socket_connect_timeout"}


@dataclass(frozen=True, slots=True)
class Terms:
    """Times of a shared store, in seconds.  The defaults are PROTOCOL.md's; tests shorten them."""

    lease: float = 15.0  # a process that has not renewed its lease for so long has lost its streams
    renew: float = 5.0
    look: float = 1.0  # what a lost wake-up costs at most
    hold: float = 30.0  # how long a process's lowest reader is respected after it was last told
    reserve: float = 30.0  # a name waits so long for the stream it was reserved for
    spare: float = 300.0  # keys outlive their stream's grace period by this much
    patience: float = 2.0  # a verb that cannot reach the store fails after this
    outage: float = 5.0  # readers that wait are told that the store is away after this
    mend: float = (
        2.0  # a store that came back without the newest records: its writer may take this long to put them back
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where one server listens: a host and port, or a Unix socket's path."""

    host: str = "localhost"
    port: int = 6379
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Access:
    """A store: its first server, how to get in, and the prefix of every key.  Times in seconds.

    `reply_timeout` bounds the wait for the reply to a command.  A connection that waits for messages has none: silence
    is what it is for.
    """

    place: Place
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    tls: SSLContext | None = None
    prefix: str = "midstream"
    connect_timeout: float = 2.0
    reply_timeout: float = 2.0
    lease: float = 15.0

    @property
    def terms(self) -> Terms:
        return Terms(lease=self.lease, renew=self.lease / 3)


def parse(url: str) -> Access:
    """The store that a URL names: `redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]`, `rediss://` with TLS, `unix://PATH`.

    `valkey://` and `valkeys://` mean the same.  In the query: `prefix` of all keys, `db`, `socket_timeout`,
    `socket_connect_timeout`, `lease` (seconds), and what redis-py calls `ssl_…`.  Raises ValueError, whose text is
    for the operator and quotes no password.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError(f"a Redis journal is named by one of {', '.join(f'{name}://' for name in SCHEMES)}")
    told: dict[str, Any] = dict(parse_url(f"{SCHEMES[scheme]}://{rest}"))
    told.pop("connection_class", None)
    tls = {name: told.pop(name) for name in list(told) if name.startswith("ssl_")}
    if unknown := [name for name in told if name not in _TAKEN]:
        raise ValueError(f"a Redis journal has no option {unknown[0]!r}")
    prefix = told.get("prefix", "midstream")
    if set("{}") & set(prefix):
        raise ValueError("the prefix of a Redis journal's keys may not hold braces")
    lease = float(told.get("lease", 15.0))
    if not 1 <= lease <= 300:
        raise ValueError("the lease of a Redis journal may be from 1 to 300 seconds")
    database = urlsplit(f"redis://{rest}").path.strip("/")
    if SCHEMES[scheme] != "unix" and database and not database.isdecimal():
        raise ValueError(f"a Redis journal's database is a number, not {database!r}")
    if SCHEMES[scheme] == "unix" and not told.get("path"):
        raise ValueError("a Redis journal at unix:// needs the path of its socket")
    if tls and SCHEMES[scheme] != "rediss":
        raise ValueError("ssl_ options need rediss:// or valkeys://")
    place = Place(told.get("host") or "localhost", told.get("port") or 6379, told.get("path") or "")
    return Access(
        place=place,
        username=told.get("username", ""),
        password=told.get("password", ""),
        db=told.get("db", 0),
        tls=SSLConnection(**tls).ssl_context.get() if SCHEMES[scheme] == "rediss" else None,
        prefix=prefix,
        connect_timeout=told.get("socket_connect_timeout", 2.0),
        reply_timeout=told.get("socket_timeout", 2.0),
        lease=lease,
    )
