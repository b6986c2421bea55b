"""Whether an engine's cache holds what a planner expects: a judgement over many answers."""

from __future__ import annotations

from typing import Final

from ctxreuse.rules.answers import may_keep_states, when_silent
from ctxreuse.rules.cache_rules import CacheRules

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


class CacheExpectations:
    """Compares answers with what was expected, 200 at a time; not locked, its owner does that."""

    def __init__(self, cache: CacheRules, *, is_alone: bool) -> None:
        self._cache = cache
        self._remedy = _SHARE_A_LOG if is_alone else ""
        self._said: set[bool] = set()
        self.forget()

    def forget(self) -> None:
        """Begin to count anew; what was said is not said again."""
        self._answers = self._expected = self._found = 0
        self._shares = 0.0

    def note(self, expected: int, confirmed: int) -> str | None:
        """Take note of an answer; return what the log says with a remedy, each kind once."""
        if expected < _LEAST_EXPECTED_TOKENS:  # may be less than a block of the engine
            return None
        self._answers += 1
        self._expected += expected
        self._found += confirmed
        self._shares += confirmed / expected  # no long prompt outweighs the others
        if self._answers < ANSWERS:
            return None
        is_missing = self._shares / self._answers < _LEAST_SHARE
        expected, found = self._expected, self._found
        self.forget()
        if not is_missing or bool(found) in self._said:
            return None
        self._said.add(bool(found))
        if not found:
            return when_silent(self._cache, ANSWERS, expected)
        told = expected, ANSWERS, found, may_keep_states(self._cache), self._remedy
        return _MISSING % told


def confirmed_tokens(expected: int, before: int, prompt: int, cached: int) -> int:
    """Return how many of the expected tokens, behind others, an answer confirms to be cached."""
    due = min(expected + before, prompt)
    return expected * min(cached, due) // due if due else 0
