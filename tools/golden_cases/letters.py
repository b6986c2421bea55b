"""What the adapters' cases retrieve: a text for each letter of a word."""

from __future__ import annotations

WORDS = ("abc", "dbe", "cba", "xyz", "bca", "", "zxa")
"""What is retrieved, one request after the other, in cases that say nothing else."""


def text_of(letter: str) -> str:
    """Return a letter's text, long enough that moving it pays."""
    return f"{letter} says: " + letter * 400


HISTORY = (
    {"role": "user", "content": f"[Doc_1] {text_of('a')}\n\n[Doc_2] {text_of('b')}\n\nWhich?"},
    {"role": "assistant", "content": "Both."},
)
"""A conversation that shows two letters."""
