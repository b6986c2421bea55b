"""Retrieved LlamaIndex nodes with hostile texts and metadata, and chats about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import (
    ImageNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    TextNode,
)

from ctxreuse import request_context
from ctxreuse.errors import InvalidRequestError
from fuzz_targets.llamaindex_models import answering, fields_of, message
from fuzz_targets.mutation import Target, UsersError, text
from fuzz_targets.wrapped import DOCUMENTS, Comparison, Outcome, fresh, names, odd
from fuzz_targets.wrapped import document as text_of
from llamaindex_ctxreuse import (
    ReuseChatEngine,
    ReusePostprocessor,
    ReuseRetriever,
    cited_nodes,
    format_context,
)

_METHODS = ("retrieve", "aretrieve", "postprocess", "apostprocess")


class _Nodes(BaseRetriever):
    """Returns what it was made with; raises where that is None."""

    def __init__(self, found: Any) -> None:
        self._found = found
        super().__init__()

    def _retrieve(self, query_bundle: Any) -> Any:
        if self._found is None:
            raise UsersError("failed")
        return nodes(self._found)


def found_nodes(source: Random) -> Any:
    """Return what a retriever finds: the fields of nodes; None raises."""
    if source.random() < 0.03:
        return source.choice((None, odd(source)))
    found = [_fields(source, name) for name in names(source)]
    if source.random() < 0.3:
        found.append(fresh(source.choice(found)))
    return [] if source.random() < 0.05 else found


def _fields(source: Random, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"source": name}
    if source.random() < 0.1:
        metadata[source.choice(("source", "title", text(source, 2)))] = odd(source)
    fields: dict[str, Any] = {
        "text": text_of(name) if source.random() < 0.9 else text(source),
        "metadata": metadata,
        "id_": source.choice((name, name, text(source, 2))),
    }
    if source.random() < 0.1:
        fields["text_template"] = source.choice(("{content}", "{metadata_str}: {content}", "x"))
    if source.random() < 0.1:
        other = RelatedNodeInfo(node_id=source.choice(DOCUMENTS))
        fields["relationships"] = {NodeRelationship.NEXT: other}
    if source.random() < 0.05:
        fields["excluded_llm_metadata_keys"] = source.choice((["source"], [text(source, 2)]))
    score = source.choice((None, None, 0.5, 0.9, 0, -1e308, math.inf, math.nan))
    return {"fields": fields, "score": score, "is_image": source.random() < 0.1}


def nodes(found: Any) -> Any:
    """Return nodes of given fields; what is no list of them is found as it is."""
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        return found
    if not all("fields" in one for one in found):
        return found
    made = []
    for one in found:
        node = (ImageNode if one["is_image"] else TextNode)(id_=one["fields"]["id_"])
        for name, value in fresh(one["fields"]).items():
            setattr(node, name, value)
        made.append(NodeWithScore(node=node, score=one["score"]))
    return made


def _retrieval(source: Random) -> dict[str, Any]:
    return {
        "calls": [(source.choice(_METHODS), found_nodes(source)) for _ in range(3)],
        "query": text(source),
        "annotation": source.random() < 0.3,
        "drop_repeats": source.random() < 0.3,
        "mode": source.choice(tuple(MetadataMode)),
        "template": source.choice(
            (None, None, "# {source}: {content}", "{metadata_str} {content}")
        ),
        "labels": source.random() < 0.5,
        "tenant": source.choice((None, "A", text(source, 2))),
    }


def _retrieve(given: Mapping[str, Any]) -> None:
    """Retrieve with and without a wrapper; nothing is lost, doubled or altered."""
    options = {"annotation": given["annotation"], "drop_repeats": given["drop_repeats"]}
    postprocessor = ReusePostprocessor(**options, metadata_mode=given["mode"])
    for method, found in given["calls"]:
        query, retrieve = given["query"], method.replace("postprocess", "retrieve")
        plain = Outcome.of(lambda: getattr(_Nodes(found), retrieve)(query))  # noqa: B023
        with request_context(tenant=given["tenant"]):
            if method.endswith("retrieve"):
                wrapper = ReuseRetriever(
                    _Nodes(found),
                    planner=postprocessor.planner,
                    metadata_mode=given["mode"],
                    **options,
                )
                planned = Outcome.of(lambda: getattr(wrapper, method)(query))  # noqa: B023
            elif not isinstance(plain.value, list):
                continue
            else:
                call = getattr(postprocessor, f"{method}_nodes")
                planned = Outcome.of(lambda: call(plain.value, query_str=query))  # noqa: B023
            if planned.check_as_fine_as(plain):
                _check_nodes(plain.value, planned.value, given)


def _check_nodes(found: Any, got: Any, given: Mapping[str, Any]) -> None:
    if not isinstance(found, list) or not all(isinstance(one, NodeWithScore) for one in found):
        Comparison().check(found, got, where="found")
        return
    rest = [one for one in got if type(one.node).__name__ != "AnnotationNode"]
    for node in found:
        assert given["drop_repeats"] or any(_is_same(node, one) for one in rest), f"lost: {node!r}"
    for node in rest:
        assert any(_is_same(one, node) for one in found), f"altered: {node!r}"
    assert len(rest) == len(found) or given["drop_repeats"], "another number of nodes"
    if _rendered(rest, given["mode"]).error is not None:
        return
    shown_as = {"text_template": given["template"], "metadata_mode": given["mode"]}
    shown = Outcome.of(lambda: format_context(rest, labels=given["labels"], **shown_as))
    if shown.error is not None:  # of what metadata holds, or lacks
        return
    mode = given["mode"] if given["template"] is None else MetadataMode.NONE
    for words in _rendered(rest, mode).value:
        assert words in shown.value, "a node is not shown"
    if given["labels"]:
        cited = cited_nodes(shown.value, rest, **shown_as)
        assert len(cited) == len(rest), "a node is not cited by its label"


def _rendered(found: Sequence[NodeWithScore], mode: MetadataMode) -> Outcome:
    return Outcome.of(lambda: [one.node.get_content(mode) for one in found])


def _is_same(one: NodeWithScore, other: NodeWithScore) -> bool:
    """Return whether a node says what another one says."""
    given, got = one.node, other.node
    try:
        Comparison().check(given.metadata, got.metadata)
        Comparison().check(one.score, other.score)
        Comparison().check(given.relationships, got.relationships)
    except AssertionError:
        return False
    return given.node_id == got.node_id and _text(given) == _text(got)


def _text(node: Any) -> Any:
    return node.text if isinstance(node.text, str) else repr(node.text)


def _chat(source: Random) -> dict[str, Any]:
    questions = ["Which?", text(source), text(source), odd(source)]
    return {
        "found": [found_nodes(source) for _ in range(3)],
        "turns": [
            (
                source.choice(("chat", "achat", "stream_chat", "astream_chat")),
                source.choice(questions[:3] if source.random() < 0.95 else questions),
            )
            for _ in range(source.randrange(1, 4))
        ],
        "answer": {"role": "assistant", "blocks": [("text", {"text": text(source)})]},
        "history": [
            fields_of(source, source.choice(("user", "assistant", "system")), text(source))
            for _ in range(source.choice((0, 0, 2)))
        ],
        "system": source.choice((None, text(source))),
        "skip_condense": source.random() < 0.7,
        "window": source.choice((100_000, 3_900, 100)),
        "mode": source.choice((MetadataMode.LLM, MetadataMode.NONE)),
    }


def _lead_chat(given: Mapping[str, Any]) -> None:
    """Lead a chat; each prompt shows what was found, and begins with what was sent before."""
    retriever = _Nodes([])
    model = answering(given["answer"], given["window"])
    try:
        engine = ReuseChatEngine(
            retriever,
            model,
            system_prompt=given["system"],
            chat_history=[message(one) for one in given["history"]],
            skip_condense=given["skip_condense"],
            metadata_mode=given["mode"],
        )
    except UsersError as error:  # of a message that cannot be copied
        raise InvalidRequestError("refused") from error
    refused: Exception | None = None
    prompts: list[list[str | None]] = []
    for number, (method, question) in enumerate(given["turns"]):
        retriever._found = given["found"][number]
        plain = Outcome.of(lambda: retriever.retrieve("x"))
        renders = _rendered(plain.value, given["mode"])
        history = engine.chat_history
        model.received.clear()
        turn = Outcome.of(lambda: _turn(engine, method, question))  # noqa: B023
        if turn.error is not None:
            # a turn that failed is no part of the chat
            Comparison().check(history, engine.chat_history, where="history")
            condenses = not given["skip_condense"]  # by words of LlamaIndex's, which may fail
            if not (plain.error or renders.error or condenses) and isinstance(question, str):
                raise turn.error
            refused = turn.error
            continue
        sent = model.received[-1][0]
        prompts.append([one.content for one in sent])
        if given["window"] == 100_000:
            for before, after in pairwise(prompts):
                assert after[: len(before)] == before, "what was sent is altered"
        _check_prompt(sent, renders.value or (), str(question))
    if refused is not None:
        raise InvalidRequestError("refused") from refused


async def _turn(engine: ReuseChatEngine, method: str, question: Any) -> Any:
    call = getattr(engine, method)
    answer = await call(question) if method.startswith("a") else call(question)
    if method == "stream_chat":
        return "".join(answer.response_gen)
    if method == "astream_chat":
        return "".join([piece async for piece in answer.async_response_gen()])
    return answer.response


def _check_prompt(sent: Sequence[ChatMessage], found: Sequence[str], question: str) -> None:
    whole = "\n".join(one.content or "" for one in sent)
    content = sent[-1].content or ""
    assert content.endswith(question), "the question is altered"
    for name in DOCUMENTS:
        if any(text_of(name) in shown for shown in found):
            assert text_of(name) in whole, f"{name} is lost"
            assert content.count(text_of(name)) <= sum(text_of(name) in one for one in found)


TARGETS = {
    "llamaindex nodes": Target(_retrieval, _retrieve),
    "llamaindex chats": Target(_chat, _lead_chat),
}
