"""Several things at once, of which the first failure counts."""

from __future__ import annotations

import asyncio

__all__ = ["FlatTaskGroup"]


class FlatTaskGroup(asyncio.TaskGroup):
    """A task group whose caller sees the first failure as itself."""

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await super().__aexit__(*exc_info)  # type: ignore[arg-type]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
