"""MT-RAG and its successor MTRAG-UN: conversations about four collections of documents.

Katsis et al., "mtRAG: A Multi-Turn Conversational Benchmark for Evaluating Retrieval-Augmented
Generation Systems" (2025); Rosenthal et al., "MTRAG-UN" (2026). The repository has the collections
as `corpora/passage_level/<collection>.jsonl`, zipped, and a folder for each benchmark
(`mtrag-human`, earlier `human`; `mtragun-human`) with `generation_tasks/reference.jsonl`, and for
MT-RAG also `generation_tasks/RAG.jsonl` (what the authors retrieved).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ctxreuse.errors import InputFileError
from ctxreuse.measure.traces.json_lines import read_lines
from public_data.datasets.dataset import Dataset, Passage, Question
from public_data.datasets.published_files import (
    Source,
    nested_records,
    new_name,
    text_of,
)

_SOURCE = Source(
    "mtrag",
    "the repository's folder with corpora/passage_level/*.jsonl, unpacked, and "
    "mtrag-human/generation_tasks/reference.jsonl, or a benchmark's folder in it such as "
    "mtragun-human",
    "github.com/IBM/mt-rag-benchmark",
)
_BENCHMARKS = ("mtrag-human", "human", "mtragun-human")
_TASKS = Path("generation_tasks") / "reference.jsonl"
_LEVELS = ("passage_level", "")
_SEPARATOR = "<::>"


def load_mtrag(path: Path, chunk_tokens: int) -> Dataset:
    """Load MT-RAG, or MTRAG-UN if that folder is given."""
    benchmark = _benchmark(path)
    passages: list[Passage] = []
    corpora: dict[str, set[str]] = {}
    for name, file in _corpora(path, benchmark).items():
        found = [
            Passage(
                id=text_of(line, "id" if line.fields.get("_id") is None else "_id"),
                text=text_of(line, "text"),
                scope=name,
            )
            for line in read_lines(str(file))
        ]
        passages += found
        corpora[name] = {passage.id for passage in found}
    turns = _questions(benchmark / _TASKS, corpora)
    if not turns:
        raise InputFileError(
            f"{benchmark}: none of its tasks is about a corpus that is there "
            f"({', '.join(corpora)}); add the others to corpora/passage_level "
            f"({_SOURCE.published})"
        )
    return Dataset(_SOURCE.name, tuple(passages), tuple(turns))


def _benchmark(path: Path) -> Path:
    for folder in (path, *(path / name for name in _BENCHMARKS)):
        if (folder / _TASKS).exists():
            return folder
    raise _SOURCE.missing(path / _BENCHMARKS[0] / _TASKS)


def _corpora(path: Path, benchmark: Path) -> Mapping[str, Path]:
    folders = [parent / "corpora" / part for parent in (path, benchmark.parent) for part in _LEVELS]
    for folder in folders:
        files = {file.stem: file for file in sorted(folder.glob("[!.]*.jsonl"))}
        if files:
            return files
    raise _SOURCE.missing(folders[0] / "clapnq.jsonl")


def _questions(path: Path, corpora: Mapping[str, Collection[str]]) -> list[Question]:
    retrieved = _retrieved(path.with_name("RAG.jsonl"))
    conversations: dict[str, dict[int, Question]] = {}
    seen: set[str] = set()
    for line in read_lines(str(path)):
        task_id = new_name(line, "task_id", seen)
        seen.add(task_id)
        # MT-RAG's tasks have one spelling, the evaluation's samples the other
        collection = text_of(line, "Collection", "") or text_of(line, "collection")
        scope = _corpus_of(collection, corpora)
        questions = [
            text_of(entry, "text")
            for entry in nested_records(line, "input")
            if text_of(entry, "speaker") == "user"
        ]
        if not questions:
            line.fail("field 'input' has no user's message; get the file again")
        if scope is None:
            continue
        conversation = text_of(line, "conversation_id")
        turns = conversations.setdefault(conversation, {})
        *earlier, last = questions
        for turn, text in enumerate(earlier):
            turns.setdefault(turn, _question(conversation, turn, text, scope))
        passages = corpora[scope]
        blocks = [block for block in retrieved.get(task_id, ()) if block in passages]
        answers = (text_of(target, "text", "") for target in nested_records(line, "targets"))
        references = (text_of(entry, "document_id") for entry in nested_records(line, "contexts"))
        turns[len(earlier)] = replace(
            _question(conversation, len(earlier), last, scope),
            id=task_id,
            answers=tuple(answer for answer in answers if answer),
            gold=frozenset(reference for reference in references if reference in passages),
            blocks=tuple(blocks) or None,
        )
    return [turn for turns in conversations.values() for _, turn in sorted(turns.items())]


def _question(conversation: str, turn: int, text: str, scope: str) -> Question:
    identity = f"{conversation}{_SEPARATOR}{turn + 1}"
    return Question(identity, text, conversation_id=conversation, turn=turn, scope=scope)


def _retrieved(path: Path) -> dict[str, list[str]]:
    if not path.exists():
        return {}
    return {
        text_of(line, "task_id"): [
            text_of(entry, "document_id") for entry in nested_records(line, "contexts")
        ]
        for line in read_lines(str(path))
    }


def _corpus_of(collection: str, corpora: Collection[str]) -> str | None:
    # such as "mt-rag-ibmcloud-elser-512-100-20240502", whose corpus is cloud.jsonl
    return next((name for name in corpora if name in collection.lower()), None)
