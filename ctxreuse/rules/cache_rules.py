"""What a prefix cache keeps, for how long, and what writing and reading it costs.

Values are those that providers and their libraries state, as of `date`. Factors are multiples of
the price of an uncached input token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, get_args

from ctxreuse.context.checks import (
    checked_choice,
    checked_integer,
    checked_kind,
    checked_list,
    checked_number,
    checked_optional_integer,
    suggestion,
)
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS
from ctxreuse.errors import InvalidRequestError, describe

Granularity: TypeAlias = Literal["blocks", "steps", "marks"]
"""Where a cached prefix may end: each full block of an engine, each step from the shortest prefix
on, or only where an earlier prompt carried a mark."""

States: TypeAlias = Literal["everywhere", "junctions"]
"""Where what a prompt kept can be read: at each end of a block or step, or only at the prompt's own
end and where it parted from an earlier prompt, so that a common prefix is read from its third sight
on."""

KeyUse: TypeAlias = Literal["none", "optional", "needed"]
"""Whether a key that a request carries routes it to where its prefix is kept."""

FollowerHits: TypeAlias = Literal["scheduled", "first_token"]
"""From when a request with the same prefix hits: once the leader is scheduled, or once the first
token of its answer has come."""

_MOST_MARKS = 1_000
_CALL = re.compile(r"\s*([A-Za-z][\w.-]*)\s*(?:\((.*)\)\s*)?", re.DOTALL)
_ARGUMENT = re.compile(r"\s*(\w+)\s*=\s*([^,=()]+?)\s*")
_READ = "November 2026"


@dataclass(frozen=True, slots=True)
class TimeToLive:
    """One class of writing: how long what is written lives, and what it costs.

    Args:
        name: As the provider writes it: "5m", "30m", "1h"; "" where there is only one.
        seconds: How long an entry lives after its last use; None is until evicted, or not stated.
        write_factor: What a written token costs, as a multiple of an uncached one.

    Raises:
        InvalidRequestError: wrong type or out of range.
    """

    name: str = ""
    seconds: float | None = None
    write_factor: float = 1.0

    def __post_init__(self) -> None:
        checked_kind("name", self.name, str, "a string")
        if self.seconds is not None:
            checked_number("seconds", self.seconds)
        checked_number("write_factor", self.write_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRules:
    """The rules and prices of a prefix cache.

    Args:
        name: What it is called.
        granularity: Where a kept prefix may end: "blocks", "steps" or "marks".
        step_tokens: Tokens of a block or a step; 1 where a prefix may end anywhere.
        minimum: Tokens of the shortest prefix that is kept.
        states: Where of blocks or steps it can be read: "everywhere" or at "junctions".
        prime_tokens: How many tokens a prime has to save, to be worth its call; see `worth`.
        marks: How many marks a request may carry; 0 unless prefixes end at marks.
        marks_read: How many marks, the latest of the prompt, are looked at for reading; None is
            all.
        look_back: How many content parts before a mark a written prefix may end and still be read;
            0 is only exactly at a mark.
        marks_end: Whether the provider itself marks the end of a prompt, unless it is told not to.
        times_to_live: The classes of writing that exist.
        life: The name of the class to write with; None is the first.
        read_factor: What a token read costs, as a multiple of an uncached one.
        key: Whether a key routes requests: "none", "optional" or "needed".
        key_rate: Requests a minute that one prefix and key should have at most; None is no limit.
        follower_hits: When a request with the same prefix hits: "scheduled" or "first_token" of the
            leader.
        date: When the values were read.
        source: Where they stand.

    Raises:
        InvalidRequestError: wrong type or out of range; so do all methods.
    """

    name: str
    granularity: Granularity
    step_tokens: int = 1
    minimum: int = 0
    states: States = "everywhere"
    prime_tokens: int = 300
    marks: int = 0
    marks_read: int | None = None
    look_back: int = 0
    marks_end: bool = False
    times_to_live: tuple[TimeToLive, ...] = (TimeToLive(),)
    life: str | None = None
    read_factor: float = 0.0
    key: KeyUse = "none"
    key_rate: int | None = None
    follower_hits: FollowerHits = "first_token"
    date: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "date", "source"):
            checked_kind(name, getattr(self, name), str, "a string")
        checked_choice("granularity", self.granularity, get_args(Granularity))
        checked_choice("states", self.states, get_args(States))
        checked_choice("key", self.key, get_args(KeyUse))
        checked_choice("follower_hits", self.follower_hits, get_args(FollowerHits))
        checked_integer("step_tokens", self.step_tokens, 1)
        for name in ("minimum", "prime_tokens", "look_back", "marks"):
            checked_integer(name, getattr(self, name))
        for name in ("marks_read", "key_rate"):
            checked_optional_integer(name, getattr(self, name), 1)
        checked_number("read_factor", self.read_factor)
        checked_kind("marks_end", self.marks_end, bool, "True or False")
        if (self.granularity == "marks") != (self.marks > 0) or self.marks > _MOST_MARKS:
            raise InvalidRequestError(
                f"marks is {describe(self.marks)} with granularity={self.granularity!r}; give 1 to "
                f'{_MOST_MARKS:,} with granularity="marks", and none otherwise'
            )
        if not isinstance(self.times_to_live, tuple) or not self.times_to_live:
            raise InvalidRequestError(
                f"times_to_live must be a tuple of TimeToLive, not {describe(self.times_to_live)}"
            )
        for one in self.times_to_live:
            checked_kind("each of times_to_live", one, TimeToLive, "a TimeToLive")
        if self.life is not None:
            checked_choice("life", self.life, [one.name for one in self.times_to_live])

    @property
    def has_marks(self) -> bool:
        """Whether a prefix is kept only up to the marks that a prompt carries."""
        return self.granularity == "marks"

    @property
    def is_hosted(self) -> bool:
        """Whether a provider keeps it and charges for it; else it is an engine's own."""
        return self.granularity != "blocks"

    @property
    def is_routed(self) -> bool:
        """Whether a key routes a request to where its prefix is kept."""
        return self.key != "none"

    @property
    def lives(self) -> tuple[TimeToLive, ...]:
        """The classes of writing that a provider charges for; none where an engine keeps it."""
        return self.times_to_live if self.is_hosted else ()

    @property
    def counts_writes(self) -> bool:
        """Whether a bill tells what is written from what is merely computed."""
        return self.has_marks or self.write_factor != 1

    @property
    def time_to_live(self) -> TimeToLive:
        """The class that is written with."""
        if self.life is None:
            return self.times_to_live[0]
        return next(one for one in self.times_to_live if one.name == self.life)

    @property
    def lifetime(self) -> float | None:
        """Seconds that an entry lives after its last use; None if nothing is known."""
        return self.time_to_live.seconds

    @property
    def write_factor(self) -> float:
        """What a written token costs, as a multiple of an uncached one."""
        return self.time_to_live.write_factor

    @property
    def saving(self) -> float:
        """What a token saves that is read, as a multiple of an uncached one."""
        return 1 - self.read_factor

    def worth(self, tokens: int, uses: int, *, primed: bool = False) -> float:
        """Return what a common prefix saves that so many prompts use, in uncached tokens.

        The first of them pays for writing it, and each other one reads it; but the second only
        leaves a state there, where states are kept at junctions. A prime, a call that ends there,
        leaves it before: the first prompt reads what it has computed.
        """
        readers = checked_integer("uses", uses) - 1 - (self.takes_primes and not primed)
        saved = checked_integer("tokens", tokens) * (self.saving * readers - self.write_factor + 1)
        return saved - self.prime_tokens * primed

    @property
    def takes_primes(self) -> bool:
        """Whether a call that ends at a fork makes it readable for the next ones."""
        return self.states == "junctions" and not self.has_marks

    @property
    def serves_all(self) -> bool:
        """Whether each prefix of a prompt that was sent can be read, in whole steps."""
        return not self.has_marks and self.states == "everywhere"

    def points(self, marks: Sequence[int], met: int, parts: int) -> Sequence[int]:
        """Return after how many parts a prompt can be read once it was sent, ascending.

        Args:
            marks: After how many parts a mark stands, or a prime ended.
            met: How many of its first parts an earlier prompt began with.
            parts: How many parts it has.
        """
        parts, met = checked_integer("parts", parts), checked_integer("met", met)
        marks = checked_list("marks", marks, "a list of numbers")
        if self.has_marks:
            return marks
        if self.states == "junctions":
            return sorted({*marks, met, parts} - {0})
        return range(1, parts + 1)

    @property
    def least_tokens(self) -> int:
        """The shortest common prefix that saves anything, in tokens, system text included."""
        steps = -(-max(self.minimum, 1) // self.step_tokens)  # rounded up, however many digits
        return steps * self.step_tokens

    def served(self, front: int, tokens: int) -> int:
        """Return how many tokens of a common beginning behind others can be read."""
        front = checked_integer("front", front)
        return max(0, self.readable(front + checked_integer("tokens", tokens)) - front)

    @property
    def has_minimum(self) -> bool:
        """Whether what is kept is longer than a usual block, so that what is in front counts."""
        return self.least_tokens > ENGINE_BLOCK_TOKENS

    def readable(self, tokens: int) -> int:
        """Return how many tokens can be read of a prefix of so many, the system text included."""
        checked_integer("tokens", tokens)
        return 0 if tokens < self.least_tokens else tokens - tokens % self.step_tokens


# for models whose layers all have full attention. Since vLLM 0.29, those with sliding windows have
# states="junctions" (unless it is started with `--prefix-cache-retention-interval 64`), and so have
# recurrent or linear layers, with blocks of 528 to 3,584 tokens
DEFAULT_CACHE: Final = CacheRules(
    name="vllm",
    granularity="blocks",
    step_tokens=ENGINE_BLOCK_TOKENS,
    minimum=ENGINE_BLOCK_TOKENS,
    follower_hits="scheduled",
    date=_READ,
    source="vLLM 0.32, v1/core",
)
"""The rules where nobody names a cache."""

_SGLANG = replace(
    DEFAULT_CACHE,
    name="sglang",
    step_tokens=1,  # its radix tree holds single tokens
    minimum=1,
    source="SGLang's documentation of RadixAttention",
)
# from GPT-5.6 on, with explicit breakpoints
_OPENAI = CacheRules(
    name="openai",
    granularity="marks",
    minimum=1024,
    marks=4,
    marks_read=80,
    marks_end=True,
    times_to_live=(TimeToLive("30m", 1_800, 1.25),),
    life="30m",
    read_factor=0.1,
    key="needed",
    key_rate=15,
    date=_READ,
    source="types of openai 2.54 (prompt_cache_breakpoint, prompt_cache_options) and OpenAI's "
    "guide to prompt caching; not tried against the live API",
)
_OPENAI_BEFORE = CacheRules(
    name="openai-before-5.6",
    granularity="steps",
    step_tokens=128,
    minimum=1024,
    times_to_live=(TimeToLive("", 300, 1.0),),
    read_factor=0.5,  # 0.1 to 0.5, by model
    key="optional",
    key_rate=15,
    date=_READ,
    source="OpenAI's guide to prompt caching: entries live 5 to 10 minutes, at most 24 hours",
)
_ANTHROPIC = CacheRules(
    name="anthropic",
    granularity="marks",
    minimum=1024,  # 512, 1,024, 2,048 or 4,096, by model
    marks=4,
    look_back=20,
    times_to_live=(TimeToLive("5m", 300, 1.25), TimeToLive("1h", 3_600, 2.0)),
    life="5m",
    read_factor=0.1,
    date=_READ,
    source="types of anthropic 2.11 (cache_control) and Anthropic's documentation of prompt "
    "caching; not tried against the live API",
)
_BEDROCK = replace(
    _ANTHROPIC,
    name="bedrock",
    source="Amazon Bedrock's user guide on prompt caching (cachePoint); not tried against the "
    "live API",
)
_GEMINI = CacheRules(
    name="gemini",
    granularity="steps",
    minimum=4096,  # of Gemini 3; 2,048 before
    times_to_live=(TimeToLive("", 300, 1.0),),
    read_factor=0.1,
    date=_READ,
    source="Gemini's documentation of context caching; the lifetime is not stated (minutes)",
)
_DEEPSEEK = CacheRules(
    name="deepseek",
    granularity="steps",
    step_tokens=64,
    minimum=64,
    states="junctions",
    read_factor=0.1,  # 0.02 to 0.2, by model
    date=_READ,
    source="DeepSeek's guide to context caching; shortest prefix and lifetime are not stated, "
    "64 tokens are its storage unit",
)

_ENGINES, _PROVIDERS = (DEFAULT_CACHE, _SGLANG), (_OPENAI, _OPENAI_BEFORE, _ANTHROPIC, _BEDROCK)
READY_PROFILES: Final[Mapping[str, CacheRules]] = MappingProxyType(
    {one.name: one for one in (*_ENGINES, *_PROVIDERS, _GEMINI, _DEEPSEEK)}
)
"""The ready profiles by name."""

_ARGUMENTS: Final[Mapping[Granularity, Sequence[str]]] = {
    "blocks": ("block_tokens", "states", "prime_tokens"),
    "steps": ("minimum", "read_factor"),
    "marks": ("minimum", "life"),
}
"""What a text may set of a ready profile, by where its prefixes end."""


def cache_profile(given: str | CacheRules) -> CacheRules:
    """Return a profile by its name, with arguments or none.

    Args:
        given: "openai", "anthropic(minimum=4096, life=1h)", "vllm(block_tokens=1536)"; a
            CacheRules is returned as it is.

    Raises:
        InvalidRequestError: wrong type, no such profile or no such argument.

    Example:
        >>> cache_profile("anthropic(life=1h)").write_factor
        2.0
    """
    if isinstance(given, CacheRules):
        return given
    names = ", ".join(map(repr, READY_PROFILES))
    checked_kind("cache", given, str, f"CacheRules or one of {names}")
    call = _CALL.fullmatch(given)
    profile = READY_PROFILES.get(call[1].lower()) if call else None
    if call is None or profile is None:
        hint = suggestion(call[1].lower() if call else "", READY_PROFILES)
        raise InvalidRequestError(
            f"there is no cache profile {describe(given)}{hint}; choose one of {names}, with "
            "arguments as in 'anthropic(minimum=4096, life=1h)'"
        )
    return _with(profile, _arguments(profile, call[2] or ""))


def profile_spec(profile: CacheRules) -> str:
    """Return what `cache_profile` reads as a profile; of the user's own its name."""
    ready = READY_PROFILES.get(profile.name)
    if ready is None:
        return profile.name
    known = {name: _setting(profile, name) for name in _ARGUMENTS[ready.granularity]}
    given = {name: one for name, one in known.items() if one != _setting(ready, name)}
    if replace(_with(ready, given), life=profile.life) != profile:
        return profile.name
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{profile.name}({arguments})" if arguments else profile.name


def planner_setting(profile: CacheRules) -> tuple[str, ...]:
    """Return how code gives a planner these rules; nothing for those that it has without."""
    return () if profile == DEFAULT_CACHE else (f'cache="{profile_spec(profile)}"',)


def _setting(profile: CacheRules, name: str) -> Any:
    if name == "life":
        return profile.time_to_live.name
    return profile.step_tokens if name == "block_tokens" else getattr(profile, name)


def _with(profile: CacheRules, given: Mapping[str, Any]) -> CacheRules:
    fields = dict(given)
    if "block_tokens" in fields:  # a block is the shortest prefix, too
        size = checked_integer("block_tokens", fields.pop("block_tokens"), 1)
        fields |= {"step_tokens": size, "minimum": size}
    return replace(profile, **fields)


def _arguments(profile: CacheRules, given: str) -> dict[str, Any]:
    known = _ARGUMENTS[profile.granularity]
    arguments: dict[str, Any] = {}
    for text in given.split(",") if given.strip() else ():
        pair = _ARGUMENT.fullmatch(text)
        if pair is None or pair[1] not in known or pair[1] in arguments:
            raise InvalidRequestError(
                f"the cache profile {profile.name!r} cannot take {describe(text.strip())}; write "
                f"argument=value, each once; its arguments: {', '.join(known)}"
            )
        name, value = pair.groups()
        kind = type(_setting(profile, name))
        said = value.strip("'\"") if kind is str else value.replace("_", "")
        try:
            arguments[name] = kind(said)
        except ValueError:
            arguments[name] = value  # the profile's own check names it
    return arguments
