"""`ctxreuse estimate`, `report` and `bench`: what ordering saves."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer

from ctxreuse.cli.bill_options import CacheSpec, PricesGiven, prices_given
from ctxreuse.cli.quality_part import (
    ANSWER_TOKENS,
    AnnotationTemplates,
    AnswersPath,
    ArmNames,
    BenchPart,
    Concurrency,
    Hours,
    MainQuestions,
    OtherQuestions,
    Precision,
    QuestionSets,
    SystemText,
    bench_quality,
    check_parts,
)
from ctxreuse.cli.terminal import (
    AsJson,
    HtmlPath,
    KeepBest,
    check_outputs,
    progress,
    put,
    say,
    show,
)
from ctxreuse.context.cache_profile import cache_profile
from ctxreuse.context.files import file_errors, make_folder
from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.replay.run_result import Part
from ctxreuse.measure.report import write_pictures, write_report
from ctxreuse.measure.results.results_file import Results, measure_savings
from ctxreuse.measure.results.tables import (
    bench_json,
    bench_output,
    comparison,
    estimate_json,
    estimate_output,
)

_STOPPED = 130
"""The exit code of what Ctrl-C ends."""

PrefillRate = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Prompt tokens that your engine computes in a second, for the time saved; without "
        "it, 10,000, about a model of 8 billion parameters on one H100.",
    ),
]


def estimate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A folder that `ctxreuse record` wrote, or a trace: a JSON object a line with "
            "request_id, query, blocks."
        ),
    ],
    corpus: Annotated[
        str | None,
        typer.Option("--corpus", help="Its blocks; corpus.jsonl beside the trace if not given."),
    ] = None,
    capacity_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Tokens that the engine's cache holds; several may be given. Without it, some "
            "sizes that suit the trace.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json: count whole prompts token by token. Without it, each block "
            "counts as its tokens, the words that ctxreuse adds as about as many as they have, and "
            "questions as none."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Worker processes that use one engine (uvicorn --workers 8): also measure what "
            "they reach together, without a log of what they have sent and with a shared one. "
            "Requests go to them in turn, conversations to one each; with a log each knows of a "
            "request once as many others have come as there are workers.",
        ),
    ] = None,
    prefill_rate: PrefillRate = None,
    cache: CacheSpec = "vllm",
    prices: PricesGiven = None,
    independent: Annotated[
        bool,
        typer.Option("--independent", help="Take turns of conversations as independent requests."),
    ] = False,
    keep_best: KeepBest = False,
    html: HtmlPath = None,
    results: Annotated[
        str | None, typer.Option(help="Write what a report shows, as JSON, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what ordering would save of a trace: as retrieved, papers' orders, ctxreuse.

    Conversations are replayed, each turn answered "OK.", with and without de-duplication; an
    unlimited cache and smaller ones.

    `ctxreuse estimate recording --workers 8` also says what eight processes on one engine reach:
    without a shared log they may compute more than as retrieved, with it about what one does.

    `ctxreuse estimate recording --cache openai --prices prices.json` shows the bill of a hosted
    model: what the prompts cost as they are sent today, with marks, and planned.
    """
    profile = cache_profile(cache)
    known_prices = prices_given(prices, profile)
    check_outputs(html, results)
    measured = measure_savings(
        trace,
        corpus,
        capacities=capacity_tokens or (),
        tokenizer=tokenizer,
        workers=workers,
        prefill_rate=prefill_rate,
        prices=known_prices,
        cache=profile,
        independent=independent,
        keep_best=keep_best,
        for_report=html is not None or results is not None,
        progress=progress,
    )
    measured = _stamped(measured)
    if results is not None:
        measured.write(results)
    if html is not None:
        write_page(measured, html)
    if as_json:
        put(json.dumps(estimate_json(measured)))
    else:
        show(estimate_output(measured))


def report(
    results: Annotated[
        str, typer.Argument(help="What `ctxreuse estimate --results` or `bench` wrote.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="The HTML file; it needs no network.")
    ] = "report.html",
    pictures: Annotated[
        Path | None, typer.Option(help="A folder for the charts as PNG files, too.")
    ] = None,
) -> None:
    """Make a page of results that people can look at."""
    check_outputs(output)
    measured = Results.read(results)
    write_page(measured, output)
    if pictures is not None:
        for path in write_pictures(measured, pictures):
            say(f"ctxreuse: wrote {path}")


def _stamped(results: Results) -> Results:
    """Return results with the command that made them, without passwords, and its day."""
    command = re.sub(r"(?<=://)[^/@\s]*@", "", shlex.join(["ctxreuse", *sys.argv[1:]]))
    return replace(
        results,
        command=command,
        date=f"{date.today():%Y-%m-%d}",
        python=platform.python_version(),
    )


def write_page(results: Results, path: str) -> None:
    """Write a report, and say so."""
    write_report(results, path)
    say(f"ctxreuse: wrote {path}")


def bench(
    dataset: Annotated[
        str | None,
        typer.Argument(
            help="The files' format: multihop-rag, narrativeqa, qasper, mtrag, locomo, as their "
            "authors publish them; jsonl for a folder with corpus.jsonl (id, text) and "
            "queries.jsonl (id, question; optionally answers, gold, conversation_id, turn). "
            "Part quality has question sets of its own, which it takes without."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Where the files are. For part quality without a format, the folder of public "
            "data; CTXREUSE_DATA if not given, else questions about the Python reference."
        ),
    ] = None,
    retriever: Annotated[
        str,
        typer.Option(
            help="bm25, faiss (TF-IDF with SVD), or module:name of a LangChain or LlamaIndex "
            "retriever, or of a function that makes one from a list of passages."
        ),
    ] = "bm25",
    k: Annotated[int, typer.Option(min=1, help="Blocks a request.")] = 15,
    requests: Annotated[
        int, typer.Option(min=1, help="The most questions, in whole conversations.")
    ] = 1_000,
    independent: Annotated[
        bool,
        typer.Option("--independent", help="Take turns of conversations as independent questions."),
    ] = False,
    in_order: Annotated[
        bool,
        typer.Option(
            "--in-order",
            help="Take the first questions, and have them arrive as the files have them; else both "
            "are random (--seed).",
        ),
    ] = False,
    part: Annotated[
        list[BenchPart] | None,
        typer.Option(
            help="What to measure; several may be given. Without it, everything but quality, which "
            "asks an engine for hours and stands alone."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy that parts policies and k compare with the retriever's order; several "
            "may be given. Without it, all."
        ),
    ] = None,
    at_k: Annotated[
        list[int] | None, typer.Option(min=1, help="Blocks a request that part k tries.")
    ] = None,
    at_sessions: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Conversations at a time that part sessions tries."),
    ] = None,
    capacity_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Tokens that the cache holds; several may be given. Without it, some sizes that "
            "suit the data. An engine has its own.",
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="A tokenizer.json, or words: count whole prompts, token by token; blocks: count "
            "each block as its tokens, the words around them as about as many as they have, and "
            "questions as none."
        ),
    ] = "words",
    chunk_tokens: Annotated[
        int,
        typer.Option(
            min=16,
            help="Length of the pieces that long documents are cut into; of jsonl, those of more "
            "than twice as many tokens.",
        ),
    ] = 512,
    contextpilot_python: Annotated[
        str | None,
        typer.Option(
            help="A Python that has the published contextpilot package, which then takes part.",
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="Ask this vLLM server instead of simulating: its cached tokens, times to the "
            "first token, and how good the answers are. Start it with "
            "--enable-prompt-tokens-details. The key is taken from OPENAI_API_KEY."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that it answers with.")] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The longest answer of an engine, 32 tokens if not given; one of 1 token is not "
            "scored.",
        ),
    ] = None,
    prefill_rate: PrefillRate = None,
    cache: CacheSpec = "vllm",
    prices: PricesGiven = None,
    seed: Annotated[int, typer.Option(help="Same seed, same questions, same order.")] = 0,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for results.json and results.csv, or quality.json."
        ),
    ] = Path("bench-output"),
    html: HtmlPath = None,
    compare: Annotated[
        Path | None, typer.Option(help="Earlier results; say what has changed.")
    ] = None,
    as_json: AsJson = False,
    question_set: QuestionSets = None,
    questions: MainQuestions = None,
    other_questions: OtherQuestions = None,
    arm: ArmNames = None,
    template: AnnotationTemplates = None,
    system: SystemText = None,
    precision: Precision = None,
    hours: Hours = None,
    answers: AnswersPath = None,
    concurrency: Concurrency = None,
) -> None:
    """Compare ways to order retrieved blocks on a data set.

    As retrieved, LangChain's and LlamaIndex's own LongContextReorder, the papers' algorithm,
    ctxreuse, and if its Python is given the published contextpilot package; over cache sizes
    (policies), numbers of blocks (k) and of conversations at a time (sessions), and with one idea
    left out at a time (ablations).

    `ctxreuse bench multihop-rag --data MultiHop-RAG/dataset --k 10 --html report.html`

    It keeps every run as it ends: stopped by Ctrl-C, the same command goes on there.

    Part quality asks an engine the same questions with the blocks shown in several ways ("arms"),
    greedily, and says how much F1, exact matches and answers that hold the right one change against
    the retriever's order, with paired 95% intervals. It keeps every answer: stopped by Ctrl-C,
    --hours or --precision, it shows what there is, and goes on there the next time.

    `ctxreuse bench --part quality --base-url http://127.0.0.1:8000/v1 --hours 2`

    `ctxreuse bench jsonl --data FOLDER --k 5 --part quality --base-url URL --precision 0.02`
    """
    from ctxreuse.measure.bench import BenchConfig, run  # loads most of the package

    earlier = None if compare is None else Results.read(compare)
    own = {
        "question_sets": question_set,
        "questions": questions,
        "other_questions": other_questions,
        "arms": arm,
        "templates": template,
        "system": system,
        "precision": precision,
        "hours": hours,
        "answers": answers,
        "concurrency": concurrency,
    }
    own = {name: value for name, value in own.items() if value is not None}
    others = {
        "--policy": policy,
        "--at-k": at_k,
        "--at-sessions": at_sessions,
        "--capacity-tokens": capacity_tokens,
        "--contextpilot-python": contextpilot_python,
        "--prefill-rate": prefill_rate,
        "--cache": cache != "vllm",
        "--prices": prices,
        "--html": html,
        "--compare": compare,
        "--json": as_json,
    }
    is_quality = BenchPart.quality in (part or ())
    check_parts(part or (), own, [name for name, value in others.items() if value])
    if not is_quality and (dataset is None or data is None):
        raise InvalidRequestError(
            "name the files' format and where they are, such as: ctxreuse bench jsonl --data FOLDER"
        )
    profile = cache_profile(cache)
    check_outputs(html)
    _make_folder(output)  # before a long measurement whose results could not be written
    config = BenchConfig(
        dataset=dataset or "",
        data=data or Path(),
        retriever=retriever,
        k=k,
        requests=requests,
        independent=independent,
        in_order=in_order,
        parts=() if is_quality else [Part(one) for one in part or ()],
        policies=policy or (),
        ks=at_k or (),
        sessions=at_sessions or (),
        capacities=capacity_tokens or (),
        tokenizer=tokenizer,
        chunk_tokens=chunk_tokens,
        contextpilot_python=contextpilot_python,
        base_url=base_url,
        model=model,
        api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
        answer_tokens=ANSWER_TOKENS if answer_tokens is None else answer_tokens,
        seed=seed,
        prefill_rate=prefill_rate,
        prices=prices_given(prices, profile),
        cache=profile,
    )
    if is_quality:
        bench_quality(config, data, {**own, "answer_tokens": answer_tokens}, output)
        return
    kept = output / "unfinished.jsonl"
    try:
        measured = run(config, progress, kept, lambda words: say(f"ctxreuse: {words}"))
    except KeyboardInterrupt:
        say(
            f"ctxreuse: stopped; what is complete is kept in {kept}: the same command goes on from "
            "there, and with --part NAME shows a part that is complete"
        )
        raise typer.Exit(_STOPPED) from None
    results = _stamped(measured)
    results.write(output / "results.json")
    results.write_csv(output / "results.csv")
    kept.unlink(missing_ok=True)
    if as_json:
        put(json.dumps(bench_json(results)))
    else:
        show(bench_output(results))
    say(f"ctxreuse: wrote {output / 'results.json'} and {output / 'results.csv'}")
    if html is not None:
        write_page(results, html)
    if earlier is not None and not as_json:
        show(comparison(earlier, results))


def _make_folder(path: Path) -> None:
    """Make a folder if it is missing, and check that files can be written there."""
    make_folder(path)
    with file_errors(path, "written"), TemporaryFile(dir=path):
        pass
