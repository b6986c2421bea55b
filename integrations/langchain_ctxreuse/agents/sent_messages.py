"""Messages as a model gets them, behind all middleware: what an earlier one shows is pointed to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue

from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.blocks import text_digest
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import Templates
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules
from langchain_ctxreuse.agents.marked_messages import marking_methods
from langchain_ctxreuse.agents.planned_messages import planned_text, repeated_blocks
from langchain_ctxreuse.chat_model.model_view import seen_as, view_class
from langchain_ctxreuse.messages import TextPart, text_parts, with_text
from langchain_ctxreuse.scope import tenant_from_config

_log = logging.getLogger("ctxreuse")
_LEAST_WORK = 1 << 20
_WORK_A_CHARACTER = 16
_BEGINNING = 32


class PointingStep:
    """Puts location annotations into the messages of one call."""

    def __init__(
        self,
        templates: Templates,
        registry: ContextRegistry,
        fail_open: FailOpen,
        profile: CacheRules = DEFAULT_CACHE,
    ) -> None:
        self.profile = profile
        self._templates = templates
        self._registry = registry
        self._fail_open = fail_open
        self.attempt = fail_open.attempt

    def messages(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """Return messages as the model gets them; a block that none before shows is whole."""
        labels = {one["label"] for message in messages for one in repeated_blocks(message)}
        if not labels:
            return list(messages)
        sent: list[BaseMessage] = []
        shown = _ShownBlocks(labels, self._templates)
        for message in messages:
            one, is_whole_again = sent_message(message, self._templates, shown.has)
            sent.append(one)
            if is_whole_again:  # not as it was planned, so it is not remembered yet
                self._remember(one)
            for text, _ in text_parts(one):
                shown.add(text)
        if shown.is_cut_short:
            _log.info("a history repeats labels too often to be searched; blocks are shown again")
        return sent

    def _remember(self, message: BaseMessage) -> None:
        planned = planned_text(message)
        if planned is not None:
            self._registry.remember_planned(planned.text, tenant_from_config() or "")

    def inside(self, model: BaseChatModel) -> BaseChatModel:
        """Return the same model, which takes this step in each call."""
        return self._fail_open.attempt(
            lambda: seen_as(model, _pointing_class(type(model), self)), lambda: model
        )

    def converted(self, prompt: PromptValue) -> PromptValue:
        """Return a prompt with its messages as the model gets them."""
        messages = prompt.to_messages()
        if not any(map(repeated_blocks, messages)):
            return prompt
        return self._fail_open.attempt(
            lambda: ChatPromptValue(messages=self.messages(messages)), lambda: prompt
        )


@lru_cache(maxsize=64)
def _pointing_class(kind: type[BaseChatModel], step: PointingStep) -> type[BaseChatModel]:
    def _convert_input(self: BaseChatModel, model_input: Any) -> PromptValue:
        return step.converted(kind._convert_input(self, model_input))

    methods: dict[str, Callable[..., Any]] = {"_convert_input": _convert_input}
    if step.profile.marks:
        methods |= marking_methods(kind, step.profile, step.attempt)
    return view_class(kind, methods)


class SentMessage(NamedTuple):
    """A message as the model gets it."""

    message: BaseMessage
    is_whole_again: bool


def sent_message(
    message: BaseMessage,
    templates: Templates,
    stands: Callable[[str, str], bool] = lambda label, block: True,
) -> SentMessage:
    """Return a message with words in place of the blocks that an earlier one shows."""
    repeated, planned = repeated_blocks(message), planned_text(message)
    if not repeated or planned is None:
        return SentMessage(message, bool(repeated))
    text = planned.text
    places: list[tuple[str, list[str]]] = []  # the text before, and the labels
    end = 0
    for one in sorted(repeated, key=itemgetter("start")):
        block = text[one["start"] : one["end"]]
        is_there = one["start"] >= end and text_digest(block).hex() == one["digest"]
        if is_there and stands(one["label"], block):
            before = text[end : one["start"]]
            if places and before == templates.separator:
                places[-1][1].append(one["label"])
            else:
                places.append((before, [one["label"]]))
            end = one["end"]
    located = ((before, templates.location_annotations(labels)) for before, labels in places)
    pieces = [before + templates.separator.join(filter(None, words)) for before, words in located]
    short = with_text(message, TextPart("".join([*pieces, text[end:]]), planned.part))
    return SentMessage(short, sum(len(labels) for _, labels in places) < len(repeated))


class _ShownBlocks:
    """Looks for labelled blocks in earlier texts, with bounded work; not found is not shown."""

    def __init__(self, labels: Iterable[str], templates: Templates) -> None:
        self._templates = templates
        self._places: dict[str, list[tuple[str, int]]] = {label: [] for label in labels}
        self._looked: dict[tuple[str, str], tuple[int, bool]] = {}
        self._work = _LEAST_WORK

    @property
    def is_cut_short(self) -> bool:
        """Whether the bound was reached."""
        return self._work < 0

    def add(self, text: str) -> None:
        """Add a text that is shown behind all others."""
        self._work += _WORK_A_CHARACTER * len(text)
        for found in self._templates.label_pattern.finditer(text):
            if found[1] in self._places:
                self._places[found[1]].append((text, found.start()))

    def has(self, label: str, block: str) -> bool:
        """Return whether a labelled block stands in one of the texts."""
        places, beginning = self._places[label], block[:_BEGINNING]
        done, stands = self._looked.get((label, block), (0, False))  # no place is looked at twice
        while not stands and done < len(places) and not self.is_cut_short:
            shown, start = places[done]
            done += 1
            self._work -= _WORK_A_CHARACTER
            if shown.startswith(beginning, start):
                self._work -= len(block)
                stands = shown.startswith(block, start)
        self._looked[label, block] = done, stands
        return stands
