"""Memory stores for tests: fakes that search as mem0 does, and mem0 itself without a network.

mem0 reads its environment when it is imported, so every test imports it from here.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

os.environ["MEM0_TELEMETRY"] = "False"
_home = tempfile.TemporaryDirectory(prefix="mem0-", ignore_cleanup_errors=True)
os.environ["MEM0_DIR"] = _home.name  # also where another process of the tests has one

DIMENSIONS = 64


def memory(memory_id: Any, text: str, **more: Any) -> dict[str, Any]:
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return {"id": memory_id, "memory": text, "hash": digest, "metadata": None, **more}


def lettered(letters: str) -> list[dict[str, Any]]:
    """Return one memory a letter, long enough that reordering pays."""
    return [
        memory(f"id-{letter}", f"{letter} says: " + letter * 400, score=1 - rank / 10)
        for rank, letter in enumerate(letters)
    ]


TEXTS = {one: f"{one} says: " + one * 400 for one in "abcdefgh"}
ANSWER = {"role": "assistant", "content": "An answer."}


def plain(letters: str) -> str:
    """Return the memories of letters as a prompt shows them that has no labels."""
    return "\n\n".join(TEXTS[letter] for letter in letters)


class FakeMemory:
    """Finds what the test has put into `found`, in the shape that mem0 2.2 returns."""

    def __init__(self, found: Any = ()) -> None:
        self.found = found
        self.calls: list[dict[str, Any]] = []

    def search(
        self,
        query: str,
        *,
        top_k: int = 20,
        filters: dict[str, Any] | None = None,
        threshold: float = 0.1,
        **kwargs: Any,
    ) -> Any:
        """Search for memories."""
        self.calls.append(
            {"query": query, "top_k": top_k, "filters": filters, "threshold": threshold, **kwargs}
        )
        return self.found if isinstance(self.found, dict) else {"results": list(self.found)}

    def get_all(self, *, filters: dict[str, Any] | None = None, top_k: int = 20) -> Any:
        return {"results": list(self.found)[:top_k]}


class AsyncFakeMemory(FakeMemory):
    """The same, awaited."""

    async def search(self, query: str, **kwargs: Any) -> Any:
        """Search for memories."""
        return super().search(query, **kwargs)


class Store(FakeMemory):
    """Finds all that it has, unless `finds` says which; gets by id."""

    def __init__(self, **texts: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = texts
        self.finds: list[str] | None = None
        self.asked: list[str] = []

    def search(self, query: str, **kwargs: Any) -> Any:
        names = list(self.texts) if self.finds is None else self.finds
        found = [memory(name, self.texts[name]) for name in names]
        self.found = {"results": found}
        return super().search(query, **kwargs)

    def get(self, memory_id: str) -> Any:
        self.asked.append(memory_id)
        return memory(memory_id, self.texts[memory_id]) if memory_id in self.texts else None


class AsyncStore(Store):
    async def search(self, query: str, **kwargs: Any) -> Any:
        return super().search(query, **kwargs)

    async def get(self, memory_id: str) -> Any:
        return super().get(memory_id)


class ListMemory:
    """Returns a list, as older hosted clients do; takes ids outside the filters, as old ones do."""

    def __init__(self, found: Sequence[dict[str, Any]]) -> None:
        self.found = found

    def search(self, query: str, user_id: str | None = None, limit: int = 100) -> Any:
        return list(deepcopy(self.found))[:limit]


def word_vector(text: str) -> list[float]:
    """Return a vector that depends on the words only; no two are so far apart as to be unlike."""
    vector = [1.0] + [0.0] * (DIMENSIONS - 1)
    for word in re.findall(r"\w+", text.lower()):
        digest = hashlib.blake2b(word.encode(), digest_size=2).digest()
        vector[int.from_bytes(digest, "big") % DIMENSIONS] += 1.0
    length = sum(value * value for value in vector) ** 0.5 or 1.0
    return [value / length for value in vector]


def mem0_offline(kind: Any) -> Any:
    """Return a mem0 `Memory` or `AsyncMemory` with qdrant in memory and no connection anywhere."""
    from mem0.embeddings.base import EmbeddingBase
    from qdrant_client import QdrantClient

    class WordEmbedding(EmbeddingBase):
        def __init__(self) -> None:
            """Need no configuration."""

        def embed(self, text: str, memory_action: str | None = None) -> list[float]:
            return word_vector(text)

    store = kind.from_config(
        {
            "vector_store": {
                "provider": "qdrant",
                "config": {
                    "client": QdrantClient(":memory:"),
                    "embedding_model_dims": DIMENSIONS,
                    "collection_name": "memories",
                },
            },
            "embedder": {"provider": "openai", "config": {"api_key": "none"}},
            "llm": {"provider": "openai", "config": {"api_key": "none"}},
            "history_db_path": ":memory:",
        }
    )
    store.embedding_model = WordEmbedding()
    return store
