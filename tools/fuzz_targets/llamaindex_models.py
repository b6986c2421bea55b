"""Calls of a wrapped LlamaIndex model, compared with the same calls of the model inside."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ImageBlock,
    LLMMetadata,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import NodeWithScore, TextNode

from ctxreuse import request_context
from ctxreuse.pipeline.known_texts import known_texts
from fuzz_targets.mutation import Target, UsersError, json_value, mutated, text
from fuzz_targets.wrapped import (
    ARGUMENTS,
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
from llamaindex_ctxreuse import ReuseLLM, format_context

_FAILS = "fail now"
_ROLES = ("user", "assistant", "system", "tool", "function", "developer", "chatbot", "model")
_CHATS = ("chat", "achat", "stream_chat", "astream_chat")
_COMPLETIONS = ("complete", "acomplete", "stream_complete", "astream_complete")
_BATCHES = ("achat_batch", "acomplete_batch", "chat_batch", "complete_batch")
_BESIDE: dict[str, Any] = {
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": "[KWBC]"}'}}],
    "name": "ann",
}


class _Answering(LLM):
    """Answers with the same message each time, and records what it is called with."""

    answer: Any
    additional_kwargs: Any = None
    window: int = 100_000
    _received: list[Any] = PrivateAttr(default_factory=list)

    @property
    def received(self) -> list[Any]:
        """The prompt and the arguments of each call."""
        return self._received

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=self.window)

    def _taken(self, prompt: Any, arguments: Mapping[str, Any]) -> None:
        always = self.additional_kwargs if isinstance(self.additional_kwargs, dict) else {}
        self._received.append((prompt, {**arguments, **always}))  # as LlamaIndex's OpenAI does
        texts = [prompt] if isinstance(prompt, str) else [one.content for one in prompt]
        if any(isinstance(one, str) and _FAILS in one for one in texts):
            raise UsersError("failed")

    def _chatted(self, messages: Any, arguments: Mapping[str, Any]) -> ChatResponse:
        self._taken(list(messages), arguments)
        return ChatResponse(message=message(self.answer))

    def _completed(self, prompt: str, arguments: Mapping[str, Any]) -> CompletionResponse:
        self._taken(prompt, arguments)
        words = message(self.answer).content or ""
        kwargs = self.answer.get("additional_kwargs")
        return CompletionResponse(
            text=words, additional_kwargs=dict(kwargs) if type(kwargs) is dict else {}
        )

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._chatted(messages, kwargs)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._chatted(messages, kwargs)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        return _pieces(self._chatted(messages, kwargs))

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        return _apieces(self._chatted(messages, kwargs))

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._completed(prompt, {"formatted": formatted, **kwargs})

    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return self._completed(prompt, {"formatted": formatted, **kwargs})

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        return _pieces(self._completed(prompt, {"formatted": formatted, **kwargs}))

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        return _apieces(self._completed(prompt, {"formatted": formatted, **kwargs}))


def answering(answer: Mapping[str, Any], window: int = 100_000) -> Any:
    """Return a model that answers with a message of these fields; `received` has its calls."""
    return _Answering(answer=answer, window=window)


def _pieces(response: Any) -> Generator[Any, None, None]:
    """Yield a response letter by letter, each piece with all that has come."""
    if isinstance(response, CompletionResponse):
        for end, letter in enumerate(response.text, start=1):
            yield response.model_copy(update={"text": response.text[:end], "delta": letter})
        return
    words = response.message.content
    for end, letter in enumerate(words if isinstance(words, str) else "", start=1):
        so_far = ChatMessage(role="assistant", content=words[:end])
        yield ChatResponse(message=so_far, delta=letter)
    yield response.model_copy(update={"delta": None})


async def _apieces(response: Any) -> AsyncGenerator[Any, None]:
    for piece in _pieces(response):
        yield piece


def message(fields: Mapping[str, Any]) -> ChatMessage:
    """Return a message; what its class refuses is set on it, as anybody may do."""
    given = fresh(dict(fields))
    parts = [_BLOCKS[kind](**values) for kind, values in given.pop("blocks")]
    try:
        return ChatMessage(blocks=parts, **given)
    except Exception:  # pydantic's, or one of a hostile object in the fields
        made = ChatMessage(role="user", blocks=parts)
        return made.model_copy(update={name: given[name] for name in given if name != "role"})


_BLOCKS: dict[str, Any] = {
    "text": TextBlock,
    "image": ImageBlock,
    "call": ToolCallBlock,
    "thought": ThinkingBlock,
}


def fields_of(source: Random, role: str, words: str) -> dict[str, Any]:
    """Return the fields of a message that says something."""
    parts: list[tuple[str, dict[str, Any]]] = [("text", {"text": words})]
    for _ in range(source.choice((0, 0, 0, 1, 2))):
        arguments = source.choice(({"of": "[KWBC]"}, '{"of": "[KWBC]"}', json_value(source)))
        arguments = arguments if isinstance(arguments, (dict, str)) else {"of": arguments}
        part = source.choice(
            (
                ("text", {"text": text(source)}),
                ("image", {"url": "http://x/y.png"}),
                ("call", {"tool_name": "f", "tool_kwargs": arguments, "tool_call_id": "c"}),
                ("thought", {"content": "as [KWBC] says"}),
            )
        )
        parts.insert(source.randrange(len(parts) + 1), part)
    fields: dict[str, Any] = {"role": role, "blocks": parts if source.random() < 0.95 else []}
    if source.random() < 0.3:
        fields["additional_kwargs"] = mutated(_BESIDE, source)
    if source.random() < 0.03:
        fields[source.choice(("additional_kwargs", "content"))] = odd(source)
    return fields


def _words(source: Random, contexts: list[str]) -> str:
    pieces = [text(source, 3)]
    for _ in range(source.choice((0, 1, 1, 2))):
        pieces += [source.choice(contexts), f"So {text(source, 3)}"]  # each on its own
    if source.random() < 0.03:
        pieces.append(_FAILS)
    return "\n".join(pieces)


def _chat(source: Random, contexts: list[str]) -> Any:
    if source.random() < 0.02:
        return odd(source)
    roles = [source.choice(_ROLES) for _ in range(source.randrange(5))] + ["user"]
    return [fields_of(source, role, _words(source, contexts)) for role in roles]


def _calls(source: Random) -> dict[str, Any]:
    shown = [names(source) for _ in range(3)]
    tenant = source.choice((None, None, "A"))
    contexts = _rendered(shown, tenant)
    contexts = contexts if source.random() < 0.7 else [text(source)]
    calls = []
    for _ in range(source.randrange(1, 4)):
        method = source.choice((*_CHATS, *_CHATS, *_COMPLETIONS, *_BATCHES))
        count = source.randrange(4) if method in _BATCHES else 1
        make = _chat if "chat" in method else _words
        prompts = [make(source, contexts) for _ in range(count)]
        calls.append((method, prompts, some_arguments(source, ARGUMENTS)))
    return {
        "contexts": shown,
        "tenant": tenant,
        "conversation": source.choice((None, "c", 1, text(source, 2))),
        "answer": fields_of(source, "assistant", text(source)),
        "return_exceptions": source.random() < 0.5,
        "options": some_settings(source),
        "always": source.choice((None, {}, {"extra_body": {"a": 1}, "x": 2}, odd(source))),
        "calls": calls,
    }


def _rendered(shown: list[list[str]], tenant: str | None) -> list[str]:
    """Return contexts that the application has rendered; nothing else is known."""
    known_texts().forget_all()
    with request_context(tenant=tenant):
        return [
            format_context([_node(one) for one in of_context], "{content}", labels=True)
            for of_context in shown
        ]


def _node(name: str) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=name, text=document(name)))


def _call_both(given: dict[str, Any]) -> None:
    """Make the same calls on a model and on one that is wrapped."""
    comparison = Comparison(_rendered(given["contexts"], given["tenant"]))
    plain, inner = (
        _Answering(answer=given["answer"], additional_kwargs=fresh(given["always"]))
        for _ in range(2)
    )
    wrapper = ReuseLLM(inner=inner, **given["options"])
    # a copy of the model without the engine's options is called then
    inner = wrapper._model  # type: ignore[assignment]
    for method, prompts, arguments in given["calls"]:
        outcomes = []
        for model in (plain, wrapper):
            asked = [_as_prompt(prompt) for prompt in prompts]
            options = fresh(arguments)
            if method in _BATCHES:
                options["return_exceptions"] = given["return_exceptions"]
            with request_context(given["tenant"], given["conversation"]):
                outcomes.append(_outcome(model, method, asked, options))
        both = outcomes[1].check_as_fine_as(outcomes[0], same_error=len(prompts) < 2)
        check = partial(check_call, comparison)
        check_each(plain.received, inner.received, check, is_whole=both)
        if both:
            Comparison().check(outcomes[0].value, outcomes[1].value, where=method)


def _as_prompt(given: Any) -> Any:
    if not isinstance(given, list) or not all(
        isinstance(one, dict) and "blocks" in one for one in given
    ):
        return given
    return [message(fields) for fields in given]


def _outcome(model: LLM, method: str, prompts: list[Any], options: dict[str, Any]) -> Outcome:
    if method in _BATCHES and not isinstance(model, ReuseLLM):
        return Outcome.of(lambda: _each(model, method, prompts, options))
    call = getattr(model, method)
    asked, read = (prompts, all_of) if method in _BATCHES else (prompts[0], _added)
    return Outcome.of(lambda: call(asked, **options), read)


def _each(model: LLM, method: str, prompts: list[Any], options: dict[str, Any]) -> list[Any]:
    """Return what a batch returns, from a model that need not have any."""
    options = dict(options)
    returns = options.pop("return_exceptions")
    call = model.chat if "chat" in method else model.complete
    found = [Outcome.of(lambda prompt=prompt: call(prompt, **options)) for prompt in prompts]  # type: ignore[misc]
    for one in found:
        if one.error is not None and not returns:
            raise one.error
    return [one.value if one.error is None else type(one.error) for one in found]


def _added(found: Any) -> Any:
    """Return what a stream has said in all: its deltas together, and its last piece."""
    if not isinstance(found, list) or not found:
        return found
    deltas = "".join(piece.delta or "" for piece in found)
    return deltas, found[-1].model_copy(update={"delta": None})


TARGETS = {"llamaindex models": Target(_calls, _call_both)}
