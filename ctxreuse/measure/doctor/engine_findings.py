"""What readings of an engine come to: pure, so that each case can be shown to be told apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ctxreuse.measure.doctor.findings import Finding, Verdict
from ctxreuse.measure.doctor.probe import (
    DEFAULT_TOKENS,
    MOST_TOKENS,
    NOT_ASKED,
    EngineReadings,
    LogWatch,
)

_OK, _PROBLEM, _UNKNOWN = Verdict.OK, Verdict.PROBLEM, Verdict.UNKNOWN

_SWITCH_ON = (
    "start vLLM with --enable-prefix-caching (the default), SGLang without --disable-radix-cache"
)
_SHOW_DETAILS = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
_NAME_METRICS = "name the engine's metrics: ctxreuse doctor --metrics http://HOST:8000/metrics"
_SHARE = "give all processes one log: ReusePlanner(shared_log=SQLiteLog('sent.sqlite'))"
_SHARE_IN_REDIS = (
    "give all processes one log: ReusePlanner(shared_log=RedisLog(url, secret=...)), the same "
    "secret and stream everywhere"
)
_ONE_SECRET = "give all processes the same secret, or each group of them a stream of its own"
_ONE_ENGINE = (
    "several engines stand behind this address: name each in an EnginePool, or have the router "
    "keep a session on one, with EngineClient(..., session_id='conversation')"
)
_ASK_ITSELF = "ask the engine itself, without a gateway"
_PUSHED_OUT = (
    f"if others push them out: {_SHARE}; if not: tell the planner what the cache holds: "
    "ReusePlanner(capacity_tokens=...); for more, vLLM's --gpu-memory-utilization"
)
_LONG = 8_000
_IF_IT_FITS = ", if the model's window takes them"
_LONGEST_TEMPLATE = 128  # tokens of a chat template, which a new prompt may find cached
_NEARLY_ALL = 0.9
_TOO_MANY = 1.2
_HOSTED_MINIMUM = 1_024


def engine_findings(readings: EngineReadings) -> Iterator[Finding]:
    """Yield what was found of an engine that was asked."""
    answers = f"{len(readings.sent)} answers"
    tokens = sum(one.prompt_tokens or 0 for one in readings.sent)
    if readings.error is not None:
        yield Finding("engine", _PROBLEM, f"{answers}: {readings.error}", _remedy_for(readings))
    elif not tokens:
        found = f"{answers}, none with a number of prompt tokens"
        option = "stream_options.include_usage"
        remedy = f"ask an engine that reports usage of streamed answers ({option})"
        yield Finding("engine", _PROBLEM, found, remedy)
    else:
        found = f"{answers} from {readings.host}, {tokens:,} prompt tokens"
        figures = {"answers": len(readings.sent), "prompt_tokens": tokens}
        yield Finding("engine", _OK, found, figures=figures)
    if untrue := _untrue(readings):
        no = NOT_ASKED
        readings = replace(readings, first=no, again=no, half=no, third=no, later=no)
    yield _prefix_cache(readings)
    yield Finding("usage", _PROBLEM, untrue, _ASK_ITSELF) if untrue else _usage(readings)
    yield _common_half(readings)
    yield _kept(readings)


def _remedy_for(readings: EngineReadings) -> str:
    key = "give its key: OPENAI_API_KEY=... ctxreuse doctor ..."
    address = "name its address with /v1, and a model that it has: --base-url, --model"
    busy = "run this again when it has less to do"
    silent = "start it, or check --base-url: its host, its port, /v1; if slow: --timeout 120"
    remedies = {401: key, 403: key, 400: address, 404: address, 429: busy, None: silent}
    return remedies.get(readings.status, "look into the engine's log")


def metrics_finding(readings: EngineReadings, is_asked_for: bool) -> Finding:
    """Return what the metrics say of the cache."""
    metrics = readings.metrics
    hits, queries = metrics.prefix_cache_hits, metrics.prefix_cache_queries
    if readings.metrics_error or hits is None or queries is None:
        none = "0 counters of a prefix cache on the page, as vLLM names them"
        found = readings.metrics_error or none
        return Finding("metrics", _PROBLEM if is_asked_for else _UNKNOWN, found, _NAME_METRICS)
    if hits > queries:
        found = f"{hits:,} of {queries:,} prompt tokens were cached, more than were sent"
        return Finding("metrics", _PROBLEM, found, _ASK_ITSELF)
    found = f"{hits:,} of {queries:,} prompt tokens were cached since the engine started"
    if queries:
        found += f", {hits / queries:.0%}"
    size, remedy = metrics.capacity_tokens, ""
    if size is not None:
        found += f"; its cache holds {size:,}"
        remedy = f"tell the planner: ReusePlanner(capacity_tokens={size})"
    if metrics.prefix_caching is False:
        return Finding("metrics", _PROBLEM, f"{found}; enable_prefix_caching is False", _SWITCH_ON)
    figures = {"prefix_cache_queries": queries, "prefix_cache_hits": hits, "capacity_tokens": size}
    return Finding("metrics", _OK, found, remedy, figures)


def processes_finding(
    readings: EngineReadings, log: LogWatch | None, workers: int | None
) -> Finding:
    """Return whether several processes use the engine without a log."""
    foreign, elsewhere = _foreign_tokens(readings), _is_elsewhere(readings)
    figures = {
        "foreign_prompt_tokens": foreign,
        "quiet_s": readings.quiet_s,
        "log_writers": None if log is None else log.writers,
        "log_entries": None if log is None else log.entries,
    }
    verdict, found, remedy = _OK, "", ""
    if log is not None:
        verdict, found, remedy = _judged_log(log, foreign, workers)
    elif workers is not None and workers > 1:
        verdict, found, remedy = _PROBLEM, f"{workers} processes, and no log is named", _SHARE
    elif foreign and workers is None:
        verdict, found = _UNKNOWN, "how many processes these are cannot be told from outside"
        remedy = f"if several: {_SHARE}; say what you have: --workers N, --shared-log PATH"
    elif foreign is None and workers is None:
        verdict, found, remedy = _UNKNOWN, "0 readings of counters", _NAME_METRICS
    elif foreign is None:
        found = "1 process uses the engine, as --workers says"
    if foreign is not None:
        seen = f"{foreign:,} prompt tokens of others in {readings.quiet_s:g} s and between ours"
        found = f"{seen}; {found}" if found else seen
    if elsewhere and verdict is not _PROBLEM:
        counted = sum(one.counted.prompt_tokens for one in readings.sent if one.counted)
        verdict, remedy = _PROBLEM, _ONE_ENGINE
        found = f"the metrics have counted {counted:,} prompt tokens, less than were sent"
    return Finding("other processes", verdict, found, remedy, figures)


def _judged_log(
    log: LogWatch, foreign: int | None, workers: int | None
) -> tuple[Verdict, str, str]:
    share = _SHARE_IN_REDIS if log.is_in_redis else _SHARE
    if log.error is not None:
        failed, _, remedy = log.error.partition("; ")
        return _PROBLEM, failed, remedy or share
    found = f"{log.writers} planners wrote the latest of {log.entries:,} entries of the log"
    if log.unreadable:
        found = f"{log.unreadable:,} of the latest entries of the log cannot be read"
        return _PROBLEM, found, "use one version of ctxreuse in all processes that share a log"
    if log.secrets > 1:
        return _PROBLEM, f"{found}, with {log.secrets} secrets", _ONE_SECRET
    if foreign and not log.appended:
        return _PROBLEM, f"{found}, and nobody has written meanwhile", share
    if workers is not None and log.writers < workers:
        return _PROBLEM, f"{found}; {workers} processes should", share
    return _OK, found, ""


def _prefix_cache(readings: EngineReadings) -> Finding:
    check, again, is_on = "prefix cache", readings.again, readings.metrics.prefix_caching
    if is_on is False:
        return Finding(check, _PROBLEM, "enable_prefix_caching is False in /metrics", _SWITCH_ON)
    cached = again.cached
    if cached is None:
        if is_on:
            return Finding(check, _OK, "enable_prefix_caching is True in /metrics")
        found = "0 readings of what a prompt that came twice had cached"
        return Finding(check, _UNKNOWN, found, "see engine" if readings.error else "see usage")
    prompt = again.prompt_tokens or 0
    figures = {"prompt_tokens": prompt, "cached_tokens": cached}
    if readings.found(again):
        found = f"{cached:,} of {prompt:,} tokens cached of a prompt that came again"
        return Finding(check, _OK, found, figures=figures)
    found = f"{cached:,} tokens cached of a prompt that came again, about {prompt:,} expected"
    remedy = f"{_SWITCH_ON}; behind a router, name one engine"
    if readings.found_half(readings.half) or readings.found(readings.later):
        found, remedy = f"{found}, but some of a later one", _ONE_ENGINE
    elif cached:
        remedy = _ASK_ITSELF
    elif prompt < _HOSTED_MINIMUM:
        remedy = f"{_SWITCH_ON}; hosted APIs cache from 1,024 tokens on: --tokens {DEFAULT_TOKENS}"
    return Finding(check, _PROBLEM, found, remedy, figures)


def _usage(readings: EngineReadings) -> Finding:
    check, number = "usage", len(readings.sent)
    telling = sum(one.cached_tokens is not None for one in readings.sent)
    figures = {"answers": number, "telling": telling}
    found = f"{telling} of {number} answers say how many tokens were cached"
    if telling:
        return Finding(check, _OK, found, figures=figures)
    if readings.later is NOT_ASKED:
        return Finding(check, _UNKNOWN, found, "see engine", figures)
    hits = sum(one.counted.cached_tokens for one in readings.sent if one.counted)
    if hits:
        found += f", while /metrics have counted {hits:,}"
    elif any(one.counted for one in readings.sent):
        # many versions of vLLM leave the number out where it is 0
        remedy = f"switch the cache on first; then {_SHOW_DETAILS}"
        return Finding(check, _UNKNOWN, f"{found}; /metrics have counted 0", remedy, figures)
    return Finding(check, _PROBLEM, found, _SHOW_DETAILS, figures)


def _untrue(readings: EngineReadings) -> str:
    """Return which answer says more than a cache can hold of its prompt; "" if none does."""
    if odd := sum(one.is_odd for one in readings.sent):
        return (
            f"{odd} of {len(readings.sent)} answers have a count that cannot be right, such as "
            "more tokens cached than sent: it means nothing"
        )
    # the first is new, but for a chat template
    for one, bound in ((readings.first, _LONGEST_TEMPLATE), (readings.half, MOST_TOKENS)):
        most = min(bound, int(_TOO_MANY * readings.shares(one)))
        if most and (one.cached_tokens or 0) > most:
            said = f"{one.cached_tokens:,} of {one.prompt_tokens:,} tokens cached"
            return f"an answer says {said}, where {most:,} can be"
    for one in readings.sent:
        counted = one._replace(cached_tokens=None)
        if one.cached_tokens == 0 and readings.found_half(counted):
            said = f"0 of {one.prompt_tokens:,} tokens cached"
            return f"an answer says {said}, where /metrics have counted {counted.cached:,}"
    return ""


def _common_half(readings: EngineReadings) -> Finding:
    check, half, cached = "common half", readings.half, readings.half.cached
    if cached is None or half.prompt_tokens is None:
        remedy = "see engine" if readings.error else "see usage"
        return Finding(check, _UNKNOWN, "0 readings of two prompts with a common half", remedy)
    common = readings.shares(half)
    figures = {"common_tokens": common, "cached_tokens": cached}
    found = f"{cached:,} of about {common:,} common tokens cached of a prompt with another end"
    if readings.found_half(half):
        return Finding(check, _OK, found, figures=figures)
    remedy = "see prefix cache"
    if readings.third is not NOT_ASKED:
        figures["third_cached_tokens"] = readings.third.cached or 0
        remedy = _for_whole_prompts(readings, common)
        if readings.found_half(readings.third):
            found += f", and {readings.third.cached:,} of a third one"
            remedy = _ONE_ENGINE if _is_elsewhere(readings) else _for_states(readings)
    return Finding(check, _PROBLEM, found, remedy, figures)


def _for_whole_prompts(readings: EngineReadings, common: int) -> str:
    block = readings.metrics.block_size
    if block is not None and block > common:
        return (
            f"its blocks hold {block:,} tokens: --tokens {min(4 * block, MOST_TOKENS)}{_IF_IT_FITS}"
        )
    if 2 * common < _LONG:
        return f"the engine finds whole prompts or large blocks only: --tokens 10000{_IF_IT_FITS}"
    return (
        "the engine finds whole prompts only; if it reads at breakpoints (Anthropic, OpenAI), plan "
        "with ReusePlanner(cache='anthropic'), or 'openai'"
    )


def _for_states(readings: EngineReadings) -> str:
    block = readings.metrics.block_size
    size = "" if block is None else f",block_tokens={block}"
    return (
        "a common beginning is read from its third sight on, for the model keeps states: plan with "
        f"ReusePlanner(cache='vllm(states=junctions{size})'), batches with primes=True; for "
        "sliding windows, vLLM's --prefix-cache-retention-interval 64 lets each second sight "
        "read, and each prompt takes more of the cache; for recurrent layers (blocks of 528 "
        "tokens and more), some models take vLLM's --mamba-cache-mode all, others "
        "--enable-mamba-shared-prefix-checkpoint --prefix-match-unit 64"
    )


def _kept(readings: EngineReadings) -> Finding:
    check, before, after = "cached tokens stay", readings.again.cached, readings.later.cached
    if not before or after is None or not readings.found(readings.again):
        return Finding(check, _UNKNOWN, "0 readings of tokens that were cached", "see prefix cache")
    figures = {"cached_tokens": before, "still_cached_tokens": after, "quiet_s": readings.quiet_s}
    found = f"{after:,} of {before:,} tokens still cached {readings.quiet_s:g} s later"
    if after >= _NEARLY_ALL * before:
        return Finding(check, _OK, found, figures=figures)
    remedy = _ONE_ENGINE if _is_elsewhere(readings) else _PUSHED_OUT
    return Finding(check, _PROBLEM, found, remedy, figures)


def _foreign_tokens(readings: EngineReadings) -> int | None:
    """Return the prompt tokens that others have sent meanwhile; None if nothing was counted."""
    counted = [
        max(0, one.counted.prompt_tokens - one.prompt_tokens)
        for one in readings.sent
        if one.counted is not None and one.prompt_tokens is not None
    ]
    if readings.quiet is not None:
        counted.append(readings.quiet.prompt_tokens)
    return sum(counted) if counted else None


def _is_elsewhere(readings: EngineReadings) -> bool:
    """Return whether prompts were counted in part, so that other engines got some of them."""
    told = [
        (one.counted.prompt_tokens, one.prompt_tokens)
        for one in readings.sent
        if one.counted is not None and one.prompt_tokens
    ]
    if not readings.metrics.prefix_caching and not any(queries for queries, _ in told):
        return False
    return any(2 * queries < tokens for queries, tokens in told)
