"""`ctxreuse record`, `plan`, `simulate`, `export` and `explain`: traces as files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from ctxreuse.cache import BlockLevelCache, CacheUsage, PrefixCacheSimulator
from ctxreuse.cli.recorded_program import (
    ProgramCrashError,
    Terminated,
    ending_at_sigterm,
    run_program,
)
from ctxreuse.cli.terminal import (
    CACHE_HELP,
    AsJson,
    CacheName,
    CorpusPath,
    KeepBest,
    check_outputs,
    only_one_from_standard_input,
    progress,
    put,
    say,
    show,
)
from ctxreuse.context.cache_profile import cache_profile
from ctxreuse.context.checks import checked_choice
from ctxreuse.context.files import file_errors
from ctxreuse.errors import (
    CtxreuseError,
    InputFileError,
    InvalidRequestError,
    MissingExtraError,
    describe,
)
from ctxreuse.measure.plugins import (
    RECORDERS,
    NotInstalledError,
    naming_what_is_missing,
    registered,
)
from ctxreuse.measure.replay import simulate as simulation
from ctxreuse.measure.replay.explain_plan import (
    explain_plan,
    explanation_json,
    in_words,
    read_reported,
)
from ctxreuse.measure.replay.hashed_trace import (
    BLOCK_TOKENS,
    SLOWEST,
    USUAL_SIZES,
    hashed_plan,
    hashed_requests,
    is_hashed,
    simulate_hashed,
)
from ctxreuse.measure.replay.plan_file import planned_requests, read_plan
from ctxreuse.measure.replay.plan_trace import plan_trace
from ctxreuse.measure.replay.policies import TraceMode
from ctxreuse.measure.results.tables import explanation_output, size_output
from ctxreuse.measure.traces.json_lines import STANDARD_STREAM, JsonLine, read_lines, write_lines
from ctxreuse.measure.traces.recording import TraceRecorder, recording_anthropic
from ctxreuse.measure.traces.recording import recording as record_openai
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace
from ctxreuse.planner import ReusePlanner, Strategy


def record(
    program: Annotated[str, typer.Argument(help="A Python script, or with --module a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the program is given; behind its name.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for corpus.jsonl and trace.jsonl.")
    ] = Path("recording"),
    hash_only: Annotated[
        bool,
        typer.Option("--hash-only", help="Store no text: token counts and salted hashes only."),
    ] = False,
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="What to listen to: langchain (retrievers, vector stores), llamaindex (query "
            "engines, chat engines, retrievers), openai or anthropic (prompts of such clients, "
            "whose paragraphs count as blocks); several may be given. Without it, langchain and "
            "llamaindex."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="As in python -m.")] = False,
) -> None:
    """Run a program as it is, and record what it retrieves or sends.

    Says what it saw; ends with exit code 2 if that was nothing.

    `ctxreuse record -o recording app.py --port 8000`, then `ctxreuse estimate recording`.
    """
    if not module:
        with file_errors(program, "read"):
            is_file = Path(program).is_file()
        if not is_file:
            raise InputFileError(f"{program}: there is no such script; for a module give --module")
    recordings = [_recording(name) for name in source or ()] or list(_installed_frameworks())
    if not recordings:
        raise MissingExtraError("recording a program", "langchain")
    try:
        with (
            ending_at_sigterm(),
            TraceRecorder(output, hash_only=hash_only) as recorder,
            _saying_what_was_recorded(program, output, recorder, source or ()),
            ExitStack() as exits,
        ):
            for recording in recordings:
                exits.enter_context(recording(recorder))
            run_program(program, arguments or [], is_module=module)
    except ProgramCrashError as crash:
        crash.show()
        raise typer.Exit(1) from None
    if not recorder.requests:
        raise InputFileError(_nothing_recorded(program, recorder, source or ()))


@contextmanager
def _saying_what_was_recorded(
    program: str, output: Path, recorder: TraceRecorder, sources: Sequence[str]
) -> Iterator[None]:
    """Say at the end what was recorded, however the program ends."""
    try:
        yield
    except BaseException as end:
        if recorder.requests or not isinstance(end, SystemExit) or end.code:
            if not recorder.requests and not isinstance(end, CtxreuseError):
                say(f"ctxreuse: {_nothing_recorded(program, recorder, sources, end)}")
            raise
    finally:
        if recorder.requests:
            say(f"ctxreuse: recorded in {output}: {recorder.summary()}")
            say(f"ctxreuse: next: ctxreuse estimate {shlex.quote(str(output))}")
        else:
            recorder.discard()  # an empty recording would stand in the next one's way
        if recorder.faults:
            say(f"ctxreuse: {recorder.faults} requests could not be recorded; see the log")


def _nothing_recorded(
    program: str,
    recorder: TraceRecorder,
    sources: Sequence[str],
    end: BaseException | None = None,
) -> str:
    """Return what to do where nothing of a program was recorded, which may have ended early."""
    if recorder.faults:
        return f"{describe(program)}: nothing was recorded, because nothing could be; see the log"
    ended = {ProgramCrashError: str(end), Terminated: "SIGTERM ended the program"}.get(type(end))
    if ended is not None:
        return (
            f"{describe(program)}: nothing was recorded, so nothing is written; {ended} before it "
            "retrieved anything"
        )
    remedy = (
        "--source openai reads the prompts that OpenAI clients send, --source anthropic those of "
        "Anthropic's"
    )
    if PROMPTS.keys() & set(sources):
        remedy = "without --source, it listens to retrievers, vector stores and chat engines"
    return (
        f"{describe(program)}: nothing was recorded, so nothing is written; let the program answer "
        f"some questions; {remedy}; TraceRecorder records from code"
    )


def plan(
    trace: Annotated[
        str,
        typer.Option(
            "--trace",
            help="Retrievals in arrival order: a JSON object a line with request_id, query, "
            "blocks; '-' reads standard input.",
        ),
    ],
    corpus: CorpusPath,
    mode: Annotated[
        TraceMode,
        typer.Option(help="online: one request after the other; offline: all as one batch."),
    ],
    strategy: Annotated[
        Strategy,
        typer.Option(help="reuse: this package's order; paper: ContextPilot's; none: as it is."),
    ] = "reuse",
    dedup: Annotated[
        bool,
        typer.Option(
            "--dedup",
            help="Replay each conversation, answering 'OK.', and leave out what it shows already.",
        ),
    ] = False,
    capacity_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that the engine's cache holds, if it is known."),
    ] = None,
    cache: Annotated[
        str,
        typer.Option(
            help=f"{CACHE_HELP} Where it keeps marked prefixes only, each line has 'marks'."
        ),
    ] = "vllm",
    keep_best: KeepBest = False,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where to write; '-' is standard output.")
    ] = STANDARD_STREAM,
) -> None:
    """Plan the requests of a trace: one JSON line a request, in execution order."""
    only_one_from_standard_input(trace, corpus)
    if keep_best and strategy != "reuse":
        raise InvalidRequestError(
            f"--keep-best is of the strategy reuse; leave it out with --strategy {strategy}"
        )
    _check_output(output)
    blocks = read_corpus(corpus)
    requests = read_trace(trace, blocks)
    planner = ReusePlanner(capacity_tokens=capacity_tokens, cache=cache, keep_best=keep_best)
    with progress("planning", len(requests)) as advance:
        planned = plan_trace(
            requests, planner, mode, strategy, conversations=dedup, advance=advance
        )
    write_lines(output, (request.as_json() for request in planned))


def simulate(
    plan: Annotated[
        str,
        typer.Option(
            "--plan",
            help="What `ctxreuse plan` wrote, or a trace in Mooncake's format, which is known by "
            "its field hash_ids (and has timestamp, input_length, output_length); '-' reads "
            "standard input.",
        ),
    ],
    corpus: Annotated[
        str | None,
        typer.Option(
            "--corpus",
            help="The plan's blocks: a JSON object a line with id, text, tokens (optional). A "
            "trace in Mooncake's format has none.",
        ),
    ] = None,
    capacity_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Tokens that the cache holds; several may be given. Without it, unlimited, and "
            "for a trace in Mooncake's format sizes from 16,000 upwards, too.",
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of an engine block: 16 with --tokenizer, 512 for a trace in Mooncake's "
            "format; elsewhere without effect.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json: simulate whole prompts token by token. Without it, each block "
            "counts as its tokens, and questions and annotations as none."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the hit ratio that an engine with a prefix cache would reach on a plan or a trace.

    With several cache sizes, and for a trace in Mooncake's format, it shows the ratio of all
    requests and of the second half of them, which meets a cache that is in use.
    """
    only_one_from_standard_input(plan, corpus or "")
    lines = read_lines(plan)
    first = next(lines, None)
    lines = chain(() if first is None else (first,), lines)
    if first is not None and is_hashed(first):
        _simulate_hashed(lines, plan, corpus, capacity_tokens, block_size, tokenizer, as_json)
        return
    if corpus is None:
        raise InputFileError(f"{plan}: a plan needs its blocks; give --corpus")
    blocks = read_corpus(corpus)
    planned = planned_requests(lines)
    encoder = None if tokenizer is None else simulation.load_tokenizer(str(tokenizer))
    results = []
    sizes: Sequence[int | None] = capacity_tokens or [None]
    with progress("simulating", len(planned) * len(sizes)) as advance:
        for size in sizes:
            if encoder is None:
                usages = simulation.simulate_blocks(planned, blocks, BlockLevelCache(size))
            else:
                cache = PrefixCacheSimulator(size, block_size or 16)
                usages = simulation.simulate_tokens(planned, blocks, cache, encoder)
            results.append(simulation.SizeResult.of(size, usages, advance))
    level = "block" if tokenizer is None else "token"
    if len(results) == 1:
        _put_figures(results[0], level, as_json)
    else:
        _put_sizes(results, level, as_json)


def _simulate_hashed(
    lines: Iterator[JsonLine],
    path: str,
    corpus: str | None,
    sizes: Sequence[int] | None,
    block_size: int | None,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    for name, value in (("--corpus", corpus), ("--tokenizer", tokenizer)):
        if value is not None:
            raise InputFileError(
                f"{path}: a trace in Mooncake's format has no texts; leave out {name}"
            )
    block_tokens = block_size or BLOCK_TOKENS
    requests = hashed_requests(lines, block_tokens)
    tried = sizes or USUAL_SIZES
    with progress("simulating", len(requests) * len(tried)) as advance:
        results = simulate_hashed(requests, tried, block_tokens, advance)
    _put_sizes(results, "block", as_json)


def _figures(usage: CacheUsage) -> dict[str, int | float | str | None]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "prefilled_tokens": usage.prefilled_tokens,
        "hit_ratio": round(usage.hit_ratio, 6),
    }


def _put_figures(result: simulation.SizeResult, level: str, as_json: bool) -> None:
    figures = {
        "requests": len(result.usages),
        **_figures(result.total),
        "capacity_tokens": result.capacity_tokens,
        "level": level,
    }
    if as_json:
        put(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        put(f" {name.replace('_', ' '):<18}{'unlimited' if value is None else shown:<9} ")


def _put_sizes(results: Sequence[simulation.SizeResult], level: str, as_json: bool) -> None:
    if as_json:
        sizes = [
            {
                "capacity_tokens": one.capacity_tokens,
                **_figures(one.total),
                "second_half": _figures(one.second_half),
            }
            for one in results
        ]
        put(json.dumps({"requests": len(results[0].usages), "level": level, "sizes": sizes}))
    else:
        show(size_output(results))


def export(
    plan: Annotated[
        str,
        typer.Option(
            "--plan",
            help="What `ctxreuse plan` wrote, or a trace, whose requests are then written as "
            "retrieved; '-' reads standard input.",
        ),
    ],
    corpus: CorpusPath,
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a block, each of which has an id.")
    ] = BLOCK_TOKENS,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json: write whole prompts, token by token. Without it, each block "
            "counts as its tokens, and questions and annotations as none."
        ),
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option(min=0, help="The output_length of every request.")
    ] = 1,
    requests_per_second: Annotated[
        float | None,
        typer.Option(
            min=SLOWEST,
            help="How many requests arrive in a second. Without it, they arrive at the timestamp "
            "(milliseconds) that the trace has, or one a second.",
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where to write; '-' is standard output.")
    ] = STANDARD_STREAM,
) -> None:
    """Write a plan as a trace in Mooncake's format, which other tools replay.

    Each line is a request in execution order: timestamp, input_length, output_length, hash_ids. An
    id stands for a block of 512 tokens and everything before it.
    """
    only_one_from_standard_input(plan, corpus)
    _check_output(output)
    blocks = read_corpus(corpus)
    planned = read_plan(plan)
    encoder = None if tokenizer is None else simulation.load_tokenizer(str(tokenizer))
    requests = hashed_plan(
        planned,
        blocks,
        encoder,
        block_tokens=block_tokens,
        answer_tokens=answer_tokens,
        requests_per_second=requests_per_second,
    )
    with progress("writing", len(planned)) as advance:
        lines = []
        for one in requests:
            lines.append(one.as_json())
            advance()
    write_lines(output, lines)


def _check_output(path: str) -> None:
    """Check, before long work, that it could be written."""
    check_outputs(None if path == STANDARD_STREAM else path)


def explain(
    plan: Annotated[
        str,
        typer.Option(
            "--plan",
            help="What `ctxreuse plan` wrote, or a recorded trace, whose requests are then "
            "explained as they were sent; '-' reads standard input.",
        ),
    ],
    corpus: CorpusPath,
    request: Annotated[
        str | None, typer.Option(help="Explain this request only, in words; its request_id.")
    ] = None,
    worst: Annotated[
        int, typer.Option(min=0, help="Number of requests to list, those that lost most.")
    ] = 10,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json: also say at which token of the prompt two part."),
    ] = None,
    cache: CacheName = None,
    answers: Annotated[
        str | None,
        typer.Option(
            help="What the provider says: JSON lines with request_id and the answer's "
            "prompt_cache_diagnostics (OpenAI) or diagnostics (Anthropic); `ctxreuse record` "
            "writes them as answers.jsonl."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a request instead.")
    ] = False,
) -> None:
    """Say why requests hit or miss the prefix cache.

    Each request is compared with those before it: the closest earlier prompt, the block at which
    they part, the tokens that are computed again, and the cause.

    With --cache or --answers each cause has a reason in the words that providers' diagnostics are
    told in, too: model, key, tools, system, messages, compacted, expired, below the minimum, never
    written. With --answers the provider's own reason stands beside it, and whether the two agree.
    """
    only_one_from_standard_input(plan, corpus, *filter(None, [answers]))
    profile = cache_profile(cache or "vllm")
    reported = None if answers is None else read_reported(answers)
    blocks = read_corpus(corpus)
    planned = read_plan(plan)
    if request is not None and request not in {str(one.request_id) for one in planned}:
        raise InputFileError(f"{plan}: there is no request {request!r}; see its request_id fields")
    encoder = None if tokenizer is None else simulation.load_tokenizer(str(tokenizer))
    with progress("comparing", len(planned)) as advance:
        explained = []
        for one in explain_plan(planned, blocks, encoder, cache=profile, reported=reported):
            explained.append(one)
            advance()
    if request is not None:
        explained = [one for one in explained if str(one.explanation.request_id) == request]
    with_reason = cache is not None or answers is not None
    if as_json:
        for one in explained:
            put(json.dumps(explanation_json(one, with_reason=with_reason)))
    elif request is not None:
        for one in explained:
            put(in_words(one))
    else:
        show(explanation_output(explained, worst, with_reason=with_reason))


_Recording: TypeAlias = Callable[[TraceRecorder], AbstractContextManager[object]]

PROMPTS: dict[str, _Recording] = {"openai": record_openai, "anthropic": recording_anthropic}
"""The sources that read blocks from what clients send; the others see what is retrieved."""


def _recording(source: str) -> _Recording:
    frameworks = registered(RECORDERS)
    checked_choice("source", source, [*frameworks, *PROMPTS])
    if source in PROMPTS:
        return PROMPTS[source]
    try:
        with naming_what_is_missing():
            recording: _Recording = frameworks[source].load()
            return recording
    except NotInstalledError as error:
        raise MissingExtraError(f"recording from {source}", source) from error


def _installed_frameworks() -> Iterator[_Recording]:
    for entry in registered(RECORDERS).values():
        with suppress(NotInstalledError), naming_what_is_missing():
            yield entry.load()
