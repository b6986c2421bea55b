"""MT-RAG and its successor MTRAG-UN: conversations about four collections of documents.

Katsis et al., "mtRAG: A Multi-Turn Conversational Benchmark for Evaluating Retrieval-Augmented
Generation Systems" (2025); Rosenthal et al., "MTRAG-UN" (2026). The repository has the collections
as `corpora/passage_level/<collection>.jsonl`, zipped, and a folder for each benchmark
(`mtrag-human`, earlier `human`; `mtragun-human`) with `generation_tasks/reference.jsonl`, and for
MT-RAG also `generation_tasks/RAG.jsonl` (what the authors retrieved), `conversations` and
`retrieval_tasks`, the latter two of the same turns.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ctxreuse.context.files import bounded_lines, file_errors
from ctxreuse.errors import InputFileError, describe
from ctxreuse.measure.traces.json_lines import JsonLine, lines_of, read_lines
from public_data.datasets.dataset import Dataset, Passage, Question
from public_data.datasets.published_files import (
    Source,
    nested,
    nested_records,
    new_name,
    read_records,
    read_utf8,
    record,
    refuse_pointer,
    text_of,
)

_SOURCE = Source(
    "mtrag",
    "the repository's folder with corpora/passage_level/*.jsonl (or .jsonl.zip) and "
    "mtrag-human/generation_tasks/reference.jsonl, or a benchmark's folder in it such as "
    "mtragun-human",
    "github.com/IBM/mt-rag-benchmark",
)
_BENCHMARKS = ("mtrag-human", "human", "mtragun-human")
_PARTS = ("generation_tasks", "conversations", "retrieval_tasks")
_LEVELS = ("passage_level", "")
_SEPARATOR = "<::>"
_LARGEST_CORPUS_BYTES = 2**31
_LARGEST_RATIO = 100
"""A file's size divided by its size in the archive; text has 3 to 10."""


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
            for line in _corpus_lines(file)
        ]
        passages += found
        corpora[name] = {passage.id for passage in found}
    turns = _turns(benchmark, corpora)
    if not turns:
        raise InputFileError(
            f"{benchmark}: none of its tasks is about a corpus that is there "
            f"({', '.join(corpora)}); add the others to corpora/passage_level "
            f"({_SOURCE.published})"
        )
    return Dataset(_SOURCE.name, tuple(passages), tuple(turns))


def _benchmark(path: Path) -> Path:
    for folder in (path, *(path / name for name in _BENCHMARKS)):
        if any((folder / part).is_dir() for part in _PARTS):
            return folder
    raise _SOURCE.missing(path / _BENCHMARKS[0] / "generation_tasks" / "reference.jsonl")


def _corpora(path: Path, benchmark: Path) -> Mapping[str, Path]:
    folders = [parent / "corpora" / part for parent in (path, benchmark.parent) for part in _LEVELS]
    for folder in folders:
        files = {
            file.name.partition(".")[0]: file
            # an unpacked corpus comes after its archive, and so is the one that is read
            for ending in (".json.zip", ".jsonl.zip", ".jsonl")
            for file in sorted(folder.glob(f"[!.]*{ending}"))
        }
        if files:
            return dict(sorted(files.items()))
    raise _SOURCE.missing(folders[0] / "clapnq.jsonl")


def _corpus_lines(path: Path) -> Iterator[JsonLine]:
    with file_errors(path, "read"), path.open("rb") as stream:
        refuse_pointer(path, stream.read(100))
    if path.suffix != ".zip":
        yield from read_lines(str(path))
        return
    with _archive_errors(path):
        archive = zipfile.ZipFile(path)
    with archive:
        member = _member(path, archive)
        yield from lines_of(_unpacked(path, archive, member), f"{path}/{member.filename}")


@contextmanager
def _archive_errors(path: Path) -> Iterator[None]:
    """Name the file in what is raised in this context, in which nothing but `zipfile` runs."""
    try:
        yield
    except Exception as error:
        raise InputFileError(
            f"{path}: broken or encrypted archive ({describe(error)}); get it again, or unpack it "
            "beside it"
        ) from None


def _unpacked(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
    with _archive_errors(path), archive.open(member) as lines:
        yield from bounded_lines(lines, member.filename)


def _member(path: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    members = [
        info
        for info in archive.infolist()
        if info.filename.endswith((".jsonl", ".json"))
        and not info.filename.startswith("__MACOSX")
        and info.filename.isprintable()  # it stands in errors, which are one line
    ]
    if len(members) != 1:
        raise InputFileError(
            f"{path}: holds {len(members)} .jsonl files and not one; unpack it beside it"
        )
    # no more is read than an archive says, so that what it says can be relied on
    size, packed = members[0].file_size, members[0].compress_size
    if size > _LARGEST_CORPUS_BYTES or size > _LARGEST_RATIO * max(packed, 1):
        raise InputFileError(
            f"{path}: unpacks {packed} to {size} bytes, which no corpus does; "
            "if you trust it, unpack it beside it"
        )
    return members[0]


def _turns(benchmark: Path, corpora: Mapping[str, Collection[str]]) -> list[Question]:
    tasks = benchmark / "generation_tasks" / "reference.jsonl"
    conversations = benchmark / "conversations" / "conversations.json"
    if tasks.exists():
        return _of_tasks(tasks, corpora)
    if conversations.exists():
        return _of_conversations(conversations, corpora)
    if (benchmark / "retrieval_tasks").is_dir():
        return _of_retrieval_tasks(benchmark / "retrieval_tasks", corpora)
    raise _SOURCE.missing(tasks)


def _of_tasks(path: Path, corpora: Mapping[str, Collection[str]]) -> list[Question]:
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


def _of_conversations(path: Path, corpora: Mapping[str, Collection[str]]) -> list[Question]:
    questions: list[Question] = []
    for number, line in enumerate(read_records(path)):
        retriever = nested(line, "retriever")
        collection = nested(retriever, "collection")
        scope = _corpus_of(text_of(collection, "name"), corpora)
        if scope is None:
            continue
        # the file names no conversations
        conversation = f"conversation-{number}"
        turns: list[Question] = []
        for message in nested_records(line, "messages"):
            text = text_of(message, "text")
            if text_of(message, "speaker") == "user":
                turns.append(_question(conversation, len(turns), text, scope))
            elif turns:
                gold = frozenset(one for one in _relevant(message) if one in corpora[scope])
                turns[-1] = replace(turns[-1], answers=(text,), gold=gold)
        questions += turns
    return questions


def _relevant(message: JsonLine) -> Iterator[str]:
    for context in nested_records(message, "contexts"):
        feedback = context.get("feedback", (dict,), {})
        votes = record(feedback.get("relevant") or {}, f"{context.place}.feedback.relevant")
        cast = [record(vote, f"{votes.place}.{voter}") for voter, vote in votes.fields.items()]
        last = max(cast, key=lambda vote: vote.get("timestamp", (int, float), 0), default=None)
        if last is not None and text_of(last, "value", "") == "yes":
            yield text_of(context, "document_id")


def _of_retrieval_tasks(path: Path, corpora: Mapping[str, Collection[str]]) -> list[Question]:
    questions: list[Question] = []
    for scope, passages in corpora.items():
        queries = path / scope / f"{scope}_lastturn.jsonl"
        if not queries.exists():
            continue
        relevant = _qrels(_SOURCE.find(path / scope / "qrels" / "dev.tsv"))
        for line in read_lines(str(queries)):
            identity = text_of(line, "_id")
            conversation, separator, turn = identity.rpartition(_SEPARATOR)
            if not (separator and turn.isascii() and turn.isdecimal() and len(turn) < 6):
                line.fail(f"_id {describe(identity)} is not <conversation>{_SEPARATOR}<turn>")
            text = text_of(line, "text").removeprefix("|user|: ")
            gold = frozenset(one for one in relevant.get(identity, ()) if one in passages)
            question = _question(conversation, max(int(turn) - 1, 0), text, scope)
            questions.append(replace(question, id=identity, gold=gold))
    return questions


def _qrels(path: Path) -> dict[str, set[str]]:
    relevant: dict[str, set[str]] = {}
    rows = csv.reader(read_utf8(path).splitlines()[1:], delimiter="\t", quoting=csv.QUOTE_NONE)
    for number, row in enumerate(rows, start=2):
        if len(row) != 3:
            raise InputFileError(
                f"{path}:{number}: has {len(row)} columns; a line must be query-id, corpus-id, "
                "score, with tabs between"
            )
        if row[2].strip() != "0":
            relevant.setdefault(row[0], set()).add(row[1])
    return relevant


def _corpus_of(collection: str, corpora: Collection[str]) -> str | None:
    # such as "mt-rag-ibmcloud-elser-512-100-20240502", whose corpus is cloud.jsonl
    return next((name for name in corpora if name in collection.lower()), None)
