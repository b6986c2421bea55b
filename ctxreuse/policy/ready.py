"""The policies that a name asks for."""

from __future__ import annotations

from ctxreuse.policy.as_retrieved import AS_RETRIEVED
from ctxreuse.policy.paper import Paper
from ctxreuse.policy.reuse import REUSE
from ctxreuse.policy.view import Policy


def ready_policies(alpha: float) -> dict[str, Policy]:
    """Return this package's policies by name; `alpha` weighs ranks in the papers' distance."""
    return {one.name: one for one in (REUSE, Paper(alpha), AS_RETRIEVED)}
