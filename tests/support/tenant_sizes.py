"""Planners that remember little, and the sizes of what they remember, counted anew."""

from helpers import nodes_of

from ctxreuse import ReusePlanner
from ctxreuse.memory.tenants import Bounds, Tenants

SMALL = Bounds(
    tenants=3,
    index_nodes=12,
    index_blocks=30,
    request_ids=10,
    recent_blocks=20,
    conversations=4,
    shown_blocks=15,
    logged_blocks=25,
    token_counts=12,
)


def bounded(bounds: Bounds = SMALL) -> ReusePlanner:
    """Return a planner that remembers little."""
    planner = ReusePlanner(token_counter=lambda text: len(text) + 20)
    planner._planning._tenants = Tenants(None, bounds)
    return planner


def measured(tenants: Tenants) -> dict[str, int]:
    """Return the size of every part, counted anew."""
    states = tenants._states.values()
    return {
        "index_nodes": sum(
            sum(node.parent is not None for node in nodes_of(state.index)) for state in states
        ),
        "index_blocks": sum(len(node.run) for state in states for node in nodes_of(state.index)),
        "request_ids": sum(state.index.ids_size for state in states),
        "recent_blocks": sum(len(one or ()) for state in states for one in state.recent._requests),
        "conversations": sum(len(state.conversations) for state in states),
        "shown_blocks": sum(
            record.number + (record.reading.size if record.reading else 0)
            for state in states
            for record in state.conversations._records.values()
        ),
        "logged_blocks": sum(logged.size for state in states for logged in state.log._logged),
        "token_counts": sum(len(state.token_counts) for state in states),
    }
