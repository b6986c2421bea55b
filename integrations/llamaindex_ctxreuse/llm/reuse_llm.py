"""A model wrapper that plans the contexts inside prompts and schedules the prompts."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from typing import Any, TypeVar

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
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, field_validator
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate

from ctxreuse.adapters.micro_batch import DEFAULT_WINDOW_S, checked_window
from ctxreuse.adapters.model_gateway import ModelGateway
from ctxreuse.adapters.prompt_planner import PlannedPrompt, Prompt, planner_or_new
from ctxreuse.context.scope import current_scope
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from llamaindex_ctxreuse.llm.delegating_llm import WrappedLLM
from llamaindex_ctxreuse.llm.engine_request import EngineExtras
from llamaindex_ctxreuse.llm.ordered_jobs import checked_workers, send_in_order
from llamaindex_ctxreuse.llm.planned_prompts import (
    call_of_messages,
    call_of_text,
    messages_of,
    messages_with,
    planned_prompt,
)

_Piece = TypeVar("_Piece")


class ReuseLLM(WrappedLLM):
    """A model whose prompts hit the engine's prefix cache.

    Swap it in for the model that it wraps. Contexts that `format_context` rendered are found in
    messages and completion prompts, and planned; every other character is sent as it is. Calls that
    come within `window_s` from any tasks and threads are planned together and sent in the planned
    order. Tool calling, structured output, streaming, callbacks, `system_prompt` and the like are
    the inner model's. A planning fault lets prompts through as given.

    `ctxreuse.request_context` says tenant and conversation of a call.

    Args:
        inner: The model to wrap. Of `OpenAILike` set `context_window`: its default of 3,900 tokens
            makes query engines split a context over several calls.
        planner: Plans the contexts; an own one if it is left out.
        window_s: Seconds for which a call waits for others; 0 sends each at once. A synchronous
            call on a running event loop never waits.
        strategy: "reuse", "paper" or "none".
        send_cache_salt: Whether each call carries its tenant, hashed, as vLLM's `cache_salt`, so
            that tenants share nothing in the engine's cache. For models that take `extra_body`.
        send_session_id: Whether each call carries its conversation, hashed, as `X-Session-ID`, for
            routers that keep a conversation on one engine. For models that take `extra_headers`.
        salt_key: A secret for both hashes; processes that share it share the cache.

    Raises:
        ValueError: If an argument is of the wrong kind.

    Example:
        >>> from llama_index.core.llms import MockLLM
        >>> ReuseLLM(inner=MockLLM(), window_s=0).complete("Where is Paris?").text
        'Where is Paris?'
    """

    planner: ReusePlanner = Field(
        default_factory=ReusePlanner, exclude=True, repr=False, frozen=True
    )
    window_s: float = Field(default=DEFAULT_WINDOW_S, frozen=True)
    strategy: Strategy = Field(default="reuse", frozen=True)
    send_cache_salt: bool = Field(default=False, frozen=True, strict=True)
    send_session_id: bool = Field(default=False, frozen=True, strict=True)
    salt_key: str = Field(default="", exclude=True, repr=False, frozen=True, strict=True)
    _gate: ModelGateway = PrivateAttr()
    _extras: EngineExtras = PrivateAttr()

    _check_planner = field_validator("planner", mode="before")(planner_or_new)
    _check_window = field_validator("window_s", mode="before")(checked_window)

    @field_validator("strategy", mode="before")
    @classmethod
    def _check_strategy(cls, strategy: object) -> object:
        check_strategy(strategy)
        return strategy

    def model_post_init(self, context: Any, /) -> None:
        """Build what holds the state of a run."""
        super().model_post_init(context)
        self._gate = ModelGateway(self.planner, self.strategy, self.window_s, type(self).__name__)
        self._extras = EngineExtras(
            self.inner,
            sends_salt=self.send_cache_salt,
            sends_session=self.send_session_id,
            salt_key=self.salt_key,
        )

    @classmethod
    def class_name(cls) -> str:
        """Return the name that serialized models carry."""
        return "ReuseLLM"

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts went through as given."""
        return self._gate.faults

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the inner model's answer to the messages."""
        options = self._options(kwargs)
        planned = self._gate.plan(self._chat(messages))
        with self._gate.evict_on_failure(planned):
            return self._model.chat(_sent(messages, planned), **options)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Return the inner model's completion of the prompt."""
        options = self._options({"formatted": formatted, **kwargs})
        planned = self._gate.plan(self._completion(prompt))
        with self._gate.evict_on_failure(planned):
            return self._model.complete(_sent_text(prompt, planned), **options)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Return the inner model's answer to the messages, piece by piece."""
        given, options = list(messages), self._options(kwargs)
        return self._streamed(
            self._chat(given),
            lambda planned: self._model.stream_chat(_sent(given, planned), **options),
        )

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Return the inner model's completion of the prompt, piece by piece."""
        options = self._options({"formatted": formatted, **kwargs})
        return self._streamed(
            self._completion(prompt),
            lambda planned: self._model.stream_complete(_sent_text(prompt, planned), **options),
        )

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the inner model's answer to the messages."""
        options = self._options(kwargs)
        planned = await self._gate.aplan(self._chat(messages))
        with self._gate.evict_on_failure(planned):
            return await self._model.achat(_sent(messages, planned), **options)

    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Return the inner model's completion of the prompt."""
        options = self._options({"formatted": formatted, **kwargs})
        planned = await self._gate.aplan(self._completion(prompt))
        with self._gate.evict_on_failure(planned):
            return await self._model.acomplete(_sent_text(prompt, planned), **options)

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Return the inner model's answer to the messages, piece by piece."""
        given, options = list(messages), self._options(kwargs)
        return self._astreamed(
            self._chat(given),
            lambda planned: self._model.astream_chat(_sent(given, planned), **options),
        )

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Return the inner model's completion of the prompt, piece by piece."""
        options = self._options({"formatted": formatted, **kwargs})
        return self._astreamed(
            self._completion(prompt),
            lambda planned: self._model.astream_complete(_sent_text(prompt, planned), **options),
        )

    def structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Return the inner model's structured answer to the prompt."""
        messages = messages_of(prompt, self.inner, prompt_args)
        options = self._options(llm_kwargs or {})
        planned = self._gate.plan(self._chat(messages))
        with self._gate.evict_on_failure(planned):
            return self._model.structured_predict(
                output_cls, planned_prompt(prompt, messages, planned.texts), options, **prompt_args
            )

    async def astructured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        """Return the inner model's structured answer to the prompt."""
        messages = messages_of(prompt, self.inner, prompt_args)
        options = self._options(llm_kwargs or {})
        planned = await self._gate.aplan(self._chat(messages))
        with self._gate.evict_on_failure(planned):
            return await self._model.astructured_predict(
                output_cls, planned_prompt(prompt, messages, planned.texts), options, **prompt_args
            )

    def stream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Return the inner model's structured answer to the prompt as it grows."""
        messages = messages_of(prompt, self.inner, prompt_args)
        options = self._options(llm_kwargs or {})
        return self._streamed(
            self._chat(messages),
            lambda planned: self._model.stream_structured_predict(
                output_cls, planned_prompt(prompt, messages, planned.texts), options, **prompt_args
            ),
        )

    async def astream_structured_predict(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        """Return the inner model's structured answer to the prompt as it grows."""
        messages = messages_of(prompt, self.inner, prompt_args)
        options = self._options(llm_kwargs or {})
        return self._astreamed(
            self._chat(messages),
            lambda planned: self._model.astream_structured_predict(
                output_cls, planned_prompt(prompt, messages, planned.texts), options, **prompt_args
            ),
        )

    async def achat_batch(
        self,
        batch: Sequence[Sequence[ChatMessage]],
        *,
        workers: int = DEFAULT_NUM_WORKERS,
        show_progress: bool = False,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[ChatResponse]:
        """Return the answers to many chats, planned together and sent in the planned order.

        Args:
            batch: The messages of each chat.
            workers: How many are under way at a time.
            show_progress: Whether to show a progress bar.
            return_exceptions: Whether a failed chat's exception stands in its answer's place. Else
                the first one is raised, and the chats that still wait are not sent.
            **kwargs: For the inner model, with each chat.

        Returns:
            One answer a chat, in the order given.
        """
        given = [list(messages) for messages in batch]
        options = self._options(kwargs)
        return await send_in_order(
            self._gate,
            [self._chat(messages) for messages in given],
            lambda planned: self._model.achat(_sent(given[planned.position], planned), **options),
            workers=checked_workers(workers),
            progress="Chatting" if show_progress else None,
            return_exceptions=return_exceptions,
        )

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
        given = list(prompts)
        options = self._options(kwargs)
        return await send_in_order(
            self._gate,
            [self._completion(prompt) for prompt in given],
            lambda planned: self._model.acomplete(
                _sent_text(given[planned.position], planned), **options
            ),
            workers=checked_workers(workers),
            progress="Completing" if show_progress else None,
            return_exceptions=return_exceptions,
        )

    def chat_batch(
        self, batch: Sequence[Sequence[ChatMessage]], **kwargs: Any
    ) -> list[ChatResponse]:
        """Return what `achat_batch` returns, where no event loop runs."""
        answers: list[ChatResponse] = asyncio_run(self.achat_batch(batch, **kwargs))
        return answers

    def complete_batch(self, prompts: Sequence[str], **kwargs: Any) -> list[CompletionResponse]:
        """Return what `acomplete_batch` returns, where no event loop runs."""
        answers: list[CompletionResponse] = asyncio_run(self.acomplete_batch(prompts, **kwargs))
        return answers

    def _set_inside(self, name: str, value: Any) -> None:
        super()._set_inside(name, value)
        if self._model is not self.inner:
            setattr(self._model, name, value)

    @property
    def _model(self) -> LLM:
        return self._extras.model

    def _chat(self, messages: Sequence[ChatMessage]) -> Prompt:
        return self._call(lambda: call_of_messages(messages, current_scope()))

    def _completion(self, prompt: str) -> Prompt:
        return self._call(lambda: call_of_text(prompt, current_scope()))

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return a call's keyword arguments for the model."""
        return self._gate.attempt(
            lambda: self._extras.options(given), lambda: self._extras.without_ours(given)
        )

    def _call(self, make: Callable[[], Prompt]) -> Prompt:
        return self._gate.attempt(make, lambda: Prompt(()))

    def _streamed(
        self, call: Prompt, start: Callable[[PlannedPrompt], Iterator[_Piece]]
    ) -> Generator[_Piece, None, None]:
        """Yield what the model streams; nothing is planned before somebody asks for a piece."""
        planned = self._gate.plan(call)
        yield from self._gate.stream(planned, lambda: start(planned))

    async def _astreamed(
        self, call: Prompt, start: Callable[[PlannedPrompt], Awaitable[AsyncIterator[_Piece]]]
    ) -> AsyncGenerator[_Piece, None]:
        """Yield what the model streams, as `_streamed` does."""
        planned = await self._gate.aplan(call)
        with self._gate.evict_on_failure(planned):
            pieces = await start(planned)
        async with aclosing(self._gate.astream(planned, lambda: pieces)) as steps:
            async for step in steps:
                yield step


def _sent(messages: Sequence[ChatMessage], planned: PlannedPrompt) -> Sequence[ChatMessage]:
    return messages_with(messages, planned.texts) if planned.texts else messages


def _sent_text(prompt: str, planned: PlannedPrompt) -> str:
    return planned.texts[0] if planned.texts else prompt
