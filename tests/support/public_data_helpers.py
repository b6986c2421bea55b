"""A small data set, and the benchmarks' commands inside a test."""

import json

import pytest
from cli_helpers import runner

from ctxreuse.errors import InputFileError
from public_data.commands import main
from public_data.datasets import Dataset, Passage, Question, load
from public_data.workload import make_workload, retrieve

TOWNS = ("Porto", "Paris", "Prague", "Pisa", "Perth", "Palermo")
DATASET = Dataset(
    "towns",
    tuple(
        Passage(f"d{number}", f"{town} is a town with a river and a bridge. " * 8)
        for number, town in enumerate(TOWNS)
    ),
    tuple(
        Question(
            id=f"q{number}",
            text=f"Is there a river in {TOWNS[number % 6]}, or in {TOWNS[(number + 1) % 6]}?",
            answers=("yes",),
            gold=frozenset({f"d{number % 6}"}),
            conversation_id=None if number < 6 else f"c{number % 3}",
            turn=0 if number < 6 else (number - 6) // 3,
        )
        for number in range(15)
    ),
)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "towns"
    path.mkdir()
    lines = [{"id": one.id, "text": one.text} for one in DATASET.passages]
    (path / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    lines = [
        {
            "id": one.id,
            "question": one.text,
            "answers": list(one.answers),
            "gold": sorted(one.gold),
            "conversation_id": one.conversation_id,
            "turn": one.turn,
        }
        for one in DATASET.questions
    ]
    (path / "queries.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return path


def nothing():
    """Advance no bar."""


def error_of(name, path, kind=InputFileError, **options):
    """Return the words of the error with which a data set is refused."""
    with pytest.raises(kind) as caught:
        load(name, path, **options)
    return str(caught.value)


def workload(dataset=DATASET, k=3):
    return make_workload("towns", dataset.questions, retrieve(dataset, "bm25", k, nothing))


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command; see `cli_helpers.run`."""
    return runner(main, "public_data", monkeypatch, capsys)
