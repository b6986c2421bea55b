"""When to launch a generation before its retrieval has ended: decisions only.

The first clusters often hold all of the final result. A generation that starts from a preview gains
the time of the rest of the search if the preview is final, and nothing else (HedraRAG, section
4.3). How often previews are final after which part of a search is learned while searches run.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.workflow.vector_search.handle import PreviewSchedule, SearchHandle, SearchProgress
from ctxreuse.workflow.vector_search.top_k import TopK

Rule: TypeAlias = Literal["adaptive", "always", "stable", "off"]
"""When to speculate: when the expected gain is greatest; at once, from what the last search of the
session has found (RaLMSpec); once a preview has stayed the same (RAGCache); never."""

_BINS = 32
_FADING = 0.98
_LEAST_PROBABILITY = 0.3
_PRIOR_BINS = (8, 4.0)
"""Until searches have ended: previews of a quarter of a search are final, as if seen four times."""

_STABLE_SHARE = 0.125
"""The rule "stable" launches once a preview has stayed the same for this part of a search."""

_LOOK_AGAIN = 0.125
"""After which part of a search to look again when it was too early."""

_MOST_LAUNCHES = 2
"""Launches of a generation from one retrieval: each wrong one has its prompt computed in vain."""


def check_rule(rule: object) -> None:
    """Raise InvalidRequestError if there is no such rule."""
    if rule not in get_args(Rule):
        raise InvalidRequestError(
            f"speculation must be one of {', '.join(get_args(Rule))}, not {describe(rule)}"
        )


class PreviewStability:
    """Learns how often the best k of a search are final, by the part of it that has been done.

    Example:
        >>> stability = PreviewStability()
        >>> for _ in range(200):
        ...     stability.observe(changed_at=0.1)
        >>> round(stability.probability(0.2), 2), stability.launch_at() < 0.2
        (0.96, True)
    """

    def __init__(self) -> None:
        self._ended = np.zeros(_BINS + 1)
        self._ended[_PRIOR_BINS[0]] = _PRIOR_BINS[1]
        self._recalled = np.array([0.0, 1.0])
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
        """Return the probability that a preview is final.

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

    def observe_recalled(self, is_final: bool) -> None:
        """Learn whether the nearest results of the last search were those of a new one."""
        self._recalled = _FADING * self._recalled + np.array([is_final, 1.0])

    def is_recalled_worth_it(self) -> bool:
        """Return whether to launch from the last search's results, before anything is scanned."""
        probability = self._recalled[0] / self._recalled[1]
        gain = self._final[self._best] * (1.0 - self._best / _BINS)
        return bool(probability >= max(gain, _LEAST_PROBABILITY))

    def _learn(self) -> None:
        self._final = np.cumsum(self._ended) / self._ended.sum()
        part = np.arange(_BINS + 1) / _BINS
        # before the first part there is nothing to preview
        self._best = int(np.argmax((self._final * (1.0 - part))[1:])) + 1


class Decision(NamedTuple):
    """What a run is to do about the generation behind a search.

    Attributes:
        drops: Whether to stop the speculative generation under way.
        launch: The ids of the documents to launch one from; None launches none.
        previews: When to look at the search again; None leaves it as it is.
    """

    drops: bool = False
    launch: tuple[int, ...] | None = None
    previews: PreviewSchedule | None = None


class LaunchPolicy:
    """Decides for one search when the generation behind it is launched, and learns from its end.

    Args:
        rule: When to speculate.
        stability: What is known of such searches.

    Attributes:
        launches: How many generations the run has launched.
    """

    def __init__(self, rule: Rule, stability: PreviewStability) -> None:
        self.launches = 0
        self._rule = rule
        self._stability = stability

    def previews(self) -> PreviewSchedule:
        """Return when to look at the search first."""
        if self._rule == "stable":
            return PreviewSchedule(_STABLE_SHARE, every=_STABLE_SHARE)
        return PreviewSchedule(self._stability.launch_at())

    def decide(
        self, search: SearchHandle, progress: SearchProgress, running: tuple[int, ...] | None
    ) -> Decision:
        """Return what to do now.

        Args:
            search: The search.
            progress: How far it is.
            running: The ids that the speculative generation under way rests on; None if none is.
        """
        found = None if progress.best is None else progress.best.ids[: search.k]
        if self._rule == "always" or found is None or not len(found):
            found = search.recalled
        ids = None if found is None else tuple(found.tolist())
        drops = running is not None
        if drops and (ids is None or ids == running or self._rule == "always"):
            return Decision()
        if ids is None or self.launches == _MOST_LAUNCHES:
            return Decision(drops)
        if self._is_time(progress):
            return Decision(drops, launch=ids)
        previews = search.previews or PreviewSchedule()
        again = progress.share + (previews.every or _LOOK_AGAIN)
        return Decision(drops, previews=previews._replace(first=max(previews.first, again)))

    def learn(self, search: SearchHandle, best: TopK) -> None:
        """Learn from a search that has ended."""
        if search.recalled is not None:
            is_final = np.array_equal(search.recalled, best.ids[: search.k])
            self._stability.observe_recalled(is_final)
        clusters = search.clusters
        held = np.flatnonzero(np.isin(clusters, best.found_in[: search.k]))
        self._stability.observe((held[-1] + 1) / len(clusters) if len(held) else 0.0)

    def _is_time(self, progress: SearchProgress) -> bool:
        if self._rule == "always":
            return True
        if self._rule == "stable":
            return progress.unchanged >= _STABLE_SHARE
        if progress.best is None:
            return self._stability.is_recalled_worth_it()
        return self._stability.is_worth_it(progress.share)
