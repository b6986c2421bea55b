"""Whether an engine's cache holds what a planner expects: a judgement over many answers."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

ANSWERS: Final = 200
"""Answers that one judgement rests on."""
_LEAST_EXPECTED_TOKENS = 64
_LEAST_SHARE = 0.5


class Mismatch(NamedTuple):
    """What is wrong with the latest answers.

    Attributes:
        kind: "silent": none of them reports a cached token. "missing": they report far less than
            was expected.
        expected_tokens: Tokens that were expected to be cached in them.
        found_tokens: Of these, reported as cached.
    """

    kind: Literal["silent", "missing"]
    expected_tokens: int
    found_tokens: int


class CacheExpectations:
    """Compares answers with what was expected, 200 at a time; not locked, its owner does that.

    Only answers count for which 64 tokens or more were expected: less may be less than a block of
    the engine. Each counts with the share of these that was found, so that no long prompt outweighs
    the others, and what is cached beyond the expectation makes up for no other answer.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Begin to count anew; what was said is not said again."""
        self._answers = self._expected = self._found = 0
        self._shares = 0.0

    def note(self, expected: int, cached: int | None) -> Mismatch | None:
        """Take note of an answer.

        Args:
            expected: Tokens of the prompt that were expected to be cached.
            cached: Those that were, as reported; None where that is unknown.

        Returns:
            What is to be said now, each kind once; mostly None.
        """
        if expected < _LEAST_EXPECTED_TOKENS:
            return None
        found = min(cached or 0, expected)
        self._answers += 1
        self._expected += expected
        self._found += found
        self._shares += found / expected
        if self._answers < ANSWERS:
            return None
        mismatch: Mismatch | None = None
        if not self._found:
            mismatch = Mismatch("silent", self._expected, 0)
        elif self._shares / self._answers < _LEAST_SHARE:
            mismatch = Mismatch("missing", self._expected, self._found)
        self.forget()
        if mismatch is None or mismatch.kind in self._said:
            return None
        self._said.add(mismatch.kind)
        return mismatch
