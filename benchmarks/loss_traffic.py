"""Questions with what is retrieved for them, as four kinds of users ask: what programs are given.

The documents are pieces of Python's language reference, as long as asked for, in tokens; BM25
finds those of a question. All of it is the same in each run under one version of Python.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from random import Random
from typing import Literal, NamedTuple, TypeAlias

from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core.utils import get_tokenizer

from ctxreuse import ContextBlock
from ctxreuse.workflow.retrievers import KeywordRetriever
from stand_in_data import interleaved, popular, question_about, topic_of

Traffic: TypeAlias = Literal["alone", "unique", "repeated", "conversations"]
"""Who asks: each about documents of their own; all about the same, each question once; the same
questions again and again, the second most frequent one half as often as the first; conversations.
"""

_ASKED_ABOUT = re.compile(r"[A-Za-z_]{4,}")
_POOL = 50
_TURNS = 6


class Asked(NamedTuple):
    """A question."""

    question: str
    blocks: tuple[ContextBlock, ...]  # what is retrieved for it, best first
    conversation: str | None = None  # which conversation it belongs to; None outside of one
    turn: int = 0  # its turn, from 0


@cache
def tokenizer() -> Callable[[str], list[int]]:
    """Return the tokenizer of OpenAI's chat models, cl100k, which LlamaIndex carries."""
    tokenize: Callable[[str], list[int]] = get_tokenizer()
    return tokenize


@cache
def pieces(tokens: int) -> tuple[ContextBlock, ...]:
    """Return the Python reference in pieces of at most some tokens, each text once."""
    from pydoc_data.topics import topics

    splitter = RecursiveCharacterTextSplitter(
        chunk_size=tokens, chunk_overlap=0, length_function=lambda text: len(tokenizer()(text))
    )
    found: dict[str, ContextBlock] = {}
    for topic in sorted(topics):
        for number, text in enumerate(splitter.split_text(topics[topic])):
            # at least about a quarter full, and something to ask about
            if len(text) >= tokens and _ASKED_ABOUT.search(text):
                found.setdefault(text, ContextBlock(id=f"{topic}#{number}", text=text))
    return tuple(found.values())


@cache
def traffic(kind: Traffic, tokens: int, k: int, number: int) -> tuple[Asked, ...]:
    """Return so many questions in order of arrival; k documents of so many tokens for each."""
    random = Random(f"{kind} {tokens} {k}")
    blocks = pieces(tokens)
    if kind == "conversations":
        return _conversations(random, blocks, k, number)
    if kind == "alone":
        return _alone(random, blocks, k, number)
    if kind == "unique":
        questions = [_about(random, block) for block in popular(random, blocks, number)]
    else:
        pool = [_about(random, block) for block in random.sample(blocks, min(_POOL, len(blocks)))]
        questions = popular(random, pool, number)
    found = _found(blocks, questions, k)
    return tuple(map(Asked, questions, found))


def _alone(
    random: Random, blocks: Sequence[ContextBlock], k: int, number: int
) -> tuple[Asked, ...]:
    """Each has k documents of their own and asks once; as many as there are documents for."""
    shuffled = random.sample(blocks, len(blocks))
    asked = []
    for start in range(0, min(number * k, len(shuffled) - k + 1), k):
        own = tuple(shuffled[start : start + k])
        asked.append(Asked(_about(random, own[0]), own))
    return tuple(asked)


def _conversations(
    random: Random, blocks: Sequence[ContextBlock], k: int, number: int
) -> tuple[Asked, ...]:
    """Conversations about a topic each, their turns between those of others."""
    topics = {name: list(some) for name, some in groupby(blocks, topic_of)}
    names = popular(random, list(topics), -(-number // _TURNS))
    turns = [
        [(f"c{n}", turn, _about(random, random.choice(topics[name]))) for turn in range(_TURNS)]
        for n, name in enumerate(names)
    ]
    asked = list(interleaved(random, turns))[:number]
    found = _found(blocks, [question for _, _, question in asked], k)
    return tuple(
        Asked(question, some, conversation, turn)
        for (conversation, turn, question), some in zip(asked, found, strict=True)
    )


def _about(random: Random, block: ContextBlock) -> str:
    question: str = question_about(random, "", block)["question"]
    return question


def _found(
    blocks: Sequence[ContextBlock], questions: Sequence[str], k: int
) -> list[tuple[ContextBlock, ...]]:
    retriever = KeywordRetriever(blocks)

    async def found() -> list[tuple[ContextBlock, ...]]:
        return [tuple(await retriever.retrieve(question, k)) for question in questions]

    return asyncio.run(found())
