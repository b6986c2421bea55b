"""What Mem0 is searched for and finds is recorded, and changes nothing of the application."""

import asyncio
import json

import pytest
from langchain_model_helpers import RecordingModel
from mem0_stores import lettered
from python_processes import python

from ctxreuse import request_context
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.verdict import verdict
from ctxreuse.measure.traces.recorded_prompts import memory_pieces
from ctxreuse.measure.traces.recording import TraceRecorder
from ctxreuse.planning.prompt_records import made_of
from langchain_ctxreuse.recording import recording as recording_langchain
from mem0_ctxreuse.recording import recording


@pytest.fixture
def mem0(monkeypatch):
    import mem0

    def found(self, query, **options):
        return {"results": lettered("ab")}

    async def awaited(self, query, **options):
        return found(self, query)

    for kind in (mem0.Memory, mem0.MemoryClient):
        monkeypatch.setattr(kind, "search", found)
    for kind in (mem0.AsyncMemory, mem0.AsyncMemoryClient):
        monkeypatch.setattr(kind, "search", awaited)
    return mem0


@pytest.mark.parametrize("kind", ["Memory", "AsyncMemory", "MemoryClient", "AsyncMemoryClient"])
def test_searches_are_recorded_and_found_as_before(mem0, tmp_path, kind):
    store = object.__new__(getattr(mem0, kind))
    search = type(store).search
    with (
        TraceRecorder(tmp_path / "recording") as recorder,
        recording(recorder),
        request_context(tenant="t", conversation_id="c"),
    ):
        answer = store.search("Where?", filters={"user_id": "u"})
        answer = asyncio.run(answer) if kind.startswith("Async") else answer
    assert answer == {"results": lettered("ab")}
    assert type(store).search is search
    [line] = map(json.loads, (tmp_path / "recording" / "trace.jsonl").read_text().splitlines())
    assert (line["query"], line["source"], line["blocks"]) == ("Where?", "Mem0", ["id-a", "id-b"])
    assert {"tenant", "conversation_id"} <= line.keys()


def test_odd_results_pass_through(mem0, monkeypatch, tmp_path):
    store = object.__new__(mem0.Memory)
    monkeypatch.setattr(mem0.Memory, "search", lambda self, query: {"results": 7})
    with TraceRecorder(tmp_path / "recording") as recorder, recording(recorder):
        assert store.search("Where?") == {"results": 7}
    assert (recorder.requests, recorder.faults) == (0, 1)


def test_mem0_is_recorded_when_the_program_imports_it_and_not_imported_before(tmp_path):
    ran = python(
        f"""
import sys
import mem0_stores  # which sets where Mem0 writes
from ctxreuse.measure.traces.recording import TraceRecorder
from mem0_ctxreuse.recording import recording

before = list(sys.meta_path)
with TraceRecorder({str(tmp_path / "recording")!r}) as recorder:
    with recording(recorder):
        print("mem0" in sys.modules)
        import mem0
        print(mem0.Memory.search.__module__, hasattr(mem0.Memory.search, "__wrapped__"))
    print(hasattr(mem0.Memory.search, "__wrapped__"), sys.meta_path == before)
    with recording(recorder):
        pass
    print(sys.meta_path == before)
"""
    )
    assert ran.stdout.split("\n")[:4] == ["False", "mem0.memory.main True", "False True", "True"]


@pytest.mark.parametrize("separator", ["\n- ", ", ", "; "])
def test_estimate_names_reuse_memory_for_listed_memories(mem0, monkeypatch, tmp_path, separator):
    orders = ["abcdefgh", "badcfehg", "hgfedcba", "efghabcd"] * 4
    found = iter(orders)
    monkeypatch.setattr(
        mem0.Memory, "search", lambda self, query: {"results": lettered(next(found))}
    )
    store, model = object.__new__(mem0.Memory), RecordingModel()
    folder = tmp_path / "recording"
    with TraceRecorder(folder) as recorder, recording(recorder), recording_langchain(recorder):
        for number in range(len(orders)):
            listed = separator.join(one["memory"] for one in store.search("?")["results"])
            model.invoke(f"User memories:{separator}{listed}\n\nQuestion {number}?")
    said = verdict(measure_savings(EstimateConfig(trace=str(folder))))
    assert said.next_step == "search with ReuseMemory(memory)."
    assert said.measured["saved_share"] > 0.3


def test_a_result_as_json_is_cut_into_its_memories_and_another_text_is_not():
    text = json.dumps({"results": lettered("ab")}, ensure_ascii=False)
    pieces = memory_pieces(text)
    assert [json.loads(text[one.start : one.end]) for one in pieces] == lettered("ab")
    assert [one.document for one in pieces] == [one["memory"] for one in lettered("ab")]
    other = json.dumps({"results": [{**one, "score": 7} for one in lettered("ab")]})
    again = [made_of(other, one.lasting) for one in memory_pieces(other)]
    assert again == [made_of(text, one.lasting) for one in pieces]
    deep = '{"results": [' + "[" * 100_000
    for other in (
        "",
        "a text",
        '{"results": []}',
        '{"results": [7]}',
        '{"results": [{"a": 1',
        deep,
    ):
        assert memory_pieces(other) == []
