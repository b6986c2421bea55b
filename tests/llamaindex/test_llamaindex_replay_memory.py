import itertools
import pickle
import re
from copy import copy, deepcopy
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import InsertMethod, Memory
from llama_index.core.tools import FunctionTool
from llamaindex_helpers import LetterRetriever, ListChatStore, as_prompt, grow, letter_text
from llamaindex_memory_helpers import (
    LetterMemory,
    assistant,
    chat_prompts,
    labelled,
    plain_memory,
    quarters,
    user,
)
from mem0_stores import Store
from openai_models import clients_of, openai_like

from ctxreuse import PAPER_TEMPLATES, ContextBlock, ReusePlanner, request_context
from ctxreuse.serving.emulation.emulated_engine import EmulatedEngine, ToolCall
from llamaindex_ctxreuse import ReplayMemory, ReuseLLM, ReuseMemoryBlock
from llamaindex_ctxreuse.memory import replay_memory

pytestmark = pytest.mark.usefixtures("paper_words")


class TestReplayMemory:
    async def test_each_prompt_begins_with_the_one_before_and_points_to_what_it_shows(self):
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        prompts = await chat_prompts(memory, ["abc one?", "cbd two?", "bx three?"])
        assert len(prompts) == 3
        assert grow(prompts)
        assert prompts[0].startswith("<system>Be brief.</><user>")
        assert labelled("abc") in prompts[0]
        new = [prompts[1].removeprefix(prompts[0]), prompts[2].removeprefix(prompts[1])]
        for text, parts in zip(
            new,
            [
                ("[Doc_id-c] in the previous", "[Doc_id-b] in the previous", labelled("d")),
                ("[Doc_id-b] in the previous", labelled("x")),
            ],
            strict=True,
        ):
            positions = [text.index(part) for part in parts]
            assert positions == sorted(positions)
        assert prompts[2].count("says:") == 5, "each memory stands there once"

    async def test_two_blocks_refer_to_the_same_labels(self, planner):
        memory = plain_memory(
            ReuseMemoryBlock(memory=LetterMemory(), planner=planner, name="One"),
            ReuseMemoryBlock(memory=LetterRetriever(), planner=planner, name="Two"),
        )
        prompts = await chat_prompts(memory, ["abc one?", "bde two?"])
        shown = re.findall(r"\[Doc_id-(\w)\] (\w) says", prompts[1])
        assert shown == [(letter, letter) for letter in "abcde"]
        assert grow(prompts)

    async def test_asking_again_gives_the_same_whether_a_question_was_added_or_not(self):
        mem0 = LetterMemory()
        memory = plain_memory(ReuseMemoryBlock(memory=mem0))
        await memory.aput(user("abc one?"))
        first = await memory.aget()
        assert await memory.aget() == first
        await memory.aput(assistant("OK."))
        assert (await memory.aget())[:1] == first
        assert mem0.queries == ["abc one?"]

        mem0 = LetterMemory()
        memory = plain_memory(ReuseMemoryBlock(memory=mem0))
        asked = await memory.aget(input="abc one?")
        await memory.aput(user("abc one?"))
        assert await memory.aget() == [*asked, user("abc one?")]
        assert mem0.queries == ["abc one?"]

        mem0 = LetterMemory()
        memory = plain_memory(ReuseMemoryBlock(memory=mem0))
        await memory.aput_messages([user("abc one?"), assistant("OK.")])
        first = await memory.aget()
        assert [labelled("abc") in (one.content or "") for one in first] == [True, False]
        assert await memory.aget() == first
        assert mem0.queries == ["abc one?"]

    async def test_a_question_that_was_added_may_be_named_and_one_that_was_not_leaves_nothing(self):
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        await memory.aput(user("abc one?"))
        [sent] = await memory.aget(input="abc one?")
        assert labelled("abc") in (sent.content or "")
        assert await memory.aget(input=user("abc one?")) == [sent]

        mem0 = LetterMemory()
        memory = plain_memory(ReuseMemoryBlock(memory=mem0))
        await memory.aget(input="abc one?")
        [sent] = await memory.aget(input="xyz two?")
        assert "x says" in (sent.content or "")
        assert "a says" not in (sent.content or "")

    async def test_an_edited_history_is_shown_as_it_is_and_its_blocks_again(self):
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        await memory.aput(user("abc one?"))
        await memory.aget()
        await memory.aset([user("abc another?"), assistant("OK."), user("hello?")])
        sent = await memory.aget()
        assert [one.content for one in sent[:2]] == ["abc another?", "OK."]

        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        await memory.aput_messages([user("abc one?")])
        await memory.aget()
        await memory.aset([user("hello?"), assistant("hi"), user("ab two?")])
        assert "a says" in (await memory.aget())[-1].blocks[0].text

    async def test_when_it_is_full_earlier_memories_are_taken_out_and_shown_anew(self):
        memory = plain_memory(
            ReuseMemoryBlock(memory=LetterMemory()), token_limit=420, tokenizer_fn=quarters
        )
        prompts = await chat_prompts(memory, ["abc one?", "ac two?", "a three?", "ax four?"])
        assert grow(prompts[:3])
        assert all(len(quarters(prompt)) < 440 for prompt in prompts)
        assert not grow(prompts)
        assert "a says" in prompts[3], "it does not stand in the history any more"
        assert "previous conversation" not in prompts[3]

    async def test_a_block_with_a_priority_is_truncated_to_the_limit(self):
        memory = plain_memory(
            ReuseMemoryBlock(memory=LetterMemory(), priority=1),
            token_limit=300,
            tokenizer_fn=quarters,
        )
        await memory.aput(user("abcd one?"))
        [sent] = await memory.aget()
        assert sent.content is not None
        assert "a says" in sent.content
        assert "d says" not in sent.content

    # LlamaIndex's workflows look at every attribute of an agent
    @pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
    @pytest.mark.parametrize("reuses", [True, False])
    async def test_a_prompt_of_an_agent_is_counted_once(self, inner, reuses):
        planner = ReusePlanner()
        block = ReuseMemoryBlock(memory=LetterRetriever(), planner=planner)
        own = Memory.from_defaults(memory_blocks=[block], chat_store=ListChatStore())
        memory = plain_memory(block, growth_limit=1.0) if reuses else own
        clients = clients_of(EmulatedEngine().transport())
        model = openai_like(*clients, is_function_calling_model=True)
        agent = FunctionAgent(llm=model, tools=[])
        for question in ("abc one?", "def two?", "abd three?"):
            await agent.run(question, memory=memory)
        assert planner.savings.requests == 3

    async def test_a_memory_that_is_made_anew_says_that_it_replays_nothing(self, caplog):
        store, block = ListChatStore(), ReuseMemoryBlock(memory=LetterMemory())
        replay_memory._log_unknown_turns.cache_clear()
        for question in ("abc one?", "def two?"):
            assert caplog.text == ""
            memory = plain_memory(block, chat_store=store)
            await memory.aput_messages([user(question)])
            await memory.aget()
            await memory.aput(assistant("It is."))
            await memory.aget()
        assert caplog.text.count("Keep one memory for a whole conversation") == 1

    async def test_a_block_that_is_left_out_is_not_counted(self):
        planner = ReusePlanner()
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=planner, priority=1)
        memory = plain_memory(block, token_limit=1)
        await memory.aput(user("abc one?"))
        await memory.aget()
        assert planner.savings.requests == 0

    async def test_the_conversation_is_the_session_unless_told_otherwise(self, planner):
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=planner)
        memory = plain_memory(block, session_id="s")
        await memory.aput(user("abc one?"))
        await memory.aget()
        assert planner.end_conversation("s")
        with request_context(conversation_id="c"):
            await memory.aput(user("xyz two?"))
            await memory.aget()
        assert planner.end_conversation("c")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"token_limit": "many"},
            {"token_flush_size": "few"},
            {"memory_blocks": 5},
            {"memory_blocks": ["a memory"]},
        ],
    )
    def test_a_setting_of_a_wrong_kind_is_named(self, wrong):
        [name] = wrong
        with pytest.raises(ValueError, match=f"{name} must be"):
            ReplayMemory(
                **{"token_limit": 1_000, "memory_blocks": [], **wrong}, sql_store=ListChatStore()
            )

    def test_the_system_message_is_no_place_for_memories(self):
        with pytest.raises(ValueError, match="SYSTEM changes the system message every turn"):
            plain_memory(insert_method=InsertMethod.SYSTEM)
        assert isinstance(plain_memory(), ReplayMemory)
        assert plain_memory().insert_method is InsertMethod.USER

    # LlamaIndex's workflows look at every attribute of an agent
    @pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
    async def test_an_agent_that_calls_tools_keeps_its_prefix(self):
        def answer(body: dict[str, Any]) -> Any:
            if body["messages"][-1]["role"] == "tool":
                return "It is sunny."
            return ToolCall("weather", "{}")

        server = EmulatedEngine(answer=answer)
        model = openai_like(*clients_of(server.transport()), is_function_calling_model=True)
        tool = FunctionTool.from_defaults(lambda: "sunny", name="weather", description="w")
        agent = FunctionAgent(
            tools=[tool], llm=ReuseLLM(inner=model, window_s=0), system_prompt="Be brief."
        )
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        for question in ("abc one?", "cbd two?", "bx three?"):
            assert str(await agent.run(user_msg=question, memory=memory)) == "It is sunny."
        chats = [request["messages"] for request in server.requests]
        assert [len(chat) for chat in chats] == [2, 4, 6, 8, 10, 12]
        for earlier, later in itertools.pairwise(chats):
            assert later[: len(earlier)] == earlier
        assert str(chats[-1]).count("says:") == 5


@pytest.mark.parametrize("again", [copy, deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
async def test_a_copied_memory_replays_what_was_sent_and_goes_on_by_itself(again):
    memory = plain_memory(ReuseMemoryBlock(memory=LetterRetriever()))
    await memory.aput(user("ab one?"))
    sent = as_prompt(await memory.aget())
    copied = again(memory)
    assert as_prompt(await copied.aget()) == sent
    await copied.aput(user("bc two?"))
    prompt = as_prompt(await copied.aget())
    assert prompt.startswith(sent)
    assert letter_text("c") in prompt


class TestOutdatedMemories:
    async def test_what_mem0_has_no_longer_is_not_shown_as_valid(self, inner):
        mem0 = Store(home="Alice lives in Porto.", pin="The PIN is 4711.")
        planner = ReusePlanner(templates=PAPER_TEMPLATES)
        block = ReuseMemoryBlock(memory=mem0, filters={"user_id": "alice"}, planner=planner)
        memory = plain_memory(block)
        porto, pin, lisbon = (
            PAPER_TEMPLATES.label_of(ContextBlock(text=text))
            for text in (*mem0.texts.values(), "Alice lives in Lisbon.")
        )
        engine = SimpleChatEngine.from_defaults(llm=inner, memory=memory)
        await engine.achat("Where?")
        mem0.texts = {"home": "Alice lives in Lisbon."}
        await engine.achat("And now?")
        await engine.achat("Sure?")
        assert grow(inner.prompts)
        new = inner.prompts[1].removeprefix(inner.prompts[0])
        assert f"{pin} no longer holds; do not use it." in new
        assert f"{lisbon} Alice lives in Lisbon.\n\n{lisbon} replaces {porto}." in new
        assert inner.prompts[2].count("replaces") == 1

    async def test_all_that_was_deleted_is_said_to_be(self, inner):
        mem0 = Store(pin="The PIN is 4711.")
        prompts_memory = plain_memory(ReuseMemoryBlock(memory=mem0))
        engine = SimpleChatEngine.from_defaults(llm=inner, memory=prompts_memory)
        await engine.achat("Where?")
        mem0.texts = {}
        await engine.achat("And now?")
        assert "[Doc_pin] no longer holds" in inner.prompts[1].removeprefix(inner.prompts[0])

    async def test_what_another_block_has_shown_is_not_looked_up(self, planner):
        mem0 = Store(pin="The PIN is 4711.")
        memory = plain_memory(
            ReuseMemoryBlock(memory=LetterRetriever(), planner=planner, name="Letters"),
            ReuseMemoryBlock(memory=mem0, planner=planner, name="Facts"),
        )
        prompts = await chat_prompts(memory, ["ab one?", "cd two?"])
        assert "no longer holds" not in prompts[1]
