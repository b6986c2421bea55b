"""A chat model that plans what is sent to the one inside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import Field, PrivateAttr, field_validator

from ctxreuse.adapters.micro_batch import DEFAULT_WINDOW_S, checked_window
from ctxreuse.adapters.model_gateway import ModelGateway
from ctxreuse.adapters.prompt_planner import PlannedPrompt, Prompt, checked_planner
from ctxreuse.context.scope import RequestScope
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from langchain_ctxreuse.chat_model.held_scope import held_scope
from langchain_ctxreuse.chat_model.request_options import with_cache_salt, with_session_id
from langchain_ctxreuse.chat_model.turns import Turn, handed_over_turn
from langchain_ctxreuse.chat_model.wrapped_model import WrappedChatModel
from langchain_ctxreuse.messages import PromptTexts, prompt_texts
from langchain_ctxreuse.scope import scope_from_config

_Step = TypeVar("_Step")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt on its way to the model.

    Attributes:
        texts: Its messages and the texts in them.
        call: What is planned.
        turn: Its turn, if it is part of a batch.
    """

    texts: PromptTexts
    call: Prompt
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """What the inner model is called with."""

    messages: list[BaseMessage]
    arguments: dict[str, Any]


class PlannedChatModel(WrappedChatModel):
    """Sends what LangChain hands to a chat model's private methods: planned, in the planned order.

    Who calls these methods holds the request's scope (`held_scope`); arguments are described where
    they are given, in `ReuseChatModel`.
    """

    planner: ReusePlanner = Field(default_factory=ReusePlanner, repr=False)
    window_s: float = DEFAULT_WINDOW_S
    strategy: Strategy = "reuse"
    send_cache_salt: bool = Field(default=False, strict=True)
    send_session_id: bool = Field(default=False, strict=True)
    salt_key: str = Field(default="", repr=False, exclude=True, strict=True)
    _gate: ModelGateway = PrivateAttr()
    _scope: RequestScope | None = PrivateAttr(default=None)

    _check_planner = field_validator("planner", mode="before")(checked_planner)
    _check_window = field_validator("window_s", mode="before")(checked_window)

    @field_validator("strategy", mode="before")
    @classmethod
    def _check_strategy(cls, strategy: object) -> object:
        check_strategy(strategy)
        return strategy

    def model_post_init(self, context: Any, /) -> None:
        """Build what plans the calls."""
        super().model_post_init(context)
        self._gate = ModelGateway(self.planner, self.strategy, self.window_s, type(self).__name__)

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts were sent as given."""
        return self._gate.faults

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt = self._prompt(messages, kwargs)
        planned = self._planned(prompt)
        with self._gate.evict_on_failure(planned):
            out = self._outgoing(messages, kwargs, prompt, planned)
            more = _run_manager_argument(self.inner._generate, run_manager)
            return self.inner._generate(out.messages, stop=stop, **more, **out.arguments)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt = self._prompt(messages, kwargs)
        planned = await self._aplanned(prompt)
        with self._gate.evict_on_failure(planned):
            out = self._outgoing(messages, kwargs, prompt, planned)
            more = _run_manager_argument(self.inner._agenerate, run_manager)
            return await self.inner._agenerate(out.messages, stop=stop, **more, **out.arguments)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return self._streamed(self.inner._stream, messages, stop, run_manager, kwargs)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        return self._astreamed(self.inner._astream, messages, stop, run_manager, kwargs)

    @property
    def _stream_chat_model_events(self) -> Callable[..., Iterator[Any]] | None:
        """The inner model's own event stream; None if it has none, as LangChain expects it."""
        events = getattr(self.inner, "_stream_chat_model_events", None)
        if events is None:
            return None

        def streamed(
            messages: list[BaseMessage],
            stop: list[str] | None = None,
            run_manager: CallbackManagerForLLMRun | None = None,
            **kwargs: Any,
        ) -> Iterator[Any]:
            return self._streamed(events, messages, stop, run_manager, kwargs)

        return streamed

    @property
    def _astream_chat_model_events(self) -> Callable[..., AsyncIterator[Any]] | None:
        """As `_stream_chat_model_events`."""
        events = getattr(self.inner, "_astream_chat_model_events", None)
        if events is None:
            return None

        def astreamed(
            messages: list[BaseMessage],
            stop: list[str] | None = None,
            run_manager: AsyncCallbackManagerForLLMRun | None = None,
            **kwargs: Any,
        ) -> AsyncIterator[Any]:
            return self._astreamed(events, messages, stop, run_manager, kwargs)

        return astreamed

    def _streamed(
        self,
        stream: Callable[..., Iterator[_Step]],
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | None,
        arguments: Mapping[str, Any],
    ) -> Iterator[_Step]:
        prompt = self._prompt(messages, arguments)
        planned = self._planned(prompt)
        out = self._outgoing(messages, arguments, prompt, planned)
        more = {} if run_manager is None else {"run_manager": run_manager}
        yield from self._gate.stream(
            planned, lambda: stream(out.messages, stop=stop, **more, **out.arguments)
        )

    async def _astreamed(
        self,
        stream: Callable[..., AsyncIterator[_Step]],
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: AsyncCallbackManagerForLLMRun | None,
        arguments: Mapping[str, Any],
    ) -> AsyncIterator[_Step]:
        prompt = self._prompt(messages, arguments)
        planned = await self._aplanned(prompt)
        out = self._outgoing(messages, arguments, prompt, planned)
        more = {} if run_manager is None else {"run_manager": run_manager}
        steps = self._gate.astream(
            planned, lambda: stream(out.messages, stop=stop, **more, **out.arguments)
        )
        async with aclosing(steps):
            async for step in steps:
                yield step

    def _scope_here(self) -> RequestScope:
        return self._scope or held_scope() or scope_from_config(None)

    def _prompt(
        self, messages: Sequence[BaseMessage], arguments: Mapping[str, Any]
    ) -> ChatPrompt | None:
        """Return a prompt that is about to be sent; None if a fault of ours is in the way."""
        turn = handed_over_turn(self)
        return self._read_prompt(messages, arguments, self._scope_here(), turn)

    def _read_prompt(
        self,
        messages: Sequence[BaseMessage],
        arguments: Mapping[str, Any],
        scope: RequestScope,
        turn: Turn | None = None,
    ) -> ChatPrompt | None:
        def read() -> ChatPrompt | None:
            texts = prompt_texts(messages, arguments)
            return ChatPrompt(texts, Prompt(texts.parts, scope), turn)

        return self._gate.attempt(read, lambda: None)

    def _planned(self, prompt: ChatPrompt | None) -> PlannedPrompt | None:
        if prompt is None:
            return None
        planned = None if prompt.turn is None else prompt.turn.take(prompt.texts)
        return planned or self._gate.go_through(prompt.call)

    async def _aplanned(self, prompt: ChatPrompt | None) -> PlannedPrompt | None:
        if prompt is None:
            return None
        planned = None if prompt.turn is None else await prompt.turn.atake(prompt.texts)
        return planned or await self._gate.ago_through(prompt.call)

    def _outgoing(
        self,
        messages: list[BaseMessage],
        arguments: Mapping[str, Any],
        prompt: ChatPrompt | None,
        planned: PlannedPrompt | None,
    ) -> _Outgoing:
        """Return what to call the inner model with: planned texts, and what is opted in to."""

        def outgoing() -> _Outgoing:
            sent, more = messages, dict(arguments)
            if prompt is not None and planned is not None:
                sent = prompt.texts.with_texts(planned.texts)
            if self.send_cache_salt:
                more = with_cache_salt(more, self.inner, self._scope_here(), self.salt_key)
            if self.send_session_id:
                more = with_session_id(more, self.inner, self._scope_here(), self.salt_key)
            return _Outgoing(sent, more)

        return self._gate.attempt(outgoing, lambda: _Outgoing(messages, dict(arguments)))


def _run_manager_argument(method: Callable[..., Any], run_manager: object) -> dict[str, Any]:
    """Return the run manager for models that take one, as LangChain itself does it."""
    return {"run_manager": run_manager} if "run_manager" in signature(method).parameters else {}
