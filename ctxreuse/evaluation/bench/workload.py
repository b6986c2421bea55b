"""What a benchmark sends: questions with the blocks found for them, in order of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.evaluation.datasets import Dataset, Question
from ctxreuse.evaluation.traces.trace_files import TraceRequest

Found = Mapping[str, Sequence[ContextBlock]]
"""Question -> blocks, best first."""

USUAL_SESSIONS = 8
"""Conversations at a time, where the benchmark does not vary them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a benchmark.

    Attributes:
        name: The data set and how it was searched.
        conversations: Their turns; an independent question is a conversation of one turn.
        arrivals: Places of conversations, one for each turn, in the order of the data set's files.
        corpus: The blocks that were found.
        references: Question -> right answers, where they are known.
        recall: Share of the blocks known to hold an answer that were found; None where the data
            set names none.
    """

    name: str
    conversations: tuple[tuple[TraceRequest, ...], ...]
    arrivals: tuple[int, ...]
    corpus: Mapping[BlockId, ContextBlock]
    references: Mapping[str, Sequence[str]]
    recall: float | None

    @property
    def has_turns(self) -> bool:
        """Whether some questions are turns of a conversation."""
        return any(turns[0].conversation_id is not None for turns in self.conversations)

    def in_order(self) -> list[TraceRequest]:
        """Return the requests as the files have them; turns of a conversation stay in order."""
        turns = list(map(iter, self.conversations))
        return [next(turns[place]) for place in self.arrivals]

    def trace(self, sessions: int, seed: int) -> list[TraceRequest]:
        """Return the requests in an order that they might arrive in.

        At most `sessions` conversations take turns at random; when one has ended, the next begins.
        The turns of a conversation stay in order.

        Args:
            sessions: Conversations at a time.
            seed: Of the random order.
        """
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
    """Return a data set with some of its questions, in whole conversations.

    Args:
        dataset: The data set.
        most: The number of questions at most.
        seed: Of the random choice; None takes the first conversations that fit.

    Raises:
        InvalidRequestError: No conversation is short enough.
    """
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
    return Dataset(dataset.name, dataset.passages, questions)


def independent_questions(dataset: Dataset) -> Dataset:
    """Return a data set whose turns are independent questions."""
    questions = (replace(one, conversation_id=None, turn=0) for one in dataset.questions)
    return replace(dataset, questions=tuple(questions))


def make_workload(name: str, questions: Sequence[Question], found: Found) -> Workload:
    """Return the requests for some questions.

    Args:
        name: Its name in tables.
        questions: The questions.
        found: The blocks found for each.

    Raises:
        InvalidRequestError: Two texts have the same id.
    """
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
