"""Whether an engine's cache holds what a planner expects: a judgement over many answers."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from ctxreuse.rules.answers import may_keep_states, when_silent
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

ANSWERS: Final = 200
"""Answers that one judgement rests on."""
_LEAST_EXPECTED_TOKENS = 64
_LEAST_SHARE = 0.5

_MISSING = (
    "of %d tokens that a planner expected in the engine's cache, %d answers report %d: another "
    "process may share this engine, a router may spread the requests over several, its cache "
    "may hold less than the planner believes%s. %sCompare `planner.savings.reported` with the "
    "engine's /metrics, and run `ctxreuse doctor --base-url URL --metrics URL`"
)
_SHARE_A_LOG = "Give the planners of all processes one log (ReusePlanner(shared_log=...)). "


class Mismatch(NamedTuple):
    """What is wrong with 200 answers: they report no cached token, or far too few."""

    kind: Literal["silent", "missing"]
    expected_tokens: int
    found_tokens: int

    def words(self, *, is_shared: bool, cache: CacheRules = DEFAULT_CACHE) -> str:
        """Return what the log says of it, with a remedy."""
        if self.kind == "silent":
            return when_silent(cache, ANSWERS, self.expected_tokens)
        remedy = "" if is_shared else _SHARE_A_LOG
        told = self.expected_tokens, ANSWERS, self.found_tokens, may_keep_states(cache), remedy
        return _MISSING % told


class CacheExpectations:
    """Compares answers with what was expected, 200 at a time; not locked, its owner does that."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Begin to count anew; what was said is not said again."""
        self._answers = self._expected = self._found = 0
        self._shares = 0.0

    def note(self, expected: int, confirmed: int) -> Mismatch | None:
        """Take note of an answer; return what is to be said, each kind once."""
        if expected < _LEAST_EXPECTED_TOKENS:  # may be less than a block of the engine
            return None
        self._answers += 1
        self._expected += expected
        self._found += confirmed
        self._shares += confirmed / expected  # no long prompt outweighs the others
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


def confirmed_tokens(expected: int, before: int, prompt: int, cached: int) -> int:
    """Return how many of the expected tokens, behind others, an answer confirms to be cached."""
    due = min(expected + before, prompt)
    return expected * min(cached, due) // due if due else 0
