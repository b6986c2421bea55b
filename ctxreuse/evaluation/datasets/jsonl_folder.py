"""A user's data set, as JSON lines.

`corpus.jsonl` has `id`, `text` and perhaps `tokens`; `queries.jsonl` has `id`, `question` and
perhaps `answers`, `gold` (ids of passages), `blocks` (ids, best first: what was retrieved),
`conversation_id` and `turn` (from 0). A `user` or `collection`, in both, is a scope.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

from ctxreuse.errors import describe
from ctxreuse.evaluation.datasets.dataset import Dataset, Passage, Question
from ctxreuse.evaluation.datasets.published_files import Source, text_of, texts_of
from ctxreuse.evaluation.traces.json_lines import JsonLine, read_lines

_SOURCE = Source(
    "jsonl",
    "a folder of your own with corpus.jsonl (id, text) and queries.jsonl (id, question)",
)


def load_jsonl(path: Path, chunk_tokens: int) -> Dataset:
    """Load a folder of JSON lines.

    Passages stay as they are. Gold ids that the corpus lacks are skipped, unless it lacks all.

    Args:
        path: The folder.
        chunk_tokens: Not needed: the corpus holds passages.

    Raises:
        InputFileError: A file is missing or broken, an id is there twice, a query names blocks
            that the corpus lacks, or all of the gold ids are unknown.
    """
    corpus_path = _SOURCE.find(path / "corpus.jsonl")
    queries_path = _SOURCE.find(path / "queries.jsonl")
    passages = {
        identity: Passage(
            id=identity, text=text_of(line, "text"), scope=_scope(line), tokens=_tokens(line)
        )
        for identity, line in _lines(corpus_path)
    }
    named: list[str] = []
    questions: list[Question] = []
    for identity, line in _lines(queries_path):
        gold = [str(entry) for entry in line.ids("gold")] if line.fields.get("gold") else []
        named += gold
        conversation_id = line.get("conversation_id", (str, int), None)
        questions.append(
            Question(
                id=identity,
                text=text_of(line, "question"),
                answers=tuple(texts_of(line, "answers")),
                gold=frozenset(gold) & passages.keys(),
                conversation_id=None if conversation_id is None else str(conversation_id),
                turn=_turn(line),
                scope=_scope(line),
                blocks=_blocks(line, passages.keys()),
            )
        )
    _SOURCE.require_known(queries_path, named, passages)
    return Dataset(_SOURCE.name, tuple(passages.values()), tuple(questions))


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
    tokens: int | None = line.count("tokens", None)
    if tokens is not None and tokens < 0:
        line.fail(f"field 'tokens' is {describe(tokens)}; it must be an integer from 0")
    return tokens


def _turn(line: JsonLine) -> int:
    turn: int = line.count("turn", 0)
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
