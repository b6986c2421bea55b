"""`ctxreuse bench`: policies side by side on a data set."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer
from rich.console import Console

from ctxreuse.cli.common import output_console, progress, say
from ctxreuse.cli.savings_commands import write_page
from ctxreuse.errors import InputFileError
from ctxreuse.evaluation.bench.trials import Part
from ctxreuse.evaluation.replay.simulate import Tokenizer, load_tokenizer

_WORDS, _BLOCKS = "words", "blocks"


def bench(
    dataset: Annotated[
        str,
        typer.Argument(
            help="The files' format: multihop-rag, narrativeqa, qasper, mtrag, locomo, as their "
            "authors publish them; jsonl for a folder with corpus.jsonl (id, text) and "
            "queries.jsonl (id, question; optionally answers, gold, conversation_id, turn)."
        ),
    ],
    data: Annotated[Path, typer.Option(help="Where the files are.")],
    retriever: Annotated[
        str,
        typer.Option(
            help="bm25, faiss (TF-IDF with SVD), or module:name of a LangChain or LlamaIndex "
            "retriever, or of a function that makes one from a list of passages."
        ),
    ] = "bm25",
    k: Annotated[int, typer.Option(min=1, help="Blocks a request.")] = 15,
    requests: Annotated[
        int, typer.Option(min=1, help="How many questions, in whole conversations.")
    ] = 1_000,
    independent: Annotated[
        bool,
        typer.Option(
            "--independent", help="Take turns of conversations as questions that stand alone."
        ),
    ] = False,
    in_order: Annotated[
        bool,
        typer.Option(
            "--in-order",
            help="Take the first questions, and have them arrive as the files have them; else both "
            "go by chance (--seed).",
        ),
    ] = False,
    part: Annotated[
        list[Part] | None,
        typer.Option(help="What to measure; several may be given. Without it, everything."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Whose order parts policies and k compare with the retriever's; several may be "
            "given. Without it, everybody's."
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
            "each block as its tokens, questions and annotations as none."
        ),
    ] = _WORDS,
    chunk_tokens: Annotated[
        int, typer.Option(min=16, help="Length of the pieces that long documents are cut into.")
    ] = 512,
    peer_python: Annotated[
        str | None,
        typer.Option(
            help="A Python that has the published contextpilot package, which then takes part."
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
        int,
        typer.Option(min=1, help="The longest answer of an engine; one of 1 token is not scored."),
    ] = 32,
    seed: Annotated[int, typer.Option(help="Same seed, same questions, same order.")] = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for results.json and results.csv.")
    ] = Path("bench-output"),
    html: Annotated[
        str | None, typer.Option(help="Write a report, one HTML file that needs no network, too.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Earlier results; say what has changed.")
    ] = None,
) -> None:
    """Compare ways to order retrieved blocks on a data set.

    As retrieved, LangChain's and LlamaIndex's own LongContextReorder, the papers' algorithm,
    ctxreuse, and if its Python is given the published contextpilot package; over cache sizes
    (policies), numbers of blocks (k) and of conversations at a time (sessions), and with one idea
    left out at a time (ablations).

    `ctxreuse bench multihop-rag --data MultiHop-RAG/dataset --k 10 --html report.html`
    """
    from ctxreuse.evaluation.bench.baselines import OURS, Contender, chosen, frameworks
    from ctxreuse.evaluation.bench.bench_tables import renderables, write_csv
    from ctxreuse.evaluation.bench.compare import comparison
    from ctxreuse.evaluation.bench.live_engine import LiveEngine
    from ctxreuse.evaluation.bench.measure import results_of
    from ctxreuse.evaluation.bench.published_contextpilot import PublishedContextPilot
    from ctxreuse.evaluation.bench.question_retrieval import retrieve
    from ctxreuse.evaluation.bench.simulated import simulate
    from ctxreuse.evaluation.bench.trials import KS, SESSIONS, Matrix
    from ctxreuse.evaluation.bench.workload import independent_questions, make_workload, sample
    from ctxreuse.evaluation.datasets import load
    from ctxreuse.evaluation.replay.estimate import TraceSummary, cut
    from ctxreuse.evaluation.results.results_file import Results

    chance = None if in_order else seed
    old = None if compare is None else Results.read(compare)
    encoder = _encoder(tokenizer)
    _make_folder(output)  # before anybody waits for what could not be written
    ks = sorted(set(at_k or [*(one for one in KS if one < k), k]))
    with Console(stderr=True).status("reading"):
        loaded = load(dataset, data, chunk_tokens=chunk_tokens)
        questions = sample(
            independent_questions(loaded) if independent else loaded, requests, chance
        )
    with progress("retrieving", len(questions.questions)) as advance:
        found = retrieve(questions, retriever, max(k, *ks), advance)
    name = data.resolve().name if dataset == "jsonl" else dataset
    workload = make_workload(f"{name}, {retriever}, k={k}", questions.questions, found)
    notes: list[str] = []
    contenders: list[Contender] = [*OURS[:1], *frameworks(notes), *OURS[1:]]
    if peer_python is not None:
        contenders += PublishedContextPilot(peer_python).contenders()
    if policy is not None:
        contenders = chosen(contenders, policy)
    summary = TraceSummary.of(cut(workload.in_order(), k))
    capacities = [None, *dict.fromkeys(capacity_tokens or summary.cache_sizes()[1:])]
    matrix = Matrix(
        workload,
        contenders,
        capacities if base_url is None else [None],
        k,
        ks,
        sorted(set(at_sessions or SESSIONS)),
        chance,
    )
    trials = matrix.trials(list(dict.fromkeys(part or Part)))
    if Part.sessions in (part or []) and not workload.has_turns:
        notes.append("sessions: left out, for no question is a turn of a conversation")
    settings = {
        "retriever": retriever,
        "seed": str(seed),
        "arrival": "as in the files" if in_order else "by chance",
        "requests": str(summary.requests),
    }
    if base_url is None:
        settings["tokenizer"] = Path(tokenizer).name
    if workload.recall is not None:
        settings["recall"] = f"{workload.recall:.3f} of the blocks known to hold an answer"
    with progress("measuring", 2 * sum(len(trial.trace) for trial in trials)) as advance:
        if base_url is None:
            level = "blocks" if encoder is None else "tokens"
            tried = simulate(trials, workload.corpus, encoder, advance)
        else:
            key = os.environ.get("OPENAI_API_KEY") or "EMPTY"
            level = "engine"
            references = workload.references if answer_tokens > 1 else {}
            engine = LiveEngine(base_url, model, key, answer_tokens, references)
            tried = engine.run(trials, advance)
        results = results_of(matrix, level, tried, settings, notes)
    results.write(output / "results.json")
    write_csv(results, output / "results.csv")
    for shown in renderables(results):
        output_console().print(shown)
    say(f"ctxreuse: wrote {output / 'results.json'} and {output / 'results.csv'}")
    if html is not None:
        write_page(results, html)
    if old is not None:
        for shown in comparison(old, results):
            output_console().print(shown)


def _make_folder(path: Path) -> None:
    """Make a folder, if need be, and see that files can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputFileError(f"{path}: cannot be written: {error.strerror}") from error


def _encoder(tokenizer: str) -> Tokenizer | None:
    """Return what counts tokens; None counts blocks."""
    if tokenizer == _BLOCKS:
        return None
    if tokenizer == _WORDS:
        from ctxreuse.serving.emulation.word_tokenizer import WordTokenizer

        return WordTokenizer()
    encoder: Tokenizer = load_tokenizer(tokenizer)
    return encoder
