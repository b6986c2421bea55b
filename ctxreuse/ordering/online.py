"""The order of one arriving context (online): what goes in front, and how the rest follows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS
from ctxreuse.index.cooccurrence import Cooccurrence
from ctxreuse.index.path_search import heaviest_path
from ctxreuse.index.radix_tree import ContextIndex, Node

_TRIED_AT_LEAST = 32
_TRIED_ALWAYS = 256
_TRIED_LATER = 4
_FORGETTING = 0.998
_TRIAL_NODES = 2_000


class OnlineOrder:
    """Orders the arriving requests of one tenant.

    The best cached path comes first. The papers append the remaining blocks as retrieved; but their
    order is what later requests can share, and mostly more is shared if they follow by
    co-occurrence. Not always: where similar questions get the same first blocks, the retriever's
    order is as good and needs no annotation. So both are tried on the tenant's own requests, each
    in a small index of its own, as if it had always been used: what it would have found cached,
    less what its annotations would have cost. The one that is ahead orders the next request.

    Every request is tried at first, then every fourth, which is cheaper; the two stay comparable,
    since both see the same requests.

    Args:
        recent: The tenant's recent requests.

    Attributes:
        follows_cooccurrence: Whether co-occurrence, rather than the retriever, orders what stands
            behind a cached path.
        node_count: How many index nodes the trials hold.
    """

    def __init__(self, recent: Cooccurrence) -> None:
        self._recent = recent
        self._requests = 0
        self._trials = {
            True: ContextIndex(max_nodes=_TRIAL_NODES),
            False: ContextIndex(max_nodes=_TRIAL_NODES),
        }
        self._gains = {True: 0.0, False: 0.0}
        self.follows_cooccurrence = True
        self.node_count = 0

    def order(self, context: Mapping[BlockKey, int], root: Node) -> list[BlockKey]:
        """Order a context.

        Args:
            context: Block -> weight (tokens, at least 1), in the retriever's order.
            root: The root of the request's system text in the tenant's context index.

        Returns:
            A permutation of the context's keys.
        """
        return self._arrange(context, root, self.follows_cooccurrence)[1]

    def learn(self, context: Mapping[BlockKey, int], system: Hashable) -> None:
        """Try both continuations on a request, before it counts as a recent one."""
        self._requests += 1
        if self._requests > _TRIED_ALWAYS and self._requests % _TRIED_LATER:
            return
        annotation = 20 + 6 * len(context)  # about its tokens: some words, and a label a block
        for by_cooccurrence, trial in self._trials.items():
            root = trial.root(system)
            cached, order = self._arrange(context, root, by_cooccurrence)
            gain = cached if order == list(context) else cached - annotation
            self._gains[by_cooccurrence] = _FORGETTING * self._gains[by_cooccurrence] + gain
            weights = [context[key] for key in order]
            trial.insert(root, order, weights, self._requests, self._requests)
        self.node_count = sum([trial.node_count for trial in self._trials.values()])
        is_ahead = self._gains[True] >= self._gains[False]
        self.follows_cooccurrence = is_ahead or self._requests < _TRIED_AT_LEAST

    def _arrange(
        self, context: Mapping[BlockKey, int], root: Node, by_cooccurrence: bool
    ) -> tuple[int, list[BlockKey]]:
        """Return the weight of the best cached path, and the order.

        The order begins with that path unless the path is shorter than an engine block.
        """
        match = heaviest_path(root, context)
        # a shorter path saves nothing and is no reason to move anything
        placed = match.path if match.weight >= ENGINE_BLOCK_TOKENS else ()
        taken = set(placed)
        rest = {key: weight for key, weight in context.items() if key not in taken}
        if not rest:
            return match.weight, list(placed)
        following = self._recent.continuation(placed, rest) if by_cooccurrence else rest
        return match.weight, [*placed, *following]
