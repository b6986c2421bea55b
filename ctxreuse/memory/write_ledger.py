"""How much a tenant may pay for writing prefixes that may never be read.

Writing is paid out of what reading has saved. A policy that nothing limits is followed beside it;
once it would have gained several times what a write costs, a small bound may be paid in advance, as
the first few prompts may for one write. For prompts that are planned one by one:

    bill <= (1 + 1/4,096) * uncached + 2 * premium * longest prompt
"""

from __future__ import annotations

_CERTAINTY = 4.0
"""How many times a payment in advance must have been gained by the policy that nothing limits."""
_FIRST = 16
"""So many prompts may pay for one write in advance, while nothing is known."""
_WRITES_IN_ADVANCE = 2
"""So many writes of the longest prompt may be paid before as much is saved by reading."""
_FORGIVEN = 1 / 4_096
"""What part of all tokens may be lost beyond that, so that no early loss ends writing for good."""


class WriteLedger:
    """What a tenant's writing has cost and its reading saved, in uncached tokens."""

    __slots__ = ("_gained", "_longest", "_premium", "_prompts", "_saving", "_sent", "saved")

    def __init__(self, premium: float, saving: float) -> None:
        self._premium = premium
        self._saving = saving
        self.saved = 0.0
        self._gained = 0.0  # by the policy that nothing limits, since it last had lost all it had
        self._prompts = self._sent = self._longest = 0

    def most(self, tokens: int) -> float:
        """Return how many tokens a prompt may write behind what it reads."""
        write = self._premium * max(self._longest, tokens)
        proven = max(self._gained / _CERTAINTY, write if self._prompts < _FIRST else 0.0)
        advance = min(proven, _WRITES_IN_ADVANCE * write + _FORGIVEN * self._sent)
        limit = max(0.0, self.saved + advance)
        return limit / self._premium if self._premium > 0 else float("inf")

    def note(self, tokens: int, read: int, written: int) -> None:
        """Count a prompt."""
        self._prompts += 1
        self._sent += tokens
        self._longest = max(self._longest, tokens)
        self.saved += self._saving * read - self._premium * written

    def note_unlimited(self, read: int, written: int) -> None:
        """Count what the policy that nothing limits would have read and written of a prompt."""
        self._gained = max(0.0, self._gained + self._saving * read - self._premium * written)
