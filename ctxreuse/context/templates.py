"""Order and location annotations: what the model is told about moved and left-out blocks.

ContextPilot sections 5.3 and 6. The default words are the papers'; every template can be replaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ctxreuse.errors import InvalidRequestError, describe

_KEPT_LABELS = 100

AnnotationPosition = Literal["before_question", "after_question"]


@dataclass(frozen=True)
class Templates:
    """The words around blocks.

    Args:
        label: A block's label; `{ordinal}` counts the blocks of a conversation's prompt from 1.
        block: A labelled block; `{label}` comes before `{text}`, and both stand once.
        order: The order annotation; `{order}` is the labels from best to worst.
        order_separator: What stands between the labels in `{order}`.
        location: The location annotation; `{label}` is the left-out block's label.
        legend: Which labels the documents before it have, where these are shown without; `{labels}`
            is the labels in order.
        overlap: What replaces the beginning of a block that repeats the end of an earlier one;
            `{label}` is the earlier one's.
        separator: What stands between the parts of the message.
        order_position: Whether the order annotation comes before or after the question.

    Raises:
        InvalidRequestError: a template lacks its field or has another one.
    """

    label: str = "[Doc_{ordinal}]"
    block: str = "{label} {text}"
    order: str = (
        "Please read the context in the following priority order: {order} and answer the question."
    )
    order_separator: str = " > "
    location: str = "Please refer to {label} in the previous conversation."
    legend: str = "The documents above are {labels}, in this order."
    overlap: str = "(continues {label}) "
    separator: str = "\n\n"
    order_position: AnnotationPosition = "before_question"

    def __post_init__(self) -> None:
        for name, fields in (
            ("label", ["{ordinal}"]),
            ("block", ["{label}", "{text}"]),
            ("order", ["{order}"]),
            ("location", ["{label}"]),
            ("legend", ["{labels}"]),
            ("overlap", ["{label}"]),
        ):
            template = getattr(self, name)
            if not isinstance(template, str) or re.findall(r"\{[^{}]*\}?|\}", template) != fields:
                raise InvalidRequestError(
                    f"template {name} is {describe(template)}; it must hold "
                    f"{' then '.join(fields)}, each once, and no other braces"
                )
        for name in ("order_separator", "separator"):
            if not isinstance(getattr(self, name), str):
                raise InvalidRequestError(
                    f"template {name} is {describe(getattr(self, name))}; it must be a string"
                )
        if self.order_position not in ("before_question", "after_question"):
            raise InvalidRequestError(
                f"order_position is {describe(self.order_position)}; "
                "choose 'before_question' or 'after_question'"
            )

    def block_label(self, ordinal: int) -> str:
        """Return the label of the block that was sent as the `ordinal`-th, from 1."""
        if ordinal <= _KEPT_LABELS:
            return self._first_labels[ordinal - 1]
        return self.label.replace("{ordinal}", str(ordinal))

    @cached_property
    def _first_labels(self) -> list[str]:
        return [self.label.replace("{ordinal}", str(n)) for n in range(1, _KEPT_LABELS + 1)]

    def before_text(self, label: str) -> str:
        """Return what stands in the message before a block's text."""
        return self.block.partition("{text}")[0].replace("{label}", label)

    @cached_property
    def after_text(self) -> str:
        """What stands in the message after a block's text."""
        return self.block.partition("{text}")[2]

    @cached_property
    def label_pattern(self) -> re.Pattern[str]:
        """A pattern that finds every label in a text; group 1 is the ordinal."""
        before, _, after = self.label.partition("{ordinal}")
        # no ordinal of ours is longer, and int() of a hostile million digits would be slow
        ordinal = re.escape(before) + r"([1-9][0-9]{0,17})" + re.escape(after)
        return re.compile(ordinal if after and not after[-1].isdigit() else ordinal + r"(?![0-9])")

    def order_annotation(self, labels: Sequence[str]) -> str:
        """Return the retriever's ranking in words.

        Args:
            labels: The labels of the sent blocks, in the retriever's order.
        """
        return self.order.replace("{order}", self.order_separator.join(labels))

    def location_annotation(self, label: str) -> str:
        """Return the words that stand in place of a block that the conversation shows already."""
        return self.location.replace("{label}", label)

    def legend_annotation(self, labels: Sequence[str]) -> str:
        """Return the words that say which labels the documents before them have, in order."""
        return self.legend.replace("{labels}", ", ".join(labels))

    def overlap_annotation(self, label: str) -> str:
        """Return the words that stand for the beginning of a block that repeats an earlier one."""
        return self.overlap.replace("{label}", label)


DEFAULT_TEMPLATES = Templates()
