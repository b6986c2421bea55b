"""What `record` and `estimate` say of an application is what its engine computes, once changed."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import tool
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.base.base_retriever import BaseRetriever as NodeRetriever
from llama_index.core.llms import LLM
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from mem0_stores import FakeMemory  # sets what mem0 reads when it is imported
from planning_helpers import tokenizer_file
from prompt_programs import Asked, AskedLLM, Engine, ask_workflow, llm_on, model_on, recorded

from ctxreuse import ReusePlanner, request_context
from ctxreuse.errors import InputFileError
from ctxreuse.measure.lint import lint
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.verdict import SavingsVerdict, verdict
from ctxreuse.measure.traces.recorded_prompts import read_recording
from ctxreuse.measure.traces.recording import TraceRecorder
from langchain_ctxreuse import ReuseMiddleware, ReuseRetriever, format_context
from langchain_ctxreuse.recording import recording as recording_langchain
from llamaindex_ctxreuse import ReusePostprocessor
from llamaindex_ctxreuse import format_context as format_nodes
from mem0_ctxreuse import ReuseMemory

_RANDOM = random.Random(5)
_WORDS = [f"w{n}" for n in range(900)]
TEXTS = [" ".join(_RANDOM.choices(_WORDS, k=90)) for _ in range(24)]
SETS = [_RANDOM.sample(range(24), 7) for _ in range(6)]
FOUND = [_RANDOM.sample(_RANDOM.choice(SETS), 5) for _ in range(50)]
DOCUMENTS = [Document(text, metadata={"source": f"f{n}.txt"}) for n, text in enumerate(TEXTS)]


def found(query: str) -> list[Document]:
    return [DOCUMENTS[n] for n in FOUND[int(re.findall(r"\d+", query)[-1]) % len(FOUND)]]


class Retriever(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return found(query)


def chain(template: str, heading: str, *, labels: bool = False) -> Callable[[Engine, bool], None]:
    def run(engine: Engine, is_changed: bool) -> None:
        prompt = heading + "{page_content}"
        rendered = partial(format_context, document_prompt=prompt, labels=labels)

        def by_hand(documents: list[Document]) -> str:
            shown = [prompt.format(page_content=x.page_content, **x.metadata) for x in documents]
            return "\n\n".join(shown)

        model = model_on(engine, is_changed)
        first, last = "{question}\n\n{context}", "{context}\n\n{question}"
        told = template.replace(first, last) if is_changed else template
        show = rendered if is_changed and (heading or labels) else by_hand
        inputs = {"context": Retriever() | show, "question": RunnablePassthrough()}
        asking = inputs | ChatPromptTemplate.from_template(told) | model
        for number in range(len(FOUND)):
            asking.invoke(f"Which is number {number}?")

    return run


def shown_as(shown: str, separator: str, rendered: str = "") -> Callable[[Engine, bool], None]:
    """Write documents by hand, each with its number; changed in one of two ways."""

    def joined(documents: list[Document]) -> str:
        names = [one.metadata["source"].replace(".txt", "-4-1") for one in documents]
        texts = [
            shown.format(n=n, source=name, text=one.page_content)
            for n, (name, one) in enumerate(zip(names, documents, strict=True), 1)
        ]
        return separator.join(texts)

    def run(engine: Engine, is_changed: bool) -> None:
        model = model_on(engine, bool(is_changed and rendered))
        retriever: BaseRetriever = Retriever()
        shown_by = joined
        if is_changed and rendered:
            shown_by = partial(format_context, document_prompt=rendered)
        elif is_changed:
            retriever = ReuseRetriever(retriever=retriever, planner=ReusePlanner())
        for number in range(len(FOUND)):
            context = shown_by(retriever.invoke(f"number {number}"))
            model.invoke(f"<all>\n{context}\n</all>\n\nWhich is number {number}?")

    return run


def memories(shown: Callable[[list[str]], str]) -> Callable[[Engine, bool], None]:
    def run(engine: Engine, is_changed: bool) -> None:
        found, model = FakeMemory(), Asked(engine=engine)
        memory = ReuseMemory(found, planner=ReusePlanner()) if is_changed else found
        for number, row in enumerate(FOUND):
            said = [TEXTS[n] + " “so”" * (n % 2) + " it's so" * (n % 3) for n in row]
            found.found = [
                {"id": f"{n}", "memory": text} for n, text in zip(row, said, strict=True)
            ]
            results = memory.search(f"number {number}")["results"]
            texts = shown([one["memory"] for one in results])
            model.invoke(f"Memories:\n{texts}\n\nWhich is number {number}?")

    return run


def by_hand(engine: Engine, is_changed: bool) -> None:
    model = model_on(engine, is_changed)
    for number in range(len(FOUND)):
        texts = [one.page_content for one in Retriever().invoke(f"number {number}")]
        model.invoke("\n\n".join([*texts, f"Which is number {number}?"]))


def chats(engine: Engine, is_changed: bool, *, keeps: bool = True) -> None:
    told = "File: {source}\n{page_content}"
    model = model_on(engine, is_changed)
    messages: list[tuple[str, str]] = []
    for number in range(len(FOUND)):
        messages = [] if number % 5 == 0 else messages
        with request_context(conversation_id=f"chat {number // 5}"):
            found = Retriever().invoke(f"number {number}")
        by_hand = (told.format(page_content=x.page_content, **x.metadata) for x in found)
        context = format_context(found, told, labels=True) if is_changed else "\n\n".join(by_hand)
        question = f"Which is number {number}?"
        asked = ("user", f"{context}\n\n{question}")
        answer = model.invoke([*messages, asked]).content
        messages += [asked if keeps else ("user", question), ("assistant", answer)]


def agent(engine: Engine, is_changed: bool) -> None:
    @tool(response_format="content_and_artifact")
    def search(query: str):
        """Search."""
        documents = Retriever().invoke(query)
        texts = [f"Source: {one.metadata}\nContent: {one.page_content}" for one in documents]
        return "\n\n".join(texts), documents

    more = [ReuseMiddleware(planner=ReusePlanner())] if is_changed else []
    asking = create_agent(Asked(engine=engine), [search], middleware=more)
    for number in range(20):
        asking.invoke({"messages": [("user", f"Which is number {number}?")]})


class Nodes(NodeRetriever):
    front: str = ""  # of each second text
    rows = FOUND

    def _retrieve(self, query_bundle):
        chosen = self.rows[int(re.findall(r"\d+", query_bundle.query_str)[-1])]
        nodes = [TextNode(id_=f"n{n}", text=self.front * (n % 2) + TEXTS[n]) for n in chosen]
        return [NodeWithScore(node=one, score=1 - rank / 9) for rank, one in enumerate(nodes)]


class Chunks(Nodes):
    front = "\n"  # as splitters leave it


class FewChunks(Chunks):
    """Each third prompt shows none but chunks that begin with a line break, and no chunk often."""

    rows = tuple(
        [first + n for n in row]
        for first in range(1, 24, 6)
        for row in ((0, 2, 4), (4, 0, 2, -1), (2, 4, 0, 1))
    )


class Spaced(Nodes):
    """Texts have spaces of their own, and one comes twice."""

    def _retrieve(self, query_bundle):
        found = super()._retrieve(query_bundle)
        for one in found:
            one.node.text = f"\n{one.node.text}{chr(10) * (len(one.node.text) % 3)}"
        return [found[0], found[0].model_copy(update={"score": 0.99}), *found[1:]]


class Answering(Workflow):
    """Retrieves and asks a model in one step, as an agent's tool or memory does."""

    llm: LLM

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        found = await Nodes().aretrieve(ev.question)
        context = "\n\n".join(one.text for one in found)
        return StopEvent(await self.llm.acomplete(f"{context}\n\n{ev.question}"))


def engine_of(kind: str) -> Callable[[Engine, bool], None]:
    def run(engine: Engine, is_changed: bool) -> None:
        llm = AskedLLM(engine=engine)
        after = [ReusePostprocessor(planner=ReusePlanner())] if is_changed else []
        if kind == "citation":
            asking = CitationQueryEngine(Nodes(), llm=llm, node_postprocessors=after)
        elif kind in ("chunks", "spaced"):
            made, texts = get_response_synthesizer(llm=llm), Chunks if kind == "chunks" else Spaced
            asking = RetrieverQueryEngine(texts(), made, node_postprocessors=after)
        else:
            llm = llm_on(engine, is_changed)
            template = PromptTemplate("{context_str}\n\nQuestion: {query_str}")
            made = get_response_synthesizer(llm=llm, text_qa_template=template)
            asking = RetrieverQueryEngine(Nodes(), made)
        for number in range(len(FOUND)):
            asking.query(f"Which is number {number}?")

    return run


def workflow(engine: Engine, is_changed: bool) -> None:
    questions = [f"Which is number {number}?" for number in range(len(FOUND))]
    ask_workflow(Answering(), engine, is_changed, questions)


APPLICATIONS = {
    "RAG": (chain("Help.\n\n{context}\n\n{question}", ""), "wrap the model: ReuseChatModel"),
    "headings": (chain("Help.\n\n{context}\n\n{question}", "File: {source}\n"), "document_prompt"),
    "citations": (
        chain("Cite the numbers of documents.\n\n{context}\n\n{question}", "", labels=True),
        "document_prompt=..., labels=True)",
    ),
    "question first": (
        chain("{question}\n\n{context}\n\nAnswer:", ""),
        "put the question behind the documents",
    ),
    "chats": (chats, "document_prompt=..., labels=True)"),
    "by hand": (by_hand, "wrap the model: ReuseChatModel"),
    "agent": (agent, "ReuseMiddleware"),
    "query engine": (engine_of("plain"), "ReuseLLM"),
    "citation": (engine_of("citation"), "ReusePostprocessor"),
    "nodes with spaces": (engine_of("spaced"), "ReuseLLM"),
    "workflow": (workflow, "ReuseLLM"),
}


def chunks_under_headings(engine: Engine, is_changed: bool) -> None:
    llm = llm_on(engine, is_changed)
    for number in range(len(FewChunks.rows)):
        found = FewChunks().retrieve(f"number {number}")
        shown = "\n\n".join(f"Passage:\n{one.text}" for one in found)
        if is_changed:
            shown = format_nodes(found, text_template="Passage:\n{content}")
        llm.complete(f"{shown}\n\nWhich is number {number}?")


_TOLD = "<source>{source}</source>\n<text>\n{text}\n</text>"
_OUT_OF_HASHES = {
    "numbered elements": (
        shown_as(f'<one index="{{n}}">\n{_TOLD}\n</one>', "\n"),
        "wrap the retriever: ReuseRetriever",
    ),
    "what is told below": (
        shown_as("<one>\n<text>{text}</text>\n<of>{source}</of>\n</one>", "\n", (
            "<one>\n<text>{page_content}</text>\n<of>{source}</of>\n</one>"
        )),
        "document_prompt",
    ),
    "names with numbers": (
        shown_as("# {source}\n{text}", "\n\n***\n\n", "# {source}\n{page_content}"),
        "put the documents in with format_context",
    ),
    "chunks": (engine_of("chunks"), "ReusePostprocessor"),
    "chunks under headings": (chunks_under_headings, "text_template"),
    "memories as JSON": (memories(json.dumps), "ReuseMemory"),
    "memories as letters of JSON": (
        memories(partial(json.dumps, ensure_ascii=False, indent=1)), "ReuseMemory"),
    "memories as a list": (memories(str), "ReuseMemory"),
}  # fmt: skip
"""In a recording without texts it is unknown what stands around a document."""


@pytest.mark.parametrize("name", [*APPLICATIONS, *_OUT_OF_HASHES])
def test_what_is_said_of_an_application_is_what_its_engine_computes(tmp_path, monkeypatch, name):
    import mem0

    monkeypatch.setattr(mem0, "Memory", FakeMemory)  # whose searches are recorded
    run, wanted = (APPLICATIONS | _OUT_OF_HASHES)[name]
    plain = recorded(tmp_path / "texts", run)
    said = verdict(measure_savings(EstimateConfig(trace=str(tmp_path / "texts"))))
    changed = Engine()
    run(changed, True)
    assert wanted in said.next_step
    assert said.is_gain
    assert said.measured["saved_share"] == pytest.approx(1 - changed.computed / plain, abs=0.05)
    assert f"{said.measured['saved_share']:.0%} fewer prompt tokens" in said.sentence
    assert not any(one.startswith("Lines ") for one in said.also)
    if name in _OUT_OF_HASHES:
        return
    recorded(tmp_path / "hashes", run, hash_only=True)
    assert TEXTS[0][:20] not in (tmp_path / "hashes" / "prompts.jsonl").read_text()
    hidden = verdict(measure_savings(EstimateConfig(trace=str(tmp_path / "hashes"))))
    share = said.measured["saved_share"]
    assert hidden.measured["saved_share"] == pytest.approx(share, abs=0.05)


class Letters(BaseRetriever):
    words: int

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(" ".join(f"{one}{n}" for n in range(self.words))) for one in query]


@pytest.mark.parametrize(
    ("rows", "words", "wanted"),
    [
        ("dgf bdc efd bfg", 20, ["alone: 4% more."]),
        ("dcb dab efg gef", 20, ["alone: 15% fewer."]),
        ("ab ba cdefghijklm nopqrstuvw xyzABCDEFGH IJKLMNOPQR", 60, ["Small: probably not"]),
        ("ab ba cdefghijklm", 60, []),
    ],
)
def test_what_is_said_of_a_wrapped_model_and_of_small_gains_is_true(tmp_path, rows, words, wanted):
    """Each word is a prompt, and each of its letters a document."""

    def run(engine: Engine, is_changed: bool) -> None:
        model = model_on(engine, is_changed)
        for row in rows.split():
            found = Letters(words=words).invoke(row)
            model.invoke("\n\n".join([*(one.page_content for one in found), f"Which is {row}?"]))

    plain, said, changed = recorded(tmp_path, run), said_of(tmp_path), Engine()
    run(changed, True)
    counted = 1 - changed.computed / plain
    assert said.measured["saved_share_as_it_is"] == pytest.approx(counted, abs=0.02)
    parts = ("alone: 4% more.", "alone: 15% fewer.", "Small: probably not")
    assert [one for one in parts if one in "\n".join(said.also)] == wanted


@pytest.mark.parametrize(("words", "is_short"), [(5, True), (60, False)])
def test_without_a_tokenizer_shares_of_short_documents_are_unsure(tmp_path, words, is_short):
    with TraceRecorder(tmp_path) as recorder, recording_langchain(recorder):
        for row in ("abcd", "dcba"):
            found = [one.page_content for one in Letters(words=words).invoke(row)]
            Asked(engine=Engine()).invoke("\n\n".join([*found, "Which?"]))
    notes = measure_savings(EstimateConfig(trace=str(tmp_path))).notes
    assert any("is unknown without --tokenizer" in one for one in notes) == is_short


def test_an_application_whose_documents_never_come_again_gains_nothing(tmp_path):
    with TraceRecorder(tmp_path) as recorder, recording_langchain(recorder):
        for number in range(30):
            texts = [f"Text {number} {n} says this. " * 20 for n in range(4)]

            class Fresh(BaseRetriever):
                def _get_relevant_documents(self, query, *, run_manager, texts=texts):
                    return [Document(one) for one in texts]

            prompt = ChatPromptTemplate.from_template("{context}\n\nWhich?")
            joined = Fresh() | (lambda found: "\n\n".join(one.page_content for one in found))
            ({"context": joined} | prompt | Asked(engine=Engine())).invoke("Which?")
    said = verdict(measure_savings(EstimateConfig(trace=str(tmp_path))))
    assert said.sentence.startswith("Nothing to gain here: 30 whole prompts compute ")
    assert not said.is_gain
    assert {one.front for one in read_recording(str(tmp_path))[1]} == {""}


def test_of_an_application_with_format_context_only_the_wrapper_is_asked(tmp_path):
    def run(engine: Engine, is_changed: bool) -> None:
        model = model_on(engine, is_changed)
        for number in range(len(FOUND)):
            found = Retriever().invoke(f"number {number}")
            context = format_context(found, "File: {source}\n{page_content}")
            model.invoke(f"{context}\n\nWhich is number {number}?")

    plain, said, changed = recorded(tmp_path, run), said_of(tmp_path), Engine()
    run(changed, True)
    assert said.next_step == "wrap the model: ReuseChatModel(inner=model)."
    counted = 1 - changed.computed / plain
    assert said.measured["saved_share_as_it_is"] == pytest.approx(counted, abs=0.02)


def test_documents_stay_in_place_where_the_application_says_what_their_order_means(tmp_path):
    recorded(tmp_path, chain("They are sorted, the best first.\n\n{context}\n\n{question}", ""))
    said = said_of(tmp_path)
    assert said.sentence.startswith("Nothing to gain here")
    assert said.next_step.startswith("leave out what you say of the order")
    assert said.also == (
        "As they are, most prompts keep their documents in place: the application says what the "
        "order of the documents means.",
    )


def test_documents_that_no_prompt_shows_have_to_be_shown_first(tmp_path):
    def run(engine: Engine, is_changed: bool) -> None:
        for number in range(len(FOUND)):
            texts = [f"“{one.page_content}”" for one in Retriever().invoke(f"number {number}")]
            Asked(engine=engine).invoke(json.dumps(texts))

    recorded(tmp_path, run)
    said = said_of(tmp_path)
    assert "none of 50 prompts shows a document as it was retrieved" in said.sentence
    assert said.next_step == "put the documents in with format_context; then record again."


def test_what_an_application_cuts_off_is_not_moved_to_the_front(tmp_path):
    def run(engine: Engine, is_changed: bool) -> None:
        for number in range(len(FOUND)):
            best = [one.page_content for one in Retriever().invoke(f"number {number}")][:2]
            Asked(engine=engine).invoke("\n\n".join([*best, f"Which is number {number}?"]))

    recorded(tmp_path, run)
    assert said_of(tmp_path).next_step == "wrap the model: ReuseChatModel(inner=model)."


@pytest.fixture
def recording_with_headings(tmp_path) -> Path:
    recorded(tmp_path / "recording", APPLICATIONS["headings"][0])
    return tmp_path / "recording"


def said_of(trace: Path, **asked: object) -> SavingsVerdict:
    return verdict(measure_savings(EstimateConfig(trace=str(trace), **asked)))


def test_whole_prompts_are_counted_by_a_tokenizer_with_progress(recording_with_headings, tmp_path):
    steps = Counter()

    @contextmanager
    def progress(task, number):
        yield lambda: steps.update({task: 1})
        assert steps[task] == number, task

    asked = {"trace": str(recording_with_headings), "tokenizer": tokenizer_file(tmp_path, *_WORDS)}
    counted = verdict(measure_savings(EstimateConfig(**asked), progress=progress))
    assert {"replaying prompts as they are", "replaying changed prompts"} <= steps.keys()
    words, pieces = (
        one.measured["computed_tokens_as_retrieved"]
        for one in (counted, said_of(recording_with_headings))
    )
    characters = sum(map(len, TEXTS)) / sum(len(text.split()) for text in TEXTS) + 1
    assert pieces == pytest.approx(words * characters / 4, rel=0.2)
    assert "document_prompt" in counted.next_step


def test_prompts_of_threads_may_stand_in_another_order(recording_with_headings):
    before, path = said_of(recording_with_headings), recording_with_headings / "prompts.jsonl"
    lines = path.read_text().splitlines()
    texts = [one for one in lines if '"text"' in one]
    prompts = [one for one in lines if '"prompt"' in one]
    path.write_text("\n".join([*texts, *prompts[1::-1], *prompts[2:]]) + "\n")
    after, share = said_of(recording_with_headings), before.measured["saved_share"]
    assert after.measured["saved_share"] == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [[1]], "retrieved": []},
        {"prompt": [99], "retrieved": []},
        {"prompt": [1], "retrieved": [[3]]},
        {"text": 1, "role": "user", "content": [{"block": [1]}]},
        {"text": 1, "role": "user", "content": [3]},
    ],
)
def test_a_broken_line_of_prompts_is_named(recording_with_headings, line):
    path = recording_with_headings / "prompts.jsonl"
    path.write_text(f'{{"text": 1, "role": "user", "content": ["a"]}}\n{json.dumps(line)}\n')
    with pytest.raises(InputFileError, match=r"prompts\.jsonl:2"):
        said_of(recording_with_headings)


def test_the_next_step_names_the_planner_that_was_measured(recording_with_headings):
    said = said_of(recording_with_headings, keep_best=True)
    assert not said.is_gain or "planner=ReusePlanner(keep_best=True)" in said.next_step
    primed = said_of(recording_with_headings, cache="vllm(states=junctions)")
    assert "prime=True" in primed.next_step


def test_instructions_before_the_documents_are_a_part_of_the_bill(tmp_path):
    recorded(tmp_path, chain("Help them. " * 500 + "{context}\n\n{question}", ""))
    assert said_of(tmp_path, cache="openai").is_gain  # documents alone are below the minimum


@pytest.mark.parametrize(("keeps", "hash_only"), [(True, False), (False, False), (False, True)])
def test_a_chat_may_keep_its_questions_without_their_documents(tmp_path, keeps, hash_only):
    recorded(tmp_path, partial(chats, keeps=keeps), hash_only=hash_only)
    said = said_of(tmp_path, cache="openai")
    assert ("shorter than the minimum" not in said.sentence) == keeps
    assert ("after format_context(..., labels=True)" in said.next_step) == keeps
    blocks, trace, _ = read_recording(str(tmp_path))
    assert "another system text" not in [one.check for one in lint(trace, blocks).findings]
