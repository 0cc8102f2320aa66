"""Where records are kept, chosen by URL."""

from __future__ import annotations

from collections.abc import Callable

from midstream.journal.base import Journal
from midstream.journal.memory import MemoryJournal
from midstream.journal.sqlite import SqliteJournal
from midstream.rules import Bounds

_SQLITE = "sqlite:///"
_FORMS = "memory:, sqlite:///FILE (relative) or sqlite:////FILE (absolute)"


def open_journal(url: str, clock: Callable[[], float], bounds: Bounds | None = None) -> Journal:
    """The journal that a `--journal` URL names, still to be opened: `memory:` or `sqlite:///FILE`.

    What follows `sqlite:///` is the path as it stands, so an absolute one makes four slashes.  `clock` gives seconds
    since 1970.  Raises ValueError, whose text is for the operator, for any other URL.
    """
    if url == "memory:":
        return MemoryJournal(clock, bounds)
    path = url.removeprefix(_SQLITE)
    if path not in (url, "", ":memory:") and not path.endswith("/"):
        return SqliteJournal(path, clock, bounds)
    if url.startswith(("redis:", "rediss:", "valkey:", "valkeys:")):
        raise ValueError(f"a Redis journal is not part of this version yet; use {_FORMS}")
    raise ValueError(f"{url!r} does not name a journal; use {_FORMS}")
