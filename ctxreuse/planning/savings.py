"""What planning saves, and what it costs: the numbers of `planner.savings`, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, TypeAlias

from ctxreuse.context.lru_map import PartSize
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import CacheRules, profile_spec

Mode: TypeAlias = Literal["active", "shadow"]
"""Whether plans are carried out, or only counted."""

PLANNING_BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
"""Upper bounds, in seconds, of the buckets for planning times; one more bucket has none."""


@dataclass(frozen=True, slots=True)
class PlanningTime:
    """How long planning took; a request of a batch counts with its share of the batch's time.

    Attributes:
        count: Requests that were planned.
        total_s: Seconds together.
        max_s: The longest, in seconds.
        buckets: Requests in each bucket of `PLANNING_BOUNDS_S`, and above all of them.
    """

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    buckets: tuple[int, ...] = (0,) * (len(PLANNING_BOUNDS_S) + 1)


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """What engines reported of answered prompts.

    Attributes:
        answers: Answers whose usage told the cached tokens. What an engine leaves out counts as 0
            once it has reported any.
        unreported: Other answers that were reported; they count nowhere else.
        prompt_tokens: Tokens of the prompts, as the engine counts them.
        cached_tokens: Of these, served from the engine's prefix cache.
        expected_cached_tokens: Block tokens that the planner expected in the cache.
        confirmed_cached_tokens: Of these, cached as far as the answers say.
        primes: Calls that were sent besides, to make forks readable; they count nowhere else.
        prime_tokens: What these computed.
        written: Of the prompt tokens, those written into the cache, by time to live.

    Example:
        >>> ReportedUsage(answers=2, prompt_tokens=400, cached_tokens=100).hit_ratio
        0.25
    """

    answers: int = 0
    unreported: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    expected_cached_tokens: int = 0
    confirmed_cached_tokens: int = 0
    primes: int = 0
    prime_tokens: int = 0
    written: Mapping[str, int] = field(default_factory=dict)

    @property
    def written_tokens(self) -> int:
        """Tokens written into the cache, of all times to live."""
        return sum(self.written.values())

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that came from the cache; 0 before the first answer."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def confirmed_share(self) -> float:
        """Share of the expected tokens that answers confirm; 1 where nothing was expected."""
        expected = self.expected_cached_tokens
        return self.confirmed_cached_tokens / expected if expected else 1.0


@dataclass(frozen=True, slots=True)
class ExpectedBill:
    """What prompts come to on a hosted cache, as they were retrieved and as planned.

    Blocks of first turns count, words that planning adds and, where a cache has marks, system
    texts; both ways have the planner's marks.

    Attributes:
        as_retrieved: Tokens in the retriever's order, by what is paid for them.
        if_planned: The same, as planned.
        cache: The cache, which says what each of these tokens costs.
    """

    as_retrieved: BilledTokens
    if_planned: BilledTokens
    cache: CacheRules

    @property
    def factor_as_retrieved(self) -> float:
        """The bill as a multiple of the same prompts uncached; 1 before the first."""
        return self._factor(self.as_retrieved)

    @property
    def factor_if_planned(self) -> float:
        """The same, as planned."""
        return self._factor(self.if_planned)

    def _factor(self, tokens: BilledTokens) -> float:
        uncached = self.as_retrieved.prompt_tokens
        return tokens.bill(self.cache) / uncached if uncached else 1.0

    def as_json(self) -> dict[str, Any]:
        """Return all numbers as JSON-compatible values."""
        return {
            "cache": profile_spec(self.cache),
            "as_retrieved": asdict(self.as_retrieved),
            "if_planned": asdict(self.if_planned),
            "factor_as_retrieved": self.factor_as_retrieved,
            "factor_if_planned": self.factor_if_planned,
        }


@dataclass(frozen=True, slots=True)
class Savings:
    """What planning has saved so far or, in shadow mode, would have; tokens are block tokens.

    Three ways to send the same requests are compared: as they were sent, as planned, and as
    retrieved. Tokens of words that planning adds are taken off. Hits between tenants count in none,
    as if each had an engine to itself. `print(savings)` says it in words.

    Attributes:
        requests: Requests that were planned.
        changed: Those that planning sends in another order, or without some blocks.
        block_tokens: Tokens of their blocks, those that are left out included.
        cached_as_sent: Of these, expected to be served from the cache as they were sent.
        cached_if_planned: The same, as planned.
        left_out: Tokens of the blocks that planning leaves out.
        cached_as_retrieved: The same as `cached_as_sent`, in the retriever's order; equal until
            something is sent otherwise. Exact in shadow mode; else an estimate, from a sample.
        error_tokens: Two standard errors of that estimate; 0 where all requests were followed.
            Where a cache has marks or states at junctions, nothing is, and all tokens are unknown.
        references: How many blocks planning leaves out.
        word_tokens: About how many tokens of words planning adds that the engine has to compute;
            0 until something is sent otherwise.
        mode: The planner's.
        planning: How long planning took.
        reported: What engines reported of the answers.
        planning_failures: How often an internal error let a prompt through as retrieved.
        prompts_without_context: Prompts in which a wrapper around a model found no context.
        unseen: Contexts that were, or would be, ordered where nobody sees the prompt; they count
            nowhere else.
        by_class: The same for each class of tenants, without times, failures and prompts without a
            context; empty without `tenant_class`.
        parts: How much is remembered for these numbers, and may be.
        bill: What prompts come to on a hosted cache, in shadow mode; else None.

    Example:
        >>> Savings(requests=2, changed=1, block_tokens=400, cached_if_planned=100).saved_share
        0.25
    """

    requests: int = 0
    changed: int = 0
    block_tokens: int = 0
    cached_as_sent: int = 0
    cached_if_planned: int = 0
    left_out: int = 0
    cached_as_retrieved: int = 0
    error_tokens: int = 0
    references: int = 0
    word_tokens: int = 0
    mode: Mode = "shadow"
    planning: PlanningTime = PlanningTime()
    reported: ReportedUsage = ReportedUsage()
    planning_failures: int = 0
    prompts_without_context: int = 0
    unseen: int = 0
    by_class: Mapping[str, Savings] = field(default_factory=dict)
    parts: Mapping[str, PartSize] = field(default_factory=dict, repr=False, compare=False)
    bill: ExpectedBill | None = None

    @property
    def prefilled_if_planned(self) -> int:
        """Block tokens that it has to compute as planned."""
        return self.block_tokens - self.left_out - self.cached_if_planned

    @property
    def prefilled_as_retrieved(self) -> int:
        """Block tokens that it would have to compute in the retriever's order."""
        return self.block_tokens - self.cached_as_retrieved

    @property
    def saved_tokens(self) -> int:
        """Block tokens not to compute because of planning, less words and primes; below 0: cost."""
        cost = self.word_tokens + self.reported.prime_tokens
        return self.prefilled_as_retrieved - self.prefilled_if_planned - cost

    @property
    def saved_share(self) -> float:
        """Share of the computed block tokens that planning saves, so counted; below 0: cost."""
        return self._share(self.saved_tokens)

    @property
    def error_share(self) -> float:
        """Two standard errors of `saved_share`."""
        return self._share(self.error_tokens)

    def _share(self, tokens: int) -> float:
        before = self.prefilled_as_retrieved
        return tokens / before if before else 0.0

    def __str__(self) -> str:
        """Return the numbers as at most two sentences: what was measured, and what is estimated."""
        reported, said, measured = self.reported, [self._estimate()], ""
        if reported.primes:
            primes = counted(reported.primes, "prime")
            said.append(f"{primes} computed {reported.prime_tokens:,} tokens, taken off")
        if reported.unreported:
            said.append(f"{counted(reported.unreported, 'answer')} came without usage")
        if self.planning_failures:
            said.append(f"planning failed {counted(self.planning_failures, 'time')}")
        if self.prompts_without_context:
            prompts = counted(self.prompts_without_context, "prompt")
            said.append(f"no context found in {prompts}")
        if reported.answers:
            answers = counted(reported.answers, "answer")
            share = f"{reported.hit_ratio:.1%} of their prompt tokens from its cache"
            measured = f"As reported by the engine: {answers}, {share}.\n"
        return f"{measured}{'; '.join(said)}."

    def _estimate(self) -> str:
        if self.error_share >= 1:
            return 'What is saved is unknown while active; ReusePlanner(mode="shadow") counts it'
        would = "would be " if self.mode == "shadow" else ""
        if self.requests:
            share = self.saved_share
            error = f" ± {self.error_share:.1%}" if self.error_tokens else ""
            return (
                f"{abs(share):.1%} {'more' if share < 0 else 'fewer'} context tokens to compute "
                f"(estimate for each process and tenant alone{error}, {self.word_tokens:,} tokens "
                f"of added words counted): {self.changed:,} of {counted(self.requests)} {would}"
                "sent otherwise than retrieved"
            )
        if self.unseen:
            until = "" if self.reported.answers else " until an answer's usage is reported"
            ordered = f"{counted(self.unseen, 'context')} {would}ordered"
            return f"What is saved is unknown{until}: {ordered} where nobody sees the prompt"
        return "No request has been planned"

    def as_json(self) -> dict[str, Any]:
        """Return all numbers as JSON has them, unknown ones None: no text, no name of a tenant."""
        reported = self.reported
        of_fields = {one.name: getattr(self, one.name) for one in fields(self)}
        return of_fields | {
            "bill": self.bill and self.bill.as_json(),
            "saved_tokens": self.saved_tokens,
            "saved_share": self.saved_share,
            "error_share": self.error_share,
            "planning": {**asdict(self.planning), "buckets": list(self.planning.buckets)},
            "reported": {
                **asdict(reported),
                "hit_ratio": reported.hit_ratio if reported.answers else None,
                "confirmed_share": reported.confirmed_share if reported.answers else None,
            },
            "by_class": {name: one.as_json() for name, one in self.by_class.items()},
            "parts": {name: size._asdict() for name, size in self.parts.items()},
        }


def counted(number: int, name: str = "request") -> str:
    """Return how many there are of something, in words."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"
