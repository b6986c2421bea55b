"""The plan in a planned document's metadata; what this process did not write does not count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from ctxreuse.adapters.context_cuts import PlannedPrefix, PlannedTexts
from ctxreuse.adapters.issued_plans import (
    DIGEST_BYTES,
    ISSUED_PLANS,
    SEARCHED_TEXTS,
    IssuedPlan,
    Turn,
    digest_of,
)
from ctxreuse.context.blocks import BlockId, ContextBlock, ids_size, text_digest
from ctxreuse.context.rendering import Notice, Reference, SentBlock
from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.planning.plan import Plan

METADATA_KEY = "ctxreuse"
"""An adapter's documents carry rank, label and plan in their metadata under this key."""

_PREFIX = "prefix"  # of believed documents only: no metadata that anybody can write holds it

Metadata: TypeAlias = Mapping[str, Any]
"""The metadata of a document of some framework."""

PlanMetadata: TypeAlias = Mapping[str, Any]
"""A plan as metadata holds it; see `plan_metadata`."""


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """A document of some framework, whose metadata may say where a plan put it."""

    block: ContextBlock
    metadata: Metadata

    @property
    def is_annotation(self) -> bool:
        """Whether it says that it is an annotation behind planned documents; see `believed`."""
        carried = self.metadata.get(METADATA_KEY)
        digest = carried.get("annotation") if isinstance(carried, Mapping) else None
        return isinstance(digest, str) and digest == text_digest(self.block.text).hex()


@dataclass(frozen=True, slots=True)
class Overlap:
    """The beginning of a text, which repeats the end of an earlier one."""

    characters: int
    label: str
    digest: str


@dataclass(frozen=True, slots=True)
class DocumentPosition:
    """Where a plan put a document."""

    rank: int
    label: str
    plan: PlanMetadata
    overlap: Overlap | None = None
    prefix: PlannedPrefix | None = None


@dataclass(frozen=True, slots=True)
class DocumentMetadata:
    """The metadata that the documents of one plan get."""

    plan_id: str
    ids: Mapping[str, Sequence[BlockId]]
    overlaps: Mapping[str, Overlap]
    issued: IssuedPlan
    to_carry: list[PlanMetadata]

    def position(self, rank: int, label: str) -> dict[str, Any]:
        """Return what a document of the plan carries."""
        carried: dict[str, Any] = {"rank": rank, "label": label}
        if label in self.overlaps:
            carried["overlap"] = asdict(self.overlaps[label])
        for owner in self.ids.get(label, ()):  # two blocks may have the same label
            self.issued.add(carried, owner)
        return self._mark(carried)

    def annotation(self, text: str) -> dict[str, Any]:
        """Return what the annotation behind the documents carries."""
        carried = {"annotation": text_digest(text).hex()}
        self.issued.add(carried, None)
        return self._mark(carried)

    def _mark(self, carried: dict[str, Any]) -> dict[str, Any]:
        plan = {"plan": self.to_carry.pop()} if self.to_carry else {}
        return _Mark(carried | {"plan_id": self.plan_id} | plan)


class _Mark(dict[str, Any]):
    """What a document of a plan carries; it is no part of what it says of itself."""

    def __str__(self) -> str:
        return ""


class MarkedMetadata(dict[str, Any]):
    """Metadata with a plan's mark, which changes nothing of what makes two documents equal."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and unmarked(self) == unmarked(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __str__(self) -> str:
        return str(unmarked(self))


def unmarked(metadata: Metadata) -> dict[str, Any]:
    """Return metadata as a plain dict without a plan's mark."""
    return {name: one for name, one in metadata.items() if name != METADATA_KEY}


def marked(metadata: Metadata, mark: Mapping[str, Any]) -> MarkedMetadata:
    """Return a copy of metadata that carries a mark in place of any earlier one."""
    return MarkedMetadata({**copied(unmarked(metadata)), METADATA_KEY: mark})


def document_metadata(plan: Plan, *, with_order: bool) -> DocumentMetadata:
    """Return the metadata for a plan's documents."""
    carried = plan_metadata(plan)
    if not with_order:
        carried["order_annotation"] = None
    overlaps = {
        part.label: Overlap(
            part.repeated, part.repeats, text_digest(part.block.text[: part.repeated]).hex()
        )
        for part in plan.parts
        if isinstance(part, SentBlock) and part.repeated
    }
    ids: dict[str, list[BlockId]] = {}
    for label, block_id, *_ in carried["parts"]:
        ids.setdefault(label, []).append(block_id)
    size = ids_size([block.id for block in plan.request.blocks]) + 1
    issued = ISSUED_PLANS.issue(carried, Turn.of(plan.request), size, PlannedPrefix.of(plan))
    digest = digest_of(carried)
    plan_id = "" if digest is None else digest.hex()
    return DocumentMetadata(plan_id, ids, overlaps, issued, [copied(carried)])


def memories_metadata(plan: Plan, memories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the planned result of a memory search carries."""
    carried = plan_metadata(plan)
    issued = ISSUED_PLANS.issue(carried, Turn.of(plan.request), 1)
    issued.add(list(memories), None)
    digests = {part.label: part.block.digest for part in plan.parts if isinstance(part, SentBlock)}
    texts = {digests[one["label"]]: one["rank"] for one in memories}
    SEARCHED_TEXTS.remember(current_scope().tenant or "", texts.items())
    return {"memories": list(memories), "plan": carried}


def memory_ranks(result: Metadata) -> list[int] | None:
    """Return the rank of each memory in a planned search result."""
    carried, memories = result.get(METADATA_KEY), result.get("results")
    if carried is None or not isinstance(memories, list):
        return None
    if isinstance(carried, Mapping):
        places = carried.get("memories")
        digest = digest_of(carried.get("plan"))
        written = any(plan.has(places, None) for plan in _plans_of(digest, None))
        if isinstance(places, list) and written and _are_at(memories, places):
            return [place["rank"] for place in places]
    ISSUED_PLANS.ignore(1)
    return None


def _are_at(memories: Sequence[Any], places: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether these are the memories that were put there; an id may be a UUID, or none."""
    ids = [one.get("id") if isinstance(one, Mapping) else None for one in memories]
    return len(ids) == len(places) and all(
        name is None or place["id"] in (name, str(name))
        for name, place in zip(ids, places, strict=True)
    )


def plan_metadata(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON-compatible metadata, without any text of documents or messages."""
    return {
        "request_id": plain_id(plan.request_id),
        "blocks": [plain_id(block.id) for block in plan.blocks],
        "references": [plain_id(block_id) for block_id in plan.references],
        "order_annotation": plan.order_annotation,
        "parts": [
            [part.label, plain_id(part.id), part.annotation]
            if isinstance(part, Reference)
            else [part.label, plain_id(part.block.id)]
            for part in plan.parts
            if not isinstance(part, Notice)
        ],
        "expected_cached_tokens": int(plan.expected_cached_tokens),
    }


def plan_of(metadata: Metadata) -> PlanMetadata | None:
    """Return the plan that the metadata of a `believed` document carries, or None."""
    carried = metadata.get(METADATA_KEY)
    plan = carried.get("plan") if isinstance(carried, Mapping) else None
    return plan if isinstance(plan, Mapping) else None


def position_of(metadata: Metadata) -> DocumentPosition | None:
    """Return the position that the metadata of a `believed` document carries, or None."""
    plan = plan_of(metadata)
    if plan is None or "rank" not in metadata[METADATA_KEY]:
        return None
    carried = metadata[METADATA_KEY]
    overlap = Overlap(**carried["overlap"]) if "overlap" in carried else None
    return DocumentPosition(carried["rank"], carried["label"], plan, overlap, carried.get(_PREFIX))


def believed(
    documents: Sequence[PlannedDocument], scope: RequestScope | None = None
) -> list[PlannedDocument]:
    """Return documents with the plan metadata that this process wrote for them, and no other."""
    if not any(METADATA_KEY in one.metadata for one in documents):
        return list(documents)
    known: dict[bytes, list[IssuedPlan]] = {}  # by the digest, which the documents of a plan share
    found: list[tuple[IssuedPlan | None, PlannedDocument]] = []
    for one in documents:
        digest = _digest_in(one.metadata)
        if digest is None:
            found.append((None, _without_metadata(one)))
            continue
        if digest not in known:
            known[digest] = _plans_of(digest, scope)
        found.append(_believed(one, known[digest]))
    newest = max((plan for plan, _ in found if plan is not None), key=_number, default=None)
    kept = [
        document if newest and plan and plan.turn.may_be(newest.turn) else None
        for plan, document in found
    ]
    claims = sum(_claims_a_plan(one.metadata) for one in documents)
    ISSUED_PLANS.ignore(claims - sum(one is not None for one in kept))
    return [
        _without_metadata(one) if document is None else document
        for one, document in zip(documents, kept, strict=True)
    ]


def _believed(
    one: PlannedDocument, plans: Sequence[IssuedPlan]
) -> tuple[IssuedPlan | None, PlannedDocument]:
    """Return the plan that a document is of, and the document with what it may say of it."""
    mark = one.metadata[METADATA_KEY]
    carried = {name: value for name, value in mark.items() if name not in ("plan", "plan_id")}
    owner = None if "annotation" in carried else plain_id(one.block.id)
    for issued in plans:
        if issued.has(carried, owner) and (owner is not None or one.is_annotation):
            prefix = {} if issued.prefix is None else {_PREFIX: issued.prefix}
            return issued, _with_plan(one, {**carried, **prefix, "plan": issued.plan})
    if not plans:
        return None, _without_metadata(one)
    return plans[0], _with_plan(one, {"plan": plans[0].plan})


def _with_plan(one: PlannedDocument, carried: Mapping[str, Any]) -> PlannedDocument:
    return PlannedDocument(one.block, {METADATA_KEY: carried})


def _claims_a_plan(metadata: Metadata) -> bool:
    carried = metadata.get(METADATA_KEY)
    return isinstance(carried, Mapping) and not carried.keys().isdisjoint(("plan", "plan_id"))


def _digest_in(metadata: Metadata) -> bytes | None:
    """Return the digest of the plan that metadata says it is of, or None."""
    carried = metadata.get(METADATA_KEY)
    digest = carried.get("plan_id") if isinstance(carried, Mapping) else None
    if not isinstance(digest, str) or len(digest) != 2 * DIGEST_BYTES:
        return None
    try:
        return bytes.fromhex(digest)
    except ValueError:
        return None


def _plans_of(digest: bytes | None, scope: RequestScope | None) -> list[IssuedPlan]:
    """Return the plans with a digest that may be of the turn at hand, the newest first."""
    turn = Turn.of(current_scope() if scope is None else scope)
    return [] if digest is None else ISSUED_PLANS.find(digest, turn)


def _number(plan: IssuedPlan) -> int:
    return plan.number


def _without_metadata(one: PlannedDocument) -> PlannedDocument:
    return PlannedDocument(one.block, {})


def left_out_words(documents: Sequence[PlannedDocument]) -> list[str]:
    """Return the location annotations of all plans that believed documents carry, each once."""
    plans = [plan for one in documents if (plan := plan_of(one.metadata)) is not None]
    distinct = {id(plan): plan for plan in plans}.values()  # each document repeats its plan
    annotations = [part[2] for plan in distinct for part in plan["parts"] if len(part) == 3]
    return list(dict.fromkeys(filter(None, annotations)))  # one may speak of several


def positions_as_planned(documents: Sequence[PlannedDocument]) -> list[DocumentPosition] | None:
    """Return the positions of believed documents if they stand as one plan put them."""
    positions: list[DocumentPosition] = []
    for one in documents:
        position = position_of(one.metadata)
        if position is None:
            return None
        positions.append(position)
    if not positions:
        return None
    plan = positions[0].plan
    if any(position.plan is not plan and position.plan != plan for position in positions):
        return None
    left = [part[0] for part in reversed(plan["parts"])]
    for position in positions:  # two blocks may have the same label, and a block two documents
        while left and left[-1] != position.label:
            left.pop()
        if not left:
            return None
    return positions


def missing_labels(positions: Sequence[DocumentPosition]) -> set[str]:
    """Return the labels of the plan's documents that were taken away since."""
    return set(_sent_labels(positions)) - {one.label for one in positions}


def _sent_labels(positions: Sequence[DocumentPosition]) -> list[str]:
    return [part[0] for part in positions[0].plan["parts"] if len(part) == 2]


def prefix_shown(positions: Sequence[DocumentPosition]) -> PlannedPrefix | None:
    """Return what the plan of documents says for a cache that has marks or keys."""
    prefix, missing = positions[0].prefix, missing_labels(positions)
    if prefix is None or not missing:
        return prefix
    labels = _sent_labels(positions)
    return prefix.without_blocks_behind(min(map(labels.index, missing)))


def planned_texts(
    documents: Sequence[PlannedDocument], scope: RequestScope | None = None
) -> PlannedTexts | None:
    """Return documents of one plan as a prompt may show them; None without marks and keys."""
    if not ISSUED_PLANS.has_prefixes:
        return None
    shown = [one for one in believed(documents, scope) if not one.is_annotation]
    positions = positions_as_planned(shown)
    prefix = None if positions is None else prefix_shown(positions)
    if positions is None or prefix is None:
        return None
    number_of = {label: number for number, label in enumerate(_sent_labels(positions), start=1)}
    texts = tuple(one.block.text for one in shown)
    return PlannedTexts(texts, tuple(number_of.get(one.label, 0) for one in positions), prefix)


def retrievers_order(
    documents: Sequence[PlannedDocument], scope: RequestScope | None = None
) -> list[int] | None:
    """Return the positions of documents in the order in which they were retrieved."""
    given = believed(documents, scope)
    return None if left_out_words(given) else _ranked(given)


def ranked_positions(documents: Sequence[PlannedDocument]) -> list[int]:
    """Return the positions of documents best first, annotations left out."""
    return _ranked(believed(documents))


def _ranked(given: Sequence[PlannedDocument]) -> list[int]:
    kept = [number for number, one in enumerate(given) if not one.is_annotation]
    positions = positions_as_planned([given[number] for number in kept])
    if positions is None:
        return kept
    ranked = sorted(zip(positions, kept, strict=True), key=lambda pair: pair[0].rank)
    return [number for _, number in ranked]


def copied(value: Any) -> Any:
    """Return a copy of nested dicts and lists; what else they hold is shared."""
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value


def plain_id(name: BlockId) -> BlockId:
    """Return an id as a JSON value; numpy's integers are not JSON numbers."""
    return name if isinstance(name, str) else int(name)
