"""Documents, retrievers and models without a network, for the LangChain tests."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import pytest_socket
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore


@pytest.fixture(autouse=True)
def no_sockets() -> Iterator[None]:
    """No test that imports this reaches a network; event loops need Unix sockets."""
    pytest_socket.disable_socket(allow_unix_socket=True)
    yield
    pytest_socket.enable_socket()


class GivenRetriever(BaseRetriever):
    """Returns the documents that the call gives it."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, documents: list[Document]
    ) -> list[Document]:
        return list(documents)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, documents: list[Document]
    ) -> list[Document]:
        return list(documents)


class LetterRetriever(BaseRetriever):
    """Returns one document a letter of the query, the same objects each time."""

    store: dict[str, Document] = {}  # noqa: RUF012  # pydantic copies it

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [self.store.setdefault(letter, document(letter)) for letter in query]


class LetterEmbeddings(Embeddings):
    """Embeds texts by the letters in them."""

    def embed_query(self, text: str) -> list[float]:
        return [text.lower().count(letter) + 0.01 for letter in "abcdefghijklmnopqrstuvwxyz"]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


def text_of(letter: str) -> str:
    """Return a document's text, long enough that reordering pays."""
    return f"{letter} says: " + letter * 400


def document(letter: str, **metadata: Any) -> Document:
    return Document(
        text_of(letter), id=f"id-{letter}", metadata={"source": f"{letter}.txt", **metadata}
    )


def documents(letters: str) -> list[Document]:
    return [document(letter) for letter in letters]


def letters_of(shown: Sequence[Document]) -> str:
    return "".join(one.page_content[0] for one in shown)


def letter_store() -> InMemoryVectorStore:
    """Return a vector store with a document for each of the first eight letters."""
    store = InMemoryVectorStore(LetterEmbeddings())
    store.add_documents(documents("abcdefgh"))
    return store
