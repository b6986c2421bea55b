"""Where a `ReuseMemoryBlock`'s memories stand in a replayed conversation."""

from typing import Any, get_args

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import StaticMemoryBlock
from llamaindex_helpers import LetterRetriever, ListChatStore, RecordingLLM, letter_text
from llamaindex_memory_helpers import LetterMemory, assistant, plain_memory, user

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.memories import Placement
from llamaindex_ctxreuse import ReuseLLM, ReuseMemoryBlock, reuse_memory

PLACEMENTS = get_args(Placement)


def shown(messages: list[ChatMessage]) -> list[tuple[str, str]]:
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


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_a_wrapped_model_sends_memories_as_their_block_planned_them(placement, labels):
    async def prompts(*, is_wrapped: bool) -> list[str]:
        inner, planner = RecordingLLM(), ReusePlanner()
        llm: Any = ReuseLLM(inner=inner, planner=planner, window_s=0) if is_wrapped else inner
        block = ReuseMemoryBlock(
            memory=LetterRetriever(), planner=planner, placement=placement, labels=labels
        )
        for questions in (["abc one?", "bcd two?"], ["cba three?", "da four?"]):
            chat = SimpleChatEngine.from_defaults(llm=llm, memory=plain_memory(block))
            for question in questions:
                await chat.achat(question)
        assert planner.statistics().requests == 4
        return inner.prompts

    sent = await prompts(is_wrapped=True)
    assert sent == await prompts(is_wrapped=False)
    assert sent[1].startswith(sent[0])
    assert sent[3].startswith(sent[2])


async def test_other_memory_blocks_and_the_system_message_keep_their_text():
    block = ReuseMemoryBlock(memory=LetterMemory(), placement="system")
    memory = plain_memory(block)
    await memory.aput(ChatMessage(role="system", content="Be brief."))
    _, second = await turns(memory, ["ab one?", "bc two?"], is_stored=True)
    assert shown(second)[0] == ("system", "ab")
    assert (second[0].content or "").startswith("Be brief.")

    block = ReuseMemoryBlock(memory=LetterMemory())
    await turns(reuse_memory(block, chat_store=ListChatStore()), ["efg zero?"], is_stored=True)
    fixed = StaticMemoryBlock(name="about", static_content="Alice is a user.")
    memory = reuse_memory(block, fixed, chat_store=ListChatStore())
    *_, third = await turns(memory, ["ab one?", "cd two?", "gef three?"], is_stored=True)
    assert [text for _, text in shown(third)] == ["", "", "", "", "efg"]


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_laid_out_anew_memories_open_a_conversation_as_others_have_begun(
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


async def test_in_shadow_mode_no_memory_is_taken_out_of_the_history():
    block = ReuseMemoryBlock(memory=LetterMemory(), planner=ReusePlanner(mode="shadow"))
    memory = reuse_memory(block, chat_store=ListChatStore())
    asked = ["ab one?", "cd two?", "gef three?"]
    _, second, third = await turns(memory, asked, is_stored=True)
    assert third[: len(second)] == second
    assert [text for _, text in shown(third)] == ["ab", "", "cd", "", "efg"]


@pytest.mark.parametrize("wrong", ["user", 3, None])
def test_another_place_is_refused(wrong):
    with pytest.raises((InvalidRequestError, ValueError), match="placement"):
        ReuseMemoryBlock(memory=LetterMemory(), placement=wrong)
