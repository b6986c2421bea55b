"""LangChain, LlamaIndex and Mem0 answer real questions through the server, with and without us."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from engine import Engine
from pydantic import SecretStr

from ctxreuse import ReusePlanner
from ctxreuse.measure.traces.trace_files import TraceRequest, read_corpus, read_trace

QUESTIONS = 24
MEMORIES = 60
ANSWER_TOKENS = 8
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the frameworks' own
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]


@dataclass(frozen=True)
class Run:
    """The answers to all questions, and what `/metrics` say of the prompts."""

    answers: list[str]
    prompt_tokens: float
    cached_tokens: float

    @property
    def hit_ratio(self) -> float:
        """The share of the prompts' tokens that the cache served."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def computed_tokens(self) -> float:
        """The tokens of all prompts that the engine had to compute."""
        return self.prompt_tokens - self.cached_tokens


def run(engine: Engine, answer_all: Callable[[str], list[str]]) -> Run:
    """Answer the questions with a fresh cache salt."""
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    before = [engine.metric(name) for name in names]
    answers = answer_all(uuid4().hex)
    hits, queries = (engine.metric(name) - old for name, old in zip(names, before, strict=True))
    return Run(answers, prompt_tokens=queries, cached_tokens=hits)


def check(name: str, without: Run, with_us: Run) -> None:
    """Check that both answered everything, and that less had to be computed with us."""
    for label, one in (("without", without), ("with", with_us)):
        print(
            f"{name} {label}: {one.computed_tokens:,.0f} of {one.prompt_tokens:,.0f} prompt tokens "
            f"computed, hit ratio {one.hit_ratio:.3f}"
        )
    for answers in (without.answers, with_us.answers):
        assert len(answers) == QUESTIONS
        assert all(answer.strip() for answer in answers)
    assert with_us.hit_ratio > 1.1 * without.hit_ratio
    assert with_us.computed_tokens < without.computed_tokens


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """A client for the frameworks' models, which never close the one they make themselves."""
    with httpx.Client() as client:
        yield client


@pytest.fixture(scope="module")
def questions(data_folder: Path) -> list[TraceRequest]:
    """Questions about one article: what many users of one system ask."""
    corpus = read_corpus(str(data_folder / "xquad" / "corpus.jsonl"))
    trace = read_trace(str(data_folder / "xquad" / "trace_k5.jsonl"), corpus)
    articles = Counter(article(request) for request in trace)
    [(largest, _)] = articles.most_common(1)
    return [request for request in trace if article(request) == largest][:QUESTIONS]


def article(request: TraceRequest) -> str:
    return str(request.blocks[0].id).partition("#")[0]


def test_a_langchain_chain(
    engine: Engine, questions: list[TraceRequest], http: httpx.Client
) -> None:
    from langchain_core.documents import Document
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnableLambda, RunnablePassthrough
    from langchain_openai import ChatOpenAI

    from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context

    found = {
        one.query: [Document(block.text, id=str(block.id)) for block in one.blocks]
        for one in questions
    }
    retriever: Any = RunnableLambda(lambda query: found[query])
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from the context."), ("user", "{context}\n\n{question}")]
    )

    def model(salt: str) -> ChatOpenAI:
        return ChatOpenAI(
            model=engine.model,
            base_url=engine.base_url,
            api_key=SecretStr("EMPTY"),
            http_client=http,
            max_completion_tokens=ANSWER_TOKENS,
            temperature=0,
            extra_body={"cache_salt": salt},
        )

    def plain(salt: str) -> list[str]:
        context = retriever | (lambda docs: "\n\n".join(doc.page_content for doc in docs))
        chain = {"context": context, "question": RunnablePassthrough()} | prompt | model(salt)
        return (chain | StrOutputParser()).batch(
            [q.query for q in questions], {"max_concurrency": 2}
        )

    def reusing(salt: str) -> list[str]:
        planner = ReusePlanner()
        context = ReuseRetriever(retriever=retriever, planner=planner) | format_context
        wrapped = ReuseChatModel(inner=model(salt), planner=planner)
        chain = {"context": context, "question": RunnablePassthrough()} | prompt | wrapped
        return (chain | StrOutputParser()).batch(
            [q.query for q in questions], {"max_concurrency": 2}
        )

    check("LangChain", run(engine, plain), run(engine, reusing))


def test_a_llamaindex_query_engine(
    engine: Engine, questions: list[TraceRequest], http: httpx.Client
) -> None:
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    from llama_index.llms.openai_like import OpenAILike

    from llamaindex_ctxreuse import ReuseLLM, ReusePostprocessor

    found = {one.query: one.blocks for one in questions}

    class TraceRetriever(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            blocks = found[query_bundle.query_str]
            return [
                NodeWithScore(node=TextNode(id_=str(block.id), text=block.text), score=1 / rank)
                for rank, block in enumerate(blocks, start=1)
            ]

    def model(salt: str) -> OpenAILike:
        return OpenAILike(
            model=engine.model,
            api_base=engine.base_url,
            api_key="EMPTY",
            http_client=http,
            is_chat_model=True,
            context_window=8192,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            additional_kwargs={"extra_body": {"cache_salt": salt}},
        )

    def plain(salt: str) -> list[str]:
        query_engine = RetrieverQueryEngine.from_args(TraceRetriever(), llm=model(salt))
        return [str(query_engine.query(one.query)) for one in questions]

    def reusing(salt: str) -> list[str]:
        planner = ReusePlanner()
        query_engine = RetrieverQueryEngine.from_args(
            TraceRetriever(),
            llm=ReuseLLM(inner=model(salt), planner=planner),
            node_postprocessors=[ReusePostprocessor(planner=planner)],
        )
        return [str(query_engine.query(one.query)) for one in questions]

    check("LlamaIndex", run(engine, plain), run(engine, reusing))


def test_a_mem0_chat(engine: Engine, data_folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
    import mem0_stores  # isort: skip  # before mem0, which reads its environment at import
    from mem0 import Memory
    from openai import OpenAI

    from mem0_ctxreuse import ReuseMemory

    corpus = read_corpus(str(data_folder / "locomo" / "corpus.jsonl"))
    trace = read_trace(str(data_folder / "locomo" / "trace_k20.jsonl"), corpus)[:QUESTIONS]
    asked = [request.query for request in trace]
    texts = {block.text: None for request in trace for block in request.blocks}
    user = {"user_id": "conv-26"}
    memory = mem0_stores.mem0_offline(Memory)
    for text in list(texts)[:MEMORIES]:
        memory.add(text, infer=False, **user)
    client = OpenAI(base_url=engine.base_url, api_key="EMPTY")

    def answer(messages: list[Any], salt: str) -> str:
        reply = client.chat.completions.create(
            model=engine.model,
            messages=messages,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            extra_body={"cache_salt": salt},
        )
        return reply.choices[0].message.content or ""

    def plain(salt: str) -> list[str]:
        answers = []
        for query in asked:
            found = memory.search(query, filters=user, top_k=10, threshold=0)["results"]
            context = "\n\n".join(one["memory"] for one in found)
            answers.append(answer([{"role": "user", "content": f"{context}\n\n{query}"}], salt))
        return answers

    def reusing(salt: str) -> list[str]:
        reuse = ReuseMemory(memory)
        return [
            answer(reuse.messages(query, filters=user, top_k=10, threshold=0), salt)
            for query in asked
        ]

    with client:
        check("Mem0", run(engine, plain), run(engine, reusing))
