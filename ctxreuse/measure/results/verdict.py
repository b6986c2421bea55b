"""The verdict on results: what planning saves, for whom it holds, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctxreuse.measure.replay.policies import AS_SENT, OURS_BATCH, OURS_ONLINE, TODAY
from ctxreuse.measure.replay.run_result import Part, RunResult
from ctxreuse.measure.replay.workers import worker_policies
from ctxreuse.measure.results.bill import Bill, base_run
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results_file import Results
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_marks import mark_field
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules, profile_spec

LEAST_SHARE = 0.01
"""Of the computed tokens; a smaller saving is not worth a change of a program."""

ONLINE_STEP = (
    "wrap the model (ReuseChatModel for LangChain, ReuseLLM for LlamaIndex){with_context}; in your "
    "template, {{context}} must stand before {{question}}. Or plan with {planner}; {shadow} counts "
    "first and changes nothing."
)
WITH_CONTEXT = " and put the documents in with format_context"
FRONT_STEP = (
    "put what differs (the question, the date, the user) behind the documents: in your template, "
    "{context} must stand before {question}; then record again."
)
BATCH_STEP = "collect requests, and plan them together: {planner}.plan_batch(requests)."
SHARE_STEP = (
    "let the workers share a log of what they have sent: {planner}, or CTXREUSE_SHARED_LOG."
)
LONGER_STEP = (
    "bring prompts above the minimum: put instructions and examples that all of them share in "
    "front as the system text, retrieve more, or take a model with a smaller minimum."
)
NO_STEP = "change nothing; record again when the requests or the documents are others."
LARGER_CACHE_STEP = "give the engine's cache more memory, then estimate with its new size."

SMALL_SHARE = 0.05
"""Of the computed tokens; a smaller saving hardly shows in the time of a request."""

_THOUSAND = 1_000


@dataclass(frozen=True, slots=True)
class Saving:
    """What a policy saves against prompts as they were retrieved, for one cache."""

    policy: str
    mode: str
    deduplicated: bool
    workers: int
    capacity_tokens: int | None
    requests: int
    before: BilledTokens
    after: BilledTokens
    cache: CacheRules = DEFAULT_CACHE
    word_tokens: int = 0

    @property
    def tokens(self) -> float:
        """How much smaller the bill is, in uncached tokens; of an engine, tokens computed less."""
        return self.before.bill(self.cache) - self.after.bill(self.cache)

    @property
    def share(self) -> float:
        """The same as a share of the bill before."""
        before = self.before.bill(self.cache)
        return self.tokens / before if before else 0.0

    @property
    def is_worth_it(self) -> bool:
        """Whether it is large enough to do something for: more than caching nothing would save."""
        uncached = self.before.prompt_tokens
        cheap = self.after.bill(self.cache) <= (1 - LEAST_SHARE) * uncached
        return cheap and self.share >= LEAST_SHARE

    def factor(self, tokens: BilledTokens) -> float:
        """Return a bill as a multiple of the prompts before, none of them cached."""
        uncached = self.before.prompt_tokens
        return tokens.bill(self.cache) / uncached if uncached else 1.0

    def seconds(self, tokens_per_s: float) -> float:
        """Return the seconds of prefill that a thousand requests take less."""
        return _THOUSAND * self.tokens / self.requests / tokens_per_s if self.requests else 0.0

    def money(self, prices: Prices) -> float:
        """Return what the prompts of a thousand requests cost less."""
        less = prices.money(self.before) - prices.money(self.after)
        return _THOUSAND * less / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class SavingsVerdict:
    """What results come to; text, JSON and pages show the same."""

    sentence: str
    next_step: str
    also: tuple[str, ...] = ()
    saving: Saving | None = None
    bill: Bill | None = None
    is_gain: bool = False
    prefill_tokens_per_s: float | None = None
    prices: Prices | None = None

    def lines(self) -> Iterator[str]:
        """Yield what a terminal shows."""
        yield self.sentence
        yield f"Next: {self.next_step}"
        yield from self.also

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        saving, rate, prices = self.saving, self.prefill_tokens_per_s, self.prices
        fields: dict[str, Any] = {
            "sentence": self.sentence,
            "next_step": self.next_step,
            "also": list(self.also),
            "is_gain": self.is_gain,
        }
        if saving is None:
            return fields
        fields |= {
            "policy": saving.policy,
            "mode": saving.mode,
            "deduplicated": saving.deduplicated,
        }
        if self.bill is not None:
            fields |= {
                "cache": profile_spec(self.bill.cache),
                "requests": saving.requests,
                "bill_to_uncached_before": round(saving.factor(saving.before), 6),
                "bill_to_uncached": round(saving.factor(saving.after), 6),
                "saved_share": round(saving.share, 6),
            }
        else:
            seconds = None if rate is None else round(saving.seconds(rate), 3)
            fields |= {
                "workers": saving.workers,
                "capacity_tokens": saving.capacity_tokens,
                "requests": saving.requests,
                "computed_tokens_as_retrieved": saving.before.uncached,
                "computed_tokens": saving.after.uncached,
                "saved_share": round(saving.share, 6),
                "prefill_tokens_per_s": rate,
                "seconds_per_1000_requests": seconds,
            }
        money = None if prices is None else round(saving.money(prices), 6)
        known = None if prices is None else prices.as_json()
        return fields | {"prices": known, "money_per_1000_requests": money}


def verdict(results: Results) -> SavingsVerdict:
    """Return what results come to."""
    found = _of_order(results)
    recurs = results.trace.reuse_bound >= LEAST_SHARE
    if results.different_fronts is None or found.saving is None or not recurs:
        return found
    return replace(
        found,
        sentence=(
            f"In {results.different_fronts:,} of {results.trace.requests:,} prompts something that "
            "differs stands before the documents: nothing can be gained until it stands behind "
            f"them. From then on: {found.sentence}"
        ),
        next_step=FRONT_STEP,
        is_gain=False,
    )


def _of_order(results: Results) -> SavingsVerdict:
    """Return what results come to where nothing that differs stands before the documents."""
    compared = _compared(results)
    if not compared:
        return SavingsVerdict(
            "No verdict: nothing was measured as retrieved, to compare with.",
            "measure part policies, too.",
        )
    savings = _savings(compared, results.cache)
    of_workers = [one for one in savings if one.workers > 1]
    online = of_workers or [one for one in savings if one.policy == OURS_ONLINE.name]
    batch = [one for one in savings if one.policy == OURS_BATCH.name]
    arriving = _best(online, results)
    together = None if of_workers else _best(batch, results)
    found = [one for one in (arriving, together) if one is not None]
    chosen = next((one for one in found if one.is_worth_it), next(iter(found), None))
    if chosen is None:
        return SavingsVerdict(
            "No verdict: no policy of this package was measured.",
            "measure ctxreuse, online or ctxreuse, batch, too.",
        )
    bill = Bill.of(results)
    if bill is not None:
        return _of_bill(results, bill, chosen, savings, together)
    also = tuple(_also(results, chosen, savings, together))
    return (_gain if chosen.is_worth_it else _no_gain)(results, chosen, savings, also)


def _compared(results: Results) -> list[RunResult]:
    """Return runs that differ in policy and cache only, among them one as retrieved."""
    for part in dict.fromkeys((Part.policies, *(run.part for run in results.runs))):
        runs = results.part(part)
        plain = [run for run in runs if run.policy == AS_SENT.name and not run.deduplicated]
        if plain:
            last = plain[-1]
            return [run for run in runs if (run.k, run.sessions) == (last.k, last.sessions)]
    return []


def _savings(runs: Sequence[RunResult], cache: CacheRules) -> list[Saving]:
    """Return what each run saves, against that as retrieved with the same cache."""
    sizes = dict.fromkeys(run.capacity_tokens for run in runs)
    plain = {size: base_run([run for run in runs if run.capacity_tokens == size]) for size in sizes}
    savings = []
    for run in runs:
        base = plain.get(run.capacity_tokens)
        if base is None:
            continue
        if base.request_ids:  # an engine does not answer all
            common = set(base.request_ids) & set(run.request_ids)
            base, run = base.only(common), run.only(common)
        savings.append(
            Saving(
                run.policy,
                run.mode,
                run.deduplicated,
                run.workers,
                run.capacity_tokens,
                len(run.prompt_tokens),
                base.billed,
                run.billed,
                cache,
                run.word_tokens,
            )
        )
    return savings


def _best(savings: Sequence[Saving], results: Results) -> Saving | None:
    """Return the largest saving with the cache that the verdict is about."""
    sizes = [one.capacity_tokens for one in savings]
    size = results.cache_tokens if results.cache_tokens in sizes else next(iter(sizes), None)
    of_size = [one for one in savings if one.capacity_tokens == size]
    return max(of_size, key=lambda one: one.tokens, default=None)


def _without_log(saving: Saving, savings: Sequence[Saving]) -> Saving | None:
    """Return what the same workers save without a shared log, where a saving is with one."""
    if saving.workers == 1:
        return None
    no_log, shared_log = (policy.name for policy in worker_policies(saving.workers))
    alone = [
        one
        for one in savings
        if one.policy == no_log
        and saving.policy == shared_log
        and one.capacity_tokens == saving.capacity_tokens
    ]
    return max(alone, key=lambda one: one.tokens, default=None)


def _gain(
    results: Results, saving: Saving, savings: Sequence[Saving], also: tuple[str, ...]
) -> SavingsVerdict:
    a_thousand = _a_thousand(results, saving)
    if saving.workers > 1:
        step = SHARE_STEP.format(planner=_planner(results, "shared_log=SQLiteLog(path)"))
    elif saving.mode == "online":
        step = ONLINE_STEP.format(
            with_context=WITH_CONTEXT if results.outside_runs else "",
            planner=_planner(results),
            shadow=_planner(results, 'mode="shadow"'),
        )
    else:
        named = _planner(results) if results.keep_best else "planner"
        step = BATCH_STEP.format(planner=named)
    sentence = f"{_change(saving)} with {_policy(saving)} ({_conditions(results, saving)})"
    alone = _without_log(saving, savings)
    if alone is not None:
        sentence = (
            f"{_percent(alone)} prompt tokens to compute with {saving.workers} workers as they "
            f"are, which share no log; {_percent(saving)} with a shared one "
            f"({_cache(results, saving)})"
        )
    return SavingsVerdict(
        f"{sentence}{a_thousand}.",
        step,
        also,
        saving,
        is_gain=True,
        prefill_tokens_per_s=results.prefill_tokens_per_s,
        prices=results.prices,
    )


def _a_thousand(results: Results, saving: Saving, sign: str = ": ") -> str:
    """Return what a request's prefill takes less, and a thousand cost, with what that is from."""
    rate, prices = results.prefill_tokens_per_s, results.prices
    less, basis = [], []
    if rate is not None:
        milliseconds = 1e3 * saving.seconds(rate) / _THOUSAND
        less.append(f"{_rounded(milliseconds)} ms less prefill a request")
        basis.append(f"at {rate:,.0f} tokens a second")
    if prices is not None:
        less.append(f"{amount(saving.money(prices))} {prices.currency} less per 1,000 requests")
        basis.append(f"prices of {prices.date} from {prices.source}")
    return f"{sign}{' and '.join(less)} ({'; '.join(basis)})" if less else ""


def _no_gain(
    results: Results, saving: Saving, savings: Sequence[Saving], also: tuple[str, ...]
) -> SavingsVerdict:
    reason, step = _reason(results, saving, savings)
    return SavingsVerdict(
        f"Nothing to gain here, because {reason} ({_conditions(results, saving)}).",
        step,
        also,
        saving,
        prefill_tokens_per_s=results.prefill_tokens_per_s,
        prices=results.prices,
    )


def _reason(results: Results, saving: Saving, savings: Sequence[Saving]) -> tuple[str, str]:
    """Return why a policy saves nothing, and what to do."""
    bound, before = results.trace.reuse_bound, saving.before
    served = before.read / before.prompt_tokens if before.prompt_tokens else 0.0
    if results.trace.requests < 2:
        number = "no request" if not results.trace.requests else "one request"
        return f"there is {number}, and so nothing that comes again", NO_STEP
    if bound < LEAST_SHARE:
        return f"hardly any block comes again: {bound:.1%} of the block tokens", NO_STEP
    larger = [
        one
        for one in savings
        if one.policy == saving.policy
        and saving.capacity_tokens is not None
        and (one.capacity_tokens is None or one.capacity_tokens > saving.capacity_tokens)
    ]
    if any(one.is_worth_it for one in larger):
        return "the cache has lost blocks before they come again", LARGER_CACHE_STEP
    if served >= bound - LEAST_SHARE:
        return (
            f"the retriever's order already has {served:.0%} of the prompt tokens served, of "
            f"{bound:.0%} that were sent before"
        ), NO_STEP
    if saving.workers > 1 and not saving.is_worth_it:
        return f"{saving.workers} workers together compute {_few(saving)}", NO_STEP
    return (
        f"requests share blocks but not enough of them together: {_policy(saving)} computes "
        f"{_few(saving)}"
    ), NO_STEP


def _of_bill(
    results: Results,
    bill: Bill,
    saving: Saving,
    savings: Sequence[Saving],
    together: Saving | None,
) -> SavingsVerdict:
    """Return what a hosted cache's bill comes to."""
    spec = profile_spec(bill.cache)
    also = tuple(_also_of_bill(bill, saving, savings, together))
    if not saving.is_worth_it:
        reason, step = _reason_of_bill(results, bill, saving)
        sentence = f"Nothing to gain: {reason} (cache profile {spec})."
        return SavingsVerdict(sentence, step, also, saving, bill, prices=results.prices)
    return SavingsVerdict(
        f"{saving.share:.0%} lower input bill than {bill.base} with {_policy(saving)} (cache "
        f"profile {spec}): {_instead(saving)}{_a_thousand(results, saving, '; ')}.",
        _step_of_bill(results, bill.cache, saving),
        also,
        saving,
        bill,
        is_gain=True,
        prices=results.prices,
    )


def _planner(results: Results, *options: str) -> str:
    """Return how to make a planner that orders as the measured one did."""
    given = [*options, *(["keep_best=True"] if results.keep_best else ())]
    return f"ReusePlanner({', '.join(given)})"


def _step_of_bill(results: Results, cache: CacheRules, saving: Saving) -> str:
    planner = _planner(results, f'cache="{profile_spec(cache)}"')
    if saving.mode == "offline":
        return (
            f"collect requests, plan them together, {planner}.plan_batch(requests), and send the "
            "plans in their order."
        )
    adapters = "ReuseChatModel (LangChain), ReuseLLM (LlamaIndex) or EngineClient"
    if not cache.marks:
        return f"plan with {planner}, alone or in {adapters}."
    form = '"anthropic"' if mark_field(cache) == "cache_control" else ""
    return (
        f"plan with {planner} and send plan.body({form}), which has the marks; or give the planner "
        f"to {adapters}."
    )


def _also_of_bill(
    bill: Bill, chosen: Saving, savings: Sequence[Saving], together: Saving | None
) -> Iterator[str]:
    """Yield what a reader of a bill should know, too."""
    before = chosen.before.bill(bill.cache)
    unwritten = 1 - chosen.before.prompt_tokens / before if before else 0.0
    if bill.cache.marks_end and unwritten >= LEAST_SHARE:
        yield (
            f"{unwritten:.0%} lower without planning: the provider's own mark at the end of each "
            'prompt writes what nobody reads; prompt_cache_options={"mode": "explicit"} turns it '
            "off."
        )
    if chosen.share < SMALL_SHARE:
        yield from _worth(chosen, together)
    yield from _words(chosen)
    if not chosen.is_worth_it:
        return
    for one in savings:
        is_like = one.policy == AS_SENT.name and one.deduplicated == chosen.deduplicated
        if is_like and abs(one.share) >= LEAST_SHARE:
            with_marks = ", with marks" if bill.base == TODAY.name else ""
            yield f"In the retriever's order{with_marks}: {_bill_change(one)}."
    if together is not None and together.share >= chosen.share + LEAST_SHARE:
        yield f"All requests planned together as one batch: {_bill_change(together)}."
    if bill.is_too_short:
        yield (
            f"Only {bill.long_enough:,} of {bill.requests:,} prompts reach the minimum of "
            f"{bill.cache.least_tokens:,} tokens."
        )


def _reason_of_bill(results: Results, bill: Bill, saving: Saving) -> tuple[str, str]:
    """Return why planning does not lower a bill, and what to do."""
    if bill.requests < 2:
        return _reason(results, saving, ())
    if bill.is_too_short:
        return (
            f"prompts are shorter than the minimum of {bill.cache.name}, "
            f"{bill.cache.least_tokens:,} tokens; their median is {bill.median_tokens:,}, and "
            f"{bill.long_enough:,} of {bill.requests:,} reach it"
        ), LONGER_STEP
    bound = results.trace.reuse_bound
    if bound < LEAST_SHARE:
        return f"hardly any block comes again: {bound:.1%} of the block tokens", NO_STEP
    return (
        f"too little of what is written is read again: {_policy(saving)} costs "
        f"{saving.factor(saving.after):.3f} times the same prompts uncached"
    ), NO_STEP


def _bill_change(saving: Saving) -> str:
    word = "higher" if saving.tokens < 0 else "lower"
    return f"{abs(saving.share):.0%} {word}, {_instead(saving)}"


def _instead(saving: Saving) -> str:
    before, after = saving.factor(saving.before), saving.factor(saving.after)
    return f"{after:.2f} instead of {before:.2f} of the uncached price"


def _also(
    results: Results, chosen: Saving, savings: Sequence[Saving], together: Saving | None
) -> Iterator[str]:
    """Yield what words cost, and what holds with other caches and for other ways to plan."""
    yield from _worth(chosen, together)
    yield from _words(chosen)
    others: dict[int | None, Saving] = {}
    for one in savings:
        is_like = one.policy == chosen.policy and one.capacity_tokens != chosen.capacity_tokens
        best = others.get(one.capacity_tokens)
        if is_like and (best is None or one.tokens > best.tokens):
            others[one.capacity_tokens] = one
    if others:
        sizes = ", ".join(f"{_percent(one)} with {_cache(results, one)}" for one in others.values())
        yield f"The same with other caches: {sizes}."
    shortened = [
        one
        for one in savings
        if one.policy == AS_SENT.name
        and one.deduplicated
        and one.capacity_tokens == chosen.capacity_tokens
    ]
    if chosen.deduplicated and shortened:
        yield (
            "Of it, leaving out what a conversation shows already gives "
            f"{_percent(shortened[0])} in the retriever's order, too."
        )
    if together is not None and together.share >= chosen.share + LEAST_SHARE:
        yield (
            f"Planned together, all requests as one batch ({together.policy}): {_percent(together)}"
            f" ({_conditions(results, together)})."
        )
    if chosen.workers == 1:
        return
    said = None if not chosen.is_worth_it else _without_log(chosen, savings)
    alike = [
        one
        for one in savings
        if one.capacity_tokens == chosen.capacity_tokens
        and (said is None or one.policy != said.policy)
    ]
    for name in dict.fromkeys(one.policy for one in alike):
        best = max((one for one in alike if one.policy == name), key=lambda one: one.tokens)
        is_other = name != chosen.policy and (best.workers > 1 or name == OURS_ONLINE.name)
        if is_other:
            yield f"{name}: {_percent(best)} ({_conditions(results, best)})."


def _worth(saving: Saving, together: Saving | None) -> Iterator[str]:
    """Yield whether a saving is worth a change of a program."""
    if not saving.is_worth_it:
        return
    if saving.share >= SMALL_SHARE:
        yield "Worth trying; it shows most where prompts are long and answers short."
    elif saving.mode != "online":
        yield "Small: probably not worth it."
    elif together is None:
        yield "Small: probably not worth it for single requests."
    elif together.share < saving.share + LEAST_SHARE:
        yield "Small: probably not worth it for single requests; a batch gives no more."
    else:
        yield (
            f"Small: probably not worth it for single requests; a batch gives {together.share:.0%}."
        )


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _words(saving: Saving) -> Iterator[str]:
    if saving.word_tokens:
        yield (
            f"Words that ctxreuse adds: about {saving.word_tokens:,} tokens in "
            f"{saving.requests:,} requests, counted."
        )


def _change(saving: Saving) -> str:
    return f"{saving.share:.0%} fewer prompt tokens to compute"


def _percent(saving: Saving) -> str:
    return f"{abs(saving.share):.0%} {'more' if saving.tokens < 0 else 'fewer'}"


def _few(saving: Saving) -> str:
    word = "more" if saving.tokens < 0 else "fewer"
    return f"{abs(saving.share):.1%} {word} prompt tokens than as retrieved"


def _policy(saving: Saving) -> str:
    return f"{saving.policy}{', de-duplicated' if saving.deduplicated else ''}"


def _conditions(results: Results, saving: Saving) -> str:
    workers = "one worker" if saving.workers == 1 else f"{saving.workers} workers"
    return f"{workers}, {_cache(results, saving)}"


def _cache(results: Results, saving: Saving) -> str:
    if saving.capacity_tokens is not None:
        return f"a cache of {saving.capacity_tokens:,} tokens"
    return "the engine's own cache" if results.level == "engine" else "an unlimited cache"


def amount(money: float) -> str:
    """Return an amount of money with as many digits as tell something."""
    return f"{money:,.2f}" if money >= 0.1 else f"{money:.2g}"
