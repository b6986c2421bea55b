"""Data that every user has, in the files of the public data sets: what benchmarks run on without.

The blocks are those of Python's language reference, which CPython carries (`ctxreuse demo` shows
them, too). The questions are made up from their sentences, by seeded chance: the topics' popularity
falls off, and several users ask about each. They have the shape of the public sets, not their
difficulty: figures measured here compare one version of the code with another, no more.

    python benchmarks/stand_in_data.py FOLDER

writes them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, TypeVar

from ctxreuse import ContextBlock
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.measure.demo import demo_run as demo
from ctxreuse.workflow.retrievers import KeywordRetriever

_FORMAT = 1
_WORD = re.compile(r"[A-Za-z_]{4,}")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")

_Row: TypeAlias = dict[str, Any]
_T = TypeVar("_T")


def write_stand_in_data(folder: Path) -> Path:
    """Write `xquad`, `mtrag`, `locomo`, `2wiki` into a folder, if they are not there; return it."""
    done = folder / f"complete-{_FORMAT}"
    if not done.exists():
        _write_independent(folder / "xquad")
        _write_conversations(folder / "mtrag")
        _write_memories(folder / "locomo")
        _write_lines(folder / "2wiki" / "corpus.jsonl", _rows(demo.python_reference_blocks(400)))
        done.touch()
    return folder


def topic_of(block: ContextBlock) -> str:
    """Return what the first part of a block's name says that it is about."""
    return re.split("[#/]", str(block.id))[0]


def _write_independent(folder: Path) -> None:
    """Many users ask about the same topics."""
    random, blocks = Random(1), demo.python_reference_blocks(900)
    asked = popular(random, blocks, 500)
    questions = [question_about(random, number, block) for number, block in enumerate(asked)]
    theirs = enumerate(demo.QUESTIONS)
    questions += [{"id": f"demo-{n}", "question": one.query} for n, one in theirs]
    random.shuffle(questions)
    _write(folder, _rows(blocks), questions, (5, 15))


def _write_conversations(folder: Path) -> None:
    """Conversations, each about one topic; their turns stand between those of others."""
    random, blocks = Random(2), demo.python_reference_blocks(2_000)
    topics = {name: list(some) for name, some in groupby(blocks, topic_of)}
    firsts = popular(random, [some[0] for some in topics.values() if len(some) > 2], 110)
    waiting = []
    for number, first in enumerate(firsts):
        turns = [random.choice(topics[topic_of(first)]) for _ in range(random.randint(4, 9))]
        waiting.append(
            [
                {
                    **question_about(random, f"{number}-{turn}", block),
                    "conversation_id": f"conversation-{number}",
                    "turn": turn,
                }
                for turn, block in enumerate(turns)
            ]
        )
    _write(folder, _rows(blocks), list(interleaved(random, waiting)), (5, 10))


def _write_memories(folder: Path) -> None:
    """Short memories of five users, who ask for their own."""
    random = Random(3)
    sentences = [
        " ".join(sentence.split())
        for block in demo.python_reference_blocks()
        for sentence in _SENTENCE.split(block.text)
        if 60 < len(sentence) < 240
    ]
    rows, questions = [], []
    for user in (f"user-{number}" for number in range(5)):
        names = [f"{user}/{number}" for number in range(500)]
        texts = random.sample(sentences, len(names))
        pairs = zip(names, texts, strict=True)
        own = [ContextBlock(id=name, text=text) for name, text in pairs]
        rows += [{**row, "user": user} for row in _rows(own)]
        for number in range(150):
            asked = question_about(random, f"{user}-{number}", random.choice(own))
            questions.append({**asked, "user": user})
    _write(folder, rows, questions, (20, 100))


def popular(random: Random, things: Sequence[_T], number: int) -> list[_T]:
    """Return some of them, drawn with replacement: the second is half as popular as the first."""
    shuffled = random.sample(things, len(things))
    shares = list(accumulate(1 / rank for rank in range(1, len(things) + 1)))
    return random.choices(shuffled, cum_weights=shares, k=number)


def question_about(random: Random, number: int | str, block: ContextBlock) -> _Row:
    """Return a question about a sentence of a block, by some of its words."""
    sentence = random.choice([one for one in _SENTENCE.split(block.text) if _WORD.search(one)])
    words = _WORD.findall(sentence)
    asked = sorted(random.sample(range(len(words)), min(len(words), 6)))
    return {
        "id": f"question-{number}",
        "question": f"How begins the sentence on {' '.join(words[place] for place in asked)}?",
        "answers": [" ".join(sentence.split()[:4])],
        "gold": [block.id],
    }


def interleaved(random: Random, waiting: list[list[_T]], at_once: int = 12) -> Iterator[_T]:
    """Yield the turns of conversations, of which a few go on at a time."""
    while waiting:
        turns = random.choice(waiting[:at_once])
        yield turns.pop(0)
        if not turns:
            waiting.remove(turns)


def _rows(blocks: Sequence[ContextBlock]) -> list[_Row]:
    return [
        {"id": x.id, "title": topic_of(x), "text": x.text, "tokens": estimate_tokens(x.text)}
        for x in blocks
    ]


def _write(
    folder: Path, rows: Sequence[_Row], questions: Sequence[_Row], depths: Sequence[int]
) -> None:
    """Write a corpus, questions, and what is found for these; each user has a store."""
    _write_lines(folder / "corpus.jsonl", rows)
    _write_lines(folder / "queries.jsonl", questions)
    found = asyncio.run(_found(rows, questions, max(depths)))
    for depth in depths:
        trace = [
            {
                "request_id": one["id"],
                "conversation_id": one.get("conversation_id"),
                "turn": one.get("turn", 0),
                "query": one["question"],
                "blocks": [block.id for block in blocks[:depth]],
            }
            for one, blocks in zip(questions, found, strict=True)
        ]
        _write_lines(folder / f"trace_k{depth}.jsonl", trace)


async def _found(
    rows: Sequence[_Row], questions: Sequence[_Row], depth: int
) -> list[Sequence[ContextBlock]]:
    stores: dict[str | None, list[ContextBlock]] = {}
    for row in rows:
        block = ContextBlock(id=row["id"], text=row["text"])
        stores.setdefault(row.get("user"), []).append(block)
    retrievers = {user: KeywordRetriever(blocks) for user, blocks in stores.items()}
    return [await retrievers[one.get("user")].retrieve(one["question"], depth) for one in questions]


def _write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    print(write_stand_in_data(parser.parse_args().folder))
