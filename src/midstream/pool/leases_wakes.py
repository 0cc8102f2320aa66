"""Who is to be told of what, in this process.  A callback that fails does not cost the others their turn."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from midstream.pool.leases import Hear, Wake

logger = logging.getLogger(__name__)


class Wakes:
    """The callbacks of each watched request."""

    def __init__(self) -> None:
        self._wakes: dict[str, list[Wake]] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._wakes

    def add(self, request: str, wake: Wake, gone: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Watch; what is returned ends it, once, and calls `gone` when it was the request's last one."""
        self._wakes.setdefault(request, []).append(wake)
        over = False

        def unwatch() -> None:
            nonlocal over
            if over:
                return
            over = True
            left = self._wakes[request]
            left.remove(wake)
            if not left:
                del self._wakes[request]
                gone()

        return unwatch

    def wake(self, request: str) -> None:
        for wake in self._wakes.get(request, [])[:]:
            guarded(wake)


class Hearers:
    """Who hears the completion signals."""

    def __init__(self) -> None:
        self._hearers: list[Hear] = []

    def __bool__(self) -> bool:
        return bool(self._hearers)

    def add(self, heard: Hear) -> None:
        self._hearers.append(heard)

    def tell(self, request: str, kind: str) -> None:
        for heard in self._hearers:
            guarded(heard, request, kind)


def guarded(callback: Callable[..., None], *args: Any) -> None:
    try:
        callback(*args)
    except Exception:  # the caller's fault, which is not to stop the one who calls
        logger.exception("a callback of the pool failed")
