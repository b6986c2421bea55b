"""What LlamaIndex's own `Memory` does, `ReplayMemory` does too; each test runs with both."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    ContentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.memory import InsertMethod, Memory, StaticMemoryBlock
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.storage.chat_store.base_db import MessageStatus
from llamaindex_helpers import ListChatStore, as_prompt
from llamaindex_memory_helpers import assistant, quarters, user

from ctxreuse import request_context
from llamaindex_ctxreuse import ReplayMemory


class TextMemory(BaseMemoryBlock[str]):
    """Says a text, and how it was asked; keeps what it is given."""

    name: str = "Text"
    text: str = "a text that is known"
    given: list[Any] = Field(default_factory=list)
    asked: list[Any] = Field(default_factory=list)

    async def _aget(self, messages: Any = None, **block_kwargs: Any) -> str:
        self.asked.append(([one.content for one in messages or ()], block_kwargs))
        return self.text.format(**block_kwargs)

    async def _aput(self, messages: list[ChatMessage]) -> None:
        self.given.extend(messages)

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        return content[: -4 * tokens_to_truncate] or None


class BlocksMemory(BaseMemoryBlock[list[ContentBlock]]):
    name: str = "Blocks"

    async def _aget(self, messages: Any = None, **block_kwargs: Any) -> list[ContentBlock]:
        return [TextBlock(text="one block"), TextBlock(text="another block")]

    async def _aput(self, messages: list[ChatMessage]) -> None: ...


class ExamplesMemory(BaseMemoryBlock[list[ChatMessage]]):
    """Shows an exchange, by turns."""

    name: str = "Examples"

    async def _aget(self, messages: Any = None, **block_kwargs: Any) -> list[ChatMessage]:
        return [user("What is 1 + 1?"), assistant("It is 2, as I said.")]

    async def _aput(self, messages: list[ChatMessage]) -> None: ...


def memory(kind: type[Memory], *blocks: Any, **options: Any) -> Memory:
    return kind.from_defaults(
        memory_blocks=list(blocks),
        insert_method=InsertMethod.USER,
        chat_store=ListChatStore(),
        **options,
    )


def roles(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    return [(one.role.value, one.content or "") for one in messages]


def all_texts(messages: Sequence[ChatMessage]) -> str:
    return "\n".join(str(one.content) for one in messages)


both = pytest.mark.parametrize("kind", [Memory, ReplayMemory])


@both
class TestMemory:
    async def test_history_without_blocks_comes_back_as_it_was_put(self, kind):
        kept = memory(kind)
        assert await kept.aget() == []
        await kept.aput(user("Hello"))
        await kept.aput_messages([assistant("Hi"), user("Again")])
        assert roles(await kept.aget()) == [
            ("user", "Hello"),
            ("assistant", "Hi"),
            ("user", "Again"),
        ]
        assert await kept.aget_all() == await kept.aget()

    async def test_a_given_history_is_the_beginning_until_it_is_set_or_reset(self, kind):
        kept = memory(kind, chat_history=[user("Hello"), assistant("Hi")])
        assert roles(kept.get()) == [("user", "Hello"), ("assistant", "Hi")]

        kept = memory(kind, TextMemory())
        await kept.aput(user("Hello"))
        await kept.aget()
        await kept.aset([user("Another")])
        assert "Hello" not in all_texts(await kept.aget())
        assert "Another" in all_texts(await kept.aget())
        await kept.areset()
        assert await kept.aget_all() == []

    async def test_text_and_content_blocks_stand_in_the_users_message(self, kind):
        kept = memory(kind, TextMemory(), BlocksMemory())
        await kept.aput(user("Hello"))
        [message] = await kept.aget()
        assert message.role is MessageRole.USER
        for text in ("<Text>", "a text that is known", "one block", "another block", "Hello"):
            assert text in (message.content or "")
        assert str(message.content).endswith("Hello")

    async def test_messages_of_a_block_keep_who_said_them(self, kind):
        kept = memory(kind, ExamplesMemory(), TextMemory())
        await kept.aput(user("And 2 + 2?"))
        *examples, question = await kept.aget()
        assert roles(examples) == [("user", "What is 1 + 1?"), ("assistant", "It is 2, as I said.")]
        assert question.role is MessageRole.USER
        assert "as I said" not in str(question.content)
        assert "a text that is known" in str(question.content)

    async def test_a_question_keeps_its_kinds_of_content_beside_messages_of_a_block(self, kind):
        kept = memory(kind, ExamplesMemory())
        await kept.aput(user("And 2 + 2?"))
        assert roles(await kept.aget())[-1] == ("user", "And 2 + 2?")
        assert len(await kept.aget()) == 3

        image = ImageBlock(image=b"png", image_mimetype="image/png")
        kept = memory(kind, TextMemory())
        await kept.aput(ChatMessage(role="user", blocks=[TextBlock(text="Look"), image]))
        [message] = await kept.aget()
        assert [type(one) for one in message.blocks[-2:]] == [TextBlock, ImageBlock]

    async def test_blocks_are_shown_before_anything_was_said(self, kind):
        [shown] = await memory(kind, TextMemory()).aget()
        assert shown.role is MessageRole.USER
        assert "a text that is known" in str(shown.content)
        examples = await memory(kind, ExamplesMemory()).aget()
        assert [one.role.value for one in examples] == ["user", "assistant"]
        static = memory(kind, StaticMemoryBlock(static_content="the same"))
        assert "the same" in all_texts(await static.aget())

    async def test_blocks_are_shown_wherever_the_history_ends(self, kind):
        kept = memory(kind, TextMemory())
        await kept.aput(ChatMessage(role="system", content="Be brief."))
        shown = await kept.aget()
        assert [one.role.value for one in shown] == ["system", "user"]
        assert "a text that is known" in str(shown[-1].content)

        kept = memory(kind, TextMemory(), ExamplesMemory())
        await kept.aput_messages([user("Hello"), assistant("Hi")])
        shown = await kept.aget()
        assert "a text that is known" in all_texts(shown)
        assert ("assistant", "It is 2, as I said.") in roles(shown)
        assert roles(shown)[-1] == ("assistant", "Hi")

        kept = memory(kind, TextMemory())
        called = ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": []})
        said = ChatMessage(role="tool", content="42", additional_kwargs={"tool_call_id": "1"})
        await kept.aput_messages([user("Hello"), called, said])
        shown = await kept.aget()
        assert [one.role.value for one in shown] == ["user", "assistant", "tool"]
        assert "a text that is known" in str(shown[0].content)
        assert shown[2].additional_kwargs == {"tool_call_id": "1"}

    async def test_a_block_is_asked_once_with_all_that_was_said_and_the_arguments(self, kind):
        block = TextMemory()
        kept = memory(kind, block)
        await kept.aput_messages([user("Hello"), assistant("Hi"), user("Again")])
        await kept.aget()
        assert block.asked[-1][0] == ["Hello", "Hi", "Again"]

        block = TextMemory()
        kept = memory(kind, block)
        shown = await kept.aget(input="Hello")
        assert "a text that is known" in all_texts(shown)
        assert "Hello" not in all_texts(shown), "the engine adds it"
        assert block.asked[-1][0] == ["Hello"]

        block = TextMemory(text="known of {topic}")
        kept = memory(kind, block, session_id="s")
        await kept.aput(user("Hello"))
        assert "known of rivers" in all_texts(await kept.aget(topic="rivers"))
        assert block.asked[-1][1] == {"session_id": "s", "topic": "rivers"}

    async def test_blocks_that_know_nothing_are_not_shown_and_two_of_a_name_refused(self, kind):
        kept = memory(kind, TextMemory(text=""))
        await kept.aput(user("Hello"))
        assert roles(await kept.aget()) == [("user", "Hello")]
        with pytest.raises(ValueError, match="unique names"):
            memory(kind, TextMemory(), TextMemory())

    async def test_what_is_too_long_is_truncated_by_priority(self, kind):
        kept = memory(
            kind,
            TextMemory(name="Never", text="n " * 200),
            TextMemory(name="First", text="f " * 200, priority=1),
            TextMemory(name="Later", text="l " * 200, priority=2),
            token_limit=150,
            tokenizer_fn=quarters,
        )
        await kept.aput(user("Hello"))
        text = all_texts(await kept.aget())
        assert text.count("n ") >= 200
        assert "f f" not in text
        assert 0 < text.count("l ") < 200

    async def test_long_histories_go_to_the_blocks(self, kind):
        keeps, refuses = TextMemory(), TextMemory(name="Refuses", accept_short_term_memory=False)
        kept = memory(kind, keeps, refuses, token_limit=200, tokenizer_fn=quarters, session_id="s")
        for number in range(12):
            await kept.aput_messages([user(f"question {number} " * 4), assistant("Yes. " * 8)])
        active = await kept.aget_all(status=MessageStatus.ACTIVE)
        assert len(active) < 24
        assert active[0].role is MessageRole.USER
        assert keeps.given
        assert not refuses.given
        assert all(one.additional_kwargs["session_id"] == "s" for one in keeps.given)
        assert "a text that is known" in all_texts(await kept.aget())

    def test_the_synchronous_way_does_the_same(self, kind):
        kept = memory(kind, TextMemory(), ExamplesMemory())
        kept.put(user("Hello"))
        assert [one.role.value for one in kept.get()] == ["user", "assistant", "user"]
        kept.set([user("Another"), assistant("Hi")])
        assert "a text that is known" in all_texts(kept.get())
        kept.put_messages([user("More")])
        assert len(kept.get_all()) == 3
        kept.reset()
        assert kept.get_all() == []

    async def test_what_comes_back_may_be_written_over(self, kind):
        kept = memory(kind, ExamplesMemory(), BlocksMemory())
        await kept.aput(user("Hello"))
        before = as_prompt(await kept.aget())
        for message in await kept.aget():
            message.blocks.append(TextBlock(text="written"))
            message.additional_kwargs["written"] = True
        again = await kept.aget()
        assert as_prompt(again) == before
        assert not any("written" in one.additional_kwargs for one in again)


class TestReplaying:
    """What ours does beyond that: a prompt only grows."""

    async def prompts(self, kept: Memory, *questions: str) -> list[str]:
        prompts = []
        for question in questions:
            await kept.aput(user(question))
            prompts.append(as_prompt(await kept.aget()))
            await kept.aput(assistant(f"Answer to {question}"))
        return prompts

    async def test_messages_of_blocks_are_replayed_where_they_stood(self):
        kept = memory(ReplayMemory, ExamplesMemory(), TextMemory(), BlocksMemory())
        prompts = await self.prompts(kept, "one", "two", "three")
        assert all(b.startswith(a) for a, b in itertools.pairwise(prompts))
        last = await kept.aget()
        assert as_prompt(last).startswith(prompts[-1])
        assert [one.role.value for one in last[:8]] == ["user", "assistant"] * 4

    async def test_what_was_shown_before_anything_was_said_is_replayed(self):
        kept = memory(ReplayMemory, ExamplesMemory(), TextMemory())
        begun = as_prompt(await kept.aget())
        assert as_prompt(await kept.aget()) == begun
        prompts = await self.prompts(kept, "one", "two")
        assert prompts[0].startswith(begun)
        assert prompts[1].startswith(prompts[0])

    async def test_a_question_in_another_conversation_is_served_there(self):
        kept = memory(ReplayMemory, TextMemory())
        with request_context(conversation_id="c"):
            assert "a text that is known" in all_texts(await kept.aget(input="one"))
