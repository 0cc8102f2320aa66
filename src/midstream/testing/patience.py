"""Waiting with a bound: who runs into it has found something that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

# Seconds; far more than anything in these tests takes.
PATIENCE: Final = 10.0
# How often a condition without an event of its own is looked at, and one that has to be asked for, in seconds.
_LOOK: Final = 0.001
_ASK: Final = 0.01


async def soon(verb: Awaitable[T]) -> T:
    """The verb's result.  Raises TimeoutError when it hangs."""
    return await asyncio.wait_for(verb, PATIENCE)


async def eventually(holds: Callable[[], Awaitable[object]], what: str = "the condition") -> None:
    """Wait for something that has no event of its own and has to be asked for.  Raises TimeoutError naming it."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not await holds():  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(_ASK)
    except TimeoutError:
        raise TimeoutError(f"waited {PATIENCE:g} s for {what}") from None


async def until(holds: Callable[[], object], what: str = "the condition") -> None:
    """Wait for something that has no event of its own.  Raises TimeoutError naming it."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not holds():  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(_LOOK)
    except TimeoutError:
        raise TimeoutError(f"waited {PATIENCE:g} s for {what}") from None
