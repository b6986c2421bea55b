"""A program: calls of every kind beside other instrumentations, and the tokens in all spans.

Its arguments are modules of instrumentations. It prints, as JSON, the name of each call with the
tokens of its prompt in its spans, those that an engine counted, and how many spans are ours.
"""

import asyncio
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

warnings.simplefilter("ignore")  # the instrumentations' own
KEPT = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(KEPT))
PROMPT_TOKENS = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.prompt_tokens",
    "llm.token_count.prompt",
)
Calls = dict[str, Callable[[], Coroutine[Any, Any, Any]]]


def instrument(names: list[str]) -> None:
    for name in names:
        module = importlib.import_module(name)
        [kind] = [
            one
            for key, one in vars(module).items()
            if key.lower() == name.split(".")[-1].replace("_", "") + "instrumentor"
        ]
        kind().instrument(tracer_provider=PROVIDER)


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


async def listed(stream: Any) -> None:
    list(stream)


async def alone(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Call in a task's own context: some instrumentations leave a span of theirs there."""
    await call()


async def done(answer: Any) -> None:
    assert answer


def langchain_calls(planner: Any, engine: Any) -> Calls:
    from langchain_model_helpers import question
    from openai_models import chat_openai, clients_of

    from langchain_ctxreuse import ReuseChatModel

    inner = chat_openai(*clients_of(engine.transport()), stream_usage=True)
    model, asked = ReuseChatModel(inner=inner, planner=planner, window_s=0), question("abc")
    return {
        "invoke": lambda: done(model.invoke(asked)),
        "ainvoke": lambda: model.ainvoke(asked),
        "stream": lambda: listed(model.stream(asked)),
        "astream": lambda: drained(model.astream(asked)),
        "batch": lambda: done(model.batch([asked])),
        "unplanned": lambda: done(model.invoke("Hello.")),
    }


def llamaindex_calls(planner: Any, engine: Any) -> Calls:
    from langchain_model_helpers import question
    from llama_index.core.llms import ChatMessage
    from openai_models import clients_of, openai_like

    from llamaindex_ctxreuse import ReuseLLM

    def wrapped(**options: Any) -> Any:
        inner = openai_like(*clients_of(engine.transport()), **options)
        return ReuseLLM(inner=inner, planner=planner, window_s=0)

    llm = wrapped()
    streaming = wrapped(additional_kwargs={"stream_options": {"include_usage": True}})
    asked = [ChatMessage(content=question("abc"))]

    async def astream() -> None:
        await drained(await streaming.astream_chat(asked))

    return {
        "chat": lambda: done(llm.chat(asked)),
        "achat": lambda: llm.achat(asked),
        "stream_chat": lambda: listed(streaming.stream_chat(asked)),
        "astream_chat": astream,
    }


def bare_calls(planner: Any, engine: Any) -> Calls:
    import openai
    from client_helpers import connected, planned
    from openai_models import URL, clients_of

    def plan() -> Any:
        return planned(planner, "Paris is in France. " * 40)

    async def by_hand() -> None:
        client = openai.OpenAI(
            base_url=URL, api_key="none", http_client=clients_of(engine.transport())[0]
        )
        sent = plan()
        answer = client.chat.completions.create(model="emulated", messages=sent.messages())
        planner.report_usage(sent, answer.usage.prompt_tokens, through="openai")

    async def by_client() -> None:
        async with connected(engine, planner=planner) as client:
            await client.complete(plan())

    return {"SDK": by_hand, "EngineClient": by_client}


async def main() -> None:
    from ctxreuse import ReusePlanner
    from ctxreuse.cache.telemetry import PlannerSpans
    from ctxreuse.serving import EmulatedEngine

    for calls_of in (langchain_calls, llamaindex_calls, bare_calls):
        engine = EmulatedEngine(block_size=4)
        calls = calls_of(ReusePlanner(tracing=PlannerSpans(PROVIDER)), engine)
        for name, call in calls.items():
            before = engine.usage.prompt_tokens
            await asyncio.create_task(alone(call))
            spans = KEPT.get_finished_spans()
            KEPT.clear()
            found = [dict(span.attributes or {}) for span in spans]
            in_spans = sum(
                next((one[key] for key in PROMPT_TOKENS if key in one), 0) for one in found
            )
            ours = sum(span.name == "ctxreuse call" for span in spans)
            counted = engine.usage.prompt_tokens - before
            sys.stdout.write(json.dumps([name, in_spans, counted, ours]) + "\n")


if __name__ == "__main__":
    instrument(sys.argv[1:])
    asyncio.run(main())
