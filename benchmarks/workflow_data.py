"""What the workflow benchmarks run on: passages, a large index around them, questions, a model.

The passages are those of 2WikiMultihopQA. To make search heavy, two million vectors stand around
their embeddings, each for a sentence of the passage it stands near. The emulated model says what
the documents in its prompt say, or, where there are none, what the passages say that the question
was made from: its words decide the next query, and whether a speculation holds.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ctxreuse import ContextBlock
from ctxreuse.workflow.models.embedders import TfidfEmbedder
from shared import data_folder

DIMENSIONS = 256
VECTORS = 2_000_000
CLUSTERS = 1024
NOISE = 0.8
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "workflows"

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_WORD = re.compile(r"\w+")
_QUESTION = re.compile(r"Question: (.*?)\n\n", re.DOTALL)
_ANSWER_SENTENCES = 3


@dataclass(frozen=True)
class Passage:
    """A passage of the corpus."""

    id: str
    title: str
    text: str
    sentences: tuple[str, ...]


def read_passages() -> list[Passage]:
    """Return the passages in the folder of the public data."""
    passages = []
    with (data_folder("2wiki") / "2wiki" / "corpus.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            sentences = tuple(one for one in _SENTENCE.split(row["text"].strip()) if one)
            passages.append(
                Passage(row["id"], row["title"], row["text"], sentences or (row["title"],))
            )
    return passages


class Collection:
    """The passages, an embedder for them, and the index, all kept in files once they are made.

    The index has 2 GB; with None for its number of vectors, none is made.
    """

    def __init__(self, vectors: int | None = VECTORS) -> None:
        self.passages = read_passages()
        self._texts = [f"{one.title}. {one.text}" for one in self.passages]
        CACHE.mkdir(parents=True, exist_ok=True)
        self.embedder = TfidfEmbedder(self._texts, DIMENSIONS)
        if vectors is None:
            return
        self.index_path = CACHE / f"ivf{CLUSTERS}_{vectors}x{DIMENSIONS}.faiss"
        if not self.index_path.exists():
            print(f"building {self.index_path.name} (once) ...", flush=True)
            faiss.write_index(self._built(vectors), str(self.index_path))

    def read_index(self) -> Any:
        """Return the index, in memory."""
        return faiss.read_index(str(self.index_path))

    def block(self, number: int) -> ContextBlock:
        """Return what a vector stands for: a passage, or one of its sentences."""
        count = len(self.passages)
        if number < count:
            return ContextBlock(id=self.passages[number].id, text=self._texts[number])
        passage = self.passages[number % count]
        copy = number // count
        sentence = passage.sentences[copy % len(passage.sentences)]
        return ContextBlock(id=f"{passage.id}.{copy}", text=f"{passage.title}. {sentence}")

    def passage_vectors(self) -> Any:
        """Return the passages' own vectors, shape (n, 256)."""
        return np.ascontiguousarray(self.embedder.embed(self._texts), dtype=np.float32)

    def _built(self, vectors: int) -> Any:
        passages = self.passage_vectors()
        generator = np.random.default_rng(0)
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(DIMENSIONS), DIMENSIONS, CLUSTERS)
        index.cp.niter = 10
        for first in range(0, vectors, 100_000):
            numbers = np.arange(first, min(first + 100_000, vectors))
            batch = passages[numbers % len(passages)].copy()
            noise = generator.normal(size=batch.shape).astype(np.float32)
            noise *= NOISE / np.sqrt(DIMENSIONS)
            noise[numbers < len(passages)] = 0
            batch += noise
            batch /= np.linalg.norm(batch, axis=1, keepdims=True)
            if first == 0:
                index.train(batch[: 50 * CLUSTERS])
            index.add(batch)
        return index


@dataclass(frozen=True)
class Question:
    """A question, and the passages it was made from."""

    text: str
    first: Passage
    second: Passage


def make_questions(passages: Sequence[Passage], count: int, seed: int = 0) -> list[Question]:
    """Return questions made of entities and sentences of two passages each."""
    chooser = random.Random(seed)
    questions = []
    for _ in range(count):
        first, second = chooser.sample(passages, 2)
        said = " ".join(chooser.choice(first.sentences).split()[:12])
        text = f"What do {first.title}, of whom it is said: {said}, and {second.title} share?"
        questions.append(Question(text, first, second))
    return questions


class Author:
    """What the emulated model says: sentences of the passages, the same for the same prompt."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = {one.text: one for one in questions}
        self._roles: Mapping[str, Callable[[str], str]] = {
            "You write short": self._hypothesis,
            "You break a que": self._sub_question,
        }

    def __call__(self, messages: list[dict[str, Any]]) -> str:
        """Return the answer to a prompt."""
        prompt = messages[-1]["content"]
        role = self._roles.get(messages[0]["content"][:15])
        return self._from_documents(prompt) if role is None else role(prompt)

    def _hypothesis(self, prompt: str) -> str:
        question = self._asked(prompt)
        return " ".join((*question.first.sentences[:2], *question.second.sentences[:1]))

    def _sub_question(self, prompt: str) -> str:
        question = self._asked(prompt)
        known = prompt.count("\n- ")
        if known >= 2:
            return "None"
        about = (question.first, question.second)[known]
        said = " ".join(about.sentences[0].split()[:20])
        return f"What is known about {about.title}, of whom it is said: {said}?"

    def _from_documents(self, prompt: str) -> str:
        """Return the sentences that have most words of the question, wherever they stand."""
        found = _QUESTION.search(prompt)
        question = found[1] if found else prompt[-200:]
        texts = (prompt[: found.start()] if found else prompt).split("\n\n")
        sentences = {one.strip() for text in texts for one in _SENTENCE.split(text)}
        wanted = set(_WORD.findall(question.lower()))
        ranked = sorted(
            sentences, key=lambda one: (-len(wanted.intersection(_WORD.findall(one.lower()))), one)
        )
        return " ".join(ranked[:_ANSWER_SENTENCES])

    def _asked(self, prompt: str) -> Question:
        found = _QUESTION.search(prompt)
        assert found is not None, "these prompts hold their question"
        return self._questions[found[1]]
