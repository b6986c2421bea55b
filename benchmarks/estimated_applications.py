"""Whether `ctxreuse record` and `ctxreuse estimate` foresee what an application saves.

Applications of LangChain, LlamaIndex and Mem0 answer questions of public traces. Each is recorded
as it is, and estimated. Then its model is wrapped, and then it is changed as the verdict's `Next:`
says. An engine counts the tokens of whole prompts with a tokenizer of OpenAI's, which the estimate
does not have, and computes what a prefix cache without bounds does not serve. The estimate has to
be within 5 points of both shares that are saved. Where it sees nothing to gain, neither a wrapped
model nor what the guide changes may save more than 2 %. Ends with 1 where that is not so. Reads the
folder that CTXREUSE_DATA names.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from langchain.agents import create_agent
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import BaseTool, create_retriever_tool, tool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from llama_index.core import get_response_synthesizer
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.memory import BaseMemoryBlock, Memory
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from rich.console import Console

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.cli.trace_commands import installed, registered
from ctxreuse.measure.replay.prompt_ways import LEAST_SAVED, Way
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.verdict import verdict
from ctxreuse.measure.traces.recording import TraceRecorder
from ctxreuse.pipeline.known_texts import known_texts
from ctxreuse.workflow import TfidfEmbedder
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware, ReuseRetriever, format_context
from llamaindex_ctxreuse import ReuseLLM, ReusePostprocessor
from loss_programs import Documents, EngineLLM, EngineModel, ListChatStore, Nodes, Served, ToolLLM
from loss_traffic import Asked
from mem0_ctxreuse import ReuseMemory
from shared import data_folder, new_parser, new_table, read_named_trace

QUESTIONS = 60
MOST_POINTS = 5.0
AS_IT_IS = "as it is"
"""A way that no verdict names."""

_SYSTEM = "Answer the question from the context. Say so if it is not there."
_REWRITE = "Write the question anew, so that it is understood alone. Answer with it."
_CONTEXT_FIRST = _SYSTEM + "\n\n{context}\n\nQuestion: {question}"
_QUESTION_FIRST = "Question: {question}\n\nAnswer it from this:\n\n{context}"
_BARE, _HEADING = "{page_content}", "# {source}\n{page_content}"
_XML = '<document source="{source}">{page_content}</document>'
_OWNER = {"user_id": "alice"}
_SMALL_WINDOW = 3_000
_TURNS = range(4, 11)  # of the conversations that are taken; longer ones are cut


class Model(EngineModel):
    """Asks each of its tools once before it answers; rewrites a question where it is told to."""

    rewritten: Any = None  # not a dict, which pydantic would copy

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        answer = EngineModel(engine=self.engine)._generate(messages).generations[0].message
        asked = max(n for n, one in enumerate(messages) if isinstance(one, HumanMessage))
        query = messages[asked].text
        done = sum(isinstance(one, ToolMessage) for one in messages[asked:])
        if messages[0].text == _REWRITE:
            answer.content = (self.rewritten or {}).get(query, query)
        elif done < len(self.tools):
            call = {"name": self.tools[done], "args": {"query": query}, "id": f"call-{done}"}
            answer = AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])


class SmallWindow(EngineLLM):
    """A model whose window takes some of the documents only."""

    @property
    def metadata(self) -> LLMMetadata:
        """A window as small models have it."""
        return super().metadata.model_copy(update={"context_window": _SMALL_WINDOW})


@dataclass(frozen=True)
class Run:
    """One run of an application, changed in some way, and what is found for its questions."""

    way: str
    found: dict[str, Sequence[ContextBlock]]
    engine: Served = field(default_factory=Served)
    planner: ReusePlanner = field(default_factory=ReusePlanner)

    def model(self, model: Any) -> Any:
        """Return a model, wrapped where the change wraps it."""
        if self.way not in (Way.WRAPPED, Way.RENDERED, Way.BEHIND, Way.BOTH):
            return model
        kind: Any = ReuseChatModel if isinstance(model, EngineModel) else ReuseLLM
        return kind(inner=model, planner=self.planner)

    def chat_model(self, **fields: Any) -> Any:
        """Return LangChain's model."""
        return self.model(Model(engine=self.engine, **fields))

    def documents(self, inner: BaseRetriever | None = None) -> BaseRetriever:
        """Return a retriever of LangChain's."""
        inner = inner or Documents(found=self.found)
        is_ordered = self.way == Way.ORDERED
        return ReuseRetriever(retriever=inner, planner=self.planner) if is_ordered else inner

    def postprocessors(self) -> list[Any]:
        """Return LlamaIndex's node postprocessors."""
        return [ReusePostprocessor(planner=self.planner)] if self.way == Way.ORDERED else []

    def shown(self, documents: Sequence[Document], prompt: str = _BARE) -> str:
        """Return documents as the application writes them, or `format_context` does."""
        if self.way in (Way.RENDERED, Way.BOTH):
            return format_context(documents, document_prompt=prompt)
        texts = [prompt.format(page_content=one.page_content, **one.metadata) for one in documents]
        return "\n\n".join(texts)


Answer = Callable[[Asked], object]


def chain(template: str = _CONTEXT_FIRST, prompt: str = _BARE, *, is_ensemble: bool = False) -> Any:
    """Return a chain of LangChain's, its documents shown by a prompt of its own."""

    def make(run: Run) -> Answer:
        both: list[Any] = [Documents(found=run.found), similar("xquad")] if is_ensemble else []
        found = EnsembleRetriever(retrievers=both, weights=[0.5, 0.5]) if both else None
        told = _CONTEXT_FIRST if run.way in (Way.BEHIND, Way.BOTH) else template
        shown = run.documents(found) | (lambda documents: run.shown(documents, prompt))
        inputs = {"context": shown, "question": RunnablePassthrough()}
        asking = inputs | ChatPromptTemplate.from_template(told) | run.chat_model()
        return lambda one: asking.invoke(one.question)

    return make


def multi_query(run: Run) -> Answer:
    """Return a chain that searches for three questions of a subject, for one of them."""
    of_subject: dict[str, list[str]] = {}
    for question, blocks in run.found.items():
        of_subject.setdefault(str(blocks[0].id).partition("#")[0], []).append(question)
    near: dict[str, str] = {}
    for some in of_subject.values():
        near |= {one: "\n".join([one, some[n - 1], some[n - 2]]) for n, one in enumerate(some)}

    def union(lists: Sequence[Sequence[Document]]) -> list[Document]:
        return list({one.id: one for found in lists for one in found}.values())

    model = run.chat_model(rewritten=near)
    rewrite = ChatPromptTemplate.from_messages([("system", _REWRITE), ("human", "{question}")])
    queries = rewrite | model | StrOutputParser() | str.splitlines
    shown = queries | run.documents().map() | union | run.shown
    inputs = {"context": shown, "question": lambda given: given["question"]}
    asking = inputs | ChatPromptTemplate.from_template(_CONTEXT_FIRST) | model
    return lambda one: asking.invoke({"question": one.question})


def history_aware(run: Run) -> Answer:
    """Return LangChain's chain that writes a question anew before it searches, with a history."""
    model, chat = run.chat_model(), [("placeholder", "{chat_history}"), ("human", "{input}")]
    rewrite, told = (
        ChatPromptTemplate.from_messages([("system", system), *chat])
        for system in (_REWRITE, _SYSTEM + "\n\n{context}")
    )
    asking = create_retrieval_chain(
        create_history_aware_retriever(model, run.documents(), rewrite),
        create_stuff_documents_chain(model, told),
    )
    histories: dict[str | None, list[BaseMessage]] = {}

    def answer(one: Asked) -> None:
        history = histories.setdefault(one.conversation, [])
        given = {"input": one.question, "chat_history": list(history)}
        said = asking.invoke(given, {"configurable": {"thread_id": one.conversation}})
        history += [HumanMessage(one.question), AIMessage(said["answer"])]

    return answer


def agent(make_tools: Callable[[Run], list[BaseTool]]) -> Any:
    """Return LangChain's agent with some tools, and a checkpointer."""

    def make(run: Run) -> Answer:
        is_once = run.way == Way.SHOWN_ONCE
        asking = create_agent(
            run.chat_model(),
            make_tools(run),
            system_prompt=_SYSTEM,
            middleware=[ReuseMiddleware(planner=run.planner)] if is_once else [],
            checkpointer=InMemorySaver(),
        )
        return lambda one: asking.invoke(
            {"messages": [HumanMessage(one.question)]},
            {"configurable": {"thread_id": one.conversation or one.question}},
        )

    return make


def search_tools(*names: str) -> Any:
    """Return what makes tools that show documents with their sources, as LangChain's guide has."""

    def search_tool(run: Run, name: str) -> BaseTool:
        retriever = run.documents(None if name == "search" else similar("mtrag"))

        @tool(name, response_format="content_and_artifact")
        def search(query: str) -> tuple[str, list[Document]]:
            """Find documents."""
            found = retriever.invoke(query)
            return run.shown(found, "Source: {source}\nContent: {page_content}"), found

        return search

    return lambda run: [search_tool(run, name) for name in names]


def retriever_tool(prompt: str) -> Any:
    """Return what makes LangChain's own tool of a retriever, whose results are text alone."""

    def make(run: Run) -> list[BaseTool]:
        found, shown = run.documents(), PromptTemplate.from_template(prompt)
        return [create_retriever_tool(found, "search", "Finds text.", document_prompt=shown)]

    return make


def subagent(run: Run) -> list[BaseTool]:
    """Return a tool that has a chain answer."""
    asking: Any = chain()(run)

    @tool
    def research(query: str) -> str:
        """Have a question answered."""
        return str(asking(Asked(query, ())).text)

    return [research]


def query_engine(kind: Any) -> Any:
    """Return a query engine of LlamaIndex's."""

    def make(run: Run) -> Answer:
        nodes, engine_llm = Nodes(run.found), SmallWindow if kind == "tree_summarize" else EngineLLM
        llm, after = run.model(engine_llm(engine=run.engine)), run.postprocessors()
        if kind == "citation":
            asking: Any = CitationQueryEngine(nodes, llm=llm, node_postprocessors=after)
        else:
            made = get_response_synthesizer(llm=llm, response_mode=kind)
            asking = RetrieverQueryEngine(nodes, made, node_postprocessors=after)
        return lambda one: asking.query(one.question)

    return make


def chat_engine(run: Run) -> Answer:
    """Return LlamaIndex's chat engines, one for each conversation."""
    llm, chats = run.model(EngineLLM(engine=run.engine)), dict[str | None, Any]()
    after = run.postprocessors()

    def answer(one: Asked) -> None:
        if one.conversation not in chats:
            chats[one.conversation] = ContextChatEngine.from_defaults(
                Nodes(run.found), llm=llm, system_prompt=_SYSTEM, node_postprocessors=after
            )
        chats[one.conversation].chat(one.question)

    return answer


class Told(ToolLLM):
    """Asks a tool as LlamaIndex's tools of retrievers and engines are asked; thinks for ReAct."""

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Call the tool, or answer."""
        response, last = super().chat(messages, **kwargs), messages[-1].content or ""
        message, system = response.message, messages[0].content or ""
        for call in message.additional_kwargs.get("calls", ()):
            call["tool_kwargs"] = {"input": last}
        is_done = last.startswith("Observation:") or "Tool Name: " not in system
        if "Action Input" in system and is_done:
            message.blocks = [TextBlock(text=f"Thought: I can answer.\nAnswer: {message.content}")]
        elif "Action Input" in system:
            text = "Thought: Search.\nAction: search\nAction Input: "
            message.blocks = [TextBlock(text=text + json.dumps({"input": last}))]
        return response


class AskedNodes(Nodes):
    """Takes a question as LlamaIndex's tool of a retriever writes it."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        asked = query_bundle.query_str.strip().removeprefix("input is ")
        return super()._retrieve(
            QueryBundle(next(one for one in self._found if asked == one.strip()))
        )


class Recalled(BaseMemoryBlock[str]):
    """A memory of a retriever's."""

    nodes: Any

    async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> str:
        asked = [one.content or "" for one in messages or () if one.role is MessageRole.USER]
        return "\n\n".join(one.text for one in await self.nodes.aretrieve(asked[-1]))

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """All is known."""


def llama_agent(kind: Any, has: str) -> Any:
    """Return LlamaIndex's agents, which keep what tools have said, or remember in a block."""

    def make(run: Run) -> Answer:
        llm, nodes = run.model(Told(engine=run.engine)), AskedNodes(run.found)
        after, named = run.postprocessors(), {"name": "search", "description": "Finds text."}
        inner = RetrieverQueryEngine.from_args(nodes, llm=llm, node_postprocessors=after)
        tools: list[Any] = {
            "retriever": [RetrieverTool.from_defaults(nodes, node_postprocessors=after, **named)],
            "engine": [QueryEngineTool.from_defaults(inner, **named)],
        }.get(has, [])
        blocks = [] if tools else [Recalled(name="memories", nodes=nodes)]
        running = kind(tools=tools, llm=llm, system_prompt=_SYSTEM, streaming=False)
        kept: dict[str | None, Memory] = {}

        async def answer(one: Asked) -> None:
            name = one.conversation or one.question
            if name not in kept:
                kept[name] = Memory.from_defaults(
                    name, chat_store=ListChatStore(), memory_blocks=blocks, token_limit=1_000_000
                )
            await running.run(one.question, memory=kept[name])

        return lambda one: asyncio.run(answer(one))

    return make


def mem0_memory(run: Run) -> Any:
    """Return Mem0's memory, whose store finds what a trace says."""
    folder = TemporaryDirectory(ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    # read when Mem0 is imported
    os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": os.environ.get("MEM0_DIR", folder.name)}
    from mem0 import Memory

    def search(query: str, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        return [
            {"id": str(one.id), "memory": one.text, "score": 1 / (1 + rank)}
            for rank, one in enumerate(run.found[query])
        ]

    memory: Any = Memory.__new__(Memory)  # without a store
    memory.api_version, memory.reranker, memory._search_vector_store = "v1.1", None, search
    return ReuseMemory(memory, planner=run.planner) if run.way == Way.ORDERED else memory


def bullets(run: Run) -> Answer:
    """Return a chat whose system prompt lists memories, as Mem0's guide has it."""
    memory, model = mem0_memory(run), run.chat_model()

    def answer(one: Asked) -> None:
        found = memory.search(one.question, filters=_OWNER)["results"]
        listed = "\n".join(f"- {each['memory']}" for each in found)
        told = SystemMessage(f"{_SYSTEM}\nUser Memories:\n{listed}")
        model.invoke([told, HumanMessage(one.question)])

    return answer


def recall(run: Run) -> list[BaseTool]:
    """Return a tool that searches Mem0."""
    memory = mem0_memory(run)

    @tool
    def remember(query: str) -> dict[str, Any]:
        """Find memories."""
        found: dict[str, Any] = memory.search(query, filters=_OWNER)
        return found

    return [remember]


class Application(NamedTuple):
    """An application."""

    name: str  # what it does
    framework: str  # whose parts it is made of
    trace: str  # which questions it is asked
    make: Callable[[Run], Answer]  # from a run to what answers questions
    guide: str = Way.WRAPPED  # what the guide changes; tried where the verdict names nothing


APPLICATIONS = (
    Application("plain RAG", "LangChain", "mtrag_k5", chain()),
    Application("headings", "LangChain", "mtrag_k5", chain(prompt=_HEADING), Way.RENDERED),
    Application("XML", "LangChain", "mtrag_k5", chain(prompt=_XML), Way.RENDERED),
    Application("history-aware", "LangChain", "mtrag_k5", history_aware),
    Application("multi-query", "LangChain", "xquad_k5", multi_query),
    Application("ensemble", "LangChain", "xquad_k5", chain(is_ensemble=True)),
    Application(
        "agent, one tool", "LangChain", "mtrag_k5", agent(search_tools("search")), Way.SHOWN_ONCE
    ),
    Application(
        "agent, two tools",
        "LangChain",
        "mtrag_k5",
        agent(search_tools("search", "near")),
        Way.SHOWN_ONCE,
    ),
    Application(
        "retriever tool", "LangChain", "mtrag_k5", agent(retriever_tool(_BARE)), Way.SHOWN_ONCE
    ),
    Application(
        "retriever tool, headings",
        "LangChain",
        "mtrag_k5",
        agent(retriever_tool(_HEADING)),
        Way.SHOWN_ONCE,
    ),
    Application("subagent", "LangChain", "xquad_k5", agent(subagent)),
    Application("question first", "LangChain", "mtrag_k5", chain(_QUESTION_FIRST), Way.BEHIND),
    Application(
        "question first, headings",
        "LangChain",
        "mtrag_k5",
        chain(_QUESTION_FIRST, _HEADING),
        Way.BEHIND,
    ),
    Application("refine", "LlamaIndex", "xquad_k5", query_engine("refine"), Way.ORDERED),
    Application("citation", "LlamaIndex", "mtrag_k5", query_engine("citation"), Way.ORDERED),
    Application("tree summary", "LlamaIndex", "mtrag_k5", query_engine("tree_summarize")),
    Application("chat engine", "LlamaIndex", "mtrag_k5", chat_engine),
    *(
        Application(f"{name}, {has}", "LlamaIndex", "mtrag_k5", llama_agent(kind, has), Way.ORDERED)
        for name, kind in (("agent", FunctionAgent), ("ReAct", ReActAgent))
        for has in ("engine", "retriever", "memory")
    ),
    Application("Mem0 bullets", "Mem0", "locomo_k20", bullets, Way.ORDERED),
    Application("Mem0 tool", "Mem0", "locomo_k20", agent(recall), Way.SHOWN_ONCE),
)


class Embedded(Embeddings):
    """Embeds as a `TfidfEmbedder` that was fitted on a corpus."""

    def __init__(self, texts: list[str]) -> None:
        self._embedder = TfidfEmbedder(texts, 100)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return vectors, none of which is zero."""
        return [[*map(float, one), 0.01] for one in self._embedder.embed(texts)]

    def embed_query(self, text: str) -> list[float]:
        """Return a vector."""
        return self.embed_documents([text])[0]


@cache
def similar(name: str) -> BaseRetriever:
    """Return the retriever of a vector store that holds a corpus."""
    _, corpus = read_named_trace(data_folder(name), f"{name}_k5")
    texts, names = [one.text for one in corpus.values()], list(map(str, corpus))
    store = InMemoryVectorStore(Embedded(texts))
    store.add_texts(texts, [{"source": one} for one in names], ids=names)
    return store.as_retriever(search_kwargs={"k": 5})


@cache
def questions(name: str, number: int) -> tuple[list[Asked], dict[str, Sequence[ContextBlock]]]:
    """Return the first questions of a trace, and what is found for any of it."""
    trace, _ = read_named_trace(data_folder(name.partition("_")[0]), name)
    turns, asked = Counter(one.conversation_id for one in trace), list[Asked]()
    for one in trace:
        talk, of_talk = one.conversation_id, turns[one.conversation_id]
        if talk is None or of_talk >= _TURNS.start:
            part = len(asked) // _TURNS[-1] if of_talk > _TURNS[-1] else 0
            conversation = None if talk is None else f"{talk} {part}"
            asked.append(Asked(one.query, tuple(one.blocks), conversation))
    return asked[:number], {one.query: one.blocks for one in trace}


def computed(made: Application, number: int, way: str) -> int:
    """Return how many tokens are computed for an application that is changed in a way."""
    known_texts().forget_all()  # as in a process of its own
    asked, found = questions(made.trace, number)
    run = Run(way, dict(found))
    answer = made.make(run)
    for one in asked:
        run.found[one.question] = one.blocks
        answer(one)
    return run.engine.usage.prefilled_tokens


class Row(NamedTuple):
    """What was estimated of an application, and what its engine computed less."""

    # what the verdict changes; empty where nothing is to be gained, or nothing is recorded
    way: str
    said: str  # what `estimate` prints; empty where nothing is recorded
    as_it_is: tuple[float, float]  # the shares saved, estimated and counted, with the model wrapped
    changed: tuple[float, float]  # those with what `Next:` says, else what the guide says

    @property
    def points(self) -> float:
        """By how much the estimate is off, at most."""
        pairs = (self.as_it_is, self.changed)
        return max((100 * (estimated - counted) for estimated, counted in pairs), key=abs)

    @property
    def is_ok(self) -> bool:
        """Whether the estimate was right."""
        counted = max(self.as_it_is[1], self.changed[1])
        is_overlooked = not self.way and counted > LEAST_SAVED
        return abs(self.points) <= MOST_POINTS and not is_overlooked


def measure(made: Application, number: int) -> Row:
    """Record an application as it is, estimate, and change it as the verdict says."""
    with TemporaryDirectory() as folder:
        with TraceRecorder(folder) as recorder, ExitStack() as exits:
            for recording in filter(None, map(installed, registered().values())):
                exits.enter_context(recording(recorder))
            plain = computed(made, number, AS_IT_IS)
        if recorder.faults:
            sys.exit(f"{made.name}: {recorder.faults} lines could not be recorded")
        told, said = dict[str, Any](), ""
        if recorder.requests:
            found = verdict(measure_savings(EstimateConfig(trace=folder)))
            told = dict(found.measured)
            said = "\n".join([found.sentence, f"Next: {found.next_step}", *found.also])
    way = told.get("way", "")
    tried = way or made.guide
    saved = {one: 1 - computed(made, number, one) / plain for one in {Way.WRAPPED, tried}}
    as_it_is = told.get("saved_share_as_it_is", 0.0)
    changed = told.get("saved_share", as_it_is)
    return Row(way, said, (as_it_is, saved[Way.WRAPPED]), (changed, saved[tried]))


def main() -> int:
    """Print the table; return 1 if an estimate was wrong."""
    parser = new_parser(__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="those whose name holds this")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="default: %(default)s")
    parser.add_argument("--verbose", action="store_true", help="print what estimate says, too")
    options = parser.parse_args()
    wanted = [one for one in APPLICATIONS if options.only in one.name]
    if not wanted:
        parser.error(f"no application's name holds {options.only!r}")
    warnings.simplefilter("ignore", DeprecationWarning)
    logging.getLogger("ctxreuse").setLevel(logging.ERROR)  # it says where wrapping does nothing
    table = new_table(
        f"{options.questions} questions each: tokens computed less, in %, estimated and counted",
        ["framework", "application", "Next"],
        ["as it is", "counted", "changed", "counted", "points off", ""],
    )
    right = 0
    for made in wanted:
        print(f"{made.framework}: {made.name}", file=sys.stderr, flush=True)
        row = measure(made, options.questions)
        if options.verbose:
            print(row.said, end="\n\n")
        right += row.is_ok
        table.add_row(
            made.framework,
            made.name,
            row.way or ("nothing to gain" if row.said else f"nothing recorded ({made.guide})"),
            *(f"{100 * share:.1f}" for share in (*row.as_it_is, *row.changed)),
            f"{row.points:+.1f}",
            "ok" if row.is_ok else "[red]off",
        )
    console = Console(width=180)
    console.print(table)
    console.print(f"{right} of {len(wanted)} within {MOST_POINTS:g} points")
    return 0 if right == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
