"""A chat model around another one, which plans the contexts in prompts and the order of calls."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from copy import copy
from functools import cache, lru_cache, partial
from inspect import signature
from operator import itemgetter
from typing import Any, ClassVar, TypeAlias

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseRunManager,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import PrivateAttr

from ctxreuse.context.scope import RequestScope, serving
from ctxreuse.pipeline.engine_options import EngineOptions
from ctxreuse.pipeline.ordered_release import as_they_end, planned_aside, run_here
from ctxreuse.pipeline.prompt_turn import PlannedPrompt, ScopedPrompt, WirePrompt
from ctxreuse.serving.planning_fields import PlansPrompts
from langchain_ctxreuse.chat_model.delegating_model import DelegatingChatModel
from langchain_ctxreuse.documents.run_documents import follow_runs, run_documents
from langchain_ctxreuse.messages import (
    MARK_FIELDS,
    PromptTexts,
    TextPart,
    prompt_texts,
    reported_usage,
    with_marks,
    with_text,
)
from langchain_ctxreuse.scope import CarriedRequest, on_carrying_copy, scope_from_config

_log = logging.getLogger("ctxreuse")

_Outgoing: TypeAlias = tuple[PlannedPrompt | None, list[BaseMessage], dict[str, Any]]
"""What to call the inner model with: the plan, if there is one, the messages, and the rest."""

_Planned: TypeAlias = tuple[PromptTexts, PlannedPrompt]


def _planned(name: str, how: str) -> Any:
    """Return the inner model's stream, planned; None if it has none, as LangChain expects it."""

    def stream(self: ReuseChatModel) -> Any:
        own = getattr(self.inner, name, None)
        return own and partial(getattr(self, how), own)

    return property(stream)


class ReuseChatModel(PlansPrompts, DelegatingChatModel):
    """Sends another model's calls in the order, and with the contexts, that the cache serves best.

    Planned are contexts in new messages: documents that a retriever returned, or that
    `format_context` put in, at least two, with the same separator between each two. They change
    places; all else stays. `prompt_statistics` counts what was planned, and why others were not.
    Messages of earlier turns are sent as they were sent then. Answers are the inner model's own.

    Calls that come at the same time, from tasks or threads, are planned together, and so are those
    of a batch, which is answered in the caller's order. They are sent in the planned order. A
    chain's `batch_as_completed` calls the wrapper for each input.

    Everything else is the inner model's. Callbacks, traces and LangChain's cache see the prompts as
    given. Tenant and conversation come from `config={"configurable": {"tenant": ..., "thread_id":
    ...}}` or `ctxreuse.request_context`. The planner forgets calls that fail, are cancelled, or are
    answered by LangChain's cache. If planning fails, prompts are sent as given.

    Args:
        inner: Any chat model.
        planner: Plans the contexts. None takes the one that this process has for the same engine
            (class, address and model of `inner`), which all such wrappers share, also those that
            are made for each call; `ReusePlanner()` is one apart.
        window_s: Seconds for which a call that may show a context waits for others; 0 never waits.
        strategy: "reuse", "paper" or "none".
        prime: Whether calls are sent besides, up to where later prompts will likely part from one,
            for engines that keep states at junctions: `ReusePlanner(cache="vllm(states=...)")`.
        send_cache_salt: Whether each tenant's calls get the tenant's `cache_salt` in `extra_body`,
            for OpenAI-compatible models.
        send_session_id: Whether a conversation's calls get its hashed name in `extra_headers`, for
            routers; "group" sends the id of the prompt's prefix group instead.
        session_header: The header of the session id, such as "x-smg-routing-key".
        salt_key: A secret for both hashes; processes that share it share the cache.
        find_retrieved: Whether documents are planned that a retriever returned, and not only those
            that `format_context` put in.
    """

    _usage_of = staticmethod(reported_usage)
    _follow_runs = staticmethod(follow_runs)
    _adds_up: ClassVar[bool] = True
    # by what the prompts say, the plans of the batch whose calls this copy makes
    _waiting: dict[object, deque[PlannedPrompt]] = PrivateAttr(default_factory=dict)

    def _is_built_from(self, changes: Mapping[str, Any]) -> bool:
        # copies that a config makes for each call, with another inner model, still plan together
        fields = PlansPrompts.model_fields.keys() | ({"inner"} if self.prime else set())
        return not fields.isdisjoint(changes)

    # The public methods know the config; each call runs on a copy that carries it.

    invoke = on_carrying_copy(BaseChatModel.invoke)
    ainvoke = on_carrying_copy(BaseChatModel.ainvoke)
    stream = on_carrying_copy(BaseChatModel.stream)
    astream = on_carrying_copy(BaseChatModel.astream)
    _chat_model_stream_v3 = on_carrying_copy(BaseChatModel._chat_model_stream_v3)
    _achat_model_stream_v3 = on_carrying_copy(BaseChatModel._achat_model_stream_v3)

    # Batches are planned together; LangChain starts their calls in the order in which it gets them.

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        **options: Any,
    ) -> list[AIMessage]:
        """Return the answers in the caller's order; the calls are started in the planned order."""
        answers = self.batch_as_completed(inputs, config, **options)
        return [answer for _, answer in sorted(answers, key=itemgetter(0))]

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        **options: Any,
    ) -> list[AIMessage]:
        """`batch`, awaited."""
        pairs = [pair async for pair in self.abatch_as_completed(inputs, config, **options)]
        return [answer for _, answer in sorted(pairs, key=itemgetter(0))]

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Yield input positions and answers as they come; the calls are started as in `batch`."""
        planned = self._planned_batch(inputs, config, options)
        with self._in_order(inputs, *planned) as (model, positions, ordered, configs):
            ask = super(ReuseChatModel, model).batch_as_completed
            found: Any = ask(ordered, configs, **options)
            for number, answer in found:
                yield positions[number], answer

    async def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        """`batch_as_completed`, awaited; who stops listening ends the calls."""
        work = partial(self._planned_batch, inputs, config, kwargs)
        planned = await planned_aside(work, len(inputs))
        with self._in_order(inputs, *planned) as (model, positions, ordered, configs):

            async def answer(at: int, one: Any, its: RunnableConfig) -> tuple[int, Any]:
                try:
                    return at, await model.ainvoke(one, its, **kwargs)
                except Exception as error:
                    if return_exceptions:
                        return at, error
                    raise

            calls = zip(positions, ordered, configs, strict=True)
            works = [partial(answer, *call) for call in calls]
            at_a_time = configs[0].get("max_concurrency") if configs else None
            async with aclosing(as_they_end(works, at_a_time)) as answers:
                async for pair in answers:
                    yield pair

    def _planned_batch(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None,
        arguments: Mapping[str, Any],
    ) -> tuple[list[RunnableConfig], dict[int, _Planned]]:
        """Return a batch's configs, and its prompts, planned together, in planned order."""
        configs = get_config_list(config, len(inputs)) if inputs else []
        read: dict[int, tuple[PromptTexts, ScopedPrompt]] = {}
        for position, (value, own) in enumerate(zip(inputs, configs, strict=True)):
            try:
                messages = self._convert_input(value).to_messages()
            except Exception:  # it is no prompt: `invoke` raises it again
                continue
            request = CarriedRequest(own, scope_from_config(own))
            found = self._gateway.attempt(partial(self._read, messages, arguments, request))
            if found is not None:
                read[position] = found
        positions = list(read)
        plans = self._gateway.plan_batch([prompt for _, prompt in read.values()])
        return configs, {(at := positions[one.position]): (read[at][0], one) for one in plans}

    @contextmanager
    def _in_order(
        self,
        inputs: Sequence[LanguageModelInput],
        configs: Sequence[RunnableConfig],
        planned: Mapping[int, _Planned],
    ) -> Iterator[tuple[ReuseChatModel, list[int], list[Any], list[RunnableConfig]]]:
        """Yield the copy that has a batch's plans, and positions, inputs and configs in order.

        What is not planned stands behind. Plans that are not taken are forgotten.
        """
        positions = list(dict.fromkeys([*planned, *range(len(inputs))]))
        ordered = [configs[position] for position in positions]
        if ordered:  # LangChain asks the first one that it gets
            at_a_time = configs[0].get("max_concurrency")
            ordered[0] = {**ordered[0], "max_concurrency": at_a_time}
        calling = copy(self)
        calling._waiting = defaultdict(deque)
        for texts, plan in planned.values():
            calling._waiting[texts.said].append(plan)
        try:
            yield calling, positions, [inputs[one] for one in positions], ordered
        finally:
            for plans in calling._waiting.values():
                while plans:
                    self._gateway.forget(plans.popleft())

    # The private methods send what LangChain hands to them: planned, in the planned order.

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answered = self._answered("_generate", messages, stop, run_manager, kwargs, blocks=True)
        return run_here(answered)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await self._answered("_agenerate", messages, stop, run_manager, kwargs)

    async def _answered(
        self,
        method: str,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: BaseRunManager | None,
        given: Mapping[str, Any],
        *,
        blocks: bool = False,
    ) -> ChatResult:
        planned, sent, arguments = await self._outgoing(messages, given, run_manager, blocks=blocks)
        with self._gateway.calling(planned) as read, serving(self._carried.scope):
            if _takes_run_manager(getattr(type(self.inner), method)):  # as LangChain does it
                arguments["run_manager"] = run_manager
            answer = getattr(self.inner, method)(sent, stop=stop, **arguments)
            result: ChatResult = answer if blocks else await answer
            return read(result) if result.generations else result

    # LangChain asks for the signatures at each call, and finding one out takes long
    _generate.__signature__ = signature(_generate)  # type: ignore[attr-defined]
    _agenerate.__signature__ = signature(_agenerate)  # type: ignore[attr-defined]

    _stream = _planned("_stream", "_streamed")
    _astream = _planned("_astream", "_astreamed")
    _stream_chat_model_events = _planned("_stream_chat_model_events", "_streamed")
    _astream_chat_model_events = _planned("_astream_chat_model_events", "_astreamed")

    def _streamed(
        self,
        stream: Callable[..., Iterator[Any]],
        /,  # a call may have an argument `stream`, too
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        outgoing = self._outgoing(messages, kwargs, run_manager, blocks=True)
        planned, sent, arguments = run_here(outgoing)
        if run_manager is not None:
            arguments["run_manager"] = run_manager
        start = partial(stream, sent, stop=stop, **arguments)
        with closing(self._gateway.stream(planned, start)) as steps:
            with serving(self._carried.scope):  # not in the reader's
                first = next(steps, None)
            if first is not None:
                yield first
            yield from steps

    async def _astreamed(
        self,
        stream: Callable[..., AsyncIterator[Any]],
        /,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        planned, sent, arguments = await self._outgoing(messages, kwargs, run_manager)
        if run_manager is not None:
            arguments["run_manager"] = run_manager
        start = partial(stream, sent, stop=stop, **arguments)
        async with aclosing(self._gateway.astream(planned, start)) as steps:
            with serving(self._carried.scope):
                first = await anext(steps, None)
            if first is not None:
                yield first
            async for step in steps:
                yield step

    def _read(
        self,
        messages: Sequence[BaseMessage],
        arguments: Mapping[str, Any],
        request: CarriedRequest,
        run: BaseRunManager | None = None,
    ) -> tuple[PromptTexts, ScopedPrompt]:
        """Return a prompt's texts, and what is to be planned."""
        texts = prompt_texts(messages, arguments)
        root = run_documents().run_of((run and run.parent_run_id) or request.config).root
        rendered_only = not self.find_retrieved
        return texts, ScopedPrompt(texts.parts, request.scope, root, rendered_only, texts.beside)

    async def _outgoing(
        self,
        messages: list[BaseMessage],
        arguments: Mapping[str, Any],
        run: BaseRunManager | None,
        *,
        blocks: bool = False,
    ) -> _Outgoing:
        """Wait until a prompt is to be sent, in this thread if it blocks; return it planned."""
        read = partial(self._read, messages, arguments, self._carried, run)
        texts, prompt = self._gateway.attempt(read) or (None, None)
        planned = None
        with suppress(IndexError):  # nothing of this prompt waits any more
            if self._waiting and texts is not None:
                planned = self._waiting.get(texts.said, deque()).popleft()
        if prompt is not None:
            wire = partial(self._on_the_wire, messages, arguments, texts)
            planned = await self._gateway.aplan(planned or prompt, wire, blocks=blocks)
        return self._gateway.attempt(
            lambda: self._sent(messages, arguments, texts, planned),
            lambda: (planned, messages, dict(arguments)),
        )

    def _on_the_wire(
        self,
        messages: list[BaseMessage],
        arguments: Mapping[str, Any],
        texts: PromptTexts | None,
        planned: PlannedPrompt,
    ) -> WirePrompt:
        _, sent, arguments = self._sent(messages, arguments, texts, planned)
        given = self._given(arguments, ("extra_body", "tools"))
        model = arguments.get("model") or getattr(self.inner, "model_name", None)
        fields = {"model": model, **(given["extra_body"] or {})}
        fields |= {"tools": given["tools"]} if given["tools"] else {}
        positions = () if texts is None else texts.positions
        places = [position and position.message for position in positions]
        wired: Any = convert_to_openai_messages(sent)
        return WirePrompt(wired, places, fields, arguments.get("extra_headers") or {})

    def _sent(
        self,
        messages: list[BaseMessage],
        arguments: Mapping[str, Any],
        texts: PromptTexts | None,
        planned: PlannedPrompt | None,
    ) -> _Outgoing:
        """Return planned texts, in parts with marks where the cache has any, and options."""
        request, profile = self._carried, self.planner.wire_cache
        if not self.planner.cache.marks and "langgraph_node" in request.config.get("metadata", ()):
            _warn_of_lost_marks(type(self.inner), type(self).__name__)
        options = dict(arguments)
        if self.send_cache_salt or self.send_session_id or profile.is_routed:
            options |= self._request_options(arguments, request.scope, planned)
        if texts is None or planned is None:
            return planned, messages, options
        sent = list(messages)
        for position, part, text in zip(texts.positions, texts.parts, planned.texts, strict=True):
            if position is not None and text != part.text:
                new = TextPart(text, position.part)
                sent[position.message] = with_text(sent[position.message], new)
        if planned.parts:
            body = self._given(arguments, ("prompt_cache_options", "cache_control"))
            tools = arguments.get("tools") or ()
            sent, tools = with_marks(sent, texts, planned.parts, profile, self.inner, tools, body)
            options |= {"tools": tools} if tools else {}
        return planned, sent, options

    def _given(self, arguments: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Return what the user has set of some fields: in a call, else at the model."""
        at_model = getattr(self.inner, "model_kwargs", None) or {}
        given = {
            name: arguments.get(name, getattr(self.inner, name, None) or at_model.get(name))
            for name in names
        }
        body = arguments.get("extra_body") or getattr(self.inner, "extra_body", None) or {}
        return {name: body.get(name) if value is None else value for name, value in given.items()}

    def _request_options(
        self, arguments: Mapping[str, Any], scope: RequestScope, planned: PlannedPrompt | None
    ) -> dict[str, Any]:
        """Return `extra_body` with salt and cache key, `extra_headers` with the session's name."""
        names = ("prompt_cache_key", "prompt_cache_options")
        known = self._given(arguments, names) if self.planner.wire_cache.is_routed else {}
        # a call's replaces the model's, so both are merged
        given = self._given(arguments, ("extra_body", "extra_headers"))
        groups = () if planned is None else planned.groups
        merged = {name: one or {} for name, one in given.items()}
        added = EngineOptions.of(self).added(groups, scope, known, *merged.values())
        return {name: {**merged[name], **more} for name, more in added.items()}


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
            "marks; %s sets its own with planner=ReusePlanner(cache=...)",
            wrapper,
            kind.__name__,
            wrapper,
        )
