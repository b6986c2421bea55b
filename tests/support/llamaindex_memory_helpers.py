"""What the tests of LlamaIndex memories share: memories that find letters, chats with a memory."""

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import Memory
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llamaindex_helpers import ListChatStore, RecordingLLM, letter_text
from mem0_stores import lettered

from llamaindex_ctxreuse import ReplayMemory, reuse_memory


class LetterMemory:
    """A Mem0 that finds the letters that a query begins with, and keeps what is added."""

    def __init__(self) -> None:
        self.added: list[tuple[Any, dict[str, Any]]] = []
        self.queries: list[str] = []

    def search(self, query: str, *, filters: Any = None, top_k: int = 20) -> Any:
        self.queries.append(query)
        word = query.partition(" ")[0]
        return {"results": lettered(word if word.islower() else "")[:top_k]}

    def add(self, messages: Any, **entities: Any) -> None:
        self.added.append((messages, entities))


class FailingMemory:
    def search(self, query: str, **kwargs: Any) -> Any:
        raise ConnectionError(f"no memory of {query}")

    add = search


class ListVectorStore(BasePydanticVectorStore):
    """Returns what was added last, of the session that is asked for."""

    stores_text: bool = True
    nodes: list[Any] = []  # noqa: RUF012  # pydantic copies it
    asked: list[Any] = []  # noqa: RUF012

    @property
    def client(self) -> Any:
        return None

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        self.nodes.extend(nodes)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        raise NotImplementedError

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        self.asked.append(query)
        session = query.filters.filters[0].value if query.filters else None
        found = [
            node
            for node in self.nodes[::-1]
            if session is None or node.metadata["session_id"] == session
        ][: query.similarity_top_k]
        return VectorStoreQueryResult(
            nodes=found, similarities=[1.0] * len(found), ids=[node.node_id for node in found]
        )


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def assistant(text: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=text)


def quarters(text: str) -> list[str]:
    """Return tokens of four characters."""
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def plain_memory(*blocks: Any, **options: Any) -> ReplayMemory:
    """Return a memory whose history is no database, and whose prompts may grow without end."""
    return reuse_memory(*blocks, **{"chat_store": ListChatStore(), "growth_limit": None, **options})


def labelled(word: str) -> str:
    """Return memories as planners of `paper_words` show them."""
    return "\n\n".join(f"[Doc_id-{letter}] {letter_text(letter)}" for letter in word)


async def chat_prompts(memory: Memory, questions: Sequence[str]) -> list[str]:
    """Return the prompts of a chat engine that puts the question into the memory first."""
    inner = RecordingLLM()
    engine = SimpleChatEngine.from_defaults(llm=inner, memory=memory, system_prompt="Be brief.")
    for question in questions:
        await engine.achat(question)
    return inner.prompts
