"""A user's data set, as JSON lines.

`corpus.jsonl` has `id`, `text` and perhaps `tokens`; `queries.jsonl` has `id`, `question` and
perhaps `answers`, `gold` (ids of passages), `blocks` (ids, best first: what was retrieved),
`conversation_id` and `turn` (from 0). A `user` or `collection`, in both, is a scope.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import describe
from ctxreuse.measure.traces.json_lines import JsonLine, read_lines
from public_data.datasets.dataset import ChunkedDocument, Dataset, Passage, Question
from public_data.datasets.published_files import Source, text_of, texts_of

_SOURCE = Source(
    "jsonl",
    "a folder of your own with corpus.jsonl (id, text) and queries.jsonl (id, question)",
)


_LONG = 2
"""Times the length of a piece that a document may have: passages from elsewhere stay whole."""


def load_jsonl(path: Path, chunk_tokens: int) -> Dataset:
    """Load a folder of JSON lines."""
    corpus_path = _SOURCE.find(path / "corpus.jsonl")
    queries_path = _SOURCE.find(path / "queries.jsonl")
    whole = {
        identity: Passage(
            id=identity, text=text_of(line, "text"), scope=_scope(line), tokens=_tokens(line)
        )
        for identity, line in _lines(corpus_path)
    }
    queries = list(_lines(queries_path))
    names_blocks = any(line.fields.get("blocks") is not None for _, line in queries)
    cut = {} if names_blocks else dict(_pieces(whole.values(), chunk_tokens))
    named: list[str] = []
    questions: list[Question] = []
    for identity, line in queries:
        gold = [str(entry) for entry in line.ids("gold")] if line.fields.get("gold") else []
        named += gold
        conversation_id = line.get("conversation_id", (str, int), None)
        answers = tuple(texts_of(line, "answers"))
        questions.append(
            Question(
                id=identity,
                text=text_of(line, "question"),
                answers=answers,
                gold=_gold(frozenset(gold) & whole.keys(), answers, cut),
                conversation_id=None if conversation_id is None else str(conversation_id),
                turn=_turn(line),
                scope=_scope(line),
                blocks=_blocks(line, whole.keys()),
            )
        )
    _SOURCE.require_known(queries_path, named, whole)
    return Dataset(
        _SOURCE.name,
        tuple(piece for one in whole.values() for piece in _cut(one, cut)),
        tuple(questions),
        tuple(_notes(cut, chunk_tokens)),
    )


def _pieces(
    passages: Iterable[Passage], chunk_tokens: int
) -> Iterator[tuple[str, ChunkedDocument]]:
    """Yield documents that are long, cut, by their ids."""
    for passage in passages:
        if estimate_tokens(passage.text) > _LONG * chunk_tokens:
            document = ChunkedDocument(passage.id, chunk_tokens)
            document.add(passage.text)
            yield passage.id, document


def _cut(passage: Passage, cut: Mapping[str, ChunkedDocument]) -> Iterator[Passage]:
    if passage.id not in cut:
        yield passage
        return
    for piece in cut[passage.id].passages:
        yield replace(piece, scope=passage.scope)


def _gold(
    names: Iterable[str], answers: Iterable[str], cut: Mapping[str, ChunkedDocument]
) -> frozenset[str]:
    """Return the ids of the passages that hold a query's answer."""
    gold: set[str] = set()
    for name in names:
        if name not in cut:
            gold.add(name)
            continue
        held = {piece for answer in answers for piece in cut[name].holding(answer)}
        gold |= held or {piece.id for piece in cut[name].passages}
    return frozenset(gold)


def _notes(cut: Mapping[str, ChunkedDocument], chunk_tokens: int) -> Iterator[str]:
    if cut:
        pieces = sum(len(document.passages) for document in cut.values())
        yield (
            f"{len(cut):,} documents of more than {_LONG * chunk_tokens:,} tokens were cut into "
            f"{pieces:,} pieces; --chunk-tokens sets their length"
        )


def _lines(path: Path) -> Iterator[tuple[str, JsonLine]]:
    seen: set[str] = set()
    for line in read_lines(str(path)):
        identity = str(line.get("id", (str, int)))
        if identity in seen:
            line.fail(f"id {describe(identity)} was there before; give every line its own id")
        seen.add(identity)
        yield identity, line


def _scope(line: JsonLine) -> str:
    return text_of(line, "user", "") or text_of(line, "collection", "")


def _tokens(line: JsonLine) -> int | None:
    tokens: int | None = line.natural("tokens", None)
    if tokens is not None and tokens < 0:
        line.fail(f"field 'tokens' is {describe(tokens)}; it must be an integer from 0")
    return tokens


def _turn(line: JsonLine) -> int:
    turn: int = line.natural("turn", 0)
    if turn < 0:
        line.fail(f"field 'turn' is {describe(turn)}; turns count from 0")
    return turn


def _blocks(line: JsonLine, passages: Container[str]) -> tuple[str, ...] | None:
    if line.fields.get("blocks") is None:
        return None
    blocks = tuple(str(entry) for entry in line.ids("blocks"))
    for block in blocks:
        if block not in passages:
            line.fail(f"block {describe(block)} is not in the corpus; add it there")
    return blocks
