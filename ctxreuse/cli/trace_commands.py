"""`ctxreuse record`, `plan`, `simulate` and `explain`: traces as files."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import MISSING, dataclass
from importlib.metadata import EntryPoint, entry_points
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

from ctxreuse.cache import CacheUsage
from ctxreuse.cli.recorded_program import ProgramEnd, run_program
from ctxreuse.cli.terminal import PrintsJson, only_one_from_standard_input, progress, put, say, show
from ctxreuse.context.checks import checked_choice
from ctxreuse.context.files import check_writable, file_errors
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InputFileError, InvalidRequestError, MissingExtraError, describe
from ctxreuse.measure.options import BESIDE_TRACE, CACHES, KEEP_BEST, option
from ctxreuse.measure.replay import simulate as simulation
from ctxreuse.measure.replay.explain_plan import explain_plan, explanation_json
from ctxreuse.measure.replay.hashed_trace import (
    BLOCK_TOKENS,
    USUAL_SIZES,
    hashed_requests,
    simulate_hashed,
)
from ctxreuse.measure.replay.plan_file import plan_under, planned_requests, read_plan
from ctxreuse.measure.replay.policies import MeasuredPolicy, TraceMode
from ctxreuse.measure.results.tables import explanation_output, size_output
from ctxreuse.measure.traces.json_lines import STANDARD_STREAM, JsonLine, read_lines, write_lines
from ctxreuse.measure.traces.recording import TraceRecorder, recording_anthropic
from ctxreuse.measure.traces.recording import recording as record_openai
from ctxreuse.measure.traces.trace_files import corpus_path, read_corpus, read_requests, trace_path
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.rules.cache_rules import cache_profile
from ctxreuse.sharing.environment import as_given

RECORDERS = "ctxreuse.recorders"  # the entry points of installed packages
Recording: TypeAlias = Callable[[TraceRecorder], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class RecordCommand:
    """Run a program as it is, and record what it retrieves or sends.

    Exit code 2 says that it recorded nothing.

    `ctxreuse record -o recording app.py --port 8000`, then `ctxreuse estimate recording`.
    """

    program: str = option("A Python script, or with --module a module.", argument=True)
    arguments: Sequence[str] = option(
        "The program's own arguments, behind its name.", (), argument=True
    )
    output: Path = option(
        "Folder for corpus, trace and whole prompts.", Path("recording"), "--output", "-o"
    )
    hash_only: bool = option("Store no text: token counts and salted hashes only.", False)
    source: Sequence[str] = option(
        "What to listen to: langchain (retrievers, vector stores), llamaindex (query engines, chat "
        "engines, retrievers), mem0, openai or anthropic (prompts of such clients, whose "
        "paragraphs count as blocks); several may be given. Without it, the first three.",
        (),
    )
    module: bool = option("As in python -m.", False, "--module", "-m")

    def run(self) -> None:
        """Run the program."""
        with file_errors(self.program, "read"):
            if not (self.module or Path(self.program).is_file()):
                raise InputFileError(
                    f"{self.program}: there is no such script; for a module give --module"
                )
        recordings = list(_recordings(self.source))
        if not recordings:
            raise MissingExtraError("recording a program", "langchain")
        process = os.getpid()
        with TraceRecorder(self.output, hash_only=self.hash_only) as recorder, ExitStack() as exits:
            for recording in recordings:
                exits.enter_context(recording(recorder))
            error = run_program(self.program, self.arguments, is_module=self.module)
        if os.getpid() == process:  # a child that the program has forked says nothing
            self._say_what_was_recorded(recorder, error)
        raise ProgramEnd(error)

    def _say_what_was_recorded(self, recorder: TraceRecorder, error: BaseException) -> None:
        if recorder.faults:
            say(f"{recorder.faults} lines could not be recorded; see the log")
        if recorder.requests:
            say(f"recorded in {self.output}: {recorder.summary()}")
            return say(f"next: ctxreuse estimate {shlex.quote(str(self.output))}")
        nothing = f"{describe(self.program)}: nothing was recorded"
        if recorder.faults:
            nothing += ", because nothing could be; see the log"
        elif isinstance(error, SystemExit):
            nothing += (
                ", so nothing is written; let the program answer some questions in this process, "
                "for child processes are not seen: have it run one worker; --source openai or "
                "anthropic reads what such clients send, and without --source, what is retrieved "
                "is recorded; TraceRecorder records from code"
            )
        else:
            nothing += (
                f", so nothing is written; the program ended with {type(error).__name__} before it "
                "retrieved anything"
            )
        if isinstance(error, SystemExit) and not error.code:
            raise InputFileError(nothing)
        return say(nothing)


def registered() -> dict[str, EntryPoint]:
    """Return the entry points by name, sorted."""
    return {one.name: one for one in sorted(entry_points(group=RECORDERS))}


def installed(entry: EntryPoint) -> Recording | None:
    """Load an entry point; None where its framework is missing, and not broken."""
    try:
        loaded: Recording = entry.load()
    except MissingExtraError as error:  # each integration says so itself
        if isinstance(error.__cause__, ModuleNotFoundError):
            return None
        raise
    return loaded


# the sources that read blocks from what clients send; the others see what is retrieved
PROMPTS: dict[str, Recording] = {"openai": record_openai, "anthropic": recording_anthropic}


def _recordings(sources: Sequence[str]) -> Iterator[Recording]:
    frameworks = registered()
    for source in sources or frameworks:
        checked_choice("source", source, [*frameworks, *PROMPTS])
        recording = PROMPTS.get(source) or installed(frameworks[source])
        if recording is not None:
            yield recording
        elif sources:
            raise MissingExtraError(f"recording from {source}", source)


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plan the requests of a trace: one JSON line a request, in execution order."""

    trace: str = option(
        "A recording, or retrievals in arrival order: a JSON object a line with request_id, query, "
        "blocks, or a TREC run; '-' reads standard input.",
        MISSING,
        "--trace",
        argument=True,
    )
    corpus: str | None = option(BESIDE_TRACE, None)
    mode: TraceMode = option(
        "online: one request after the other; offline: all as one batch.", "online"
    )
    strategy: Strategy = option(
        "reuse: this package's order; paper: ContextPilot's; none: as it is.", "reuse"
    )
    dedup: bool = option(
        "Replay each conversation, answering 'OK.', and leave out what it shows already.", False
    )
    capacity_tokens: int | None = option(
        "Tokens that the engine's cache holds, if it is known.", None, min=0
    )
    cache: str = option(
        f"{CACHES} If prefixes end at breakpoints, each line has their places in 'marks'.", "vllm"
    )
    keep_best: bool = option(KEEP_BEST, False)
    output: str = option("Where to write; '-' is standard output.", "-", "--output", "-o")

    def run(self) -> None:
        """Write the plan."""
        only_one_from_standard_input(self.trace, self.corpus or "")
        if self.keep_best and self.strategy != "reuse":
            raise InvalidRequestError(
                f"--keep-best is of --strategy reuse; leave it out with --strategy {self.strategy}"
            )
        check_writable(None if self.output == STANDARD_STREAM else self.output)
        _, requests = read_requests(self.trace, self.corpus)
        planner = as_given(
            ReusePlanner,
            capacity_tokens=self.capacity_tokens,
            cache=self.cache,
            keep_best=self.keep_best,
        )
        with progress("planning", len(requests)) as advance:
            policy = MeasuredPolicy(self.strategy, self.strategy, self.mode)
            planned = plan_under(
                policy, requests, planner, conversations=self.dedup, advance=advance
            )
        write_lines(self.output, (request.as_json() for request in planned))


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(PrintsJson):
    """Show the hit ratio that an engine with a prefix cache would reach on a plan or a trace.

    With several cache sizes, and for a trace in Mooncake's format, it shows the ratio of all
    requests and of the second half of them, which meets a cache that is in use.
    """

    plan: str = option(
        "What `ctxreuse plan` wrote, a recording as it was retrieved, or a trace in Mooncake's "
        "format, which is known by its field hash_ids (and has timestamp, input_length, "
        "output_length); '-' reads standard input.",
        MISSING,
        "--plan",
        argument=True,
    )
    corpus: str | None = option(f"{BESIDE_TRACE} Mooncake's format has none.", None)
    capacity_tokens: Sequence[int] = option(
        "Tokens that the cache holds; several may be given. Without it, unlimited, and for a trace "
        "in Mooncake's format sizes from 16,000 upwards, too.",
        (),
        min=0,
    )
    block_size: int | None = option(
        "Tokens of an engine block: 16 with --tokenizer, 512 for a trace in Mooncake's format; "
        "elsewhere without effect.",
        None,
        min=1,
    )
    cache: str = option(
        "An engine's cache: vllm, sglang, or 'vllm(states=junctions)' for models with sliding "
        "windows, with block_tokens=528 or so for recurrent ones.",
        "vllm",
    )
    tokenizer: Path | None = option(
        "A tokenizer.json: simulate whole prompts token by token. Without it, each block counts as "
        "its tokens, and questions and annotations as none.",
        None,
    )

    def run(self) -> None:
        """Show the hit ratio."""
        only_one_from_standard_input(self.plan, self.corpus or "")
        lines = read_lines(str(trace_path(self.plan)))
        first = list(islice(lines, 1))
        has_hashes = any("hash_ids" in one.fields and "blocks" not in one.fields for one in first)
        results = (self._served_hashed if has_hashes else self._served)(chain(first, lines))
        if not self.as_json:
            return show(size_output(results))
        sizes = [{"capacity_tokens": one.capacity_tokens, **_figures(one.total)} for one in results]
        told = {"requests": len(results[0].usages), "level": "token" if self.tokenizer else "block"}
        if not has_hashes and len(results) == 1:
            return put(json.dumps(told | sizes[0]))
        for size, one in zip(sizes, results, strict=True):
            size["second_half"] = _figures(one.second_half)
        return put(json.dumps(told | {"sizes": sizes}))

    def _served(self, lines: Iterator[JsonLine]) -> list[simulation.SizeResult]:
        planned = list(planned_requests(lines))
        blocks = read_corpus(self.corpus or corpus_path(self.plan))
        encoder = None if self.tokenizer is None else simulation.load_tokenizer(str(self.tokenizer))
        sizes: Sequence[int | None] = self.capacity_tokens or [None]
        rules = cache_profile(self.cache)
        if rules.lives:
            raise InvalidRequestError(
                f"--cache {rules.name!r} is a provider's; ctxreuse estimate --cache shows its bill"
            )
        with progress("simulating", len(planned) * len(sizes)) as advance:
            replay = simulation.Replay((), blocks, encoder, advance, rules)
            return [
                simulation.SizeResult(
                    size, replay.served(planned, size, self.block_size, counts_words=False)
                )
                for size in sizes
            ]

    def _served_hashed(self, lines: Iterator[JsonLine]) -> list[simulation.SizeResult]:
        for name, value in (("--corpus", self.corpus), ("--tokenizer", self.tokenizer)):
            if value is not None:
                raise InputFileError(
                    f"{self.plan}: a trace in Mooncake's format has no texts; leave out {name}"
                )
        block_tokens = self.block_size or BLOCK_TOKENS
        requests = hashed_requests(lines, block_tokens)
        tried = self.capacity_tokens or USUAL_SIZES
        with progress("simulating", len(requests) * len(tried)) as advance:
            return simulate_hashed(requests, tried, block_tokens, advance)


def _figures(usage: CacheUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "prefilled_tokens": usage.prefilled_tokens,
        "hit_ratio": round(usage.hit_ratio, 6),
    }


@dataclass(frozen=True, kw_only=True)
class ExplainCommand:
    """Say why requests hit or miss the prefix cache.

    Each request is compared with those before it: the closest earlier prompt, the block at which
    they part, the tokens that are computed again, and the cause.

    With --json, each cause also has a reason in the terms of providers' diagnostics: model, key,
    tools, system, messages, compacted, expired, below the minimum, never written.
    """

    plan: str = option(
        "What `ctxreuse plan` wrote, or a recording, whose requests are then explained as they "
        "were sent; '-' reads standard input.",
        MISSING,
        "--plan",
        argument=True,
    )
    corpus: str | None = option(BESIDE_TRACE, None)
    request: str | None = option("Explain this request only, in words; its request_id.", None)
    worst: int = option("Number of requests to list, those that lost most.", 10, min=0)
    cache: str = option(CACHES, "vllm")
    as_json: bool = option("Print a JSON object a request instead.", False, "--json")

    def run(self) -> None:
        """Show why."""
        only_one_from_standard_input(self.plan, self.corpus or "")
        profile = cache_profile(self.cache)
        path = str(trace_path(self.plan))
        planned = read_plan(path)
        blocks = read_corpus(self.corpus or corpus_path(path))
        wanted = self.request
        if wanted is not None and wanted not in {str(one.request_id) for one in planned}:
            raise InputFileError(
                f"{self.plan}: there is no request {wanted!r}; see its request_id fields"
            )
        with progress("comparing", len(planned)) as advance:
            every = explain_plan(planned, blocks, cache=profile)
            explained = list(simulation.counted(every, advance))
        if wanted is None and not self.as_json:
            return show(explanation_output(explained, self.worst))
        for one in explained:
            if wanted in (None, str(one.request_id)):
                words = f"{well_formed(str(one.request_id))}: {one.cause}\n{one.words}".rstrip()
                put(json.dumps(explanation_json(one)) if self.as_json else words)
        return None
