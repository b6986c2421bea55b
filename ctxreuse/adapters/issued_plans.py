"""The plan metadata that this process has written, so that no other is believed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, pairwise
from typing import Any, Final, NamedTuple

from ctxreuse.adapters.context_cuts import PlannedPrefix
from ctxreuse.context.blocks import ContextRequest, id_size
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap, PartSize, TenantLRUMap, TenantShares
from ctxreuse.context.scope import RequestScope

_log = logging.getLogger("ctxreuse")
MAX_ITEMS: Final = 200_000
"""Planned documents (300 bytes each, and an id) and texts of searches (100) that are remembered."""
DIGEST_BYTES: Final = 16
_as_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_LATEST_SEARCHES = 8
_SILENT_PLANS = 20
_ALIKE = 64
"""Turns of one tenant that are remembered for plans that say the same."""


class Turn(NamedTuple):
    """Whose turn a plan was made for."""

    tenant: str
    conversation_id: str | int | None
    messages: int | None

    @classmethod
    def of(cls, asked: ContextRequest | RequestScope) -> Turn:
        """Return the turn of a request, or what a scope says of it."""
        return cls(asked.tenant or "", asked.conversation_id, len(asked.history or ()) or None)

    def may_be(self, other: Turn) -> bool:
        """Return whether nothing that both say differs."""
        return all(
            one == another or one in (None, "") or another in (None, "")
            for one, another in zip(self, other, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class IssuedPlan:
    """A plan that documents carry."""

    turn: Turn
    number: int
    size: int
    plan: Any = None
    items: set[bytes] = field(default_factory=set)
    prefix: PlannedPrefix | None = None

    def add(self, carried: Any, owner: Any) -> None:
        """Remember what an item carries."""
        digest = digest_of([carried, owner])
        if digest is not None:
            self.items.add(digest)

    def has(self, carried: Any, owner: Any) -> bool:
        """Return whether an item carries what was written for it."""
        return digest_of([carried, owner]) in self.items


class IssuedPlans:
    """The plans that documents of this process carry; thread-safe."""

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self._max_items = max_items
        self._numbers = count()
        self._ignored = 0
        self._lock = ForkSafeLock(self._forget_all)
        self._forget_all()

    def _forget_all(self) -> None:
        self._of: dict[str, LRUMap[bytes, tuple[IssuedPlan, ...]]] = {}
        self._holders: dict[bytes, dict[str, None]] = {}  # the tenants that have a digest's plans
        self._shares = TenantShares[str](self._max_items)
        self.forget_marks()

    def forget_marks(self) -> None:
        """Forget how many plans with marks there were, and whether anybody has sent any."""
        self._marked_plans = 0
        self._are_marks_sent = self._has_prefixes = False

    @property
    def has_prefixes(self) -> bool:
        """Whether any plan is for a cache that has marks or keys."""
        return self._has_prefixes

    def note_marks_sent(self) -> None:
        """Take note that a model wrapper has found planned documents in a prompt."""
        self._are_marks_sent = True

    def _note_prefix(self, prefix: PlannedPrefix) -> None:
        """Count a plan with marks; say once if nobody sends any."""
        self._has_prefixes = True
        self._marked_plans += bool(prefix.marks)
        if self._marked_plans >= _SILENT_PLANS and not self._are_marks_sent:
            log_marks_unsent()

    @property
    def parts(self) -> dict[str, PartSize]:
        """How many items are remembered, and how many may be; all tenants together."""
        return {"planned_documents": self._shares.size}

    @property
    def ignored(self) -> int:
        """How many documents came with metadata under our key that was not believed."""
        return self._ignored

    def issue(
        self, plan: Any, turn: Turn, size: int, prefix: PlannedPrefix | None = None
    ) -> IssuedPlan:
        """Remember a plan as metadata shows it; its items are added later."""
        if prefix is not None:
            self._note_prefix(prefix)
        size += id_size(turn.conversation_id or "") - 1
        issued = IssuedPlan(turn, next(self._numbers), size, plan, prefix=prefix)
        digest = digest_of(plan)
        if digest is None:
            return issued
        with self._lock:
            plans = self._of.setdefault(turn.tenant, LRUMap(weight_of=_size))
            others: list[IssuedPlan] = []
            for alike in plans.peek(digest) or ():  # planners that are new all make a first plan
                if alike.turn != turn:
                    others.append(alike)
                elif len(alike.items) <= size:  # else they were retrieved in many orders
                    issued = replace(issued, items=alike.items)
            plans.put(digest, (issued, *others[: _ALIKE - 1]))
            self._holders.setdefault(digest, {})[turn.tenant] = None
            self._note(turn.tenant)
            self._forget_oldest(turn.tenant)
        return issued

    def find(self, digest: bytes, turn: Turn) -> list[IssuedPlan]:
        """Return the plans of this digest that may be of a turn, the newest first."""
        with self._lock:
            tenants = (turn.tenant, "") if turn.tenant else tuple(self._holders.get(digest, ()))
            held = [self._of[tenant] for tenant in tenants if tenant in self._of]
            found = [plan for plans in held for plan in plans.peek(digest) or ()]
        found = [plan for plan in found if plan.turn.may_be(turn)]
        return sorted(found, key=lambda plan: plan.number, reverse=True)

    def has_any(self, tenant: str) -> bool:
        """Return whether any are remembered that may be of a tenant's turn."""
        with self._lock:
            return bool(self._of) if not tenant else tenant in self._of or "" in self._of

    def ignore(self, documents: int) -> None:
        """Count documents whose metadata is not believed; log that once."""
        if not documents:
            return
        with self._lock:
            first = not self._ignored
            self._ignored += documents
        if first:
            _log.warning(
                "Metadata under 'ctxreuse' of %d documents is not of this turn's plan in this "
                "process, or was changed since; it is ignored, and they are shown like documents "
                "without a plan. Further ones are only counted.",
                documents,
            )

    def _forget_oldest(self, newest: str) -> None:
        """Forget the oldest plans of whoever has the most items, but for the one just issued."""
        while self._shares.is_exceeded:
            tenant = self._shares.largest()
            plans = self._of[tenant]
            if tenant == newest and len(plans) == 1:
                return
            digest, _ = plans.pop_oldest()
            holders = self._holders[digest]
            del holders[tenant]
            if not holders:
                del self._holders[digest]
            self._note(tenant)

    def _note(self, tenant: str) -> None:
        """Take note of how much a tenant holds; a long name counts as further items."""
        plans = self._of[tenant]
        if len(plans):
            self._shares.note(tenant, plans.weight + id_size(tenant) - 1)
        else:
            self._shares.note(tenant, 0)
            del self._of[tenant]


def _size(plans: tuple[IssuedPlan, ...]) -> int:
    return sum(plan.size for plan in plans)


def digest_of(value: Any) -> bytes | None:
    """Return a digest of a JSON value that a round trip through JSON leaves as it is."""
    try:
        text = _as_json(value)
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


class SearchedText(NamedTuple):
    """A text in the planned result of a search."""

    search: int
    position: int
    rank: int


class SearchedTexts:
    """Texts whose planned order has no place for metadata: results of searches, as plain values."""

    def __init__(self) -> None:
        self._numbers = count()
        self._lock = ForkSafeLock(self._forget_all)
        self._forget_all()

    def _forget_all(self) -> None:
        self._texts: TenantLRUMap[bytes, tuple[SearchedText, ...]] = TenantLRUMap(
            MAX_ITEMS, max_weight=MAX_ITEMS, weight_of=len
        )

    @property
    def parts(self) -> dict[str, PartSize]:
        """How many texts of searches are remembered, and how many may be; all tenants together."""
        return {"searched_texts": PartSize(self._texts.weight, MAX_ITEMS)}

    def remember(self, tenant: str, texts: Iterable[tuple[bytes, int]]) -> None:
        """Remember the planned result of a search."""
        search = next(self._numbers)
        for position, (digest, rank) in enumerate(texts):
            with self._lock:
                known = self._texts.of(tenant).peek(digest) or ()
                others = [one for one in known if one.search != search]
                latest = SearchedText(search, position, rank)
                self._texts.put(tenant, digest, (latest, *others[: _LATEST_SEARCHES - 1]))

    def ranks(self, tenant: str, digests: Sequence[bytes]) -> list[int] | None:
        """Return the ranks of texts in the latest search whose plan gave them this order."""
        with self._lock:
            held = self._texts.of(tenant)
            if not digests or not len(held):
                return None
            found = [{one.search: one for one in held.peek(digest) or ()} for digest in digests]
        for search in sorted(set.intersection(*map(set, found)), reverse=True):
            texts = [one[search] for one in found]
            if all(one.position < other.position for one, other in pairwise(texts)):
                return [one.rank for one in texts]
        return None


SEARCHED_TEXTS = SearchedTexts()
"""What the searches of this process have put in order."""


@cache
def log_marks_unsent() -> None:
    """Say once that documents are planned for a cache with marks, and that nothing sends these."""
    _log.warning(
        "retrieved documents are planned for a cache that keeps prefixes up to marks, and no "
        "wrapped model has sent any: documents alone carry no marks. Wrap the model, too, with the "
        "same planner: ReuseChatModel(inner=..., planner=planner), in LlamaIndex "
        "ReuseLLM(inner=..., planner=planner); or send plan.body()."
    )


ISSUED_PLANS = IssuedPlans()
"""What this process has issued; an annotation or a rank counts only if it is in there."""
