"""NarrativeQA: questions about books and film scripts, or about Wikipedia's summaries of them.

Kočiský et al., "The NarrativeQA Reading Comprehension Challenge" (2018). The repository holds
`documents.csv`, `qaps.csv` and `third_party/wikipedia/summaries.csv`; its `download_stories.sh`
fetches the stories as `tmp/<document_id>.content`.
"""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from ctxreuse.errors import InputFileError
from public_data.datasets.dataset import ChunkedDocument, Dataset, Question, passages_of
from public_data.datasets.published_files import (
    Source,
    new_name,
    read_bytes,
    read_csv,
    text_of,
)

_SOURCE = Source(
    "narrativeqa",
    "a folder with documents.csv, qaps.csv and third_party/wikipedia/summaries.csv or "
    "tmp/<document_id>.content",
    "github.com/google-deepmind/narrativeqa",
)
_HTML = re.compile(r"<\s*(?:!doctype\s+html|html|head|body|pre|table)\b", re.IGNORECASE)
_HTML_WITHIN = 5_000
_UNSEEN = frozenset({"script", "style"})
_BREAKS = frozenset({"br", "p", "div", "tr", "li", "table", "pre", "hr", "h1", "h2", "h3", "h4"})
_VOID = frozenset({"br", "hr"})
_GZIP = b"\x1f\x8b"


def load_narrativeqa(path: Path, chunk_tokens: int) -> Dataset:
    """Load NarrativeQA."""
    titles: dict[str, str] = {}
    documents_path = _SOURCE.find(path / "documents.csv")
    for line in read_csv(documents_path, ("document_id", "wiki_title")):
        document = new_name(line, "document_id", titles)
        titles[document] = text_of(line, "wiki_title", "").strip()
    stories = {file.stem: file for file in sorted((path / "tmp").glob("*.content"))}
    summaries = {} if stories else _summaries(path)
    numbers: Counter[str] = Counter()
    documents: dict[str, ChunkedDocument] = {}
    questions: list[Question] = []
    qaps_path = _SOURCE.find(path / "qaps.csv")
    for line in read_csv(qaps_path, ("document_id", "question", "answer1", "answer2")):
        document = text_of(line, "document_id")
        number = numbers[document]
        numbers[document] += 1
        if document not in documents:
            documents[document] = ChunkedDocument(document, chunk_tokens)
            story = stories.get(document)
            text = summaries.get(document, "") if story is None else _story(story)
            documents[document].add(text, titles.get(document, ""))
        if documents[document].passages:
            answers = (text_of(line, name, "").strip() for name in ("answer1", "answer2"))
            questions.append(
                Question(
                    id=f"{document}-q{number}",
                    text=text_of(line, "question"),
                    answers=tuple(dict.fromkeys(answer for answer in answers if answer)),
                )
            )
    if not questions:
        raise InputFileError(
            f"{qaps_path}: none of its documents has a text; add "
            "third_party/wikipedia/summaries.csv, or run download_stories.sh "
            f"({_SOURCE.published})"
        )
    return Dataset(_SOURCE.name, passages_of(documents.values()), tuple(questions))


def _summaries(path: Path) -> dict[str, str]:
    summaries_path = _SOURCE.find(path / "third_party" / "wikipedia" / "summaries.csv")
    summaries: dict[str, str] = {}
    for line in read_csv(summaries_path, ("document_id", "summary")):
        summary = text_of(line, "summary", "").strip()
        if summary:
            summaries[text_of(line, "document_id")] = summary
    return summaries


def _story(path: Path) -> str:
    data = read_bytes(path)
    if data.startswith(_GZIP):
        raise InputFileError(f"{path}: compressed; name it {path.name}.gz and run gunzip on it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # scripts are web pages of the nineties: what is not UTF-8 is Windows' Latin
        text = data.decode("cp1252", "replace")
    return html_text(text) if _HTML.search(text[:_HTML_WITHIN]) else text


def html_text(page: str) -> str:
    """Return the text of a web page, without scripts and styles, one block a line."""
    reader = _TextReader()
    reader.feed(page)
    reader.close()
    return "".join(reader.parts).strip()


class _TextReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._unseen = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unseen = tag in _UNSEEN
        if tag in _BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._unseen = False
        if tag in _BREAKS and tag not in _VOID:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.parts.append(data)
