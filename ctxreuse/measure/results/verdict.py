"""The verdict on results: what planning saves, for whom it holds, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

from ctxreuse.measure.replay.policies import AS_SENT, OURS_BATCH, OURS_ONLINE, PRIMED
from ctxreuse.measure.replay.prompt_ways import LEAST_SAVED, PromptWays, Way
from ctxreuse.measure.replay.simulate import POLICIES_PART, RunResult
from ctxreuse.measure.results.bill import LEAST_SHARE, Bill, Saving, savings_of
from ctxreuse.measure.results.results import Results
from ctxreuse.measure.traces.changing_documents import IN_TEXTS, UNKNOWN
from ctxreuse.pipeline.context_finder import REMEDIES
from ctxreuse.rules.cache_marks import mark_field
from ctxreuse.rules.cache_rules import planner_setting, profile_spec

_ONLINE_STEP = (
    "wrap the model (ReuseChatModel for LangChain, ReuseLLM for LlamaIndex{fields}); in "
    "your template, {{context}} must stand before {{question}}. Or plan with {planner}; "
    "{shadow} counts first and changes nothing."
)
_LONGER_STEP = (
    "bring prompts above the minimum: put instructions and examples that all of them share in "
    "front as the system text, retrieve more, or take a model with a smaller minimum."
)
_ORDER_STEP = "leave out what you say of the order, if answers do as well; then record again."
_NO_STEP = "change nothing; record again when the requests or the documents are others."
_NO_DOCUMENTS = (
    "No verdict: none of {:,} requests has documents. Of what clients send, these are the "
    "paragraphs of the user's last message, and no system text or tool's result."
)
_RETRIEVED_STEP = "record what is retrieved: without --source, or with TraceRecorder in your code."
_RECORD_STEP = "record some: ctxreuse record -o FOLDER app.py."
_LARGER_CACHE_STEP = "give the engine's cache more memory, then estimate with its new size."

_NOT_KNOWN = f"What is to be gained is unknown: {UNKNOWN} is not in hashes. As they are, no gain"

_MODEL = {"langchain": "ReuseChatModel(inner=model)", "llamaindex": "ReuseLLM(inner=llm)"}
_ORDERED = {
    "langchain": "wrap the retriever: ReuseRetriever(retriever=retriever).",
    "llamaindex": "put ReusePostprocessor() last among the node postprocessors.",
    "mem0": "search with ReuseMemory(memory).",
}
_RENDER = "put the documents in with {rendered}{labels}), with all that you write on each"
_BEHIND = "put the question behind the documents, and whatever else differs from prompt to prompt"
_MIDDLEWARE = "create_agent(..., middleware=[ReuseMiddleware()])"
_OF_WAYS = {
    Way.SETTLED: "change nothing else.",
    Way.WRAPPED: "wrap the model: {model}.",
    Way.SHOWN_ONCE: f"give the agent a middleware: {_MIDDLEWARE}.",
    Way.RENDERED: f"{_RENDER}; then wrap the model: {{model}}.",
    Way.LABELLED: f"{_RENDER}; then wrap the model: {{model}}.",
    Way.BOTH: f"{_BEHIND}; {_RENDER}; then wrap the model: {{model}}.",
    Way.ORDERED: "{ordered}",
    Way.BEHIND: f"{_BEHIND}; then wrap the model: {{model}}.",
}
_RENDERED = {
    "langchain": "format_context(documents, document_prompt=...",
    "llamaindex": "format_context(nodes, text_template=...",
}

_SMALL_SHARE = 0.05  # of the computed tokens; less hardly shows in the time of a request


@dataclass(frozen=True, slots=True)
class SavingsVerdict:
    """What results come to; text, JSON and pages show the same."""

    sentence: str
    next_step: str
    also: tuple[str, ...] = ()
    is_gain: bool = False
    measured: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        told = asdict(self)
        measured: dict[str, Any] = told.pop("measured")
        return told | measured


def verdict(results: Results) -> SavingsVerdict:
    """Return what results come to."""
    if results.prompts is not None:
        return _of_prompts(results, results.prompts)
    found = _of_order(results)
    if not results.causes_first or results.trace.reuse_bound < LEAST_SHARE:
        return found
    return replace(
        found,
        sentence="Nothing can be gained as it is: "
        f"{'; '.join(one.found for one in results.causes_first)}. Once that is mended: "
        f"{found.sentence}",
        next_step=_first(results, "record again."),
        is_gain=False,
    )


def _nothing(results: Results, step: str) -> tuple[str, str]:
    """Return how a verdict without a gain begins, and its step; hashes may hide a gain."""
    if not results.hides_texts or results.trace.requests < 2 or step == _LONGER_STEP:
        return "Nothing to gain", step
    return _NOT_KNOWN, f"{IN_TEXTS}, and estimate those."


def _first(results: Results, step: str) -> str:
    return "; then ".join([*(one.remedy for one in results.causes_first), step])


def _of_prompts(results: Results, ways: PromptWays) -> SavingsVerdict:
    best, as_it_is = ways.best, ways.as_it_is.saved(ways.plain)
    framework = ways.framework if ways.framework in _MODEL else "langchain"
    cache, before = cache_words(results.cache_tokens), ways.plain.prefilled_tokens
    measured: dict[str, Any] = {
        "computed_tokens_as_retrieved": before,
        "saved_share_as_it_is": round(as_it_is, 6),
    }
    why = REMEDIES.get(ways.in_place)
    in_place = (f"As they are, most prompts keep their documents in place: {why}.",) if why else ()
    if best is None:
        tried = ", ".join(one.name for one in ways.ways)
        nothing, step = _nothing(results, _ORDER_STEP if ways.in_place == "order" else _NO_STEP)
        said = (
            f"{nothing} here: {ways.prompts:,} whole prompts compute {before:,} tokens ({cache}), "
            f"and none of {len(ways.ways)} changes saves {LEAST_SAVED:.0%} of them: {tried}."
        )
        return SavingsVerdict(said, step, in_place, measured=measured)
    share = best.saved(ways.plain)
    step = _OF_WAYS[best.name].format(
        model=_MODEL[framework],
        rendered=_RENDERED[framework],
        labels=", labels=True" * (best.name == Way.LABELLED),
        ordered=_ORDERED["mem0" if ways.are_memories else framework],
    )
    if (planner := _planner(results)) != "ReusePlanner()":
        step += f" Give it planner={planner}."
    also = [*(sentence(cause.found) for cause in results.causes_first), *in_place]
    if best is not ways.as_it_is:
        word = "more" if as_it_is < 0 else "fewer"
        also += [f"As it is, with {_MODEL[framework]} alone: {abs(as_it_is):.0%} {word}."]
    computed = best.usage.prefilled_tokens
    rate, less = results.prefill_tokens_per_s, ""
    if rate is not None:
        saved = (before - computed) / ways.prompts / rate * 1_000
        less = f"; {_ms(saved)} ms less prefill a prompt at {rate:,.0f} tokens a second"
    if share < _SMALL_SHARE:
        also.append("Small: probably not worth it.")
    nothing = "Nothing as it is, with words that differ in front of the documents; "
    nothing *= best.name in (Way.BEHIND, Way.BOTH)
    said = (
        f"{nothing}{share:.0%} fewer prompt tokens to compute, changed as Next says "
        f"({computed:,} instead of {before:,} in {ways.prompts:,} whole prompts, {cache}{less})."
    )
    measured |= {"way": best.name, "computed_tokens": computed, "saved_share": round(share, 6)}
    return SavingsVerdict(said, _first(results, step), tuple(also), True, measured)


def _of_order(results: Results) -> SavingsVerdict:
    """Return what results come to where nothing that differs stands before the documents."""
    if (requests := results.trace.requests) and not results.trace.block_tokens:
        return SavingsVerdict(_NO_DOCUMENTS.format(requests), _RETRIEVED_STEP)
    savings = list(savings_of(_compared(results), results.cache))
    arriving, together = (
        _best([one for one in savings if one.run.policy in (way.name, primed.name)], results)
        for way, primed in zip((OURS_ONLINE, OURS_BATCH), PRIMED, strict=True)
    )
    found = [one for one in (arriving, together) if one is not None]
    chosen = next((one for one in found if one.is_worth_it), next(iter(found), None))
    if chosen is None:
        return SavingsVerdict(
            "No verdict: the order of this package was not measured beside that as retrieved.",
            "measure as retrieved, and ctxreuse, online or ctxreuse, batch.",
        )
    bill = Bill.of(results)
    if bill is None:
        reason, step = _reason(results, chosen, savings)
        nothing, step = _nothing(results, step)
        why = f"{nothing} here, because {reason} (one worker, {_cache(results, chosen)})."
        said = _gain(results, chosen) if chosen.is_worth_it else (why, step)
        also = [*_also(chosen, together, bill)]
    else:
        said = _of_bill(results, bill, chosen)
        also = [*_also_of_bill(bill, chosen, together)]
    return SavingsVerdict(*said, tuple(also), chosen.is_worth_it, _figures(results, chosen))


def _figures(results: Results, saving: Saving) -> dict[str, Any]:
    rate, prices = results.prefill_tokens_per_s, results.prices
    figures: dict[str, Any] = {
        "policy": saving.run.policy,
        "mode": saving.run.mode,
        "deduplicated": saving.run.deduplicated,
        "requests": saving.requests,
        "saved_share": round(saving.share, 6),
    }
    if saving.run.written is not None:
        figures |= {
            "cache": profile_spec(saving.cache),
            "bill_to_uncached_before": round(saving.factor(saving.before), 6),
            "bill_to_uncached": round(saving.factor(saving.after), 6),
        }
    else:
        figures |= {
            "capacity_tokens": saving.run.capacity_tokens,
            "computed_tokens_as_retrieved": saving.before.uncached,
            "computed_tokens": saving.after.uncached,
            "prefill_tokens_per_s": rate,
            "seconds_per_1000_requests": rate and round(saving.a_thousand(saving.tokens) / rate, 3),
        }
    return figures | {
        "prices": prices and prices.as_json(),
        "money_per_1000_requests": prices and round(saving.money(prices), 6),
    }


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
    return max(of_size, key=attrgetter("share"), default=None)


def _gain(results: Results, saving: Saving) -> tuple[str, str]:
    is_primed = saving.run.policy in [one.name for one in PRIMED]
    planner = _planner(results)
    is_default = planner == "ReusePlanner()"
    counted = "document" if results.level == "blocks" else "prompt"
    if saving.run.mode == "online":
        fields = "" if is_default else f", with planner={planner}"
        fields += ", prime=True" * is_primed
        shadow = _planner(results, 'mode="shadow"')
        step = _ONLINE_STEP.format(fields=fields, planner=planner, shadow=shadow)
    else:
        named, primes = "planner" if is_default else planner, ", primes=True" * is_primed
        step = f"collect requests, and plan them together: {named}.plan_batch(requests{primes})."
    return (
        f"{_percent(saving)} {counted} tokens to compute with {_policy(saving)} "
        f"(one worker, {_cache(results, saving)}){_a_thousand(results, saving)}."
    ), step


def _a_thousand(results: Results, saving: Saving, sign: str = ": ") -> str:
    """Return what a request's prefill takes less, and a thousand cost, with what that is from."""
    rate, prices = results.prefill_tokens_per_s, results.prices
    less, basis = [], []
    if rate is not None:
        less.append(f"{_ms(saving.a_thousand(saving.tokens) / rate)} ms less prefill a request")
        basis.append(f"at {rate:,.0f} tokens a second")
    if prices is not None:
        less.append(f"{amount(saving.money(prices))} {prices.currency} less per 1,000 requests")
        basis.append(f"prices of {prices.date} from {prices.source}")
    return f"{sign}{' and '.join(less)} ({'; '.join(basis)})" if less else ""


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"


def _reason(results: Results, saving: Saving, savings: Sequence[Saving]) -> tuple[str, str]:
    bound = results.trace.reuse_bound
    if results.trace.requests < 2:
        number, step = ("one", _NO_STEP) if results.trace.requests else ("no", _RECORD_STEP)
        return f"there is {number} request, and so nothing that comes again", step
    if bound < LEAST_SHARE:
        return f"hardly any block comes again: {bound:.1%} of the block tokens", _NO_STEP
    size = saving.run.capacity_tokens
    if size is not None and any(
        one.is_worth_it
        and one.run.policy == saving.run.policy
        and (one.run.capacity_tokens is None or one.run.capacity_tokens > size)
        for one in savings
    ):
        return "the cache has lost blocks before they come again", _LARGER_CACHE_STEP
    if _served(saving) >= bound - LEAST_SHARE:
        return (
            f"the retriever's order already has {_served(saving):.0%} of the tokens served; "
            f"{bound:.0%} of the block tokens were sent before"
        ), _NO_STEP
    return (
        f"requests share blocks but not enough of them together: {_policy(saving)} computes "
        f"{_percent(saving, 1)} tokens than as retrieved"
    ), _NO_STEP


def _served(saving: Saving) -> float:
    return saving.before.read / max(1, saving.before.prompt_tokens)


def _planner(results: Results, *options: str) -> str:
    given = [*planner_setting(results.cache), *options]
    if results.keep_best:
        given.append("keep_best=True")
    return f"ReusePlanner({', '.join(given)})"


def _step_of_bill(results: Results, saving: Saving) -> str:
    cache, planner = results.cache, _planner(results)
    if saving.run.mode == "offline":
        return (
            f"collect requests, plan them together, {planner}.plan_batch(requests), and send the "
            "plans in their order."
        )
    labels = " after format_context(..., labels=True)" * saving.run.deduplicated
    adapters = f"ReuseChatModel (LangChain), ReuseLLM (LlamaIndex){labels} or EngineClient"
    if not cache.marks:
        return f"plan with {planner}, alone or in {adapters}."
    form = '"anthropic"' if mark_field(cache) == "cache_control" else ""
    return (
        f"plan with {planner} and send plan.body({form}), which has the breakpoints; or give the "
        f"planner to {adapters}."
    )


def _also_of_bill(bill: Bill, chosen: Saving, together: Saving | None) -> Iterator[str]:
    before = chosen.before.bill(bill.cache)
    unwritten = 1 - chosen.before.prompt_tokens / before if before else 0.0
    if bill.cache.marks_end and unwritten >= LEAST_SHARE:
        yield (
            f"{unwritten:.0%} lower without planning: the provider's own breakpoint at the end of "
            'each prompt writes what nobody reads; prompt_cache_options={"mode": "explicit"} turns '
            "it off."
        )
    yield from _also(chosen, together, bill)
    if chosen.is_worth_it and bill.is_too_short:
        yield (
            f"Only {bill.long_enough:,} of {bill.requests:,} prompts reach the minimum of "
            f"{bill.cache.least_tokens:,} tokens."
        )


def _of_bill(results: Results, bill: Bill, saving: Saving) -> tuple[str, str]:
    step, profile = _NO_STEP, f"cache profile {profile_spec(bill.cache)}"
    if saving.is_worth_it:
        return (
            f"{saving.share:.0%} lower input bill than {bill.base.policy} with {_policy(saving)} "
            f"({profile}): {_instead(saving)}{_a_thousand(results, saving, '; ')}."
        ), _step_of_bill(results, saving)
    if bill.is_too_short and bill.requests > 1:
        step = _LONGER_STEP
        reason = (
            f"prompts are shorter than the minimum of {bill.cache.name}, "
            f"{bill.cache.least_tokens:,} tokens; their median is {bill.median_tokens:,}, and "
            f"{bill.long_enough:,} of {bill.requests:,} reach it"
        )
    elif _served(saving) >= results.trace.reuse_bound - LEAST_SHARE:
        reason, step = _reason(results, saving, ())
    else:
        reason = (
            f"too little is read that is not read already: {_policy(saving)} costs "
            f"{_instead(saving)}"
        )
    nothing, step = _nothing(results, step)
    return f"{nothing}: {reason} ({profile}).", step


def _instead(saving: Saving) -> str:
    before, after = saving.factor(saving.before), saving.factor(saving.after)
    return f"{after:.2f} instead of {before:.2f} of the uncached price"


def _also(chosen: Saving, together: Saving | None, bill: Bill | None) -> Iterator[str]:
    if chosen.is_worth_it and (chosen.share < _SMALL_SHARE or bill is None):
        is_small = chosen.share < _SMALL_SHARE
        large = "Worth trying; it shows most where prompts are long and answers short."
        yield "Small: probably not worth it." if is_small else large
    if chosen.run.word_tokens:
        yield (
            f"Words that ctxreuse adds: about {chosen.run.word_tokens:,} tokens in "
            f"{chosen.requests:,} requests, counted."
        )
    if together is not None and together.share >= max(0.0, chosen.share) + LEAST_SHARE:
        price = "" if bill is None else f"{together.share:.0%} lower, {_instead(together)}"
        change = price or _percent(together)
        yield f"Planned together, all requests as one batch: {change}."


def _percent(saving: Saving, digits: int = 0) -> str:
    return f"{abs(saving.share):.{digits}%} {'more' if saving.tokens < 0 else 'fewer'}"


def _policy(saving: Saving) -> str:
    return f"{saving.run.policy}{', de-duplicated' if saving.run.deduplicated else ''}"


def _cache(results: Results, saving: Saving) -> str:
    if results.level == "engine":
        return "the engine's own cache"
    return cache_words(saving.run.capacity_tokens)


def cache_words(tokens: int | None) -> str:
    """Return a cache of a size in words."""
    return "an unlimited cache" if tokens is None else f"a cache of {tokens:,} tokens"


def sentence(words: str) -> str:
    """Return words as a sentence."""
    return f"{words[0].upper()}{words[1:]}."


def amount(money: float) -> str:
    """Return an amount of money with as many digits as tell something."""
    return f"{money:,.2f}" if money >= 0.1 else f"{money:.2g}"
