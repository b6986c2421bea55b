"""Ready-made workflows: five of the literature, and the one that framework adapters run.

The prompts suit small models: short, the task last. What never changes comes first (system text,
then documents). Each function returns a new graph (HedraRAG, section 6.1).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.errors import describe
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.client.request import Prompt, messages_of
from ctxreuse.workflow.errors import GraphError
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START, checked_count
from ctxreuse.workflow.graph.state import DOCUMENTS_ABOVE, NO_DOCUMENTS, State
from ctxreuse.workflow.models.language_model import Piece

ANSWERER = (
    "You answer questions. Use what you are given, and write nothing that it does not say. "
    "Answer in one or two sentences. If it does not tell, say that you do not know."
)
WRITER = "You write short passages in the style of an encyclopedia. State facts, and nothing else."
SUMMARISER = (
    "You summarise documents for someone who has a question. Keep only what helps to answer it, "
    "in at most five sentences. If nothing helps, write: Nothing relevant."
)
PLANNER = (
    "You break a question down into simple sub-questions, one at a time. A sub-question asks for "
    "one fact and can be understood on its own. When the known facts answer the question, write: "
    "None"
)

_NO_NOTES = "(none)"

_LABEL = re.compile(
    # possessive: with two ways to share out n blanks, it would try all of them
    r"\W*+(?:(?:next|new|final)\s++)?sub[\s-]?question\s*+(?:\d++\s*+)?[:.\-]\W*",
    re.I,
)
_FINISHED = re.compile(
    r"\W*(?:"
    r"(?:none|no|nothing|n/?a|done|finished)\W*"
    r"|(?:none|done|finished)\s*[.,;:!(-].*"
    r"|(?:no|none|nothing)\s+(?:are\s+|is\s+)?"
    r"(?:more|further|other|additional|else|needed|required|necessary|left|remaining)\b.*"
    r")",
    re.I,
)

Params = Mapping[str, Any]


def one_shot(k: int = 5, params: Params | None = None) -> WorkflowGraph:
    """Return the plain workflow: search for the question, answer from what is found.

    Args:
        k: How many documents are read.
        params: Parameters of each generation, over `temperature` 0 and a fitting `max_tokens`.
    """
    graph = WorkflowGraph(name="one_shot")
    graph.add_retrieval("search", query="{input}", k=k)
    _add_answer(graph, params)
    return _chained(graph, "search", "answer")


def hyde(k: int = 5, params: Params | None = None) -> WorkflowGraph:
    """Return HyDE: imagine a passage that answers, search for it, answer from what is found.

    Arguments are those of `one_shot`.

    Source: Gao et al., "Precise Zero-Shot Dense Retrieval without Relevance Labels", ACL 2023.
    """
    graph = WorkflowGraph(name="hyde")
    graph.add_generation(
        "hypothesis",
        system=WRITER,
        prompt="Question: {input}\n\nWrite a passage that answers the question.",
        params=_params(120, params),
    )
    graph.add_retrieval("search", query="{hypothesis}", k=k)
    _add_answer(graph, params)
    return _chained(graph, "hypothesis", "search", "answer")


def recomp(k: int = 5, params: Params | None = None) -> WorkflowGraph:
    """Return RECOMP: search, compress what is found into a summary, answer from the summary.

    Arguments are those of `one_shot`.

    Source: Xu et al., "RECOMP: Improving Retrieval-Augmented LMs with Context Compression and
    Selective Augmentation", ICLR 2024.
    """
    graph = WorkflowGraph(name="recomp")
    graph.add_retrieval("search", query="{input}", k=k)
    graph.add_generation(
        "compress",
        system=SUMMARISER,
        prompt="You are given {docs}.\n\nQuestion: {input}\n\nSummary:",
        output="summary",
        params=_params(160, params),
    )
    _add_answer(graph, params, "Summary of documents:\n{summary}")
    return _chained(graph, "search", "compress", "answer")


def irg(k: int = 5, rounds: int = 3, params: Params | None = None) -> WorkflowGraph:
    """Return iterative retrieval and generation: each answer helps to search for the next.

    Args:
        k: How many documents each round reads.
        rounds: Number of searches and answers.
        params: As for `one_shot`.

    Source: Shao et al., "Enhancing Retrieval-Augmented Large Language Models with Iterative
    Retrieval-Generation Synergy", Findings of EMNLP 2023.
    """
    checked_count("rounds", rounds)
    graph = WorkflowGraph(name="irg")
    graph.add_retrieval("search", query="{input}", k=k)
    _add_answer(graph, params)
    if rounds == 1:
        return _chained(graph, "search", "answer")
    graph.add_retrieval(
        "search_again", query="{input}\n{answer}", k=k, max_visits=rounds - 1, otherwise=END
    )
    graph.add_edge(START, "search").add_edge("search", "answer")
    return graph.add_edge("answer", "search_again").add_edge("search_again", "answer")


def multistep(k: int = 2, max_steps: int = 3, params: Params | None = None) -> WorkflowGraph:
    """Return the workflow of sub-questions: ask, search and answer until all is known, then answer.

    Args:
        k: How many documents are read for a sub-question.
        max_steps: The most sub-questions that are asked.
        params: As for `one_shot`.

    Source: Trivedi et al., "Interleaving Retrieval with Chain-of-Thought Reasoning for
    Knowledge-Intensive Multi-Step Questions", ACL 2023; Press et al., "Measuring and Narrowing the
    Compositionality Gap in Language Models", Findings of EMNLP 2023.
    """
    checked_count("max_steps", max_steps)
    graph = WorkflowGraph(name="multistep", defaults={"notes": _NO_NOTES})
    graph.add_generation(
        "plan",
        system=PLANNER,
        prompt=(
            "Question: {input}\n\nKnown facts:\n{notes}\n\n"
            "Write the next sub-question, or None if no more facts are needed.\n\nSub-question:"
        ),
        output="subquestion",
        params=_params(40, params),
        max_visits=max_steps,
        otherwise="answer",
    )
    graph.add_retrieval("search", query="{subquestion}", k=k)
    graph.add_generation(
        "find",
        system=ANSWERER,
        prompt="You are given {docs}.\n\nQuestion: {subquestion}\n\nAnswer:",
        output="finding",
        params=_params(60, params),
    )
    graph.add_function("note", _with_new_note, output="notes")
    _add_answer(graph, params, "Known facts:\n{notes}")
    graph.add_edge(START, "plan").add_edge("plan", _search_or_answer, ["search", "answer"])
    graph.add_edge("search", "find").add_edge("find", "note").add_edge("note", "plan")
    return graph.add_edge("answer", END)


def _add_answer(
    graph: WorkflowGraph, params: Params | None, known: str = "You are given {docs}."
) -> None:
    graph.add_generation(
        "answer",
        system=ANSWERER,
        prompt=known + "\n\nQuestion: {input}\n\nAnswer:",
        params=_params(100, params),
    )


def _chained(graph: WorkflowGraph, *names: str) -> WorkflowGraph:
    for source, target in zip((START, *names), (*names, END), strict=True):
        graph.add_edge(source, target)
    return graph


def _search_or_answer(state: State) -> str:
    return "answer" if asks_nothing(state["subquestion"]) else "search"


def _with_new_note(state: State) -> str:
    """Return the notes with the last sub-question and what was found, a line each."""
    note = f"- {_one_line(state['subquestion'])} {_one_line(state['finding'])}"
    return note if state.visits("note") == 0 else f"{state['notes']}\n{note}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _params(max_tokens: int, params: Params | None) -> dict[str, Any]:
    if params is not None and not isinstance(params, Mapping):
        raise GraphError(
            f"params must be a dict such as {{'max_tokens': 100}}, not {describe(params)}"
        )
    return {"temperature": 0.0, "max_tokens": max_tokens, **(params or {})}


def asks_nothing(text: str) -> bool:
    """Return whether a model's answer says that no more sub-questions are needed."""
    # small models say "none" in many ways; only the first line counts, behind its label
    unlabelled = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
    line = unlabelled.strip().partition("\n")[0]
    if not any(letter.isalnum() for letter in line):
        return True
    return "?" not in line and _FINISHED.fullmatch(line) is not None


Answer: TypeAlias = Callable[[str], AsyncGenerator[Piece, None]]
"""From documents (labels, texts, the order annotation) to what a model says of them."""


def speculative_rag_graph(name: str, answer: Answer, k: int, retriever: str | None = None) -> Graph:
    """Return a graph that searches for its `input` and answers from what is found."""
    # what is learned of graphs of one name is kept for the next
    graph = WorkflowGraph(name=name)
    graph.add_retrieval("search", query="{input}", k=k, retriever=retriever)
    graph.add_generation("answer", prompt="{docs}", llm=_DocumentReader(answer))
    return _chained(graph, "search", "answer").compile()


@dataclass(frozen=True, slots=True)
class _DocumentReader:
    """The model of a `speculative_rag_graph`, whose prompts are nothing but documents."""

    answer: Answer

    def stream(self, prompt: Prompt, params: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        if isinstance(prompt, Plan):
            return self.answer(prompt.rendered())
        content: str = messages_of(prompt)[-1]["content"]
        content = "" if content == NO_DOCUMENTS else content
        return self.answer(content.removesuffix(DEFAULT_TEMPLATES.separator + DOCUMENTS_ABOVE))
