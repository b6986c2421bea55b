"""A policy of one's own: blocks stand by their ids, so that the same set is the same prompt.

Beside the package's own on a recorded trace:

    ctxreuse estimate trace.jsonl --policy examples.policy_by_id:ById
"""

from typing import Any

import ctxreuse
from ctxreuse.policy import Policy, View


class ById(Policy):
    """Blocks by their ids."""

    name = "by id"

    def order(self, view: View) -> list[Any]:
        """Return the keys of the blocks, the least id first."""
        blocks = view.blocks
        return sorted(view.weights, key=lambda key: str(blocks[key].id))


if __name__ == "__main__":
    planner, policy = ctxreuse.ReusePlanner(), ById()
    for names in ("cab", "bca"):
        blocks = [ctxreuse.ContextBlock(id=name, text=name, tokens=100) for name in names]
        plan = planner.plan(ctxreuse.ContextRequest(blocks, "?"), policy)
        print("".join(str(one.id) for one in plan.blocks), plan.expected_cached_tokens)
