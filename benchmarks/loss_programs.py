"""Programs as users of the frameworks write them, each without ctxreuse and as its guides say.

A program sends its prompts to a `Served`, one engine that all of its workers use.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, NamedTuple
from uuid import uuid4

from langchain.agents import create_agent
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever as LangChainRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.base import BaseStore, Item, SearchItem, SearchOp
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.chat_engine import ContextChatEngine, SimpleChatEngine
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.memory import BaseMemoryBlock, ChatMemoryBuffer, Memory
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool, ToolSelection

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache import CacheUsage, PrefixCacheSimulator
from ctxreuse.pipeline.memories import Placement
from ctxreuse.pipeline.ordered_release import DEFAULT_WINDOW_S
from ctxreuse.sharing import SQLiteLog
from langchain_ctxreuse import (
    ReuseChatModel,
    ReuseMiddleware,
    ReuseRetriever,
    ReuseStore,
    format_context,
)
from llamaindex_ctxreuse import (
    ReuseChatEngine,
    ReuseLLM,
    ReuseMemoryBlock,
    ReusePostprocessor,
    reuse_memory,
)
from loss_traffic import Asked, tokenizer
from mem0_ctxreuse import ReuseMemory

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from llamaindex_helpers import ListChatStore

_ANSWER = "It says so in the third paragraph of the first of these documents, as far as I can see."
_SYSTEM = (
    "You are a helpful assistant. Answer the question from the context; say so if it is not there."
)


class Served:
    """One engine that answers everything alike, and its prefix cache, without a bound unless given.

    `usage` counts the tokens of all prompts so far and those that came from its cache,
    `longest` those of the longest prompt.
    """

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self._cache = PrefixCacheSimulator(capacity_tokens)
        self._lock = Lock()
        self.usage = CacheUsage()
        self.longest = 0

    def ask(self, messages: Sequence[tuple[str, str]]) -> CacheUsage:
        """Serve a prompt of (role, text), and return its usage."""
        prompt = "".join(f"<|{role}|>\n{text}\n" for role, text in messages)
        tokens = tokenizer()(f"{prompt}<|assistant|>\n")
        with self._lock:
            usage = self._cache.serve(tokens)
            self.usage += usage
            self.longest = max(self.longest, usage.prompt_tokens)
        return usage


class Program(NamedTuple):
    """What a user runs."""

    framework: str  # whose parts it is made of
    name: str  # what it does
    # from the engine and a worker's planner, None without ctxreuse, to what answers questions that
    # are asked at once
    make: Callable[[Served, ReusePlanner | None], Callable[[Sequence[Asked]], object]]
    at_once: int = 1  # how many are

    def run(self, asked: Sequence[Asked], *, is_ours: bool, workers: int, engine: Served) -> None:
        """Ask all questions; a conversation stays with one worker, other questions go in turn.

        Workers share a log, as the guide says, and hear of each other between questions.
        """
        planners = _planners(workers) if is_ours else [None] * workers
        answering = [self.make(engine, planner) for planner in planners]
        turn = count()
        for start in range(0, len(asked), self.at_once):
            some = asked[start : start + self.at_once]
            named = some[0].conversation
            number = next(turn) if named is None else int(named[1:])
            answering[number % workers](some)
            for planner in planners:
                if planner is not None and workers > 1:
                    planner.catch_up()


@cache
def _folder() -> Path:
    """Return a folder for logs, which is there until the program ends."""
    folder = TemporaryDirectory(ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _planners(workers: int) -> Sequence[ReusePlanner | None]:
    if workers == 1:
        return [ReusePlanner()]
    path = _folder() / uuid4().hex
    return [ReusePlanner(shared_log=SQLiteLog(path)) for _ in range(workers)]


class EngineModel(BaseChatModel):
    """LangChain's model of an engine; asks a tool first, if it has one and a user has asked."""

    engine: Any
    tools: tuple[str, ...] = ()

    @property
    def _llm_type(self) -> str:
        return "served"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """Return it with tools."""
        return self.model_copy(update={"tools": tuple(one.name for one in tools)})

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        sent = convert_to_openai_messages(messages)
        usage = self.engine.ask([(one["role"], _shown(one)) for one in sent])
        answer = AIMessage(
            _ANSWER,
            usage_metadata={
                "input_tokens": usage.prompt_tokens,
                "output_tokens": 20,
                "total_tokens": usage.prompt_tokens + 20,
                "input_token_details": {"cache_read": usage.cached_tokens},
            },
        )
        if self.tools and isinstance(messages[-1], HumanMessage):
            call = {"name": self.tools[0], "args": {"query": messages[-1].text}, "id": "1"}
            answer = AIMessage("", tool_calls=[call], usage_metadata=answer.usage_metadata)
        return ChatResult(generations=[ChatGeneration(message=answer)])


def _shown(message: dict[str, Any]) -> str:
    calls = [one["function"]["arguments"] for one in message.get("tool_calls") or ()]
    return "".join([str(message["content"] or ""), *calls])


class EngineLLM(FunctionCallingLLM):
    """LlamaIndex's model of an engine; asks a tool first, if it has one and a user has asked."""

    engine: Any

    @property
    def metadata(self) -> LLMMetadata:
        """A window that all prompts fit into."""
        return LLMMetadata(
            context_window=1_000_000, is_chat_model=True, is_function_calling_model=True
        )

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer."""
        usage = self.engine.ask([(one.role.value, one.content or "") for one in messages])
        raw = {
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": 20,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            }
        }
        return ChatResponse(
            message=ChatMessage(role=MessageRole.ASSISTANT, content=_ANSWER), raw=raw
        )

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer."""
        answer = self.chat([ChatMessage(role=MessageRole.USER, content=prompt)])
        return CompletionResponse(text=_ANSWER, raw=answer.raw)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer."""
        return self.chat(messages, **kwargs)

    async def acomplete(self, *args: Any, **kwargs: Any) -> CompletionResponse:
        """Answer."""
        return self.complete(*args, **kwargs)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        """Answer in one piece."""
        yield self.chat(messages, **kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        """Answer in one piece."""

        async def pieces() -> Any:
            yield self.chat(messages, **kwargs)

        return pieces()

    def stream_complete(self, *args: Any, **kwargs: Any) -> Any:
        """Answer in one piece."""
        yield self.complete(*args, **kwargs)

    async def astream_complete(self, *args: Any, **kwargs: Any) -> Any:
        """Answer in one piece."""

        async def pieces() -> Any:
            yield self.complete(*args, **kwargs)

        return pieces()

    def _prepare_chat_with_tools(
        self, tools: Any, user_msg: Any = None, chat_history: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        messages = list(chat_history or ())
        if user_msg is not None:
            messages.append(ChatMessage(role=MessageRole.USER, content=str(user_msg)))
        return {"messages": messages, "tools": [one.metadata.name for one in tools]}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the call that it made."""
        return [ToolSelection(**one) for one in response.message.additional_kwargs.get("calls", ())]


class ToolLLM(EngineLLM):
    """Asks a tool for what the user says, then answers."""

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Call the tool, or answer."""
        response = super().chat(messages, **kwargs)
        tools, last = kwargs.get("tools"), messages[-1]
        if tools and last.role is MessageRole.USER:
            query = (last.content or "").rpartition("\n\n")[2]
            call = {"tool_id": "1", "tool_name": tools[0], "tool_kwargs": {"query": query}}
            response.message = ChatMessage(
                role=MessageRole.ASSISTANT, content="", additional_kwargs={"calls": [call]}
            )
        return response


class Documents(LangChainRetriever):
    """Finds what was found for a question; the questions are made known to it."""

    found: Any  # not a dict, which pydantic would copy

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        named = [(one.text, str(one.id)) for one in self.found[query]]
        return [Document(text, id=name, metadata={"source": name}) for text, name in named]


class Nodes(BaseRetriever):
    """Finds what was found for a question; the questions are made known to it."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self._found = found

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=TextNode(id_=str(one.id), text=one.text), score=1 / (1 + rank))
            for rank, one in enumerate(self._found[query_bundle.query_str])
        ]


class Memories:
    """Finds as Mem0 does what was found for a question."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found

    def search(self, query: str, **kwargs: Any) -> dict[str, Any]:
        """Return memories, best first."""
        return {
            "results": [
                {"id": str(one.id), "memory": one.text, "score": 1 / (1 + rank)}
                for rank, one in enumerate(self._found[query])
            ]
        }

    def get(self, memory_id: str) -> dict[str, Any] | None:
        """Return a memory; none is ever changed."""
        for found in self._found.values():
            for one in found:
                if str(one.id) == memory_id:
                    return {"id": memory_id, "memory": one.text}
        return None


def joined(documents: Sequence[Document]) -> str:
    """Return documents as LangChain's guides join them."""
    return "\n\n".join(one.page_content for one in documents)


def numbered(documents: Sequence[Document]) -> str:
    """Return documents as an application joins them that wants citations."""
    return "\n\n".join(f"[Doc_{n}] {one.page_content}" for n, one in enumerate(documents, 1))


def _wrapped(engine: Served, planner: ReusePlanner | None) -> BaseChatModel:
    model = EngineModel(engine=engine)
    return model if planner is None else ReuseChatModel(inner=model, planner=planner, window_s=0)


def _llm(engine: Served, planner: ReusePlanner | None, window_s: float = 0) -> Any:
    llm = EngineLLM(engine=engine)
    return llm if planner is None else ReuseLLM(inner=llm, planner=planner, window_s=window_s)


def chain(template: Any, *, cites: bool = False, wraps_retriever: bool = False) -> Any:
    """Return a chain that puts what it retrieves into a prompt."""

    def make(engine: Served, planner: ReusePlanner | None) -> Any:
        found: dict[str, Any] = {}
        model = _wrapped(engine, None if wraps_retriever else planner)
        retriever: Any = Documents(found=found)
        if wraps_retriever and planner is not None:
            retriever = ReuseRetriever(retriever=retriever, planner=planner)
        shown: Any = joined
        if cites:
            shown = numbered if planner is None else format_context
        clock = count()
        asking = {
            "context": retriever | shown,
            "question": RunnablePassthrough(),
            "clock": RunnableLambda(lambda _: f"2026-11-24 09:{next(clock):02}"),
        }
        running = asking | ChatPromptTemplate.from_messages(template) | model

        def answer(some: Sequence[Asked]) -> None:
            found.update({one.question: one.blocks for one in some})
            if len(some) == 1:
                running.invoke(some[0].question)
            else:
                running.batch([one.question for one in some])

        return answer

    return make


def retrieval_chain(template: Any) -> Any:
    """Return LangChain's retrieval chain with the application's history."""

    def make(engine: Served, planner: ReusePlanner | None) -> Any:
        found: dict[str, Any] = {}
        prompt = ChatPromptTemplate.from_messages(template)
        model = _wrapped(engine, planner)
        running = create_retrieval_chain(
            (lambda given: given["input"]) | Documents(found=found),
            create_stuff_documents_chain(model, prompt),
        )
        return _with_history(running, found)

    return make


def _with_history(running: Any, found: dict[str, Any]) -> Any:
    histories: dict[str | None, list[BaseMessage]] = {}

    def answer(some: Sequence[Asked]) -> None:
        (one,) = some
        found[one.question] = one.blocks
        history = histories.setdefault(one.conversation, [])
        config = {"configurable": {"thread_id": one.conversation}}
        given = {"input": one.question, "chat_history": list(history)}
        said = running.invoke(given, config)
        history += [HumanMessage(one.question), AIMessage(said["answer"])]

    return answer


def agent(engine: Served, planner: ReusePlanner | None) -> Any:
    """Return LangChain's agent with a retriever tool, and a checkpointer."""
    found: dict[str, Any] = {}
    tool = create_retriever_tool(Documents(found=found), "search", "Finds documents.")
    running = create_agent(
        EngineModel(engine=engine),
        [tool],
        system_prompt=_SYSTEM,
        middleware=[] if planner is None else [ReuseMiddleware(planner=planner)],
        checkpointer=InMemorySaver(),
    )

    def answer(some: Sequence[Asked]) -> None:
        (one,) = some
        found[one.question] = one.blocks
        config = {"configurable": {"thread_id": one.conversation}}
        running.invoke({"messages": [HumanMessage(one.question)]}, config)

    return answer


def query_engine(wraps: str = "llm", window_s: float = 0) -> Any:
    """Return LlamaIndex's query engine; one that is asked much at once has a window."""

    def make(engine: Served, planner: ReusePlanner | None) -> Any:
        found: dict[str, Any] = {}
        postprocessors = []
        if planner is not None and wraps == "nodes":
            postprocessors = [ReusePostprocessor(planner=planner)]
        llm = _llm(engine, planner if wraps == "llm" else None, window_s)
        running = RetrieverQueryEngine.from_args(
            Nodes(found), llm=llm, node_postprocessors=postprocessors
        )

        def answer(some: Sequence[Asked]) -> None:
            found.update({one.question: one.blocks for one in some})
            if len(some) == 1:
                running.query(some[0].question)
                return

            async def together() -> None:
                await asyncio.gather(*(running.aquery(one.question) for one in some))

            asyncio.run(together())

        return answer

    return make


def chat_engine(engine: Served, planner: ReusePlanner | None) -> Any:
    """Return LlamaIndex's chat engine, made anew for each request from a stored history."""
    found: dict[str, Any] = {}
    histories: dict[str | None, list[ChatMessage]] = {}
    llm = EngineLLM(engine=engine)

    def answer(some: Sequence[Asked]) -> None:
        (one,) = some
        found[one.question] = one.blocks
        history = list(histories.get(one.conversation, ()))
        chat: Any
        if planner is None:
            memory = ChatMemoryBuffer.from_defaults(chat_history=history, token_limit=1_000_000)
            chat = ContextChatEngine.from_defaults(
                Nodes(found), llm=llm, memory=memory, system_prompt=_SYSTEM
            )
        else:
            chat = ReuseChatEngine(
                Nodes(found), llm, planner=planner, system_prompt=_SYSTEM, chat_history=history
            )
        chat.chat(one.question)
        histories[one.conversation] = list(chat.chat_history)

    return answer


def kept_chat_engine(engine: Served, planner: ReusePlanner | None) -> Any:
    """Return LlamaIndex's chat engine, kept for the whole conversation."""
    found: dict[str, Any] = {}
    chats: dict[str | None, Any] = {}
    llm = EngineLLM(engine=engine)

    def answer(some: Sequence[Asked]) -> None:
        (one,) = some
        found[one.question] = one.blocks
        if one.conversation not in chats:
            chats[one.conversation] = (
                ContextChatEngine.from_defaults(Nodes(found), llm=llm, system_prompt=_SYSTEM)
                if planner is None
                else ReuseChatEngine(Nodes(found), llm, planner=planner, system_prompt=_SYSTEM)
            )
        chats[one.conversation].chat(one.question)

    return answer


def llama_agent(engine: Served, planner: ReusePlanner | None) -> Any:
    """Return LlamaIndex's agent with a retriever tool; the application keeps the history."""
    found: dict[str, Any] = {}
    histories: dict[str | None, list[ChatMessage]] = {}
    nodes = Nodes(found)

    def search(query: str) -> str:
        """Find documents."""
        return "\n\n".join(one.text for one in nodes.retrieve(query))

    inner = ToolLLM(engine=engine)
    llm: Any = inner if planner is None else ReuseLLM(inner=inner, planner=planner, window_s=0)
    tool = FunctionTool.from_defaults(search)

    def answer(some: Sequence[Asked]) -> None:
        (one,) = some
        found[one.question] = one.blocks
        history = histories.setdefault(one.conversation, [])
        running = FunctionAgent(tools=[tool], llm=llm, system_prompt=_SYSTEM, streaming=False)

        async def run() -> None:
            await running.run(one.question, chat_history=list(history))

        asyncio.run(run())
        history += [
            ChatMessage(role=MessageRole.USER, content=one.question),
            ChatMessage(role=MessageRole.ASSISTANT, content=_ANSWER),
        ]

    return answer


def mem0(placement: Placement = "before_question") -> Any:
    """Return a program that answers from memories, in a conversation or not."""

    def make(engine: Served, planner: ReusePlanner | None) -> Any:
        found: dict[str, Any] = {}
        memory: Any = Memories(found)
        histories: dict[str | None, list[dict[str, Any]]] = {}
        if planner is not None:
            memory = ReuseMemory(memory, planner=planner, placement=placement)

        def answer(some: Sequence[Asked]) -> None:
            (one,) = some
            found[one.question] = one.blocks
            owner = {"filters": {"user_id": "alice"}}
            history = None
            if one.conversation is not None:
                history = histories.setdefault(one.conversation, [])
            if planner is None:  # as Mem0's own guides have it
                memories = memory.search(one.question, **owner)["results"]
                listed = "\n".join(f"- {each['memory']}" for each in memories)
                messages = [
                    {"role": "system", "content": f"{_SYSTEM}\nUser Memories:\n{listed}"},
                    *(history or ()),
                    {"role": "user", "content": one.question},
                ]
            else:
                messages = memory.messages(
                    one.question,
                    **owner,
                    system=_SYSTEM,
                    history=history,
                    conversation_id=one.conversation,
                )
            engine.ask([(each["role"], each["content"]) for each in messages])
            if history is not None:
                if planner is not None:
                    history[:] = messages[:-1]
                asked = (
                    {"role": "user", "content": one.question} if planner is None else messages[-1]
                )
                history += [asked, {"role": "assistant", "content": _ANSWER}]

        return answer

    return make


class FoundMemories(BaseMemoryBlock[str]):
    """A memory block of LlamaIndex that shows what was found for the last question."""

    found: Any

    async def _aget(self, messages: list[ChatMessage] | None = None, **kwargs: Any) -> str:
        return "\n".join(one.text for one in self.found[(messages or [])[-1].content])

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """All is known."""


def memory_block(placement: Placement = "before_question") -> Any:
    """Return LlamaIndex's chat engine with a long-term memory."""

    def make(engine: Served, planner: ReusePlanner | None) -> Any:
        found: dict[str, Any] = {}
        chats: dict[str | None, Any] = {}
        llm = EngineLLM(engine=engine)

        def memory(conversation: str | None) -> Any:
            options = {
                "session_id": conversation,
                "token_limit": 1_000_000,
                "chat_store": ListChatStore(),
            }
            if planner is None:
                block = FoundMemories(name="memories", found=found)
                return Memory.from_defaults(memory_blocks=[block], **options)
            ours = ReuseMemoryBlock(
                memory=Memories(found),
                planner=planner,
                placement=placement,
                filters={"user_id": "alice"},
            )
            return reuse_memory(ours, **options)

        def answer(some: Sequence[Asked]) -> None:
            (one,) = some
            found[one.question] = one.blocks
            name = one.conversation
            if name not in chats:
                chats[name] = SimpleChatEngine.from_defaults(
                    llm=llm, memory=memory(name), system_prompt=_SYSTEM
                )
            chats[name].chat(one.question)

        return answer

    return make


class FoundStore(BaseStore):
    """A store of LangGraph's that finds what was found for a question."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found

    def batch(self, ops: Any) -> Any:
        """Search, or get; nothing is ever changed."""
        return [self._done(one) for one in ops]

    async def abatch(self, ops: Any) -> Any:
        """Do what `batch` does."""
        return self.batch(ops)

    def _done(self, op: Any) -> Any:
        if isinstance(op, SearchOp):
            return [_stored(one, SearchItem) for one in self._found[op.query]]
        blocks = (one for found in self._found.values() for one in found)
        return next((_stored(one, Item) for one in blocks if str(one.id) == op.key), None)


def _stored(block: ContextBlock, kind: Any) -> Any:
    now = datetime(2026, 11, 24)
    named = {"key": str(block.id), "namespace": ("alice",), "value": {"data": block.text}}
    return kind(**named, created_at=now, updated_at=now)


def store(placement: Placement = "before_question") -> Any:
    """Return a node of a LangGraph graph that puts memories of a store into its prompt."""

    def make(engine: Served, planner: ReusePlanner | None) -> Any:
        found: dict[str, Any] = {}
        model = EngineModel(engine=engine)
        memories: Any = FoundStore(found)
        states: dict[str | None, list[BaseMessage]] = {}
        if planner is not None:
            memories = ReuseStore(memories, planner=planner, placement=placement)

        def answer(some: Sequence[Asked]) -> None:
            (one,) = some
            found[one.question] = one.blocks
            state = states.setdefault(one.conversation, [])
            asked = HumanMessage(one.question)
            if planner is None:  # as LangGraph's guide has it
                items = memories.search(("alice",), query=one.question)
                known = "\n".join(each.value["data"] for each in items)
                system = SystemMessage(f"{_SYSTEM} User info: {known}")
                state += [asked, model.invoke([system, *state, asked])]
                return
            opening = [] if state else [SystemMessage(_SYSTEM)]
            prompt = memories.messages(("alice",), [*opening, *state, asked])
            state[:] = [*prompt, model.invoke(prompt)]

        return answer

    return make


def core(engine: Served, planner: ReusePlanner | None) -> Any:
    """Return a program that makes prompts itself."""

    def answer(some: Sequence[Asked]) -> None:
        (one,) = some
        if planner is None:
            context = "\n\n".join(block.text for block in one.blocks)
            engine.ask([("system", _SYSTEM), ("user", f"{context}\n\n{one.question}")])
            return
        plan = planner.plan(ContextRequest(one.blocks, one.question, system=_SYSTEM))
        usage = engine.ask([(each["role"], each["content"]) for each in plan.messages()])
        planner.report_usage(plan, usage.prompt_tokens, usage.cached_tokens)

    return answer


CONTEXT_FIRST = [("human", _SYSTEM + "\n\n{context}\n\nQuestion: {question}")]
QUESTION_FIRST = [("human", "Question: {question}\n\nAnswer it from this:\n{context}")]
CLOCK_FIRST = [("system", _SYSTEM + " It is {clock}."), ("human", "{context}\n\n{question}")]
SYSTEM_CONTEXT = [("system", _SYSTEM + "\n\n{context}"), ("human", "{question}")]
HISTORY_BEHIND_CONTEXT = [
    ("system", _SYSTEM + "\n\n{context}"),
    MessagesPlaceholder("chat_history"),
    ("human", "{input}"),
]
HISTORY_FIRST = [
    ("system", _SYSTEM),
    MessagesPlaceholder("chat_history"),
    ("human", "Context:\n{context}\n\nQuestion: {input}"),
]

ONE_SHOT = (
    Program("LangChain", "chain", chain(CONTEXT_FIRST)),
    Program("LangChain", "context in the system text", chain(SYSTEM_CONTEXT)),
    Program("LangChain", "citations", chain(CONTEXT_FIRST, cites=True)),
    Program("LangChain", "ReuseRetriever", chain(CONTEXT_FIRST, wraps_retriever=True)),
    Program("LangChain", "question first", chain(QUESTION_FIRST)),
    Program("LangChain", "question first, citations", chain(QUESTION_FIRST, cites=True)),
    Program("LangChain", "clock first", chain(CLOCK_FIRST)),
    Program("LangChain", "clock first, citations", chain(CLOCK_FIRST, cites=True)),
    Program("LangChain", "batch of 30", chain(CONTEXT_FIRST), 30),
    Program("LlamaIndex", "query engine", query_engine()),
    Program("LlamaIndex", "query engine, postprocessor", query_engine("nodes")),
    Program("LlamaIndex", "30 queries at once", query_engine(window_s=DEFAULT_WINDOW_S), 30),
    Program("LlamaIndex", "30 queries at once, postprocessor", query_engine("nodes"), 30),
    Program("Mem0", "messages", mem0()),
    Program("ctxreuse", "plan", core),
)
CONVERSATIONS = (
    Program("LangChain", "create_retrieval_chain", retrieval_chain(HISTORY_BEHIND_CONTEXT)),
    Program("LangChain", "context in the last message", retrieval_chain(HISTORY_FIRST)),
    Program("LangChain", "agent with a retriever tool", agent),
    Program("LlamaIndex", "chat engine, made per request", chat_engine),
    Program("LlamaIndex", "chat engine, kept", kept_chat_engine),
    Program("LlamaIndex", "agent with a retriever tool", llama_agent),
    Program("Mem0", "messages with history", mem0()),
    Program("LlamaIndex", "chat engine with a memory block", memory_block()),
    Program("LangGraph", "memories of a store", store()),
)
PLACEMENTS = (
    Program("Mem0", "messages, memories in the system text", mem0("system")),
    Program("Mem0", "messages, memories before the question", mem0("before_question")),
    Program("Mem0", "messages, memories behind the history", mem0("after_history")),
)
