import json
import zipfile

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


@pytest.fixture
def level(tmp_path):
    """Return the folder of the corpora, beside which there is one task about the second."""
    tasks(tmp_path, TASKS[1])
    return corpora(tmp_path)


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


def test_without_tasks_conversations_are_read_and_the_last_reviewer_decides(tmp_path):
    def context(identity, **votes):
        cast = {
            voter: {"value": value, "timestamp": time} for voter, (value, time) in votes.items()
        }
        return {"document_id": identity, "feedback": {"relevant": cast}}

    corpora(tmp_path)
    part = tmp_path / "mtrag-human" / "conversations"
    part.mkdir(parents=True)
    answer = {
        "speaker": "agent",
        "text": "All.",
        "contexts": [
            context("ib-1", ann=("yes", 1), bo=("no", 2)),
            context("ib-2", ann=("no", 1), bo=("yes", 2)),
            context("elsewhere", ann=("yes", 1)),
            {"document_id": "ib-1", "feedback": None},
        ],
    }
    conversation = {
        "author": "ann",
        "retriever": {"collection": {"name": "mt-rag-ibmcloud-elser-512-100-20240502"}},
        "messages": [*said("Which keys?"), answer, *said("And then?")],
    }
    law = {"retriever": {"collection": {"name": "mt-rag-govt"}}, "messages": said("What law?")}
    (part / "conversations.json").write_text(json.dumps([law, conversation]))
    assert load("mtrag", tmp_path).questions == (
        Question(
            "conversation-1<::>1",
            "Which keys?",
            ("All.",),
            frozenset({"ib-2"}),
            "conversation-1",
            0,
            "cloud",
        ),
        Question(
            "conversation-1<::>2",
            "And then?",
            conversation_id="conversation-1",
            turn=1,
            scope="cloud",
        ),
    )


def retrieval_tasks(folder, qrels, identity="c<::>2"):
    part = folder / "mtrag-human" / "retrieval_tasks" / "cloud"
    (part / "qrels").mkdir(parents=True)
    write_jsonl(part / "cloud_lastturn.jsonl", {"_id": identity, "text": "|user|: And then?"})
    (part / "qrels" / "dev.tsv").write_bytes(qrels)
    return part


def test_without_both_retrieval_tasks_are_read(tmp_path):
    corpora(tmp_path)
    qrels = b"query-id\tcorpus-id\tscore\nc<::>2\tib-1\t1\nc<::>2\tib-2\t0\nc<::>2\tother\t1\n"
    retrieval_tasks(tmp_path, qrels)
    assert load("mtrag", tmp_path).questions == (
        Question("c<::>2", "And then?", (), frozenset({"ib-1"}), "c", 1, "cloud"),
    )


@pytest.mark.parametrize(
    ("qrels", "identity", "problem"),
    [
        (
            b"query-id\tcorpus-id\tscore\nc<::>2 ib-1\n",
            "c<::>2",
            "qrels/dev.tsv:2: has 1 columns; a line must be query-id, corpus-id, score, with tabs "
            "between",
        ),
        (b"\xff", "c<::>2", "qrels/dev.tsv: not UTF-8 (byte 0); convert the file"),
        (b"", "c-2", "cloud_lastturn.jsonl:1: _id 'c-2' (str) is not <conversation><::><turn>"),
    ],
)
def test_faults_of_retrieval_tasks_are_named(tmp_path, qrels, identity, problem):
    corpora(tmp_path)
    part = retrieval_tasks(tmp_path, qrels, identity)
    assert error_of("mtrag", tmp_path) == f"{part}/{problem}"


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


# archives


def zipped(level, name="cloud.jsonl.zip", **members):
    with zipfile.ZipFile(level / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member.replace("__", "."), content)
    return level / name


def test_a_zipped_corpus_is_read_where_it_is_not_unpacked(tmp_path):
    level = corpora(tmp_path)
    tasks(tmp_path, *TASKS)
    text = (level / "cloud.jsonl").read_bytes()
    (level / "cloud.jsonl").unlink()
    zipped(level, cloud__jsonl=text, README__md="not read")
    zipped(level, "fiqa.jsonl.zip", fiqa__jsonl="broken, but the unpacked one is read")
    (level / "._cloud.jsonl").write_bytes(b"\xff what macOS leaves behind")
    assert load("mtrag", tmp_path) == Dataset("mtrag", PASSAGES, QUESTIONS)


def test_a_line_of_an_archive_is_named_with_its_fault(tmp_path, level):
    archive = zipped(level, "govt.jsonl.zip", govt__jsonl='{"_id": "a"}\n')
    assert error_of("mtrag", tmp_path) == (
        f"{archive}/govt.jsonl:1: field 'text' is missing; it must be str"
    )


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"a__jsonl": "", "b__jsonl": ""}, "holds 2 .jsonl files and not one; unpack it beside it"),
        ({}, "holds 0 .jsonl files and not one; unpack it beside it"),
    ],
)
def test_archives_that_no_corpus_comes_in_are_refused(tmp_path, members, problem, level):
    archive = zipped(level, "govt.jsonl.zip", **members)
    assert error_of("mtrag", tmp_path) == f"{archive}: {problem}"


def test_an_archive_that_unpacks_to_far_more_than_text_does_is_refused(tmp_path, level):
    archive = zipped(level, "govt.jsonl.zip", govt__jsonl=b" " * 1_000_000)
    with zipfile.ZipFile(archive) as opened:
        packed = opened.infolist()[0].compress_size
    assert error_of("mtrag", tmp_path) == (
        f"{archive}: unpacks {packed} to 1000000 bytes, which no corpus does; "
        "if you trust it, unpack it beside it"
    )


def test_an_archive_is_read_no_further_than_the_size_that_it_states(tmp_path, level):
    archive = zipped(level, "govt.jsonl.zip", govt__jsonl=" " * 100_000)
    stated = archive.read_bytes().replace((100_000).to_bytes(4, "little"), b"\x05\0\0\0")
    archive.write_bytes(stated)
    message = error_of("mtrag", tmp_path)
    assert message.startswith(f"{archive}: broken or encrypted archive (BadZipFile(")
    assert message.endswith("; get it again, or unpack it beside it")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"PK not a zip", "broken or encrypted archive (BadZipFile('File is not a zip file') "),
        (b"version https://git-lfs.github.com/spec/v1\n", "this is a Git LFS pointer and not"),
    ],
)
def test_files_that_are_no_archive_are_named(tmp_path, content, problem, level):
    (level / "govt.jsonl.zip").write_bytes(content)
    assert error_of("mtrag", tmp_path).startswith(f"{level}/govt.jsonl.zip: {problem}")


def broken(archive, packer):
    """Return an archive whose packed bytes, or else whose member's name, are no such ones."""
    name = "\u00fc.jsonl"
    with zipfile.ZipFile(archive, "w", packer) as file:
        file.writestr(name, '{"_id": "a", "text": "x"}\n' * 20)
    content = archive.read_bytes()
    if not packer:
        return content.replace(name.encode(), b"\xff\xff.jsonl")
    start = content.index(name.encode()) + len(name.encode())
    return content[:start] + b"\xff" * 20 + content[start + 20 :]


@pytest.mark.parametrize(
    "packer", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_whatever_is_broken_in_an_archive_is_named(tmp_path, packer, level):
    archive = level / "govt.jsonl.zip"
    archive.write_bytes(broken(archive, packer))
    message = error_of("mtrag", tmp_path)
    assert message.startswith(f"{archive}: broken or encrypted archive (")
    assert message.endswith("; get it again, or unpack it beside it")


def test_two_passages_of_one_id_are_named_unless_they_are_the_same(tmp_path, level):
    write_jsonl(level / "cloud.jsonl", *CLOUD, CLOUD[0])
    assert load("mtrag", tmp_path).passages == PASSAGES
    write_jsonl(level / "cloud.jsonl", *CLOUD, CLOUD[0] | {"text": "Other."})
    assert error_of("mtrag", tmp_path) == (
        f"{tmp_path}: passage 'ib-1' (str) is there twice, and not the same; "
        "give every passage its own id"
    )
