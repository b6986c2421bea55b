"""LangChain's chat models and retrievers for a workflow engine, and its documents for LangChain."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import deepcopy
from typing import Any, TypeAlias

from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.retrievers import RetrieverLike
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.vectorstores import VectorStoreRetriever

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.context.checks import check_function, reported_count
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.document_turn import best_first
from ctxreuse.serving.client.reply import field_of
from ctxreuse.serving.client.request import Prompt, check_params
from ctxreuse.workflow.graph.state import Documents, documents_in
from ctxreuse.workflow.models.language_model import Piece, converted_messages
from ctxreuse.workflow.retrievers import check_search
from langchain_ctxreuse.configurable import without_bindings
from langchain_ctxreuse.documents.document_components import checked_retriever, retrieved_documents
from langchain_ctxreuse.messages import text_parts
from langchain_ctxreuse.scope import tenant_from_config

DocumentOf: TypeAlias = Callable[[BlockId], Document]
"""From a block's id to the document that it was made from."""


class LangChainLLM:
    """Serves a LangChain chat model to a workflow; closing a stream closes the model's.

    A chunk with text counts as a token; further tokens in the usage come last, without text.
    Callbacks see a call that was made on a wrong guess as cancelled.

    Args:
        model: A chat model, as it is or bound to arguments. A generation's `params`, such as
            `max_tokens`, are passed with each call.
    """

    def __init__(self, model: Runnable[Any, Any]) -> None:
        self._model = checked_model(model)

    def stream(self, prompt: Prompt, params: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Answer a prompt piece by piece; see `ctxreuse.workflow.LanguageModel`.

        Args:
            prompt: A plan, or chat messages.
            params: Keyword arguments for the model.
        """
        check_params(params)
        messages = converted_messages(prompt, convert_to_messages, "LangChain")
        return streamed(self._model, messages, None, params)


async def streamed(
    model: Runnable[Any, Any], prompt: Any, config: RunnableConfig | None, params: Mapping[str, Any]
) -> AsyncGenerator[Piece, None]:
    """Yield a model's answer, with the tokens that it takes."""
    counted = used = 0
    chunks: Any = model.astream(prompt, config, **params)
    async with aclosing(chunks):
        async for chunk in chunks:
            usage = getattr(chunk, "usage_metadata", None)
            used += reported_count(field_of(usage, "output_tokens")) or 0
            if not isinstance(chunk, (str, BaseMessage)):
                raise InvalidRequestError(
                    f"the model must give messages or texts, not {type(chunk).__name__}; leave out "
                    "what parses its output, and put it behind the workflow"
                )
            texts = [chunk] if isinstance(chunk, str) else [one.text for one in text_parts(chunk)]
            if text := "".join(texts):
                counted += 1
                yield Piece(text, 1)
    if used > counted:
        yield Piece("", used - counted)


def checked_model(model: object) -> Runnable[Any, Any]:
    """Return the model."""
    if isinstance(model, Runnable) and isinstance(without_bindings(model), BaseLanguageModel):
        return model
    raise InvalidRequestError(
        f"llm must be a LangChain chat model, not {describe(model)}; pass ChatOpenAI(...), "
        "or any other as it is or bound to arguments"
    )


class RetrieverStage:
    """Serves a LangChain retriever to a workflow, as an atomic retrieval stage.

    It awaits `ainvoke`; a search in a thread cannot be stopped. A vector store's retriever is asked
    for k documents; of any other, set k to the largest that the workflow wants. A document is known
    by its id or, without one, by its text. What a `ReuseRetriever` has planned is planned anew.

    Args:
        retriever: Any retriever, or any runnable from a string to documents.
    """

    def __init__(self, retriever: RetrieverLike) -> None:
        checked_retriever(retriever)
        self._retriever = retriever

    async def retrieve(self, query: str, k: int) -> tuple[ContextBlock, ...]:
        """Return the first k documents for a query, as blocks.

        Raises:
            InvalidRequestError: the retriever returns something else than documents.
        """
        check_search(query, k)
        # a vector store's retriever prefers the arguments of the call to its search_kwargs
        takes_k = isinstance(self._retriever, VectorStoreRetriever)
        wanted: dict[str, Any] = {"k": k} if takes_k else {}
        found = retrieved_documents(await self._retriever.ainvoke(query, **wanted))
        texts = [one.page_content for one in found]
        documents = best_first(found, texts, tenant_from_config())
        return tuple(
            ContextBlock(id=one.id, text=one.page_content)  # type: ignore[arg-type]
            for one in documents[:k]
        )


def as_documents(
    blocks: Documents, scores: Sequence[float] | None = None, document_of: DocumentOf | None = None
) -> list[Document]:
    """Return blocks as documents, or as copies of `document_of` them, with their scores."""
    found: list[Document] = []
    known = [None] * len(blocks) if scores is None else scores
    for block, score in zip(blocks, known, strict=True):
        if document_of is None:
            document = Document(id=str(block.id), page_content=block.text)
        else:
            document = document_of(block.id)
        if not isinstance(document, Document):
            raise InvalidRequestError(
                f"document_of must return a Document, not {type(document).__name__}"
            )
        metadata = deepcopy(document.metadata)
        if score is not None:
            metadata.setdefault("score", score)
        found.append(document.model_copy(update={"metadata": metadata}))
    return found


def with_documents(value: Any, document_of: DocumentOf | None = None) -> Any:
    """Return a value of a workflow's state with documents as LangChain's."""
    blocks = documents_in(value)
    return value if blocks is None else as_documents(blocks, None, document_of)


def checked_document_of(document_of: object) -> object:
    """Return the function, or None."""
    words = "a function from a block's id to a Document, or None; of a dict pass its __getitem__"
    check_function("document_of", document_of, words)
    return document_of
