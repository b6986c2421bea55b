"""The texts that this process has seen, by tenant, and where a message shows them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from os.path import commonprefix
from typing import Any, NamedTuple

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantLRUMap
from ctxreuse.planning.prompt_records import Edit

ANY_KIND = "*"
EXACT_KINDS = ("", "shown", "labelled")
"""Of texts that stand in prompts as they are; synthesizers strip nodes."""
SHORTEST = 12
"""Characters; shorter texts may stand anywhere by chance."""
_MOST_CHARACTERS = 32_000_000
_ENTRY_CHARACTERS = 200
_MOST_LISTS = 16  # that a text is known to stand in
_MOST_MESSAGES = 20_000
_WORK_A_CHARACTER = 64
STARTS = re.compile(r"\n|>|\"|\[|: |, |; |- |\* |\u2022 |\. |! |\? |\) |\] ")  # searched as a set
_INDENT = re.compile(r"(?:\A|(?<=\n))[ \t]+")
_LONGEST_START = 2
_GROWTH = 8  # of what is compared where several texts begin alike


class Form(NamedTuple):
    """A text as a prompt may show it."""

    text: str
    block: ContextBlock | None = None  # what of it stands under a label of ours
    name: Hashable = None  # as a part of a document
    follower: Hashable = None  # the name of the part that follows it in that document
    kind: str = ""  # between texts of several kinds in a run stands a heading that is none of ours


@dataclass(eq=False, slots=True)
class TextList:
    """Texts that came together, best first."""

    root: Hashable = None  # the outermost run that they belong to
    is_ours: bool = False  # a part of ours rendered or planned them
    # takes the plan back that gave them another order
    take_back: Callable[[object], object] | None = None
    order: Sequence[int] = ()  # the ranks, in that one


class KnownText(NamedTuple):
    """A text that may be moved, and the latest lists that held it, the newest first."""

    form: Form
    block: ContextBlock
    lists: tuple[tuple[TextList, int], ...]  # with its rank there

    @property
    def is_ours(self) -> bool:
        """Whether a part of ours rendered or planned it."""
        return any(held.is_ours for held, _ in self.lists)

    def list_of(self, root: Hashable) -> TextList:
        """Return the newest list of a run that holds it, else the newest of all."""
        of_run = (one for one, _ in self.lists if root and one.root == root)
        return next(of_run, self.lists[0][0])

    def rank_in(self, held: TextList) -> int | None:
        """Return its rank in a list; None if it does not stand there."""
        return next((rank for one, rank in self.lists if one is held), None)


class KnownSpan(NamedTuple):
    """Where a known text stands in a message."""

    start: int
    end: int
    known: KnownText


def _longest_at(
    texts: Sequence[str], message: str, start: int, spend: Callable[[int], bool]
) -> str | None:
    """Return the longest of ordered texts at a place; None for none, or too much work."""
    low, high, size, piece = 0, len(texts), SHORTEST, ""
    while low < high:
        if high - low == 1 and message.startswith(texts[low], start):
            return texts[low]  # as it mostly is
        size *= _GROWTH
        piece = message[start : start + size]
        if not spend(len(piece)):
            return None
        low = bisect_left(texts, piece, low, high)
        high = bisect_right(texts, piece, low, high, key=itemgetter(slice(size)))
        if len(piece) < size:
            break
    # what stands here is in order before what follows here
    while high := bisect_right(texts, piece, 0, high):
        text = texts[high - 1]
        if message.startswith(text, start):
            return text
        piece, high = commonprefix([text, piece]), high - 1  # noqa: RUF071 - no paths
        if not spend(len(piece)):
            return None
    return None


def words_at(start: int, text: str) -> tuple[int, int]:
    """Return where the words of a text begin and end that stands at a place."""
    return start + len(text) - len(text.lstrip()), start + len(text.rstrip())


class KnownTexts:
    """Texts of documents, nodes and memories, in whatever form a prompt may show them.

    Bounded in characters, of which each tenant has a share. Thread-safe.
    """

    def __init__(
        self, max_characters: int = _MOST_CHARACTERS, starts: re.Pattern[str] = STARTS
    ) -> None:
        self._max_characters, self._starts = max_characters, starts
        self._lock = ForkSafeLock(self.forget_all)
        self.forget_all()

    def forget_all(self) -> None:
        """Forget all texts."""
        self._known: TenantLRUMap[str, KnownText] = TenantLRUMap(
            max_weight=self._max_characters,
            weight_of=lambda one: len(one.form.text) + _ENTRY_CHARACTERS,
        )
        # by tenant and first characters, in order where these are the same
        self._beginnings: dict[str, dict[str, list[str]]] = {}
        self._planned: TenantLRUMap[bytes, Edit] = TenantLRUMap(_MOST_MESSAGES)

    @property
    def parts(self) -> dict[str, PartSize]:
        """How many characters are known, of all tenants together, and how many may be."""
        return {"known_characters": self._known.weight_size, "planned_messages": self._planned.size}

    def add(
        self,
        tenant: str,
        texts: Iterable[str | Form],
        held: TextList | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Remember the texts of a list, as they are and stripped; best first without ranks."""
        held = held or TextList(is_ours=True)
        given = [one if isinstance(one, Form) else Form(one) for one in texts]
        with self._lock:
            for rank, form in zip(ranks or range(len(given)), given, strict=True):
                self._add(tenant, form, held, rank)
                bare = form.text.strip()
                if bare != form.text and form.block is None:
                    self._add(tenant, form._replace(text=bare), held, rank)

    def add_seen(self, tenant: str, shown: Sequence[Sequence[Form]], root: Hashable = None) -> None:
        """Remember what a retriever returned, in each form, unless a plan of ours ordered it."""
        if self.planned_list(tenant, [one.text for one in shown[0]], root) is None:
            held = TextList(root)
            for forms in shown:
                self.add(tenant, forms, held)

    def planned_list(
        self, tenant: str, texts: Sequence[str], root: Hashable = None
    ) -> tuple[TextList, list[int]] | None:
        """Return the list whose plan of ours put texts in order, and their ranks; else None."""
        with self._lock:
            known: list[Any] = [self._known.of(tenant).peek(one) for one in texts]
        if not known or None in known:
            return None
        held = known[0].list_of(root)
        ranks = [one.rank_in(held) for one in known]
        first = dict.fromkeys(ranks)
        is_its = None not in first and held.root == root
        if not held.root or not root:  # texts in another order are what another query has found
            is_its = [*first] == [one for one in held.order if one in first]
        return (held, ranks) if is_its and held.take_back else None

    def _add(self, tenant: str, form: Form, held: TextList, rank: int) -> None:
        known = self._known.get(tenant, form.text)
        if known is None:
            text = form.text if form.kind in EXACT_KINDS else form.text.strip()
            known = KnownText(form, form.block or ContextBlock(text=text), ())
            if len(form.text) >= SHORTEST:
                beginnings = self._beginnings.setdefault(tenant, {})
                insort(beginnings.setdefault(form.text[:SHORTEST], []), form.text)
        elif known.form.kind != form.kind:
            known = known._replace(form=known.form._replace(kind=ANY_KIND))
        if form.name is not None:
            known = known._replace(form=known.form._replace(name=form.name, follower=form.follower))
        others = [one for one in known.lists if one[0] is not held]
        first = known.rank_in(held)
        lists = ((held, rank if first is None else first), *others)[:_MOST_LISTS]
        for owner, text, _ in self._known.put(tenant, form.text, known._replace(lists=lists)):
            if len(text) >= SHORTEST and text not in self._known.of(owner):
                self._forget(owner, text)

    def _forget(self, tenant: str, text: str) -> None:
        beginnings = self._beginnings[tenant]
        same = beginnings[text[:SHORTEST]]
        del same[bisect_left(same, text)]
        if not same:
            del beginnings[text[:SHORTEST]]
        if not beginnings:
            del self._beginnings[tenant]

    def add_planned(self, tenant: str, key: bytes, edit: Edit) -> None:
        """Remember a message that a part of ours planned, whatever wraps the model."""
        with self._lock:
            self._planned.put(tenant, key, edit)

    def planned(self, tenant: str, key: bytes) -> Edit | None:
        """Return how a message is sent that a part of ours planned; None for others."""
        with self._lock:
            return self._planned.get(tenant, key)

    def known(self, tenant: str, text: str) -> KnownText | None:
        """Return what is known of a tenant's text; None if it is not known."""
        with self._lock:
            return self._known.get(tenant, text)

    def standing_at(self, tenant: str, message: str) -> list[KnownSpan] | None:
        """Return where known texts stand in a message, each the longest; None: too much work.

        They begin where the message, a line, a value or a list's item begins, or behind a tag.
        """
        left = _WORK_A_CHARACTER * len(message) + 10_000

        def spend(work: int) -> bool:
            nonlocal left
            left -= work
            return left >= 0

        spans: list[KnownSpan] = []
        with self._lock:
            beginnings, search = self._beginnings.get(tenant), self._starts.search
            if beginnings is None:
                return spans
            start = end = 0
            while True:
                texts = beginnings.get(message[start : start + SHORTEST])
                if texts:
                    text = _longest_at(texts, message, start, spend)
                    if left < 0:
                        return None
                    found = None if text is None else self._known.get(tenant, text)
                    if text and found:
                        end = start + len(text)
                        spans.append(KnownSpan(start, end, found))
                        # what ends a text may begin the next one
                        start = max(start, end - _LONGEST_START)
                indented = start >= end and _INDENT.match(message, start)
                if indented:  # a text may begin with spaces of its own, or stand behind some
                    start = indented.end()
                    continue
                while begins := search(message, start):
                    start = begins.end()
                    if start >= end:
                        break
                else:
                    break
        return spans

    def __reduce__(self) -> tuple[Any, ...]:
        return known_texts, ()


def known_texts() -> KnownTexts:
    """Return the texts that this process knows."""
    return _known_texts


_known_texts = KnownTexts()
