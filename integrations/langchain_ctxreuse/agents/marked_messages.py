"""Marks on an agent's messages, set last: where its contexts fork, and where each step ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage

from ctxreuse.adapters.engine_options import marks_the_end
from ctxreuse.adapters.plan_metadata import METADATA_KEY
from ctxreuse.adapters.prompt_planner import PlannedPrompt
from ctxreuse.context.blocks import text_digest
from ctxreuse.context.content_parts import ContentPart, cut, without_blank_parts
from ctxreuse.planning.plan import Plan, marked_parts
from ctxreuse.rules.cache_marks import cache_options
from ctxreuse.rules.cache_rules import CacheRules
from langchain_ctxreuse.agents.planned_messages import planned_text
from langchain_ctxreuse.messages import mark_field_for, prompt_texts, role_of, with_marks

_Message = TypeVar("_Message", bound=BaseMessage)
_CALLS = ("_generate", "_agenerate", "_stream", "_astream")


def cut_metadata(plan: Plan, text: str, before: str = "") -> dict[str, Any]:
    """Return where a message's text is cut and marked, for its metadata; {} without marks."""
    parts = marked_parts(plan, "")
    if not parts:
        return {}
    lengths = [len(part.text) for part in parts]
    marked = [number for number, part in enumerate(parts) if part.is_marked]
    if before.strip():
        lengths, marked = [len(before), *lengths], [number + 1 for number in marked]
    else:
        lengths[0] += len(before)
    return {
        "cuts": lengths,
        "marked": marked,
        "digest": text_digest(text).hex(),
        "key": plan.prompt_cache_key,
    }


def with_cuts(message: _Message, plan: Plan, before: str = "") -> _Message:
    """Return a planned message whose metadata say where it is cut and marked, for such caches."""
    text = planned_text(message)
    more = {} if text is None else cut_metadata(plan, text.text, before)
    if not more:
        return message
    metadata = {**message.additional_kwargs[METADATA_KEY], **more}
    kwargs = {**message.additional_kwargs, METADATA_KEY: metadata}
    return message.model_copy(update={"additional_kwargs": kwargs})


def is_cut(message: BaseMessage) -> bool:
    """Return whether a message's metadata say where it is cut."""
    carried = message.additional_kwargs.get(METADATA_KEY)
    return isinstance(carried, Mapping) and "cuts" in carried


def marking_methods(
    kind: type[BaseChatModel], profile: CacheRules, attempt: Callable[[Any, Any], Any]
) -> dict[str, Callable[..., Any]]:
    """Return what a model's class does otherwise: its calls get messages with marks."""

    def calling(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def call(
            self: BaseChatModel,
            messages: list[BaseMessage],
            stop: list[str] | None = None,
            run_manager: Any = None,
            **kwargs: Any,
        ) -> Any:
            sent, arguments = attempt(
                lambda: _marked(self, messages, kwargs, profile), lambda: (messages, kwargs)
            )
            return method(self, sent, stop=stop, run_manager=run_manager, **arguments)

        return call

    own = [name for name in _CALLS if getattr(kind, name) is not getattr(BaseChatModel, name)]
    return {name: calling(name) for name in own}


def _marked(
    model: BaseChatModel,
    messages: list[BaseMessage],
    arguments: dict[str, Any],
    profile: CacheRules,
) -> tuple[list[BaseMessage], dict[str, Any]]:
    """Return messages with marks, and a call's arguments."""
    if not any(map(is_cut, messages)):
        return messages, arguments
    texts = prompt_texts(messages, arguments)
    parts = [[ContentPart(part.text)] for part in texts.parts]
    last: dict[int, int] = {}  # the last text of each message
    answers = [n for n, message in enumerate(messages) if role_of(message) == "assistant"]
    opening = next(n for n, message in enumerate(messages) if is_cut(message))
    for number, position in enumerate(texts.positions):
        if position is None:
            continue
        message = messages[position.message]
        planned = planned_text(message)
        if planned is not None and planned.part == position.part:
            own = _cut_text(message, planned.text)
            is_answered = bool(answers) and position.message < answers[-1]
            parts[number] = own
            if is_answered or position.message != opening:
                is_first = position.message == opening
                parts[number] = _with_spare_marks(own, is_answered, is_first)
        if texts.parts[number].text.strip():
            last[position.message] = number
    for end in (len(messages), *answers[-1:]):
        ours = [n for n in last if n < end and n not in answers]
        if ours and (end == len(messages) or ours[-1] > max([-1, *answers[:-1]])):
            own = parts[last[ours[-1]]]
            own[-1] = own[-1].as_end()
    whole = tuple(tuple(without_blank_parts(one)) or tuple(one) for one in parts)
    field = mark_field_for(model, profile)
    given = {**(getattr(model, "model_kwargs", None) or {}), **arguments}
    options = given.get("prompt_cache_options") or getattr(model, "prompt_cache_options", None)
    sent, tools = with_marks(
        messages,
        texts,
        PlannedPrompt(0, tuple(part.text for part in texts.parts), parts=whole),
        profile,
        field,
        arguments.get("tools") or (),
        marks_end=marks_the_end({**given, "prompt_cache_options": options}),
    )
    more: dict[str, Any] = {"tools": tools} if tools else {}
    if field == "prompt_cache_breakpoint":
        body = arguments.get("extra_body") or getattr(model, "extra_body", None) or {}
        key = next(
            one.additional_kwargs[METADATA_KEY].get("key") for one in messages if is_cut(one)
        )
        added = {"prompt_cache_key": key, "prompt_cache_options": cache_options(profile)}
        known = {**given, "prompt_cache_options": options}
        added = {name: one for name, one in added.items() if known.get(name) is None}
        more["extra_body"] = {**added, **body}
    return sent, {**arguments, **more}


def _cut_text(message: BaseMessage, text: str) -> list[ContentPart]:
    """Return a planned text in parts; whole if it is not what was planned any more."""
    carried = message.additional_kwargs.get(METADATA_KEY)
    if not isinstance(carried, Mapping) or carried.get("digest") != text_digest(text).hex():
        return [ContentPart(text)]
    cuts, marked = _numbers(carried.get("cuts")), _numbers(carried.get("marked"))
    parts = cut(text, cuts)
    return [part._replace(is_marked=n in marked) for n, part in enumerate(parts)]


def _with_spare_marks(
    parts: list[ContentPart], is_answered: bool, is_first: bool
) -> list[ContentPart]:
    """Return a text whose marks give way; of what was answered the first text's last stays."""
    marked = [number for number, part in enumerate(parts) if part.is_marked]
    if is_answered:
        marked = marked[-1:] if is_first else []
    return [
        part.as_spare() if number in marked else part._replace(is_marked=False)
        for number, part in enumerate(parts)
    ]


def _numbers(value: object) -> list[int]:
    """Return a list of numbers from 0; an empty one for anything else."""
    is_list = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
    return value if is_list else []  # type: ignore[return-value]
