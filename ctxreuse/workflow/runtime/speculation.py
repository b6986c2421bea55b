"""When to start a generation before its retrieval has ended, and what has come of it.

The first clusters often hold all of the final result. A generation that starts from a preview gains
the time of the rest of the search if the preview is final, and nothing else (HedraRAG, section
4.3). How often previews are final after which part of a search is learned while searches run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from ctxreuse.errors import InvalidRequestError, describe

Rule: TypeAlias = Literal["adaptive", "always", "stable", "off"]
"""When to speculate: when the expected gain is greatest; at once, from what the last search of the
session has found (RaLMSpec); once a preview has stayed the same (RAGCache); never."""

_BINS = 32
_FADING = 0.98
_LEAST_PROBABILITY = 0.3
_PRIOR_BINS = (8, 4.0)
"""Until searches have ended: previews of a quarter of a search are final, as if seen four times."""


def check_rule(rule: object) -> None:
    """Raise InvalidRequestError if there is no such rule."""
    if rule not in get_args(Rule):
        raise InvalidRequestError(
            f"speculation must be one of {', '.join(get_args(Rule))}, not {describe(rule)}"
        )


class PreviewStability:
    """Learns how often the best k of a search are final, by the part of it that has been done.

    Example:
        >>> finality = PreviewStability()
        >>> for _ in range(200):
        ...     finality.observe(changed_at=0.1)
        >>> round(finality.probability(0.2), 2), finality.launch_at() < 0.2
        (0.96, True)
    """

    def __init__(self) -> None:
        self._ended = np.zeros(_BINS + 1)
        self._ended[_PRIOR_BINS[0]] = _PRIOR_BINS[1]
        self._guessed = np.array([0.0, 1.0])
        self._learn()

    def observe(self, changed_at: float) -> None:
        """Learn from a search that has ended.

        Args:
            changed_at: The part of it, from 0 to 1, after which its best k changed last.
        """
        self._ended *= _FADING
        self._ended[min(_BINS, int(np.ceil(changed_at * _BINS)))] += 1
        self._learn()

    def probability(self, progress: float) -> float:
        """Return how likely a preview is final.

        Args:
            progress: The part of the search that has been done, from 0 to 1.
        """
        return float(self._final[min(_BINS, int(progress * _BINS))])

    def launch_at(self) -> float:
        """Return the part of a search after which launching saves the most time, on average."""
        return self._best / _BINS

    def is_worth_it(self, progress: float) -> bool:
        """Return whether to launch now: not much more is to be gained by waiting."""
        return progress >= self.launch_at() and self.probability(progress) >= _LEAST_PROBABILITY

    def observe_guess(self, is_final: bool) -> None:
        """Learn whether the nearest results of the last search were those of a new one."""
        self._guessed = _FADING * self._guessed + np.array([is_final, 1.0])

    def is_guess_worth_it(self) -> bool:
        """Return whether to launch from the last search's results, before anything is scanned."""
        probability = self._guessed[0] / self._guessed[1]
        gain = self._final[self._best] * (1.0 - self._best / _BINS)
        return bool(probability >= max(gain, _LEAST_PROBABILITY))

    def _learn(self) -> None:
        self._final = np.cumsum(self._ended) / self._ended.sum()
        part = np.arange(_BINS + 1) / _BINS
        # a preview of nothing is none
        self._best = int(np.argmax((self._final * (1.0 - part))[1:])) + 1


@dataclass(slots=True)
class SpeculationCounters:
    """What speculation has brought.

    Attributes:
        retrievals: Retrievals that a generation followed, so that one could have been launched.
        launched: Generations that were launched before their retrieval had ended.
        committed: How many of them were right.
        wasted_tokens: Tokens that the others had generated.
        wasted_prompts: How many others there were whose prompt was sent.
        generated_tokens: Tokens of all generations that were not wasted.
        searches: Searches that were begun with a part of a generation's text.
        searches_committed: How many of them were for the very text that came out.
        hints: How many others told the real search where to look first.
    """

    retrievals: int = 0
    launched: int = 0
    committed: int = 0
    wasted_tokens: int = 0
    wasted_prompts: int = 0
    generated_tokens: int = 0
    searches: int = 0
    searches_committed: int = 0
    hints: int = 0
