import json

import pytest
from public_data_helpers import error_of

from public_data.datasets import Dataset, Passage, Question, load
from public_data.datasets.narrativeqa import html_text


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


# NarrativeQA

DOCUMENTS = """document_id,set,kind,story_url,story_file_size,wiki_url,wiki_title,story_word_count
d1,test,movie,http://x,1,http://y,"Tiger, Hidden",9
d2,train,gutenberg,http://x,1,http://y,Old Tale,9
d3,valid,gutenberg,http://x,1,http://y,Unasked,9
"""
QAPS = '''document_id,set,question,answer1,answer2,question_tokenized,answer1_tokenized
d1,test,Who hides?,"The ""tiger""",A tiger,Who hides ?,x
d2,train,Who is old?,The tale,The tale,x,x
d1,test,Why?,Fear,,x,x
d4,test,Who is missing?,All,All,x,x
'''
SUMMARIES = """document_id,set,summary,summary_tokenized
d1,test," A tiger
hides, here.",x
d2,train,,x
d3,valid,Nobody asks.,x
"""


def narrativeqa(folder, documents=DOCUMENTS, qaps=QAPS, summaries=SUMMARIES):
    (folder / "third_party" / "wikipedia").mkdir(parents=True)
    (folder / "documents.csv").write_text(documents, encoding="utf-8")
    (folder / "qaps.csv").write_text(qaps, encoding="utf-8")
    (folder / "third_party" / "wikipedia" / "summaries.csv").write_text(summaries, encoding="utf-8")
    return folder


def stories(folder, **contents):
    (folder / "tmp").mkdir()
    for name, content in contents.items():
        (folder / "tmp" / f"{name}.content").write_bytes(content)
    return folder


def test_narrativeqa_asks_about_summaries_where_there_are_no_stories(tmp_path):
    assert load("narrativeqa", narrativeqa(tmp_path)) == Dataset(
        "narrativeqa",
        (Passage("d1#0", "Tiger, Hidden\n\nA tiger\nhides, here."),),
        (
            Question("d1-q0", "Who hides?", ('The "tiger"', "A tiger")),
            Question("d1-q1", "Why?", ("Fear",)),
        ),
    )


def test_narrativeqa_asks_about_stories_where_they_are_and_about_nothing_else(tmp_path):
    page = b"<HTML><body><script>if (a<b) x()</script><pre>INT. CAF\xc9\n<b>A</b> tiger &amp; I"
    folder = stories(narrativeqa(tmp_path), d1=page, d2=b"", d3=b"Not read: nobody asks.")
    assert load("narrativeqa", folder) == Dataset(
        "narrativeqa",
        (Passage("d1#0", "Tiger, Hidden\n\nINT. CAFÉ\nA tiger & I"),),
        (
            Question("d1-q0", "Who hides?", ('The "tiger"', "A tiger")),
            Question("d1-q1", "Why?", ("Fear",)),
        ),
    )


def test_narrativeqa_cuts_plain_stories_which_are_no_html(tmp_path):
    folder = stories(narrativeqa(tmp_path), d2="\ufeffOnce a <b> b\n\nupon a time".encode())
    data = load("narrativeqa", folder, chunk_tokens=7)
    assert data.passages == (
        Passage("d2#0", "Old Tale\n\nOnce a <b> b"),
        Passage("d2#1", "Old Tale\n\nupon a time"),
    )
    assert [question.id for question in data.questions] == ["d2-q0"]


def test_a_document_id_is_no_path(tmp_path):
    (tmp_path / "secret.content").write_text("secret")
    folder = tmp_path / "data"
    narrativeqa(
        folder, DOCUMENTS.replace("d1,", "../../secret,"), QAPS.replace("d1,", "../../secret,")
    )
    assert [
        passage.id for passage in load("narrativeqa", stories(folder, d2=b"tale")).passages
    ] == ["d2#0"]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>one<p>two<br/>three", "one\ntwo\nthree"),
        ("<style>p {}</style><div>one</div> two &eacute;&#8212;", "one\n two é—"),
        ("<head><title>T</title></head><script>x", "T"),
        ("a < b <!-- gone --> <unknown>c</unknown>", "a < b  c"),
    ],
)
def test_the_text_of_a_page_is_what_a_browser_shows(page, text):
    assert html_text(page) == text


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (
            {"documents": "document_id,set\nd1,test\n"},
            "documents.csv: column 'wiki_title' is missing; the first line must name the columns "
            "document_id, wiki_title",
        ),
        ({"documents": ""}, "documents.csv: column 'document_id' is missing; the first line must"),
        (
            {"documents": DOCUMENTS + "d1,test,movie,x,1,y,Again,9\n"},
            "documents.csv:5: document_id 'd1' (str) was there before; get the file again",
        ),
        (
            {"qaps": QAPS + "d1,test\n"},
            "qaps.csv:6: field 'question' is None (NoneType); it must be str",
        ),
        (
            {"qaps": QAPS + 'd1,test,"no end'},
            "qaps.csv:6: broken CSV (unexpected end of data); get the file again",
        ),
        (
            {"summaries": "document_id,summary\n"},
            "qaps.csv: none of its documents has a text; add "
            "third_party/wikipedia/summaries.csv, or run download_stories.sh "
            "(github.com/google-deepmind/narrativeqa)",
        ),
    ],
)
def test_narrativeqa_faults_are_named(tmp_path, parts, problem):
    message = error_of("narrativeqa", narrativeqa(tmp_path, **parts))
    assert message.startswith(f"{tmp_path}/{problem}")


def test_a_csv_file_that_is_not_utf8_is_named(tmp_path):
    (narrativeqa(tmp_path) / "qaps.csv").write_bytes(b"document_id,\xff")
    assert error_of("narrativeqa", tmp_path) == (
        f"{tmp_path}/qaps.csv: not UTF-8 (byte 12); convert the file"
    )


def test_a_story_that_is_still_compressed_is_named(tmp_path):
    folder = stories(narrativeqa(tmp_path), d1=b"\x1f\x8b\x08")
    assert error_of("narrativeqa", folder) == (
        f"{folder}/tmp/d1.content: compressed; name it d1.content.gz and run gunzip on it"
    )


# QASPER


def annotated(unanswerable=False, spans=(), yes_no=None, free_form="", evidence=()):
    return {
        "answer": {
            "unanswerable": unanswerable,
            "extractive_spans": list(spans),
            "yes_no": yes_no,
            "free_form_answer": free_form,
            "evidence": list(evidence),
            "highlighted_evidence": [],
        },
        "annotation_id": "a",
        "worker_id": "w",
    }


PAPER = {
    "title": "Seeds",
    "abstract": "We sow.",
    "full_text": [
        {"section_name": "Method", "paragraphs": ["One seed.", "", "Two seeds."]},
        {"section_name": None, "paragraphs": ["A long last paragraph\nthat is cut in two parts."]},
        {"section_name": "Empty", "paragraphs": None},
    ],
    "qas": [
        {
            "question": "How many?",
            "question_id": "q1",
            "answers": [
                annotated(spans=["one", "two"], evidence=["One seed.", "We  sow."]),
                annotated(free_form="Three", yes_no=True, evidence=["FLOAT SELECTED: Table 1: x"]),
                annotated(free_form="Three"),
            ],
        },
        {
            "question": "Is it cut?",
            "question_id": "q2",
            "answers": [
                annotated(
                    yes_no=True, evidence=["A long last paragraph that is cut in two parts."]
                ),
                annotated(yes_no=False),
                annotated(unanswerable=True, spans=["not this"], evidence=["Two seeds."]),
                annotated(),
            ],
        },
        {"question": "Nobody answered?", "question_id": "q3", "answers": []},
    ],
}
QASPER = Dataset(
    "qasper",
    (
        Passage("1909.00694#0", "Seeds\nAbstract\n\nWe sow."),
        Passage("1909.00694#1", "Seeds\nMethod\n\nOne seed.\n\nTwo seeds."),
        Passage("1909.00694#2", "Seeds\n\nA long last paragraph"),
        Passage("1909.00694#3", "Seeds\n\nthat is cut in two parts."),
    ),
    (
        Question(
            "q1", "How many?", ("one, two", "Three"), frozenset({"1909.00694#0", "1909.00694#1"})
        ),
        Question(
            "q2",
            "Is it cut?",
            ("Yes", "No", "Unanswerable"),
            frozenset({"1909.00694#2", "1909.00694#3"}),
        ),
        Question("q3", "Nobody answered?"),
    ),
)


def test_qasper_puts_paragraphs_of_a_section_together_and_finds_their_evidence(tmp_path):
    file = write_json(tmp_path / "qasper-dev-v0.3.json", {"1909.00694": PAPER})
    assert load("qasper", file, chunk_tokens=11) == QASPER
    assert load("qasper", tmp_path, chunk_tokens=11) == QASPER


def test_qasper_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path):
    for part in ("train", "dev", "test"):
        paper = {"abstract": part, "qas": [{"question": "?", "question_id": part}]}
        write_json(tmp_path / f"qasper-{part}-v0.3.json", {f"p-{part}": paper})
    assert [question.id for question in load("qasper", tmp_path).questions] == [
        "dev",
        "test",
        "train",
    ]


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("full_text",), {}, ".full_text: {} (dict) is no list of JSON objects"),
        (
            ("full_text", 0, "paragraphs"),
            [None],
            ".full_text[0]: field 'paragraphs' holds None (NoneType); it must hold texts",
        ),
        (
            ("qas", 1, "answers", 0, "answer", "yes_no"),
            "yes",
            ".qas[1].answers[0].answer: field 'yes_no' is 'yes' (str); it must be bool",
        ),
    ],
)
def test_qasper_faults_are_named(tmp_path, path, value, problem):
    paper = json.loads(json.dumps(PAPER))
    place = paper
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    file = write_json(tmp_path / "qasper-dev.json", {"p": paper})
    assert error_of("qasper", file).startswith(f"{file}: p{problem}")


def test_papers_and_questions_that_stand_twice_are_named(tmp_path):
    write_json(tmp_path / "qasper-dev-v0.2.json", {"p": PAPER})
    file = write_json(tmp_path / "qasper-dev-v0.3.json", {"p": PAPER})
    assert error_of("qasper", tmp_path) == (
        f"{file}: paper 'p' (str) is in another file, too; leave only one release in the folder"
    )

    file = write_json(tmp_path / "q.json", {"a": PAPER, "b": PAPER})
    assert error_of("qasper", file) == (
        f"{file}: question 'q1' (str) is there twice, and not the same; "
        "give every question its own id"
    )


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
