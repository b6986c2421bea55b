"""What the quality benchmark asks: public data sets with known answers, or the embedded one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TypeAlias

from ctxreuse.errors import InputFileError, InvalidRequestError, describe
from ctxreuse.measure.demo.demo_run import python_reference_blocks
from ctxreuse.measure.replay.simulate import Progress, no_progress
from ctxreuse.measure.traces.json_lines import read_lines
from ctxreuse.measure.traces.trace_files import (
    TraceRequest,
    block_tokens,
    read_corpus,
    read_trace,
)
from public_data.benchmark import ANSWER_TOKENS, DataConfig, read_workload
from public_data.datasets import Dataset, Passage, Question
from public_data.workload import Workload, make_workload, retrieve

QuestionId: TypeAlias = str | int

SHORT_ANSWERS = (
    "Answer the question with the shortest phrase copied from the documents. "
    "No sentence, no explanation."
)
"""Models answer in sentences where nothing says otherwise, and F1 then measures that."""

SENTENCES = "Answer the question from the documents, in one or two sentences."

_ROOM_FOR_A_TURN = 200
"""Tokens of question, labels, annotation, answer and chat template."""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions with known answers, and the blocks that were found for them."""

    name: str
    conversations: tuple[tuple[TraceRequest, ...], ...]
    references: Mapping[QuestionId, Sequence[str]]
    system: str = SHORT_ANSWERS
    answer_tokens: int = 32
    questions: int = 200
    other_questions: int = 100

    @property
    def has_turns(self) -> bool:
        """Whether some questions are turns of a conversation."""
        return any(turns[0].conversation_id is not None for turns in self.conversations)

    def scored(self, number: int) -> list[TraceRequest]:
        """Return the turns of a conversation whose right answer is known."""
        return [one for one in self.conversations[number] if one.request_id in self.references]

    def fitting(self, context_tokens: int | None) -> list[int]:
        """Return the numbers of the conversations that have a scored turn and fit the model."""
        return [
            number
            for number, turns in enumerate(self.conversations)
            if self.scored(number)
            and (context_tokens is None or sum(map(_most_tokens, turns)) <= context_tokens)
        ]

    def shuffled(self, seed: int) -> QuestionSet:
        """Return the same questions in a random order, so that the first are a fair sample."""
        conversations = list(self.conversations)
        Random(f"{self.name} {seed}").shuffle(conversations)
        return replace(self, conversations=tuple(conversations))


def _most_tokens(traced: TraceRequest) -> int:
    return sum(map(block_tokens, traced.blocks)) + _ROOM_FOR_A_TURN


@dataclass(frozen=True, slots=True)
class _Published:
    folder: str
    trace: str
    questions: int
    is_conversation: bool = False


_PUBLISHED = {
    "xquad-k5": _Published("xquad", "trace_k5.jsonl", 612),
    "xquad-k15": _Published("xquad", "trace_k15.jsonl", 200),
    "locomo-k20": _Published("locomo", "trace_k20.jsonl", 200),
    "mtrag-k5": _Published("mtrag", "trace_k5.jsonl", 100, is_conversation=True),
}
EMBEDDED = "python-reference"
QUESTION_SETS = (*_PUBLISHED, EMBEDDED)
"""The sets that need no data set to be named: those of the folder of public data, and our own."""


def standard_sets(data: Path | None, names: Sequence[str]) -> list[QuestionSet]:
    """Return the sets of the folder of public data, or without one the embedded set."""
    for name in names:
        if name not in QUESTION_SETS:
            raise InvalidRequestError(
                f"there is no question set {describe(name)}; there are: {', '.join(QUESTION_SETS)}"
            )
        if data is None and name != EMBEDDED:
            raise InvalidRequestError(
                f"question set {name} is read from the folder of public data; name it with --data "
                "or CTXREUSE_DATA"
            )
    chosen = list(dict.fromkeys(names)) or (list(_PUBLISHED) if data is not None else [EMBEDDED])
    return [_named(name, data) for name in chosen]


def sets_to_ask(
    config: DataConfig, names: Sequence[str], progress: Progress = no_progress
) -> list[QuestionSet]:
    """Return a data set of the user's as one question set, or the standard ones."""
    if config.dataset is None:
        return standard_sets(config.data, names)
    if names:
        raise InvalidRequestError(
            f"--question-set names sets of the benchmark's own, and {config.dataset} is another; "
            "leave one of the two out"
        )
    return [set_of_workload(read_workload(config, progress), config.answer_tokens or ANSWER_TOKENS)]


def _named(name: str, data: Path | None) -> QuestionSet:
    if data is None or name == EMBEDDED:
        return _python_reference()
    return _published(name, _PUBLISHED[name], data)


def _published(name: str, published: _Published, data: Path) -> QuestionSet:
    folder = data / published.folder
    if not folder.is_dir():
        raise InputFileError(
            f"{folder}: there is no such folder; --data or CTXREUSE_DATA must name the folder of "
            "public data, or choose other sets with --question-set"
        )
    trace = read_trace(str(folder / published.trace), read_corpus(str(folder / "corpus.jsonl")))
    references = dict(_references(folder / "queries.jsonl"))
    if not published.is_conversation:  # questions about one user's memories are not turns of a chat
        alone = tuple((replace(one, conversation_id=None, turn=0),) for one in trace)
        return QuestionSet(name, alone, references, questions=published.questions)
    return QuestionSet(
        name,
        tuple(map(tuple, _conversations(trace).values())),
        references,
        system=SENTENCES,  # its right answers are whole paragraphs
        answer_tokens=96,
        questions=published.questions,
    )


def _references(path: Path) -> Iterator[tuple[QuestionId, list[str]]]:
    for line in read_lines(str(path)):
        answers = line.get("answers", (list,), [])
        if answers:
            yield line.get("id", (str, int)), answers


def _conversations(trace: Sequence[TraceRequest]) -> dict[object, list[TraceRequest]]:
    groups: dict[object, list[TraceRequest]] = {}
    for traced in trace:
        groups.setdefault(traced.conversation_id, []).append(traced)
    return groups


def set_of_workload(workload: Workload, answer_tokens: int) -> QuestionSet:
    """Return the questions of a data set that was loaded for a benchmark."""
    if not workload.references:
        raise InvalidRequestError(
            f"{workload.name}: no question has right answers, so answers cannot be scored; give "
            "the questions `answers`"
        )
    conversations = tuple(
        turns if len(turns) > 1 else (replace(turns[0], conversation_id=None, turn=0),)
        for turns in workload.conversations
    )
    return QuestionSet(
        workload.name,
        conversations,
        dict[QuestionId, Sequence[str]](workload.references.items()),
        answer_tokens=answer_tokens,
        questions=len(workload.references),
    )


_EMBEDDED_K = 5


def _python_reference() -> QuestionSet:
    """Return questions about the Python reference that every Python carries."""
    passages = tuple(Passage(str(one.id), one.text) for one in python_reference_blocks())
    questions = tuple(_read_questions())
    dataset = Dataset(EMBEDDED, passages, questions)
    found = retrieve(dataset, "bm25", _EMBEDDED_K, lambda: None)
    workload = make_workload(EMBEDDED, questions, found)
    return set_of_workload(workload, ANSWER_TOKENS)


def _read_questions() -> Iterator[Question]:
    file = Path(__file__).with_name("python_questions.txt")
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        question, answers = line.split("\t")
        yield Question(f"python-{number}", question, tuple(answers.split(" | ")))
