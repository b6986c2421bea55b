"""Retrieved LangChain documents with hostile texts and metadata, through all that plans them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda

from ctxreuse import ReusePlanner
from ctxreuse.pipeline.known_texts import known_texts
from fuzz_targets.mutation import Target, UsersError, text
from fuzz_targets.wrapped import DOCUMENTS, Comparison, Outcome, fresh, names, odd
from fuzz_targets.wrapped import document as text_of
from langchain_ctxreuse import (
    ReuseCompressor,
    ReuseRetriever,
    cited_documents,
    format_context,
)

_METHODS = ("invoke", "ainvoke", "batch", "abatch", "stream", "compress", "acompress")
_RANKING = re.compile(r"Read documents \d+(?:, \d+){0,2} first\.")


class _Retrieving(BaseRetriever):
    """Returns what it was made with, one after the other, and raises what is an exception."""

    found: Any
    shape: str

    def _get_relevant_documents(self, query: str, *, run_manager: Any, **kwargs: Any) -> Any:
        number = int(query) if query.isdigit() else 0
        found = made(self.found[number % len(self.found)])
        if found is None:
            raise UsersError("failed")
        if not isinstance(found, list):
            return found
        return {"list": list, "tuple": tuple, "iterator": iter}[self.shape](found)


def documents(source: Random) -> Any:
    """Return what a retriever finds: the fields of documents; None raises."""
    if source.random() < 0.03:
        return source.choice((None, odd(source)))
    found = [_fields(source, name) for name in names(source)]
    if source.random() < 0.3:
        found.append(fresh(source.choice(found)))
    if source.random() < 0.1:
        found.append({**source.choice(found), "metadata": {"source": text(source)}})
    return [] if source.random() < 0.05 else found


def _fields(source: Random, name: str) -> dict[str, Any]:
    words = text_of(name) if source.random() < 0.9 else text(source)
    metadata: dict[str, Any] = {"source": name}
    if source.random() < 0.3:
        metadata[source.choice(("ctxreuse", "start_index"))] = odd(source)
    if source.random() < 0.1:
        metadata[source.choice(("source", "title", text(source, 2)))] = odd(source)
    known = source.choice((None, name, name, text(source, 2)))
    return {"page_content": words, "metadata": metadata, "id": known}


def made(found: Any) -> Any:
    """Return documents of given fields; what is no list of fields is found as it is."""
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        return found
    if not all(one.keys() >= {"page_content", "metadata"} for one in found):
        return found
    made = []
    for fields in found:
        document = Document("")
        # past its checks, as code that reads a store may do it
        for name, value in fresh(fields).items():
            setattr(document, name, value)
        made.append(document)
    return made


def _retrieval(source: Random) -> dict[str, Any]:
    found = [documents(source) for _ in range(source.randrange(1, 4))]
    configurable: dict[str, Any] = {}
    if source.random() < 0.3:
        configurable["thread_id"] = source.choice(("t", 1, text(source, 2), odd(source)))
    if source.random() < 0.2:
        configurable["tenant"] = source.choice(("A", text(source, 2), odd(source)))
    return {
        "found": found,
        "options": {name: source.random() < 0.3 for name in ("annotation", "drop_repeats")},
        "is_runnable": source.random() < 0.2,
        "shape": source.choice(("list", "list", "tuple", "iterator")),
        "config": {"configurable": configurable},
        "calls": [
            (source.choice(_METHODS), source.choice(("0", "1", "2", text(source))))
            for _ in range(source.randrange(1, 4))
        ],
    }


def _retrieve(given: Mapping[str, Any]) -> None:
    """Retrieve with and without a wrapper; nothing is lost, doubled or altered."""
    known_texts().forget_all()
    retriever: Runnable[str, Any] = _Retrieving(found=given["found"], shape=given["shape"])
    if given["is_runnable"]:
        inside = retriever
        retriever = RunnableLambda(lambda query: inside.invoke(query))
    wrapper = ReuseRetriever(retriever=retriever, planner=ReusePlanner(), **given["options"])
    compressor = ReuseCompressor(planner=wrapper.planner, **given["options"])
    for method, query in given["calls"]:
        config = given["config"]
        plain = _outcome(retriever, method, query, fresh(config))
        found = _outcome(wrapper, method, query, fresh(config), compressor)
        if found.check_as_fine_as(plain):
            for one, other in zip(plain.value, found.value, strict=True):
                _check_documents(one, other, **given["options"])


def _outcome(
    retriever: Runnable[str, Any],
    method: str,
    query: str,
    config: Any,
    compressor: ReuseCompressor | None = None,
) -> Outcome:
    """Return what became of a call; a list for each query."""
    queries = [query, "1"]
    asked = retriever
    if compressor is not None and method.endswith("compress"):
        compressing: Runnable[Any, Any] = RunnableLambda(
            lambda found: compressor.compress_documents(found, query),
            afunc=lambda found: compressor.acompress_documents(found, query),
        )
        asked = retriever.retriever | compressing  # type: ignore[attr-defined]
    if method == "stream":
        return Outcome.of(lambda: retriever.stream(query, config), _read)
    if method.endswith("batch"):
        return Outcome.of(lambda: getattr(retriever, method)(queries, config), _read)
    call = asked.ainvoke if method.startswith("a") else asked.invoke
    return Outcome.of(lambda: call(query, config), lambda found: _read([found]))


def _read(found: list[Any]) -> list[Any]:
    """Return what was found, as who reads it gets it."""
    return [list(one) if isinstance(one, (tuple, Iterator)) else one for one in found]


def _check_documents(given: Any, got: Any, *, annotation: bool, drop_repeats: bool) -> None:
    if not given and not got:  # nothing was found, of whatever kind that is
        return
    if not isinstance(given, list) or not all(isinstance(one, Document) for one in given):
        Comparison().check(given, got, where="found")
        return
    left = list(given)
    for number, document in enumerate(got):
        same = next((n for n, one in enumerate(left) if _is_same(one, document)), None)
        if same is None:
            is_last = number + 1 == len(got)
            assert annotation, f"altered or doubled: {document!r}"
            assert is_last, f"altered or doubled: {document!r}"
            assert _RANKING.fullmatch(document.page_content), "other words than our own"
        else:
            del left[same]
    texts = [one.page_content for one in got]
    assert all(drop_repeats and one.page_content in texts for one in left), "a document is lost"
    _check_readers(got)


def _check_readers(found: Sequence[Document]) -> None:
    """Check what reads planned documents: each text is shown once, and none is lost."""
    if not all(isinstance(one.page_content, str) for one in found):
        return
    shown = format_context(found, labels=True)
    cited = {id(one) for one in cited_documents(shown, found)}
    for name in DOCUMENTS:
        same = {id(one) for one in found if one.page_content == text_of(name)}
        if same:
            assert shown.count(text_of(name)) == 1, f"{name} is not shown once"
            assert same <= cited, f"{name} is not cited by its label"


def _is_same(one: Document, other: Document) -> bool:
    try:
        Comparison().check(one, other)
    except AssertionError:
        return False
    return one.id is other.id or str(one.id) == str(other.id)


TARGETS = {"langchain documents": Target(_retrieval, _retrieve)}
