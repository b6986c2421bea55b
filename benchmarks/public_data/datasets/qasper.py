"""QASPER: questions about papers on natural language processing, with evidence paragraphs.

Dasigi et al., "A Dataset of Information-Seeking Questions and Answers Anchored in Research Papers"
(2021). A file maps a paper's id to `title`, `abstract`, `full_text` (a list of `section_name` and
`paragraphs`) and `qas` (`question`, `question_id`, `answers`: a list of `answer`s).
"""

from __future__ import annotations

from pathlib import Path

from ctxreuse.errors import InputFileError, describe
from ctxreuse.measure.traces.json_lines import JsonLine
from public_data.datasets.dataset import ChunkedDocument, Dataset, Question, passages_of
from public_data.datasets.published_files import (
    Source,
    nested,
    nested_records,
    read_json,
    record,
    text_of,
    texts_of,
)

_SOURCE = Source(
    "qasper",
    "a file such as qasper-dev-v0.3.json, or a folder with qasper-*.json",
    "allenai.org/data/qasper",
)


def load_qasper(path: Path, chunk_tokens: int) -> Dataset:
    """Load QASPER."""
    files = sorted(path.glob("qasper-*.json")) if path.is_dir() else [_SOURCE.find(path)]
    if not files:
        raise _SOURCE.missing(path / "qasper-*.json")
    papers: dict[str, ChunkedDocument] = {}
    questions: list[Question] = []
    for file in files:
        for paper_id, fields in record(read_json(file), str(file)).fields.items():
            if paper_id in papers:
                raise InputFileError(
                    f"{file}: paper {describe(paper_id)} is in another file, too; "
                    "leave only one release in the folder"
                )
            line = record(fields, f"{file}: {paper_id}")
            paper = papers[paper_id] = _paper(paper_id, line, chunk_tokens)
            questions += [_question(entry, paper) for entry in nested_records(line, "qas")]
    return Dataset(_SOURCE.name, passages_of(papers.values()), tuple(questions))


def _paper(paper_id: str, line: JsonLine, chunk_tokens: int) -> ChunkedDocument:
    paper = ChunkedDocument(paper_id, chunk_tokens)
    title = text_of(line, "title", "").strip()
    paper.add(text_of(line, "abstract", ""), _heading(title, "Abstract"))
    for section in nested_records(line, "full_text"):
        paragraphs = (paragraph.strip() for paragraph in texts_of(section, "paragraphs"))
        name = text_of(section, "section_name", "").strip()
        paper.add("\n\n".join(filter(None, paragraphs)), _heading(title, name))
    return paper


def _heading(title: str, section: str) -> str:
    return "\n".join(filter(None, (title, section)))


def _question(line: JsonLine, paper: ChunkedDocument) -> Question:
    answers: list[str] = []
    gold: set[str] = set()
    for annotation in nested_records(line, "answers"):
        answer = nested(annotation, "answer")
        text = _answer(answer)
        if text is not None:
            answers.append(text)
        if not answer.get("unanswerable", (bool,), False):
            for evidence in texts_of(answer, "evidence"):
                # that of a figure or table, "FLOAT SELECTED: ...", stands in no paragraph
                gold |= paper.holding(evidence)
    return Question(
        id=text_of(line, "question_id"),
        text=text_of(line, "question"),
        answers=tuple(dict.fromkeys(answers)),
        gold=frozenset(gold),
    )


def _answer(answer: JsonLine) -> str | None:
    # the order in which the authors' evaluator asks
    if answer.get("unanswerable", (bool,), False):
        return "Unanswerable"
    spans = texts_of(answer, "extractive_spans")
    if spans:
        return ", ".join(spans)
    free_form = text_of(answer, "free_form_answer", "")
    if free_form:
        return free_form
    yes = answer.get("yes_no", (bool,), None)
    return None if yes is None else "Yes" if yes else "No"
