"""What a cache's rules answer, so that nobody else needs to know which cache it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

_SILENT = (
    "an engine has reported no cached token in %d answers, where a planner expected %d: either its "
    "prefix cache is off, or it does not report what the cache serves%s. Start vLLM with "
    "--enable-prefix-caching and --enable-prompt-tokens-details; `ctxreuse doctor --base-url URL` "
    "tells which it is"
)
_MAY_KEEP_STATES = (
    ", or its model keeps states (sliding windows, recurrent layers), so that a beginning is read "
    'from its third sight on: ReusePlanner(cache="vllm(states=junctions)")'
)
_SILENT_PROVIDER = (
    "no cached token was reported in %d answers, where a planner expected %d by the rules of %r: "
    "the prompts may be sent without marks (send `plan.body()` or `plan.messages(parts=True)`), "
    "the model may have another shortest prefix or lifetime (give ReusePlanner its own cache=...), "
    "or what is reported is not passed to `report_usage`"
)
_NO_MARK = (
    "%s of these tokens have no mark behind them in both prompts: the cache (%s) keeps and reads "
    "only what is marked"
)
_NO_STATE = (
    "%s of these tokens end where no two earlier prompts part and no prime ends: the cache (%s) "
    "keeps states, so it reads a common beginning from its third sight on"
)


def places(
    profile: CacheRules, marks: Sequence[int], parts: int, met: int
) -> tuple[Sequence[range], Sequence[int]]:
    """Return after how many parts a prompt is looked up and kept."""
    if not profile.has_marks:
        return [range(parts, 0, -1)], profile.points((), met, parts)
    latest = marks[-(profile.marks_read or len(marks)) :]
    # the mark's own place is the first of those that are looked at
    seen = max(1, profile.look_back)
    read = [range(mark, max(0, mark - seen), -1) for mark in latest]
    return read, marks[-profile.marks :]


def kept_lengths(
    profile: CacheRules, marks: tuple[int, ...], tokens: Sequence[int], least: int
) -> tuple[int, ...]:
    """Return after how many blocks a prompt can be read, from so many tokens on."""
    if profile.has_marks:
        return marks
    return tuple(n for n, end in enumerate(accumulate(tokens), start=1) if end >= least)


def read_end(
    profile: CacheRules,
    kept: Sequence[int] | None,
    marks: Sequence[int] | None,
    common: int,
    parted: Sequence[int] = (),
) -> int:
    """Return how many common first blocks the second prompt reads; no marks are unknown ones.

    `kept` are the first one's marks, or ends of primes; `parted` is where earlier prompts parted.
    """
    if profile.serves_all:
        return common
    if not profile.has_marks:
        return max((end for end in (*(kept or ()), *parted) if end <= common), default=0)
    ends = [common] if kept is None else [end for end in kept if end <= common]
    if marks is not None:
        ends = [end for end in ends if any(0 <= mark - end <= profile.look_back for mark in marks)]
    return max(ends, default=0)


def why_unread(profile: CacheRules, tokens: int) -> str:
    """Return why tokens that were sent before, and live, cannot be read."""
    return (_NO_MARK if profile.has_marks else _NO_STATE) % (f"{tokens:,}", profile.name)


def recorded_marks(profile: CacheRules, marks: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return marks as a plan's record has them; None where a request carries none."""
    return marks if profile.has_marks else None


def read_of_blocks(profile: CacheRules, tokens: int) -> int:
    """Return what is read of whole blocks; by default they are not cut to the engine's."""
    return tokens if profile == DEFAULT_CACHE else profile.readable(tokens)


def id_fields(profile: CacheRules, request_id: str) -> dict[str, str]:
    """Return the fields by which an engine learns a request's id; vLLM reads a header."""
    return {"rid": request_id} if profile.name == "sglang" else {}


def streams_token_ids(profile: CacheRules) -> bool:
    """Return whether an engine tells a prompt's tokens in streams, and for chats by themselves."""
    # SGLang tells them in whole answers only; its `/v1/tokenize` takes plain text
    return profile.name != "sglang"


def when_silent(profile: CacheRules, answers: int, expected: int) -> str:
    """Return what may be wrong where answers report nothing of the tokens expected."""
    if profile.is_hosted:
        return _SILENT_PROVIDER % (answers, expected, profile.name)
    return _SILENT % (answers, expected, may_keep_states(profile))


def may_keep_states(profile: CacheRules) -> str:
    """Return what to think of, too, where an engine serves less than expected."""
    return _MAY_KEEP_STATES if profile.serves_all and not profile.is_hosted else ""


def takes_salt(profile: CacheRules) -> bool:
    """Return whether an engine takes vLLM's `cache_salt`, by which tenants share no prefix."""
    return not profile.is_hosted
