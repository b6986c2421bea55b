"""Recordings: what goes out is written down, and nothing else happens."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import odd_contexts, queries

from ctxreuse import ContextBlock
from ctxreuse.errors import InputFileError
from ctxreuse.evaluation.traces.recording import TraceRecorder, paragraphs
from ctxreuse.evaluation.traces.trace_files import read_corpus, read_trace


def recorded(folder):
    corpus = read_corpus(str(Path(folder, "corpus.jsonl")))
    return corpus, read_trace(str(Path(folder, "trace.jsonl")), corpus)


@given(st.lists(st.tuples(odd_contexts, queries), max_size=5), st.booleans())
def test_a_recording_is_what_was_sent(tmp_path_factory, requests, hash_only):
    folder = tmp_path_factory.mktemp("recording")
    with TraceRecorder(folder, hash_only=hash_only) as recorder:
        for blocks, query in requests:
            recorder.record(blocks, query)
    assert (recorder.requests, recorder.faults) == (len(requests), 0)
    _, trace = recorded(folder)
    assert len(trace) == len(requests)
    texts = {}
    for (blocks, query), traced in zip(requests, trace, strict=True):
        as_blocks = [
            one if isinstance(one, ContextBlock) else ContextBlock(text=one) for one in blocks
        ]
        unique = {one.key: one for one in as_blocks}.values()
        assert len(traced.blocks) == len(unique)
        for one, written in zip(unique, traced.blocks, strict=True):
            if hash_only:
                assert written.text == ""
                assert texts.setdefault(written.id, one.text) == one.text
            else:
                assert written.text == one.text
        assert traced.query == ("" if hash_only else query)


def test_without_texts_nothing_can_be_read_and_equal_texts_are_equal_names(tmp_path):
    secrets = ("Alice earns 5", "what does Alice earn", "You are Bob's", "chat-7", "acme")
    with TraceRecorder(tmp_path, hash_only=True) as recorder:
        for _ in range(2):
            recorder.record(
                [ContextBlock(id="salaries/alice.txt", text=secrets[0])],
                secrets[1],
                system=secrets[2],
                conversation_id=secrets[3],
                tenant=secrets[4],
            )
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert not any(secret in written for secret in (*secrets, "alice"))
    corpus, (first, second) = recorded(tmp_path)
    assert first.blocks == second.blocks
    assert first.blocks[0].tokens == 4
    assert (first.turn, second.turn) == (0, 1)
    assert len(corpus) == 1


def test_two_recordings_of_the_same_have_other_names(tmp_path):
    names = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        with TraceRecorder(folder, hash_only=True) as recorder:
            recorder.record(["a text"])
        names += [set(recorded(folder)[0])]
    assert not names[0] & names[1]


def test_only_the_owner_may_read_it_and_it_is_not_written_over(tmp_path):
    with TraceRecorder(tmp_path / "new" / "one"):
        pass
    if os.name == "posix":
        mode = (tmp_path / "new" / "one" / "trace.jsonl").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
    with pytest.raises(InputFileError, match="there is a recording already; choose another"):
        TraceRecorder(tmp_path / "new" / "one")


def test_a_changed_text_under_the_same_id_is_another_block(tmp_path):
    with TraceRecorder(tmp_path) as recorder:
        for text in ("old", "new", "old"):
            recorder.record([ContextBlock(id=1, text=text)])
    _, trace = recorded(tmp_path)
    assert [one.blocks[0].text for one in trace] == ["old", "new", "old"]
    assert [one.blocks[0].id == 1 for one in trace] == [True, False, True]


def test_a_fault_is_counted_and_nobody_else_hears_of_it(tmp_path, caplog):
    recorder = TraceRecorder(tmp_path)
    recorder.record([object()], "why")
    recorder.close()
    recorder.record(["a"], "why")
    assert recorder.faults == 2
    assert "why" not in caplog.text


def test_threads_write_whole_lines(tmp_path):
    with TraceRecorder(tmp_path) as recorder:

        def write(number):
            for turn in range(50):
                recorder.record([f"{number} {turn}", "common"], conversation_id=number)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    corpus, trace = recorded(tmp_path)
    assert (len(corpus), len(trace)) == (201, 200)
    for number in range(4):
        turns = [one.turn for one in trace if one.conversation_id == number]
        assert turns == list(range(50))


def test_lines_that_lack_a_text_must_have_tokens(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"id": 1}) + "\n")
    with pytest.raises(InputFileError, match="field 'text' is missing"):
        read_corpus(str(path))


@pytest.mark.parametrize(
    ("text", "blocks", "query"),
    [
        ("", [], ""),
        ("Why?", [], "Why?"),
        ("A text.\n\nAnother.\n \nWhy?", ["A text.", "Another."], "Why?"),
        ("[1] A text.\n\n(2) Another.\n\nWhy?", ["A text.", "Another."], "Why?"),
        ("[Doc_3] A text.\n\nDocument 12: Another.\n\nWhy?", ["A text.", "Another."], "Why?"),
        ("1998 was warm.\n\nWhy?", ["1998 was warm."], "Why?"),
    ],
)
def test_paragraphs_are_blocks_and_the_last_one_is_the_question(text, blocks, query):
    read = paragraphs(text)
    assert (read.blocks, read.query) == (blocks, query)
