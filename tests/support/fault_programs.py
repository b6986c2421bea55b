"""Programs as users write them, plain and with ours, over an engine in which things go wrong.

Each asks about documents that are named by letters, the best one first. What an asking came to is
compared with the same program without ours.
"""

import asyncio
import json
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from llama_index.core.query_engine import RetrieverQueryEngine
from llamaindex_helpers import LetterRetriever, letter_text
from openai_models import chat_openai, openai_like

from ctxreuse import ContextBlock, ContextRequest, CtxreuseError, Plan, ReusePlanner
from ctxreuse.cache import KVEventSync
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool
from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context
from llamaindex_ctxreuse import ReuseLLM, ReusePostprocessor

ANSWER = "From the documents."
_SHOWN = re.compile(r"(\w) says: ")


class Broken:
    """Stands where a part of a planner was; whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError("says: a text of a user's document")


@contextmanager
def broken(planner: ReusePlanner, name: str) -> Iterator[None]:
    """Have everything fail that one part of a planner does."""
    part = getattr(planner, name)
    setattr(planner, name, Broken())
    try:
        yield
    finally:
        setattr(planner, name, part)


@contextmanager
def no_room(largest: int) -> Iterator[None]:
    """Let no file of this process grow beyond some bytes."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


@contextmanager
def told() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ctxreuse").addHandler(handler)
    yield lines
    logging.getLogger("ctxreuse").removeHandler(handler)


class Asked(NamedTuple):
    """What an asking came to.

    Attributes:
        said: The answer; "" if there was none.
        error: The type of what was raised; "" if nothing was.
        documents: How often each document stood in each prompt that was sent.
    """

    said: str
    error: str
    documents: tuple[Counter[str], ...]


class Engine:
    """An emulated engine behind a transport in which things go wrong.

    Attributes:
        fault: Is asked before each completion; what it returns is the reply, or it raises. None
            lets the engine answer.
        prompts: The letters of the documents in each prompt that came, in their order.
        served: Is told the messages of each prompt that the engine has answered.
    """

    def __init__(self) -> None:
        self.fault: Callable[[httpx.Request], httpx.Response | None] | None = None
        self.served: Callable[[Any], object] = lambda messages: None
        self.prompts: list[str] = []
        self._engine = EmulatedEngine(answer=ANSWER)
        self._transport = self._engine.transport(httpx)
        self.http = httpx.Client(transport=httpx.MockTransport(self._serve))
        self.ahttp = httpx.AsyncClient(transport=httpx.MockTransport(self._serve_async))

    @property
    def cached_tokens(self) -> int:
        """How many tokens of all prompts so far were cached."""
        return self._engine.usage.cached_tokens

    def _failing(self, request: httpx.Request) -> httpx.Response | None:
        if not request.url.path.endswith("/completions"):
            return None
        text = "\n".join(str(message["content"]) for message in _messages(request))
        self.prompts.append("".join(_SHOWN.findall(text)))
        return None if self.fault is None else self.fault(request)

    def _serve(self, request: httpx.Request) -> httpx.Response:
        reply = self._failing(request)
        if reply is None:
            reply = self._transport.handle_request(request)
            self.served(_messages(request))
        return reply

    async def _serve_async(self, request: httpx.Request) -> httpx.Response:
        reply = self._failing(request)
        if reply is None:
            reply = await self._transport.handle_async_request(request)
            self.served(_messages(request))
        return reply


def _messages(request: httpx.Request) -> Any:
    return json.loads(request.content or b"{}").get("messages", [])


class Program(ABC):
    """A user's program.

    Args:
        planner: Plans its prompts; None is the program without ours.

    Attributes:
        engine: What answers it; its own.
        takes_back: Whether what sends a prompt knows its plan, and so takes back one that failed.
    """

    takes_back = True

    def __init__(self, planner: ReusePlanner | None) -> None:
        self.planner = planner
        self.engine = Engine()

    @property
    @abstractmethod
    def faults(self) -> int:
        """How many faults the parts of ours have counted."""

    @abstractmethod
    def answer(self, question: str) -> str:
        """Return the answer to a question that begins with the letters of its documents."""

    def ask(self, letters: str) -> Asked:
        before = len(self.engine.prompts)
        said = error = ""
        try:
            said = self.answer(f"{letters} which?")
        except Exception as raised:
            error = type(raised).__name__
        sent = self.engine.prompts[before:]
        return Asked(said, error, tuple(map(Counter, sent)))

    def order(self, letters: str) -> str:
        """Ask about documents; return the order in which they were sent."""
        asked = self.ask(letters)
        assert (asked.said, asked.error) == (ANSWER, "")
        return self.engine.prompts[-1]


class Chain(Program):
    """A LangChain chain: retriever, prompt template, model; the model is wrapped."""

    def __init__(self, planner: ReusePlanner | None) -> None:
        super().__init__(planner)
        model = chat_openai(self.engine.http, self.engine.ahttp)
        retriever: Any = Letters()
        self._part: Any = None
        if planner is not None:
            retriever, model = self._wrapped(retriever, model)
        prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
        found = retriever | format_context
        self._prompt = {"context": found, "question": RunnablePassthrough()} | prompt
        self._chain = self._prompt | model | StrOutputParser()

    def with_window(self, window_s: float) -> None:
        """Have calls that come within some seconds planned together."""
        self._part = self._part.model_copy(update={"window_s": window_s})
        self._chain = self._prompt | self._part | StrOutputParser()

    def _wrapped(self, retriever: BaseRetriever, model: Any) -> tuple[Any, Any]:
        self._part = ReuseChatModel(inner=model, planner=self.planner, window_s=0)
        return retriever, self._part

    @property
    def faults(self) -> int:
        return 0 if self._part is None else self._part.faults

    def answer(self, question: str) -> str:
        return str(self._chain.invoke(question))


class RetrieverChain(Chain):
    """The same; the retriever is wrapped."""

    takes_back = False

    def _wrapped(self, retriever: BaseRetriever, model: Any) -> tuple[Any, Any]:
        self._part = ReuseRetriever(retriever=retriever, planner=self.planner)
        return self._part, model


class Letters(BaseRetriever):
    """Retrieves the documents of the letters that a question begins with."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        letters = query.partition(" ")[0]
        return [Document(letter_text(letter), id=f"id-{letter}") for letter in letters]


class QueryEngine(Program):
    """A LlamaIndex query engine: retriever, model; the model is wrapped."""

    def __init__(self, planner: ReusePlanner | None) -> None:
        super().__init__(planner)
        model = openai_like(self.engine.http, self.engine.ahttp)
        self._parts: list[Any] = [] if planner is None else self._wrapping(model)
        self._query_engine = RetrieverQueryEngine.from_args(
            LetterRetriever(),
            llm=self._parts[0] if self._parts else model,
            node_postprocessors=self._parts[1:],
        )

    def _wrapping(self, model: Any) -> list[Any]:
        """Return the model, wrapped, and node postprocessors."""
        return [ReuseLLM(inner=model, planner=self.planner, window_s=0)]

    @property
    def faults(self) -> int:
        return sum(part.faults for part in self._parts)

    def answer(self, question: str) -> str:
        return str(self._query_engine.query(question))


class PostprocessedEngine(QueryEngine):
    """The same with a node postprocessor, which plans before the model does."""

    takes_back = False

    def _wrapping(self, model: Any) -> list[Any]:
        return [*super()._wrapping(model), ReusePostprocessor(planner=self.planner)]


class Client(Program):
    """A planner and an engine client, as `examples/production/app.py` uses them.

    Attributes:
        events: Follows the engine's cache events, if it is given.
    """

    def __init__(self, planner: ReusePlanner | None) -> None:
        super().__init__(planner)
        self.events: KVEventSync | None = None
        self._planning_faults = self._client_faults = 0

    @property
    def faults(self) -> int:
        return self._planning_faults + self._client_faults

    def answer(self, question: str) -> str:
        letters = question.partition(" ")[0]
        return asyncio.run(self._answer(ContextRequest(letter_blocks(letters), question)))

    async def _answer(self, request: ContextRequest) -> str:
        plan = self._planned(request)
        client = EngineClient(
            "http://engine/v1",
            planner=self.planner,
            events=self.events,
            retries=1,
            backoff_s=0,
            timeout_s=20,
            http_client=self.engine.ahttp,
        )
        try:
            return (await client.complete(plan)).text
        finally:
            self._client_faults += client.faults

    def _planned(self, request: ContextRequest) -> Plan:
        if self.planner is not None:
            try:
                return self.planner.plan(request)
            except CtxreuseError:
                raise
            except Exception:
                self._planning_faults += 1
        return ReusePlanner().plan(request, strategy="none")


class BatchChain(Chain):
    def answer(self, question: str) -> str:
        [answer] = self._chain.batch([question])
        return str(answer)


class StreamedChain(Chain):
    def answer(self, question: str) -> str:
        return "".join(self._chain.stream(question))


class TaskChain(Chain):
    def answer(self, question: str) -> str:
        return str(asyncio.run(self._chain.ainvoke(question)))


class TaskQueryEngine(QueryEngine):
    def answer(self, question: str) -> str:
        async def ask() -> str:
            return str(await self._query_engine.aquery(question))

        return asyncio.run(ask())


class Pool(Client):
    """A pool of one engine; without ours, a client of it."""

    def __init__(self, planner: ReusePlanner | None) -> None:
        super().__init__(planner)
        self._pool: EnginePool | None = None
        if planner is not None:
            self._pool = EnginePool(
                "http://engine/v1",
                planner=planner,
                window_s=0,
                backoff_s=0,
                attempts=2,
                open_s=0.0,
                http_client=self.engine.ahttp,
            )
            # the pool's planner has the settings of the one that was given
            [self.planner] = self._pool.planners.values()

    @property
    def faults(self) -> int:
        return 0 if self._pool is None else self._pool.faults

    async def _answer(self, request: ContextRequest) -> str:
        if self._pool is None:
            return await super()._answer(request)
        return (await self._pool.complete(request)).completion.text


def letter_blocks(letters: str) -> list[ContextBlock]:
    return [ContextBlock(id=f"id-{letter}", text=letter_text(letter)) for letter in letters]


PROGRAMS: dict[str, type[Program]] = {
    "LangChain chain": Chain,
    "LlamaIndex query engine": QueryEngine,
    "planner and client": Client,
}
ALL_PROGRAMS = PROGRAMS | {
    "LangChain chain, its retriever": RetrieverChain,
    "LangChain chain, batch": BatchChain,
    "LangChain chain, streamed": StreamedChain,
    "LangChain chain, task": TaskChain,
    "LlamaIndex query engine, its nodes": PostprocessedEngine,
    "LlamaIndex query engine, task": TaskQueryEngine,
    "engine pool": Pool,
}


def assert_profits(program: Program) -> None:
    """Ask twice about documents that nobody has asked about, and check that it pays."""
    assert program.order("uvw") == "uvw"
    before = program.engine.cached_tokens
    assert program.order("wvu") == "uvw"
    assert program.engine.cached_tokens - before > 100
