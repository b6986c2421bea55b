"""The documents that a retrieval writes into the state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex, overload

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError, describe


class Documents(tuple[ContextBlock, ...]):
    """Retrieved documents, best first: a tuple that is still one when it is sliced or joined.

    A prompt shows them before all that changes with each request, where a prefix cache finds them
    again. A user's function that ranks or selects documents returns them as such, too.

    Args:
        blocks: The documents. Plain strings become blocks with derived ids.

    Raises:
        InvalidRequestError: If something is neither a block nor a string.

    Example:
        >>> documents = Documents(["Paris is in France.", "Rome is in Italy."])
        >>> documents[:1], [block.text for block in documents[:1]]
        (Documents(1), ['Paris is in France.'])
    """

    __slots__ = ()

    def __new__(cls, blocks: Iterable[ContextBlock | str] = ()) -> Documents:
        """Return the documents."""
        if isinstance(blocks, (str, bytes, ContextBlock)) or not isinstance(blocks, Iterable):
            raise InvalidRequestError(
                f"documents must be a list of ContextBlock or str, not {_kind(blocks)}; "
                "a single one goes into a list of one"
            )
        return super().__new__(cls, map(_as_block, blocks))

    @overload
    def __getitem__(self, index: SupportsIndex) -> ContextBlock: ...
    @overload
    def __getitem__(self, index: slice) -> Documents: ...
    def __getitem__(self, index: SupportsIndex | slice) -> ContextBlock | Documents:
        if isinstance(index, slice):
            return Documents(super().__getitem__(index))
        return super().__getitem__(index)

    def __add__(self, others: Iterable[ContextBlock | str]) -> Documents:  # type: ignore[override]
        return Documents((*self, *Documents(others)))

    def __repr__(self) -> str:
        return f"Documents({len(self)})"  # no texts: a state may end up in a log


def documents_in(value: object) -> Documents | None:
    """Return a value of the state as documents; None if it is something else.

    A block is documents, and so is a list of blocks: what `sorted` makes of documents.
    """
    if isinstance(value, Documents):
        return value
    if isinstance(value, ContextBlock):
        return Documents([value])
    if isinstance(value, (list, tuple)) and value:
        only_blocks = all(isinstance(item, ContextBlock) for item in value)
        return Documents(value) if only_blocks else None
    return None


def _as_block(document: object) -> ContextBlock:
    if isinstance(document, ContextBlock):
        return document
    if isinstance(document, str):
        return ContextBlock(text=document)
    raise InvalidRequestError(f"a document must be a ContextBlock or str, not {describe(document)}")


def _kind(value: object) -> str:
    return f"a value of type {type(value).__name__}"  # it may be a document's text
