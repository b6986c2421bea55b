"""Scores of answers: exact match and F1 as SQuAD defines them.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), section 6.1,
and its evaluation script.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return a text as SQuAD compares it: lower case, no ASCII punctuation, articles or gaps."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if an answer is one of the right ones, else 0."""
    given = normalize_answer(answer)
    return max(float(given == normalize_answer(right)) for right in references)


def answer_contained(answer: str, references: Sequence[str]) -> float:
    """Return 1 if an answer holds one of the right ones, word by word, else 0."""
    given = f" {normalize_answer(answer)} "
    known = [f" {normalize_answer(right)} " for right in references]
    return max(float(right in given if right.strip() else right == given) for right in known)


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the F1 of an answer's words against the closest right answer."""
    given = normalize_answer(answer).split()
    return max(_f1(given, normalize_answer(right).split()) for right in references)


def _f1(given: list[str], right: list[str]) -> float:
    if not given or not right:
        return float(given == right)
    shared = sum((Counter(given) & Counter(right)).values())
    return 2 * shared / (len(given) + len(right))
