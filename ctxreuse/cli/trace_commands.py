"""`ctxreuse record`, `plan`, `simulate` and `explain`: traces as files."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, TypeAlias

import typer

from ctxreuse.cache import BlockLevelCache, PrefixCacheSimulator
from ctxreuse.cli.terminal import (
    AsJson,
    CorpusPath,
    PlanPath,
    only_one_from_standard_input,
    progress,
    put,
    say,
    show,
)
from ctxreuse.context.checks import checked_choice
from ctxreuse.context.files import file_errors
from ctxreuse.errors import InputFileError, MissingExtraError, describe
from ctxreuse.evaluation.plugins import (
    RECORDERS,
    NotInstalledError,
    naming_what_is_missing,
    registered,
)
from ctxreuse.evaluation.replay import simulate as simulation
from ctxreuse.evaluation.replay.explain_plan import explain_plan, explanation_json, in_words
from ctxreuse.evaluation.replay.plan_file import read_plan
from ctxreuse.evaluation.replay.plan_trace import plan_trace
from ctxreuse.evaluation.replay.policies import TraceMode
from ctxreuse.evaluation.results.tables import explanation_output
from ctxreuse.evaluation.traces.json_lines import STANDARD_STREAM, write_lines
from ctxreuse.evaluation.traces.recording import TraceRecorder
from ctxreuse.evaluation.traces.recording import recording as record_openai
from ctxreuse.evaluation.traces.trace_files import read_corpus, read_trace
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
            help="What to listen to: langchain, llamaindex (their retrievers) or openai (reads "
            "paragraphs of prompts as blocks); several may be given. Without it, all retrievers."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="As in python -m.")] = False,
) -> None:
    """Run a program as it is, and record what it retrieves or sends.

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
    with TraceRecorder(output, hash_only=hash_only) as recorder:
        try:
            _run_recorded(program, arguments or [], recorder, recordings, module)
        finally:
            if recorder.requests:
                say(f"ctxreuse: {recorder.requests} requests recorded in {output}")
            else:
                recorder.discard()  # an empty recording would stand in the next one's way
                if not recorder.faults:
                    say("ctxreuse: nothing was retrieved, so nothing is written; see --source")
            if recorder.faults:
                say(f"ctxreuse: {recorder.faults} requests could not be recorded; see the log")


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
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where to write; '-' is standard output.")
    ] = STANDARD_STREAM,
) -> None:
    """Plan the requests of a trace: one JSON line a request, in execution order."""
    only_one_from_standard_input(trace, corpus)
    blocks = read_corpus(corpus)
    requests = read_trace(trace, blocks)
    planner = ReusePlanner(capacity_tokens=capacity_tokens)
    with progress("planning", len(requests)) as advance:
        planned = plan_trace(
            requests, planner, mode, strategy, conversations=dedup, advance=advance
        )
    write_lines(output, (request.as_json() for request in planned))


def simulate(
    plan: PlanPath,
    corpus: CorpusPath,
    capacity_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that the cache holds; unlimited if not given."),
    ] = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of an engine block; only with --tokenizer.")
    ] = 16,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json: simulate whole prompts token by token. Without it, each block "
            "counts as its tokens, and questions and annotations as none."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the hit ratio that an engine with a prefix cache would reach on a plan."""
    only_one_from_standard_input(plan, corpus)
    blocks = read_corpus(corpus)
    planned = read_plan(plan)
    if tokenizer is None:
        usages = simulation.simulate_blocks(planned, blocks, BlockLevelCache(capacity_tokens))
    else:
        usages = simulation.simulate_tokens(
            planned,
            blocks,
            PrefixCacheSimulator(capacity_tokens, block_size),
            simulation.load_tokenizer(str(tokenizer)),
        )
    with progress("simulating", len(planned)) as advance:
        total = simulation.total_usage(usages, advance)
    figures: dict[str, int | float | str | None] = {
        "requests": len(planned),
        "prompt_tokens": total.prompt_tokens,
        "cached_tokens": total.cached_tokens,
        "prefilled_tokens": total.prefilled_tokens,
        "hit_ratio": round(total.hit_ratio, 6),
        "capacity_tokens": capacity_tokens,
        "level": "block" if tokenizer is None else "token",
    }
    if as_json:
        put(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        put(f" {name.replace('_', ' '):<18}{'unlimited' if value is None else shown:<9} ")


def explain(
    plan: PlanPath,
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a request instead.")
    ] = False,
) -> None:
    """Say why requests hit or miss the prefix cache.

    Each request is compared with those before it: the closest earlier prompt, the block at which
    they part, the tokens that are computed again, and the cause.
    """
    only_one_from_standard_input(plan, corpus)
    blocks = read_corpus(corpus)
    planned = read_plan(plan)
    if request is not None and request not in {str(one.request_id) for one in planned}:
        raise InputFileError(f"{plan}: there is no request {request!r}; see its request_id fields")
    encoder = None if tokenizer is None else simulation.load_tokenizer(str(tokenizer))
    with progress("comparing", len(planned)) as advance:
        explained = []
        for one in explain_plan(planned, blocks, encoder):
            explained.append(one)
            advance()
    if request is not None:
        explained = [one for one in explained if str(one.explanation.request_id) == request]
    if as_json:
        for one in explained:
            put(json.dumps(explanation_json(one)))
    elif request is not None:
        for one in explained:
            put(in_words(one))
    else:
        show(explanation_output(explained, worst))


_Recording: TypeAlias = Callable[[TraceRecorder], AbstractContextManager[object]]

PROMPTS = "openai"
"""The source that reads blocks from what OpenAI clients send; the others see what is retrieved."""


def _run_recorded(
    program: str,
    arguments: Sequence[str],
    recorder: TraceRecorder,
    recordings: Sequence[_Recording],
    is_module: bool,
) -> None:
    """Run a program as `python` would, in this process."""
    before, path = sys.argv, list(sys.path)
    with ExitStack() as exits:
        for recording in recordings:
            exits.enter_context(recording(recorder))
        try:
            sys.argv = [program, *arguments]
            if is_module:
                sys.path.insert(0, "")
                _check_module(program)
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(program).resolve().parent))
                runpy.run_path(program, run_name="__main__")
        except IndexError as error:
            # runpy puts the first argument back, and the program may have taken all away
            if sys.argv or _last_module(error) != runpy.__name__:
                raise
            if error.__context__ is not None:
                raise error.__context__ from None
        finally:
            sys.argv, sys.path[:] = before, path


def _check_module(name: str) -> None:
    """Check that there is a module to run; `runpy` raises what a program might raise, too.

    Raises:
        InputFileError: There is none.
    """
    try:
        found = find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = find_spec(f"{name}.__main__")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        reason = describe(str(error))
        raise InputFileError(f"{describe(name)}: cannot be found as a module: {reason}") from error
    if found is None:
        raise InputFileError(
            f"{describe(name)}: there is no such module to run; name it as for python -m, or a "
            "script without --module"
        )


def _last_module(error: BaseException) -> str | None:
    """Return the name of the module in which an error was raised."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__")


def _recording(source: str) -> _Recording:
    frameworks = registered(RECORDERS)
    checked_choice("source", source, [*frameworks, PROMPTS])
    if source == PROMPTS:
        return record_openai
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
