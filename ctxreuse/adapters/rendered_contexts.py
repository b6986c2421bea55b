"""Contexts as they were rendered into text, and how to find them again inside a prompt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias

from ctxreuse.adapters.context_cuts import ContextCut
from ctxreuse.adapters.context_search import (
    BlockSpan,
    FoundContext,
    ParsedText,
    Rendering,
    RenderingIndex,
    Variant,
    block_span,
)
from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantLRUMap
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates, render_block
from ctxreuse.planning.plan import Plan

_log = logging.getLogger("ctxreuse")
_MAX_PLACES = 100_000
_MAX_VARIANTS = 8


Standing: TypeAlias = Literal["new", "renewed", "latest", "history"]
"""How a context stands to the answers in its prompt."""


class Sighting(NamedTuple):
    """A context that stands in a prompt."""

    found: FoundContext
    place: bytes
    prompt: int
    standing: Standing
    is_tool_result: bool = False
    is_remembered: bool = False


class Unplanned(Enum):
    """Why a context is not planned: it is not certain that it is one, or it was answered before."""

    LEFT_ALONE = "left alone"
    IN_HISTORY = "in history"


Claimed: TypeAlias = FoundContext | Unplanned
"""A context with the blocks to plan (none where it was planned before), or why there is none."""


@dataclass(frozen=True, slots=True)
class RegistryStatistics:
    """What a registry holds, all tenants together."""

    tenants: int
    renderings: int
    spans: int
    places: int
    forgotten: int = 0
    parts: Mapping[str, PartSize] = field(default_factory=dict, compare=False)


class ContextRegistry:
    """Remembers the latest rendered contexts and finds them in prompts of their tenant."""

    def __init__(self, max_renderings: int = 25_000, max_spans: int = 500_000) -> None:
        self._bounds = max_renderings, max_spans
        self._numbers = count(1)
        self._lock = ForkSafeLock(self._forget_all)
        self._forget_all()

    def _forget_all(self) -> None:
        max_renderings, max_spans = self._bounds
        self._renderings: TenantLRUMap[bytes, Rendering] = TenantLRUMap(
            max_renderings, max_weight=max_spans, weight_of=lambda one: one.size
        )
        self._places: TenantLRUMap[bytes, int] = TenantLRUMap(_MAX_PLACES)
        self._indexes: dict[str, RenderingIndex] = {}
        self._latest_tenant = ""
        self._forgotten = 0

    def __copy__(self) -> ContextRegistry:
        return self  # a model wrapper that is copied finds what was rendered before, too

    def __deepcopy__(self, memo: object) -> ContextRegistry:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ContextRegistry, self._bounds

    def __len__(self) -> int:
        return len(self._renderings)

    def statistics(self) -> RegistryStatistics:
        """Return how much it holds."""
        with self._lock:
            return RegistryStatistics(
                tenants=self._renderings.tenants,
                renderings=len(self._renderings),
                spans=self._renderings.weight,
                places=len(self._places),
                forgotten=self._forgotten,
                parts={
                    "renderings": self._renderings.size,
                    "spans": self._renderings.weight_size,
                    "places": self._places.size,
                },
            )

    def render(
        self,
        blocks: Iterable[ContextBlock],
        templates: Templates = DEFAULT_TEMPLATES,
        tenant: str = "",
    ) -> str:
        """Return the blocks as a context in the order given, and remember it."""
        given = ContextRequest(blocks).blocks
        first: dict[BlockKey, int] = {}
        for position, block in enumerate(given):
            first.setdefault(block.key, position)
        given = given[: max(first.values(), default=-1) + 1]  # a repeat behind all shows nothing
        pieces: list[str] = []
        spans: dict[BlockKey, BlockSpan] = {}
        start = 0
        for key, position in first.items():
            block = given[position]
            pieces.append(render_block(templates.label_of(block), block.text, templates))
            end = start + len(pieces[-1])
            text_start = end - len(templates.after_text) - len(block.text)
            spans[key] = block_span(block, text_start)
            start = end + len(templates.separator)
        text = templates.separator.join(pieces)
        if any(block.text.strip() for block in given):
            at = tuple(spans[block.key] for block in given)
            self._remember(tenant, Rendering.of(text, at[0][1], templates), at)
        return text

    def remember_planned(self, text: str, tenant: str = "", cut: ContextCut | None = None) -> None:
        """Remember a text that shows blocks as they were planned, annotations included."""
        if text.strip():
            self._remember(tenant, Rendering.of(text)._replace(cut=cut))

    def remember_plan(self, plan: Plan, tenant: str | None = None) -> None:
        """Remember what a plan shows: it is not planned again."""
        if plan.order_annotation is None or plan.templates.order_position == "before_question":
            text, query = plan.rendered(), ""
        else:
            text, query = plan.content, plan.request.query
        cut = ContextCut.of(plan, text, query)
        for one in {plan.request.tenant, plan.request.tenant if tenant is None else tenant}:
            self.remember_planned(text, one, cut)

    def parse(self, text: str, tenant: str = "") -> ParsedText:
        """Return a text as pieces that add up to it: a tenant's contexts, and plain text."""
        index = self._indexes.get(tenant)
        if index is None:
            return ParsedText((text,) if text else ())
        parsed = index.search(text)
        if not parsed.is_searched:
            with self._lock:
                index.unmet = {}
        return parsed

    def may_show(self, texts: Iterable[str], tenant: str = "") -> bool:
        """Return whether any of a tenant's contexts may stand in texts."""
        index = self._indexes.get(tenant)
        return index is not None and any(map(index.may_stand_in, texts))

    def is_rendered_elsewhere(self, texts: Iterable[str], tenant: str) -> bool:
        """Return whether texts show what was rendered outside of this tenant's scope."""
        other = "" if tenant else self._latest_tenant
        index = self._indexes.get(other)
        if index is None or other == tenant:
            return False
        pieces = (piece for text in texts for piece in index.search(text).pieces)
        return any(not isinstance(piece, str) and piece.spans for piece in pieces)

    def claim(
        self, tenant: str, sightings: Sequence[Sighting], met: Iterable[bytes] = ()
    ) -> list[Claimed]:
        """Return the contexts among sightings that the application put there."""
        claimed: list[Claimed] = list(map(_unplanned, sightings))
        by_digest: dict[bytes, list[int]] = {}
        for number, one in enumerate(sightings):
            by_digest.setdefault(one.found.digest, []).append(number)
        for digest, numbers in by_digest.items():
            with self._lock:
                rendering = self._renderings.get(tenant, digest)  # counts as seen
                if rendering is None:
                    continue
                claim = _Claim(tenant, rendering, self._indexes[tenant].unmet, self._places)
                found = claim.settle([sightings[number] for number in numbers])
            for number, context in zip(numbers, found, strict=True):
                claimed[number] = context
        for digest, times in Counter(met).items():
            with self._lock:
                rendering = self._renderings.of(tenant).peek(digest)
                if rendering is not None:
                    _use_up(self._indexes[tenant].unmet, rendering, times)
        return claimed

    def _remember(
        self, tenant: str, rendering: Rendering, spans: tuple[BlockSpan, ...] = ()
    ) -> None:
        with self._lock:
            index = self._indexes.get(tenant)
            if index is None:
                index = self._indexes[tenant] = RenderingIndex()
            old = self._renderings.of(tenant).peek(rendering.digest)
            variants = () if old is None else old.variants
            if spans:
                same = next((one for one in variants if one.spans == spans), None)
                latest = Variant(next(self._numbers), spans) if same is None else same
                others = [one for one in variants if one is not same]
                for one in others[: 1 - _MAX_VARIANTS]:
                    index.unmet.pop(one.number, None)
                variants = (*others[1 - _MAX_VARIANTS :], latest)
                index.unmet[latest.number] = index.unmet.get(latest.number, 0) + 1
            else:
                for one in variants:
                    index.unmet.pop(one.number, None)
            rendering = rendering._replace(variants=variants, is_planned=not spans)
            if old is not None:
                index.remove(old)
            index.add(rendering)
            for owner, _, gone in self._renderings.put(tenant, rendering.digest, rendering):
                if gone is not old:
                    self._forget(owner, gone)
            self._latest_tenant = tenant or self._latest_tenant
            forgotten = self._forgotten
        if forgotten:
            _log_forgotten()  # once, and not under the lock

    def _forget(self, tenant: str, rendering: Rendering) -> None:
        index = self._indexes[tenant]
        if index.is_unmet(rendering):
            self._forgotten += 1
        index.remove(rendering)
        for one in rendering.variants:
            index.unmet.pop(one.number, None)
        if not index:
            del self._indexes[tenant]


class _Claim:
    """Which sightings of one rendering are contexts; under the registry's lock."""

    def __init__(
        self,
        tenant: str,
        rendering: Rendering,
        unmet: dict[int, int],
        places: TenantLRUMap[bytes, int],
    ) -> None:
        self._tenant = tenant
        self._rendering = rendering
        self._unmet = unmet
        self._places = places

    def settle(self, sightings: Sequence[Sighting]) -> list[Claimed]:
        """Return each as a context, or why it is none; see `ContextRegistry.claim`."""
        found: list[Claimed] = list(map(_unplanned, sightings))
        if self._rendering.is_planned:
            return [
                replace(one.found, spans=()) if one.standing == "new" else other
                for one, other in zip(sightings, found, strict=True)
            ]
        known = [one.place in self._places.of(self._tenant) for one in sightings]
        quoting = self._quoting_prompts(sightings, known)
        unknown: list[int] = []
        latest: list[int] = []
        doubtful = renewed = 0
        for number, one in enumerate(sightings):
            if one.standing == "history":
                continue
            if one.standing == "latest":
                is_remembered = known[number] and one.is_remembered
                if not (is_remembered or one.found.is_disputed or one.prompt in quoting):
                    latest.append(number)
                continue
            if one.standing == "renewed" and known[number]:
                if one.is_remembered or not self._is_rendered_anew():
                    renewed += 1
                else:
                    found[number] = self._at_known_place(one)
            elif one.found.is_disputed or (one.prompt in quoting and not known[number]):
                found[number] = Unplanned.LEFT_ALONE
                doubtful += 1
            elif known[number]:
                found[number] = self._at_known_place(one)
            else:
                found[number] = Unplanned.LEFT_ALONE
                unknown.append(number)
        # what stands in the system message was rendered for it, or the user could quote it
        _use_up(self._unmet, self._rendering, doubtful + renewed)
        answered = ("latest", "history")
        old = [n for n, one in enumerate(sightings) if one.standing in answered]
        unsure = [*unknown, *(n for n in old if not known[n])]
        places = {sightings[number].place for number in unsure}
        variant = self._only_unmet(len(unsure) if len(places) > 1 else 1)
        if variant is not None:
            for number in (*unknown, *latest):
                found[number] = self._claimed(sightings[number], variant)
        _use_up(self._unmet, self._rendering, len(unknown) + len(old))
        return found

    def _quoting_prompts(self, sightings: Sequence[Sighting], known: Sequence[bool]) -> set[int]:
        """Return the prompts that show the text at several new places: one may be a quotation."""
        if len(sightings) < 2:
            return set()
        new = [one for one, is_known in zip(sightings, known, strict=True) if not is_known]
        per_prompt = Counter(one.prompt for one in new)
        return {one.prompt for one in new if per_prompt[one.prompt] > 1 and not one.is_tool_result}

    def _is_rendered_anew(self) -> bool:
        return any(one.number in self._unmet for one in self._rendering.variants)

    def _at_known_place(self, sighting: Sighting) -> Claimed:
        unmet = [one for one in self._rendering.variants if one.number in self._unmet]
        known = self._places.get(self._tenant, sighting.place)
        variants = unmet or [one for one in self._rendering.variants if one.number == known]
        _use_up(self._unmet, self._rendering, 1)
        if len(variants) != 1:
            return Unplanned.LEFT_ALONE
        return self._claimed(sighting, variants[0])

    def _only_unmet(self, times: int) -> Variant | None:
        """Return the one variant that prompts have not shown yet, if it was rendered so often."""
        unmet = [one for one in self._rendering.variants if one.number in self._unmet]
        if len(unmet) == 1 and self._unmet[unmet[0].number] >= times:
            return unmet[0]
        return None

    def _claimed(self, sighting: Sighting, variant: Variant) -> FoundContext:
        self._places.put(self._tenant, sighting.place, variant.number)
        if sighting.found.spans is variant.spans:  # the latest, as it mostly is
            return sighting.found
        return replace(sighting.found, spans=variant.spans)


def _unplanned(sighting: Sighting) -> Claimed:
    """Return what becomes of a sighting that nobody claims."""
    return Unplanned.LEFT_ALONE if sighting.standing == "new" else Unplanned.IN_HISTORY


def _use_up(unmet: dict[int, int], rendering: Rendering, times: int) -> None:
    """Count a rendering as shown by a prompt, whichever of its variants that was."""
    for one in rendering.variants:
        taken = min(times, unmet.get(one.number, 0))
        times -= taken
        if taken:
            unmet[one.number] -= taken
            if not unmet[one.number]:
                del unmet[one.number]


@cache
def _log_forgotten() -> None:
    """Say once that there are more contexts at a time than are remembered."""
    _log.warning(
        "a rendered context was forgotten before a prompt has shown it, because too many were "
        "rendered since; such a prompt is sent as given. Plan smaller batches, or give "
        "registry=ContextRegistry(max_renderings=..., max_spans=...) to format_context and the "
        "model. Further cases are only counted, as context_registry().statistics().forgotten."
    )


_sharing = ForkSafeLock()


@cache
def _shared_registry() -> ContextRegistry:
    return ContextRegistry()


def context_registry(registry: ContextRegistry | None = None) -> ContextRegistry:
    """Return the registry given or, for None, the one that this process shares."""
    if registry is None:
        with _sharing:
            return _shared_registry()
    return checked_kind("registry", registry, ContextRegistry, "a ContextRegistry or None")
