"""Whose run it is."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunContext:
    """Whose run it is.

    Attributes:
        number: The run's number in its engine, from 1.
        tenant: The tenant; nothing is shared across tenants.
        session: What runs of one session have in common: their last searches. None has no session.
    """

    number: int
    tenant: str = ""
    session: str | int | None = None

    def session_key(self, retriever: str) -> Hashable | None:
        """Return the key of the session's last search with a retriever."""
        return None if self.session is None else (self.tenant, self.session, retriever)
