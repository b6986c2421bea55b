import json

import pytest
from public_data_helpers import error_of

from public_data.datasets import Dataset, Passage, Question, load


def write_json(file, value):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value), encoding="utf-8")
    return file


# MultiHop-RAG

ARTICLES = [
    {
        "title": "Rain",
        "author": None,
        "source": "Herald",
        "published_at": "2023-10-01T00:00:00+00:00",
        "category": "weather",
        "url": "https://herald.example/rain",
        "body": "It rained in Oslo.\n\nIt did not rain in Bergen.",
    },
    {"title": "Snow", "url": "https://herald.example/snow", "body": "It snowed in Oslo."},
    {"title": "Sun", "author": "A. B.", "url": None, "body": "The sun shone."},
]
HOPS = [
    {
        "query": "Which town had rain and snow?",
        "answer": "Oslo",
        "question_type": "inference_query",
        "evidence_list": [
            {
                "title": "Rain",
                "author": None,
                "url": "https://herald.example/rain",
                "fact": "It rained\nin  Oslo.",
            },
            {"title": "Snow", "url": "https://moved.example/snow", "fact": "Snow fell on Oslo."},
        ],
    },
    {
        "query": "Who won?",
        "answer": "Insufficient information.",
        "question_type": "null_query",
        "evidence_list": [],
    },
    {"query": "What shone?", "answer": None, "evidence_list": [{"title": "Sun", "fact": None}]},
]


@pytest.mark.parametrize("folder", ["", "dataset"])
def test_multihop_rag_gold_is_where_the_fact_stands_else_the_whole_article(tmp_path, folder):
    write_json(tmp_path / folder / "corpus.json", ARTICLES)
    write_json(tmp_path / folder / "MultiHopRAG.json", HOPS)
    assert load("multihop-rag", tmp_path, chunk_tokens=9) == Dataset(
        "multihop-rag",
        (
            Passage("article-0#0", "Rain\n\nIt rained in Oslo."),
            Passage("article-0#1", "Rain\n\nIt did not rain in Bergen."),
            Passage("article-1#0", "Snow\n\nIt snowed in Oslo."),
            Passage("article-2#0", "Sun\n\nThe sun shone."),
        ),
        (
            Question(
                "q0",
                "Which town had rain and snow?",
                ("Oslo",),
                frozenset({"article-0#0", "article-1#0"}),
            ),
            Question("q1", "Who won?", ("Insufficient information.",)),
            Question("q2", "What shone?", (), frozenset({"article-2#0"})),
        ),
    )


@pytest.mark.parametrize(
    ("article", "hop", "problem"),
    [
        ({"body": None}, {}, "corpus.json[0]: field 'body' is None (NoneType); it must be str"),
        (
            {},
            {"evidence_list": "Rain"},
            "MultiHopRAG.json[0].evidence_list: 'Rain' (str) is no list of JSON objects",
        ),
        (
            {"title": "Other", "url": "other"},
            {},
            "MultiHopRAG.json: nothing that it names is in the corpus, such as "
            "'https://herald.example/rain' (str); take both from the same release",
        ),
    ],
)
def test_multihop_rag_faults_are_named(tmp_path, article, hop, problem):
    write_json(tmp_path / "corpus.json", [ARTICLES[0] | article])
    write_json(tmp_path / "MultiHopRAG.json", [HOPS[0] | hop])
    assert error_of("multihop-rag", tmp_path).startswith(f"{tmp_path}/{problem}")


# LoCoMo

SAMPLE = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ann",
        "speaker_b": "Bo",
        "session_10_date_time": "2 pm",
        "session_10": [{"speaker": "Bo", "dia_id": "D10:1", "text": "Last."}],
        "session_2_date_time": None,
        "session_2": [
            {
                "speaker": "Ann",
                "dia_id": "D2:1",
                "text": "Look!",
                "img_url": ["http://x"],
                "blip_caption": "a dog",
                "query": "dog",
            },
            {"speaker": "Bo", "dia_id": "D2:5", "blip_caption": "a cat"},
        ],
        "session_3_date_time": "a session without turns",
        "session_4": None,
    },
    "event_summary": {},
    "qa": [
        {"question": "What?", "answer": "A dog", "evidence": ["D2:1"], "category": 4},
        {"question": "When?", "answer": 2022, "evidence": ["D2:1; D10:1", "D:2:05"]},
        {"question": "Where?", "answer": "Here", "evidence": ["D", "D2:1 D2:5,D9:9"]},
        {"question": "Trap?", "adversarial_answer": "x", "evidence": ["D2:1"], "category": 5},
        {"question": "Null?", "answer": None, "evidence": None},
        {"question": "Really?", "answer": "No", "adversarial_answer": "Yes", "evidence": "D10:1"},
    ],
}


def test_locomo_turns_are_memories_of_their_sample(tmp_path):
    def asked(turn, text, answers=(), gold=()):
        ids = frozenset(f"conv-1/{one}" for one in gold)
        return Question(f"conv-1-q{turn}", text, answers, ids, "conv-1", turn, "conv-1")

    expected = Dataset(
        "locomo",
        (
            Passage("conv-1/D2:1", "Ann: Look! [shares a dog]", "conv-1"),
            Passage("conv-1/D2:5", "Bo: [shares a cat]", "conv-1"),
            Passage("conv-1/D10:1", "Bo (2 pm): Last.", "conv-1"),
        ),
        (
            asked(0, "What?", ("A dog",), ["D2:1"]),
            asked(1, "When?", ("2022",), ["D2:1", "D10:1", "D2:5"]),
            asked(2, "Where?", ("Here",), ["D2:1", "D2:5"]),
            asked(3, "Trap?"),
            asked(4, "Null?"),
            asked(5, "Really?", ("No",), ["D10:1"]),
        ),
    )
    file = write_json(tmp_path / "data" / "locomo10.json", [SAMPLE])
    assert load("locomo", file) == expected
    assert load("locomo", file.parent) == expected
    assert load("locomo", tmp_path) == expected


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"conversation": []}, "[0].conversation: [] (list) is no JSON object"),
        (
            {"conversation": {"session_1": [{"speaker": "A", "dia_id": "D1:1"}] * 2}},
            "[0].conversation.session_1[1]: dia_id 'D1:1' (str) was there before; "
            "get the file again",
        ),
        (
            {"qa": [{"question": "?", "answer": "a", "evidence": [{}]}]},
            "[0].qa[0]: field 'evidence' holds {} (dict); it must hold texts",
        ),
    ],
)
def test_locomo_faults_are_named(tmp_path, change, problem):
    file = write_json(tmp_path / "locomo10.json", [SAMPLE | change])
    assert error_of("locomo", tmp_path) == f"{file}{problem}"


def test_a_sample_that_is_there_twice_is_named(tmp_path):
    file = write_json(tmp_path / "locomo10.json", [SAMPLE, SAMPLE])
    assert error_of("locomo", file) == (
        f"{file}[1]: sample_id 'conv-1' (str) was there before; get the file again"
    )
