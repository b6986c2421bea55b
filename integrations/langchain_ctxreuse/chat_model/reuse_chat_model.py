"""A chat model around another one, which plans the contexts in prompts and the order of calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import aclosing
from functools import cache, lru_cache, partial
from inspect import signature
from operator import itemgetter
from threading import Event
from typing import Any, Literal, Self, TypeAlias, TypeVar

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseRunManager,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import Field, PrivateAttr, StrictBool, field_validator

from ctxreuse.adapters.engine_options import (
    SESSION_HEADER,
    added_cache_fields,
    added_salt,
    added_session,
    marks_the_end,
)
from ctxreuse.adapters.environment import default_planner
from ctxreuse.adapters.leader_first import leaders_needed
from ctxreuse.adapters.model_gateway import ModelGateway
from ctxreuse.adapters.ordered_release import (
    DEFAULT_WINDOW_S,
    OrderedQueue,
    Slot,
    TaskWaiter,
    checked_window,
    in_event_loop,
    planned_aside,
)
from ctxreuse.adapters.prompt_draft import ScopedPrompt
from ctxreuse.adapters.prompt_planner import PlannedPrompt, PromptStatistics, planner_or_new
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.scope import RequestScope
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from langchain_ctxreuse.chat_model.batching import (
    BatchInput,
    BatchSlot,
    PlannedBatch,
    answers,
    started,
)
from langchain_ctxreuse.chat_model.delegating_model import DelegatingChatModel
from langchain_ctxreuse.chat_model.model_answer import ModelAnswer
from langchain_ctxreuse.documents.run_documents import follow_runs, run_documents
from langchain_ctxreuse.messages import (
    MARK_FIELDS,
    PromptTexts,
    mark_field_for,
    prompt_texts,
    with_marks,
)
from langchain_ctxreuse.scope import CarriedRequest, on_carrying_copy, scope_from_config

_log = logging.getLogger("ctxreuse")
_GATEWAY_FIELDS = ("planner", "window_s", "strategy", "registry")

_Step = TypeVar("_Step")
_Outgoing: TypeAlias = tuple[PlannedPrompt | None, list[BaseMessage], dict[str, Any]]
"""What to call the inner model with: the plan, if there is one, the messages, and the rest."""


class ReuseChatModel(DelegatingChatModel):
    """Sends another model's calls in the order, and with the contexts, that the cache serves best.

    Planned are contexts that `format_context` rendered for the same tenant, and documents that a
    retriever returned in the same run, where the prompt shows all of them with the same line breaks
    between each two. Other texts are left alone; `prompt_statistics` counts both. Answers are the
    inner model's own.

    Calls that come at the same time, from tasks or threads, are planned together, and so are those
    of a batch, which is answered in the caller's order. They are sent in the planned order. A
    chain's `batch_as_completed` calls the wrapper for each input.

    Everything else is the inner model's. Callbacks, traces and LangChain's cache see the prompts as
    given. Tenant and conversation come from `config={"configurable": {"tenant": ..., "thread_id":
    ...}}` or `ctxreuse.request_context`. The planner forgets calls that fail, are cancelled, or are
    answered by LangChain's cache. If planning fails, prompts are sent as given.

    Args:
        inner: Any chat model.
        planner: Plans the contexts; None makes one.
        window_s: Seconds for which a call that may show a context waits for others; 0 sends at
            once.
        strategy: "reuse", "paper" or "none".
        send_cache_salt: Whether each tenant's calls get the tenant's `cache_salt` in `extra_body`,
            for OpenAI-compatible models.
        send_session_id: Whether a conversation's calls get its hashed name in `extra_headers`, for
            routers; "group" sends the id of the prompt's prefix group instead.
        session_header: The header of the session id, such as "x-smg-routing-key".
        salt_key: A secret for both hashes; processes that share it share the cache.
        registry: Where `format_context` remembers the contexts that are found; None takes the
            registry of this process.
        find_retrieved: Whether documents that a retriever returned in the same run are planned.
    """

    planner: ReusePlanner = Field(default_factory=default_planner, repr=False, frozen=True)
    window_s: float = Field(default=DEFAULT_WINDOW_S, frozen=True)
    strategy: Strategy = Field(default="reuse", frozen=True)
    send_cache_salt: bool = Field(default=False, strict=True)
    send_session_id: StrictBool | Literal["group"] = False
    session_header: str = Field(default=SESSION_HEADER, strict=True)
    salt_key: str = Field(default="", repr=False, exclude=True, strict=True)
    registry: ContextRegistry | None = Field(default=None, repr=False, exclude=True, frozen=True)
    find_retrieved: bool = Field(default=True, frozen=True, strict=True)
    _gateway: ModelGateway = PrivateAttr()
    _slot: BatchSlot | None = PrivateAttr(default=None)

    _check_planner = field_validator("planner", mode="before")(planner_or_new)
    _check_window = field_validator("window_s", mode="before")(checked_window)

    @field_validator("strategy", mode="before")
    @classmethod
    def _check_strategy(cls, strategy: object) -> object:
        check_strategy(strategy)
        return strategy

    def model_post_init(self, context: Any, /) -> None:
        """Build what plans the calls, and take over the inner model's settings."""
        super().model_post_init(context)
        self._build()
        if self.find_retrieved:
            follow_runs()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, in which other values of the fields take effect.

        Args:
            update: Fields to change; those of the inner model change in a copy of it.
            deep: Whether what it holds is copied, too.
        """
        copy = super().model_copy(update=update, deep=deep)
        if update and not update.keys().isdisjoint(_GATEWAY_FIELDS):
            copy._build()
        if copy.find_retrieved:
            follow_runs()
        return copy

    def _build(self) -> None:
        self._gateway = ModelGateway(
            planner_or_new(self.planner),
            self.strategy,
            checked_window(self.window_s),
            type(self).__name__,
            self.registry,
        )

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts were sent as given."""
        return self._gateway.faults

    @property
    def prompt_statistics(self) -> PromptStatistics:
        """What became of the contexts in its prompts: planned, left alone, and why."""
        return self._gateway.statistics()

    # The public methods know the config; each call runs on a copy that carries it.

    invoke = on_carrying_copy(BaseChatModel.invoke)
    ainvoke = on_carrying_copy(BaseChatModel.ainvoke)
    stream = on_carrying_copy(BaseChatModel.stream)
    astream = on_carrying_copy(BaseChatModel.astream)
    _chat_model_stream_v3 = on_carrying_copy(BaseChatModel._chat_model_stream_v3)
    _achat_model_stream_v3 = on_carrying_copy(BaseChatModel._achat_model_stream_v3)

    # Batches are planned together, and sent in the planned order.

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[AIMessage]:
        """Return the answers in the caller's order; the calls are sent in the planned order."""
        batch = self._planned_batch(inputs, config, kwargs)
        answered = answers(batch, partial(self._answer, return_exceptions, kwargs))
        return [answer for _, answer in sorted(answered, key=itemgetter(0))]

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[AIMessage]:
        """`batch`, awaited."""
        work = partial(self._planned_batch, inputs, config, kwargs)
        batch = await planned_aside(work, len(inputs))
        tasks = started(batch, partial(self._aanswer, return_exceptions, kwargs))
        return [answer for _, answer in sorted(await asyncio.gather(*tasks), key=itemgetter(0))]

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield input positions and answers as they come; the calls are sent as in `batch`."""
        batch = self._planned_batch(inputs, config, kwargs)
        yield from answers(batch, partial(self._answer, return_exceptions, kwargs), as_completed)

    async def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> AsyncIterator[tuple[int, Any]]:
        """`batch_as_completed`, awaited."""
        work = partial(self._planned_batch, inputs, config, kwargs)
        batch = await planned_aside(work, len(inputs))
        tasks = started(batch, partial(self._aanswer, return_exceptions, kwargs))
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _planned_batch(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None,
        arguments: Mapping[str, Any],
    ) -> PlannedBatch:
        """Return a batch's inputs, planned together; those that are not planned go last."""
        if not inputs:
            return PlannedBatch([], {}, [])
        configs, gateway = get_config_list(config, len(inputs)), self._gateway
        texts: dict[int, PromptTexts] = {}
        prompts: list[ScopedPrompt] = []
        for position, value in enumerate(inputs):
            try:
                messages = self._convert_input(value).to_messages()
            except Exception:  # it is no prompt: `invoke` raises it again
                continue
            found = _texts(messages, arguments, gateway)
            if found is not None:
                texts[position] = found
                request = CarriedRequest(configs[position], scope_from_config(configs[position]))
                prompts.append(self._scoped(found, gateway, request))
        positions = list(texts)
        planned = {positions[one.position]: one for one in gateway.plan_batch(prompts)}
        queue: OrderedQueue[BatchInput, PlannedPrompt] = OrderedQueue(unused=gateway.forget)
        order = list(dict.fromkeys([*planned, *range(len(inputs))]))
        slots = [
            Slot(queue, BatchInput(n, inputs[n], configs[n], texts.get(n)), planned.get(n))
            for n in order
        ]
        sent = [planned.get(n) for n in order]
        plans = [one.plans[0] if one and one.plans else None for one in sent]
        leading = leaders_needed(plans, [one.use if one else None for one in sent])
        return PlannedBatch(slots, configs[0], leading)

    def _answer(
        self, return_exceptions: bool, arguments: Mapping[str, Any], slot: BatchSlot
    ) -> tuple[int, Any]:
        """Return the position of one input of a batch, and the answer or the exception."""
        call, (position, value, config, _) = self.model_copy(), slot.item
        call._slot = slot
        try:
            return position, call.invoke(value, config, **arguments)
        except Exception as error:
            if return_exceptions:
                return position, error
            raise
        finally:
            slot.leave()

    async def _aanswer(
        self, return_exceptions: bool, arguments: Mapping[str, Any], slot: BatchSlot
    ) -> tuple[int, Any]:
        """Return what `_answer` does; the slot leaves when the task has ended."""
        call, (position, value, config, _) = self.model_copy(), slot.item
        call._slot = slot
        try:
            return position, await call.ainvoke(value, config, **arguments)
        except Exception as error:
            if return_exceptions:
                return position, error
            raise

    # The private methods send what LangChain hands to them: planned, in the planned order.

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        planned, sent, arguments = self._outgoing(messages, kwargs, run_manager)
        gateway = self._gateway
        with gateway.forget_on_failure(planned), self._carried.serving():
            answer = ModelAnswer(planned, gateway)
            if _takes_run_manager(type(self.inner)._generate):  # as LangChain does it
                arguments["run_manager"] = run_manager
            result = self.inner._generate(sent, stop=stop, **arguments)
            self._gateway.forget_unread(planned, is_read=bool(result.generations))
            return answer.result(result)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        planned, sent, arguments = await self._aoutgoing(messages, kwargs, run_manager)
        gateway = self._gateway
        with gateway.forget_on_failure(planned), self._carried.serving():
            answer = ModelAnswer(planned, gateway)
            if _takes_run_manager(type(self.inner)._agenerate):
                arguments["run_manager"] = run_manager
            result = await self.inner._agenerate(sent, stop=stop, **arguments)
            self._gateway.forget_unread(planned, is_read=bool(result.generations))
            return answer.result(result)

    # LangChain asks for the signatures at each call, and finding one out takes long
    _generate.__signature__ = signature(_generate)  # type: ignore[attr-defined]
    _agenerate.__signature__ = signature(_agenerate)  # type: ignore[attr-defined]

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return self._streamed(self.inner._stream, messages, stop, run_manager, **kwargs)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        return self._astreamed(self.inner._astream, messages, stop, run_manager, **kwargs)

    @property
    def _stream_chat_model_events(self) -> Callable[..., Iterator[Any]] | None:
        """The inner model's own event stream; None if it has none, as LangChain expects it."""
        events = getattr(self.inner, "_stream_chat_model_events", None)
        return None if events is None else partial(self._streamed, events)

    @property
    def _astream_chat_model_events(self) -> Callable[..., AsyncIterator[Any]] | None:
        """As `_stream_chat_model_events`."""
        events = getattr(self.inner, "_astream_chat_model_events", None)
        return None if events is None else partial(self._astreamed, events)

    def _streamed(
        self,
        stream: Callable[..., Iterator[_Step]],
        /,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[_Step]:
        planned, sent, arguments = self._outgoing(messages, kwargs, run_manager)
        answer = ModelAnswer(planned, self._gateway)
        if run_manager is not None:
            arguments["run_manager"] = run_manager
        steps = self._gateway.stream(planned, partial(stream, sent, stop=stop, **arguments))
        yield from answer.stream(self._carried.steps(steps))

    async def _astreamed(
        self,
        stream: Callable[..., AsyncIterator[_Step]],
        /,  # a call may have an argument `stream`, too
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[_Step]:
        planned, sent, arguments = await self._aoutgoing(messages, kwargs, run_manager)
        answer = ModelAnswer(planned, self._gateway)
        if run_manager is not None:
            arguments["run_manager"] = run_manager
        steps = self._gateway.astream(planned, partial(stream, sent, stop=stop, **arguments))
        async with aclosing(answer.astream(self._carried.asteps(steps))) as within:
            async for step in within:
                yield step

    def _scoped(
        self,
        texts: PromptTexts,
        gateway: ModelGateway,
        request: CarriedRequest,
        run: BaseRunManager | None = None,
    ) -> ScopedPrompt:
        """Return a prompt with its scope, and what was retrieved for it."""
        if not self.find_retrieved:
            return ScopedPrompt(texts.parts, request.scope)
        around = (run.parent_run_id if run is not None else None) or request.config
        tenant = request.scope.tenant or ""
        runs = run_documents()
        retrieved = gateway.attempt(lambda: runs.of_request(around, tenant), lambda: ())
        planned = gateway.attempt(lambda: runs.planned_for(around, tenant), lambda: ())
        return ScopedPrompt(texts.parts, request.scope, retrieved, planned)

    def _outgoing(
        self, messages: list[BaseMessage], arguments: Mapping[str, Any], run: BaseRunManager | None
    ) -> _Outgoing:
        """Wait in this thread until a prompt is to be sent; return it planned."""
        gateway, request, slot, planned = self._gateway, self._carried, self._slot, None
        texts = _texts(messages, arguments, gateway)
        if texts is not None and slot is not None and texts.says_the_same_as(slot.item.texts):
            if not in_event_loop():  # else those before it could not run while it waits
                woken = Event()
                slot.attach(woken.set)
                woken.wait()
            planned = slot.take()  # None if the plan was taken before
            slot.leave()
        if texts is not None and planned is None:
            planned = gateway.plan(self._scoped(texts, gateway, request, run))
        return self._with_plan(messages, arguments, texts, planned, gateway, request)

    async def _aoutgoing(
        self, messages: list[BaseMessage], arguments: Mapping[str, Any], run: BaseRunManager | None
    ) -> _Outgoing:
        """Wait in this task as `_outgoing` does."""
        gateway, request, slot, planned = self._gateway, self._carried, self._slot, None
        texts = _texts(messages, arguments, gateway)
        if texts is not None and slot is not None and texts.says_the_same_as(slot.item.texts):
            await TaskWaiter(slot).wait()
            planned = slot.take()
            slot.leave()
        if texts is not None and planned is None:
            planned = await gateway.aplan(self._scoped(texts, gateway, request, run))
        return self._with_plan(messages, arguments, texts, planned, gateway, request)

    def _with_plan(
        self,
        messages: list[BaseMessage],
        arguments: Mapping[str, Any],
        texts: PromptTexts | None,
        planned: PlannedPrompt | None,
        gateway: ModelGateway,
        request: CarriedRequest,
    ) -> _Outgoing:
        """Return what to call the inner model with: planned texts, and the request options."""
        metadata = request.config.get("metadata") or {}
        if "langgraph_node" in metadata and not self._is_shown_as_inner:
            _warn_of_lost_marks(type(self.inner), type(self).__name__)
        return gateway.attempt(
            lambda: self._sent(messages, arguments, texts, planned, request.scope),
            lambda: (planned, messages, dict(arguments)),
        )

    def _sent(
        self,
        messages: list[BaseMessage],
        arguments: Mapping[str, Any],
        texts: PromptTexts | None,
        planned: PlannedPrompt | None,
        scope: RequestScope,
    ) -> _Outgoing:
        """Return planned texts, in parts with marks where the cache has any, and options."""
        options = {**arguments, **self._request_options(arguments, scope, planned)}
        if texts is None or planned is None:
            return planned, messages, options
        sent = texts.with_texts(planned.texts)
        if planned.parts:
            body = self._given(arguments, ("prompt_cache_options", "cache_control"))
            profile = self.planner.cache
            sent, tools = with_marks(
                sent,
                texts,
                planned,
                profile,
                mark_field_for(self.inner, profile),
                arguments.get("tools") or (),
                marks_end=marks_the_end(body),
            )
            options |= {"tools": tools} if tools else {}
        return planned, sent, options

    def _given(self, arguments: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Return what the user has set of some fields: in a call, else at the model."""
        at_model = getattr(self.inner, "model_kwargs", None) or {}
        given = {
            name: arguments.get(name) or getattr(self.inner, name, None) or at_model.get(name)
            for name in names
        }
        body = arguments.get("extra_body") or getattr(self.inner, "extra_body", None) or {}
        return {name: body.get(name) if value is None else value for name, value in given.items()}

    def _request_options(
        self, arguments: Mapping[str, Any], scope: RequestScope, planned: PlannedPrompt | None
    ) -> dict[str, Any]:
        """Return `extra_body` with salt and cache key, `extra_headers` with the session's name."""
        groups = () if planned is None else planned.groups
        by_group = groups if self.send_session_id == "group" else None
        profile, key = self.planner.cache, self.salt_key

        # what the user has set stays; a call's replaces the model's, so both are merged
        def added_fields(body: Mapping[str, Any]) -> dict[str, Any]:
            known = self._given(arguments, ("prompt_cache_key", "prompt_cache_options"))
            salt = added_salt(body, scope, key) if self.send_cache_salt else {}
            return salt | added_cache_fields({**known, **body}, groups, profile, key)

        def added_headers(headers: Mapping[str, Any]) -> dict[str, str]:
            return added_session(headers, scope, key, by_group, self.session_header)

        options: dict[str, Any] = {}
        has_key = bool(groups) and profile.is_routed
        for is_wanted, name, added in (
            (self.send_cache_salt or has_key, "extra_body", added_fields),
            (self.send_session_id, "extra_headers", added_headers),
        ):
            if is_wanted:
                at_model = getattr(self.inner, name, None)
                at_model = at_model or (getattr(self.inner, "model_kwargs", None) or {}).get(name)
                given = arguments.get(name, at_model) or {}
                more = added(given)
                options |= {name: {**given, **more}} if more else {}
        return options


def _texts(
    messages: Sequence[BaseMessage], arguments: Mapping[str, Any], gateway: ModelGateway
) -> PromptTexts | None:
    """Return the texts of a prompt; None if they cannot be read."""
    return gateway.attempt(lambda: prompt_texts(messages, arguments), lambda: None)


@lru_cache(maxsize=256)
def _takes_run_manager(method: Callable[..., Any]) -> bool:
    return "run_manager" in signature(method).parameters


@cache
def _warn_of_lost_marks(kind: type[BaseChatModel], wrapper: str) -> None:
    """Say once that in agents some middleware looks at the class of the model that is wrapped."""
    if any(one.__name__ in MARK_FIELDS for one in kind.__mro__):
        _log.warning(
            "in an agent, %s(inner=%s(...)) is not recognised by middleware that asks for the "
            "model's class, such as the one for prompt caching, which then sets no cache_control "
            "marks; give the agent %s(inner=...).as_inner()",
            wrapper,
            kind.__name__,
            wrapper,
        )
