"""What retrievers returned, by outermost run: there a model wrapper finds what its prompt shows."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers.context import register_configure_hook

from ctxreuse.adapters.context_cuts import PlannedTexts
from ctxreuse.adapters.plan_metadata import METADATA_KEY, planned_texts
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap, PartSize, TenantLRUMap
from langchain_ctxreuse.documents.document_plans import document_block, planned_document
from langchain_ctxreuse.scope import scope_from_config, tenant_from_config

_MAX_RUNS = 100_000
_MAX_CHARACTERS = 16_000_000
_MOST_LISTS = 16

_log = logging.getLogger("ctxreuse")

Retrieved = tuple[ContextBlock, ...]
"""What one retriever returned, as blocks."""


class _OpenRun(NamedTuple):
    """A run that has not ended."""

    root: UUID
    is_retriever: bool
    is_nested: bool
    is_planned: bool = False


class RunDocuments(BaseCallbackHandler):
    """Keeps, within bounds by tenant, what retrievers return until their outermost run ends."""

    run_inline = True  # in event loops, too: another thread would cost more than the work

    def __init__(self) -> None:
        self._fail_open = FailOpen("RunDocuments", "nothing is known of the run", "bookkeeping")
        self._lock = ForkSafeLock(self._forget_all)
        self._forget_all()

    def _forget_all(self) -> None:
        self._is_changing = False
        self._ended: deque[UUID] = deque()  # runs that are still to be forgotten
        self._runs: LRUMap[UUID, _OpenRun] = LRUMap(_MAX_RUNS)
        self._tenants: LRUMap[UUID, frozenset[str]] = LRUMap(_MAX_RUNS)  # with documents, by root
        self._documents: TenantLRUMap[UUID, tuple[Retrieved | PlannedTexts, ...]] = TenantLRUMap(
            _MAX_RUNS, max_weight=_MAX_CHARACTERS, weight_of=_characters
        )

    def __copy__(self) -> RunDocuments:
        return self

    def __deepcopy__(self, memo: object) -> RunDocuments:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return run_documents, ()

    @property
    def ignore_llm(self) -> bool:
        """Models retrieve nothing."""
        return True

    @property
    def ignore_chat_model(self) -> bool:
        """As `ignore_llm`."""
        return True

    @property
    def ignore_retry(self) -> bool:
        """As `ignore_llm`."""
        return True

    @property
    def ignore_custom_event(self) -> bool:
        """As `ignore_llm`."""
        return True

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered, and how much may be."""
        with self._changing():
            return {"runs": self._runs.size, "characters": self._documents.weight_size}

    # What LangChain calls.

    def _on_start(
        self,
        serialized: Any,
        given: Any,
        /,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **_: Any,
    ) -> None:
        """Note a run and the one around it."""
        self._fail_open.attempt(lambda: self._start(run_id, parent_run_id), lambda: None)

    def _on_retrieval(
        self,
        serialized: Any,
        given: Any,
        /,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **_: Any,
    ) -> None:
        """Note a retriever's run and the one around it."""
        self._fail_open.attempt(lambda: self._start(run_id, parent_run_id, True), lambda: None)

    def _on_end(self, result: Any, /, *, run_id: UUID, **_: Any) -> None:
        """Forget a run that has ended or failed and, if it is the outermost, its documents."""
        self._fail_open.attempt(lambda: self._end(run_id), lambda: None)

    def _on_retrieved(self, documents: Sequence[Document], /, *, run_id: UUID, **_: Any) -> None:
        """Keep what a retriever returned, and forget its run."""
        self._fail_open.attempt(lambda: self._keep(run_id, documents), lambda: None)
        self._on_end(documents, run_id=run_id)

    on_chain_start: Any = _on_start
    on_tool_start: Any = _on_start
    on_retriever_start: Any = _on_retrieval
    on_retriever_end: Any = _on_retrieved
    on_chain_end: Any = _on_end
    on_chain_error: Any = _on_end
    on_tool_end: Any = _on_end
    on_tool_error: Any = _on_end
    on_retriever_error: Any = _on_end

    # What components ask.

    def of_request(
        self, around: RunnableConfig | UUID | None, tenant: str
    ) -> tuple[Retrieved, ...]:
        """Return what retrievers returned for the same request and tenant, one list each."""
        lists = self._lists(around, tenant)
        return tuple(one for one in lists if not isinstance(one, PlannedTexts))

    def planned_for(
        self, around: RunnableConfig | UUID | None, tenant: str
    ) -> tuple[PlannedTexts, ...]:
        """Return the planned documents of the same request and tenant, for their marks."""
        lists = self._lists(around, tenant)
        return tuple(one for one in lists if isinstance(one, PlannedTexts))

    def _lists(
        self, around: RunnableConfig | UUID | None, tenant: str
    ) -> tuple[Retrieved | PlannedTexts, ...]:
        if not isinstance(around, UUID):
            around = _run_around(around)
        with self._changing():
            run = None if around is None else self._runs.get(around)
            return () if run is None else self._documents.get(tenant, run.root) or ()

    def note_documents(
        self, documents: Sequence[Document], config: RunnableConfig | None = None
    ) -> None:
        """Keep planned documents that no retriever's run returns, for the run around."""
        self._fail_open.attempt(lambda: self._note(documents, config), lambda: None)

    def _note(self, documents: Sequence[Document], config: RunnableConfig | None) -> None:
        around = _run_around(config)
        with self._changing():
            run = None if around is None else self._runs.get(around)
        if run is not None:
            self._keep_planned(run.root, documents, config)

    def is_nested(self, run_id: UUID) -> bool:
        """Return whether a retriever's run is inside of another retriever's."""
        with self._changing():
            run = self._runs.get(run_id)
            return run is not None and run.is_nested

    def is_in_retriever(self, config: RunnableConfig | None) -> bool:
        """Return whether a call is made by a retriever."""
        around = _run_around(config)
        with self._changing():
            run = None if around is None else self._runs.get(around)
            return run is not None and run.is_retriever

    def note_planned(self, run_id: UUID) -> None:
        """Take note that what a run returns is planned already, and not to be planned again."""
        with self._changing():
            run = self._runs.get(run_id)
            if run is not None:
                self._runs.put(run_id, run._replace(is_planned=True))

    def _start(self, run_id: UUID, around: UUID | None, is_retriever: bool = False) -> None:
        with self._changing():
            outer = None if around is None else self._runs.get(around)
            is_nested = outer is not None and outer.is_retriever
            root = run_id if outer is None else outer.root
            self._runs.put(run_id, _OpenRun(root, is_retriever or is_nested, is_nested))

    def _end(self, run_id: UUID) -> None:
        self._ended.append(run_id)
        with self._lock:
            if not self._is_changing:
                self._forget_ended()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock, and keep ends out that Python's collector tells of in the middle."""
        with self._lock:
            self._is_changing = True
            try:
                self._forget_ended()
                yield
                self._forget_ended()
            finally:
                self._is_changing = False

    def _forget_ended(self) -> None:
        while self._ended:
            run_id = self._ended.popleft()
            self._runs.pop(run_id)
            for tenant in self._tenants.pop(run_id) or ():
                self._documents.pop(tenant, run_id)

    def _keep(self, run_id: UUID, documents: Sequence[Document]) -> None:
        with self._changing():
            run = self._runs.get(run_id)
        if run is None or run.root == run_id or run.is_nested or run.is_planned:
            return
        if not documents or not isinstance(documents, (list, tuple)):
            return  # what can be read only once is for the application to read
        if any(METADATA_KEY in one.metadata for one in documents):
            self._keep_planned(run.root, documents)
            return
        self._put(run.root, tuple(map(document_block, documents)), tenant_from_config() or "")

    def _keep_planned(
        self, root: UUID, documents: Sequence[Document], config: RunnableConfig | None = None
    ) -> None:
        scope = scope_from_config(config)
        planned = planned_texts([planned_document(one) for one in documents], scope)
        if planned is not None:
            self._put(root, planned, scope.tenant or "")

    def _put(self, root: UUID, documents: Retrieved | PlannedTexts, tenant: str) -> None:
        with self._changing():
            if self._runs.peek(root) is None:  # it has ended since
                return
            before = self._documents.get(tenant, root) or ()
            self._documents.put(tenant, root, (*before, documents)[-_MOST_LISTS:])
            tenants = self._tenants.get(root) or frozenset()
            self._tenants.put(root, tenants | {tenant})


def _characters(lists: tuple[Retrieved | PlannedTexts, ...]) -> int:
    texts = (
        one.texts if isinstance(one, PlannedTexts) else [block.text for block in one]
        for one in lists
    )
    return sum(len(text) + 100 for of_list in texts for text in of_list)


def _run_around(config: RunnableConfig | None) -> UUID | None:
    """Return the run in which a call is made; None outside of any."""
    callbacks = (ensure_config() if config is None else config).get("callbacks")
    return callbacks.parent_run_id if isinstance(callbacks, BaseCallbackManager) else None


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
