"""A chain's trace as a page."""

from __future__ import annotations

from chain_of_agents.trace import Trace


def render(trace: Trace) -> str:
    """Return the page."""
    raise NotImplementedError
