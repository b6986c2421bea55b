"""Recording what Mem0's memories are searched for and find, without changing it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.machinery import ModuleSpec
from typing import Any

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.traces.recording import TraceRecorder
from ctxreuse.pipeline.memory_planner import found_memories, memory_block

_SPEC = importlib.util.find_spec("mem0")
if _SPEC is None:
    raise MissingExtraError("recording Mem0", "mem0") from ModuleNotFoundError("mem0")

_KINDS = ("Memory", "AsyncMemory", "MemoryClient", "AsyncMemoryClient")


@contextmanager
def recording(recorder: TraceRecorder) -> Iterator[None]:
    """Record searches of Mem0's memories and clients; importing it here would write files."""
    replaced: list[tuple[Any, Any]] = []

    def begin(mem0: Any) -> None:
        replaced.extend((kind, kind.search) for name, kind in vars(mem0).items() if name in _KINDS)
        for kind, search in replaced:
            kind.search = _recorded(search, recorder)

    imported = _WhenImported(begin)
    if "mem0" in sys.modules:
        begin(sys.modules["mem0"])
    else:
        sys.meta_path.insert(0, imported)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(imported)
        for kind, search in replaced:
            kind.search = search


class _WhenImported:
    """Calls a function with Mem0 once it is imported."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        self._then = then

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != "mem0":
            return None
        sys.meta_path.remove(self)
        loader: Any = _SPEC and _SPEC.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._then(module)

        loader.exec_module = exec_module
        return _SPEC


def _recorded(search: Callable[..., Any], recorder: TraceRecorder) -> Callable[..., Any]:
    """Return a search that is recorded with what it finds."""

    def note(query: object, found: object) -> object:
        scope = current_scope()
        recorder.record(
            _blocks(found),
            str(query),
            conversation_id=scope.conversation_id,
            tenant=scope.tenant or "",
            source="Mem0",
        )
        return found

    async def awaited(query: object, found: Awaitable[Any]) -> Any:
        return note(query, await found)

    @wraps(search)
    def searching(self: Any, query: Any, *args: Any, **options: Any) -> Any:
        found = search(self, query, *args, **options)
        return awaited(query, found) if inspect.isawaitable(found) else note(query, found)

    return searching


def _blocks(found: object) -> Iterator[ContextBlock]:
    yield from map(memory_block, found_memories(found))
