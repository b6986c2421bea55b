import pytest
from planning_helpers import write_jsonl
from public_data_helpers import error_of

from public_data.datasets import Dataset, Passage, Question, load

CLOUD = [
    {"_id": "ib-1", "text": "Keys are kept.", "title": "Keys", "url": ""},
    {"_id": "ib-2", "text": "Keys are lost."},
]
FIQA = [{"id": "f-1", "text": "Buy low."}]
PASSAGES = (
    Passage("ib-1", "Keys are kept.", "cloud"),
    Passage("ib-2", "Keys are lost.", "cloud"),
    Passage("f-1", "Buy low.", "fiqa"),
)


def said(*texts):
    return [
        {"speaker": "agent" if place % 2 else "user", "text": text}
        for place, text in enumerate(texts)
    ]


def task(conversation, turn, said_so_far, answer="", contexts=(), **fields):
    return {
        "conversation_id": conversation,
        "task_id": f"{conversation}<::>{turn}",
        "turn": str(turn),
        "Collection": "mt-rag-ibmcloud-elser-512-100-20240502",
        "contexts": [{"document_id": one, "score": 1.0, "text": "-"} for one in contexts],
        "input": said_so_far,
        "targets": said("", answer)[1:],
        "Multi-Turn": float("nan"),
    } | fields


TASKS = [
    task("c", 2, said("Which keys?", "All.", "And then?"), "Then too.", ["ib-2", "elsewhere"]),
    task("d", 1, said("Buy what?"), "", Collection=None, collection="mt-rag-fiqa-beir-elser"),
    task("c", 1, said("Which keys?"), "All.", ["ib-1"]),
    task("c", 4, said("Which keys?", "All.", "And then?", "-", "Why?", "-", "How?"), "So.", []),
    task("e", 1, said("What law?"), "Many.", ["g-1"], Collection="mt-rag-govt-elser-512-100"),
]
QUESTIONS = (
    Question("c<::>1", "Which keys?", ("All.",), frozenset({"ib-1"}), "c", 0, "cloud"),
    Question("c<::>2", "And then?", ("Then too.",), frozenset({"ib-2"}), "c", 1, "cloud"),
    Question("c<::>3", "Why?", (), frozenset(), "c", 2, "cloud"),
    Question("c<::>4", "How?", ("So.",), frozenset(), "c", 3, "cloud"),
    Question("d<::>1", "Buy what?", (), frozenset(), "d", 0, "fiqa"),
)


def corpora(folder):
    level = folder / "corpora" / "passage_level"
    level.mkdir(parents=True)
    write_jsonl(level / "cloud.jsonl", *CLOUD)
    write_jsonl(level / "fiqa.jsonl", *FIQA)
    return level


def tasks(folder, *lines, name="reference.jsonl", release="mtrag-human"):
    part = folder / release / "generation_tasks"
    part.mkdir(parents=True, exist_ok=True)
    write_jsonl(part / name, *lines)
    return part.parent


@pytest.mark.parametrize("release", ["mtrag-human", "human", "mtragun-human"])
def test_every_user_turn_is_a_question_about_its_corpus(tmp_path, release):
    corpora(tmp_path)
    folder = tasks(tmp_path, *TASKS, release=release)
    assert load("mtrag", tmp_path) == Dataset("mtrag", PASSAGES, QUESTIONS)
    assert load("mtrag", folder) == load("mtrag", tmp_path)


def test_the_older_benchmark_is_loaded_unless_the_successors_folder_is_given(tmp_path):
    corpora(tmp_path)
    tasks(tmp_path, TASKS[2])
    successor = tasks(tmp_path, TASKS[1], release="mtragun-human")
    assert load("mtrag", tmp_path).questions == (QUESTIONS[0],)
    assert load("mtrag", successor).questions == (QUESTIONS[4],)


def test_what_the_authors_retrieved_is_in_the_questions(tmp_path):
    corpora(tmp_path)
    tasks(tmp_path, TASKS[2], TASKS[1])
    retrieved = [
        task("c", 1, [], contexts=["ib-2", "elsewhere", "ib-1"]),
        task("d", 1, [], contexts=["elsewhere"]),
    ]
    tasks(tmp_path, *retrieved, name="RAG.jsonl")
    assert [question.blocks for question in load("mtrag", tmp_path).questions] == [
        ("ib-2", "ib-1"),
        None,
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"Collection": None}, "field 'collection' is missing; it must be str"),
        ({"input": said("", "only the agent")[1:]}, "field 'input' has no user's message; get"),
        ({"task_id": "c<::>1"}, "task_id 'c<::>1' (str) was there before; get the file again"),
    ],
)
def test_faults_of_tasks_are_named(tmp_path, fields, problem):
    corpora(tmp_path)
    folder = tasks(tmp_path, TASKS[2], TASKS[0] | fields)
    expected = f"{folder}/generation_tasks/reference.jsonl:2: {problem}"
    assert error_of("mtrag", tmp_path).startswith(expected)


def test_tasks_about_corpora_that_are_not_there_are_no_data_set(tmp_path):
    corpora(tmp_path)
    folder = tasks(tmp_path, TASKS[4])
    assert error_of("mtrag", tmp_path) == (
        f"{folder}: none of its tasks is about a corpus that is there (cloud, fiqa); add the "
        "others to corpora/passage_level (github.com/IBM/mt-rag-benchmark)"
    )


def test_without_corpora_the_first_is_named(tmp_path):
    tasks(tmp_path, TASKS[0])
    assert error_of("mtrag", tmp_path).startswith(
        f"{tmp_path}/corpora/passage_level/clapnq.jsonl: no such file; mtrag is "
    )


def test_two_passages_of_one_id_are_named_unless_they_are_the_same(tmp_path):
    level = corpora(tmp_path)
    tasks(tmp_path, TASKS[1])
    write_jsonl(level / "cloud.jsonl", *CLOUD, CLOUD[0])
    assert load("mtrag", tmp_path).passages == PASSAGES
    write_jsonl(level / "cloud.jsonl", *CLOUD, CLOUD[0] | {"text": "Other."})
    assert error_of("mtrag", tmp_path) == (
        f"{tmp_path}: passage 'ib-1' (str) is there twice, and not the same; "
        "give every passage its own id"
    )
