"""What has to be there to be wrapped: one method."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol


class SearchableMemory(Protocol):
    """Searches as mem0's `Memory` and `MemoryClient` do."""

    def search(self, query: str, *args: Any, **kwargs: Any) -> Any:
        """Return `{"results": [memory, ...]}` or a list of memories, best first."""
        ...


class AsyncSearchableMemory(Protocol):
    """Searches as mem0's `AsyncMemory` and `AsyncMemoryClient` do."""

    def search(self, query: str, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Return what a `SearchableMemory` does, awaited."""
        ...
