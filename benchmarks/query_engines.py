"""Chains and query engines as users have them: tokens that an engine computes, with ours and as is.

Documents of public traces are retrieved in the trace's order, and LangChain's and LlamaIndex's own
code makes a prompt of them. Each set-up's prompts go through a simulated prefix cache without
bounds; printed are the tokens that are not found there, of the whole prompts. Nothing is called
that the framework would not call: the first row of each framework is the program without us, the
next the one line that the README changes. With `--at-once` questions are asked 30 at a time, by
`abatch` and by `asyncio.gather` of `aquery`: as it is, with ours one by one and at once, and what
the planner reaches that knows all prompts of 30. Reads the folder that CTXREUSE_DATA names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever as LangChainRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from llama_index.core.llms import LLMMetadata
from llama_index.core.query_engine import RetrieverQueryEngine
from rich.console import Console
from rich.progress import track

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.cache import CacheUsage, PrefixCacheSimulator
from ctxreuse.pipeline.known_texts import known_texts
from ctxreuse.pipeline.prompt_turn import PromptPart, PromptPlanner, ScopedPrompt
from ctxreuse.serving.emulation.word_tokenizer import ENGINE_TOKENIZER
from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context
from llamaindex_ctxreuse import ReuseLLM, ReusePostprocessor
from llamaindex_ctxreuse import ReuseRetriever as ReuseNodes
from loss_programs import Documents, EngineLLM, EngineModel, Nodes, joined
from shared import data_folder, new_parser, new_table, read_named_trace

TRACES = ("xquad_k5", "mtrag_k5", "locomo_k20")
CONTEXT_WINDOW = 1_000_000
AT_ONCE = 30
PROMPT = ChatPromptTemplate.from_template(
    "Answer the question from the context.\n\n{context}\n\nQuestion: {question}"
)


class Prompts:
    """An engine that keeps the prompts that it gets."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    def ask(self, messages: Sequence[tuple[str, str]]) -> CacheUsage:
        """Keep a prompt."""
        self.kept.append("\n".join(text for _, text in messages))
        return CacheUsage()


class CompletionLLM(EngineLLM):
    """LlamaIndex's model of an engine that completes prompts."""

    @property
    def metadata(self) -> LLMMetadata:
        """A window that all prompts fit into."""
        return LLMMetadata(context_window=CONTEXT_WINDOW)


def chain(retriever: LangChainRetriever, model: Any, show: Callable[..., str] = joined) -> Runnable:
    """Return a retrieval chain as LangChain's guides have it."""
    return {"context": retriever | show, "question": RunnablePassthrough()} | PROMPT | model


Found: TypeAlias = dict[str, Sequence[ContextBlock]]
"""What a trace says was retrieved for its questions."""


def _langchain(found: Found, ours: str, prompts: Prompts, **options: Any) -> Any:
    """Return a chain with something of ours."""
    planner = ReusePlanner()
    retriever: Any = Documents(found=found)
    model: Any = EngineModel(engine=prompts)
    if "Model" in ours:
        model = ReuseChatModel(inner=model, planner=planner, **options)
    if "Retriever" in ours:
        retriever = ReuseRetriever(retriever=retriever, planner=planner)
    return chain(retriever, model, format_context if "format_context" in ours else joined)


def _llamaindex(found: Found, ours: str, prompts: Prompts, **options: Any) -> Any:
    """Return a query engine with something of ours."""
    planner = ReusePlanner()
    retriever: Any = Nodes(found)
    llm: Any = CompletionLLM(engine=prompts)
    if "LLM" in ours:
        llm = ReuseLLM(inner=llm, planner=planner, **options)
    if "Retriever" in ours:
        retriever = ReuseNodes(retriever, planner=planner)
    behind = [ReusePostprocessor(planner=planner)] if "Postprocessor" in ours else []
    return RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=behind)


SET_UPS = (
    (_langchain, "LangChain", "as it is"),
    (_langchain, "", "ReuseChatModel"),
    (_langchain, "", "ReuseChatModel, format_context"),
    (_langchain, "", "ReuseRetriever"),
    (_llamaindex, "LlamaIndex", "as it is"),
    (_llamaindex, "", "ReuseLLM"),
    (_llamaindex, "", "ReusePostprocessor"),
)
"""Programs: what makes them, whose they are, and what of ours they have."""


def prompts_of(program: Any, found: Found, ours: str) -> list[str]:
    """Return a program's prompts for a trace's questions, in order."""
    prompts = Prompts()
    asked = program(found, ours, prompts, window_s=0)
    ask = asked.invoke if program is _langchain else asked.query
    for question in found:
        ask(question)
    return prompts.kept


async def prompts_at_once(program: Any, found: Found, ours: str, at_once: int) -> list[str]:
    """Return a program's prompts in the order in which the model gets them."""
    prompts, questions = Prompts(), list(found)
    asked = program(found, ours, prompts)
    for start in range(0, len(questions), at_once):
        some = questions[start : start + at_once]
        if program is _langchain:
            await asked.abatch(some)
        else:
            await asyncio.gather(*map(asked.aquery, some))
    return prompts.kept


def computed(prompts: Sequence[str]) -> int:
    """Return how many tokens an engine computes for prompts that come one after the other."""
    cache = PrefixCacheSimulator()
    served = (cache.serve(ENGINE_TOKENIZER.ids(prompt)) for prompt in prompts)
    return sum(usage.prefilled_tokens for usage in served)


def known_together(found: Found, prompts: Sequence[str]) -> list[str]:
    """Return prompts as they are, planned 30 at a time, in the order in which to send them."""
    planner, sent = PromptPlanner(ReusePlanner()), []
    for blocks in found.values():
        known_texts().add("", [block.text for block in blocks])
    scoped = [ScopedPrompt((PromptPart("user", prompt),)) for prompt in prompts]
    for start in range(0, len(scoped), AT_ONCE):
        sent += [one.texts[0] for one in planner.plan(scoped[start : start + AT_ONCE])]
    return sent


def print_at_once(console: Console, name: str, found: Found) -> None:
    """Print what is computed if 30 questions are asked at once."""
    table = new_table(
        f"{name}: {len(found):,} questions, {AT_ONCE} at once; tokens computed",
        ["framework", "ours"],
        ["as it is", "one by one", "at once", "planned together"],
    )
    for framework, program, set_ups in (
        ("LangChain", _langchain, ("Model", "Retriever", "Model, Retriever")),
        (
            "LlamaIndex",
            _llamaindex,
            ("LLM", "Postprocessor", "LLM, Postprocessor", "Retriever", "LLM, Retriever"),
        ),
    ):
        plain = asyncio.run(prompts_at_once(program, found, "", 1))
        best = computed(known_together(found, plain))
        for ours in set_ups:
            each, together = (
                asyncio.run(prompts_at_once(program, found, ours, n)) for n in (1, AT_ONCE)
            )
            figures = (computed(plain), computed(each), computed(together), best)
            table.add_row(framework, ours, *(f"{one:,}" for one in figures))
    console.print(table)


def main() -> None:
    """Print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("traces", nargs="*", default=TRACES, help=f"default: {' '.join(TRACES)}")
    parser.add_argument("--at-once", action="store_true", help="ask 30 questions at a time")
    options = parser.parse_args()
    names = options.traces
    data = data_folder(*{name.split("_")[0] for name in names})
    console = Console(width=120)
    for name in names:
        trace, _ = read_named_trace(data, name)
        found = {f"{one.query} ({n})": one.blocks for n, one in enumerate(trace)}
        if options.at_once:
            print_at_once(console, name, found)
            continue
        table = new_table(
            f"{name}: {len(found):,} questions, tokens computed for whole prompts",
            ["framework", "program"],
            ["tokens", "of as it is", "prompts"],
        )
        plain = 0
        for program, framework, ours in track(SET_UPS, name, transient=True):
            prompts = prompts_of(program, found, ours)
            tokens = computed(prompts)
            plain = tokens if ours == "as it is" else plain
            row = (f"{tokens:,}", f"{tokens / plain:.3f}", f"{len(prompts):,}")
            table.add_row(framework, ours, *row)
        console.print(table)


if __name__ == "__main__":
    main()
