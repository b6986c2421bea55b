"""A LlamaIndex model that plans the contexts inside its prompts and schedules the prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from llama_index.core.async_utils import DEFAULT_NUM_WORKERS, asyncio_run
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from ctxreuse.context.checks import checked_integer
from ctxreuse.context.reported_usage import ReportedTokens, usage_in
from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.pipeline.engine_options import EngineOptions
from ctxreuse.pipeline.ordered_release import as_they_end, planned_aside, run_here
from ctxreuse.pipeline.prompt_turn import PlannedPrompt, PromptPart, ScopedPrompt, Wire, WirePrompt
from ctxreuse.serving.planning_fields import PlansPrompts
from llamaindex_ctxreuse.llm.delegating_llm import DELEGATED, DelegatingLLM
from llamaindex_ctxreuse.llm.planned_prompts import (
    messages_with,
    prompt_parts,
    said_beside,
    takes_cache_points,
    text_positions,
    with_cache_points,
)
from llamaindex_ctxreuse.nodes.run_nodes import follow_runs, root_of_call

_ENGINE_OPTIONS = ("extra_body", "extra_headers")

_Answer = TypeVar("_Answer")
_Answer_co = TypeVar("_Answer_co", covariant=True)


def reported_usage(answer: object) -> ReportedTokens | None:
    """Return what the usage of a model's answer says; None if it has none."""
    if not isinstance(answer, CompletionResponse | ChatResponse):
        return None
    return usage_in(answer.raw)


@dataclass(frozen=True, slots=True)
class _ModelCall(Generic[_Answer_co]):
    prompt: ScopedPrompt
    send: Callable[[PlannedPrompt], _Answer_co]
    wire: Wire | None = None  # None where it is unknown


class ReuseLLM(PlansPrompts, DelegatingLLM):
    """A model whose prompts hit the engine's prefix cache.

    Planned are contexts in new messages: nodes that a retriever returned, or that `format_context`
    put in, at least two, with the same separator between each two. They change places; all else
    stays. `prompt_statistics` counts what was planned, and why others were not. Messages of earlier
    turns are sent as they were sent then. Answers are the inner model's own.

    Calls that come within `window_s` from any tasks and threads are planned together and sent in
    the planned order. All else is the inner model's. A planning fault lets prompts through as
    given. `ctxreuse.request_context` says tenant and conversation of a call.

    Args:
        inner: The model to wrap. Of `OpenAILike` set `context_window`: its default of 3,900 tokens
            makes query engines split a context over several calls.
        planner: Plans the contexts; None takes the one that this process has for the engine.
        window_s: Seconds for which a call that may show a context waits for others; 0 sends at
            once. A synchronous call on a running event loop never waits.
        strategy: "reuse", "paper" or "none".
        prime: Whether calls are sent besides, up to where later prompts will likely part from one,
            for engines that keep states at junctions: `ReusePlanner(cache="vllm(states=...)")`.
            For chat models that speak OpenAI's protocol.
        send_cache_salt: Whether each call carries its tenant, hashed, as vLLM's `cache_salt`, for
            models that take `extra_body`.
        send_session_id: Whether each call carries its conversation, hashed, for routers; "group"
            sends the id of the prompt's prefix group instead. For models that take `extra_headers`.
        session_header: The header of the session id, such as "x-smg-routing-key".
        salt_key: A secret for both hashes; processes that share it share the cache.
        find_retrieved: Whether nodes are planned that a retriever returned, and not only those that
            `format_context` put in.
    """

    _usage_of = staticmethod(reported_usage)
    _follow_runs = staticmethod(follow_runs)
    _model: LLM = PrivateAttr()
    _always_sent: Mapping[str, Any] = PrivateAttr()

    def _build(self) -> None:
        super()._build()
        self._model, self._always_sent = self.inner, {}
        always: Any = getattr(self.inner, "additional_kwargs", None)
        is_asked = self.send_cache_salt or self.send_session_id or self.planner.wire_cache.is_routed
        if not is_asked or not isinstance(always, dict):
            return
        # the model is parted from its engine options: a call's would replace them as a whole
        options = {name: always[name] for name in _ENGINE_OPTIONS if always.get(name)}
        if options:
            rest = {name: value for name, value in always.items() if name not in options}
            self._model = self.inner.model_copy(update={"additional_kwargs": rest})
            self._always_sent = options

    @classmethod
    def class_name(cls) -> str:
        """Return the name that serialized models carry."""
        return "ReuseLLM"

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the inner model's answer to the messages."""
        return self._answer(self._chat(self._model.chat, messages, kwargs))

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat`, awaited."""
        return await self._aanswer(self._chat(self._model.achat, messages, kwargs))

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Return the inner model's answer to the messages, piece by piece."""
        return self._stream(self._chat(self._model.stream_chat, messages, kwargs))

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat`, awaited."""
        return self._astream(self._chat(self._model.astream_chat, messages, kwargs))

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Return the inner model's completion of the prompt."""
        return self._answer(self._completion(self._model.complete, prompt, kwargs, formatted))

    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete`, awaited."""
        call = self._completion(self._model.acomplete, prompt, kwargs, formatted)
        return await self._aanswer(call)

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Return the inner model's completion of the prompt, piece by piece."""
        call = self._completion(self._model.stream_complete, prompt, kwargs, formatted)
        return self._stream(call)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete`, awaited."""
        call = self._completion(self._model.astream_complete, prompt, kwargs, formatted)
        return self._astream(call)

    def structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inner model's structured answer to the prompt."""
        return self._answer(self._structured(self._model.structured_predict, *args, **kwargs))

    async def astructured_predict(self, *args: Any, **kwargs: Any) -> Any:
        """`structured_predict`, awaited."""
        call = self._structured(self._model.astructured_predict, *args, **kwargs)
        return await self._aanswer(call)

    def stream_structured_predict(self, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        """Return the inner model's structured answer to the prompt as it grows."""
        call = self._structured(self._model.stream_structured_predict, *args, **kwargs)
        return self._stream(call)

    async def astream_structured_predict(
        self, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """`stream_structured_predict`, awaited."""
        call = self._structured(self._model.astream_structured_predict, *args, **kwargs)
        return self._astream(call)

    async def achat_batch(
        self,
        batch: Sequence[Sequence[ChatMessage]],
        *,
        workers: int = DEFAULT_NUM_WORKERS,
        show_progress: bool = False,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[ChatResponse]:
        """Return one answer a chat, in the order given; they are planned together.

        Args:
            batch: The messages of each chat.
            workers: How many are under way at a time.
            show_progress: Whether to show a progress bar.
            return_exceptions: Whether a failed chat's exception stands in its answer's place. Else
                the first one is raised, and the chats that still wait are not sent.
            **kwargs: For the inner model, with each chat.
        """
        calls = [self._chat(self._model.achat, messages, kwargs) for messages in batch]
        return await self._send_batch(calls, workers, show_progress, return_exceptions)

    async def acomplete_batch(
        self,
        prompts: Sequence[str],
        *,
        workers: int = DEFAULT_NUM_WORKERS,
        show_progress: bool = False,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[CompletionResponse]:
        """Return the completions of many prompts, as `achat_batch` does for chats."""
        calls = [self._completion(self._model.acomplete, prompt, kwargs) for prompt in prompts]
        return await self._send_batch(calls, workers, show_progress, return_exceptions)

    def chat_batch(
        self, batch: Sequence[Sequence[ChatMessage]], **kwargs: Any
    ) -> list[ChatResponse]:
        """`achat_batch`, where no event loop runs."""
        return list(asyncio_run(self.achat_batch(batch, **kwargs)))

    def complete_batch(self, prompts: Sequence[str], **kwargs: Any) -> list[CompletionResponse]:
        """`acomplete_batch`, where no event loop runs."""
        return list(asyncio_run(self.acomplete_batch(prompts, **kwargs)))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in DELEGATED and self._model is not self.inner:
            setattr(self._model, name, value)

    def _chat(
        self,
        method: Callable[..., _Answer],
        messages: Sequence[ChatMessage],
        arguments: dict[str, Any],
    ) -> _ModelCall[_Answer]:
        try:
            given = list(messages)
        except Exception as error:  # in a batch the other chats are sent all the same
            return _ModelCall(ScopedPrompt(()), partial(_raise, error))
        # a stream may be read outside of the scope
        options = partial(self._options, arguments, current_scope())

        def send(planned: PlannedPrompt) -> _Answer:
            sent = messages_with(given, planned.texts) if planned.texts else given
            if planned.parts and takes_cache_points(self.inner):
                profile = self.planner.wire_cache
                sent = self._gateway.attempt(
                    lambda: with_cache_points(sent, planned, profile, self.inner), lambda: sent
                )
            return method(sent, **options(planned))

        parts = self._gateway.attempt(lambda: prompt_parts(given), lambda: ())
        wire = partial(self._on_the_wire, given, options)
        return _ModelCall(self._prompt(parts, arguments), send, wire)

    def _completion(
        self,
        method: Callable[..., _Answer],
        text: str,
        arguments: dict[str, Any],
        formatted: bool = False,
    ) -> _ModelCall[_Answer]:
        options = partial(self._options, {"formatted": formatted, **arguments}, current_scope())

        def send(planned: PlannedPrompt) -> _Answer:
            return method(planned.texts[0], **options(planned))

        wire = partial(self._on_the_wire, [ChatMessage(text)], options)
        is_chat = self.inner.metadata.is_chat_model
        prompt = self._prompt((PromptPart("user", text),), arguments)
        return _ModelCall(prompt, send, wire if is_chat else None)

    def _structured(
        self,
        method: Callable[..., _Answer],
        /,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> _ModelCall[_Answer]:
        bare = prompt.model_copy(update={"output_parser": None})  # it adds its words later
        messages = bare.format_messages(llm=self.inner, **arguments)
        is_text = not self.inner.metadata.is_chat_model
        is_text = is_text and bare.format(llm=self.inner, **arguments) == messages[0].content
        parts = self._gateway.attempt(lambda: prompt_parts(messages), lambda: ())
        read = self._prompt(parts, {**(llm_kwargs or {}), "response_format": output_cls})
        options = partial(self._options, llm_kwargs or {}, current_scope())

        def send(planned: PlannedPrompt) -> _Answer:
            sent = messages_with(messages, planned.texts) if planned.texts else messages
            kept: dict[str, Any] = {"output_parser": prompt.output_parser}
            kept["metadata"] = {**prompt.metadata}
            filled: BasePromptTemplate = ChatPromptTemplate(sent, **kept)
            if is_text:
                filled = PromptTemplate(sent[0].content or "", **kept)
            return method(output_cls, filled, options(planned))

        return _ModelCall(read, send)

    def _on_the_wire(
        self, given: list[ChatMessage], options: Callable[..., Any], planned: PlannedPrompt
    ) -> WirePrompt:
        from llama_index.llms.openai.utils import to_openai_message_dicts

        model = self.inner.metadata.model_name
        sent = {**(getattr(self._model, "additional_kwargs", None) or {}), **options(planned)}
        fields = {"model": model, **(sent.get("extra_body") or {})}
        fields |= {"tools": sent["tools"]} if sent.get("tools") else {}
        places = [position and position[0] for position in text_positions(given)]
        messages: Any = to_openai_message_dicts(messages_with(given, planned.texts), model=model)
        return WirePrompt(messages, places, fields, sent.get("extra_headers") or {})

    def _prompt(self, parts: tuple[PromptPart, ...], arguments: Mapping[str, Any]) -> ScopedPrompt:
        attempt, scope = self._gateway.attempt, current_scope()
        beside = attempt(lambda: said_beside(arguments), str)
        return ScopedPrompt(parts, scope, attempt(root_of_call), not self.find_retrieved, beside)

    def _options(
        self, given: dict[str, Any], scope: RequestScope, planned: PlannedPrompt
    ) -> dict[str, Any]:
        """Return a call's keyword arguments, with salt and session id, as opted in to, and key."""
        if not (self.send_cache_salt or self.send_session_id or self.planner.wire_cache.is_routed):
            return dict(given)
        try:
            own = {n: self._always_sent.get(n) or given.get(n) or {} for n in _ENGINE_OPTIONS}
            known = {**given, "prompt_cache_options": "unused"}  # nothing is marked
            told = EngineOptions.of(self).added(planned.groups, scope, known, *own.values())
            sent = {name: {**told.get(name, {}), **one} for name, one in own.items()}
            return {**given, **{name: one for name, one in sent.items() if one}}
        except Exception as error:
            self._gateway.fail_open.note(error)
            return {**given, **self._always_sent}

    def _answer(self, call: _ModelCall[_Answer]) -> _Answer:
        planned = run_here(self._gateway.aplan(call.prompt, call.wire, blocks=True))
        with self._gateway.calling(planned) as read:
            return read(call.send(planned))

    async def _aanswer(self, call: _ModelCall[Awaitable[_Answer]]) -> _Answer:
        planned = await self._gateway.aplan(call.prompt, call.wire)
        with self._gateway.calling(planned) as read:
            return read(await call.send(planned))

    def _stream(self, call: _ModelCall[Any]) -> Generator[Any, None, None]:
        """Yield what the model streams; nothing is planned before the first piece is asked for."""
        planned = run_here(self._gateway.aplan(call.prompt, call.wire, blocks=True))
        yield from self._gateway.stream(planned, lambda: call.send(planned))

    async def _astream(self, call: _ModelCall[Any]) -> AsyncGenerator[Any, None]:
        planned = await self._gateway.aplan(call.prompt, call.wire)
        steps = self._gateway.astream(planned, lambda: call.send(planned))
        async with aclosing(steps):
            async for step in steps:
                yield step

    async def _send_batch(
        self,
        calls: Sequence[_ModelCall[Awaitable[_Answer]]],
        workers: int,
        show_progress: bool,
        return_exceptions: bool,
    ) -> list[_Answer]:
        """Return the answers to calls that are planned together, in the order given."""
        checked_integer("workers", workers, 1)
        prompts = [call.prompt for call in calls]
        planned = await planned_aside(lambda: self._gateway.plan_batch(prompts), len(prompts))
        waiting = {one.position: one for one in planned}
        answers: dict[int, Any] = {}

        async def ask(position: int) -> None:
            call = calls[position]
            one = await self._gateway.aplan(waiting.pop(position), call.wire)
            try:
                with self._gateway.calling(one) as read:
                    answers[position] = read(await call.send(one))
            except Exception as error:
                if not return_exceptions:
                    raise
                answers[position] = error

        works = [partial(ask, position) for position in waiting]
        with tqdm(total=len(works), disable=not show_progress) as bar:
            try:
                async with aclosing(as_they_end(works, workers)) as ended:
                    async for _ in ended:
                        bar.update()
            finally:
                for one in waiting.values():
                    self._gateway.forget(one)
        return [answers[position] for position in range(len(calls))]


def _raise(error: Exception, planned: PlannedPrompt) -> NoReturn:
    raise error
