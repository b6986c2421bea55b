"""Models that count what an engine computes, and applications recorded as they ask them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from llama_index.core.llms import LLM, CompletionResponse, CustomLLM, LLMMetadata

from ctxreuse import ReusePlanner
from ctxreuse.cache import PrefixCacheSimulator
from ctxreuse.measure.traces.recording import TraceRecorder
from langchain_ctxreuse import ReuseChatModel
from langchain_ctxreuse.recording import recording as recording_langchain
from llamaindex_ctxreuse import ReuseLLM
from llamaindex_ctxreuse.recording import recording as recording_llamaindex
from mem0_ctxreuse.recording import recording as recording_mem0


class Engine:
    """Counts what a prefix cache without bounds does not serve."""

    def __init__(self) -> None:
        self.cache, self.computed = PrefixCacheSimulator(), 0

    def ask(self, prompt: str) -> None:
        tokens = [hash(one) & 0xFFFFFF for one in re.findall(r"\w{1,4}|\W", prompt)]
        self.computed += self.cache.serve(tokens).prefilled_tokens


class Asked(BaseChatModel):
    """Answers all alike; an agent's, after two searches."""

    engine: object
    has_tools: bool = False

    @property
    def _llm_type(self) -> str:
        return "asked"

    def bind_tools(self, tools, **kwargs):
        return self.model_copy(update={"has_tools": True})

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.engine.ask("".join(f"<{one.type}>{one.text}" for one in messages))
        done = sum(one.type == "tool" for one in messages)
        calls = []
        if self.has_tools and done < 2:
            calls = [{"name": "search", "args": {"query": messages[0].text}, "id": f"c{done}"}]
        answer = AIMessage("" if calls else "Yes.", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=answer)])


class AskedLLM(CustomLLM):
    engine: object

    @property
    def metadata(self):
        return LLMMetadata(context_window=100_000)

    def complete(self, prompt, formatted=False, **kwargs):
        self.engine.ask(prompt)
        return CompletionResponse(text="Yes.")

    def stream_complete(self, prompt, formatted=False, **kwargs):
        raise NotImplementedError


def model_on(engine: Engine, is_changed: bool) -> BaseChatModel:
    """Return LangChain's model on an engine, wrapped in the application that was changed."""
    model = Asked(engine=engine)
    return ReuseChatModel(inner=model, planner=ReusePlanner()) if is_changed else model


def llm_on(engine: Engine, is_changed: bool) -> LLM:
    """Return LlamaIndex's model on an engine, wrapped in the application that was changed."""
    llm = AskedLLM(engine=engine)
    return ReuseLLM(inner=llm, planner=ReusePlanner(), window_s=0) if is_changed else llm


def ask_workflow(
    answering: Any, engine: Engine, is_changed: bool, questions: Iterable[str]
) -> None:
    """Ask a workflow of LlamaIndex, which calls its `llm`, one question after the other."""
    answering.llm = llm_on(engine, is_changed)

    async def ask() -> None:
        for question in questions:
            await answering.run(question=question)

    asyncio.run(ask())


def recorded(folder: Path, run: Callable[[Engine, bool], None], **options: bool) -> int:
    engine = Engine()
    with (
        TraceRecorder(folder, **options) as recorder,
        recording_langchain(recorder),
        recording_llamaindex(recorder),
        recording_mem0(recorder),
    ):
        run(engine, False)
    assert recorder.faults == 0
    return engine.computed
