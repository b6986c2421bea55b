"""Documents as the text that a prompt shows, and those that an answer cites."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from string import punctuation
from typing import Any, TypeVar

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.rendering import Templates, render_block
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.known_texts import Form, known_texts

_BRACKETS = re.compile(r"[\[(][^\[\]()\n]{1,400}[\])]")
_NAME = re.compile(r"[\w.-]+")
_Item = TypeVar("_Item")


def joined_forms(
    forms: Sequence[Form],
    texts: Sequence[str],
    separator: str,
    tenant: str,
    templates: Templates,
    *,
    labels: bool = False,
    own_labels: Sequence[str] | None = None,
    ids: Sequence[BlockId | None] = (),
    root: Hashable = None,
) -> str:
    """Return documents as one text, and have each known as it stands."""
    checked_kind("templates", templates, Templates, "Templates")
    checked_kind("separator", separator, str, "a string")
    shown = [
        form if form.text == text else form._replace(kind="shown")
        for form, text in zip(forms, texts, strict=True)
    ]
    if own_labels is not None:
        pairs = zip(shown, own_labels, strict=True)
        shown = [
            one._replace(text=render_block(label, one.text, templates), kind="labelled")
            for one, label in pairs
        ]
    elif checked_kind("labels", labels, bool, "True or False"):
        shown = [labelled_form(form, one, templates) for form, one in zip(shown, ids, strict=True)]
        first = {one.text: place for place, one in reversed(list(enumerate(shown)))}
        places = sorted(first.values())
        shown, texts = [shown[one] for one in places], [texts[one] for one in places]
    known = known_texts()  # what was made of documents' texts is as good as they are
    known.add(tenant, shown, *(known.planned_list(tenant, texts, root) or ()))
    return separator.join([one.text for one in shown if one.text])


def labelled_form(form: Form, block_id: BlockId | None, templates: Templates) -> Form:
    """Return a text under its label."""
    block = labelled_block(form, block_id, templates)
    text = render_block(templates.label_of(block), block.text, templates)
    return form._replace(text=text, block=block, kind="labelled")


def checked_items(
    items: object, kind: type[_Item], taker: str, remedies: tuple[str, str]
) -> list[_Item]:
    """Return documents or nodes as a list."""
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise InvalidRequestError(
            f"{taker} takes a list of {remedies[0]}, not {type(items).__name__}; "
            "pass what a retriever returns"
        )
    others = {type(one).__name__ for one in items if not isinstance(one, kind)}
    if others:
        raise InvalidRequestError(
            f"{taker} takes a list of {remedies[0]}, not one with {', '.join(sorted(others))} "
            f"in it; put {remedies[1]} into it"
        )
    return list(items)


def own_labels(
    items: Sequence[Any], label: str | Callable[[Any], object] | None
) -> list[str] | None:
    """Return the application's own labels: of a field of the metadata, or a function's."""
    if label is None:
        return None
    if callable(label):
        return [str(label(one)) for one in items]
    metadata: list[Mapping[str, Any]] = [one.metadata for one in items]
    for one in metadata:
        if not isinstance(label, str) or label not in one:
            raise InvalidRequestError(
                f"label is {describe(label)}, which no field of the metadata is called; pass a "
                f"function, or the name of a field that all have, here of {describe(sorted(one))}"
            )
    return [str(one[label]) for one in metadata]


def labelled_block(form: Form, block_id: BlockId | None, templates: Templates) -> ContextBlock:
    """Return a text as a block; its id counts only where labels show it."""
    own = block_id if "{id}" in templates.label else None
    return ContextBlock(id=own, text=form.text)  # type: ignore[arg-type]


def cited_items(
    answer: str,
    items: Sequence[_Item],
    label: str | Callable[[_Item], object] | None,
    texts: Iterable[str],
    ids: Iterable[BlockId | None],
    templates: Templates,
) -> list[_Item]:
    """Return the items that an answer names by their own labels, else by those of their texts."""
    checked_kind("templates", templates, Templates, "Templates")
    forms = zip(map(Form, texts), ids, strict=True)
    blocks = [labelled_block(form, one, templates) for form, one in forms]
    own = own_labels(items, label)
    labels = map(templates.label_of, blocks) if own is None else own
    return [items[n] for n in cited_positions(answer, labels)]


def cited_positions(text: str, labels: Iterable[str]) -> list[int]:
    """Return the positions of the labels that an answer names, in its order; of equal ones all."""
    checked_kind("text", text, str, "an answer's text")
    text = text.replace("\\_", "_")  # as Markdown has it
    at: dict[str, list[int]] = {}
    for position, label in enumerate(labels):
        at.setdefault(label, []).append(position)
    named: dict[str, int] = {}  # in brackets, maybe several in one pair
    for bracket in _BRACKETS.finditer(text):
        for name in _NAME.finditer(text, *bracket.span()):
            named.setdefault(name[0], name.start())
    first: dict[str, int] = {}
    for label in at:
        left, right = (r"\b" if re.match(r"\w", end) else "" for end in (label[:1], label[-1:]))
        whole = re.search(f"{left}{re.escape(label)}{right}", text)
        places = [] if whole is None else [whole.start()]
        places += [named[one] for one in [label.strip(punctuation)] if one in named]
        if places:
            first[label] = min(places)
    cited = sorted(first, key=first.__getitem__)
    return [position for label in cited for position in at[label]]
