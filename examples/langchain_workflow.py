"""A workflow engine under a LangChain application, in three levels.

1. A retriever: searches of all requests share their scans.
2. Retriever, prompt and model linked: the answer begins while the search goes on.
3. A whole graph as a Runnable, here as a node of LangGraph.

Runs without a server, on a canned model; with CTXREUSE_BASE_URL set, on the model behind it (the
name of which CTXREUSE_MODEL says). Needs `pip install '.[langchain,workflow]'`, and
`langchain-openai` for a server.
"""

# no postponed annotations: LangGraph reads those of the state

import os
from typing import Any, TypedDict

import faiss
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, StateGraph

from ctxreuse import ReusePlanner
from ctxreuse.workflow import VectorRetriever, WorkflowEngine, hyde
from ctxreuse.workflow.models.embedders import TfidfEmbedder
from langchain_ctxreuse import (
    LangChainLLM,
    SpeculativeRAGChain,
    WorkflowRetriever,
    WorkflowRunnable,
)

TEXTS = [
    "Paris is the capital of France.",
    "The Seine flows through Paris into the English Channel.",
    "Rome is the capital of Italy.",
    "The Tiber flows through Rome.",
    "Lisbon is the capital of Portugal.",
    "The Tagus flows through Lisbon into the Atlantic.",
]


def vector_retriever() -> VectorRetriever:
    """Return a small index of the texts; put your own faiss IVF index and embedder here."""
    embedder = TfidfEmbedder(TEXTS, dimensions=5)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(embedder.dimension), embedder.dimension, 2)
    index.cp.min_points_per_centroid = 1  # there are few texts
    vectors = embedder.embed(TEXTS)
    index.train(vectors)
    index.add(vectors)
    return VectorRetriever(index, TEXTS, embedder, nprobe=2)


def chat_model() -> BaseChatModel:
    """Return the model behind CTXREUSE_BASE_URL, or a canned one."""
    base_url = os.environ.get("CTXREUSE_BASE_URL")
    if base_url is None:
        return FakeListChatModel(responses=["The Seine flows through Paris."])
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=os.environ.get("CTXREUSE_MODEL", "smollm2-135m-instruct"),
        base_url=base_url,
        api_key="EMPTY",
        max_tokens=60,
    )


class Asking(TypedDict, total=False):
    """The state of the LangGraph graph."""

    input: str
    docs: list[Document]
    answer: str


llm = chat_model()
engine = WorkflowEngine(LangChainLLM(llm), vector_retriever(), ReusePlanner())
question = "Which river flows through Paris?"

# level 1: a retriever
retriever = WorkflowRetriever(engine=engine, k=2)
for found in retriever.batch([question, "What is the capital of Italy?"]):
    print("1.", [document.page_content for document in found])

# level 2: retriever | prompt | model, linked; the config's thread says where to look first
prompt = ChatPromptTemplate.from_messages(
    [("system", "Answer from these documents.\n\n{context}"), ("human", "{input}")]
)
chain = SpeculativeRAGChain(retriever=retriever, prompt=prompt, llm=llm)
config: Any = {"configurable": {"thread_id": "conversation-1"}}
print("2.", chain.invoke({"input": question}, config)["answer"])
print("2.", "".join(chain.pick("answer").stream({"input": question}, config)))

# level 3: a graph (imagine a passage, search for it, answer) as a node of LangGraph
builder: Any = StateGraph(Asking)
builder.add_node("ask", WorkflowRunnable(engine, hyde(k=2), outputs=["docs", "answer"]))
builder.add_edge(START, "ask").add_edge("ask", END)
state = builder.compile().invoke({"input": question}, config)
print("3.", state["answer"], f"({len(state['docs'])} documents)")
