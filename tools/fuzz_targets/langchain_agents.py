"""Agents with hostile states and tool results, with the middleware and without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool
from pydantic import PrivateAttr

from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.known_texts import known_texts
from fuzz_targets.langchain_documents import documents, made
from fuzz_targets.mutation import Target, UsersError, json_value, mutated, text
from fuzz_targets.wrapped import DOCUMENTS, METADATA_KEY, Outcome, fresh, names, odd
from fuzz_targets.wrapped import document as text_of
from langchain_ctxreuse import ReuseMiddleware

_CARRIED = {
    "edit": [[[0, 3], {"left": [[[[0, 3], "b"], "[KWBC]"]], "separator": "\n"}], [3], [0], ["g"]],
    "part": None,
    "digest": "00",
    "question": "Which?",
}
_MESSAGES: dict[str, type[BaseMessage]] = {
    "human": HumanMessage,
    "ai": AIMessage,
    "tool": ToolMessage,
}


class _Scripted(BaseChatModel):
    """Calls a tool for each of its results, some at a time, then answers."""

    steps: list[int]
    _sent: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    @property
    def sent(self) -> list[list[BaseMessage]]:
        """The messages of each call."""
        return self._sent

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        step = len(self._sent)
        self._sent.append(list(messages))
        answer = AIMessage("It is so [KWBC].")
        if step < len(self.steps):
            first = sum(self.steps[:step])
            numbers = range(first, first + self.steps[step])
            calls = [{"name": "search", "args": {"number": n}, "id": f"c{n}"} for n in numbers]
            answer = AIMessage("", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=answer)])


class _Search(BaseTool):
    """Returns the results that it was made with."""

    name: str = "search"
    description: str = "Finds documents."
    response_format: Any = "content_and_artifact"
    results: list[Any]

    def _run(self, number: int = 0, **kwargs: Any) -> Any:
        kind, found = self.results[number]
        if kind == "raises":
            raise UsersError("failed")
        if kind == "memories":
            return json.dumps(found), found
        retrieved = made(found)
        if kind != "documents" or not isinstance(retrieved, list):
            return found, retrieved
        texts = [getattr(one, "page_content", one) for one in retrieved]
        return "\n\n".join(map(str, texts)), retrieved


def _result(source: Random) -> tuple[str, Any]:
    kind = source.choice(("documents", "documents", "memories", "text", "parts", "raises"))
    if kind == "documents":
        return kind, documents(source)
    if kind == "memories":
        found = [{"id": name, "memory": text_of(name), "score": 0.5} for name in names(source)]
        return kind, mutated({"results": found}, source, 2) if source.random() < 0.4 else found
    if kind == "parts":
        return kind, [{"type": "text", "text": text(source)}, source.choice(({}, "a", "b"))]
    return kind, "\n\n".join([text(source), *map(text_of, names(source)), text(source)])


def _state(source: Random) -> list[tuple[str, dict[str, Any]]]:
    """Return the kinds and fields of the messages that an agent begins with."""
    kinds = [source.choice(sorted(_MESSAGES)) for _ in range(source.randrange(4))] + ["human"]
    return [(kind, _fields(source, kind)) for kind in kinds]


def _fields(source: Random, kind: str) -> dict[str, Any]:
    shown = "\n\n".join(map(text_of, names(source)))
    content: Any = source.choice((text(source), text(source) + shown + text(source), "Which?"))
    if source.random() < 0.2:
        content = [{"type": "text", "text": content}, {"type": "image_url", "image_url": {}}]
    fields: dict[str, Any] = {"content": content}
    if source.random() < 0.3:
        carried = source.choice((mutated(_CARRIED, source), json_value(source), odd(source)))
        fields["additional_kwargs"] = {METADATA_KEY: carried}
    if kind == "tool":
        fields["tool_call_id"] = "c"
        if source.random() < 0.3:
            fields["artifact"] = odd(source)
    if source.random() < 0.2:
        fields["id"] = source.choice(("m", "m", text(source, 2)))
    return fields


def _agent(source: Random) -> dict[str, Any]:
    steps = [source.randrange(1, 4) for _ in range(source.randrange(3))]
    configurable: dict[str, Any] = {"thread_id": source.choice(("t", 1, text(source, 2)))}
    if source.random() < 0.2:
        configurable["tenant"] = source.choice(("A", odd(source)))
    return {
        "steps": steps,
        "results": [_result(source) for _ in range(sum(steps))],
        "found": documents(source) if source.random() < 0.5 else "no retriever",
        "splits": source.random() < 0.3,
        "states": [_state(source) for _ in range(source.choice((1, 1, 2)))],
        "configurable": configurable,
        "is_awaited": source.random() < 0.3,
    }


def _run_agents(given: Mapping[str, Any]) -> None:
    """Run an agent without the middleware and with it, on the same states."""
    known_texts().forget_all()
    retriever = None
    if given["found"] != "no retriever":
        retriever = RunnableLambda(lambda query: _found(given["found"]))
    middleware = ReuseMiddleware(
        retriever=retriever,
        tools=["search"] if given["splits"] else None,
    )
    for state in given["states"]:
        outcomes = []
        for used in ([], [middleware]):
            model = _Scripted(steps=given["steps"])
            agent = create_agent(model, [_Search(results=given["results"])], middleware=used)
            config = {"configurable": fresh(given["configurable"])}
            outcomes.append((_outcome(agent, state, config, given["is_awaited"]), model.sent))
        (plain, plain_sent), (planned, sent) = outcomes
        if retriever is not None and not _finds_documents(given["found"]):
            # what the retriever raises is not caught, and what is no documents is named
            assert planned.error is None or isinstance(
                planned.error, (UsersError, InvalidRequestError, type(plain.error))
            )
        elif planned.check_as_fine_as(plain):
            adds = retriever is not None
            _check_messages(plain.value["messages"], planned.value["messages"], adds, given)
            assert len(sent) == len(plain_sent)
            for before, after in zip(plain_sent, sent, strict=True):
                _check_messages(before, after, adds, given, is_sent=True)


def _finds_documents(given: Any) -> bool:
    found = made(given)
    return isinstance(found, list) and all(isinstance(one, Document) for one in found)


def _found(given: Any) -> Any:
    if given is None:
        raise UsersError("failed")
    return made(given)


def _outcome(agent: Any, state: Sequence[Any], config: Any, is_awaited: bool) -> Outcome:
    messages = [_MESSAGES[kind](**fresh(fields)) for kind, fields in state]
    asked = {"messages": messages}
    return Outcome.of(lambda: (agent.ainvoke if is_awaited else agent.invoke)(asked, config))


def _check_messages(
    plain: Sequence[BaseMessage],
    planned: Sequence[BaseMessage],
    adds: bool,
    given: Mapping[str, Any],
    is_sent: bool = False,
) -> None:
    """Check that each message shows what it shows without the middleware.

    The middleware `adds` what a retriever found to one of them; a model, to which they are
    sent, is pointed to what it has seen.
    """
    assert [type(one) for one in plain] == [type(one) for one in planned]
    before = ""
    found = _found_names(given["found"]) if adds else ""
    for message, other in zip(plain, planned, strict=True):
        shown, now = str(message.text), str(other.text)
        before += now
        for name in DOCUMENTS:
            count, shown_before = _count(now, name), _count(shown, name)
            least = min(1, shown_before)
            if is_sent and not count and "See also [" in now:
                assert not least or _count(before, name), f"{name} is pointed to, not shown"
                continue
            assert count >= least, f"{name} is lost from {message.type}"
            most = shown_before + (isinstance(other, HumanMessage) and name in found)
            assert count <= most, f"{name} is doubled in {message.type}"
        if isinstance(message, HumanMessage):
            assert now.endswith(shown) or isinstance(message.content, list), "a question is altered"
        if isinstance(message, AIMessage):
            assert message.content == other.content


def _count(words: str, name: str) -> int:
    """Return how often a text shows a document, as it is or as JSON."""
    forms = {text_of(name), *(json.dumps(text_of(name), ensure_ascii=one)[1:-1] for one in (0, 1))}
    return sum(map(words.count, forms))


def _found_names(found: Any) -> str:
    texts = [one.get("page_content") for one in found or () if isinstance(one, dict)]
    return "".join(name for name in DOCUMENTS if text_of(name) in texts)


TARGETS = {"langchain agents": Target(_agent, _run_agents)}
