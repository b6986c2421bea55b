"""The verdict on results: what planning saves, for whom it holds, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctxreuse.measure.replay.policies import AS_SENT, OURS_BATCH, OURS_ONLINE, PRIMED, TODAY
from ctxreuse.measure.replay.run_result import POLICIES_PART, RunResult
from ctxreuse.measure.replay.workers import worker_policies
from ctxreuse.measure.results.bill import LEAST_SHARE, Bill, Saving, savings_of
from ctxreuse.measure.results.results_file import Results
from ctxreuse.rules.cache_marks import mark_field
from ctxreuse.rules.cache_rules import planner_setting, profile_spec

ONLINE_STEP = (
    "wrap the model (ReuseChatModel for LangChain, ReuseLLM for LlamaIndex{fields}){with_context}; "
    "in your template, {{context}} must stand before {{question}}. Or plan with {planner}; "
    "{shadow} counts first and changes nothing."
)
WITH_CONTEXT = " and put the documents in with format_context"
FRONT_STEP = (
    "put what differs (the question, the date, the user) behind the documents: in your template, "
    "{context} must stand before {question}; then record again."
)
BATCH_STEP = "collect requests, and plan them together: {planner}.plan_batch(requests{primes})."
BATCH_PRIMES = ", primes=True"
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


@dataclass(frozen=True, slots=True)
class SavingsVerdict:
    """What results come to; text, JSON and pages show the same."""

    sentence: str
    next_step: str
    also: tuple[str, ...] = ()
    saving: Saving | None = None
    results: Results | None = None
    is_gain: bool = False

    def lines(self) -> Iterator[str]:
        """Yield what a terminal shows."""
        yield self.sentence
        yield f"Next: {self.next_step}"
        yield from self.also

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        saving, results = self.saving, self.results
        fields: dict[str, Any] = {
            "sentence": self.sentence,
            "next_step": self.next_step,
            "also": list(self.also),
            "is_gain": self.is_gain,
        }
        if saving is None or results is None:
            return fields
        rate, prices = results.prefill_tokens_per_s, results.prices
        fields |= {
            "policy": saving.run.policy,
            "mode": saving.run.mode,
            "deduplicated": saving.run.deduplicated,
        }
        if saving.run.bill is not None:
            fields |= {
                "cache": profile_spec(saving.cache),
                "requests": saving.requests,
                "bill_to_uncached_before": round(saving.factor(saving.before), 6),
                "bill_to_uncached": round(saving.to_uncached, 6),
                "saved_share": round(saving.share, 6),
            }
        else:
            seconds = None if rate is None else round(saving.a_thousand(saving.tokens) / rate, 3)
            fields |= {
                "workers": saving.run.workers,
                "capacity_tokens": saving.run.capacity_tokens,
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
    savings = savings_of(compared, results.cache)
    of_workers = [one for one in savings if one.run.workers > 1]
    ways = (OURS_ONLINE, OURS_BATCH)
    online, batch = (
        [one for one in savings if one.run.policy in (way.name, primed.name)]
        for way, primed in zip(ways, PRIMED, strict=True)
    )
    arriving = _best(of_workers or online, results)
    together = None if of_workers else _best(batch, results)
    found = [one for one in (arriving, together) if one is not None]
    chosen = next((one for one in found if one.is_worth_it), next(iter(found), None))
    if chosen is None:
        return SavingsVerdict(
            "No verdict: no policy of this package was measured.",
            "measure ctxreuse, online or ctxreuse, batch, too.",
        )
    bill = Bill.of(results)
    if bill is None:
        said = (_gain if chosen.is_worth_it else _no_gain)(results, chosen, savings)
        also = _also(results, chosen, savings, together)
    else:
        said = (_lower_bill if chosen.is_worth_it else _no_lower_bill)(results, bill, chosen)
        also = _also_of_bill(bill, chosen, together)
    return SavingsVerdict(*said, tuple(also), chosen, results, chosen.is_worth_it)


def _compared(results: Results) -> list[RunResult]:
    """Return runs that differ in policy and cache only, among them one as retrieved."""
    for part in dict.fromkeys((POLICIES_PART, *(run.part for run in results.runs))):
        runs = results.part(part)
        plain = [run for run in runs if run.policy == AS_SENT.name and not run.deduplicated]
        if plain:
            last = plain[-1]
            return [run for run in runs if (run.k, run.sessions) == (last.k, last.sessions)]
    return []


def _best(savings: Sequence[Saving], results: Results) -> Saving | None:
    """Return the largest saving with the cache that the verdict is about."""
    sizes = [one.run.capacity_tokens for one in savings]
    size = results.cache_tokens if results.cache_tokens in sizes else next(iter(sizes), None)
    of_size = [one for one in savings if one.run.capacity_tokens == size]
    return max(of_size, key=_tokens, default=None)


def _without_log(saving: Saving, savings: Sequence[Saving]) -> Saving | None:
    """Return what the same workers save without a shared log, where a saving is with one."""
    if saving.run.workers == 1:
        return None
    no_log, shared_log = (policy.name for policy in worker_policies(saving.run.workers))
    alone = [
        one
        for one in savings
        if one.run.policy == no_log
        and saving.run.policy == shared_log
        and one.run.capacity_tokens == saving.run.capacity_tokens
    ]
    return max(alone, key=_tokens, default=None)


def _gain(results: Results, saving: Saving, savings: Sequence[Saving]) -> tuple[str, str]:
    """Return what an engine computes less, and what to do."""
    is_primed = saving.run.policy in [one.name for one in PRIMED]
    planner = _planner(results)
    is_default = planner == "ReusePlanner()"
    if saving.run.workers > 1:
        step = SHARE_STEP.format(planner=_planner(results, "shared_log=SQLiteLog(path)"))
    elif saving.run.mode == "online":
        fields = "" if is_default else f", with planner={planner}"
        step = ONLINE_STEP.format(
            fields=f"{fields}, prime=True" if is_primed else fields,
            with_context=WITH_CONTEXT if results.outside_runs else "",
            planner=planner,
            shadow=_planner(results, 'mode="shadow"'),
        )
    else:
        named = "planner" if is_default else planner
        step = BATCH_STEP.format(planner=named, primes=BATCH_PRIMES if is_primed else "")
    sentence = (
        f"{_percent(saving)} prompt tokens to compute with {_policy(saving)} "
        f"({_conditions(results, saving)})"
    )
    alone = _without_log(saving, savings)
    if alone is not None:
        sentence = (
            f"{_percent(alone)} prompt tokens to compute with {saving.run.workers} workers as they "
            f"are, which share no log; {_percent(saving)} with a shared one "
            f"({_cache(results, saving)})"
        )
    return f"{sentence}{_a_thousand(results, saving)}.", step


def _a_thousand(results: Results, saving: Saving, sign: str = ": ") -> str:
    """Return what a request's prefill takes less, and a thousand cost, with what that is from."""
    rate, prices = results.prefill_tokens_per_s, results.prices
    less, basis = [], []
    if rate is not None:
        milliseconds = saving.a_thousand(saving.tokens) / rate
        shown = f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"
        less.append(f"{shown} ms less prefill a request")
        basis.append(f"at {rate:,.0f} tokens a second")
    if prices is not None:
        less.append(f"{amount(saving.money(prices))} {prices.currency} less per 1,000 requests")
        basis.append(f"prices of {prices.date} from {prices.source}")
    return f"{sign}{' and '.join(less)} ({'; '.join(basis)})" if less else ""


def _no_gain(results: Results, saving: Saving, savings: Sequence[Saving]) -> tuple[str, str]:
    reason, step = _reason(results, saving, savings)
    return f"Nothing to gain here, because {reason} ({_conditions(results, saving)}).", step


def _reason(results: Results, saving: Saving, savings: Sequence[Saving]) -> tuple[str, str]:
    """Return why a policy saves nothing, and what to do."""
    bound, before = results.trace.reuse_bound, saving.before
    served = before.read / before.prompt_tokens if before.prompt_tokens else 0.0
    if results.trace.requests < 2:
        number = "no request" if not results.trace.requests else "one request"
        return f"there is {number}, and so nothing that comes again", NO_STEP
    if bound < LEAST_SHARE:
        return f"hardly any block comes again: {bound:.1%} of the block tokens", NO_STEP
    size = saving.run.capacity_tokens
    larger = [
        one
        for one in savings
        if one.run.policy == saving.run.policy
        and size is not None
        and (one.run.capacity_tokens is None or one.run.capacity_tokens > size)
    ]
    if any(one.is_worth_it for one in larger):
        return "the cache has lost blocks before they come again", LARGER_CACHE_STEP
    if served >= bound - LEAST_SHARE:
        return (
            f"the retriever's order already has {served:.0%} of the prompt tokens served, of "
            f"{bound:.0%} that were sent before"
        ), NO_STEP
    few = f"{abs(saving.share):.1%} {_more(saving)} prompt tokens than as retrieved"
    if saving.run.workers > 1:
        return f"{saving.run.workers} workers together compute {few}", NO_STEP
    return (
        f"requests share blocks but not enough of them together: {_policy(saving)} computes {few}"
    ), NO_STEP


def _lower_bill(results: Results, bill: Bill, saving: Saving) -> tuple[str, str]:
    """Return how much lower a hosted cache's bill is, and what to do."""
    return (
        f"{saving.share:.0%} lower input bill than {bill.base.policy} with {_policy(saving)} "
        f"(cache profile {profile_spec(bill.cache)}): {_instead(saving)}"
        f"{_a_thousand(results, saving, '; ')}."
    ), _step_of_bill(results, saving)


def _planner(results: Results, *options: str) -> str:
    """Return how to make a planner that orders as the measured one did."""
    best = ["keep_best=True"] if results.keep_best else []
    given = [*planner_setting(results.cache), *options, *best]
    return f"ReusePlanner({', '.join(given)})"


def _step_of_bill(results: Results, saving: Saving) -> str:
    cache, planner = results.cache, _planner(results)
    if saving.run.mode == "offline":
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


def _also_of_bill(bill: Bill, chosen: Saving, together: Saving | None) -> Iterator[str]:
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
    for one in bill.rows:
        is_like = (one.run.policy, one.run.deduplicated) == (AS_SENT.name, chosen.run.deduplicated)
        if is_like and abs(one.share) >= LEAST_SHARE:
            with_marks = ", with marks" if bill.base.policy == TODAY.name else ""
            yield f"In the retriever's order{with_marks}: {_bill_change(one)}."
    if together is not None and together.share >= chosen.share + LEAST_SHARE:
        yield f"All requests planned together as one batch: {_bill_change(together)}."
    if bill.is_too_short:
        yield (
            f"Only {bill.long_enough:,} of {bill.requests:,} prompts reach the minimum of "
            f"{bill.cache.least_tokens:,} tokens."
        )


def _no_lower_bill(results: Results, bill: Bill, saving: Saving) -> tuple[str, str]:
    """Return why planning does not lower a bill, and what to do."""
    bound, step = results.trace.reuse_bound, NO_STEP
    if bill.is_too_short and bill.requests > 1:
        step = LONGER_STEP
        reason = (
            f"prompts are shorter than the minimum of {bill.cache.name}, "
            f"{bill.cache.least_tokens:,} tokens; their median is {bill.median_tokens:,}, and "
            f"{bill.long_enough:,} of {bill.requests:,} reach it"
        )
    elif bill.requests < 2 or bound < LEAST_SHARE:
        reason, step = _reason(results, saving, ())
    else:
        reason = (
            f"too little of what is written is read again: {_policy(saving)} costs "
            f"{saving.to_uncached:.3f} times the same prompts uncached"
        )
    return f"Nothing to gain: {reason} (cache profile {profile_spec(bill.cache)}).", step


def _bill_change(saving: Saving) -> str:
    word = "higher" if saving.tokens < 0 else "lower"
    return f"{abs(saving.share):.0%} {word}, {_instead(saving)}"


def _instead(saving: Saving) -> str:
    before = saving.factor(saving.before)
    return f"{saving.to_uncached:.2f} instead of {before:.2f} of the uncached price"


def _also(
    results: Results, chosen: Saving, savings: Sequence[Saving], together: Saving | None
) -> Iterator[str]:
    """Yield what words cost, and what holds with other caches and for other ways to plan."""
    yield from _worth(chosen, together)
    yield from _words(chosen)
    size = chosen.run.capacity_tokens
    others = [one for one in savings if one.run.policy == chosen.run.policy]
    sizes = dict.fromkeys(one.run.capacity_tokens for one in others)
    best = [
        max((one for one in others if one.run.capacity_tokens == other), key=_tokens)
        for other in sizes
        if other != size
    ]
    if best:
        said = ", ".join(f"{_percent(one)} with {_cache(results, one)}" for one in best)
        yield f"The same with other caches: {said}."
    for one in savings:
        is_like = (one.run.policy, one.run.capacity_tokens) == (AS_SENT.name, size)
        if is_like and one.run.deduplicated and chosen.run.deduplicated:
            yield (
                "Of it, leaving out what a conversation shows already gives "
                f"{_percent(one)} in the retriever's order, too."
            )
    if together is not None and together.share >= chosen.share + LEAST_SHARE:
        yield (
            f"Planned together, all requests as one batch ({together.run.policy}): "
            f"{_percent(together)} ({_conditions(results, together)})."
        )


def _worth(saving: Saving, together: Saving | None) -> Iterator[str]:
    """Yield whether a saving is worth a change of a program."""
    if not saving.is_worth_it:
        return
    if saving.share >= SMALL_SHARE:
        yield "Worth trying; it shows most where prompts are long and answers short."
        return
    more = ""
    if saving.run.mode == "online":
        more = " for single requests"
        if together is not None:
            is_more = together.share >= saving.share + LEAST_SHARE
            more += f"; a batch gives {f'{together.share:.0%}' if is_more else 'no more'}"
    yield f"Small: probably not worth it{more}."


def _words(saving: Saving) -> Iterator[str]:
    if saving.run.word_tokens:
        yield (
            f"Words that ctxreuse adds: about {saving.run.word_tokens:,} tokens in "
            f"{saving.requests:,} requests, counted."
        )


def _tokens(saving: Saving) -> float:
    return saving.tokens


def _more(saving: Saving) -> str:
    return "more" if saving.tokens < 0 else "fewer"


def _percent(saving: Saving) -> str:
    return f"{abs(saving.share):.0%} {_more(saving)}"


def _policy(saving: Saving) -> str:
    return f"{saving.run.policy}{', de-duplicated' if saving.run.deduplicated else ''}"


def _conditions(results: Results, saving: Saving) -> str:
    workers = "one worker" if saving.run.workers == 1 else f"{saving.run.workers} workers"
    return f"{workers}, {_cache(results, saving)}"


def _cache(results: Results, saving: Saving) -> str:
    if saving.run.capacity_tokens is not None:
        return f"a cache of {saving.run.capacity_tokens:,} tokens"
    return "the engine's own cache" if results.level == "engine" else "an unlimited cache"


def amount(money: float) -> str:
    """Return an amount of money with as many digits as tell something."""
    return f"{money:,.2f}" if money >= 0.1 else f"{money:.2g}"
