"""Recordings: what goes out is written down, and nothing else happens."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import odd_contexts, queries

from ctxreuse import ContextBlock
from ctxreuse.measure.traces import recording
from ctxreuse.measure.traces.recorded_prompts import read_prompts
from ctxreuse.measure.traces.recording import TraceRecorder, paragraphs
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace
from ctxreuse.pipeline.prompt_turn import PromptPart


def recorded(folder):
    corpus = read_corpus(str(Path(folder, "corpus.jsonl")))
    return corpus, read_trace(str(Path(folder, "trace.jsonl")), corpus)


@given(st.lists(st.tuples(odd_contexts, queries), min_size=1, max_size=5), st.booleans())
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


def test_nobody_waits_for_a_slow_counter(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def count(text):
        if text == "slow":
            begun.set()
            assert go_on.wait(60)
        return 1

    with TraceRecorder(tmp_path, token_counter=count) as recorder:
        slow = threading.Thread(target=recorder.record, args=(["slow", "both"], "first?"))
        slow.start()
        assert begun.wait(60)
        recorder.record(["quick", "both"], "second?")
        assert recorder.parts["blocks"].entries == 2
        go_on.set()
        slow.join()
    corpus, trace = recorded(tmp_path)
    assert [one.query for one in trace] == ["second?", "first?"]
    assert sorted(block.text for block in corpus.values()) == ["both", "quick", "slow"]


calls = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 5), max_size=4)))


def counted_for(tenant, calls, folder):
    asked, counted = [], []
    with TraceRecorder(folder, token_counter=lambda text: asked.append(text) or 1) as recorder:
        for caller, numbers in calls:
            asked.clear()
            recorder.record([f"text {n}" for n in numbers], tenant=caller)
            if caller == tenant:
                counted.append(list(asked))
    assert recorder.faults == 0
    return counted


@given(calls)
def test_what_is_counted_for_a_tenant_does_not_depend_on_the_others(tmp_path_factory, calls):
    folder = tmp_path_factory.mktemp("recording")
    alone = [one for one in calls if one[0] == "a"]
    assert counted_for("a", calls, folder / "all") == counted_for("a", alone, folder / "alone")


texts = st.sampled_from(["one", "two", "three"])
named = st.builds(
    ContextBlock, id=st.integers(0, 5) | st.sampled_from(["x", "y" * 200]), text=texts
)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(named, max_size=4)), min_size=1, max_size=30)
)
def test_what_is_forgotten_is_written_again_and_recordings_stay_right(tmp_path_factory, requests):
    folder = tmp_path_factory.mktemp("recording")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "_BLOCKS", 6)
        with TraceRecorder(folder) as recorder:
            for tenant, blocks in requests:
                recorder.record(blocks, tenant=tenant)
                entries, bound = recorder.parts["blocks"]
                assert entries <= bound or len(recorder._names) == 1
                assert len(recorder._written) <= 6
    assert recorder.faults == 0
    _, trace = recorded(folder)
    for (_, blocks), written in zip(requests, trace, strict=True):
        unique = {block.key: block.text for block in blocks}
        assert [block.text for block in written.blocks] == list(unique.values())


def test_a_tenants_many_blocks_and_conversations_take_no_other_tenants_away(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_BLOCKS", 20)
    monkeypatch.setattr(recording, "_CONVERSATIONS", 5)
    with TraceRecorder(tmp_path) as recorder:
        for number in range(100):
            if number % 50 == 0:
                recorder.record(["kept"], tenant="quiet", conversation_id="c")
            blocks = [ContextBlock(id=f"{number}" * (number % 90), text=f"{number}"), "common"]
            recorder.record(blocks, tenant="loud", conversation_id=number)
            assert not any(part.entries > part.bound for part in recorder.parts.values())
    written = Path(tmp_path, "corpus.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["text"] == "kept" for line in written) == 1
    _, trace = recorded(tmp_path)
    assert [one.turn for one in trace if one.tenant == "quiet"] == [0, 1]
    assert {one.turn for one in trace if one.tenant == "loud"} == {0}


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
    assert paragraphs(text) == (blocks, query)


def test_prompts_before_the_first_request_are_read_and_none_is_kept_without_requests(tmp_path):
    for folder, contexts in ((tmp_path / "some", [["text"]]), (tmp_path / "none", [])):
        with TraceRecorder(folder) as recorder:
            recorder.record_prompt([PromptPart("user", "first")])
            for blocks in contexts:
                recorder.record(blocks)
            recorder.record_prompt([PromptPart("user", "first"), PromptPart("user", "second")])
        assert recorder.faults == 0
    corpus, _ = recorded(tmp_path / "some")
    prompts = list(read_prompts(tmp_path / "some" / "trace.jsonl", corpus))
    assert [len(one.parts) for one in prompts] == [1, 2]
    assert not [*(tmp_path / "none").iterdir()]
