"""Where records are kept, chosen by URL."""

from __future__ import annotations

from collections.abc import Callable

from midstream.journal.base import Journal
from midstream.journal.memory import MemoryJournal
from midstream.journal.redis import RedisJournal
from midstream.journal.redis_url import SCHEMES, parse
from midstream.journal.sqlite import SqliteJournal
from midstream.rules import Bounds

_SQLITE = "sqlite:///"
_FORMS = "memory:, sqlite:///FILE (relative), sqlite:////FILE (absolute) or redis://HOST"


def open_journal(url: str, clock: Callable[[], float], bounds: Bounds | None = None) -> Journal:
    """The journal that a `--journal` URL names, still to be opened: `memory:`, `sqlite:///FILE` or `redis://HOST…`.

    What follows `sqlite:///` is the path as it stands, so an absolute one makes four slashes.  For Redis and Valkey see
    `redis_url.parse`.  `clock` gives seconds since 1970.  Raises ValueError, whose text is for the operator, for any
    other URL.
    """
    if url == "memory:":
        return MemoryJournal(clock, bounds)
    path = url.removeprefix(_SQLITE)
    if path != url and path not in ("", ":memory:") and not path.endswith("/"):  # SQLite's own name for no file at all
        return SqliteJournal(path, clock, bounds)
    scheme, separator, _ = url.partition("://")
    if separator and scheme in SCHEMES:
        return RedisJournal(parse(url), clock, bounds)
    raise ValueError(f"{url!r} does not name a journal; use {_FORMS}")
