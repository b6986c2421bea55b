"""A chat model around another one, which plans the contexts in prompts and the order of calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

from ctxreuse.adapters.ordered_release import planned_aside
from langchain_ctxreuse.chat_model.batching import (
    BatchSlot,
    aanswers,
    aanswers_as_completed,
    answers,
    answers_as_completed,
    batch_slots,
)
from langchain_ctxreuse.chat_model.held_scope import aheld_in_steps, held_in_steps, holding
from langchain_ctxreuse.chat_model.planned_model import ChatPrompt, PlannedChatModel
from langchain_ctxreuse.scope import scope_from_config

if TYPE_CHECKING:
    from langchain_core.language_models.chat_model_stream import (
        AsyncChatModelStream,
        ChatModelStream,
    )


class ReuseChatModel(PlannedChatModel):
    """Sends another model's calls in the order, and with the contexts, that the cache serves best.

    Contexts that `format_context` rendered from documents without a plan are planned where they
    stand in a prompt; no other text is altered. Calls that come at the same time, from tasks or
    threads, are collected for some milliseconds and planned together; the calls of a batch are all
    planned together. Either way they are sent in the planned order, in which prompts with a common
    beginning follow each other. A batch is answered in the caller's order.

    Everything else is the inner model's: tools, structured output, streaming, usage, token counts.
    Callbacks, traces and LangChain's cache see the prompts as given.

    Tenant and conversation come from `config={"configurable": {"tenant": ..., "thread_id": ...}}`
    or `ctxreuse.request_context`. Of a call that fails, is cancelled, or is answered by LangChain's
    cache, the planner forgets what was planned here; what a retriever planned stays. A planning
    fault sends prompts as given.

    `chain.batch` and `chain.abatch` reach the wrapper with all prompts at once; a chain's
    `batch_as_completed` calls it for each, and the window plans together what comes together.

    Args:
        inner: Any chat model.
        planner: Plans the contexts; an own one if it is left out.
        window_s: Seconds for which a single call waits for others; 0 sends each at once.
        strategy: "reuse", "paper" or "none".
        send_cache_salt: Whether a tenant's calls get an own `cache_salt` in `extra_body`, so that
            tenants share nothing in vLLM's prefix cache. For OpenAI-compatible models.
        send_session_id: Whether a conversation's calls get its hashed name as `X-Session-ID` in
            `extra_headers`, for routers that keep it on one engine. For OpenAI-compatible models.
        salt_key: A secret for both hashes; processes that share it share the cache.

    Raises:
        ValueError: If an argument is of the wrong kind.

    Example:
        >>> from langchain_core.language_models import FakeListChatModel
        >>> model = ReuseChatModel(inner=FakeListChatModel(responses=["In France."]))
        >>> model.invoke("Where is Paris?").content
        'In France.'
    """

    # The public methods know the config.

    def invoke(
        self,
        input: LanguageModelInput,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Return the model's answer; concurrent calls are planned together."""
        with holding(scope_from_config(config)):
            return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self,
        input: LanguageModelInput,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Return the model's answer; concurrent calls are planned together."""
        with holding(scope_from_config(config)):
            return await super().ainvoke(input, config, stop=stop, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Yield the model's answer in pieces, or whole if the model does not stream."""
        steps = super().stream(input, config, stop=stop, **kwargs)
        return held_in_steps(scope_from_config(config), steps)

    def astream(
        self,
        input: LanguageModelInput,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Yield the model's answer in pieces, or whole if the model does not stream."""
        steps = super().astream(input, config, stop=stop, **kwargs)
        return aheld_in_steps(scope_from_config(config), steps)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[AIMessage]:
        """Return the answers in the caller's order; the calls are sent in the planned order."""
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        slots = self._line_up(inputs, configs, kwargs)
        return answers(slots, self._sender(inputs, configs, return_exceptions, kwargs), configs[0])

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[AIMessage]:
        """Return the answers in the caller's order; the calls are sent in the planned order."""
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        slots = await planned_aside(lambda: self._line_up(inputs, configs, kwargs), len(inputs))
        send = self._asender(inputs, configs, return_exceptions, kwargs)
        return await aanswers(slots, send, configs[0])

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield input positions and answers as they come; the calls are sent as in `batch`."""
        if not inputs:
            return
        configs = get_config_list(config, len(inputs))
        slots = self._line_up(inputs, configs, kwargs)
        send = self._sender(inputs, configs, return_exceptions, kwargs)
        yield from answers_as_completed(slots, send, configs[0])

    async def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield input positions and answers as they come; the calls are sent as in `batch`."""
        if not inputs:
            return
        configs = get_config_list(config, len(inputs))
        slots = await planned_aside(lambda: self._line_up(inputs, configs, kwargs), len(inputs))
        send = self._asender(inputs, configs, return_exceptions, kwargs)
        async with aclosing(aanswers_as_completed(slots, send, configs[0])) as completed:
            async for answered in completed:
                yield answered

    def _chat_model_stream_v3(
        self,
        input: LanguageModelInput,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> ChatModelStream:
        return super(ReuseChatModel, self._knowing(config))._chat_model_stream_v3(
            input, config, **kwargs
        )

    async def _achat_model_stream_v3(
        self,
        input: LanguageModelInput,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncChatModelStream:
        return await super(ReuseChatModel, self._knowing(config))._achat_model_stream_v3(
            input, config, **kwargs
        )

    def _knowing(self, config: RunnableConfig | None) -> Self:
        """Return the same model for one call, whose steps run in contexts unknown so far."""
        same = self.model_copy()
        same._scope = scope_from_config(config)
        return same

    def _line_up(
        self,
        inputs: Sequence[LanguageModelInput],
        configs: Sequence[RunnableConfig],
        arguments: Mapping[str, Any],
    ) -> list[BatchSlot]:
        """Return the slots of a batch's inputs, planned together, in the order to send them."""
        prompts: dict[int, ChatPrompt] = {}
        for position, (value, config) in enumerate(zip(inputs, configs, strict=True)):
            messages = self._messages_of(value)
            if messages is None:
                continue
            prompt = self._read_prompt(messages, arguments, scope_from_config(config))
            if prompt is not None:
                prompts[position] = prompt
        positions = list(prompts)
        planned = {
            positions[one.position]: one
            for one in self._gate.plan_batch([prompt.call for prompt in prompts.values()])
        }
        texts = [prompts[one].texts if one in prompts else None for one in range(len(inputs))]
        return batch_slots(self, texts, planned, self._gate.evict)

    def _messages_of(self, value: LanguageModelInput) -> list[BaseMessage] | None:
        """Return an input's messages, or None for what is no prompt; `invoke` will refuse that."""
        try:
            return self._convert_input(value).to_messages()
        except Exception:  # whatever a prompt of the user's own raises, it raises again there
            return None

    def _sender(
        self,
        inputs: Sequence[LanguageModelInput],
        configs: Sequence[RunnableConfig],
        return_exceptions: bool,
        arguments: Mapping[str, Any],
    ) -> Callable[[int], Any]:
        """Return what calls the model with an input and returns its answer, or exception."""

        def send(position: int) -> Any:
            try:
                return self.invoke(inputs[position], configs[position], **arguments)
            except Exception as error:
                if return_exceptions:
                    return error
                raise

        return send

    def _asender(
        self,
        inputs: Sequence[LanguageModelInput],
        configs: Sequence[RunnableConfig],
        return_exceptions: bool,
        arguments: Mapping[str, Any],
    ) -> Callable[[int], Awaitable[Any]]:
        async def send(position: int) -> Any:
            try:
                return await self.ainvoke(inputs[position], configs[position], **arguments)
            except Exception as error:
                if return_exceptions:
                    return error
                raise

        return send
