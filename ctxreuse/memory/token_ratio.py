"""How long texts are in an engine's tokens, learnt from what it reports of its prompts.

Question and instructions are about as long whatever the blocks. So the ratio is the slope of the
line that fits reported to estimated lengths best (least squares); older prompts count less. Where
these are hardly alike, as of chunks that a splitter made equally long, the slope says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_FORGETTING = 0.99
_LEAST_WEIGHT = 14.0  # of some 16 prompts
_SPREAD = 0.05
_LEAST_FIT = 0.8  # of the squared correlation: so much too small the slope is at most
_STEP = 1 / 8
_LEAST, _MOST = 1 / 4, 4.0
_SUMS = ("_number", "_estimated", "_reported", "_variance", "_covariance", "_variance_reported")


class TokenRatio:
    """How many tokens an engine counts where one is estimated: about 2 for tables, 1 for prose."""

    def __init__(self) -> None:
        self.value = 1.0
        self._number = self._estimated = self._reported = 0.0  # the last two are means
        # times the number
        self._variance = self._covariance = self._variance_reported = 0.0

    @classmethod
    def restored(cls, learnt: Sequence[float]) -> TokenRatio:
        """Return one that goes on from what `learnt` has returned."""
        ratio = cls()
        ratio.value, *rest = learnt
        if len(rest) != len(_SUMS) or not all(map(math.isfinite, learnt)):
            raise ValueError("no ratio")
        if not _LEAST <= ratio.value <= _MOST or min(rest[0], rest[3], rest[5]) < 0:
            raise ValueError("out of range")
        for name, number in zip(_SUMS, rest, strict=True):
            setattr(ratio, name, number)
        return ratio

    @property
    def learnt(self) -> tuple[float, ...]:
        """What another one goes on from."""
        return (self.value, *[getattr(self, name) for name in _SUMS])

    def note(self, estimated: int, reported: int) -> None:
        """Learn of a prompt."""
        self._number = 1 + _FORGETTING * self._number
        more, longer = estimated - self._estimated, reported - self._reported  # than on average
        self._estimated += more / self._number
        self._reported += longer / self._number
        new = 1 - 1 / self._number
        self._variance = _FORGETTING * self._variance + new * more * more
        self._covariance = _FORGETTING * self._covariance + new * more * longer
        self._variance_reported = _FORGETTING * self._variance_reported + new * longer * longer
        least = self._number * (_SPREAD * self._estimated) ** 2
        fit = _LEAST_FIT * self._variance * self._variance_reported
        if self._number < _LEAST_WEIGHT or self._variance <= least or self._covariance**2 < fit:
            return
        slope = min(max(self._covariance / self._variance, _LEAST), _MOST)
        # in steps, since known blocks keep the weight that they were sent with
        if abs(slope - self.value) >= _STEP:
            self.value = round(slope / _STEP) * _STEP
