"""What LangChain and LlamaIndex applications retrieve, and OpenAI clients send, written down."""

import asyncio
import subprocess
import sys
import tomllib
from pathlib import Path
from uuid import UUID

import httpx
import openai
import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever as LangChainRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import VectorStore
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.llms import MockLLM
from llama_index.core.memory import Memory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from llamaindex_helpers import LetterRetriever, ListChatStore
from test_recording import recorded

import ctxreuse
from ctxreuse.cli.trace_commands import RECORDERS, installed, registered
from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.doctor.examination import check_fronts
from ctxreuse.measure.doctor.findings import Verdict
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.verdict import verdict
from ctxreuse.measure.traces.recorded_prompts import read_prompts, read_recording
from ctxreuse.measure.traces.recording import TraceRecorder
from ctxreuse.measure.traces.recording import recording as recording_openai
from ctxreuse.measure.traces.trace_files import read_titles
from ctxreuse.measure.traces.varying_fronts import fronts_that_differ
from ctxreuse.serving import EmulatedEngine
from langchain_ctxreuse import ReuseRetriever
from langchain_ctxreuse import recording as langchain_recording
from langchain_ctxreuse.recording import TraceCallbackHandler
from langchain_ctxreuse.recording import recording as recording_langchain
from llamaindex_ctxreuse import ReusePostprocessor
from llamaindex_ctxreuse.recording import recording as recording_llamaindex

TEXTS = ("red apples", "green pears", "blue plums")


class Fixed(LangChainRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        if query == "fail":
            raise LookupError("down")
        return [Document(id=text[:1], page_content=text) for text in TEXTS]


class Outer(LangChainRetriever):
    """A retriever that asks another one, itself and inside a chain of its own."""

    inner: LangChainRetriever

    def _get_relevant_documents(self, query, *, run_manager):
        config = {"callbacks": run_manager.get_child()}
        chain = RunnableLambda(lambda text: f"{text} again") | self.inner
        return [*self.inner.invoke(query, config), *chain.invoke(query, config)][2:4]


def asked(trace):
    return [(one.query, [block.id for block in one.blocks]) for one in trace]


# LangChain


def test_the_outermost_retriever_counts(tmp_path):
    with TraceRecorder(tmp_path) as recorder:
        handler = TraceCallbackHandler(recorder)
        chain = {"docs": Outer(inner=Fixed()), "question": RunnablePassthrough()} | RunnableLambda(
            lambda said: said["question"]
        )
        assert chain.invoke("why", {"callbacks": [handler]}) == "why"
        asyncio.run(chain.ainvoke("how", {"callbacks": [handler]}))
        with pytest.raises(LookupError):
            chain.invoke("fail", {"callbacks": [handler]})
    assert asked(recorded(tmp_path)[1]) == [("why", ["b", "r"]), ("how", ["b", "r"])]
    assert not handler._asked


def test_a_handler_knows_by_itself_which_retriever_is_inside_of_another(tmp_path):
    with TraceRecorder(tmp_path) as recorder:
        handler = TraceCallbackHandler(recorder)
        handler.on_retriever_start({}, "outer", run_id=UUID(int=1))
        handler.on_retriever_start({}, "inner", run_id=UUID(int=2), parent_run_id=UUID(int=1))
        for number in (2, 1):
            handler.on_retriever_end([Document("A text.", id="a")], run_id=UUID(int=number))
    assert asked(recorded(tmp_path)[1]) == [("outer", ["a"])]


class Long(Fixed):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(page_content=f"The document is about {text}. " * 9) for text in TEXTS]


RAG = "You are an assistant. Question: {question} \nContext: {context} \nAnswer:"


@pytest.mark.parametrize(
    ("template", "forms"),
    [(RAG, 20), ("Help.\n{context}\n{question}", 1), ("{context}? {question}", 1)],
)
@pytest.mark.parametrize("hash_only", [True, False])
def test_a_question_before_the_documents_is_recorded(tmp_path, template, forms, hash_only):
    prompt = ChatPromptTemplate.from_template(template)
    model = FakeListChatModel(responses=["Yes."])
    context = Long() | (lambda found: "\n\n".join(one.page_content for one in found))
    chain = {"context": context, "question": RunnablePassthrough()} | prompt | model
    asked = [f"Which are number {number}?" for number in range(20)]
    with TraceRecorder(tmp_path, hash_only=hash_only) as recorder:
        with recording_langchain(recorder) as handler:
            chain.batch(asked[:10])
            for question in asked[10:]:
                asyncio.run(chain.ainvoke(question))
        assert not handler._found
    assert recorder.faults == 0
    trace = read_recording(str(tmp_path))[1]
    assert len({one.front for one in trace}) == forms
    assert None not in {one.front for one in trace}
    written = (tmp_path / "prompts.jsonl").read_text()
    assert ("Which" in written) != hash_only
    assert ("assistant" in written) == (template == RAG and not hash_only)
    assert fronts_that_differ(trace) == (20 if forms > 1 else None)
    finding = check_fronts(trace)
    assert (finding.verdict is Verdict.PROBLEM) == (forms > 1)
    said = verdict(measure_savings(EstimateConfig(trace=str(tmp_path)))).sentence
    assert said.startswith("Nothing as it is") == (forms > 1)


class Rivers(Fixed):
    def _get_relevant_documents(self, query, *, run_manager):
        names = query.removesuffix("?").split()
        return [Document(id=name, page_content=f"{name} is a river. " * 40) for name in names]


@pytest.mark.parametrize(("template", "is_gain"), [(RAG, False), ("{context}\n{question}", True)])
def test_questions_that_repeat_before_the_documents_share_nothing_else(tmp_path, template, is_gain):
    prompt = ChatPromptTemplate.from_template(template)
    context = Rivers() | (lambda found: "\n\n".join(one.page_content for one in found))
    inputs = {"context": context, "question": RunnablePassthrough()}
    chain = inputs | prompt | FakeListChatModel(responses=["Yes."])
    with TraceRecorder(tmp_path) as recorder, recording_langchain(recorder):
        for question in ("Seine Loire Tiber?", "Tiber Seine Loire?", "Loire Tiber Seine?") * 4:
            chain.invoke(question)
    results = measure_savings(EstimateConfig(trace=str(tmp_path)))
    found = verdict(results)
    assert found.sentence.startswith("Nothing as it is, with words") != is_gain
    assert ("put the question behind the documents" in found.next_step) != is_gain
    as_retrieved, *_, batch = results.part()
    if not is_gain:  # what repeats word for word is found, and nothing else
        assert batch.total == as_retrieved.total
        assert as_retrieved.total.hit_ratio == 0.75


class Endless(Fixed):
    async def _aget_relevant_documents(self, query, *, run_manager):
        await asyncio.Event().wait()


def test_retrievals_that_are_cancelled_are_forgotten(tmp_path, monkeypatch):
    """LangChain tells nobody that they have ended."""
    monkeypatch.setattr(langchain_recording, "_MOST_OPEN", 5)
    monkeypatch.setattr(langchain_recording, "_MOST_CHARACTERS", 1_000)
    with TraceRecorder(tmp_path) as recorder:
        config = {"callbacks": [handler := TraceCallbackHandler(recorder)]}

        async def cancelled(query):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await Endless().ainvoke(query, config)

        for number in range(40):
            asyncio.run(cancelled("why " * (number % 7 * 50)))
            assert len(handler._asked) <= 5
            assert handler._asked.weight <= max(1_000, 4 * 50 * (number % 7))
        Fixed().invoke("how", config)
    assert [one.query for one in recorded(tmp_path)[1]] == ["how"]


def test_the_thread_is_the_conversation(tmp_path):
    with TraceRecorder(tmp_path) as recorder:
        config = {"callbacks": [TraceCallbackHandler(recorder)]}
        Fixed().invoke("why", {**config, "metadata": {"thread_id": 7}})
        named = {"configurable": {"tenant": "acme", "thread_id": 7}}
        (RunnableLambda(str) | Fixed()).invoke("why", {**config, **named})
        with ctxreuse.request_context(tenant="acme", conversation_id="c"):
            Fixed().invoke("why", config)
    _, trace = recorded(tmp_path)
    assert [(one.tenant, one.conversation_id, one.turn) for one in trace] == [
        ("", 7, 0),
        ("acme", 7, 0),
        ("acme", "c", 0),
    ]


class Store(VectorStore):
    """A vector store whose searches call each other, as those of databases do."""

    @classmethod
    def from_texts(cls, texts, embedding, metadatas=None, **options):
        return cls()

    def similarity_search(self, query, k=4, **options):
        return [document for document, _ in self.similarity_search_with_score(query, k)]

    def similarity_search_with_score(self, query, k=4, **options):
        if query == "fail":
            raise LookupError("down")
        return [
            (Document(id=text[:1], page_content=text, metadata={"source": f"{text}.md"}), 0.5)
            for text in TEXTS[:k]
        ]


def test_vector_stores_that_are_asked_directly_are_recorded(tmp_path):
    store = Store()
    with TraceRecorder(tmp_path) as recorder, recording_langchain(recorder):

        class Later(Store):
            def similarity_search(self, query, k=4, **options):
                return super().similarity_search(query, 1)

        assert [one.id for one in store.similarity_search("a", k=2)] == ["r", "g"]
        assert len(store.similarity_search_with_score(query="b", k=1)) == 1
        assert len(store.search("c", "similarity", k=3)) == 3
        assert len(asyncio.run(store.asimilarity_search("d", k=1))) == 1
        assert len(Later().similarity_search("e")) == 1
        with pytest.raises(LookupError):
            store.similarity_search("fail")
        assert [one.id for one in store.as_retriever(search_kwargs={"k": 1}).invoke("f")] == ["r"]
        asyncio.run(store.as_retriever().ainvoke("g"))
        chain = RunnableLambda(lambda text: store.similarity_search(text, k=1))
        chain.invoke("h", {"configurable": {"thread_id": "t"}})
    store.similarity_search("not recorded")
    Later().similarity_search("not recorded")
    trace = read_recording(str(tmp_path))[1]
    assert [(one.query, len(one.blocks)) for one in trace] == [
        *(("a", 2), ("b", 1), ("c", 3), ("d", 1), ("e", 1), ("f", 1), ("g", 3), ("h", 1))
    ]
    assert trace[-1].conversation_id == "t"
    assert recorder.sources == {"LangChain vector stores": 6, "LangChain retrievers": 2}
    assert recorder.summary() == (
        "8 requests with 3 different blocks, 1 of them in 1 conversation: 6 from LangChain vector "
        "stores, 2 from LangChain retrievers"
    )
    assert read_titles(str(tmp_path / "corpus.jsonl")) == {text[:1]: f"{text}.md" for text in TEXTS}
    assert "similarity_search" in Store.__dict__
    assert not hasattr(Store.similarity_search, "__wrapped__")
    assert not hasattr(LangChainRetriever.invoke, "__wrapped__")


def test_planned_documents_are_recorded_best_first_without_their_annotation(tmp_path):
    planner = ctxreuse.ReusePlanner()
    with TraceRecorder(tmp_path) as recorder:
        planner.plan(
            ctxreuse.ContextRequest([ctxreuse.ContextBlock(id="b", text=TEXTS[2], tokens=99)])
        )
        config = {"callbacks": [TraceCallbackHandler(recorder)]}
        retriever = ReuseRetriever(retriever=Fixed(), planner=planner)
        retriever.invoke("why", config)
    assert asked(recorded(tmp_path)[1]) == [("why", ["r", "g", "b"])]


# LlamaIndex


class First(BaseNodePostprocessor):
    def _postprocess_nodes(self, nodes, query_bundle=None):
        return nodes[:1]


def query_engine(**options):
    return RetrieverQueryEngine.from_args(LetterRetriever(), llm=MockLLM(), **options)


def test_planned_nodes_are_recorded_best_first(tmp_path):
    with TraceRecorder(tmp_path) as recorder, recording_llamaindex(recorder):
        engine = query_engine(node_postprocessors=[ReusePostprocessor()])
        for query in ("abc", "cba"):
            engine.query(query)
        sent = [node.node_id for node in engine.query("bca").source_nodes]
    assert sent == ["id-a", "id-b", "id-c"]
    assert asked(recorded(tmp_path)[1]) == [
        ("abc", ["id-a", "id-b", "id-c"]),
        ("cba", ["id-c", "id-b", "id-a"]),
        ("bca", ["id-b", "id-c", "id-a"]),
    ]


def test_what_the_synthesizer_is_given_counts(tmp_path):
    with TraceRecorder(tmp_path) as recorder, recording_llamaindex(recorder):
        engine = query_engine(node_postprocessors=[First()])
        engine.query("abc")
        asyncio.run(engine.aquery("bcd"))
        list(query_engine(streaming=True).query("ab").response_gen)
    assert asked(recorded(tmp_path)[1]) == [
        ("abc", ["id-a"]),
        ("bcd", ["id-b"]),
        ("ab", ["id-a", "id-b"]),
    ]


def chat_engine():
    memory = Memory.from_defaults(chat_store=ListChatStore())
    return CondensePlusContextChatEngine.from_defaults(
        LetterRetriever(), llm=MockLLM(), memory=memory
    )


def test_chats_and_bare_retrievals_count_too(tmp_path):
    with TraceRecorder(tmp_path) as recorder:
        retriever = LetterRetriever()
        with recording_llamaindex(recorder) as handler:
            retriever.retrieve("ab")
            asyncio.run(retriever.aretrieve("bc"))
            with ctxreuse.request_context(conversation_id="c"):
                chat_engine().chat("cd")
        retriever.retrieve("ef")
    _, trace = recorded(tmp_path)
    assert [(one.query, one.conversation_id) for one in trace] == [
        ("ab", None),
        ("bc", None),
        ("cd", "c"),
    ]
    assert not handler.open_spans


class Searching(Workflow):
    """Searches twice as an agent's tools do, with a retriever and with a query engine."""

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        found = await LetterRetriever().aretrieve("ab")
        await MockLLM().acomplete(" ".join(one.text for one in found))
        await query_engine().aquery("cd")
        await MockLLM().acomplete("Well?")
        return StopEvent(found)


def test_what_a_run_retrieves_is_recorded_before_the_prompts_that_show_it(tmp_path):
    async def run():
        await Searching().run()

    with TraceRecorder(tmp_path) as recorder, recording_llamaindex(recorder):
        asyncio.run(run())
    corpus, trace = recorded(tmp_path)
    assert asked(trace) == [("ab", ["id-a", "id-b"]), ("cd", ["id-c", "id-d"])]
    told = [(one.after, one.retrieved) for one in read_prompts(tmp_path / "trace.jsonl", corpus)]
    assert told == [(1, (1,)), (2, (1, 2)), (2, (1, 2))]


def test_each_chat_engine_has_conversations_of_its_own(tmp_path):
    with TraceRecorder(tmp_path) as recorder, recording_llamaindex(recorder) as handler:
        one, other = chat_engine(), chat_engine()
        one.chat("ab")
        other.chat("ab")
        asyncio.run(one.achat("cd"))
        for _ in other.stream_chat("cd").response_gen:
            pass
        one.reset()
        one.chat("ef")
    trace = recorded(tmp_path)[1]
    assert [(one.conversation_id, one.turn) for one in trace] == [
        ("chat-1", 0),
        ("chat-2", 0),
        ("chat-1", 1),
        ("chat-2", 1),
        ("chat-3", 0),
    ]
    assert recorder.sources == {"LlamaIndex chat engines": 5}
    assert not handler.open_spans


def test_a_chat_whose_history_the_caller_keeps_is_known_by_its_beginning(tmp_path):
    first = ChatMessage(role="user", content="ab")
    answer = ChatMessage(role="assistant", content="...")
    with TraceRecorder(tmp_path) as recorder, recording_llamaindex(recorder):
        chat_engine().chat("ab", chat_history=[])
        chat_engine().chat("cd", chat_history=[first, answer])
        chat_engine().chat("ab", chat_history=[])
        chat_engine().chat("ef", chat_history=[first, answer])
    names = [one.conversation_id for one in recorded(tmp_path)[1]]
    assert names[0] == names[1] != names[2] == names[3]


# OpenAI

SENT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "[1] red apples\n\n[2] green pears\n\nWhich are red?"},
]


def test_prompts_of_a_client_are_read(tmp_path):
    transport = EmulatedEngine().transport()
    with TraceRecorder(tmp_path) as recorder, recording_openai(recorder):
        client = openai.OpenAI(
            base_url="http://engine/v1", api_key="-", http_client=httpx.Client(transport=transport)
        )
        answer = client.chat.completions.create(model="emulated", messages=SENT, max_tokens=3)
        said = {"role": "assistant", "content": answer.choices[0].message.content}
        again = [*SENT, said, {"role": "user", "content": "blue plums\n\nAnd blue?"}]
        client.chat.completions.create(model="emulated", messages=again, max_tokens=3)
        client.chat.completions.create(model="emulated", messages=SENT, max_tokens=3)
        client.close()
    _, (first, second, third) = recorded(tmp_path)
    assert [block.text for block in first.blocks] == ["red apples", "green pears"]
    assert (first.query, first.system) == ("Which are red?", "Be brief.")
    assert [block.text for block in second.blocks] == ["blue plums"]
    assert first.conversation_id == second.conversation_id
    assert (first.turn, second.turn) == (0, 1)
    assert (third.conversation_id != first.conversation_id, third.turn) == (True, 0)


def test_async_clients_made_inside_are_read(tmp_path):
    transport = EmulatedEngine().transport()

    async def ask():
        http = httpx.AsyncClient(transport=transport)
        client = openai.AsyncOpenAI(base_url="http://engine/v1", api_key="-", http_client=http)
        async with client:
            await client.chat.completions.create(model="emulated", messages=SENT, max_tokens=3)

    with TraceRecorder(tmp_path) as recorder:
        with recording_openai(recorder):
            asyncio.run(ask())
        asyncio.run(ask())
    assert len(recorded(tmp_path)[1]) == 1


# the command

PROGRAM = """
import sys
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

class Fixed(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(page_content="red apples")]

for question in sys.argv[1:]:
    print(Fixed().invoke(question)[0].page_content)
sys.exit(3)
"""


def record(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ctxreuse", "record", "-o", "out", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_runs_a_program_and_writes_down_what_it_retrieves(tmp_path: Path):
    (tmp_path / "app.py").write_text(PROGRAM)
    done = record(tmp_path, "app.py", "--why", "how")
    assert (done.returncode, done.stdout) == (3, "red apples\nred apples\n")
    assert done.stderr.endswith(
        "ctxreuse: recorded in out: 2 requests with 1 block: 2 from LangChain retrievers\n"
        "ctxreuse: next: ctxreuse estimate out\n"
    )
    assert asked(recorded(tmp_path / "out")[1])[0][0] == "--why"


@pytest.mark.slow
def test_a_program_that_retrieves_nothing_leaves_no_recording(tmp_path: Path):
    for text, code in (("import nowhere", 1), ("", 2)):  # the second is the first one, mended
        (tmp_path / "app.py").write_text(text)
        done = record(tmp_path, "app.py")
        assert done.returncode == code
        assert "ctxreuse: 'app.py' (str): nothing was recorded, so nothing is wr" in done.stderr
        crash = "; the program ended with ModuleNotFoundError before it retrieved anything\n"
        remedy = "child processes are not seen: have it run one worker; --source"
        assert (crash if code == 1 else remedy) in done.stderr
        assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["nothing", "app.py", "app.none", "folder", "", ".app", "json.none"]
)
def test_a_module_that_is_not_there_is_named_in_one_line(tmp_path: Path, name: str):
    (tmp_path / "app.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").write_text("")
    done = record(tmp_path, "--module", name)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"ctxreuse: {name!r} (str): " in done.stderr
    (tmp_path / "app.py").write_text(PROGRAM)
    assert record(tmp_path, "--module", "app", "why").returncode == 3


def test_unknown_sources_and_missing_scripts_are_named_before_anything_is_made(tmp_path: Path):
    (tmp_path / "app.py").write_text("")
    done = record(tmp_path, "--source", "haystack", "app.py")
    assert done.stderr.startswith("ctxreuse: there is no source 'haystack' (str); choose ")
    done = record(tmp_path, "missing.py")
    assert done.returncode == 2
    assert "missing.py: there is no such script" in done.stderr
    assert not (tmp_path / "out").exists()


WITHOUT = """
import runpy, sys

sys.modules.update(dict.fromkeys({gone}))  # as if they were not installed
sys.argv = ["ctxreuse", "record", "-o", "out", *{arguments}]
runpy.run_module("ctxreuse", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gone", "arguments", "code", "said"),
    [
        (["llama_index.core"], ["app.py", "why"], 3, "recorded in out: 1 request with"),
        (["llama_index.core"], ["--source", "llamaindex", "app.py"], 2, "[llamaindex]'"),
        (["llama_index", "langchain_core", "mem0"], ["app.py"], 2, "[langchain]'"),
    ],
)
def test_frameworks_that_are_not_installed_are_not_recorded(
    tmp_path: Path, gone: list[str], arguments: list[str], code: int, said: str
):
    (tmp_path / "app.py").write_text(PROGRAM)
    program = WITHOUT.format(gone=gone, arguments=arguments)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_framework_that_is_broken_is_no_missing_one(monkeypatch):
    def fail(cause):
        raise MissingExtraError("langchain_ctxreuse", "langchain") from cause

    entry = registered()["langchain"]
    monkeypatch.setattr(type(entry), "load", lambda _: fail(ModuleNotFoundError("none")))
    assert installed(entry) is None
    monkeypatch.setattr(type(entry), "load", lambda _: fail(ImportError("broken")))
    with pytest.raises(MissingExtraError):
        installed(entry)


def test_the_integrations_register_what_records_them():
    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {name: entry.value for name, entry in registered().items()}
    assert found == project["entry-points"][RECORDERS], "install it again: pip install -e ."
    assert all(callable(entry.load()) for entry in registered().values())
