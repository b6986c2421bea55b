"""What ordering saves of a trace: every policy over cache sizes, and what reports show of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ctxreuse.context.checks import check_function, checked_kind, checked_list, checked_positive
from ctxreuse.measure.options import BESIDE_TRACE, CACHES, KEEP_BEST, PRICES, option
from ctxreuse.measure.replay.policies import (
    OURS_ONLINE,
    check_own_engine,
    own_policies,
    tried_policies,
)
from ctxreuse.measure.replay.prompt_ways import measured_ways
from ctxreuse.measure.replay.simulate import (
    Progress,
    Replay,
    TraceSummary,
    deduplications,
    estimate,
    load_tokenizer,
    no_progress,
)
from ctxreuse.measure.results.prices import Prices, prices_given
from ctxreuse.measure.results.results import FirstCause, Results, results_of
from ctxreuse.measure.traces.changing_documents import changing_documents, hides_texts
from ctxreuse.measure.traces.recorded_prompts import read_recording
from ctxreuse.measure.traces.trace_files import TraceRequest, corpus_path, read_titles
from ctxreuse.measure.traces.varying_fronts import behind_fronts, fronts_that_differ, without_fronts
from ctxreuse.planner import ReusePlanner
from ctxreuse.rules.cache_rules import CacheRules, cache_profile
from ctxreuse.serving.emulation.batching_engine import COMMON_RATES

_BEST_FIRST = (
    "ctxreuse keeps the retriever's best block in front here: ReusePlanner(keep_best=True)."
)
_TOO_LARGE = "Left out, for the trace is too large for it: {}."
_SHORT = (
    "Documents are shorter than a block of the cache: by how many points these shares are off is "
    "unknown without --tokenizer."
)
_FRONT = "in {:,} of {:,} prompts something that differs stands before the documents"
_FRONT_REMEDY = (
    "put what differs (the question, the date, the user) behind the documents: in your template, "
    "{context} must stand before {question}"
)
_UNKNOWN = "none of {:,} prompts shows a document as it was retrieved"
_RENDER = "put the documents in with format_context"


@dataclass(frozen=True, kw_only=True)
class EstimateConfig:
    """What is estimated."""

    trace: str = option(
        "A folder that `ctxreuse record` wrote, or a trace: a JSON object a line with request_id, "
        "query, blocks.",
        argument=True,
    )
    corpus: str | None = option(BESIDE_TRACE, None)
    capacity_tokens: Sequence[int] = option(
        "Tokens that the engine's cache holds; several may be given. Without it, some sizes that "
        "suit the trace.",
        (),
        min=0,
    )
    tokenizer: str | Path | None = option(
        "A tokenizer.json: count whole prompts token by token. Without it, blocks count as their "
        "tokens, the words that ctxreuse adds are estimated, and questions count as none.",
        None,
        type=Path | None,
    )
    prefill_rate: float | None = option(
        "Prompt tokens that your engine computes in a second, for the time saved; without it, "
        "10,000, about a model of 8 billion parameters on one H100.",
        None,
        min=1,
    )
    cache: str | CacheRules = option(
        f"{CACHES} Of a provider's cache, what is shown is the bill.", "vllm", type=str
    )
    prices: str | Prices | None = option(PRICES, None, metavar="FILE|MODEL", type=str | None)
    independent: bool = option("Take turns of conversations as independent requests.", False)
    keep_best: bool = option(KEEP_BEST, False)
    policy: Sequence[str] = option(
        "A policy of your own beside the others, as module:Class; several may be given.",
        (),
        metavar="MODULE:CLASS",
    )


def measure_savings(
    asked: EstimateConfig, *, for_report: bool = False, progress: Progress = no_progress
) -> Results:
    """Replay a trace under every policy, with an unlimited cache and smaller ones."""
    checked_kind("asked", asked, EstimateConfig, "an EstimateConfig")
    check_function("progress", progress, "a function")
    profile, best = cache_profile(asked.cache), asked.keep_best
    prices = prices_given(asked.prices, profile)
    smaller = checked_list("capacity_tokens", asked.capacity_tokens, "a list of tokens")
    rate = COMMON_RATES.prefill_tokens_per_s
    if asked.prefill_rate is not None:
        rate = checked_positive("prefill_rate", asked.prefill_rate)
    check_own_engine(profile, "capacity_tokens and prefill_rate", smaller, asked.prefill_rate)
    blocks, requests, prompts = read_recording(
        asked.trace, asked.corpus, independent=asked.independent
    )
    recorded, changing, causes = requests, changing_documents(requests), list[FirstCause]()
    if changing is not None:  # it is said what comes of it once they are mended; so of fronts
        causes.append(FirstCause(str(changing), changing.remedy))
        requests = changing.settled(requests)
    different = fronts_that_differ(requests)
    requests = behind_fronts(requests) if different is None else without_fronts(requests)
    summary = TraceSummary.of(requests)
    encoder = None if asked.tokenizer is None else load_tokenizer(str(asked.tokenizer))
    # a provider tells none
    sizes = [None, *smaller] if smaller or profile.lives else summary.cache_sizes()
    own = own_policies(checked_list("policy", asked.policy, "a list of names"))
    tried = (*tried_policies(profile, keep_best=best), *own)
    rounds = len(tried) * len(deduplications(requests)) * len(sizes)
    with progress("replaying", 2 * rounds * len(requests)) as advance:
        replay = Replay(requests, blocks, encoder, advance, profile)
        runs = list(estimate(replay, sizes, tried))
    names = {run.policy for run in runs}
    ours = [one for one in runs if one.policy == OURS_ONLINE.name and one.capacity_tokens is None]
    too_large = "; ".join(one.name for one in tried if one.name not in names)
    of_prompts, size = None, next(iter(smaller), None)
    if not (profile.lives or asked.independent or profile.takes_primes):
        planner = partial(ReusePlanner, cache=profile, keep_best=best, capacity_tokens=size)
        of_prompts = measured_ways(prompts, recorded, planner, size, changing, encoder, progress)
        if prompts and of_prompts is None:
            causes.append(FirstCause(_UNKNOWN.format(len(prompts)), _RENDER))
    if different is not None and of_prompts is None:
        causes.append(FirstCause(_FRONT.format(different, len(requests)), _FRONT_REMEDY))
    told = [one.output_tokens for one in requests if one.output_tokens is not None]
    return results_of(
        Path(asked.trace).name,
        "blocks" if encoder is None else "tokens",
        summary,
        runs,
        ours[-1].planned if for_report else (),
        blocks,
        read_titles(asked.corpus or corpus_path(asked.trace)) if for_report else None,
        notes=(
            *((_BEST_FIRST,) if best else ()),
            *((_TOO_LARGE.format(too_large),) if too_large else ()),
            *((_SHORT,) if of_prompts and encoder is None and summary.is_short(profile) else ()),
            *(_bill_notes(requests) if profile.lives else ()),
        ),
        cache_tokens=size,
        prefill_tokens_per_s=None if profile.lives else rate,
        prices=prices,
        cache=profile,
        output_tokens=sum(told) if told and len(told) == len(requests) else None,
        causes_first=tuple(causes),
        prompts=of_prompts,
        keep_best=best,
        hides_texts=hides_texts(recorded),
    )


def _bill_notes(trace: Sequence[TraceRequest]) -> Iterator[str]:
    timed = sum(one.timestamp_ms is not None for one in trace)
    if not timed:
        yield "No request has a timestamp, so nothing expires."
    elif timed < len(trace):
        yield (
            f"{len(trace) - timed:,} of {len(trace):,} requests have no timestamp: they count as "
            "sent with the one before."
        )
    told = sum(one.output_tokens is not None for one in trace)
    if told < len(trace):
        which = f"only {told:,} of {len(trace):,} requests say" if told else "no request says"
        yield f"Answers are left out: {which} how long its answer is (output_tokens)."
