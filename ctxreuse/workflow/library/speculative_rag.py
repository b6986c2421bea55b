"""A search and the answer from its documents, for frameworks whose own template makes the prompt.

The model belongs to a single run. It is given the documents, in their planned order and as text,
and puts them into its template.
"""

from __future__ import annotations

from ctxreuse.context.rendering import render_turn
from ctxreuse.context.templates import DEFAULT_TEMPLATES
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.client.request import Prompt, messages_of
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.graph.text_templates import DOCUMENTS_ABOVE, NO_DOCUMENTS
from ctxreuse.workflow.models.language_model import LanguageModel

SEARCH, ANSWER = "search", "answer"
"""The two nodes."""


def speculative_rag_graph(
    name: str, llm: LanguageModel, k: int, retriever: str | None = None
) -> Graph:
    """Return a graph that searches for its `input` and has the model answer.

    Args:
        name: The graph's name; what is learned of graphs of one name is kept for the next.
        llm: The model; its prompts are documents alone, of which `context_of` makes a text.
        k: How many documents are wanted.
        retriever: Which of the workflow engine's retrievers is asked; None takes the default one.

    Raises:
        GraphError: wrong k or retriever.
    """
    graph = WorkflowGraph(name=name)
    graph.add_retrieval(SEARCH, query="{input}", k=k, retriever=retriever, output="docs")
    graph.add_generation(ANSWER, prompt="{docs}", llm=llm)
    return graph.add_edge(START, SEARCH).add_edge(SEARCH, ANSWER).add_edge(ANSWER, END).compile()


def context_of(prompt: Prompt) -> str:
    """Return the documents of a `speculative_rag_graph`: labels, texts, the order annotation.

    Args:
        prompt: The prompt of its model.

    Returns:
        The text; an empty one if nothing was found.
    """
    if isinstance(prompt, Plan):
        return render_turn(prompt.parts, prompt.order_annotation, "", prompt.templates)
    content: str = messages_of(prompt)[-1]["content"]
    if content == NO_DOCUMENTS:
        return ""
    return content.removesuffix(DEFAULT_TEMPLATES.separator + DOCUMENTS_ABOVE)
