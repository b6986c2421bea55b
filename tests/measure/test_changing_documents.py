"""Documents whose text changes from request to request are found, named and mended."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from itertools import count

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.base.base_retriever import BaseRetriever as NodeRetriever
from llama_index.core.llms import LLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from mem0_stores import FakeMemory  # sets what mem0 reads when it is imported
from prompt_programs import Asked, Engine, ask_workflow, llm_on, model_on, recorded

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.measure.doctor.examination import check_documents, check_fronts
from ctxreuse.measure.doctor.findings import Verdict
from ctxreuse.measure.doctor.findings import verdict as summed_up
from ctxreuse.measure.lint import lint
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.verdict import SavingsVerdict, verdict
from ctxreuse.measure.traces.changing_documents import changing_documents
from ctxreuse.measure.traces.recorded_prompts import read_recording
from ctxreuse.measure.traces.trace_files import TraceRequest
from langchain_ctxreuse import format_context
from mem0_ctxreuse import ReuseMemory

_RANDOM = random.Random(8)
_WORDS = "river bridge harbour winter market engine garden paper signal valley copper"
TEXTS = [
    " ".join(_RANDOM.choices(_WORDS.split(), k=60)) + f" ({name})" for name in "abcdefghijklmnop"
]
FOUND = [_RANDOM.sample(range(len(TEXTS)), 5) for _ in range(40)]


class Retriever(BaseRetriever):
    """Returns documents with a line of the moment in them, or none."""

    line: str = ""
    has_ids: bool = True
    calls: object = None

    def _get_relevant_documents(self, query, *, run_manager):
        number = int(query.split()[-1])
        moment = self.line.format(n=number * 7 + 10_000)
        return [
            Document(
                f"{moment}{TEXTS[n]}",
                id=f"d{n}" if self.has_ids else None,
                metadata={"score": f"0.{number}{n}", "rated": f"0.{9 - rank}{number % 3}"},
            )
            for rank, n in enumerate(FOUND[number])
        ]


def langchain(line: str, heading: str, **options: bool) -> Callable[[Engine, bool], None]:
    def run(engine: Engine, is_changed: bool) -> None:
        prompt = ("" if is_changed else heading) + "{page_content}"
        retriever = Retriever(line="" if is_changed else line, **options)

        def joined(documents: Sequence[Document]) -> str:
            if is_changed:
                return format_context(documents)
            texts = [
                prompt.format(page_content=one.page_content, **one.metadata) for one in documents
            ]
            return "\n\n".join(texts)

        model = model_on(engine, is_changed)
        template = ChatPromptTemplate.from_template("Help.\n\n{context}\n\n{question}")
        inputs = {"context": retriever | joined, "question": RunnablePassthrough()}
        for number in range(len(FOUND)):
            (inputs | template | model).invoke(f"Which is number {number}")

    return run


def memories(shown: Callable[[list[dict[str, object]]], str]) -> Callable[[Engine, bool], None]:
    def run(engine: Engine, is_changed: bool) -> None:
        found, model = FakeMemory(), Asked(engine=engine)
        memory = ReuseMemory(found, planner=ReusePlanner()) if is_changed else found
        for number, row in enumerate(FOUND):
            found.found = [
                {"id": f"m{n}", "memory": TEXTS[n], "score": f"0.{n}{number}7", "hash": "0" * 32}
                for n in row
            ]
            results = memory.search(f"number {number}")["results"]
            for one in results if is_changed else ():
                del one["score"]
            model.invoke(f"Memories:\n{shown(results)}\n\nWhich is number {number}")

    return run


def in_lines(results: list[dict[str, object]]) -> str:
    lines = [(f"score: {one.get('score')}", str(one["memory"])) for one in results]
    return "\n".join("\n".join(one["score" not in results[0] :]) for one in lines)


class Nodes(NodeRetriever):
    def __init__(self, keys: Sequence[str], excluded: Sequence[str]) -> None:
        super().__init__()
        self._keys, self._excluded, self._calls = keys, list(excluded), count()

    def _retrieve(self, query_bundle):
        number = int(query_bundle.query_str.split()[-1])
        return [
            NodeWithScore(
                node=TextNode(
                    id_=f"n{n}",
                    text=TEXTS[n],
                    metadata={key: f"10:00:{next(self._calls)}" for key in self._keys},
                    excluded_llm_metadata_keys=self._excluded,
                ),
                score=1 - rank / 9,
            )
            for rank, n in enumerate(FOUND[number])
        ]


def llamaindex(*keys: str) -> Callable[[Engine, bool], None]:
    def run(engine: Engine, is_changed: bool) -> None:
        llm = llm_on(engine, is_changed)
        template = PromptTemplate("{context_str}\n\nQuestion: {query_str}")
        made = get_response_synthesizer(llm=llm, text_qa_template=template)
        asking = RetrieverQueryEngine(Nodes(keys, keys if is_changed else []), made)
        for number in range(len(FOUND)):
            asking.query(f"Which is number {number}")

    return run


class Answering(Workflow):
    llm: LLM
    is_changed: bool

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        found = await Nodes(["at"], ["at"]).aretrieve(ev.question)
        tens, ones = divmod(int(ev.question.split()[-1]), 10)
        seen = "" if self.is_changed else f"at {'abcd'[tens]}{'abcdefghij'[ones]}\n"
        texts = [f"{seen}{one.text}" for one in found]
        return StopEvent(await self.llm.acomplete("\n\n".join([*texts, ev.question])))


def workflow(engine: Engine, is_changed: bool) -> None:
    answering = Answering()
    answering.is_changed = is_changed
    questions = [f"Which is number {number}" for number in range(len(FOUND))]
    ask_workflow(answering, engine, is_changed, questions)


APPLICATIONS = {
    "a time in each document": (
        langchain("Retrieved at 10:{n}\n", ""), "Retrieved at", "keep them out of page_content"),
    "a time in documents without ids": (
        langchain("Retrieved at 10:{n}\n", "", has_ids=False),
        "Retrieved at", "keep them out of page_content"),
    "a time in a document's first sentence": (
        langchain("[seen 10:{n}] ", ""), "[seen", "keep them out of page_content"),
    "a long line in each document": (
        langchain("Retrieved at 10:{n} by the harbour's service from its index of winter\n", ""),
        "Retrieved at", "keep them out of page_content"),
    "a score in an element": (
        langchain("", '<a of="the one" score="{score}">'), '<a of="the one"', "document_prompt"),
    "two lines above each document": (
        langchain("", "score: {score}\nThis is rated by the harbour as {rated}\n"),
        "score:", "leave them out of"),
    "scores of memories": (
        memories(in_lines), "score:", "leave them out of what you write on each memory"),
    "scores of memories as JSON": (
        memories(json.dumps), "", "leave them out of what you write on each memory"),
    "a score above each document": (
        langchain("", "score: {score}\n"), "score:", "document_prompt"),
    "a score above documents without ids": (
        langchain("", "score: {score}\n", has_ids=False), "score:", "document_prompt"),
    "a score that comes again above some": (
        langchain("", "rated: {rated}\n"), "rated:", "document_prompt"),
    "a node's metadata": (
        llamaindex("retrieved_at"), "retrieved_at:",
        'add "retrieved_at" to the nodes\' excluded_llm_metadata_keys'),
    "two keys of a node's metadata": (
        llamaindex("seen", "asked at"), "seen:", 'add "seen" and "asked at" to the nodes\''),
    "a postprocessor's time": (
        llamaindex("__last_accessed__"), "__last_accessed__:", "time_access_refresh=False"),
    "a time that a workflow writes on nodes": (
        workflow, "at", "leave them out of what you write on each document (text_template)"),
}  # fmt: skip


def said_of(folder) -> SavingsVerdict:
    return verdict(measure_savings(EstimateConfig(trace=str(folder))))


@pytest.mark.parametrize("name", APPLICATIONS)
def test_what_changes_in_documents_is_named_and_costs_what_the_engine_says(
    tmp_path, monkeypatch, name
):
    import mem0

    monkeypatch.setattr(mem0, "Memory", FakeMemory)  # whose searches are recorded
    run, line, remedy = APPLICATIONS[name]
    plain = recorded(tmp_path, run)
    said, changed = said_of(tmp_path), Engine()
    run(changed, True)
    assert remedy in said.next_step, said
    assert re.match(r"Lines (in|around the text of) documents ", said.also[0])
    assert not line or f"behind “{line}" in said.also[0]
    share = said.measured["saved_share"]
    assert share == pytest.approx(1 - changed.computed / plain, abs=0.05)
    blocks, trace, _ = read_recording(str(tmp_path))
    found, *others = lint(trace, blocks).findings
    assert found.check == "documents whose text changes"
    assert "volatile text in front" not in [one.check for one in others]
    assert all("what `ctxreuse estimate` says" in one.remedy for one in others)
    assert check_fronts(trace).verdict is not Verdict.PROBLEM
    problem = next(check_documents(trace))
    assert (problem.verdict, problem.found) == (Verdict.PROBLEM, found.found)
    assert remedy in f"{found.remedy[0].lower()}{found.remedy[1:]}"
    assert 0 < found.tokens < sum(len(one.blocks) for one in trace) * 150
    recorded(tmp_path / "hashes", run, hash_only=True)  # which cannot tell
    hidden = said_of(tmp_path / "hashes")
    if line == "rated:":  # documents come again as they are: something is to be gained
        assert 0 < hidden.measured["saved_share"] < share
    else:
        assert "documents change from request to request is not in hashes" in hidden.sentence
        assert hidden.next_step == "record some requests without --hash-only, and estimate those."
    unknown = list(check_documents(read_recording(str(tmp_path / "hashes"))[1]))
    assert [one.verdict for one in unknown] == [Verdict.UNKNOWN]
    assert "Next, documents: record some requests without --hash-only" in summed_up(unknown)


def trace_of(*requests: Sequence[ContextBlock]) -> list[TraceRequest]:
    return [TraceRequest(n, f"{n}?", tuple(blocks)) for n, blocks in enumerate(requests)]


def test_documents_alike_but_for_numbers_that_come_together_are_several():
    entry = "Order {} was sent to the harbour and has arrived there in winter for {} coins"
    orders = [ContextBlock(text=entry.format(n, 3 * n)) for n in range(60)]
    assert changing_documents(trace_of(*(orders[n : n + 2] for n in range(59)))) is None
    apart = [ContextBlock(text=entry.format(n % 4, n % 4)) for n in range(40)]
    assert changing_documents(trace_of(*([one] for one in apart))) is None  # they come again


def test_chunks_that_share_an_id_are_several():
    chunks = [ContextBlock(id="book", text=text) for text in TEXTS]
    assert changing_documents(trace_of(*(chunks[n : n + 3] for n in range(12)))) is None


def test_numbers_by_place_are_no_change(tmp_path):
    def run(engine: Engine, is_changed: bool) -> None:
        def joined(documents: Sequence[Document]) -> str:
            return "\n\n".join(f"[{n}] {one.page_content}" for n, one in enumerate(documents, 1))

        template = ChatPromptTemplate.from_template("Help.\n\n{context}\n\n{question}")
        inputs = {"context": Retriever() | joined, "question": RunnablePassthrough()}
        for number in range(len(FOUND)):
            (inputs | template | Asked(engine=engine)).invoke(f"Which is number {number}")

    recorded(tmp_path, run)
    assert changing_documents(read_recording(str(tmp_path))[1]) is None
    assert not any(one.startswith("Lines ") for one in said_of(tmp_path).also)


def test_a_trace_alone_says_so_too_before_it_says_what_is_saved(tmp_path):
    rows = [
        [ContextBlock(id=f"d{n}~{request:032x}", text=f"at {request}:00\n{TEXTS[n]}") for n in row]
        for request, row in enumerate(FOUND)
    ]
    found = changing_documents(trace_of(*rows))
    assert found is not None
    assert (found.before, found.documents, found.is_around) == ("at", len(TEXTS), False)
    settled = {one.text for row in found.settled(trace_of(*rows)) for one in row.blocks}
    assert settled == {*TEXTS}


def test_texts_that_stay_cost_nothing():
    blocks = [ContextBlock(id=n, text=text) for n, text in enumerate(TEXTS)]
    assert changing_documents(trace_of(*([blocks[n] for n in row] for row in FOUND))) is None
    assert changing_documents([]) is None
    assert list(check_documents([])) == []
