"""Contexts as the model reads them: labels, blocks, annotations and question, as chat messages.

What requests can share stands first: stable text, blocks, annotation, question. Order and location
annotations are from ContextPilot (sections 5.3 and 6); `PAPER_TEMPLATES` has its words.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple, get_args

from ctxreuse.context.blocks import (
    DIGEST_BYTES,
    BlockId,
    ContextBlock,
    Message,
    copied_message,
    encoded,
)
from ctxreuse.context.checks import (
    checked_choice,
    checked_integer,
    checked_kind,
    checked_optional_integer,
    checked_texts,
)
from ctxreuse.context.fork_safety import cached_property
from ctxreuse.errors import InvalidRequestError, describe

_LONGEST_QUOTED = 100
_OF_A_LABEL = r"[A-Z]{1,2}(?=[A-Z]{0,2}\b)"  # a tokenizer makes about two of four letters
_TOKEN = re.compile(rf"{_OF_A_LABEL}|[^\W\d_]+|_|[^\S\n](?=\d)|\d|[^\w\s]")
_LONGEST_ID = 200
_SOME_LETTERS = "ABCD"
_MOST_ENDINGS = 256  # lines that are looked at behind a label

_FIELDS = {
    "label": ("{letters}", "{id}"),
    "block": ("{label} then {text}",),
    "order": ("{order}",),
    "location": ("{label}", "{labels}"),
    "replaced": ("{label} then {old}",),
    "withdrawn": ("{old}",),
}
"""What each template holds, in which order."""

AnnotationPosition = Literal["before_question", "after_question"]


@dataclass(frozen=True)
class Templates:
    """The words around blocks.

    Args:
        label: A block's label, made from the block alone: `{letters}` is four letters of a hash of
            its text, `{id}` its id.
        block: A labelled block; `{label}` comes before `{text}`, and both stand once.
        order: The order annotation; `{order}` is the best blocks, best first: their labels where
            these are shown, else their places in the prompt, from 1.
        order_separator: What stands between them.
        most_ranked: How many of the best blocks the order annotation names; None names all. Where
            these stand first, best first, there is none.
        location: The location annotation; `{label}` is the left-out block's label, in words for
            each; `{labels}` is all labels of a turn, in one line behind the blocks.
        replaced: Said of a block that was shown and whose text has changed; `{label}` is the
            changed one's, `{old}` the earlier one's.
        withdrawn: Said of one that no longer holds; `{old}` is its label.
        removed: Stands in place of a text that was taken out of a history.
        separator: What stands between the parts of the message.
        order_position: Whether the order annotation comes before or after the question.

    Raises:
        InvalidRequestError: a template lacks its field or has another one; all methods raise it for
            a wrong type.
    """

    label: str = "[{letters}]"
    block: str = "{label} {text}"
    order: str = "Read documents {order} first."
    order_separator: str = ", "
    most_ranked: int | None = 3
    location: str = "See also {labels} above."
    replaced: str = "{label} replaces {old}."
    withdrawn: str = "{old} no longer holds; do not use it."
    removed: str = "(removed)"
    separator: str = "\n\n"
    order_position: AnnotationPosition = "before_question"

    def __post_init__(self) -> None:
        for name, allowed in _FIELDS.items():
            template, each = getattr(self, name), "each " if len(allowed) == 1 else ""
            found = re.findall(r"\{[^{}]*\}?|\}", template) if isinstance(template, str) else []
            if " then ".join(found) not in allowed:
                raise InvalidRequestError(
                    f"template {name} is {describe(template)}; it must hold "
                    f"{' or '.join(allowed)}, {each}once, and no other braces"
                )
        checked_optional_integer("most_ranked", self.most_ranked, 1)
        for name in ("order_separator", "separator", "removed"):
            checked_kind(f"template {name}", getattr(self, name), str, "a string")
        checked_choice("order_position", self.order_position, get_args(AnnotationPosition))

    def label_of(self, block: ContextBlock) -> str:
        """Return a block's label: the same in every prompt, turn and process."""
        checked_kind("block", block, ContextBlock, "a ContextBlock")
        before, field, after = self._label
        if field != "{id}":
            return f"{before}{label_letters(block.digest)}{after}"
        try:
            return f"{before}{block.id!s}{after}"
        except ValueError:  # an integer past Python's limit of digits
            return f"{before}{int(block.id):#x}{after}"

    @cached_property
    def _label(self) -> tuple[str, str, str]:
        """What stands before its field, the field, and what stands behind it."""
        field = "{id}" if "{id}" in self.label else "{letters}"
        return self.label.partition(field)

    def before_text(self, label: str) -> str:
        """Return what stands in the message before a block's text."""
        checked_kind("label", label, str, "a string")
        return self.block.partition("{text}")[0].replace("{label}", label)

    @cached_property
    def after_text(self) -> str:
        """What stands in the message after a block's text."""
        return self.block.partition("{text}")[2]

    @cached_property
    def label_pattern(self) -> re.Pattern[str]:
        """A pattern that finds every label that may begin a block in a text, as group 1."""
        opening, _, closing = map(re.escape, self.before_text("{label}").partition("{label}"))
        begins = f"(?:^|(?<={re.escape(self.separator)}))" if self.separator else ""
        return re.compile(f"{begins}{opening}({self._any_label()}){closing}", re.MULTILINE)

    @cached_property
    def inner_pattern(self) -> re.Pattern[str] | None:
        """A pattern that finds every label in a text, also inside a block; None where none can."""
        before, field, after = self._label
        is_bare = field == "{id}" and not (before and after)
        return None if is_bare else re.compile(self._any_label())

    def _any_label(self, character: str = "[^\n]") -> str:
        """Return a pattern of every label; ids are made of some kind of character."""
        before, field, after = self._label
        name = "[A-Z]{4}" if field == "{letters}" else f"{character}{{1,{_LONGEST_ID}}}?"
        return re.escape(before) + name + re.escape(after)

    @cached_property
    def ending_pattern(self) -> re.Pattern[str]:
        """A pattern that finds where a block may end."""
        after, separator = re.escape(self.after_text), re.escape(self.separator or "\n")
        return re.compile(rf"{after}(?:\n|{separator}|\Z)")

    @cached_property
    def outdated_pattern(self) -> re.Pattern[str]:
        """A pattern that finds where a text says of a label that it no longer holds, in a group."""
        label = f"({self._any_label()})"
        said = self.replaced.partition("{label}")[2], self.withdrawn
        words = (re.escape(one).replace(r"\{old\}", label) for one in said)
        return re.compile("|".join(words))

    def quoted_outdated(self, text: str) -> str:
        """Return the words on a block that no longer holds and was shown without a label."""
        line = " ".join(checked_kind("text", text, str, "a string").split())
        shown = line if len(line) <= _LONGEST_QUOTED else f"{line[:_LONGEST_QUOTED]}..."
        return self.outdated_annotation(f'"{shown}"')

    @cached_property
    def outdated_words(self) -> tuple[str, ...]:
        """Texts of which one stands wherever `outdated_pattern` is found."""
        pieces = (re.split(r"\{label\}|\{old\}", one) for one in (self.replaced, self.withdrawn))
        return tuple(max(one, key=len) for one in pieces)

    def outdated_annotation(self, old: str, label: str | None = None) -> str:
        """Return the words on a block shown as `old`: it is `label` now, or (None) gone."""
        checked_kind("old", old, str, "a string")
        if label is None:
            return self.withdrawn.replace("{old}", old)
        checked_kind("label", label, str, "a string")
        before, _, after = self.replaced.partition("{old}")
        return before.replace("{label}", label) + old + after

    def order_annotation(self, named: Sequence[str]) -> str:
        """Return the ranking in words, of labels or places of blocks in the retriever's order."""
        best = checked_texts("named", named)[: self.most_ranked]
        return self.order.replace("{order}", self.order_separator.join(best))

    def order_tokens(self, number: int, *, is_labelled: bool = False) -> int:
        """Return about how many tokens the order annotation of a number of blocks has.

        Each word, sign, digit, two letters of a label, and space before a digit count as one.
        """
        number = checked_integer("number", number)
        checked_kind("is_labelled", is_labelled, bool, "True or False")
        named = number if self.most_ranked is None else min(number, self.most_ranked)
        known = self._order_tokens.get((named, is_labelled))
        if known is None:
            names = [self._some_label] * named if is_labelled else map(str, range(1, named + 1))
            known = word_tokens(self.order_annotation(list(names)))
            self._order_tokens[named, is_labelled] = known
        return known

    @cached_property
    def label_tokens(self) -> int:
        """About how many tokens a block's label has, counted as in `order_tokens`."""
        return word_tokens(render_block(self._some_label, "", self))

    @cached_property
    def _some_label(self) -> str:
        return _SOME_LETTERS.join(self._label[::2])

    @cached_property
    def _order_tokens(self) -> dict[tuple[int, bool], int]:
        return {}

    @cached_property
    def is_plain(self) -> bool:
        """Whether a block may stand without its label: nobody said how blocks should look."""
        return (self.label, self.block) == (Templates.label, Templates.block)

    def location_annotations(self, labels: Sequence[str]) -> list[str]:
        """Return the words on blocks that the conversation shows already, one for each label.

        Where one line names all, it is the first one's, and the others' are empty.
        """
        named = checked_texts("labels", labels)
        if self.has_location_line:
            line = self.location.replace("{labels}", ", ".join(named))
            return [line, *[""] * (len(named) - 1)] if named else []
        return [self.location.replace("{label}", label) for label in named]

    @cached_property
    def has_location_line(self) -> bool:
        """Whether one line names all blocks that a turn leaves out."""
        return "{labels}" in self.location

    @cached_property
    def ranking_pattern(self) -> re.Pattern[str]:
        """A pattern that finds an order annotation of places in a text."""
        before, _, after = map(re.escape, self.order.partition("{order}"))
        number, between = "[1-9][0-9]{0,17}", re.escape(self.order_separator)
        least = int(self.most_ranked != 1)  # one number alone is seldom a ranking
        return re.compile(f"{before}{number}(?:{between}{number}){{{least},99}}{after}")

    def is_annotation(self, paragraph: str) -> bool:
        """Return whether a paragraph is nothing but these templates' words on other blocks."""
        text = checked_kind("paragraph", paragraph, str, "a string")
        return self._annotation_pattern.fullmatch(text) is not None

    @cached_property
    def notice_pattern(self) -> re.Pattern[str]:
        """A pattern that finds words on a block that no longer holds, up to their line's end."""
        said = self._said((self.replaced, self.withdrawn))
        return re.compile(f"(?:{said})(?:$|{re.escape(self.separator)})", re.MULTILINE)

    @cached_property
    def _annotation_pattern(self) -> re.Pattern[str]:
        return re.compile(self._said((self.order, self.location, self.replaced, self.withdrawn)))

    def _said(self, said: Iterable[str]) -> str:
        """Return a pattern of what some templates become, whatever they name."""

        def listed(between: str, one: str | None = None) -> str:
            # in a list an id holds no separator: each list is read in one way only
            one = one or self._any_label(f"(?:(?!{re.escape(between)})[^\n])")
            return f"{one}(?:{re.escape(between)}{one})*"

        order, label = self.order_separator, self._any_label()
        named = {
            "label": label,
            "labels": listed(", "),
            "old": f'(?:{label}|"[^\n]{{0,{_LONGEST_QUOTED + 3}}}")',
            "order": f"(?:{listed(order)}|{listed(order, '[0-9]++')})",
        }

        def pattern(template: str) -> str:
            words = re.split(r"\{(\w+)\}", template)
            return "".join(
                named[one] if is_field else re.escape(one)
                for number, one in enumerate(words)
                for is_field in [number % 2]
            )

        return "|".join(f"(?:{pattern(one)})" for one in said)


def label_letters(digest: bytes) -> str:
    """Return four letters that stand for a text, by its digest."""
    return "".join([ascii_uppercase[byte % 26] for byte in digest[:4]])


def block_end(label: re.Match[str], templates: Templates) -> int | None:
    """Return where the text ends that makes a label's letters; None if it does not stand there."""
    text, end = label.string, label.end()
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for ending in islice(templates.ending_pattern.finditer(text, end), _MOST_ENDINGS):
        start, end = end, ending.start()
        hashed.update(encoded(text[start:end]))
        if templates.label.replace("{letters}", label_letters(hashed.digest())) == label[1]:
            return end
    return None


DEFAULT_TEMPLATES = Templates()

PAPER_TEMPLATES = Templates(
    label="[Doc_{letters}]",
    order=(
        "Please read the context in the following priority order: {order} and answer the question."
    ),
    order_separator=" > ",
    most_ranked=None,
    location="Please refer to {label} in the previous conversation.",
)
"""The words of the ContextPilot paper."""


class SentBlock(NamedTuple):
    """A block that this turn's message shows, under its label."""

    label: str
    block: ContextBlock


class Reference(NamedTuple):
    """A block that is left out because an earlier message shows it under `label`."""

    label: str
    id: BlockId
    annotation: str  # words on it; empty where an earlier reference's name it, too


class Notice(NamedTuple):
    """Words on a block that an earlier message shows under `label` and that no longer holds."""

    label: str
    annotation: str


TurnPart = SentBlock | Reference | Notice


def word_tokens(words: str) -> int:
    """Return about how many tokens labels or annotations have; see `Templates.order_tokens`."""
    return len(_TOKEN.findall(words))


def render_block(label: str, text: str, templates: Templates) -> str:
    """Return a block as it stands in the message; the text itself is not altered."""
    return templates.before_text(label) + text + templates.after_text


def render_messages(
    system: str | None, history: Sequence[Message] | None, content: str | None = None
) -> list[dict[str, Any]]:
    """Return OpenAI chat messages: system text, history as it was sent, this turn if any."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    messages += [copied_message(message) for message in history or ()]
    if content is not None:
        messages.append({"role": "user", "content": content})
    return messages


def message_texts(message: Message) -> list[str]:
    """Return the texts in a chat message: its content, or the text parts of a multi-part one."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if not isinstance(content, (list, tuple)):
        return []
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return [text for text in texts if isinstance(text, str)]


def rewrite_texts(message: dict[str, Any], rewritten: Callable[[str], str]) -> None:
    """Replace the texts in a chat message of one's own; see `message_texts`."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = rewritten(content)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] = rewritten(part["text"])
