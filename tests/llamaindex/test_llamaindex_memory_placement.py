"""Where a `ReuseMemoryBlock`'s memories stand in a replayed conversation."""

from typing import Any, get_args

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import StaticMemoryBlock
from llamaindex_helpers import ListChatStore, letter_text
from llamaindex_memory_helpers import LetterMemory, assistant, plain_memory, user

from ctxreuse.adapters.memories import Placement
from ctxreuse.errors import InvalidRequestError
from llamaindex_ctxreuse import ReuseMemoryBlock, reuse_memory

PLACEMENTS = get_args(Placement)


def shown(messages: list[ChatMessage]) -> list[tuple[str, str]]:
    """Return who shows which letters."""
    return [
        (one.role.value, "".join(x for x in "abcdefg" if letter_text(x) in (one.content or "")))
        for one in messages
    ]


async def turns(memory: Any, questions: list[str], *, is_stored: bool) -> list[list[ChatMessage]]:
    prompts = []
    for question in questions:
        if is_stored:
            await memory.aput(user(question))
            prompts.append(await memory.aget())
        else:
            prompts.append([*await memory.aget(question), user(question)])
            await memory.aput(user(question))
        await memory.aput(assistant("So."))
    return prompts


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_memories_stand_where_they_are_wanted_each_once(placement, is_stored):
    block = ReuseMemoryBlock(memory=LetterMemory(), placement=placement)
    first, second = await turns(plain_memory(block), ["ab one?", "bc two?"], is_stored=is_stored)
    alone = placement == "after_history" or not is_stored
    asking = [("user", "ab"), ("user", "")] if alone else [("user", "ab")]
    asking = [("system", "ab"), ("user", "")] if placement == "system" else asking
    then = [("user", "c"), ("user", "")] if alone else [("user", "c")]
    assert shown(first) == asking
    assert shown(second) == [*asking, ("assistant", ""), *then]
    assert [one.content for one in second[: len(first)]] == [one.content for one in first]


async def test_other_memory_blocks_and_the_system_message_keep_their_text():
    block = ReuseMemoryBlock(memory=LetterMemory(), placement="system")
    memory = plain_memory(block)
    await memory.aput(ChatMessage(role="system", content="Be brief."))
    _, second = await turns(memory, ["ab one?", "bc two?"], is_stored=True)
    assert shown(second)[0] == ("system", "ab")
    assert (second[0].content or "").startswith("Be brief.")
    memory.forget(["id-a"])
    assert shown(await memory.aget())[0] == ("system", "b")

    block = ReuseMemoryBlock(memory=LetterMemory())
    await turns(reuse_memory(block, chat_store=ListChatStore()), ["efg zero?"], is_stored=True)
    fixed = StaticMemoryBlock(name="about", static_content="Alice is a user.")
    memory = reuse_memory(block, fixed, chat_store=ListChatStore())
    *_, third = await turns(memory, ["ab one?", "cd two?", "gef three?"], is_stored=True)
    assert [text for _, text in shown(third)] == ["", "", "", "", "efg"]


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_laid_out_anew_memories_open_the_conversation_where_others_have_begun_with_them(
    placement, is_stored
):
    block = ReuseMemoryBlock(memory=LetterMemory(), placement=placement)
    [other] = await turns(
        reuse_memory(block, chat_store=ListChatStore()), ["efg zero?"], is_stored=is_stored
    )
    memory = reuse_memory(block, chat_store=ListChatStore())
    asked = ["ab one?", "cd two?", "gef three?", "g four?"]
    *_, third, fourth = await turns(memory, asked, is_stored=is_stored)
    opening = shown(other) if is_stored else shown(other)[:-1]  # without its question
    assert shown(third)[: len(opening)] == opening
    assert (third[0].content or "").startswith((other[0].content or "").removesuffix("efg zero?"))
    assert "".join(text for _, text in shown(third)) == "efg"
    assert (third[-1].content or "").endswith("gef three?")
    assert [one.content for one in fourth[: len(third)]] == [one.content for one in third]
    assert "".join(text for _, text in shown(fourth)) == "efg"
    assert await memory.aget() == await memory.aget()


@pytest.mark.parametrize("wrong", ["user", 3, None])
def test_another_place_is_refused(wrong):
    with pytest.raises((InvalidRequestError, ValueError), match="placement"):
        ReuseMemoryBlock(memory=LetterMemory(), placement=wrong)
