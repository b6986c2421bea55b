"""Scores of answers: exact match and F1 as SQuAD defines them, with bootstrap intervals.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), section 6.1,
and its evaluation script; Efron, "Bootstrap Methods" (1979).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctxreuse.context.checks import checked_integer, checked_kind, checked_number, checked_texts
from ctxreuse.errors import InvalidRequestError, describe

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SCORES_AT_ONCE = 1_000_000
_THOUGHT, _THOUGHT_ENDS = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the distance between the ends."""
        return (self.high - self.low) / 2


def without_thoughts(text: str) -> str:
    """Return what a reasoning model answered, without what it thought before."""
    checked_kind("an answer", text, str, "a text")
    _, end, answer = text.rpartition(_THOUGHT_ENDS)
    if end:
        return answer.strip()
    return "" if text.lstrip().startswith(_THOUGHT) else text


def normalize_answer(text: str) -> str:
    """Return a text as SQuAD compares it: lower case, no ASCII punctuation, articles or gaps."""
    checked_kind("an answer", text, str, "a text")
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if an answer is one of the right ones, else 0."""
    given = normalize_answer(answer)
    return max(float(given == normalize_answer(right)) for right in _checked(references))


def answer_contained(answer: str, references: Sequence[str]) -> float:
    """Return 1 if an answer holds one of the right ones, word by word, else 0."""
    given = f" {normalize_answer(answer)} "
    known = [f" {normalize_answer(right)} " for right in _checked(references)]
    return max(float(right in given if right.strip() else right == given) for right in known)


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the F1 of an answer's words against the closest right answer."""
    given = normalize_answer(answer).split()
    return max(_f1(given, normalize_answer(right).split()) for right in _checked(references))


def bootstrap_interval(
    scores: Sequence[float], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Return the mean of some scores with a percentile bootstrap interval."""
    try:
        values = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.empty(0)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise InvalidRequestError(
            f"scores must be a list of numbers, at least one, not {describe(scores)}"
        )
    if not 0 < checked_number("confidence", confidence) < 1:
        raise InvalidRequestError(
            f"confidence must be between 0 and 1, not {describe(confidence)}; 0.95 is usual"
        )
    checked_integer("resamples", resamples, 1)
    checked_integer("seed", seed)
    random = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _SCORES_AT_ONCE // values.size)
    for start in range(0, resamples, step):
        part = means[start : start + step]
        part[:] = values[random.integers(0, values.size, (part.size, values.size))].mean(axis=1)
    low, high = np.quantile(means, ((1 - confidence) / 2, (1 + confidence) / 2))
    return Interval(float(values.mean()), float(low), float(high))


def _f1(given: list[str], right: list[str]) -> float:
    if not given or not right:
        return float(given == right)
    shared = sum((Counter(given) & Counter(right)).values())
    return 2 * shared / (len(given) + len(right))


def _checked(references: Sequence[str]) -> Sequence[str]:
    words = "a list of right answers, at least one"
    right = checked_texts("references", references, words)
    if not right:
        raise InvalidRequestError(f"references must be {words}, not {describe(references)}")
    return right
