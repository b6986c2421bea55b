"""What a benchmark sends: questions with the blocks found for them, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.context.checks import checked_choice
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.workflow.models.embedders import TfidfEmbedder
from ctxreuse.workflow.retrievers import KeywordRetriever
from public_data.datasets import Dataset, Question

Found = Mapping[str, Sequence[ContextBlock]]
"""Question -> blocks, best first."""

USUAL_SESSIONS = 8
"""Conversations at a time, where the benchmark does not vary them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a benchmark."""

    name: str
    conversations: tuple[tuple[TraceRequest, ...], ...]
    arrivals: tuple[int, ...]
    corpus: Mapping[BlockId, ContextBlock]
    references: Mapping[str, Sequence[str]]
    recall: float | None
    notes: tuple[str, ...] = ()

    @property
    def has_turns(self) -> bool:
        """Whether some questions are turns of a conversation."""
        return any(turns[0].conversation_id is not None for turns in self.conversations)

    def in_order(self) -> list[TraceRequest]:
        """Return the requests as the files have them; turns of a conversation stay in order."""
        turns = list(map(iter, self.conversations))
        return [next(turns[place]) for place in self.arrivals]

    def trace(self, sessions: int, seed: int) -> list[TraceRequest]:
        """Return the requests in an order that they might arrive in."""
        random = Random(seed)
        waiting = [list(reversed(turns)) for turns in self.conversations]
        random.shuffle(waiting)
        running: list[list[TraceRequest]] = []
        trace = []
        while waiting or running:
            while waiting and len(running) < sessions:
                running.append(waiting.pop())
            place = random.randrange(len(running))
            trace.append(running[place].pop())
            if not running[place]:
                del running[place]
        return trace


def sample(dataset: Dataset, most: int, seed: int | None) -> Dataset:
    """Return a data set with some of its questions, in whole conversations."""
    groups = list(_conversations(dataset.questions))
    if seed is not None:
        Random(seed).shuffle(groups)
    chosen: set[str] = set()
    for group in groups:
        if len(chosen) + len(group) <= most:
            chosen.update(question.id for question in group)
    if not chosen and groups:
        raise InvalidRequestError(
            f"{most:,} requests are less than the shortest conversation's "
            f"{min(map(len, groups)):,} turns, and conversations stay whole; allow more, or take "
            "turns as independent questions"
        )
    questions = tuple(question for question in dataset.questions if question.id in chosen)
    return replace(dataset, questions=questions)


def make_workload(name: str, questions: Sequence[Question], found: Found) -> Workload:
    """Return the requests for questions, with the blocks found for each."""
    corpus: dict[BlockId, ContextBlock] = {}
    hits = golden = 0
    groups = list(_conversations(questions))
    place_of = {one.id: place for place, group in enumerate(groups) for one in group}
    for question in questions:
        blocks = found[question.id]
        for block in blocks:
            if corpus.setdefault(block.id, block).text != block.text:
                raise InvalidRequestError(
                    f"the retriever gives id {describe(block.id)} to two texts; "
                    "give every text its own"
                )
        golden += len(question.gold)
        hits += len(question.gold.intersection(str(block.id) for block in blocks))
    return Workload(
        name=name,
        conversations=tuple(
            tuple(
                TraceRequest(
                    request_id=question.id,
                    query=question.text,
                    blocks=tuple(found[question.id]),
                    conversation_id=question.conversation_id,
                    turn=question.turn,
                )
                for question in group
            )
            for group in groups
        ),
        arrivals=tuple(place_of[question.id] for question in questions),
        corpus=corpus,
        references={one.id: one.answers for one in questions if one.answers},
        recall=hits / golden if golden else None,
    )


def _conversations(questions: Iterable[Question]) -> Iterable[list[Question]]:
    groups: dict[tuple[bool, str], list[Question]] = {}
    for question in questions:
        key = question.conversation_id
        groups.setdefault((key is None, question.id if key is None else key), []).append(question)
    for group in groups.values():
        group.sort(key=lambda question: question.turn)
    return groups.values()


_DIMENSIONS = 128


def retrieve(dataset: Dataset, how: str, k: int, advance: Callable[[], object]) -> Found:
    """Return the k blocks that are found for each question, best first."""
    checked_choice("retriever", how, list(_SEARCHES))
    blocks = {}
    for one in dataset.passages:
        tokens = estimate_tokens(one.text) if one.tokens is None else one.tokens
        blocks[one.id] = ContextBlock(id=one.id, text=one.text, tokens=tokens)
    found: dict[str, Sequence[ContextBlock]] = {}
    scopes: dict[str, list[Question]] = {}
    for question in dataset.questions:
        if question.blocks is None:
            scopes.setdefault(question.scope, []).append(question)
        else:
            found[question.id] = tuple(blocks[one] for one in question.blocks[:k])
            advance()
    for scope, questions in scopes.items():
        within = [blocks[one.id] for one in dataset.passages if not scope or one.scope == scope]
        queries = [question.text for question in questions]
        best_of = _SEARCHES[how](within, queries, k)
        for question, best in zip(questions, best_of, strict=True):
            found[question.id] = best
            advance()
    return found


def _bm25(
    blocks: Sequence[ContextBlock], queries: list[str], k: int
) -> Iterator[Sequence[ContextBlock]]:
    retriever = KeywordRetriever(blocks)
    with asyncio.Runner() as runner:
        for query in queries:
            yield runner.run(retriever.retrieve(query, k))


def _faiss(
    blocks: Sequence[ContextBlock], queries: list[str], k: int
) -> Iterator[Sequence[ContextBlock]]:
    import faiss

    texts = [block.text for block in blocks]
    embedder = TfidfEmbedder(texts, _DIMENSIONS)
    index = faiss.IndexFlatIP(embedder.dimension)
    index.add(embedder.embed(texts))
    _, found = index.search(embedder.embed(queries), min(k, len(blocks)))
    for row in found:
        yield [blocks[int(position)] for position in row]


_SEARCHES = {"bm25": _bm25, "faiss": _faiss}
