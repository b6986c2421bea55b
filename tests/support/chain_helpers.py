"""What the tests of Chain-of-Agents share: models that record, engines without sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from pydantic import Field, PrivateAttr

from chain_of_agents import ChainOfAgents, ChainPrompts
from chain_of_agents.agent_memory import AgentMemory
from chain_of_agents.agent_placement import AgentPlacement
from chain_of_agents.models import AgentReply, AgentRequest, OnPiece
from chain_of_agents.requests import Settings, question_of
from chain_of_agents.run import ChainRun
from chain_of_agents.trace.answer import Trace
from ctxreuse import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool
from ctxreuse.serving.pool.placement import DocumentAffinity

Messages = Sequence[dict[str, Any]]

MANAGER_BEGINS = "Several readers have each read"


def documents(number: int, times: int = 20) -> list[str]:
    return [f"Document {n} says {n}. " * times for n in range(number)]


def question(number: int = 3, **more: Any) -> dict[str, Any]:
    return {"question": "Which?", "documents": documents(number), **more}


def is_managers(messages: Messages) -> bool:
    return str(messages[0]["content"]).startswith(MANAGER_BEGINS)


def worker_query(prompts: ChainPrompts, question: str, note: str) -> str:
    return (prompts.next if note else prompts.first).format(question=question, note=note)


def word_count(text: str) -> int:
    return len(text.split())


class InTurn:
    """Assigns documents to agents in turn, whatever has been before."""

    def assign(self, documents: Any, agents: Any, engines: Any) -> list[int]:
        return [agents[place % len(agents)] for place in range(len(documents))]

    def forget_agent(self, agent: int) -> None:
        """Nothing is remembered."""


class RecordingAgents:
    """Stands where models do: plans as one engine would, records, answers from the messages."""

    keeps_connections = False
    names = ("",)

    def __init__(
        self,
        planner: ReusePlanner,
        answer: Callable[[Messages], str | None] = lambda messages: "a note",
        window: int | None = None,
    ) -> None:
        self.plans: list[Plan] = []
        self.requests: list[AgentRequest] = []
        self._planner = planner
        self._answer = answer
        self._window = window

    @property
    def prompts(self) -> list[list[dict[str, Any]]]:
        return [plan.messages() for plan in self.plans]

    @property
    def engines(self) -> RecordingAgents:
        return self

    def available(self) -> tuple[str, ...]:
        return self.names

    def cache_epoch(self, engine: str) -> int:
        return 0

    async def context_window(self) -> int | None:
        return self._window

    async def ask(
        self, request: AgentRequest, config: RunnableConfig, on_piece: OnPiece | None = None
    ) -> AgentReply:
        plan = self._planner.plan(request.context)
        self.requests.append(request)
        self.plans.append(plan)
        text = self._answer(plan.messages())
        if on_piece is not None and text:
            on_piece(text)
        return AgentReply(text=text, plan=plan)

    async def disconnect(self) -> None:
        """There is no connection."""

    async def aclose(self) -> None:
        """There is no connection."""


class Agents:
    """A chain's parts without any framework, for many small runs.

    Args:
        answer: From a prompt's messages to the answer; what it raises is the model's error.
        token_counter: The planner's.
        assignment: Makes what assigns documents.
        planner: The caller's planner; None makes one as the chain does.
        **settings: Of the chain, where they are not the defaults.
    """

    def __init__(
        self,
        answer: Callable[[Messages], str | None] = lambda messages: "a note",
        token_counter: Any = None,
        assignment: Any = DocumentAffinity,
        planner: ReusePlanner | None = None,
        **settings: Any,
    ) -> None:
        self.planner = planner or ReusePlanner(token_counter=token_counter, annotate=False)
        self.model = RecordingAgents(self.planner, answer)
        given: dict[str, Any] = {
            "workers": 4,
            "mode": "sequential",
            "packing": "single",
            "prompts": ChainPrompts(),
            "note_tokens": 16,
            "answer_tokens": 16,
            "segment_tokens": None,
            "context_window": None,
            "timeout_s": None,
            "min_read": 0.5,
            **settings,
        }
        self.settings = Settings(**given)
        self.placement = AgentPlacement(self.settings.workers, self.model, assignment)
        self.memory = AgentMemory()

    def run(self, documents: Sequence[Any], question: str = "Which?", **more: Any) -> Trace:
        """Answer a question; the prompts stand in `model.plans`, from this question on."""
        self.model.plans.clear()
        self.model.requests.clear()
        run = ChainRun(
            self.settings,
            self.model,
            self.planner,
            self.placement,
            self.memory,
            question_of({"question": question, "documents": documents, **more}),
            AsyncCallbackManagerForChainRun.get_noop_manager(),
            RunnableConfig(),
        )
        asyncio.run(run.answer())
        return run.trace


def session() -> str:
    """Return who read what in some questions, and all prompts, as JSON."""
    done: list[Any] = []
    for mode, packing in (("sequential", "packed"), ("parallel", "single")):
        agents = Agents(workers=7, mode=mode, packing=packing, context_window=1000)
        for turn in range(3):
            odd = ["x" * 2000, {"id": 3, "text": "t"}]
            trace = agents.run(documents(9 - turn, 40)[::-1] + odd)
            done.append([[step.agent, *map(str, step.documents)] for step in trace.workers])
            done.append(agents.model.prompts)
    return json.dumps(done)


def client_of(engine: EmulatedEngine) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=engine.transport())


def pool_of(*engines: EmulatedEngine, **options: Any) -> EnginePool:
    """Return a pool of emulated engines, called e0, e1, ..."""

    def connector(engine: EmulatedEngine) -> Callable[[], EngineClient]:
        return lambda: EngineClient("http://engine", http_client=client_of(engine), retries=0)

    return EnginePool(
        {f"e{n}": connector(engine) for n, engine in enumerate(engines)},
        **{"window_s": 0.001, "backoff_s": 0.0, **options},
    )


class Busy:
    """An emulated engine's answer that counts what is under way, and may be held back.

    Attributes:
        running: Requests under way now.
        held: Those of them that are held back.
        most: The most that were under way at a time.
        begun: How many have begun.
    """

    def __init__(self, says: Callable[[Messages], str] = lambda messages: "A note.") -> None:
        self.running = 0
        self.held = 0
        self.most = 0
        self.begun = 0
        self.holds: Callable[[Messages], bool] = lambda messages: False
        self._says = says

    async def __call__(self, body: dict[str, Any]) -> str:
        self.running += 1
        self.begun += 1
        self.most = max(self.most, self.running)
        try:
            await self._hold(body["messages"])
            return self._says(body["messages"])
        finally:
            self.running -= 1

    async def _hold(self, messages: Messages) -> None:
        self.held += 1
        try:
            while self.holds(messages):
                await asyncio.sleep(0.001)
        finally:
            self.held -= 1


class SaysModel(FakeListChatModel):
    """A LangChain model that answers from its prompt, or raises what it is given.

    Attributes:
        says: From a prompt's text to the message, its text, or an error.
    """

    responses: list[str] = Field(default_factory=lambda: ["unused"])
    says: Callable[[str], Any] = Field(default=lambda prompt: "A note.")
    _prompts: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    @property
    def prompts(self) -> list[list[BaseMessage]]:
        return self._prompts

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        self._prompts.append(messages)
        reply = self.says("\n".join(str(message.content) for message in messages))
        if asyncio.iscoroutine(reply):
            reply = await reply
        if isinstance(reply, BaseException):
            raise reply
        message = AIMessage(content=reply) if isinstance(reply, str) else reply
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        result = await self._agenerate(messages)
        for word in re.findall(r" ?[^ ]+", str(result.generations[0].message.content)):
            yield ChatGenerationChunk(message=AIMessageChunk(content=word))


def notes_in(text: str) -> list[str]:
    shown = text.partition("Notes:\n")[2].rpartition("\n\nQuestion:")[0]
    return re.findall(r"^Reader \d+: (.*)$", shown, re.MULTILINE)


@contextmanager
def no_tasks_left() -> Iterator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before
    # the collector may close a generator just now, with a task that the loop makes
    assert all("async_generator_athrow" in repr(task) for task in left), left


def chain_of(*engines: EmulatedEngine, **options: Any) -> ChainOfAgents:
    return ChainOfAgents(llm=pool_of(*engines), **options)
