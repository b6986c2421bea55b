"""Recording what a LangChain application retrieves, without changing it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, NamedTuple
from uuid import UUID

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.config import RunnableConfig, ensure_config
from langchain_core.tracers.context import register_configure_hook
from langchain_core.vectorstores import VectorStore

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.scope import RequestScope
from ctxreuse.measure.traces.recording import TraceRecorder, document_title
from ctxreuse.pipeline.document_turn import best_first
from ctxreuse.pipeline.ordered_release import run_here
from ctxreuse.pipeline.prompt_turn import PromptPart
from langchain_ctxreuse.documents.run_documents import OpenRuns
from langchain_ctxreuse.messages import prompt_texts
from langchain_ctxreuse.scope import scope_from_config

_CONVERSATION_NAMES = ("thread_id", "conversation_id", "session_id")
_MOST_OPEN = 10_000
"""Remembered retrievers and chains under way: the end of one that was cancelled is told nobody."""
_MOST_CHARACTERS = 16_000_000


class _Asked(NamedTuple):
    """What was searched for, for whom, and in which run of a chain, a graph or an agent."""

    query: str
    scope: RequestScope
    root: Hashable = None


class TraceCallbackHandler(OpenRuns):
    """Records what retrievers return: `chain.invoke(question, {"callbacks": [handler]})`.

    Of retrievers inside a retriever the outermost counts. The prompts that models are sent are
    recorded, too. Tenant and conversation are those of `ctxreuse.request_context`, or of the config
    of a chain; LangChain tells no config of a retriever that is called itself, or by `batch`.
    `conversation_id`, `session_id`, and the run's metadata may name the conversation, too.

    Args:
        recorder: Writes the records.
    """

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._lock = ForkSafeLock()
        self._asked: LRUMap[Hashable, _Asked] = LRUMap(
            _MOST_OPEN, max_weight=_MOST_CHARACTERS, weight_of=lambda asked: len(asked.query)
        )
        self._found: LRUMap[Hashable, tuple[int, ...]] = LRUMap(_MOST_OPEN)  # requests of a run
        self.has_ended = False  # then nothing is recorded

    @property
    def ignore_retriever(self) -> bool:
        """Whether LangChain may skip it."""
        return self.has_ended

    ignore_chain = ignore_llm = ignore_chat_model = ignore_retriever

    def on_retriever_start(
        self,
        serialized: dict[str, Any],
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the query until the result comes."""
        self._on_start(run_id=run_id, parent_run_id=parent_run_id, is_retriever=True)
        run = self.run_of(run_id)
        if not run.is_nested:
            root = None if parent_run_id is None else run.root
            with self._lock:
                self._asked.put(run_id, _Asked(query, _scope(metadata), root))

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Record the result."""
        asked = self._on_end(documents, run_id=run_id)
        if asked is None:
            return
        request_id = _record(self._recorder, asked, documents, "LangChain retrievers")
        if request_id is not None and asked.root is not None:
            with self._lock:
                before = self._found.peek(asked.root) or ()
                self._found.put(asked.root, (*before, request_id))

    def _on_end(self, result: Any, /, *, run_id: Hashable, **_: Any) -> _Asked | None:
        """Forget a run that has ended or failed; return what it was asked if it is recorded."""
        self._runs.pop(run_id, None)
        with self._lock:
            self._found.pop(run_id)
            return self._asked.pop(run_id)

    on_chain_end = on_chain_error = on_tool_end = on_tool_error = on_retriever_error = _on_end

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: Sequence[Sequence[BaseMessage]], **run: Any
    ) -> None:
        """Record the prompts."""
        for prompt in messages:
            read = prompt_texts(prompt, run.get("invocation_params") or {})
            self._record_prompt(read.parts, read.beside, **run)

    def on_llm_start(self, serialized: dict[str, Any], prompts: Sequence[str], **run: Any) -> None:
        """Record the prompts."""
        for prompt in prompts:
            self._record_prompt([PromptPart("user", prompt)], "", **run)

    def _record_prompt(
        self,
        parts: Sequence[PromptPart],
        beside: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        root = self.run_of(parent_run_id or run_id).root or parent_run_id or run_id
        with self._lock:
            found = self._found.peek(root) or ()
        self._recorder.record_prompt(
            parts,
            beside=beside,
            retrieved=found,
            run=root,
            framework="langchain",
            scope=_scope(metadata),
        )


def _record(
    recorder: TraceRecorder, asked: _Asked, documents: Sequence[Document], source: str
) -> int | None:
    tenant = asked.scope.tenant or ""
    ranked = best_first(documents, [one.page_content for one in documents], tenant)
    return recorder.record(
        [ContextBlock(id=one.id, text=one.page_content) for one in ranked],  # type: ignore[arg-type]
        asked.query,
        conversation_id=asked.scope.conversation_id,
        tenant=tenant,
        titles=[document_title(document.metadata) for document in ranked],
        source=source,
    )


def _scope(metadata: Mapping[str, Any] | None) -> RequestScope:
    known = ensure_config().get("configurable", {})
    told = {**known, **(metadata or {})}
    named = (told[name] for name in _CONVERSATION_NAMES if told.get(name) is not None)
    config: RunnableConfig = {"configurable": {**known, "thread_id": next(named, None)}}
    return replace(scope_from_config(config), history=None)  # nothing of it is recorded


@contextmanager
def recording(recorder: TraceRecorder) -> Iterator[TraceCallbackHandler]:
    """Record what any retriever or vector store of this process returns meanwhile, in any thread.

    Args:
        recorder: Writes the records.
    """
    handler = TraceCallbackHandler(recorder)
    register_configure_hook(ContextVar("ctxreuse_recording", default=handler), inheritable=True)
    try:
        # LangChain cannot remove a handler: one that does nothing stays registered
        with recorded_searches(recorder):
            yield handler
    finally:
        handler.has_ended = True


_SEARCHES = [
    f"{awaited}{name}"
    for awaited in ("", "a")
    for name in (
        "search",
        "similarity_search",
        "similarity_search_with_score",
        "similarity_search_with_relevance_scores",
        "similarity_search_by_vector",
        "max_marginal_relevance_search",
        "max_marginal_relevance_search_by_vector",
    )
]
_ASKED = ("invoke", "ainvoke")
"""Methods of retrievers, whose callbacks say what they return."""

_is_inside: ContextVar[bool] = ContextVar("ctxreuse_inside_a_search", default=False)


@contextmanager
def recorded_searches(recorder: TraceRecorder) -> Iterator[None]:
    """Record what vector stores return that are asked directly, without a retriever."""
    replaced: list[tuple[type, str, Any]] = []

    def replace_methods(kind: type, names: Sequence[str], recorded: TraceRecorder | None) -> None:
        for name in names:
            method = kind.__dict__.get(name)
            if callable(method):
                replaced.append((kind, name, method))
                setattr(kind, name, _outermost(method, recorded))

    def made(kind: type[VectorStore], /, **options: Any) -> None:
        super(VectorStore, kind).__init_subclass__(**options)
        replace_methods(kind, _SEARCHES, recorder)

    for kind in _kinds_of(VectorStore):
        replace_methods(kind, _SEARCHES, recorder)
    for kind in _kinds_of(BaseRetriever):
        replace_methods(kind, _ASKED, None)
    VectorStore.__init_subclass__ = classmethod(made)  # type: ignore[assignment]
    try:
        yield
    finally:
        del VectorStore.__init_subclass__
        for kind, name, method in reversed(replaced):
            setattr(kind, name, method)


def _kinds_of(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds_of(one)


def _outermost(method: Callable[..., Any], recorder: TraceRecorder | None) -> Callable[..., Any]:
    """Return a method that records what it returns, unless it is called inside another one."""
    is_awaited = iscoroutinefunction(method)

    async def search(*arguments: Any, **fields: Any) -> Any:
        is_outermost, token = not _is_inside.get(), _is_inside.set(True)
        try:
            found = method(*arguments, **fields)
            found = await found if is_awaited else found
        finally:
            _is_inside.reset(token)
        if is_outermost and recorder is not None and isinstance(found, list):
            _record_search(recorder, found, arguments[1] if arguments[1:] else fields.get("query"))
        return found

    @wraps(method)
    def outermost(*arguments: Any, **fields: Any) -> Any:
        return run_here(search(*arguments, **fields))

    return wraps(method)(search) if is_awaited else outermost


def _record_search(recorder: TraceRecorder, found: Sequence[Any], query: object) -> None:
    documents = [hit[0] if isinstance(hit, tuple) and hit else hit for hit in found]
    if all(isinstance(document, Document) for document in documents):
        scope = _scope(ensure_config().get("metadata"))
        # the documents of a store belong to no run, wherever it is asked
        asked = _Asked(query if isinstance(query, str) else "", scope)
        _record(recorder, asked, documents, "LangChain vector stores")
