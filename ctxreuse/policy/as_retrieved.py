"""The retriever's order: `strategy="none"`."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.context.blocks import BlockKey
from ctxreuse.policy.view import Policy, View


class AsRetrieved(Policy):
    """Everything as it was retrieved, and batches as they were given."""

    name = "none"
    keeps_schedule = True

    def order(self, view: View) -> Sequence[BlockKey]:
        """Return the retriever's order."""
        return list(view.weights)


AS_RETRIEVED = AsRetrieved()
