"""Long work done in steps, so that the loop's other work is not held up by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


async def in_steps(items: Sequence[_T], most: int) -> AsyncGenerator[Sequence[_T], None]:
    """The items, at most so many at a time; after each step the loop gets its turn."""
    for at in range(0, len(items), most):
        yield items[at : at + most]
        await asyncio.sleep(0)
