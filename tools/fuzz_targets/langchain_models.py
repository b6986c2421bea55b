"""Calls of a wrapped LangChain chat model, compared with the same calls of the model inside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial, reduce
from random import Random
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import ChatPromptValue
from pydantic import PrivateAttr

from ctxreuse import ReusePlanner
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.pipeline.formatting import joined_forms
from ctxreuse.pipeline.known_texts import Form, known_texts
from fuzz_targets.mutation import Target, UsersError, json_value, mutated, text
from fuzz_targets.wrapped import (
    ARGUMENTS,
    METADATA_KEY,
    Comparison,
    Outcome,
    all_of,
    check_call,
    check_each,
    document,
    fresh,
    names,
    odd,
    some_arguments,
    some_settings,
)
from langchain_ctxreuse import ReuseChatModel

_FAILS = "fail now"
_KINDS: dict[str, type[BaseMessage]] = {
    "human": HumanMessage,
    "ai": AIMessage,
    "system": SystemMessage,
    "tool": ToolMessage,
    "function": FunctionMessage,
    "chat": ChatMessage,
}
_NEEDED = {"tool": {"tool_call_id": "c"}, "function": {"name": "f"}, "chat": {"role": "user"}}
_PARTS: list[Any] = [
    {"type": "text", "text": "[KWBC] says so"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "[ZTSN]"}},
    {"type": "reasoning", "reasoning": "as [KWBC] says", "signature": "x"},
    "[ZTSN] and a text",
]
_CALL = {"name": "f", "args": {"of": "[KWBC]", "more": ["[ZTSN]", 1]}, "id": "c"}
_BROKEN_CALL = {"name": "f", "args": '{"of": "[KWBC]', "id": "c", "error": "no JSON"}
_BESIDE: dict[str, Any] = {
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": "[KWBC]"}'}}],
    "parsed": {"cited": ["[KWBC]"]},
    METADATA_KEY: {"edit": [[[0, 3]], [], [], []], "part": None, "digest": "00"},
}
_SINGLE = ("invoke", "ainvoke", "stream", "astream")
_TOGETHER = ("batch", "abatch", "batch_as_completed", "abatch_as_completed", "generate")


class _Answering(BaseChatModel):
    """Answers with the same message each time, and records what it is called with."""

    answer: Any
    _received: list[Any] = PrivateAttr(default_factory=list)

    @property
    def received(self) -> list[Any]:
        """The messages and arguments of each call."""
        return self._received

    @property
    def _llm_type(self) -> str:
        return "answering"

    def _taken(self, messages: list[BaseMessage], arguments: dict[str, Any]) -> AIMessage:
        self._received.append((list(messages), arguments))
        if any(isinstance(one.content, str) and _FAILS in one.content for one in messages):
            raise UsersError("failed")
        return _message("ai", self.answer)  # type: ignore[return-value]

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        message = self._taken(messages, {"stop": stop, **kwargs})
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        return self._generate(*args, **kwargs)


class _Streaming(_Answering):
    """Streams its answer, a text letter by letter."""

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        message = self._taken(messages, {"stop": stop, **kwargs})
        pieces = [message.content] if isinstance(message.content, list) else message.content
        for piece in pieces:
            yield ChatGenerationChunk(message=AIMessageChunk(content=piece))
        calls = [
            {"name": "f", "args": part, "id": "c", "index": 0}
            for call in message.invalid_tool_calls
            for part in (call.get("args") or "")
        ]
        for call in calls:
            yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[call]))
        last = {"additional_kwargs": message.additional_kwargs, "tool_calls": message.tool_calls}
        yield ChatGenerationChunk(message=AIMessageChunk(content="", **last))

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in self._stream(*args, **kwargs):
            yield chunk


def _message(kind: str, fields: Mapping[str, Any]) -> BaseMessage:
    """Return a message; fields that its class refuses are set on it, as anybody may do."""
    given = fresh(dict(fields))
    try:
        return _KINDS[kind](**given)
    except Exception:  # pydantic's, or one of a hostile object in the fields
        message = _KINDS[kind](content="", **_NEEDED.get(kind, {}))
        known = given.keys() & message.__class__.model_fields
        return message.model_copy(update={name: given[name] for name in known})


def _fields(source: Random, kind: str, content: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": content, **_NEEDED.get(kind, {})}
    if kind == "ai" and source.random() < 0.5:
        fields["tool_calls"] = mutated([_CALL], source, 2)
        fields["invalid_tool_calls"] = mutated([_BROKEN_CALL], source, 1)
    if source.random() < 0.4:
        fields["additional_kwargs"] = mutated(_BESIDE, source)
    if source.random() < 0.1:
        fields["response_metadata"] = {METADATA_KEY: json_value(source)}
    if kind == "tool" and source.random() < 0.4:
        fields["artifact"] = odd(source)
    if source.random() < 0.1:
        fields["id"] = source.choice((None, "m", text(source, 2)))
    if source.random() < 0.05:
        fields[source.choice(("content", "name", "additional_kwargs", "tool_calls"))] = odd(source)
    return fields


def _content(source: Random, contexts: list[str]) -> Any:
    pieces = [text(source, 3)]
    for _ in range(source.choice((0, 0, 1, 1, 2))):
        pieces += [source.choice(contexts), text(source, 3)]
    content = "".join(pieces)
    if source.random() < 0.03:
        content += _FAILS
    if source.random() < 0.7:
        return content
    parts = mutated([source.choice(_PARTS) for _ in range(source.randrange(4))], source, 2)
    return [{"type": "text", "text": content}, *(parts if isinstance(parts, list) else [parts])]


def _prompt(source: Random, contexts: list[str]) -> Any:
    """Return a prompt: a text, or the kinds and fields of messages."""
    if source.random() < 0.2:
        return "".join((text(source, 3), source.choice(contexts), text(source, 3)))
    if source.random() < 0.03:
        return odd(source)
    kinds = [source.choice(sorted(_KINDS)) for _ in range(source.randrange(5))] + ["human"]
    return [(kind, _fields(source, kind, _content(source, contexts))) for kind in kinds]


def _config(source: Random, tenant: str) -> dict[str, Any]:
    configurable: dict[str, Any] = {"tenant": tenant} if tenant else {}
    if source.random() < 0.4:
        configurable["thread_id"] = source.choice(("t", 1, True, 10**400, text(source, 2)))
    if source.random() < 0.1:
        name = source.choice(("tenant", "thread_id", "x"))
        configurable[name] = odd(source)
    config: dict[str, Any] = {"configurable": configurable}
    if source.random() < 0.2:
        config["metadata"] = {"langgraph_node": source.choice(("agent", 1, None))}
    if source.random() < 0.1:
        config["tags"] = [text(source, 2)]
    if source.random() < 0.1:
        config["max_concurrency"] = source.choice((1, 2, None))
    return config


_ARGUMENTS = ARGUMENTS | {
    "stop": (["\n"], None),
    "model": ("other",),
    "functions": ([{"name": "f"}],),
}


def _calls(source: Random) -> dict[str, Any]:
    tenant = source.choice(("", "", "A"))
    known_contexts = [names(source) for _ in range(3)]
    rendered = _rendered(known_contexts, tenant)
    contexts = rendered if source.random() < 0.7 else [text(source)]
    calls = []
    for _ in range(source.randrange(1, 4)):
        method = source.choice((*_SINGLE, *_TOGETHER))
        count = 1 if method in _SINGLE else source.randrange(4)
        prompts = [_prompt(source, contexts) for _ in range(count)]
        calls.append((method, prompts, _config(source, tenant), some_arguments(source, _ARGUMENTS)))
    return {
        "contexts": known_contexts,
        "tenant": tenant,
        "answer": _fields(source, "ai", _content(source, [text(source)])),
        "streams": source.random() < 0.5,
        "return_exceptions": source.random() < 0.5,
        "options": some_settings(source),
        "calls": calls,
    }


def _rendered(contexts: list[list[str]], tenant: str) -> list[str]:
    """Return documents under their labels, known as an application's that renders them with us."""
    known_texts().forget_all()
    found = []
    for one in contexts:
        texts = list(map(document, one))
        forms = list(map(Form, texts))
        ids = [None] * len(forms)
        found.append(
            joined_forms(forms, texts, "\n\n", tenant, DEFAULT_TEMPLATES, labels=True, ids=ids)
        )
    return found


def _as_prompt(given: Any) -> Any:
    """Return a prompt as a model takes it, of new objects."""
    if not isinstance(given, list) or not all(
        isinstance(one, tuple) and one[0] in _KINDS and isinstance(one[1], dict) for one in given
    ):
        return given
    messages = [_message(kind, fields) for kind, fields in given]
    return messages if len(messages) % 2 else ChatPromptValue(messages=messages)


def _call_both(given: dict[str, Any]) -> None:
    """Make the same calls on a model and on one that is wrapped."""
    kind = _Streaming if given["streams"] else _Answering
    plain, inner = kind(answer=given["answer"]), kind(answer=given["answer"])
    comparison = Comparison(_rendered(given["contexts"], given["tenant"]))
    wrapper = ReuseChatModel(inner=inner, planner=ReusePlanner(), **given["options"])
    for method, prompts, config, arguments in given["calls"]:
        called = []
        for model in (plain, wrapper):
            asked = [_as_prompt(prompt) for prompt in prompts]
            if method in _TOGETHER and method != "generate":
                arguments = {**arguments, "return_exceptions": given["return_exceptions"]}
            called.append(_outcome(model, method, asked, fresh(config), fresh(arguments)))
        # of several inputs that fail another one may fail first
        both = called[1].check_as_fine_as(called[0], same_error=len(prompts) < 2)
        check = partial(check_call, comparison)
        check_each(plain.received, inner.received, check, is_whole=both)
        if both:
            Comparison().check(called[0].value, called[1].value, where=method)


def _outcome(
    model: BaseChatModel,
    method: str,
    prompts: list[Any],
    config: dict[str, Any],
    arguments: dict[str, Any],
) -> Outcome:
    if method == "generate":
        return Outcome.of(lambda: _generated(model, prompts, **arguments))
    asked = prompts if method in _TOGETHER else prompts[0]
    call = getattr(model, method)
    return Outcome.of(lambda: call(asked, config, **arguments), _READ.get(method))


def _generated(
    model: BaseChatModel, prompts: list[Any], stop: Any = None, **arguments: Any
) -> list[Any]:
    messages = [model._convert_input(prompt).to_messages() for prompt in prompts]
    found = model.generate(messages, stop, **arguments).generations
    return [one.message for answers in found for one in answers]  # type: ignore[union-attr]


def _in_order(answers: list[Any]) -> Any:
    return all_of([answer for _, answer in sorted(answers, key=lambda one: one[0])])


def _added(chunks: list[Any]) -> Any:
    return reduce(lambda one, other: one + other, chunks)


_READ: dict[str, Callable[[Any], Any]] = {
    "batch": all_of,
    "abatch": all_of,
    "batch_as_completed": _in_order,
    "abatch_as_completed": _in_order,
    "stream": _added,
    "astream": _added,
}


TARGETS = {"langchain models": Target(_calls, _call_both)}
