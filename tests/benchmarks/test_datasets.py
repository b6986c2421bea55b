import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_text_splitters import RecursiveCharacterTextSplitter
from planning_helpers import write_jsonl
from public_data_helpers import error_of

from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import InvalidRequestError
from public_data.datasets import LOADERS, Dataset, Passage, Question, load
from public_data.datasets.dataset import ChunkedDocument, split_text, squeeze

DATA = os.environ.get("CTXREUSE_DATA")


# load


def test_the_formats_have_these_names_which_the_command_tells(run):
    assert list(LOADERS) == ["multihop-rag", "mtrag", "locomo", "jsonl"]
    told = run("bench", "--help")[1]
    assert [name for name in LOADERS if name not in told] == []


@pytest.mark.parametrize(("name", "shown"), [("squad", "'squad' (str)"), (None, "None (NoneType)")])
def test_a_format_that_does_not_exist_is_named_with_those_that_do(tmp_path, name, shown):
    assert error_of(name, tmp_path, InvalidRequestError) == (
        f"there is no data set {shown}; choose one of 'multihop-rag', 'mtrag', 'locomo', 'jsonl'"
    )


@pytest.mark.parametrize(
    ("tokens", "shown"), [(0, "0 (int)"), (True, "a bool"), ("9", "'9' (str)")]
)
def test_a_chunk_has_at_least_one_token(tmp_path, tokens, shown):
    message = error_of("jsonl", tmp_path, InvalidRequestError, chunk_tokens=tokens)
    assert message == f"chunk_tokens must be an integer from 1, not {shown}"


@pytest.mark.parametrize(
    ("name", "file", "publisher"),
    [
        ("multihop-rag", "corpus.json", ", published at github.com/yixuantt/MultiHop-RAG"),
        (
            "mtrag",
            "mtrag-human/generation_tasks/reference.jsonl",
            ", published at github.com/IBM/mt-rag-benchmark",
        ),
        ("locomo", "locomo10.json", ", published at github.com/snap-research/locomo"),
        ("jsonl", "corpus.jsonl", " and queries.jsonl (id, question)"),
    ],
)
def test_a_missing_file_is_named_with_what_is_expected_and_its_publisher(
    tmp_path, name, file, publisher
):
    said = error_of(name, tmp_path)
    assert said.startswith(f"{tmp_path}/{file}: no such file; {name} is ")
    assert said.endswith(publisher)


@given(text=st.text(st.sampled_from("ab.é🦜 \n\t\u00a0"), max_size=200), tokens=st.integers(1, 12))
def test_chunking_loses_no_letter_keeps_the_order_and_the_length(text, tokens):
    chunks = split_text(text, tokens)
    assert "".join(squeeze(chunk) for chunk in chunks) == squeeze(text)
    assert all(0 < estimate_tokens(chunk) <= tokens for chunk in chunks)


def test_every_chunk_begins_with_its_heading_and_counts_it():
    document = ChunkedDocument("a", 6)
    document.add("one two three four", "Title")
    document.add("five", "Title")
    document.add(" ")
    assert document.passages == [
        Passage("a#0", "Title\n\none two three"),
        Passage("a#1", "Title\n\nfour"),
        Passage("a#2", "Title\n\nfive"),
    ]


def test_a_long_heading_leaves_half_of_a_chunk_to_the_text():
    document = ChunkedDocument("a", 4)
    document.add("abc efg hij", "A heading that is much too long")
    assert [passage.text.partition("\n\n")[2] for passage in document.passages] == [
        "abc efg",
        "hij",
    ]


def test_a_quote_is_held_by_all_chunks_that_have_a_part_of_it():
    document = ChunkedDocument("a", 2)
    document.add("one two three four one two")
    assert [passage.text for passage in document.passages] == [
        "one two",
        "three",
        "four",
        "one two",
    ]
    assert document.holding("two\nthree") == {"a#0", "a#1"}
    assert document.holding("one two") == {"a#0", "a#3"}
    assert document.holding("seven") == frozenset()
    assert document.holding(" ") == frozenset()


@given(st.text(alphabet="ab .\n\u00e9", max_size=300), st.integers(1, 12))
def test_a_text_is_cut_where_the_library_cuts_it(text, tokens):
    splitter = RecursiveCharacterTextSplitter(
        separators=["\n\n", "\n", ". ", " ", ""],
        keep_separator="end",
        chunk_size=4 * tokens,
        chunk_overlap=0,
        length_function=lambda part: len(part.encode()),
    )
    assert split_text(text, tokens) == splitter.split_text(text.strip())


# JSON lines


def jsonl_folder(folder, corpus, queries):
    write_jsonl(folder / "corpus.jsonl", *corpus)
    write_jsonl(folder / "queries.jsonl", *queries)
    return folder


def test_json_lines_give_passages_and_questions_with_their_scopes(tmp_path):
    folder = jsonl_folder(
        tmp_path,
        [
            {"id": 1, "text": "one", "tokens": 7, "user": "ann"},
            {"id": "b", "text": "two", "collection": "news", "title": "passed over"},
            {"id": "c", "text": "\ud800three"},
        ],
        [
            {"id": 8, "question": "which?", "answers": ["1", "one"], "gold": [1, "not there"]},
            {
                "id": "q",
                "question": "and then?",
                "answers": "two",
                "conversation_id": 5,
                "turn": 3,
                "collection": "news",
                "gold": None,
                "blocks": ["b", 1],
            },
            {"id": "r", "question": "mine?", "user": "ann", "collection": "news"},
        ],
    )
    assert load("jsonl", folder) == Dataset(
        "jsonl",
        (Passage("1", "one", "ann", 7), Passage("b", "two", "news"), Passage("c", "?three")),
        (
            Question("8", "which?", ("1", "one"), frozenset({"1"})),
            Question("q", "and then?", ("two",), frozenset(), "5", 3, "news", ("b", "1")),
            Question("r", "mine?", scope="ann"),
        ),
    )


FROM_0 = "it must be an integer from 0, with at most 100 digits"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"id": 1}, "field 'text' is missing; it must be str"),
        ({"id": None}, "field 'id' is None (NoneType); it must be str or int"),
        ({"id": "0", "text": "again"}, "id '0' (str) was there before; give every line its own id"),
        ({"id": 1, "text": "", "tokens": -1}, f"field 'tokens' is -1 (int); {FROM_0}"),
    ],
)
def test_a_broken_passage_is_named_with_its_fault(tmp_path, line, problem):
    queries = [{"id": 1, "question": "?"}]
    folder = jsonl_folder(tmp_path, [{"id": 0, "text": "nothing"}, line], queries)
    assert error_of("jsonl", folder) == f"{folder}/corpus.jsonl:2: {problem}"


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"question": ["?"]}, "field 'question' is ['?'] (list); it must be str"),
        ({"answers": [1]}, "field 'answers' holds 1 (int); it must hold texts"),
        ({"gold": "0"}, "field 'gold' is '0' (str); it must be list"),
        ({"turn": -1}, f"field 'turn' is -1 (int); {FROM_0}"),
        ({"blocks": ["x"]}, "block 'x' (str) is not in the corpus; add it there"),
    ],
)
def test_a_broken_question_is_named_with_its_fault(tmp_path, query, problem):
    queries = [{"id": 1, "question": "?"} | query]
    folder = jsonl_folder(tmp_path, [{"id": 0, "text": "nothing"}], queries)
    assert error_of("jsonl", folder) == f"{folder}/queries.jsonl:1: {problem}"


def test_gold_that_the_corpus_lacks_altogether_is_the_gold_of_another_corpus(tmp_path):
    folder = jsonl_folder(
        tmp_path, [{"id": "a", "text": "a"}], [{"id": 1, "question": "?", "gold": ["b", "c"]}]
    )
    assert error_of("jsonl", folder) == (
        f"{folder}/queries.jsonl: nothing that it names is in the corpus, such as 'b' (str); "
        "take both from the same release"
    )


@pytest.mark.parametrize(("kind", "number"), [("passages", 0), ("questions", 1)])
def test_a_data_set_without_passages_or_questions_is_refused(tmp_path, kind, number):
    folder = jsonl_folder(tmp_path, [{"id": 1, "text": "a"}] * number, [])
    assert error_of("jsonl", folder) == (
        f"{folder}: holds no {kind}; check that its files are complete"
    )


# any format that is one JSON file

broken_files = pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"a": \xff}', "not UTF-8 (byte 6); convert the file"),
        (b'[{"a": 1},\n', "broken JSON (Expecting value, line 2); get the file again"),
        (b"", "broken JSON (Expecting value, line 1); get the file again"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "this is a Git LFS pointer and not the file; run 'git lfs pull' in its folder",
        ),
    ],
)


def written(folder, name, content):
    file = folder / {"locomo": "locomo10.json", "multihop-rag": "corpus.json"}.get(name)
    file.write_bytes(content)
    (folder / "MultiHopRAG.json").write_text("[]")
    return file


@pytest.mark.parametrize("name", ["locomo", "multihop-rag"])
@broken_files
def test_a_broken_file_is_named_with_its_fault(tmp_path, name, content, problem):
    file = written(tmp_path, name, content)
    assert error_of(name, tmp_path) == f"{file}: {problem}"


@pytest.mark.parametrize("name", ["locomo", "multihop-rag"])
def test_json_that_is_nested_too_deeply_is_one_error(tmp_path, name):
    file = written(tmp_path, name, b"[" * 200_000)
    message = error_of(name, tmp_path)
    assert message.startswith(f"{file}: broken JSON (")
    assert message.endswith("; get the file again")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("locomo", [7], "[0]: 7 (int) is no JSON object"),
        ("multihop-rag", [None], "[0]: None (NoneType) is no JSON object"),
    ],
)
def test_a_file_of_another_shape_is_named_with_the_place(tmp_path, name, value, problem):
    file = written(tmp_path, name, json.dumps(value).encode())
    assert error_of(name, tmp_path) == f"{file}{problem}"


# the public data that others measure on, too


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="needs the public data: set CTXREUSE_DATA to its folder")
@pytest.mark.parametrize(
    ("name", "passages", "questions", "scopes", "gold"),
    [
        ("xquad", 120, 612, {""}, 612),
        ("locomo", 2960, 790, {f"conv-{n}" for n in (26, 41, 43, 47, 49)}, 785),
        ("mtrag", 1152, 1064, {"clapnq", "fiqa", "govt", "ibmcloud"}, 183),
    ],
)
def test_public_data_is_loaded_whole(name, passages, questions, scopes, gold):
    data = load("jsonl", Path(DATA) / name)
    scope_of = {passage.id: passage.scope for passage in data.passages}
    assert len(data.passages) == passages
    assert len(data.questions) == questions
    assert {question.scope for question in data.questions} == scopes
    assert set(scope_of.values()) == scopes
    assert sum(bool(question.gold) for question in data.questions) == gold
    assert all(
        scope_of[one] == question.scope for question in data.questions for one in question.gold
    )


def test_a_piece_with_an_answer_is_gold_and_what_was_retrieved_stays_whole(tmp_path):
    long = " ".join(f"Word {number} stands here." for number in range(60))
    corpus = [{"id": "long", "text": long}, {"id": "short", "text": "Another."}]
    queries = [
        {"id": "1", "question": "?", "gold": ["long", "short"], "answers": ["Word 3 stands"]},
        {"id": "2", "question": "?", "gold": ["long"], "answers": ["elsewhere"]},
    ]
    data = load("jsonl", jsonl_folder(tmp_path, corpus, queries), chunk_tokens=50)
    pieces = [one.id for one in data.passages]
    assert pieces == [*(f"long#{number}" for number in range(len(pieces) - 1)), "short"]
    assert len(pieces) > 4
    text = "".join(one.text for one in data.passages[:-1])
    assert squeeze(text) == squeeze(long)
    assert data.questions[0].gold == {"long#0", "short"}
    assert data.questions[1].gold == set(pieces[:-1])
    assert data.notes == (
        f"1 documents of more than 100 tokens were cut into {len(pieces) - 1} pieces; "
        "--chunk-tokens sets their length",
    )
    retrieved = [{"id": "1", "question": "?", "blocks": ["long"]}]
    whole = load("jsonl", jsonl_folder(tmp_path, corpus, retrieved), chunk_tokens=50)
    assert [one.id for one in whole.passages] == ["long", "short"]
    assert not whole.notes
