"""MultiHop-RAG: news articles, and questions whose evidence lies in two to four of them.

Tang and Yang, "MultiHop-RAG: Benchmarking Retrieval-Augmented Generation for Multi-Hop Queries"
(2024). `corpus.json` is a list of articles (`title`, `body`, `url` are read), `MultiHopRAG.json` a
list of questions (`query`, `answer`, `evidence_list` of `fact`, `url`, `title`). Questions of type
`null_query` have no evidence.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from public_data.datasets.dataset import ChunkedDocument, Dataset, Question, passages_of
from public_data.datasets.published_files import (
    Source,
    nested_records,
    read_records,
    text_of,
)

_SOURCE = Source(
    "multihop-rag",
    "a folder with corpus.json and MultiHopRAG.json",
    "github.com/yixuantt/MultiHop-RAG",
)


def load_multihop_rag(path: Path, chunk_tokens: int) -> Dataset:
    """Load MultiHop-RAG."""
    corpus_path = _SOURCE.find(path / "corpus.json", path / "dataset" / "corpus.json")
    questions_path = _SOURCE.find(corpus_path.with_name("MultiHopRAG.json"))
    articles: list[ChunkedDocument] = []
    by_name: defaultdict[str, list[ChunkedDocument]] = defaultdict(list)
    for number, line in enumerate(read_records(corpus_path)):
        article = ChunkedDocument(f"article-{number}", chunk_tokens)
        title = text_of(line, "title", "").strip()
        article.add(text_of(line, "body"), title)
        articles.append(article)
        for name in {text_of(line, "url", ""), title} - {""}:
            by_name[name].append(article)
    questions: list[Question] = []
    named: list[str] = []
    for number, line in enumerate(read_records(questions_path)):
        gold: set[str] = set()
        for evidence in nested_records(line, "evidence_list"):
            url = text_of(evidence, "url", "")
            title = text_of(evidence, "title", "").strip()
            fact = text_of(evidence, "fact", "")
            named += [name for name in (url, title) if name]
            for article in by_name.get(url) or by_name.get(title, []):
                gold |= article.holding(fact) or {passage.id for passage in article.passages}
        answer = text_of(line, "answer", "")
        questions.append(
            Question(
                id=f"q{number}",
                text=text_of(line, "query"),
                answers=(answer,) if answer else (),
                gold=frozenset(gold),
            )
        )
    _SOURCE.require_known(questions_path, named, by_name)
    return Dataset(_SOURCE.name, passages_of(articles), tuple(questions))
