"""`ctxreuse demo`: the same questions in every order, through the prefix-cache simulator.

CPython carries the language reference as plain strings, so nothing is downloaded. The questions are
written for the demo: several users ask about each theme, and conversations overlap.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from shlex import quote

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.files import make_folder
from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.replay.policies import tried_policies
from ctxreuse.measure.replay.simulate import Progress, Replay, TraceSummary, estimate, no_progress
from ctxreuse.measure.report.report_page import charts
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results import results_of
from ctxreuse.measure.results.tables import estimate_output
from ctxreuse.measure.table import Shown
from ctxreuse.measure.traces.trace_files import Corpus, TraceRequest
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules, profile_spec
from ctxreuse.serving.emulation.batching_engine import COMMON_RATES
from ctxreuse.serving.emulation.word_tokenizer import WordTokenizer
from ctxreuse.workflow.models.embedders import WordLlamaEmbedder

BLOCKS_PER_QUESTION = 10
SMALL_CACHE_TOKENS = 20_000
_MIN_CHARACTERS = 80
_PARAGRAPH = re.compile(r"^.*\S.*(?:\n.*\S.*)*", re.MULTILINE)
_LINE = re.compile(r"^.*\S.*", re.MULTILINE)

_Span = tuple[int, int]


def run_demo(
    output: Path,
    progress: Progress = no_progress,
    prices: Prices | None = None,
    cache: CacheRules = DEFAULT_CACHE,
) -> Iterator[Shown]:
    """Run the demo, and write `computed_tokens.png`; of a bill there is none."""
    make_folder(output)
    with progress("retrieving", 1):
        corpus, trace = _retrieve_all()
    tried = tried_policies(cache)
    sizes = [None] if cache.lives else [None, SMALL_CACHE_TOKENS]
    steps = 4 * len(tried) * len(sizes) * len(trace)
    with progress("planning and replaying", steps) as advance:
        replay = Replay(trace, corpus, WordTokenizer(), advance, cache)
        runs = list(estimate(replay, sizes, tried))
    results = results_of(
        "demo",
        "tokens",
        TraceSummary.of(trace),
        runs,
        prefill_tokens_per_s=None if cache.lives else COMMON_RATES.prefill_tokens_per_s,
        prices=prices,
        cache=cache,
    )
    asked = f" --cache {quote(profile_spec(cache))}" if cache.lives else ""
    yield from estimate_output(
        results,
        "see what your own program would save: `ctxreuse record -o recording app.py`, then "
        f"`ctxreuse estimate recording{asked}`.",
    )
    if not cache.lives:
        yield (
            "tokens to compute: of whole prompts (system text, documents, questions, history)\n"
            "hit ratio: prompt tokens served from the cache / prompt tokens"
        )
        plot = output / "computed_tokens.png"
        charts(results)[0].write(plot)
        yield f"\nplot: {plot}"


def _retrieve_all() -> tuple[Corpus, list[TraceRequest]]:
    tokenizer, asked = WordTokenizer(), QUESTIONS
    blocks = [
        replace(block, tokens=len(tokenizer.encode(block.text).ids))
        for block in python_reference_blocks()
    ]
    texts, queries = [one.text for one in blocks], [one.query for one in asked]
    found = retrieve(texts, queries, BLOCKS_PER_QUESTION)
    trace = [
        replace(one, blocks=tuple(blocks[position] for position in positions))
        for one, positions in zip(asked, found, strict=True)
    ]
    return {block.id: block for block in blocks}, trace


def python_reference_blocks(max_characters: int = 1200) -> list[ContextBlock]:
    """Split the Python language reference into blocks of whole paragraphs, named `topic#number`."""
    # Imported here because the module is half a megabyte that only this demo needs.
    from pydoc_data.topics import topics

    blocks: dict[str, ContextBlock] = {}
    for topic in sorted(topics):
        whole = topics[topic]
        pieces = _pieces(whole, max_characters)
        spans = _joined(pieces, lambda one, other: other[1] - one[0] <= max_characters)
        spans = _joined(spans, lambda *two: min(b - a for a, b in two) < _MIN_CHARACTERS)
        for ordinal, (start, end) in enumerate(spans):
            text = whole[start:end]
            blocks.setdefault(text, ContextBlock(id=f"{topic}#{ordinal}", text=text))
    return list(blocks.values())


def _pieces(text: str, max_characters: int) -> Iterator[_Span]:
    """Yield the span of each paragraph, or spans of whole lines where one is too long."""
    for paragraph in _PARAGRAPH.finditer(text):
        start, end = paragraph.span()
        if end - start <= max_characters:
            yield start, end
        else:
            lines = (line.span() for line in _LINE.finditer(text, start, end))
            yield from _joined(lines, lambda one, other: other[1] - one[0] <= max_characters)


def _joined(spans: Iterable[_Span], belong: Callable[[_Span, _Span], bool]) -> list[_Span]:
    """Join neighbouring spans that belong together, first to last."""
    joined: list[_Span] = []
    for span in spans:
        if joined and belong(joined[-1], span):
            span = (joined.pop()[0], span[1])
        joined.append(span)
    return joined


def _questions() -> Iterator[TraceRequest]:
    """Yield every question in arrival order, each behind its label in a file; without blocks."""
    log = resources.files("ctxreuse.measure.demo").joinpath("questions.txt")
    entries = re.split(r"\n(?=\S)", log.read_text(encoding="utf-8").strip())
    for number, entry in enumerate(entries, start=1):
        label, text = entry.split(maxsplit=1)
        conversation, _, turn = label.partition("/")
        yield TraceRequest(
            request_id=f"question-{number}",
            query=" ".join(text.split()),
            blocks=(),
            conversation_id=conversation if turn else None,
            turn=int(turn or 0),
            system="You answer questions about the Python language from the documents given.",
        )


QUESTIONS = tuple(_questions())


def retrieve(texts: Sequence[str], queries: Sequence[str], k: int) -> list[list[int]]:
    """Return for each query the positions of the k nearest texts, best first."""
    try:
        import faiss

        embedder = WordLlamaEmbedder()
    except ImportError as error:
        raise MissingExtraError("the demo's retrieval", "demo") from error
    index = faiss.IndexFlatIP(embedder.dimension)
    index.add(embedder.embed(texts))
    found: list[list[int]] = index.search(embedder.embed(queries), k)[1].tolist()
    return found
