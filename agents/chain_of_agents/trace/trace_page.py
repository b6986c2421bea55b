"""A chain's trace as a page: one file that loads nothing and runs nothing.

Whatever stands in a trace, a model or a document may have written it. The template escapes all of
it, and `legible` keeps away what would break the page's encoding or turn the text around it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, TypeAlias

from chain_of_agents.trace.steps import Step
from ctxreuse.context.blocks import BlockId
from ctxreuse.errors import MissingExtraError

if TYPE_CHECKING:
    from jinja2 import Template

_TypedId: TypeAlias = tuple[type, BlockId]

_LONGEST_TEXT = 20_000
_LONGEST_NAME = 80
_NARROWEST_BAR = 0.5  # percent of the timeline
_FEWEST_TICKS = 3

# Controls, lone surrogates, what is no character, and the two overrides of writing direction
_ILLEGIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\u202d\u202e]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A document as a call names it.

    Attributes:
        id: Its id.
        labels: The labels in the call's prompt that stand for the id: more than one where there
            are several texts under it.
    """

    id: BlockId
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A step as the page shows it.

    Attributes:
        number: Its place among the steps, from 1.
        step: The step.
        read: The documents that stood in its prompt, without those only pointed to.
        shown_before: Those only pointed to.
        others: What its other labels stand for.
        notes: Numbers of the calls whose notes there were for it.
        cached: The share of its prompt that came from the prefix cache, from 0 to 1; None where it
            is unknown.
    """

    number: int
    step: Step
    read: tuple[Labelled, ...]
    shown_before: tuple[Labelled, ...]
    others: tuple[Labelled, ...]
    notes: tuple[int, ...]
    cached: float | None

    @property
    def has_failed(self) -> bool:
        """Whether it was not answered as it should be."""
        return self.step.outcome != "answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A call in the timeline.

    Attributes:
        call: The call.
        left: Where it begins, in percent of the chain's time.
        width: How long it takes, in percent.
        row: Its row in the agent's lane, from 0: calls at the same time stand below each other.
    """

    call: Call
    left: float
    width: float
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """An agent's calls in the timeline.

    Attributes:
        name: The agent's name.
        bars: Its calls.
        rows: How many rows they need.
    """

    name: str
    bars: tuple[Bar, ...]
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on the timeline's axis.

    Attributes:
        label: The time, from the chain's beginning.
        left: Where it stands, in percent.
    """

    label: str
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Tokens of all calls, as far as the models told.

    Attributes:
        tokens: Their sum; None where no call tells.
        untold: How many calls do not tell.
    """

    tokens: int | None
    untold: int


def render(question: str, mode: str, steps: Sequence[Step], duration_s: float) -> str:
    """Return the page of a chain's trace.

    Args:
        question: The question.
        mode: "sequential" or "parallel".
        steps: The calls; texts past 20,000 characters are cut, and the page says so.
        duration_s: Seconds from the beginning to the end of the last call.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    calls = _calls(mode, steps)
    return _template().render(
        question=question,
        mode=mode,
        duration_s=duration_s,
        calls=calls,
        workers=[call for call in calls if call.step.role == "worker"],
        managers=[call for call in calls if call.step.role == "manager"],
        failures=[call for call in calls if call.has_failed],
        prompt=_total([step.prompt_tokens for step in steps]),
        cached=_total([step.cached_tokens for step in steps]),
        cached_share=_share_of_all(steps),
        lanes=_lanes(calls, duration_s),
        ticks=_ticks(duration_s),
    )


def legible(text: str) -> str:
    """Return a text with what cannot be shown replaced, so that it can be written as UTF-8.

    Control characters, lone surrogates, and overrides that would turn the text around become the
    replacement character. Line breaks and tabs stay.
    """
    return _ILLEGIBLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


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


@cache
def _template() -> Template:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("Trace.to_html", "agents") from error
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )
    environment.filters |= {
        "seconds": seconds,
        "tokens": tokens,
        "percent": percent,
        "short": short,
    }
    environment.globals["LONGEST_TEXT"] = _LONGEST_TEXT
    source = resources.files("chain_of_agents.trace").joinpath("page.html.jinja")
    return environment.from_string(source.read_text(encoding="utf-8"))


def _finalized(value: object) -> object:
    """Return what the template puts out; text that a macro has made is legible already."""
    return legible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _calls(mode: str, steps: Sequence[Step]) -> list[Call]:
    calls = []
    notes: tuple[int, ...] = ()
    is_sequential = mode == "sequential"
    for number, step in enumerate(steps, start=1):
        given = notes if is_sequential or step.role == "manager" else ()
        calls.append(_call(number, step, given))
        if step.outcome == "answered":
            notes = (number,) if is_sequential else (*notes, number)
    return calls


def _call(number: int, step: Step, notes: tuple[int, ...]) -> Call:
    labels: dict[_TypedId, list[str]] = {}
    for label, one in step.labels.items():
        labels.setdefault(_typed(one), []).append(label)

    def labelled(ids: Iterable[BlockId]) -> tuple[Labelled, ...]:
        return tuple(Labelled(id=one, labels=tuple(labels.get(_typed(one), ()))) for one in ids)

    known = {_typed(one) for one in (*step.documents, *step.shown_before)}
    return Call(
        number=number,
        step=step,
        read=labelled(_read(step)),
        shown_before=labelled(step.shown_before),
        others=tuple(
            Labelled(id=one, labels=(label,))
            for label, one in step.labels.items()
            if _typed(one) not in known
        ),
        notes=notes,
        cached=_share(step.cached_tokens, step.prompt_tokens),
    )


def _read(step: Step) -> list[BlockId]:
    """Return a step's documents without those only pointed to, each as often as it stands."""
    left_out = Counter(map(_typed, step.shown_before))
    read = []
    for one in step.documents:
        if left_out[_typed(one)]:
            left_out[_typed(one)] -= 1
        else:
            read.append(one)
    return read


def _typed(one: BlockId) -> _TypedId:
    """Return an id as a key: 1 is not "1"."""
    return type(one), one


def _share(part: int | None, whole: int | None) -> float | None:
    if part is None or whole is None or whole <= 0:
        return None
    return min(1.0, max(0.0, part / whole))


def _share_of_all(steps: Sequence[Step]) -> float | None:
    """Return the share of prompts served from the cache, over the steps that tell both numbers."""
    told = [
        (step.cached_tokens, step.prompt_tokens)
        for step in steps
        if step.cached_tokens is not None and step.prompt_tokens is not None
    ]
    return _share(sum(cached for cached, _ in told), sum(prompt for _, prompt in told))


def _total(counts: Sequence[int | None]) -> Total:
    told = [count for count in counts if count is not None]
    return Total(tokens=sum(told) if told else None, untold=len(counts) - len(told))


def _lanes(calls: Sequence[Call], duration_s: float) -> list[Lane]:
    """Return a lane for each agent, in the order of their first calls."""
    lanes: dict[str, list[Call]] = {}
    for call in calls:
        lanes.setdefault(call.step.name, []).append(call)
    return [_lane(agent, own, duration_s) for agent, own in lanes.items()]


def _lane(agent: str, calls: Sequence[Call], duration_s: float) -> Lane:
    ends: list[float] = []  # of the rows, in percent
    bars = []
    for call in sorted(calls, key=lambda call: call.step.began_s):
        left = min(_percentage(call.step.began_s, duration_s), 100 - _NARROWEST_BAR)
        end = max(_percentage(call.step.ended_s, duration_s), left + _NARROWEST_BAR)
        row = next((row for row, taken in enumerate(ends) if taken <= left), len(ends))
        ends[row : row + 1] = [end]
        bars.append(Bar(call=call, left=left, width=end - left, row=row))
    return Lane(name=agent, bars=tuple(bars), rows=len(ends))


def _percentage(time_s: float, duration_s: float) -> float:
    return 100 * min(1.0, max(0.0, time_s / duration_s)) if duration_s > 0 else 0.0


def _ticks(duration_s: float) -> list[Tick]:
    """Return marks at round times: the widest spacing that gives at least three."""
    if not 0 < duration_s < math.inf:
        return []
    power = 10.0 ** math.floor(math.log10(duration_s))
    spacing = next(
        power * step for step in (2, 1, 0.5, 0.2) if duration_s / (power * step) >= _FEWEST_TICKS
    )
    scale, unit = (1, "s") if duration_s >= 1 else (1000, "ms")
    count = math.floor(duration_s / spacing + 1e-9)  # 1.4 / 0.2 is a little less than 7
    times = [mark * spacing for mark in range(count + 1)]
    return [
        Tick(label=f"{scale * time:g} {unit}", left=_percentage(time, duration_s)) for time in times
    ]
