"""A workflow engine under a LlamaIndex application, in three levels.

1. A retriever: searches of all requests share their scans.
2. Retriever, template and model linked: the answer begins while the search goes on.
3. A whole graph inside a step of a LlamaIndex workflow.

Runs without a server, on emulated models; with CTXREUSE_BASE_URL set, on the model behind it (the
name of which CTXREUSE_MODEL says). Needs `pip install '.[llamaindex,workflow]'`, and
`llama-index-llms-openai-like` and `ctxreuse[openai]` for a server.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import faiss
from llama_index.core.llms import LLM, MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

from ctxreuse import ReusePlanner, request_context
from ctxreuse.workflow import (
    EmulatedLLM,
    LanguageModel,
    OpenAILLM,
    VectorRetriever,
    WorkflowEngine,
    irg,
)
from ctxreuse.workflow.models.embedders import TfidfEmbedder
from llamaindex_ctxreuse import SpeculativeRAGQueryEngine, WorkflowRetriever

TEXTS = [
    "Paris is the capital of France.",
    "The Seine flows through Paris into the English Channel.",
    "Rome is the capital of Italy.",
    "The Tiber flows through Rome.",
    "Lisbon is the capital of Portugal.",
    "The Tagus flows through Lisbon into the Atlantic.",
]
QUESTION = "Which river flows through Paris?"
TEMPLATE = "Answer from these documents.\n\n{context_str}\n\nQuestion: {query_str}"
BASE_URL = os.environ.get("CTXREUSE_BASE_URL")


def vector_retriever() -> VectorRetriever:
    """Return a small index of the texts; put your own faiss IVF index and embedder here."""
    embedder = TfidfEmbedder(TEXTS, dimensions=5)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(embedder.dimension), embedder.dimension, 2)
    index.cp.min_points_per_centroid = 1  # there are few texts
    vectors = embedder.embed(TEXTS)
    index.train(vectors)
    index.add(vectors)
    return VectorRetriever(index, TEXTS, embedder, nprobe=2)


def framework_llm() -> LLM:
    """Return LlamaIndex's model; the mock one repeats the end of its prompt."""
    if BASE_URL is None:
        return MockLLM()
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=os.environ.get("CTXREUSE_MODEL", "smollm2-135m-instruct"),
        api_base=BASE_URL,
        api_key="EMPTY",
        is_chat_model=True,
        context_window=8192,
        max_tokens=60,
    )


def engine_llm() -> LanguageModel:
    """Return the engine's own model; `LlamaIndexLLM(framework_llm())` would do as well."""
    if BASE_URL is None:
        return EmulatedLLM(lambda messages: "The Seine flows through Paris.", speed=100)
    return OpenAILLM(BASE_URL)


class Asking(Workflow):
    """A workflow of LlamaIndex with one of ctxreuse in a step."""

    def __init__(self, engine: WorkflowEngine) -> None:
        super().__init__(timeout=300)
        self._engine = engine

    @step
    async def ask(self, event: StartEvent) -> StopEvent:
        """Search and answer in two rounds."""
        result = await self._engine.run(irg(k=2, rounds=2), event.question)
        return StopEvent(result=result)


async def main() -> None:
    """Run the three levels on one engine."""
    async with WorkflowEngine(engine_llm(), vector_retriever(), ReusePlanner()) as engine:
        retriever = WorkflowRetriever(engine, k=2)
        for one in await retriever.aretrieve(QUESTION):
            print("1.", f"{one.score:.2f}", one.node.get_content())

        query_engine = SpeculativeRAGQueryEngine(
            retriever, llm=framework_llm(), text_qa_template=PromptTemplate(TEMPLATE)
        )
        with request_context(conversation_id="conversation-1"):
            response: Any = await query_engine.aquery(QUESTION)
        print("2.", str(response).splitlines()[-1], f"({len(response.source_nodes)} nodes)")

        result = await Asking(engine).run(question=QUESTION)
        print("3.", result, f"({len(result.visited)} stages)")


if __name__ == "__main__":
    asyncio.run(main())
