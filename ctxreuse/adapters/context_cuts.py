"""How a text that shows a plan is cut into content parts, and where marks stand in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ctxreuse.adapters.leader_first import PrefixUse
from ctxreuse.context.content_parts import ContentPart, cut, joined, without_blank_parts
from ctxreuse.planning.plan import Plan, shard_of


class PlannedPrefix(NamedTuple):
    """What a plan says for a cache that has marks, or that requests are routed to."""

    marks: tuple[int, ...]
    group: tuple[str, ...]
    most_marks: int  # of a request
    is_later_turn: bool = False
    use: PrefixUse | None = None

    @classmethod
    def of(cls, plan: Plan) -> PlannedPrefix | None:
        """Return what a plan says; None for a cache with neither marks nor keys."""
        most = plan.cache.marks
        if not most and not plan.cache.is_routed:
            return None
        is_later_turn = bool(plan.request.history)
        return cls(plan.marks, shard_of(plan), most, is_later_turn, PrefixUse.of(plan))

    def without_blocks_behind(self, number: int) -> PlannedPrefix:
        """Return it without the marks behind so many blocks."""
        return self._replace(marks=tuple(mark for mark in self.marks if mark <= number), use=None)


class ContextCut(NamedTuple):
    """Where a text that shows a plan is cut and marked."""

    prefix: PlannedPrefix
    lengths: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()

    @classmethod
    def of_parts(cls, parts: Sequence[ContentPart], prefix: PlannedPrefix) -> ContextCut:
        """Return how a text is cut that parts add up to."""
        whole = without_blank_parts(parts) if prefix.most_marks else []
        marked = tuple(number for number, part in enumerate(whole) if part.is_marked)
        return cls(prefix, tuple(len(part.text) for part in whole), marked)

    @classmethod
    def of(cls, plan: Plan, text: str, query: str = "") -> ContextCut | None:
        """Return how a plan's text is cut; None for a cache with neither marks nor keys."""
        prefix = PlannedPrefix.of(plan)
        if prefix is None:
            return None
        parts = plan.content_parts(query)
        return cls.of_parts(parts if joined(parts) == text else (), prefix)

    @property
    def deepest(self) -> int | None:
        """Which part has the last mark, -1 for what stands before the text; None without one."""
        if self.marked:
            return self.marked[-1]
        return -1 if 0 in self.prefix.marks else None

    def parts(self, text: str) -> list[ContentPart]:
        """Return the text in its parts."""
        return [
            part._replace(is_marked=number in self.marked, is_spare=self.prefix.is_later_turn)
            for number, part in enumerate(cut(text, self.lengths))
        ]


class PlannedTexts(NamedTuple):
    """Planned documents, as an application may join them into a prompt by itself."""

    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    prefix: PlannedPrefix

    def cut_in(self, text: str) -> ContextCut | None:
        """Return how a prompt's text is cut that shows the documents; None if it shows none."""
        parts: list[ContentPart] = []
        end = 0
        for position, (one, number) in enumerate(zip(self.texts, self.numbers, strict=True)):
            bare = one.strip()
            if not bare:
                continue
            start = text.find(bare, end)
            if start < 0:
                break
            if not parts and start:
                parts.append(ContentPart(text[:start]))
                end = start
            is_last = position + 1 == len(self.texts) or self.numbers[position + 1] != number
            is_marked = is_last and number in self.prefix.marks
            parts.append(ContentPart(text[end : start + len(bare)], is_marked))
            end = start + len(bare)
        if not end:
            return None
        parts.append(ContentPart(text[end:]))
        return ContextCut.of_parts([part for part in parts if part.text], self.prefix)
