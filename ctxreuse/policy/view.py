"""What an ordering policy is asked, what it may see, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.memory.points import A_TOKEN_SEEN
from ctxreuse.memory.prefix_index import Node, Root, SearchBudget
from ctxreuse.memory.tenants import TenantState
from ctxreuse.rules.cache_rules import CacheRules

Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class View:
    """A request whose order is asked for, and what its tenant sent before.

    Each method holds the tenant's state for as long as it looks; so others may send meanwhile.

    Attributes:
        request: The request.
        weights: The tokens of each block, at least 1, in the retriever's order. The keys are the
            index's names for blocks: the policy returns these.
        root: What its beginning is named after: requests share a prefix where this is equal.
        front_tokens: Tokens in front of the blocks; 0 where the cache has no minimum.
        rules: The cache's.
        now: Seconds on the planner's clock; None takes all that was kept as alive.
        words: Tokens of the words on an order that differs from the retriever's.
        first: The block that stands in front whatever is cached; None for any.
        missing: Block tokens that a common beginning still needs to be kept at all.
        is_too_short: Whether nothing of it can be kept, whatever the order.
        note_limit: Is told the name of a bound at which work ended.
    """

    _state: TenantState
    _least: int  # block tokens of a beginning that can be kept
    _budget: SearchBudget | None
    request: ContextRequest
    weights: Mapping[BlockKey, int]
    root: Root
    front_tokens: int
    rules: CacheRules
    now: float | None
    words: int
    first: BlockKey | None
    missing: int
    is_too_short: bool
    note_limit: Callable[[str], object]

    @property
    def blocks(self) -> dict[BlockKey, ContextBlock]:
        """The blocks, by the keys of `weights`."""
        return dict(zip(self.weights, self.request.unique_blocks.values(), strict=True))

    def beginning(self) -> tuple[tuple[BlockKey, ...], float]:
        """Return the path that is worth most in front, and what it saves there, in tokens."""
        with self._state.lock:
            points, index = self._state.points, self._state.index
            worth = None if points is None else points.gain(self.front_tokens, self.now)
            match = index.search(self.root, self.weights, self._budget, self.first, worth)
            for name in match.limits:
                self.note_limit(name)
            if worth is not None:
                seen = A_TOKEN_SEEN * (self.front_tokens + match.weight)
                return match.path, match.worth - seen if match.path else 0.0
            if match.weight < self._least:
                return (), 0.0
            sent = index.sent_prefix(self.root, list(self.weights))
            return match.path, match.weight - sum(list(self.weights.values())[:sent])

    def readable(self) -> tuple[BlockKey, ...]:
        """Return the longest path that can be read now, if that saves more than the words cost."""
        with self._state.lock:
            points, index = self._state.points, self._state.index
            if points is not None:
                length = points.length(self.now)
                match = index.search(self.root, self.weights, self._budget, self.first, length)
                return match.path if match.weight * points.saving > self.words else ()
            path, gain = self.beginning()
            if gain > self.words or not path:
                return path
            retrieved = list(self.weights)
            return tuple(retrieved[: index.sent_prefix(self.root, retrieved)])

    def sent_prefix(self, order: Sequence[BlockKey]) -> int:
        """Return how many leading blocks of an order were sent before, in this order."""
        with self._state.lock:
            return self._state.index.sent_prefix(self.root, order)

    def members(self) -> dict[BlockKey, int]:
        """Return which recent requests hold which blocks, one bit a request.

        Empty where nothing was sent behind this root: nothing can be shared there.
        """
        with self._state.lock:
            top = self._state.index.roots.get(self.root)
            return self._state.recent.members(self.weights) if top and top.children else {}

    def ask_index(self, ask: Callable[[Node | None], Answer]) -> Answer:
        """Return what a function says of the node under which requests with this root stand."""
        with self._state.lock:
            return ask(self._state.index.roots.get(self.root))


@dataclass(frozen=True, slots=True)
class Arrangement:
    """An arranged batch.

    Attributes:
        orders: The order of each request's blocks, by its position in the batch.
        execution: The positions in the order in which the requests run: a permutation.
    """

    orders: list[list[BlockKey]]
    execution: list[int]


class Policy(ABC):
    """A way to order blocks, and the requests of a batch.

    Give one to `planner.plan(request, strategy=...)`. Later turns of a conversation are not asked
    for: behind a history there is nothing to gain.
    """

    name: ClassVar[str] = ""
    keeps_schedule: ClassVar[bool] = False
    """Whether a batch runs as it was given."""

    @abstractmethod
    def order(self, view: View) -> Sequence[BlockKey]:
        """Return the keys of `view.weights` in the order in which the blocks are to be sent."""

    def arrange(self, views: Sequence[View]) -> Arrangement:
        """Order requests behind one root that are known together: each alone, run depth first."""
        orders = [list(self.order(view)) for view in views]
        return Arrangement(orders, depth_first_order(orders))


def depth_first_order(
    sequences: Sequence[Sequence[Hashable]], *, largest_first: bool = True
) -> list[int]:
    """Return the positions of the sequences in depth-first order of their prefix tree.

    At each node sequences that end there come first, then branches by size, then earlier ones.
    """
    order: list[int] = []
    stack: list[tuple[list[int], int]] = [(list(range(len(sequences))), 0)]
    while stack:
        group, depth = stack.pop()
        if len(group) == 1:
            order += group
            continue
        branches: dict[Hashable, list[int]] = {}
        for position in group:
            sequence = sequences[position]
            if len(sequence) > depth:
                branches.setdefault(sequence[depth], []).append(position)
            else:
                order.append(position)
        ordered = sorted(branches.values(), key=len, reverse=largest_first)  # stable
        stack += [(branch, depth + 1) for branch in reversed(ordered)]
    return order
