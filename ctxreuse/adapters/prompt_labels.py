"""Labels as the application gave them, and as the model sees them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ctxreuse.adapters.plan_metadata import METADATA_KEY, plain_id
from ctxreuse.context.blocks import BlockId
from ctxreuse.context.fork_safety import cached_property
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates

_WORD = "[0-9A-Za-z_]"
_ORDINAL = "[1-9][0-9]{0,17}"
_DEEPEST = 20
_NAMES_OF_A_CALL = ("id", "index", "name", "tool_call_id", "type")


class ContextLabels(NamedTuple):
    """The labels of a context as it was sent."""

    ordinals: tuple[int, ...] = ()
    ids: tuple[BlockId, ...] = ()


@dataclass(frozen=True)
class PromptLabels:
    """Which label the model sees for each that the application gave, at one place of a prompt."""

    sent: tuple[int, ...] = ()
    templates: Templates = DEFAULT_TEMPLATES

    @cached_property
    def renames(self) -> bool:
        """Whether any label is another one for the model, and can be told from other words."""
        in_order = self.sent == tuple(range(1, len(self.sent) + 1))
        return not in_order and _forms(self.templates.label) is not None

    @cached_property
    def _given(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for given, sent in enumerate(self.sent, start=1):
            first.setdefault(sent, given)  # two contexts of one turn may show the same block
        return first

    @cached_property
    def _in_order(self) -> list[int]:
        return sorted(self._given)

    @cached_property
    def _free_before(self) -> list[int]:
        """For each number in order: how many before it the model sees no block under."""
        return [ordinal - place for place, ordinal in enumerate(self._in_order, start=1)]

    def given(self, ordinal: int) -> int:
        """Return the application's number for one that the model sees."""
        known = self._given.get(ordinal)
        if known is not None:
            return known
        # the n-th number that the model sees no block under is the n-th behind the application's
        return len(self.sent) + ordinal - bisect_left(self._in_order, ordinal)

    def as_sent(self, ordinal: int) -> int:
        """Return the number that the model sees for one of the application's."""
        if ordinal <= len(self.sent):
            return self.sent[ordinal - 1]
        rank = ordinal - len(self.sent)
        return rank + bisect_left(self._free_before, rank)

    def to_given(self, text: str, start: int = 0) -> str:
        """Return what the model says from a place on, with the labels of the application."""
        return self._renamed(text, self.given, start)

    def to_sent(self, text: str) -> str:
        """Return what the application says with the labels that the model sees."""
        return self._renamed(text, self.as_sent)

    def _renamed(self, text: str, number: Callable[[int], int], start: int = 0) -> str:
        forms = _forms(self.templates.label)
        if forms is None or not self.renames:
            return text[start:]
        pieces: list[str] = []
        for found in forms.whole.finditer(text, start):  # what is before still ends a word
            first, end = found.span(1)
            pieces += text[start:first], str(number(int(found[1])))
            start = end
        return "".join([*pieces, text[start:]])


class TextStream:
    """Renames the labels in a text that comes piece by piece."""

    def __init__(self, labels: PromptLabels) -> None:
        self._labels = labels
        self._forms = _forms(labels.templates.label) if labels.renames else None
        self._last = self._kept = ""

    @property
    def keeps_back(self) -> bool:
        """Whether something that has come is not shown yet."""
        return bool(self._kept)

    def feed(self, text: str) -> str:
        """Return what can be shown now that a piece has come."""
        if self._forms is None:
            return text
        whole = self._last + self._kept + text
        # a beginning of a label is short, so the end of the text tells
        start = max(len(self._last), len(whole) - self._forms.longest)
        found = self._forms.beginning.search(whole, start)
        end = len(whole) if found is None else found.start()
        return self._shown(whole[len(self._last) : end], whole[end:])

    def flush(self) -> str:
        """Return what is kept back; no piece follows."""
        kept = self._kept
        self._kept = ""
        return self._shown(kept, "")

    def _shown(self, text: str, kept: str) -> str:
        before, self._kept = self._last, kept
        self._last = text[-1:] or self._last
        return self._labels.to_given(before + text, len(before))


def renamed(value: Any, rename: Callable[[str], str], depth: int = _DEEPEST) -> Any:
    """Return a copy of nested values with all texts in them renamed; the same object if none is."""
    if isinstance(value, str):
        text = rename(value)
        return value if text == value else text
    if depth <= 0:
        return value
    return _with_each(value, lambda name, one: renamed(one, rename, depth - 1))


def renamed_calls(calls: Any, rename: Callable[[str], str]) -> Any:
    """Return tool calls with the labels in their arguments renamed; the same object if none is."""

    def field(name: Any, one: Any) -> Any:
        return one if name in _NAMES_OF_A_CALL else renamed(one, rename)

    def field_of_call(name: Any, one: Any) -> Any:
        return _with_each(one, field) if name == "function" else field(name, one)

    def call(_: Any, one: Any) -> Any:
        return _with_each(one, field_of_call)

    return _with_each(calls, call) if isinstance(calls, (list, tuple)) else call(None, calls)


def _with_each(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a copy of a value with what it holds changed; the same object if nothing is."""
    if isinstance(value, dict):
        entries = {name: change(name, one) for name, one in value.items()}
        return value if _same(value.values(), entries.values()) else entries
    if type(value) in (list, tuple):
        items = [change(None, one) for one in value]
        return value if _same(value, items) else type(value)(items)
    fields = getattr(type(value), "model_fields", None)
    if isinstance(fields, dict):
        held = {name: getattr(value, name) for name in fields if hasattr(value, name)}
        new = {name: change(name, one) for name, one in held.items()}
        changed = {name: one for name, one in new.items() if one is not held[name]}
        return value.model_copy(update=changed) if changed else value
    return value


def _same(given: Any, new: Any) -> bool:
    return all(one is other for one, other in zip(given, new, strict=True))


def labels_metadata(labels: PromptLabels, contexts: Sequence[ContextLabels]) -> dict[str, Any]:
    """Return what an answer's labels stand for, as JSON-compatible values."""
    templates = labels.templates
    sources: dict[str, Any] = {}
    for context in contexts:
        numbers = list(map(labels.given, context.ordinals))
        sent = templates.block_labels(context.ordinals)
        shown = templates.block_labels(numbers) if labels.renames else sent
        for at, block_id in enumerate(context.ids):
            source = {"id": plain_id(block_id), "sent": sent[at]}
            if numbers[at] <= len(labels.sent):
                source["rank"] = numbers[at] - 1
            sources[shown[at]] = source
    return sources


def answer_sources(metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what an answer's metadata says of its labels, as far as `labels_metadata` wrote it."""
    carried = metadata.get(METADATA_KEY)
    labels = carried.get("labels") if isinstance(carried, Mapping) else None
    return {
        label: source
        for label, source in (labels.items() if isinstance(labels, Mapping) else ())
        if isinstance(source, Mapping) and isinstance(source.get("id"), (str, int))
    }


def labels_in(text: str, templates: Templates) -> list[str]:
    """Return the labels that a text names, each once, in the order in which it does."""
    forms = _forms(templates.label)
    pattern = templates.label_pattern if forms is None else forms.whole
    numbers = dict.fromkeys(int(found[1]) for found in pattern.finditer(text))
    return templates.block_labels(list(numbers))


class _Forms(NamedTuple):
    r"""How a label looks without the brackets around it, so that "[Doc_1, Doc_2]" is found, too."""

    whole: re.Pattern[str]
    beginning: re.Pattern[str]
    longest: int


@lru_cache(maxsize=64)
def _forms(label: str) -> _Forms | None:
    """Return how a label is found; None if it cannot be told from other words and numbers."""
    before, _, after = label.partition("{ordinal}")
    if re.search("[A-Za-z]", before):
        before = re.sub(f"^(?!{_WORD})[ -~]+?(?={_WORD})", "", before)
        after = re.sub(f"(?:(?!{_WORD})[ -~])+$", "", after)
    elif not re.search(r"[^\s0-9]", before):
        return None
    left = f"(?<!{_WORD})" if re.match(_WORD, before) else ""
    ends_in_word = not after or re.search(f"{_WORD}$", after)
    right = rf"(?!{_WORD}|\.[0-9A-Za-z])" if ends_in_word else ""  # "Doc_1.pdf" is a file
    whole = f"{left}{_written(before)}({_ORDINAL}){_written(after)}{right}"
    tail = _beginning_of(f"{after}." if right else after[:-1], "")
    beginning = f"{left}{_beginning_of(before, f'(?:{_ORDINAL}{tail})?')}\\Z"
    longest = len(before) + len(after) + 2 * label.count("_") + 19
    return _Forms(re.compile(whole), re.compile(beginning, re.DOTALL), longest)


def _written(text: str) -> str:
    """Return a pattern that matches a text as it is, and as Markdown writes it."""
    return re.escape(text).replace("_", r"\\{0,2}_")


def _beginning_of(text: str, behind: str) -> str:
    """Return a pattern that matches each beginning of a text, and the whole with what follows."""
    pattern = behind
    for character in reversed(text):
        pattern = f"(?:{re.escape(character)}{pattern})?" if pattern else f"{re.escape(character)}?"
        if character == "_":
            pattern = rf"\\{{0,2}}{pattern}"
    return pattern
