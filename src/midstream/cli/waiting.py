"""Says that a wait is one, to a person who would else take a silent terminal for a stuck one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Waiting:
    """A context in which `say` is called once, from a thread of its own, unless `over` comes within `seconds`.

    After `over`, and outside the context, it is not called any more, nor still running.  None says nothing.
    """

    def __init__(self, seconds: float, say: Callable[[], None] | None) -> None:
        self._say = say
        self._timer = threading.Timer(seconds, self._due)
        self._timer.daemon = True
        self._turn = threading.Lock()
        self._over = say is None

    def __enter__(self) -> Self:
        if not self._over:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over()

    def over(self) -> None:
        """What was waited for is here, or something else has been said."""
        if not self._over:
            self._timer.cancel()
            with self._turn:
                self._over = True

    def _due(self) -> None:
        with self._turn:
            if not self._over and self._say is not None:
                self._say()
