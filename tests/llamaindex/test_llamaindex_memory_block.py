import logging
from functools import reduce
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.memory import VectorMemoryBlock
from llama_index.core.schema import ImageNode, MetadataMode, NodeWithScore, TextNode
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llamaindex_helpers import CountingPlanner, LetterRetriever, letter_nodes, letter_text
from llamaindex_llm_helpers import FaultyPlanner
from llamaindex_memory_helpers import (
    FailingMemory,
    LetterMemory,
    ListVectorStore,
    assistant,
    labelled,
    user,
)
from mem0_stores import AsyncFakeMemory, FakeMemory, ListMemory, lettered, mem0_offline, memory

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReuseLLM, ReuseMemoryBlock, ReusePostprocessor, ReuseRetriever
from llamaindex_ctxreuse.memory import memory_block
from mem0_ctxreuse import ReuseMemory

pytestmark = pytest.mark.usefixtures("paper_words")
NESTED: Any = reduce(lambda inner, _: [inner], range(5_000), [])  # has no repr


class TestReuseMemoryBlock:
    async def test_memories_without_text_get_no_label(self):
        images = [
            NodeWithScore(node=ImageNode(image="aGk=")),
            NodeWithScore(node=TextNode(text=" ")),
        ]
        for found in (images, [letter_nodes("a")[0], *images, *letter_nodes("bc")]):
            retriever = LetterRetriever(change=lambda _, found=found: found)
            shown = await ReuseMemoryBlock(memory=retriever).aget([user("hello")])
            assert shown == labelled("abc" if len(found) > 2 else "")
        mem0 = FakeMemory()
        mem0.found = [memory("blank", " "), *lettered("abc")]
        assert await ReuseMemoryBlock(memory=mem0).aget([user("hello")]) == labelled("abc")

    @pytest.mark.parametrize("kind", [FakeMemory, AsyncFakeMemory])
    async def test_what_mem0_finds_comes_back_in_planned_order(self, kind):
        mem0 = kind()
        block = ReuseMemoryBlock(memory=mem0, filters={"user_id": "alice"}, top_k=3)
        mem0.found = lettered("abc")
        assert await block.aget([user("hello")]) == labelled("abc")
        mem0.found = lettered("cba")
        assert await block.aget([user("hello"), assistant("hi"), user("and?")]) == (
            f"{labelled('abc')}\n\nPlease read the context in the following priority order: "
            "[Doc_id-c] > [Doc_id-b] > [Doc_id-a] and answer the question."
        )
        assert [(call["query"], call["top_k"], call["filters"]) for call in mem0.calls] == [
            ("hello", 3, {"user_id": "alice"}),
            ("and?", 3, {"user_id": "alice"}),
        ]
        assert block.faults == 0

    async def test_a_hosted_client_that_returns_a_list_will_do(self):
        class Hosted:
            def search(self, query: str, options: Any = None, **kwargs: Any) -> Any:
                assert set(kwargs) == {"filters", "top_k"}
                return ListMemory(lettered("ab")).search(query)

        assert await ReuseMemoryBlock(memory=Hosted()).aget([user("q")]) == labelled("ab")

    async def test_real_mem0_stores_and_finds(self):
        import mem0

        store = mem0_offline(mem0.Memory)
        [added] = store.add("Alice likes tea", user_id="alice", infer=False)["results"]
        store.add("Bob likes coffee", user_id="bob", infer=False)
        block = ReuseMemoryBlock(memory=store, filters={"user_id": "alice"})
        shown = await block.aget([user("what does she like?")])
        assert shown == f"[Doc_{added['id']}] Alice likes tea"
        assert block.faults == 0

    async def test_an_updated_memory_is_another_block(self):
        mem0, planner = FakeMemory([memory("1", "old " * 100)]), ReusePlanner()
        block = ReuseMemoryBlock(memory=mem0, planner=planner)
        with request_context(conversation_id="c", history=[]):
            first = await block.aget([user("q")])
        history = [{"role": "user", "content": first}, {"role": "assistant", "content": "OK."}]
        with request_context(conversation_id="c", history=history):
            assert (await block.aget([user("q")])).startswith("Please refer to [Doc_1]")
            mem0.found = [memory("1", "new " * 100)]
            assert await block.aget([user("q")]) == (
                f"[Doc_1] no longer holds; do not use it.\n\n[Doc_1] {'new ' * 100}"
            )

    async def test_memories_are_shown_once_and_their_metadata_as_the_mode_says(self):
        mem0 = FakeMemory([memory("1", "tea"), memory("2", "tea"), memory("3", "coffee")])
        assert await ReuseMemoryBlock(memory=mem0).aget([user("q")]) == (
            "[Doc_1] tea\n\n[Doc_3] coffee"
        )
        block = ReuseMemoryBlock(memory=LetterRetriever(), metadata_mode=MetadataMode.LLM)
        assert (await block.aget([user("a")])).startswith("[Doc_id-a] source: a.txt\n\na says")

    async def test_what_was_planned_before_goes_back_to_its_ranking_first(self, planner):
        searched = ReuseMemory(mem0 := FakeMemory(lettered("abc")), planner=planner)
        block = ReuseMemoryBlock(memory=searched, planner=planner)
        retriever = ReuseRetriever(LetterRetriever(), planner=planner)
        nodes = ReuseMemoryBlock(memory=retriever, planner=planner)
        for one, question in ((block, "q"), (nodes, "abc")):
            await one.aget([user(question)])
        mem0.found = lettered("cba")
        for one, question in ((block, "q"), (nodes, "cba")):
            shown = await one.aget([user(question)])
            assert "[Doc_id-c] > [Doc_id-b] > [Doc_id-a]" in shown
        assert planner.statistics().requests == 4, "each search is one prompt"

    async def test_a_retriever_will_do_planned_or_not(self):
        for retriever in (LetterRetriever(), ReuseRetriever(LetterRetriever())):
            block = ReuseMemoryBlock(memory=retriever)
            assert await block.aget([user("ab")]) == labelled("ab")
            await block.aput([user("nothing is kept")])
            await block.aget([user("abc")])
            assert "[Doc_id-c] > [Doc_id-b] > [Doc_id-a]" in await block.aget([user("cba")])
            assert block.faults == 0

    async def test_llamaindexs_vector_block_is_planned_once_behind_a_postprocessor(self, planner):
        store, llm = ListVectorStore(), ReuseLLM(inner=MockLLM(), planner=planner, window_s=0)
        steps = [ReusePostprocessor(planner=planner, metadata_mode="none")]
        options: Any = {"similarity_top_k": 3, "node_postprocessors": steps}
        block = VectorMemoryBlock(vector_store=store, embed_model=MockEmbedding(4), **options)
        for found in ("abc", "cab"):
            store.nodes = [one.node for one in letter_nodes(found[::-1])]
            echo = await llm.achat([user(await block.aget([user("Which?")]))])
        assert llm.prompt_statistics.planned == planner.savings.requests == 2
        assert "a says" in echo.message.content.split("b says")[0]

    @pytest.mark.filterwarnings("ignore:`langchain-community`")  # which LlamaIndex tries to import
    async def test_an_index_is_read_and_written(self):
        index = VectorStoreIndex(
            nodes=[TextNode(id_="1", text="tea")], embed_model=MockEmbedding(4)
        )
        block = ReuseMemoryBlock(memory=index, top_k=5)
        assert await block.aget([user("q")]) == "[Doc_1] tea"
        await block.aput([user("coffee"), assistant("<think>Or tea?</think>\nOK.")])
        text = await block.aget([user("q")])
        assert "<message role='user'>coffee</message>\n<message role='assistant'>OK.</" in text
        assert block.faults == 0

    async def test_a_vector_store_is_read_and_written_by_session(self):
        store = ListVectorStore()
        block = ReuseMemoryBlock(memory=store, embed_model=MockEmbedding(4), top_k=2)
        for session, text in (("one", "tea"), ("two", "coffee")):
            await block.aput([user(text)], session_id=session)
        assert await block.aget([user("q")], session_id="one") == (
            f"[Doc_{store.nodes[0].node_id}] <message role='user'>tea</message>"
        )
        assert store.asked[0].query_str == "q"
        assert len(store.asked[0].query_embedding) == 4
        assert block.faults == 0

    async def test_messages_are_handed_to_mem0_with_its_users_name(self):
        mem0 = LetterMemory()
        block = ReuseMemoryBlock(memory=mem0, filters={"user_id": "alice", "kind": "food"})
        unsaid = [ChatMessage(role="user", blocks=[]), assistant("<think>Or coffee?")]
        said = [assistant("<thinking>Hm.</thinking>OK"), user("</think> is a tag")]
        await block.aput([user("I like tea"), *unsaid, *said])
        assert mem0.added == [
            (
                [
                    {"role": "user", "content": "I like tea"},
                    {"role": "assistant", "content": "OK"},
                    {"role": "user", "content": "</think> is a tag"},
                ],
                {"user_id": "alice"},
            )
        ]
        await block.aput([])
        await block.aput(unsaid)
        assert len(mem0.added) == 1

    async def test_the_last_messages_of_the_user_are_searched_for(self):
        mem0 = LetterMemory()
        messages = [user("one"), user("two"), assistant("three"), user("four"), assistant("five")]
        await ReuseMemoryBlock(memory=mem0).aget(messages)
        await ReuseMemoryBlock(memory=mem0, searched_messages=2).aget(messages)
        assert mem0.queries == ["four", "two four"]

    async def test_a_memory_that_fails_or_is_not_asked_leaves_a_conversation_without(self, caplog):
        block = ReuseMemoryBlock(memory=FailingMemory())
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            for _ in range(2):
                assert await block.aget([user("a secret")]) == ""
                await block.aput([user("a secret")])
        assert block.faults == 4
        assert len(caplog.records) == 2, "searching and adding, once each"
        assert "secret" not in caplog.text
        block = ReuseMemoryBlock(memory=FailingMemory())
        assert [await block.aget(), await block.aget([assistant("hello")])] == ["", ""]
        assert block.faults == 0

    @pytest.mark.parametrize(
        "broken", [None, "text", {}, {"id": "x"}, {"id": "x", "memory": None}, {"memory": ["text"]}]
    )
    async def test_a_memory_without_a_text_keeps_no_other_from_being_shown(self, broken, caplog):
        mem0 = FakeMemory()
        mem0.found = [*lettered("a"), broken, *lettered("b")]
        block = ReuseMemoryBlock(memory=mem0)
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            for _ in range(2):
                assert await block.aget([user("hello")]) == labelled("ab")
        assert (block.faults, len(caplog.records)) == (2, 1)
        assert "those without a text are left out" in caplog.text
        mem0.found = None  # as of a server that is gone
        assert await block.aget([user("hello")]) == ""
        assert "the conversation goes on without memories" in caplog.text

    @pytest.mark.parametrize("name", [None, 1.5, ["x"], NESTED], ids=type)
    async def test_a_memory_needs_no_id(self, name):
        mem0 = FakeMemory()
        mem0.found = [{"id": name, "memory": letter_text("a")}]
        block = ReuseMemoryBlock(memory=mem0)
        assert (await block.aget([user("hello")])).endswith(f"] {letter_text('a')}")
        assert block.faults == 0

    async def test_a_planning_fault_lets_memories_through_as_found(self):
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=FaultyPlanner())
        assert await block.aget([user("ba")]) == f"{letter_text('b')}\n\n{letter_text('a')}"
        assert block.faults == 1

    async def test_truncating_plans_once(self):
        planner = CountingPlanner()
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=planner)
        content = await block.aget([user("abcdef")])
        assert (planner.plans, planner.forgotten) == (1, 0)
        shorter = await block.atruncate(content, 350)
        assert shorter == labelled("ab")
        assert (planner.plans, planner.forgotten) == (2, 1)
        assert await block.atruncate(shorter, 5_000) is None
        assert (planner.plans, planner.forgotten) == (2, 2)
        assert planner.statistics().requests == 0

    async def test_truncating_takes_the_lowest_ranked_away(self, planner):
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=planner)
        await block.aget([user("abc")])
        content = await block.aget([user("cba")])
        shorter = await block.atruncate(content, 50)
        assert shorter is not None
        assert letter_text("c") in shorter
        assert letter_text("b") in shorter
        assert letter_text("a") not in shorter
        assert await block.atruncate(content, 5_000) is None
        assert await block.atruncate("somebody else's", 1) is None
        assert planner.statistics().requests == 2, "the first, and the one that was shortened"

    @pytest.mark.parametrize(
        "other",
        [{"tenant": "two", "conversation_id": "c"}, {"tenant": "one", "conversation_id": 1}],
    )
    async def test_truncating_touches_no_other_tenants_or_conversations_content(self, other):
        planner = ReusePlanner()
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=planner)
        with request_context(tenant="one", conversation_id="c"):
            content = await block.aget([user("abc")])
        with request_context(**other):
            assert await block.aget([user("abc")]) == content
        with request_context(tenant="one", conversation_id="c"):
            assert await block.atruncate(content, 50) == labelled("ab")
        assert await block.atruncate(content, 50) is None, "nobody's"
        assert planner.statistics().requests == 2
        assert planner.evict(["request-1"]).unknown == (), "the other's is as it was"
        with request_context(**other):
            assert await block.atruncate(content, 150) == labelled("a")

    async def test_a_tenants_many_or_long_contents_take_no_other_tenants_away(self, monkeypatch):
        monkeypatch.setattr(memory_block, "_REMEMBERED_CHARACTERS", 60_000)
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=ReusePlanner())
        with request_context(tenant="quiet"):
            content = await block.aget([user("abc")])
        for number in range(400):
            said = [user("x" * (number % 7 * 3_000))] if number % 2 else []
            history = [{"role": "user", "content": one.content} for one in said]
            with request_context(tenant="loud", conversation_id=number, history=history):
                await block.aget([*said, user("abcdef")])
            assert all(size.entries <= size.bound for size in block.parts.values())
        assert block.parts["contents"].bound == 256
        assert block.parts["content_characters"].entries > 30_000
        with request_context(tenant="quiet"):
            assert await block.atruncate(content, 50) == labelled("ab")

    async def test_a_user_is_the_tenant_that_mem0_ctxreuse_makes_of_them(self, planner):
        filters = {"AND": [{"user_id": "alice"}, {"run_id": "r1"}]}
        ReuseMemory(FakeMemory(lettered("abc")), planner=planner).context(
            "q", filters={"user_id": " alice "}
        )
        block = ReuseMemoryBlock(
            memory=FakeMemory(lettered("cba")), planner=planner, filters=filters
        )
        assert (await block.aget([user("q")])).startswith(labelled("abc"))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"memory": None}, "memory must be a Mem0 memory, a vector store"),
            ({"memory": SimpleVectorStore()}, "does not store the texts"),
            ({"memory": LetterRetriever(), "filters": {"a": 1}}, "filters are Mem0's"),
            ({"memory": FakeMemory(), "planner": "mine"}, r"planner must be a ctxreuse\."),
            ({"memory": FakeMemory(), "top_k": 0}, "top_k"),
            ({"memory": FakeMemory(), "topk": 1}, "topk"),
            ({"memory": FakeMemory(), "metadata_mode": "x"}, "no metadata mode 'x'"),
            ({}, "memory"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            ReuseMemoryBlock(**arguments)
