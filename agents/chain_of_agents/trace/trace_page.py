"""A chain's trace as a page: one file that loads nothing and runs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from chain_of_agents.trace.steps import Step
from ctxreuse.context.blocks import BlockId
from ctxreuse.measure.html_page import HtmlPage

_LONGEST_TEXT = 20_000
_LONGEST_NAME = 80
_NARROWEST_BAR = 0.5  # percent of the timeline


class _ShownCall(NamedTuple):
    number: int  # its place among the steps, from 1
    step: Step
    labels: Mapping[BlockId, Sequence[str]]  # several where several texts have an id
    read: Sequence[BlockId]  # without those that the prompt only points to
    others: Sequence[BlockId]  # what its other labels stand for
    notes: tuple[int, ...]  # numbers of the calls whose notes it was given
    cached: float | None  # the share of its prompt from the prefix cache

    @property
    def has_failed(self) -> bool:
        return self.step.outcome != "answered"


def render(question: str, mode: str, steps: Sequence[Step], duration_s: float) -> str:
    """Return the page of a chain's trace; the arguments are attributes of a `Trace`."""
    calls = _calls(mode, steps)
    pairs = ((step.cached_tokens, step.prompt_tokens) for step in steps)
    told = [(one, other) for one, other in pairs if one is not None and other is not None]
    return _PAGE.render(
        question=question,
        mode=mode,
        duration_s=duration_s,
        longest_text=_LONGEST_TEXT,
        calls=calls,
        workers=[call for call in calls if call.step.role == "worker"],
        managers=[call for call in calls if call.step.role == "manager"],
        failures=[call for call in calls if call.has_failed],
        prompt=_total([step.prompt_tokens for step in steps]),
        cached=_total([step.cached_tokens for step in steps]),
        # over the steps that tell both numbers
        cached_share=_share(sum(cached for cached, _ in told), sum(prompt for _, prompt in told)),
        lanes=_lanes(calls, duration_s),
        ticks=_ticks(duration_s),
    )


def seconds(value: float) -> str:
    """Return a time in words, such as "1.25 s" or "12 ms"."""
    if abs(value) >= 100:
        return f"{value:,.0f} s"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    milliseconds = value * 1000
    return f"{milliseconds:.0f} ms" if abs(milliseconds) >= 9.95 else f"{milliseconds:.2g} ms"


def tokens(value: int | None) -> str:
    """Return a number of tokens in words; None is unknown."""
    if value is None:
        return "unknown"
    return f"{value:,} token" if value == 1 else f"{value:,} tokens"


def percent(share: float) -> str:
    """Return a share of 1 in percent. Only all is "100%", and only nothing is "0%"."""
    if 0.995 <= share < 1:
        return ">99%"
    if 0 < share < 0.005:
        return "<1%"
    return f"{share:.0%}"


def short(value: object) -> str:
    """Return an id or label as text, with its middle left out where it is very long."""
    text = str(value)
    if len(text) <= _LONGEST_NAME:
        return text
    half = _LONGEST_NAME // 2
    return f"{text[:half]}…{text[-half:]}"


_PAGE = HtmlPage(
    "chain_of_agents.trace",
    "trace_page.html.jinja",
    feature="Trace.to_html",
    extra="agents",
    filters={"seconds": seconds, "tokens": tokens, "percent": percent, "short": short},
)


def _calls(mode: str, steps: Sequence[Step]) -> list[_ShownCall]:
    calls = []
    notes: tuple[int, ...] = ()
    is_sequential = mode == "sequential"
    for number, step in enumerate(steps, start=1):
        labels: dict[BlockId, list[str]] = {}
        for label, one in step.labels.items():
            labels.setdefault(one, []).append(label)
        known = {*step.documents, *step.shown_before}
        call = _ShownCall(
            number=number,
            step=step,
            labels=labels,
            read=list((Counter(step.documents) - Counter(step.shown_before)).elements()),
            others=[one for one in labels if one not in known],
            notes=notes if is_sequential or step.role == "manager" else (),
            cached=_share(step.cached_tokens, step.prompt_tokens),
        )
        calls.append(call)
        if step.outcome == "answered":
            notes = (number,) if is_sequential else (*notes, number)
    return calls


def _share(part: int | None, whole: int | None) -> float | None:
    if part is None or whole is None or whole <= 0:
        return None
    return min(1.0, max(0.0, part / whole))


def _total(counts: Sequence[int | None]) -> dict[str, int | None]:
    """Return the tokens of the calls that tell them, and the number of the others."""
    known = [count for count in counts if count is not None]
    return {"tokens": sum(known) if known else None, "unknown": len(counts) - len(known)}


def _lanes(calls: Sequence[_ShownCall], duration_s: float) -> list[dict[str, Any]]:
    """Return a lane for each agent, in the order of their first calls, with its calls' bars.

    Bars stand in percent of the chain's time; calls at the same time stand below each other.
    """
    shown = []
    for agent in dict.fromkeys(call.step.name for call in calls):
        own = [call for call in calls if call.step.name == agent]
        ends: list[float] = []  # of the rows, in percent
        bars = []
        for call in sorted(own, key=lambda call: call.step.began_s):
            left = min(_percentage(call.step.began_s, duration_s), 100 - _NARROWEST_BAR)
            end = max(_percentage(call.step.ended_s, duration_s), left + _NARROWEST_BAR)
            row = next((row for row, taken in enumerate(ends) if taken <= left), len(ends))
            ends[row : row + 1] = [end]
            bars.append({"call": call, "left": left, "width": end - left, "row": row})
        shown.append({"name": agent, "bars": bars, "rows": len(ends)})
    return shown


def _percentage(time_s: float, duration_s: float) -> float:
    return 100 * min(1.0, max(0.0, time_s / duration_s)) if duration_s > 0 else 0.0


def _ticks(duration_s: float) -> list[tuple[str, int]]:
    if not 0 < duration_s < inf:
        return []
    return [(seconds(duration_s * left / 100), left) for left in range(0, 101, 25)]
