"""What goes in: context blocks and requests, as frozen values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NewType, TypeAlias

from ctxreuse.context.checks import checked_id, checked_kind, checked_list
from ctxreuse.errors import InvalidBlockError, InvalidRequestError, describe

BlockId: TypeAlias = str | int
Message: TypeAlias = Mapping[str, Any]
OpenAIMessage: TypeAlias = Any
"""A dict with `role` and `content`. `Any`, since each client has a type of its own for it."""

BlockKey = NewType("BlockKey", bytes)
"""A block's identity: 16 bytes that stand for its id (type included) and its text."""

DIGEST_BYTES = 16
_ID_CHARACTERS = 64
_NO_LISTS = str, bytes, Mapping


def id_size(name: BlockId | bytes) -> int:
    """Return what remembering an id counts: 1, and 1 for every 64 characters."""
    if isinstance(name, (str, bytes)):
        return 1 + len(name) // _ID_CHARACTERS
    return 1 + int(name).bit_length() // (8 * _ID_CHARACTERS)


def ids_size(names: Sequence[BlockId | bytes]) -> int:
    """Return the sizes of ids together."""
    try:  # every plan asks, so ids of the usual length take no call each
        if max(map(len, names), default=0) < _ID_CHARACTERS:  # type: ignore[arg-type]
            return len(names)
    except TypeError:  # an integer
        pass
    return sum(map(id_size, names))


def encoded(text: str) -> bytes:
    """Return a text as bytes to hash, lone surrogates included; pieces add up to the whole."""
    return text.encode("utf-8", "surrogatepass")


def id_name(name: BlockId) -> str:
    """Return a text that tells an id from all others: "1" is not 1."""
    # hexadecimal: decimal conversion of integers stops at 4,300 digits
    return "s" + name if isinstance(name, str) else f"i{int(name):x}"


def text_digest(text: str) -> bytes:
    """Return 16 bytes that identify a text in any process."""
    return hashlib.blake2b(encoded(text), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBlock:
    """One retrieved document, chunk or memory.

    Two blocks are the same block when id *and* text are equal. The string "1" is not the integer 1.

    Args:
        text: What the model will read. Never altered.
        id: The caller's name for the block, given back as it is. None derives it from the text.
        tokens: Length of the text in tokens. None leaves counting to the planner.

    Raises:
        InvalidBlockError: wrong type, or a token count below 0.
    """

    text: str
    id: BlockId = None  # type: ignore[assignment]  # __post_init__ replaces None
    tokens: int | None = None
    key: BlockKey = field(init=False, repr=False, compare=False)
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidBlockError(
                f"a block's text must be a string, not {describe(self.text)}; "
                "pass ContextBlock(id=..., text='...')"
            )
        digest = text_digest(self.text)
        if self.id is None:
            object.__setattr__(self, "id", f"sha-{digest.hex()}")
        if not isinstance(self.id, (str, Integral)):
            raise InvalidBlockError(
                f"a block's id must be a string or an integer, not {describe(self.id)}; "
                "leave it out to derive it from the text"
            )
        if self.tokens is not None:
            if not isinstance(self.tokens, Integral) or int(self.tokens) < 0:
                raise InvalidBlockError(
                    f"block {describe(self.id)} has {describe(self.tokens)} as its token count; "
                    "give an integer from 0, or None to have it counted"
                )
            object.__setattr__(self, "tokens", int(self.tokens))  # numpy's integers overflow
        name = encoded(id_name(self.id))
        key = hashlib.blake2b(digest + name, digest_size=DIGEST_BYTES).digest()
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "key", BlockKey(key))


@dataclass(frozen=True, slots=True, init=False)
class ContextRequest:
    """A ranked context with its question: what an application is about to send.

    Args:
        blocks: The retrieved blocks, best first. Plain strings become blocks with derived ids.
        query: The question; may be empty.
        system: The system message's text, sent before everything else.
        history: The messages that will be sent before this turn; a first one that says what
            `system` does is left out. None plans the request on its own; an empty list is the first
            turn of a conversation.
        conversation_id: Names the conversation that `history` belongs to, within the tenant.
        tenant: Requests of different tenants never influence each other's order.
        request_id: The engine's id of the request, for eviction; None lets the planner count.
        outdated: Blocks that no longer hold. Where `history` shows them, this turn says so.
        labels: Whether the prompt shows the blocks under labels. None leaves it to the planner.

    Raises:
        InvalidRequestError: wrong type.
        InvalidBlockError: a block of the wrong type.
    """

    blocks: tuple[ContextBlock, ...]
    query: str = ""
    system: str | None = None
    history: tuple[Message, ...] | None = None
    conversation_id: str | int | None = None
    tenant: str = ""
    request_id: str | int | None = None
    outdated: tuple[ContextBlock, ...] = ()
    labels: bool | None = None

    def __init__(
        self,
        blocks: Iterable[ContextBlock | str],
        query: str = "",
        *,
        system: str | None = None,
        history: Iterable[Message] | None = None,
        conversation_id: str | int | None = None,
        tenant: str = "",
        request_id: str | int | None = None,
        outdated: Iterable[ContextBlock] = (),
        labels: bool | None = None,
    ) -> None:
        checked_kind("query", query, str, "a string")
        checked_kind("tenant", tenant, str, "a string")
        if system is not None:
            checked_kind("system", system, str, "a string")
        for name, value in (("conversation_id", conversation_id), ("request_id", request_id)):
            if value is not None:
                checked_id(name, value)
        put = object.__setattr__
        words = "a list of ContextBlock or str; a single text goes into a list of one"
        listed = checked_list("blocks", blocks, words, but=_NO_LISTS)
        own = [one if isinstance(one, ContextBlock) else ContextBlock(text=one) for one in listed]
        put(self, "blocks", tuple(own))
        put(self, "query", query)
        put(self, "system", system)
        messages = None if history is None else _as_messages(history)
        opening = messages[0] if messages and system is not None else {}
        # the prompt of the turn before, as a `Plan` returns it, or a store keeps it
        said = opening.get("content")
        parts = said if isinstance(said, list) else [{"text": said}]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        if messages and opening.get("role") == "system" and texts == [system]:
            messages = messages[1:]
        put(self, "history", messages)
        put(self, "conversation_id", conversation_id)
        put(self, "tenant", tenant)
        put(self, "request_id", request_id)
        put(self, "outdated", tuple(checked_blocks("outdated", outdated)) if outdated else ())
        if labels is not None:
            checked_kind("labels", labels, bool, "True, False or None")
        put(self, "labels", labels)

    @property
    def unique_blocks(self) -> dict[BlockKey, ContextBlock]:
        """The blocks by identity, in the retriever's order; a repeated block counts once."""
        unique: dict[BlockKey, ContextBlock] = {}
        for block in self.blocks:
            unique.setdefault(block.key, block)
        return unique


class OwnMessages(tuple[Message, ...]):
    """Messages that a conversation made and nobody changes, so that no request copies them."""

    __slots__ = ()


def _as_messages(history: Iterable[Message]) -> tuple[Message, ...]:
    if type(history) is OwnMessages:
        return history
    remedy = "pass [{'role': 'user', 'content': '...'}, ...], or None"
    messages = checked_list("history", history, f"a list of chat messages; {remedy}", but=_NO_LISTS)
    for message in messages:
        words = "a dict with 'role' and 'content'"
        checked_kind("a chat message in history", message, (Mapping,), words)
    return tuple(copied_message(message) for message in messages)


def copied_message(message: Message) -> dict[str, Any]:
    """Return a deep copy of a message."""
    copied: dict[str, Any] = {}
    for name, value in message.items():
        try:
            copied[name] = value if isinstance(value, str) else deepcopy(value)
        except Exception as error:  # RecursionError, or whatever a foreign object raises
            depth = "nested too deeply" if isinstance(error, RecursionError) else "not plain data"
            raise InvalidRequestError(
                f"a chat message's {describe(name)} is {depth} and cannot be copied "
                f"({type(error).__name__}); pass strings, lists and dicts of them"
            ) from error
    return copied


def checked_blocks(name: str, blocks: Any) -> list[ContextBlock]:
    """Return blocks as a list."""
    listed = checked_list(name, blocks, "a list of ContextBlock", but=_NO_LISTS)
    words = "a ContextBlock; build one with ContextBlock(id=..., text='...')"
    return [checked_kind(f"an entry of {name}", block, ContextBlock, words) for block in listed]


def texts_to_show(blocks: Iterable[ContextBlock]) -> list[ContextBlock]:
    """Return blocks without blank ones, and those that repeat an earlier one's text."""
    first: dict[bytes, ContextBlock] = {}
    for block in blocks:
        if block.text.strip():
            first.setdefault(block.digest, block)
    return list(first.values())
