"""Who waits for what becomes of requests in this process: the relays.

They are woken by new entries and by the completion signal, and, since signals may be lost, by one look at the database
a second for all of them.  A wake-up carries nothing: who is woken looks for himself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from midstream.pool.leases import Leases
from midstream.pool.shapes import Standing


class Attendance:
    """One relay's wait for one request.  `look`: the database has news of it.  `pinned`: whose words readers have."""

    __slots__ = ("_event", "_leave", "look", "pinned", "request")

    def __init__(self, request: str, leave: Callable[[Attendance], None]) -> None:
        self.request = request
        # At first too: much may have become of it before somebody waited.
        self.look = True
        self.pinned: str | None = None
        self._event = asyncio.Event()
        self._leave = leave

    def wake(self) -> None:
        self._event.set()

    def tell(self) -> None:
        """The database has news."""
        self.look = True
        self._event.set()

    async def wait(self) -> None:
        """Until it is woken; at once if it was since the last time."""
        await self._event.wait()
        self._event.clear()

    def close(self) -> None:
        """Nobody waits any more."""
        self._leave(self)


class Attending:
    """All of this process."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._waiting: dict[str, dict[Attendance, Callable[[], None]]] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def requests(self) -> list[str]:
        return list(self._waiting)

    def attend(self, request: str) -> Attendance:
        """Wait for a request, until the attendance is closed."""
        attendance = Attendance(request, self._left)
        self._waiting.setdefault(request, {})[attendance] = self._leases.watch(request, attendance.wake)
        return attendance

    def _left(self, attendance: Attendance) -> None:
        waiting = self._waiting.get(attendance.request, {})
        if (unwatch := waiting.pop(attendance, None)) is not None:
            unwatch()
        if not waiting:
            self._waiting.pop(attendance.request, None)

    def heard(self, request: str, _: str) -> None:
        """A completion signal."""
        for attendance in self._waiting.get(request, ()):
            attendance.tell()

    def compare(self, standings: Mapping[str, Standing]) -> None:
        """Tell those of whose request the database knows more than they do."""
        for request, waiting in self._waiting.items():
            standing = standings.get(request)
            over = standing is None or standing.status != "waiting"
            leased = standing.leased if standing is not None else ()
            for attendance in waiting:
                if over or (attendance.pinned is not None and attendance.pinned not in leased):
                    attendance.tell()
