"""What `ctxreuse bench` takes from LangChain: its retrievers' documents, and its own order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module

from langchain_core.documents import Document

from ctxreuse.context.blocks import ContextBlock
from langchain_ctxreuse.documents.document_plans import document_block

retrieved_block = document_block
"""From a document that a retriever has found to a block."""


def long_context_reorder() -> Callable[[Sequence[ContextBlock]], list[ContextBlock]]:
    """Return LangChain's `LongContextReorder` for blocks: the best at the ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package says that nobody keeps it any more
        reorder = import_module("langchain_community.document_transformers").LongContextReorder()

    def reordered(blocks: Sequence[ContextBlock]) -> list[ContextBlock]:
        found = [Document(page_content="", metadata={"at": at}) for at in range(len(blocks))]
        return [blocks[one.metadata["at"]] for one in reorder.transform_documents(found)]

    return reordered
