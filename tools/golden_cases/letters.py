"""What the adapters' cases retrieve: a text for each letter of a word."""

from __future__ import annotations

from typing import Any

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.context.rendering import DEFAULT_TEMPLATES

WORDS = ("abc", "dbe", "cba", "xyz", "bca", "", "zxa")
"""What is retrieved, one request after the other, in cases that say nothing else."""


def text_of(letter: str) -> str:
    """Return a letter's text, long enough that moving it pays."""
    return f"{letter} says: " + letter * 400


SHOWN = [ContextBlock(text=text_of(letter)) for letter in "ab"]
HISTORY = (
    {
        "role": "user",
        "content": "\n\n".join(
            [*(f"{DEFAULT_TEMPLATES.label_of(one)} {one.text}" for one in SHOWN), "Which?"]
        ),
    },
    {"role": "assistant", "content": "Both."},
)
"""A conversation that shows two letters."""


class FaultyPlanner(ReusePlanner):
    """Fails at whatever it is to plan."""

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Fail."""
        raise RuntimeError("a fault")

    plan_batch = plan
