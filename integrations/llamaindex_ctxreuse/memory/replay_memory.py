"""A memory that replays what it sent: each message keeps the memories it was sent with."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias, cast

from llama_index.core.base.llms.types import ChatMessage, ContentBlock, MessageRole, TextBlock
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_validator, model_validator
from llama_index.core.memory.memory import BaseMemoryBlock, InsertMethod, Memory
from llama_index.core.storage.chat_store.base_db import MessageStatus

from ctxreuse.context.checks import checked_each, checked_number
from ctxreuse.context.scope import current_scope, request_context
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.memories import Placement, checked_growth_limit, is_too_long
from llamaindex_ctxreuse.llm.planned_prompts import copied_blocks, copied_message, message_as_openai
from llamaindex_ctxreuse.memory.memory_block import ReuseMemoryBlock

_log = logging.getLogger("ctxreuse")


class _Addition(NamedTuple):
    """What the memory blocks added to the prompt for a turn; may be nothing."""

    system: tuple[ContentBlock, ...] = ()  # the end of the system message
    messages: tuple[ChatMessage, ...] = ()  # before the user's
    content: tuple[ContentBlock, ...] = ()  # the beginning of the user's
    texts: tuple[str, ...] = ()  # of our blocks, as they stand among these


_Insertions: TypeAlias = Mapping[bytes, _Addition]
"""By place, what was inserted there."""


class ReplayMemory(Memory):
    """LlamaIndex's `Memory` with a prompt that only grows; made by `reuse_memory`.

    What memory blocks return for a question stands at the beginning of that question's message, or
    where a `ReuseMemoryBlock`'s `placement` says, and stays there in all later turns. Engines that
    ask for the history before they add the question get it as a message of its own. Messages that a
    block returns stand before that, said by whom they were said.

    When the prompt outgrows `token_limit`, or `growth_limit` times its length with this turn's
    memories alone, the earlier ones are removed, once, and shown anew where they come up. The chat
    store holds the plain messages; only this object has the inserted memories.
    """

    insert_method: InsertMethod = Field(default=InsertMethod.USER)
    growth_limit: float | None = Field(default=2.0, description="None has no limit.")
    _inserted: _Insertions = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _check_kinds(cls, fields: Any) -> Any:
        """Check what LlamaIndex compares and reads before it checks any kinds."""
        given = fields if isinstance(fields, dict) else {}
        for name, at_least in (("token_limit", 1), ("token_flush_size", -math.inf)):
            if name in given:
                checked_number(name, given[name], at_least)
        checked_growth_limit(given.get("growth_limit"))
        blocks, kind = given.get("memory_blocks", ()), cast(Any, BaseMemoryBlock)
        words = "a LlamaIndex memory block, such as ReuseMemoryBlock(memory=...)"
        return {**given, "memory_blocks": checked_each("memory_blocks", blocks, kind, words)}

    @field_validator("insert_method", mode="before")
    @classmethod
    def _check_insert_method(cls, method: object) -> object:
        if method not in (InsertMethod.USER, InsertMethod.USER.value):
            raise InvalidRequestError(
                f"insert_method is {describe(method)}; a history can only be replayed with "
                "InsertMethod.USER, because SYSTEM changes the system message every turn"
            )
        return method

    @classmethod
    def from_defaults(cls, *args: Any, **kwargs: Any) -> ReplayMemory:
        """Return a memory as `Memory.from_defaults` does, with another `insert_method`."""
        limit = kwargs.pop("growth_limit", cls.model_fields["growth_limit"].default)
        checked_growth_limit(limit)
        memory = super().from_defaults(*args, **{"insert_method": InsertMethod.USER, **kwargs})
        assert isinstance(memory, ReplayMemory)
        memory.growth_limit = limit
        return memory

    async def aget(
        self,
        input: str | ChatMessage | None = None,  # noqa: A002  # the base class names it so
        **block_kwargs: Any,
    ) -> list[ChatMessage]:
        """Return the history as it was sent, with the memories for the question.

        Args:
            input: The question, if it is not in the history yet.
            **block_kwargs: For the memory blocks.
        """
        stored = await self.sql_store.get_messages(self.session_id, status=MessageStatus.ACTIVE)
        turns = _PlacedHistory(stored, input)
        found = self._inserted
        if not found and any(one.role == MessageRole.ASSISTANT for one in stored):
            _log_unknown_turns()
        known: _Insertions = {one: found[one] for one in turns.places if one in found}
        if turns.place not in known:
            conversation = current_scope().conversation_id
            conversation = self.session_id if conversation is None else conversation
            with request_context(conversation_id=conversation):
                known = await self._with_new_content(turns, known, block_kwargs)
        self._inserted = known
        return turns.as_sent(known)

    async def _with_new_content(
        self, turns: _PlacedHistory, known: _Insertions, block_kwargs: dict[str, Any]
    ) -> _Insertions:
        """Return the inserted memories, including those of the current turn."""
        content = await self._content(turns, known, block_kwargs)
        opening: bytes | None = None
        if known and self._is_too_long(turns, known, content):
            known = {}
            self._take_back(content)
            if turns.opening is not None and len(self.memory_blocks) == 1 and self._ours:
                # where a first turn shows them, if more is found there than was said since
                [block] = self._ours
                found = block.found_in_front(content.get(block.name, ""))
                is_better = found > self._tokens(turns.before_the_turn({}))
                opening = turns.opening if is_better else None
            content = await self._content(turns, known, block_kwargs, opens=opening is not None)
        others = self._tokens([*turns.before_the_turn(known), *turns.behind_the_turn])
        own = self._tokens(content.values())
        fitting = await self._truncate_memory_blocks(content, own, others)
        self._take_back({name: one for name, one in content.items() if not fitting.get(name)})
        inserted = await self._placed(fitting, is_first=not known, is_alone=turns.is_new)
        if opening is not None:  # and nothing for this turn, which is served so
            return {opening: inserted, turns.place: _Addition()}
        return {**known, turns.place: inserted}

    def _take_back(self, content: Mapping[str, Any]) -> None:
        """Take back the plans of what memory blocks say for a turn that does not show it."""
        for block in self._ours:
            block.take_back(content.get(block.name, ""))

    def _is_too_long(
        self, turns: _PlacedHistory, known: _Insertions, content: Mapping[str, Any]
    ) -> bool:
        behind = turns.behind_the_turn
        tokens = self._tokens([*turns.before_the_turn(known), *behind, *content.values()])
        is_planned = any(one.planner.mode == "active" for one in self._ours)
        if tokens > self.token_limit or not is_planned:
            return tokens > self.token_limit
        anew = {one.name: one.shown_anew(content.get(one.name, "")) for one in self._ours}
        alone = self._tokens([*turns.before_the_turn({}), *behind, *{**content, **anew}.values()])
        return is_too_long(tokens, alone, self.growth_limit)

    async def _placed(
        self, content: dict[str, Any], *, is_first: bool, is_alone: bool
    ) -> _Addition:
        """Return what memory blocks say for a turn, each where its placement says."""
        asked = {one.name: one.placement for one in self._ours}
        by_place: dict[Placement, list[Any]] = {}
        data, messages = await self._format_memory_blocks(content)
        for said in data:
            place = asked.get(said[0], "before_question")
            if place == "system" and not is_first:
                place = "before_question"
            by_place.setdefault(place, []).append(said)
        rendered = {
            place: tuple(self.memory_blocks_template.format_messages(memory_blocks=some)[0].blocks)
            for place, some in by_place.items()
        }
        for place, shown in rendered.items():
            role = "system" if place == "system" else "user"
            texts = [one.text for one in shown if isinstance(one, TextBlock)]
            for block in self._ours:  # a wrapped model leaves alone what is planned
                block.note_shown(content.get(block.name, ""), role, texts)
        own, within = [rendered.get("after_history", ())], rendered.get("before_question", ())
        if is_alone:  # the user's message is not there yet
            own, within = [*own, within], ()
        alone = [ChatMessage(role=MessageRole.USER, blocks=list(one)) for one in own if one]
        said_by_ours = tuple(said for name, said in content.items() if name in asked and said)
        return _Addition(rendered.get("system", ()), (*messages, *alone), within, said_by_ours)

    async def _content(
        self,
        turns: _PlacedHistory,
        known: _Insertions,
        block_kwargs: dict[str, Any],
        *,
        opens: bool = False,
    ) -> dict[str, Any]:
        """Return the content of each memory block, which knows what those before it show."""
        sent = [] if opens else turns.before_the_turn(known)
        history = [message_as_openai(one) for one in sent if one.role != MessageRole.SYSTEM]
        # as paragraphs of their own, which the template's words may keep them from being
        texts = [text for one in known.values() for text in one.texts]
        history += [{"role": "user", "content": text} for text in texts]
        contents: dict[str, Any] = {}
        for block in sorted(self.memory_blocks, key=lambda one: -one.priority):
            asked = list(turns.messages)
            with request_context(history=history):
                content = await block.aget(asked, session_id=self.session_id, **block_kwargs)
            if content:
                contents[block.name] = content
                is_said = isinstance(content[0], ChatMessage)
                shown = content if is_said else [ChatMessage(content=content)]
                history += map(message_as_openai, shown)
        return contents

    @property
    def _ours(self) -> list[ReuseMemoryBlock]:
        return [one for one in self.memory_blocks if isinstance(one, ReuseMemoryBlock)]

    def _tokens(self, contents: Iterable[Any]) -> int:
        return sum(self._estimate_token_count(content) for content in contents)


class _PlacedHistory:
    """A history, and where memories go: behind digests of all that stood before, unedited."""

    def __init__(self, stored: Sequence[ChatMessage], question: str | ChatMessage | None) -> None:
        self._stored = len(stored)
        self.messages = list(stored)
        asked = ChatMessage(question) if isinstance(question, str) else question
        last = stored[-1] if stored and stored[-1].role == MessageRole.USER else None
        if asked is not None and (last is None or last.content != asked.content):
            self.messages.append(asked)
        self._digests = [bytes(16)]
        for message in self.messages:
            self._digests.append(_digest(self._digests[-1], message))
        # that of a question that memories are for, or the end
        users = [n for n, one in enumerate(self.messages) if one.role == MessageRole.USER]
        count = len(self.messages)
        self._turn = count - 1 if count > self._stored else max(users, default=count)
        # whether the current turn's question is not stored yet, or nothing was asked
        self.is_new = self._turn >= self._stored

    @property
    def place(self) -> bytes:
        """The place of the memories of the current turn."""
        return self._place(self._turn)

    @property
    def opening(self) -> bytes | None:
        """The place of a first turn's memories; None where nothing was asked first, or but now."""
        roles = [message.role for message in self.messages]
        first = next((n for n, role in enumerate(roles) if role != MessageRole.SYSTEM), self._turn)
        is_asked = first < self._turn and roles[first] == MessageRole.USER
        return self._place(first) if is_asked else None

    @property
    def places(self) -> list[bytes]:
        """All places where something may have been inserted."""
        return [
            place
            for number in range(len(self.messages) + 1)
            for place in (self._place(number), self._end(number))
        ]

    def before_the_turn(self, known: _Insertions) -> list[ChatMessage]:
        """Return the messages, as sent, before the memories of the current turn."""
        return self.as_sent(known, self._turn)

    @property
    def behind_the_turn(self) -> list[ChatMessage]:
        """The messages behind the one that the current turn's memories are for."""
        return self.messages[self._turn + 1 :]

    def as_sent(self, known: _Insertions, end: int | None = None) -> list[ChatMessage]:
        """Return copies of the stored messages, up to the `end`-th, with their memories."""
        system: list[ContentBlock] = []
        sent: list[ChatMessage] = []

        def inserted(place: bytes) -> tuple[ContentBlock, ...]:
            """Put in what stands before a message; return what stands within it."""
            one = known.get(place, _Addition())
            system.extend(copied_blocks(one.system))
            sent.extend(map(copied_message, one.messages))
            return one.content

        inserted(self._end(0))
        for number, message in enumerate(self.messages[:end]):
            content = inserted(self._place(number))
            if number < self._stored:
                blocks = copied_blocks([*content, *message.blocks])
                sent.append(message.model_copy(update={"blocks": blocks}))
            inserted(self._end(number + 1))
        if system and sent and sent[0].role == MessageRole.SYSTEM:
            sent[0].blocks.extend(system)
        elif system:
            sent.insert(0, ChatMessage(role=MessageRole.SYSTEM, blocks=system))
        return sent

    def _place(self, number: int) -> bytes:
        """Return the place of memories for a message, or behind all of them."""
        if number >= len(self.messages):
            return self._end(len(self.messages))
        return b"for" + self._digests[number + 1]

    def _end(self, number: int) -> bytes:
        """Return the place of memories behind so many messages, where nothing was asked."""
        return b"behind" + self._digests[number]


def reuse_memory(*memory_blocks: BaseMemoryBlock[Any], **options: Any) -> ReplayMemory:
    """Return a memory whose prompt only grows, so that the engine's prefix cache serves it.

    Args:
        *memory_blocks: Long-term memories as `ReuseMemoryBlock(memory=mem0)`. What another block
            returns again is shown again: that may cost more than in LlamaIndex's `Memory`.
        **options: As for LlamaIndex's `Memory.from_defaults`; and `growth_limit`: how long prompts
            may get by the memories of earlier turns, as a multiple of what they have with this
            turn's alone; 2 without it, None has no limit.
    """
    return ReplayMemory.from_defaults(memory_blocks=list(memory_blocks), **options)


@cache
def _log_unknown_turns() -> None:
    _log.warning(
        "reuse_memory: the chat store holds earlier turns, but not the memories they were sent "
        "with, so the engine's cache does not serve them. Keep one memory for a whole conversation."
    )


def _digest(before: bytes, message: ChatMessage) -> bytes:
    said = [("", one.text) if isinstance(one, TextBlock) else repr(one) for one in message.blocks]
    told = repr((message.role.value, said)).encode()
    return hashlib.blake2b(before + told, digest_size=16).digest()
