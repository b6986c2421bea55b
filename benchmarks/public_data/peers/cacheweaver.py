"""CacheWeaver's order, for comparison: a greedy walk through the evidence that was served before.

Tan, Gu and Li, "CacheWeaver: Cache-Aware Evidence Ordering for Efficient Grounded RAG Inference"
(arXiv 2606.19667, 2026). The authors have published no code. What stands here is taken from:

- the paper's abstract: a prefix tree over recently served evidence sequences, a greedy walk that
  places the most reusable prefix first, the set of evidence and the engine left as they are;
- two transcriptions of its Algorithm 1 in public repositories, which agree: the remaining documents
  are looked at in the retriever's order, the first that continues the walk below the node that was
  reached is placed next, and where none does, the rest follows in the retriever's order; a request
  that was served is put into the tree; the tree forgets what was served longest ago, which stands
  in for the engine's evictions.

The paper's tree holds the last requests of a fixed number, because it does not know the cache. Here
it holds what the cache holds, in tokens, least recently used leaves first, as the other policies'
trees do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from ctxreuse.context.blocks import BlockKey, ContextRequest
from ctxreuse.measure.replay.policies import MeasuredPolicy
from ctxreuse.measure.traces.trace_files import block_tokens
from ctxreuse.memory.prefix_index import Evicted, Node, PrefixIndex
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.planning.plan import Plan
from ctxreuse.policy import Policy
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules


def cacheweaver_order(
    context: Iterable[BlockKey], root: Node | None, *, prefers_most_served: bool = False
) -> list[BlockKey]:
    """Order a context as CacheWeaver does."""
    rank = {key: place for place, key in enumerate(dict.fromkeys(context))}  # of those to place
    order: list[BlockKey] = []

    def preference(child: Node) -> tuple[int, int]:
        return (-child.uses if prefers_most_served else 0, rank[child.run[0]])

    node = root
    while node is not None:
        going_on = (child for key, child in node.children.items() if key in rank)
        node = min(going_on, key=preference, default=None)
        for key in node.run if node is not None else ():
            if key not in rank:
                node = None  # within a run, only this block goes on
                break
            order.append(key)
            del rank[key]
    return [*order, *rank]


class CacheWeaverPlanner(ReusePlanner):
    """Plans requests one by one in CacheWeaver's order, and as retrieved in all other ways."""

    def __init__(
        self,
        *,
        labels: bool | None = None,
        deduplicate: bool = True,
        capacity_tokens: int | None = None,
        prefers_most_served: bool = False,
        cache: CacheRules = DEFAULT_CACHE,
    ) -> None:
        super().__init__(
            annotate=False,
            labels=labels,
            deduplicate=deduplicate,
            capacity_tokens=capacity_tokens,
            cache=cache,
        )
        self._prefers_most_served = prefers_most_served
        self._served = PrefixIndex(capacity_tokens)
        self._ends: dict[tuple[str, str | int | None], int] = {}
        self._requests = 0

    def plan(
        self,
        request: ContextRequest,
        strategy: Strategy | Policy = "none",
        *,
        deduplicate: bool | None = None,
        now: float | None = None,
        primes: bool = False,
    ) -> Plan:
        """Plan one request that has just arrived; see `ReusePlanner.plan`."""
        root = (request.tenant, request.system)
        if not request.history:
            blocks = request.unique_blocks
            order = cacheweaver_order(
                blocks,
                self._served.roots.get(root),
                prefers_most_served=self._prefers_most_served,
            )
            request = replace(request, blocks=tuple(blocks[key] for key in order))
        plan = super().plan(request, "none", deduplicate=deduplicate, now=now)
        self._serve(plan, root)
        return plan

    def evict(self, request_ids: Iterable[str | int], tenant: str | None = None) -> Evicted:
        """Take requests out that the engine did not serve; see `ReusePlanner.evict`."""
        ids = list(request_ids)
        for request_id in ids:
            self._served.evict(_name(tenant or "", request_id))
        return super().evict(ids, tenant)

    def _serve(self, plan: Plan, root: Hashable) -> None:
        request = plan.request
        keys = [block.key for block in plan.blocks]
        tokens = [max(1, block_tokens(block)) for block in plan.blocks]
        conversation = (request.tenant, request.conversation_id)
        name = _name(request.tenant, plan.request_id)
        self._requests += 1
        if request.history:
            end = self._ends.get(conversation, 0)
            put = self._served.extend(end, root, keys, tokens, name, self._requests)
        else:
            put = self._served.insert(root, keys, tokens, name, self._requests)
        if request.conversation_id is not None:
            self._ends[conversation] = put.end.place


def _name(tenant: str, request_id: str | int) -> str:
    return repr((tenant, request_id))  # tenants may use the same ids


class _CacheWeaverPolicy(MeasuredPolicy):
    def planner(
        self, *, deduplicate: bool, capacity_tokens: int | None, cache: CacheRules = DEFAULT_CACHE
    ) -> ReusePlanner:
        return CacheWeaverPlanner(
            labels=self.labels(deduplicate=deduplicate),
            deduplicate=deduplicate,
            capacity_tokens=capacity_tokens,
            cache=cache,
        )


CACHEWEAVER = _CacheWeaverPolicy("CacheWeaver, online", "none", "online")
