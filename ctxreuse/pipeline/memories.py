"""Memories in any framework: whose they are (a user is a tenant), and which no longer hold."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from ctxreuse.context.blocks import BlockId, ContextBlock, ContextRequest, Message, copied_message
from ctxreuse.context.checks import checked_choice, checked_number
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import Templates, message_texts, render_block, rewrite_texts
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.memory.conversations import paragraph_starts
from ctxreuse.pipeline.known_texts import SHORTEST, Form, TextList, known_texts
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.prompt_records import Slice

Placement: TypeAlias = Literal["system", "before_question", "after_history"]
"""Where a turn's memories stand: in the system message, behind its text; in the question's message,
before the question; or in a message of their own between history and question."""

ENTITIES = ("user_id", "agent_id", "app_id", "run_id")
"""The ids by which mem0 keeps memories apart."""

_OF_ONE_SEARCH = ("score", "score_details")
_BETWEEN = re.compile(r"[ \t\n\r,:]*")  # values of JSON
_LOGICAL = ("AND", "OR", "NOT")
_DIGEST_BYTES = 16
_MOST_LOOKED_UP = 64
_BEGINNING = 20
_FEW_TOKENS = 64


class ListedMemory(NamedTuple):
    """A memory in a search result as JSON: where, and what of it is of no single search."""

    memory: Mapping[str, Any]
    start: int
    end: int
    lasting: tuple[Slice | str, ...]


def memories_in(text: str) -> list[ListedMemory]:
    """Return the memories in a search result of Mem0 as JSON; none in any other text."""
    if not text.lstrip().startswith("{"):
        return []
    found: list[ListedMemory] = []
    try:
        if memories := memories_of(json.loads(text)):
            result, _ = _members(text, text.index("{"))
            _, end, _ = result["results"]
        for memory in memories:
            start = _behind(text, end + 1)  # what opens the list, or a comma
            members, end = _members(text, start)
            kept = [
                Slice(at, to) for name, (at, _, to) in members.items() if name not in _OF_ONE_SEARCH
            ]
            joined = [piece for one in kept for piece in (", ", one)]
            found.append(ListedMemory(memory, start, end, ("{", *joined[1:], "}")))
    except (ValueError, RecursionError):  # some other text, or one that nests too deeply
        return []
    return found


def _members(text: str, start: int) -> tuple[dict[str, tuple[int, int, int]], int]:
    """Return where the members of an object of JSON, and their values, begin and end; its end."""
    decode, members = json.JSONDecoder().raw_decode, dict[str, tuple[int, int, int]]()
    at = _behind(text, start + 1)
    while text[at] != "}":
        name, end = decode(text, at)
        value = _behind(text, end)
        _, end = decode(text, value)
        members[name] = at, value, end
        at = _behind(text, end)
    return members, at + 1


def _behind(text: str, at: int) -> int:
    """Return where the next value of JSON begins, or what closes a list or object."""
    between = _BETWEEN.match(text, at)
    return between.end() if between else at


def memories_of(result: Any) -> list[Mapping[str, Any]]:
    """Return the memories in a search result of Mem0; none if it is anything else, or more."""
    if not isinstance(result, Mapping):
        return []
    memories = result.get("results")
    beside = [name for name, one in result.items() if name != "results" and one]
    if beside or not isinstance(memories, list):
        return []
    are_all = all(
        isinstance(one, Mapping)
        and isinstance(one.get("memory"), str)
        and isinstance(one.get("id"), (str, int))
        for one in memories
    )
    return memories if are_all else []


def checked_placement(placement: object) -> Placement:
    """Return a placement, or raise InvalidRequestError if there is no such one."""
    return checked_choice("placement", placement, get_args(Placement))  # type: ignore[return-value]


def checked_growth_limit(limit: float | None) -> float | None:
    """Return how many times as long memories may make a prompt, or raise InvalidRequestError."""
    return None if limit is None else checked_number("growth_limit", limit, 1)


def is_too_long(tokens: float, alone: float, growth_limit: float | None) -> bool:
    """Return whether shown memories make a prompt longer than laying them out anew would cost."""
    if growth_limit is None or tokens - alone < _FEW_TOKENS:
        return False
    return tokens > growth_limit * alone


def tenant_of(filters: Mapping[str, Any] | None = None, **entity_ids: Any) -> str:
    """Return the tenant whose memories a search with these filters reads.

    It is the user, within the app if the filters name one; without a user the agent, app and run.
    Filters that join several users make a tenant of their own.

    Args:
        filters: As given to Mem0's `search`, with `AND`, `OR`, `NOT` and operators.
        entity_ids: `user_id` and the like, for memories that take them outside the filters.

    Returns:
        A digest, which may stand in logs and is a valid `cache_salt`; "" without an entity.

    Raises:
        InvalidRequestError: filters that are in one another, or no JSON.
    """
    try:
        conditions = set(_conditions(entity_ids)) | set(_conditions(filters))
    except (RecursionError, ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"filters name no tenant: {describe(str(error))}; pass dicts of ids, less deep"
        ) from error
    if any(named[:2] == ("user_id", "is") for named in conditions):
        conditions = {named for named in conditions if named[0] in ("user_id", "app_id")}
    if not conditions:
        return ""
    canonical = json.dumps(sorted(conditions)).encode()
    return "mem0-" + hashlib.blake2b(canonical, digest_size=_DIGEST_BYTES).hexdigest()


def _conditions(filters: object, negated: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield entity, relation and id of conditions, at any depth; metadata filters have none."""
    if isinstance(filters, (list, tuple)):
        for one in filters:
            yield from _conditions(one, negated)
    if not isinstance(filters, Mapping):
        return
    for name, value in filters.items():
        if name in ENTITIES and value is not None:
            for relation, entity_id in _compared(value):
                yield name, negated + relation, entity_id
        elif isinstance(name, str) and name.lstrip("$").upper() in _LOGICAL:
            below = "not " if name.lstrip("$").upper() == "NOT" else ""
            yield from _conditions(value, negated + below)


def _compared(value: Any) -> Iterator[tuple[str, str]]:
    """Yield relation and id; to mem0, 7, "7" and " 7 " are the same id."""
    if isinstance(value, Mapping):
        for operator, operand in value.items():
            if operator in ("eq", "in"):
                yield from _compared(operand)
            else:
                yield str(operator), json.dumps(operand, sort_keys=True, default=str)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from _compared(one)
    else:
        yield "is", str(value).strip()


def store_name(memory: object) -> Hashable:
    """Return what names a store, the same for all objects that reach it, as far as these say so."""
    places = ("collection_name", "host", "org_id", "project_id")
    told = tuple(place for name in places if isinstance(place := getattr(memory, name, None), str))
    return (type(memory).__qualname__, *told) if told else id(memory)


class MemoryName(NamedTuple):
    """The name of a memory among known texts."""

    store: Hashable
    id: BlockId


def note_memories(
    store: Hashable, tenant: str, memories: Iterable[ContextBlock], templates: Templates
) -> None:
    """Have a store's memories known that a prompt of a tenant shows, alone or under labels."""
    shown = [(one, MemoryName(store, one.id)) for one in memories]
    alone = [Form(one.text, name=name) for one, name in shown]
    labelled = [
        Form(render_block(templates.label_of(one), one.text, templates), one, name)
        for one, name in shown
    ]
    held = TextList(is_ours=True)
    known_texts().add(tenant, alone, held)
    known_texts().add(tenant, [one._replace(kind="labelled") for one in labelled], held)


def standing_memories(
    store: Hashable, tenant: str, history: Iterable[Message]
) -> tuple[ContextBlock, ...]:
    """Return a store's memories whose texts stand in messages, under labels or alone."""
    found: dict[bytes, ContextBlock] = {}
    for message in history:
        for text in message_texts(message) if message.get("role") != "assistant" else ():
            spans = known_texts().standing_at(tenant, text) or ()
            stood = [one.known for one in spans if text[one.end : one.end + 1] in ("", "\n")]
            short = [one for one in text.split("\n") if len(one) < SHORTEST]  # spans lack them
            for known in (*stood, *(known_texts().known(tenant, one) for one in short)):
                name = known and known.form.name
                if known and isinstance(name, MemoryName) and name.store == store:
                    memory = ContextBlock(id=name.id, text=known.block.text)
                    found[memory.key] = memory
    return tuple(found.values())


@dataclass(slots=True)
class ShownMemories:
    """The memories that earlier messages of a conversation show, and what the store has of them."""

    blocks: tuple[ContextBlock, ...] = ()
    to_look_up: tuple[BlockId, ...] = ()  # those that the search has not found
    stored: dict[BlockId, str | None] = field(default_factory=dict)  # None: nothing any more

    @classmethod
    def of(
        cls,
        store: Hashable,
        planner: ReusePlanner,
        request: ContextRequest,
        found: Iterable[ContextBlock],
    ) -> ShownMemories:
        """Return what the messages before a turn show, to be looked up."""
        tenant, history = request.tenant, request.history or ()
        recorded = {} if request.conversation_id is None else planner.shown_blocks(request)
        among = [
            block
            for block in recorded.values()
            if (one := known_texts().known(tenant, block.text)) is not None
            and one.form.name == MemoryName(store, block.id)
        ]
        standing = standing_memories(store, tenant, history)
        shown = tuple({one.key: one for one in (*among, *standing)}.values())
        now = {block.id for block in found}
        missing = dict.fromkeys(block.id for block in shown if block.id not in now)
        return cls(shown, tuple(missing)[-_MOST_LOOKED_UP:])

    def note(self, memory_id: BlockId, found: Any) -> None:
        """Take note of what the store has returned for an id; an error is noted by the caller."""
        text = found.get("memory") if isinstance(found, Mapping) else None
        if found is None or isinstance(text, str):
            self.stored[memory_id] = text

    def note_error(self, memory_id: BlockId, error: Exception, fail_open: FailOpen) -> None:
        """Take note of an error: a memory is gone, or could not be looked up, which is counted."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 404 or "NotFound" in type(error).__name__:
            self.note(memory_id, None)
        else:
            fail_open.note(error)

    def outdated(self, found: Sequence[ContextBlock]) -> tuple[ContextBlock, ...]:
        """Return those that no longer hold."""
        now: dict[BlockId, set[str | None]] = {name: {text} for name, text in self.stored.items()}
        for block in found:
            now.setdefault(block.id, set()).add(block.text)
        return tuple(one for one in self.blocks if one.id in now and one.text not in now[one.id])


def without_memories(
    messages: Iterable[Message],
    texts: Iterable[str],
    templates: Templates,
    *,
    are_marked: bool = False,
) -> list[dict[str, Any]]:
    """Return messages without some memories that they show."""
    texts = set(texts)
    quoting = {templates.quoted_outdated(text) for text in texts} if are_marked else set()
    beginnings: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):  # of two with one beginning the longer
        beginnings.setdefault(text[:_BEGINNING], []).append(text)

    lengths, separator = sorted({*map(len, beginnings)}, reverse=True), templates.separator
    words = templates.removed if are_marked else ""  # in place of what is taken out

    def cleaned(content: str) -> str:
        kept, copied_to = "", 0
        for start in paragraph_starts(content, separator):
            if start < copied_to:  # within what was taken out
                continue
            end = _memory_end(content, start, beginnings, lengths, templates)
            if end is None:
                end = content.find(separator, start)
                end = len(content) if end < 0 else end
                said = content[start:end]
                is_annotation = not are_marked and said and templates.is_annotation(said)
                if said not in quoting and not is_annotation:
                    continue
            kept += content[copied_to:start] + words
            copied_to = end
            if not words:  # a separator goes, too
                copied_to = min(len(content), end + len(separator))
                kept = kept.removesuffix(separator) if end == len(content) else kept
        return kept + content[copied_to:]

    copied = [copied_message(message) for message in messages]
    for message in copied if beginnings and templates.separator else ():
        if message.get("role") != "assistant":
            rewrite_texts(message, cleaned)
    return copied


def _memory_end(
    content: str,
    start: int,
    beginnings: Mapping[str, Sequence[str]],
    lengths: Sequence[int],
    templates: Templates,
) -> int | None:
    """Return where the memory ends that stands at the beginning of a paragraph; None for none."""
    first, after = start, ""
    label = templates.label_pattern.match(content, start)
    if label is not None:
        first, after = label.end(), templates.after_text
    for length in lengths:  # a short memory is all of its beginning
        for text in beginnings.get(content[first : first + length], ()):
            end = first + len(text) + len(after)
            if content.startswith(text + after, first) and (
                end == len(content) or content.startswith(templates.separator, end)
            ):
                return end
    return None
