"""What retrievers returned, by the outermost run: a model wrapper finds it in its prompt."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from functools import cache, partialmethod
from itertools import pairwise
from typing import Any, NamedTuple

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers.context import register_configure_hook

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import renew_after_fork
from ctxreuse.context.lru_map import PartSize
from ctxreuse.pipeline.known_texts import Form, known_texts
from langchain_ctxreuse.scope import tenant_from_config

_MOST_RUNS = 100_000
_NEAR = 2
"""Characters between parts of a document that follow each other; most overlap."""
_log = logging.getLogger("ctxreuse")


def document_forms(documents: Sequence[Document], texts: Sequence[str]) -> list[Form]:
    """Return documents as they are shown, those that follow each other in a source known as such.

    A splitter says so with `add_start_index=True`.
    """
    parts: list[tuple[str, int, int, int]] = []
    for place, one in enumerate(documents):
        start, source = one.metadata.get("start_index"), one.metadata.get("source")
        if type(start) is int and isinstance(source, str):
            parts.append((source, start, start + len(one.page_content), place))
    names = {place: (source, start) for source, start, _, place in parts}
    follower = {
        place: (source, start)
        for (source, _, end, place), (other, start, *_) in pairwise(sorted(parts))
        if source == other and start <= end + _NEAR
    }
    return [
        Form(text, None, names.get(place), follower.get(place)) for place, text in enumerate(texts)
    ]


def seen_forms(documents: Sequence[Document]) -> list[Form]:
    """Return documents as prompts show them that put in the texts alone."""
    return document_forms(documents, [one.page_content for one in documents])


class _OpenRun(NamedTuple):
    """A run that has not ended; ids are of any type."""

    root: Hashable = None
    is_retriever: bool = False
    is_nested: bool = False


_NO_RUN = _OpenRun()


class OpenRuns(BaseCallbackHandler):
    """Sees which runs go on inside of which.

    Lock-free, because Python's collector may end a run anywhere.
    """

    run_inline = True  # in event loops, too: another thread would cost more than the work

    def __init__(self) -> None:
        self._fail_open = FailOpen(
            type(self).__name__, "nothing is known of the run", "bookkeeping"
        )
        self._start_anew()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        self._runs: dict[Hashable, _OpenRun] = {}

    def _on_start(
        self,
        *_: Any,
        run_id: Hashable,
        parent_run_id: Hashable = None,
        is_retriever: bool = False,
        **__: Any,
    ) -> None:
        outer = self._runs.get(parent_run_id, _NO_RUN)
        root, is_nested = outer.root or parent_run_id or run_id, outer.is_retriever
        self._runs[run_id] = _OpenRun(root, is_retriever or is_nested, is_nested)
        if len(self._runs) > _MOST_RUNS:
            oldest, *_newer = self._runs  # in one step, as threads share them
            self._runs.pop(oldest, None)

    def _on_end(self, result: Any, /, *, run_id: Hashable, **_: Any) -> Any:
        self._runs.pop(run_id, None)

    on_chain_start = on_tool_start = _on_start  # any input
    on_retriever_start: Any = partialmethod(_on_start, is_retriever=True)
    on_chain_end = on_chain_error = _on_end  # type: ignore[assignment]  # any result
    on_tool_end = on_tool_error = on_retriever_error = _on_end  # type: ignore[assignment]

    def run_of(self, around: Any) -> _OpenRun:
        """Return a run by its id, or that in which a call with a config is made; else no run."""
        if around is None or isinstance(around, dict):
            callbacks = (around or ensure_config()).get("callbacks")
            around = getattr(callbacks, "parent_run_id", None)  # of a manager, not of a list
        return self._runs.get(around, _NO_RUN)


class RunDocuments(OpenRuns):
    """Sees what retrievers return, too, and changes nothing."""

    ignore_llm = ignore_chat_model = ignore_retry = ignore_custom_event = True

    def __reduce__(self) -> tuple[Any, ...]:
        return run_documents, ()

    @property
    def parts(self) -> dict[str, PartSize]:
        """How many runs are open, and how many may be."""
        return {"runs": PartSize(len(self._runs), _MOST_RUNS)}

    def on_retriever_end(  # type: ignore[override]
        self, documents: Sequence[Document], /, *, run_id: Hashable, **_: Any
    ) -> None:
        """Have what a retriever returned known, and forget its run."""
        run = self._runs.pop(run_id, None)
        if run is None or run.is_nested or not isinstance(documents, (list, tuple)):
            return  # what can be read only once is not ours to read
        self._fail_open.attempt(
            lambda: known_texts().add_seen(tenant_from_config(), [seen_forms(documents)], run.root)
        )


@cache
def run_documents() -> RunDocuments:
    """Return the handler of this process."""
    return RunDocuments()


@cache
def follow_runs() -> None:
    """Have LangChain call the handler in every run that begins from now on."""
    shared: Any = run_documents()  # by default, so that it is the same in every thread and context
    register_configure_hook(ContextVar("ctxreuse_runs", default=shared), inheritable=True)


@cache
def log_nested() -> None:
    """Say once that a retriever inside of another one plans nothing."""
    _log.warning(
        "a ReuseRetriever inside of another retriever returns the documents as retrieved, because "
        "the other one would take a planned order for a ranking; wrap the outermost retriever"
    )
