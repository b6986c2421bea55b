"""The five workflows on a real engine, many at once: what they answer, and what speculation brings.

The passages are those of 2WikiMultihopQA, searched with a small IVF index. Reads the folder named
by CTXREUSE_DATA.
"""

from __future__ import annotations

import argparse
import asyncio
import textwrap
import time

import faiss
from rich.progress import track

from ctxreuse import ReusePlanner
from ctxreuse.serving import EngineClient
from ctxreuse.workflow import (
    OpenAILLM,
    VectorRetriever,
    WorkflowEngine,
    hyde,
    irg,
    multistep,
    one_shot,
    recomp,
)
from workflow_data import DIMENSIONS, Collection, make_questions

GRAPHS = {
    "one_shot": lambda: one_shot(k=3, params={"max_tokens": 32}),
    "hyde": lambda: hyde(k=3, params={"max_tokens": 32}),
    "recomp": lambda: recomp(k=3, params={"max_tokens": 32}),
    "irg": lambda: irg(k=3, params={"max_tokens": 32}),
    "multistep": lambda: multistep(k=2, params={"max_tokens": 32}),
}


async def main() -> None:
    """Print answers and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--requests", type=int, default=10)
    options = parser.parse_args()
    collection = Collection(vectors=None)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(DIMENSIONS), DIMENSIONS, 64)
    vectors = collection.passage_vectors()
    index.train(vectors)
    index.add(vectors)
    retriever = VectorRetriever(index, collection.block, collection.embedder, nprobe=16)
    questions = make_questions(collection.passages, options.requests)
    planner = ReusePlanner()
    async with EngineClient(options.base_url, planner=planner) as client:
        engine = WorkflowEngine(OpenAILLM(client), retriever, planner)
        async with engine:
            for name, graph in track(list(GRAPHS.items()), description="workflows"):
                before, began = await client.metrics(), time.perf_counter()
                results = await engine.arun_batch([(graph(), one.text) for one in questions])
                seconds, after = time.perf_counter() - began, await client.metrics()
                hits = after.prefix_cache_hits - before.prefix_cache_hits
                queries = after.prefix_cache_queries - before.prefix_cache_queries
                print(f"\n{name}: {seconds:.1f} s, {hits} of {queries} prompt tokens cached")
                for question, result in zip(questions, results, strict=True):
                    print(textwrap.shorten(f"  {question.text} -> {result}", 180))
            print(engine.metrics())


if __name__ == "__main__":
    asyncio.run(main())
