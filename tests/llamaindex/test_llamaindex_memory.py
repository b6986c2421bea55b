from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
import pytest_socket
from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, SimpleChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.memory import InsertMethod, Memory, StaticMemoryBlock, VectorMemoryBlock
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-untyped]
from llamaindex_helpers import (
    CountingPlanner,
    LetterRetriever,
    ListChatStore,
    RecordingLLM,
    as_prompt,
    letter_nodes,
    letter_text,
)
from mem0_stores import AsyncFakeMemory, FakeMemory, ListMemory, lettered, mem0_offline, memory

from ctxreuse import ReusePlanner, request_context
from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.serving.emulation.emulated_engine import EmulatedEngine
from ctxreuse.serving.emulation.openai_replies import ToolCall
from llamaindex_ctxreuse import (
    ReplayMemory,
    ReuseLLM,
    ReuseMemoryBlock,
    ReusePostprocessor,
    ReuseRetriever,
    reuse_memory,
)
from mem0_ctxreuse import ReuseMemory


@pytest.fixture(autouse=True)
def _without_network() -> Iterator[None]:
    pytest_socket.disable_socket(allow_unix_socket=True)
    yield
    pytest_socket.enable_socket()


class LetterMemory:
    """A Mem0 that finds the letters that a query begins with, and keeps what is added."""

    def __init__(self) -> None:
        self.added: list[tuple[Any, dict[str, Any]]] = []
        self.queries: list[str] = []

    def search(self, query: str, *, filters: Any = None, top_k: int = 20) -> Any:
        self.queries.append(query)
        word = query.partition(" ")[0]
        return {"results": lettered(word if word.islower() else "")[:top_k]}

    def add(self, messages: Any, **entities: Any) -> None:
        self.added.append((messages, entities))


class FailingMemory:
    def search(self, query: str, **kwargs: Any) -> Any:
        raise ConnectionError(f"no memory of {query}")

    add = search


class ListVectorStore(BasePydanticVectorStore):
    """Returns what was added last, of the session that is asked for."""

    stores_text: bool = True
    nodes: list[Any] = []  # noqa: RUF012  # pydantic copies it
    asked: list[Any] = []  # noqa: RUF012

    @property
    def client(self) -> Any:
        return None

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        self.nodes.extend(nodes)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        raise NotImplementedError

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        self.asked.append(query)
        session = query.filters.filters[0].value if query.filters else None  # type: ignore[union-attr]
        found = [
            node
            for node in self.nodes[::-1]
            if session is None or node.metadata["session_id"] == session
        ][: query.similarity_top_k]
        return VectorStoreQueryResult(
            nodes=found, similarities=[1.0] * len(found), ids=[node.node_id for node in found]
        )


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def assistant(text: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=text)


def quarters(text: str) -> list[str]:
    """Return tokens of four characters."""
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def plain_memory(*blocks: Any, **options: Any) -> ReplayMemory:
    """Return a memory whose history is no database."""
    return reuse_memory(*blocks, chat_store=ListChatStore(), **options)


def labelled(word: str, first: int = 1) -> str:
    return "\n\n".join(
        f"[Doc_{number}] {letter_text(letter)}" for number, letter in enumerate(word, start=first)
    )


class TestReuseMemoryBlock:
    @pytest.mark.parametrize("kind", [FakeMemory, AsyncFakeMemory])
    async def test_what_mem0_finds_comes_back_in_planned_order(self, kind: Any) -> None:
        mem0 = kind()
        block = ReuseMemoryBlock(memory=mem0, filters={"user_id": "alice"}, top_k=3)
        mem0.found = lettered("abc")
        assert await block.aget([user("hello")]) == labelled("abc")
        mem0.found = lettered("cba")
        assert await block.aget([user("hello"), assistant("hi"), user("and?")]) == (
            f"{labelled('abc')}\n\nPlease read the context in the following priority order: "
            "[Doc_3] > [Doc_2] > [Doc_1] and answer the question."
        )
        assert [(call["query"], call["top_k"], call["filters"]) for call in mem0.calls] == [
            ("hello", 3, {"user_id": "alice"}),
            ("and?", 3, {"user_id": "alice"}),
        ]
        assert block.faults == 0

    async def test_a_hosted_client_that_returns_a_list_will_do(self) -> None:
        class Hosted:
            def search(self, query: str, options: Any = None, **kwargs: Any) -> Any:
                assert set(kwargs) == {"filters", "top_k"}
                return ListMemory(lettered("ab")).search(query)

        assert await ReuseMemoryBlock(memory=Hosted()).aget([user("q")]) == labelled("ab")

    async def test_real_mem0_stores_and_finds(self) -> None:
        import mem0  # type: ignore[import-untyped]

        store = mem0_offline(mem0.Memory)
        store.add("Alice likes tea", user_id="alice", infer=False)
        store.add("Bob likes coffee", user_id="bob", infer=False)
        block = ReuseMemoryBlock(memory=store, filters={"user_id": "alice"})
        assert await block.aget([user("what does she like?")]) == "[Doc_1] Alice likes tea"
        assert block.faults == 0

    async def test_an_updated_memory_is_another_block(self) -> None:
        mem0, planner = FakeMemory([memory("1", "old " * 100)]), ReusePlanner()
        block = ReuseMemoryBlock(memory=mem0, planner=planner)
        with request_context(conversation_id="c", history=[]):
            first = await block.aget([user("q")])
        history = [{"role": "user", "content": first}, {"role": "assistant", "content": "OK."}]
        with request_context(conversation_id="c", history=history):
            assert (await block.aget([user("q")])).startswith("Please refer to [Doc_1]")
            mem0.found = [memory("1", "new " * 100)]
            assert await block.aget([user("q")]) == f"[Doc_2] {'new ' * 100}"

    async def test_the_same_text_under_two_ids_is_shown_once(self) -> None:
        mem0 = FakeMemory([memory("1", "tea"), memory("2", "tea"), memory("3", "coffee")])
        assert await ReuseMemoryBlock(memory=mem0).aget([user("q")]) == (
            "[Doc_1] tea\n\n[Doc_2] coffee"
        )

    async def test_what_was_planned_before_goes_back_to_mem0s_ranking_first(self) -> None:
        found = {
            "results": lettered("ab"),
            "ctxreuse": {"memories": [{"id": "id-a", "rank": 1}, {"id": "id-b", "rank": 0}]},
        }
        assert await ReuseMemoryBlock(memory=FakeMemory(found)).aget([user("q")]) == labelled("ba")

    async def test_each_users_memories_are_a_tenant_unless_told_otherwise(self) -> None:
        planner = ReusePlanner()

        async def order(user_id: str, word: str) -> str:
            filters = {"user_id": user_id}
            memory = FakeMemory(lettered(word))
            block = ReuseMemoryBlock(memory=memory, planner=planner, filters=filters)
            text = await block.aget([user("q")])
            return "".join(text[text.index(f"[Doc_{n}] ") + 8] for n in (1, 2, 3))

        assert await order("alice", "abc") == "abc"
        assert await order("bob", "cba") == "cba"
        assert await order("alice", "cba") == "abc"
        with request_context(tenant="shared"):
            assert await order("alice", "bca") == "bca"
            assert await order("bob", "cab") == "bca"

    async def test_a_retriever_will_do_planned_or_not(self) -> None:
        for retriever in (LetterRetriever(), ReuseRetriever(LetterRetriever())):
            block = ReuseMemoryBlock(memory=retriever)
            assert await block.aget([user("ab")]) == labelled("ab")
            await block.aput([user("nothing is kept")])
            await block.aget([user("abc")])
            assert "[Doc_3] > [Doc_2] > [Doc_1]" in await block.aget([user("cba")])
            assert block.faults == 0

    async def test_a_planned_retriever_leaves_nothing_out_of_what_the_block_is_given(self) -> None:
        chats = []
        for wrap in (
            lambda one, planner: one,
            lambda one, planner: ReuseRetriever(one, planner=planner),
        ):
            planner = ReusePlanner()
            block = ReuseMemoryBlock(memory=wrap(LetterRetriever(), planner), planner=planner)
            memory = plain_memory(block, session_id="s")
            chats.append(await chat_prompts(memory, ["abc one?", "abc two?", "bax three?"]))
            assert block.faults == 0
        assert chats[0] == chats[1]
        assert chats[1][1].endswith(
            "\n".join(
                f"Please refer to [Doc_{number}] in the previous conversation.\n"
                for number in (1, 2, 3)
            )
            + "</Memories>\n</memory>\nabc two?</>"
        )

    async def test_a_search_knows_whose_it_is_but_of_no_history(self) -> None:
        class Noting(LetterRetriever):
            async def _aretrieve(self, query_bundle: Any) -> Any:
                scopes.append(current_scope())
                return []

        scopes: list[RequestScope] = []
        block = ReuseMemoryBlock(memory=Noting())
        said = {"role": "user", "content": "hello"}
        with request_context(tenant="one", conversation_id="c", history=[said]):
            assert await block.aget([user("q")]) == ""
        assert scopes == [RequestScope("one", "c", ())]

    async def test_what_an_earlier_plan_left_out_is_still_pointed_to(self) -> None:
        class Faulty(ReusePlanner):
            def plan(self, *args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("a fault of ours")

        postprocessor = ReusePostprocessor(metadata_mode=MetadataMode.NONE)
        shown = {"role": "user", "content": f"[Doc_1] {letter_text('a')}"}
        with request_context(conversation_id="c", history=[]):
            postprocessor.postprocess_nodes(letter_nodes("a"))
        with request_context(conversation_id="c", history=[shown]):
            kept = {
                word: postprocessor.postprocess_nodes(letter_nodes(word)) for word in ("ca", "a")
            }

        class Kept(LetterRetriever):
            async def _aretrieve(self, query_bundle: Any) -> Any:
                return kept[query_bundle.query_str]

        words = "Please refer to [Doc_1] in the previous conversation."
        block = ReuseMemoryBlock(memory=Kept())
        assert await block.aget([user("ca")]) == f"{labelled('c')}\n\n{words}"
        assert await block.aget([user("a")]) == words
        faulty = ReuseMemoryBlock(memory=Kept(), planner=Faulty())
        assert await faulty.aget([user("ca")]) == f"{letter_text('c')}\n\n{words}"

    @pytest.mark.filterwarnings("ignore:`langchain-community`")  # which LlamaIndex tries to import
    async def test_an_index_is_read_and_written(self) -> None:
        index = VectorStoreIndex(
            nodes=[TextNode(id_="1", text="tea")], embed_model=MockEmbedding(4)
        )
        block = ReuseMemoryBlock(memory=index, top_k=5)
        assert await block.aget([user("q")]) == "[Doc_1] tea"
        await block.aput([user("coffee"), assistant("OK.")])
        text = await block.aget([user("q")])
        assert "<message role='user'>coffee</message>\n<message role='assistant'>OK.</" in text
        assert block.faults == 0

    async def test_a_vector_store_is_read_and_written_by_session(self) -> None:
        store = ListVectorStore()
        block = ReuseMemoryBlock(memory=store, embed_model=MockEmbedding(4), top_k=2)
        for session, text in (("one", "tea"), ("two", "coffee")):
            await block.aput([user(text)], session_id=session)
        assert await block.aget([user("q")], session_id="one") == (
            "[Doc_1] <message role='user'>tea</message>"
        )
        assert store.asked[0].query_str == "q"
        assert len(store.asked[0].query_embedding) == 4
        assert block.faults == 0

    async def test_metadata_is_shown_as_the_mode_says(self) -> None:
        block = ReuseMemoryBlock(memory=LetterRetriever(), metadata_mode=MetadataMode.LLM)
        assert (await block.aget([user("a")])).startswith("[Doc_1] source: a.txt\n\na says")

    async def test_messages_are_handed_to_mem0_with_its_users_name(self) -> None:
        mem0 = LetterMemory()
        block = ReuseMemoryBlock(memory=mem0, filters={"user_id": "alice", "kind": "food"})
        await block.aput([user("I like tea"), ChatMessage(role="user", blocks=[]), assistant("OK")])
        assert mem0.added == [
            (
                [
                    {"role": "user", "content": "I like tea"},
                    {"role": "assistant", "content": "OK"},
                ],
                {"user_id": "alice"},
            )
        ]
        await block.aput([])
        assert len(mem0.added) == 1

    async def test_the_last_messages_of_the_user_are_searched_for(self) -> None:
        mem0 = LetterMemory()
        messages = [user("one"), user("two"), assistant("three"), user("four"), assistant("five")]
        await ReuseMemoryBlock(memory=mem0).aget(messages)
        await ReuseMemoryBlock(memory=mem0, searched_messages=2).aget(messages)
        assert mem0.queries == ["four", "two four"]

    async def test_without_a_question_nothing_is_searched_for(self) -> None:
        block = ReuseMemoryBlock(memory=FailingMemory())
        assert await block.aget() == ""
        assert await block.aget([assistant("hello")]) == ""
        assert block.faults == 0

    async def test_a_memory_that_fails_leaves_the_conversation_without_memories(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        block = ReuseMemoryBlock(memory=FailingMemory())
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            for _ in range(2):
                assert await block.aget([user("a secret")]) == ""
                await block.aput([user("a secret")])
        assert block.faults == 4
        assert len(caplog.records) == 2, "searching and adding, once each"
        assert "secret" not in caplog.text

    async def test_a_planning_fault_lets_memories_through_as_found(self) -> None:
        class Faulty(ReusePlanner):
            def plan(self, *args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("a fault of ours")

        block = ReuseMemoryBlock(memory=LetterMemory(), planner=Faulty())
        assert await block.aget([user("ba")]) == f"{letter_text('b')}\n\n{letter_text('a')}"
        assert block.faults == 1

    async def test_truncating_plans_once(self) -> None:
        planner = CountingPlanner()
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=planner)
        content = await block.aget([user("abcdef")])
        assert (planner.plans, planner.evictions) == (1, 0)
        shorter = await block.atruncate(content, 350)
        assert shorter == labelled("ab")
        assert (planner.plans, planner.evictions) == (2, 1)
        assert await block.atruncate(shorter, 5_000) is None
        assert (planner.plans, planner.evictions) == (2, 2)
        assert planner.statistics().requests == 0

    async def test_without_a_planner_each_block_makes_its_own(self) -> None:
        for word in ("abc", "cba"):
            block = ReuseMemoryBlock(memory=LetterMemory(), planner=None)
            assert await block.aget([user(word)]) == labelled(word)

    async def test_truncating_takes_the_lowest_ranked_away(self) -> None:
        planner = ReusePlanner()
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
    async def test_truncating_touches_no_other_tenants_or_conversations_content(
        self, other: Any
    ) -> None:
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

    async def test_a_user_is_the_tenant_that_mem0_ctxreuse_makes_of_them(self) -> None:
        planner = ReusePlanner()
        filters = {"AND": [{"user_id": "alice"}, {"run_id": "r1"}]}
        ReuseMemory(FakeMemory(lettered("abc")), planner=planner).search(
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
            ({"memory": "mem0"}, "memory must be"),
            ({"memory": SimpleVectorStore()}, "does not store the texts"),
            ({"memory": LetterRetriever(), "filters": {"a": 1}}, "filters are Mem0's"),
            ({"memory": FakeMemory(), "planner": "mine"}, r"planner must be a ctxreuse\."),
            ({"memory": FakeMemory(), "top_k": 0}, "top_k"),
            ({"memory": FakeMemory(), "topk": 1}, "topk"),
            ({"memory": FakeMemory(), "metadata_mode": "x"}, "no metadata mode 'x'"),
            ({}, "memory"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ReuseMemoryBlock(**arguments)


class OneWordBlock(BaseMemoryBlock[str]):
    """Says another word each time."""

    name: str = "Word"
    number: Any = itertools.count()

    async def _aget(self, messages: Any = None, **block_kwargs: Any) -> str:
        return f"word {next(self.number)}"

    async def _aput(self, messages: list[ChatMessage]) -> None: ...


async def chat_prompts(memory: Memory, questions: Sequence[str]) -> list[str]:
    """Return the prompts of a chat engine that puts the question into the memory first."""
    inner = RecordingLLM()
    engine = SimpleChatEngine.from_defaults(llm=inner, memory=memory, system_prompt="Be brief.")
    for question in questions:
        await engine.achat(question)
    return inner.prompts


def grow(prompts: Sequence[str]) -> bool:
    """Return whether each prompt begins with the whole prompt before it."""
    return all(later.startswith(earlier) for earlier, later in itertools.pairwise(prompts))


class TestReplayMemory:
    async def test_each_prompt_begins_with_the_bytes_of_the_one_before(self) -> None:
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        prompts = await chat_prompts(memory, ["abc one?", "cbd two?", "bx three?"])
        assert len(prompts) == 3
        assert grow(prompts)
        assert prompts[0].startswith("<system>Be brief.</><user>")
        assert labelled("abc") in prompts[0]

    async def test_memories_that_are_shown_already_are_pointed_to(self) -> None:
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        prompts = await chat_prompts(memory, ["abc one?", "cbd two?", "bx three?"])
        new = [prompts[1].removeprefix(prompts[0]), prompts[2].removeprefix(prompts[1])]
        for text, parts in zip(
            new,
            [
                ("[Doc_3] in the previous", "[Doc_2] in the previous", labelled("d", 4)),
                ("[Doc_2] in the previous", labelled("x", 5)),
            ],
            strict=True,
        ):
            positions = [text.index(part) for part in parts]
            assert positions == sorted(positions)
        assert prompts[2].count("says:") == 5, "each memory stands there once"

    @pytest.mark.parametrize("method", [InsertMethod.SYSTEM, InsertMethod.USER])
    async def test_llamaindexs_own_memory_changes_what_was_sent(self, method: InsertMethod) -> None:
        memory = Memory.from_defaults(
            memory_blocks=[ReuseMemoryBlock(memory=LetterMemory())],
            insert_method=method,
            chat_store=ListChatStore(),
        )
        assert not grow(await chat_prompts(memory, ["abc one?", "cbd two?", "bx three?"]))

    async def test_other_memory_blocks_are_replayed_too(self) -> None:
        memory = plain_memory(
            OneWordBlock(),
            StaticMemoryBlock(name="Fixed", static_content=[TextBlock(text="the same")]),
        )
        prompts = await chat_prompts(memory, ["one?", "two?"])
        assert grow(prompts)
        assert "word 0" in prompts[1]
        assert "word 1" in prompts[1]

    async def test_two_blocks_do_not_use_the_same_labels(self) -> None:
        planner = ReusePlanner()
        memory = plain_memory(
            ReuseMemoryBlock(memory=LetterMemory(), planner=planner, name="One"),
            ReuseMemoryBlock(memory=LetterRetriever(), planner=planner, name="Two"),
        )
        prompts = await chat_prompts(memory, ["abc one?", "bde two?"])
        shown = re.findall(r"\[Doc_(\d+)\] (\w) says", prompts[1])
        assert shown == [("1", "a"), ("2", "b"), ("3", "c"), ("4", "d"), ("5", "e")]
        assert grow(prompts)

    async def test_asking_again_in_the_same_turn_gives_the_same(self) -> None:
        mem0 = LetterMemory()
        memory = plain_memory(ReuseMemoryBlock(memory=mem0))
        await memory.aput(user("abc one?"))
        first = await memory.aget()
        assert await memory.aget() == first
        await memory.aput(assistant("OK."))
        assert (await memory.aget())[:1] == first
        assert mem0.queries == ["abc one?"]

    async def test_what_agents_write_into_their_copies_stays_with_them(self) -> None:
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        await memory.aput(user("abc one?"))
        first = await memory.aget()
        prompt = as_prompt(first)
        for block in first[0].blocks:
            assert isinstance(block, TextBlock)
            block.text = "written over"
        assert as_prompt(await memory.aget()) == prompt

    async def test_engines_that_ask_before_they_add_the_question_are_served(self) -> None:
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        inner = RecordingLLM()
        histories: list[str] = []
        for question in ("abc one?", "cbd two?", "bx three?"):
            history = await memory.aget(input=question)
            histories.append(as_prompt([*history, user(question)]))
            answer = (await inner.achat([*history, user(question)])).message
            await memory.aput(user(question))
            await memory.aput(answer)
        assert grow(histories)
        assert histories[2].count("says:") == 5
        assert all(history.endswith("?</>") for history in histories)

    async def test_a_question_that_was_asked_before_it_was_added_is_served_once(self) -> None:
        mem0 = LetterMemory()
        memory = plain_memory(ReuseMemoryBlock(memory=mem0))
        asked = await memory.aget(input="abc one?")
        await memory.aput(user("abc one?"))
        assert await memory.aget() == [*asked, user("abc one?")]
        assert mem0.queries == ["abc one?"]

    async def test_a_question_that_was_added_may_be_named_too(self) -> None:
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        await memory.aput(user("abc one?"))
        [sent] = await memory.aget(input="abc one?")
        assert labelled("abc") in (sent.content or "")
        assert await memory.aget(input=user("abc one?")) == [sent]

    async def test_a_question_that_was_never_added_leaves_nothing_behind(self) -> None:
        mem0 = LetterMemory()
        memory = plain_memory(ReuseMemoryBlock(memory=mem0))
        await memory.aget(input="abc one?")
        [sent] = await memory.aget(input="xyz two?")
        assert "x says" in (sent.content or "")
        assert "a says" not in (sent.content or "")

    async def test_the_question_of_an_answered_turn_gets_no_memories_afterwards(self) -> None:
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        await memory.aput_messages([user("abc one?"), assistant("OK.")])
        assert [one.content for one in await memory.aget()] == ["abc one?", "OK."]

    async def test_an_edited_history_is_shown_as_it_is(self) -> None:
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        await memory.aput(user("abc one?"))
        await memory.aget()
        await memory.aset([user("abc another?"), assistant("OK."), user("hello?")])
        sent = await memory.aget()
        assert [one.content for one in sent[:2]] == ["abc another?", "OK."]

    async def test_a_block_of_an_edited_history_is_sent_again(self) -> None:
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        await memory.aput_messages([user("abc one?")])
        await memory.aget()
        await memory.aset([user("hello?"), assistant("hi"), user("ab two?")])
        assert "a says" in (await memory.aget())[-1].blocks[0].text  # type: ignore[union-attr]

    async def test_when_it_is_full_earlier_memories_are_taken_out_and_shown_anew(self) -> None:
        memory = plain_memory(
            ReuseMemoryBlock(memory=LetterMemory()), token_limit=420, tokenizer_fn=quarters
        )
        prompts = await chat_prompts(memory, ["abc one?", "ac two?", "a three?", "ax four?"])
        assert grow(prompts[:3])
        assert all(len(quarters(prompt)) < 440 for prompt in prompts)
        assert not grow(prompts)
        assert "a says" in prompts[3], "it does not stand in the history any more"
        assert "previous conversation" not in prompts[3]

    async def test_a_block_with_a_priority_is_truncated_to_the_limit(self) -> None:
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

    async def test_the_conversation_is_the_session_unless_told_otherwise(self) -> None:
        planner = ReusePlanner()
        block = ReuseMemoryBlock(memory=LetterMemory(), planner=planner)
        memory = plain_memory(block, session_id="s")
        await memory.aput(user("abc one?"))
        await memory.aget()
        assert planner.end_conversation("s")
        with request_context(conversation_id="c"):
            await memory.aput(user("xyz two?"))
            await memory.aget()
        assert planner.end_conversation("c")

    def test_the_synchronous_way_gives_the_same(self) -> None:
        memory = plain_memory(ReuseMemoryBlock(memory=LetterMemory()))
        memory.put(user("ab one?"))
        [sent] = memory.get()
        assert labelled("ab") in (sent.content or "")
        assert [one.content for one in memory.get_all()] == ["ab one?"], "the store stays plain"

    def test_the_system_message_is_no_place_for_memories(self) -> None:
        with pytest.raises(ValueError, match="SYSTEM changes the system message every turn"):
            plain_memory(insert_method=InsertMethod.SYSTEM)
        assert isinstance(plain_memory(), ReplayMemory)
        assert plain_memory().insert_method is InsertMethod.USER

    # LlamaIndex's workflows look at every attribute of an agent
    @pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
    async def test_an_agent_that_calls_tools_keeps_its_prefix(self) -> None:
        def answer(body: dict[str, Any]) -> Any:
            if body["messages"][-1]["role"] == "tool":
                return "It is sunny."
            return ToolCall("weather", "{}")

        server = EmulatedEngine(answer=answer)
        model = OpenAILike(
            model="emulated",
            api_base="http://engine/v1",
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            context_window=100_000,
            async_http_client=httpx.AsyncClient(transport=server.transport()),
        )
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


class TestInsideLlamaIndexsOwn:
    async def test_a_vector_memory_block_takes_the_postprocessor(self) -> None:
        store = ListVectorStore()
        block = VectorMemoryBlock(
            vector_store=store,
            embed_model=MockEmbedding(4),
            similarity_top_k=3,
            retrieval_context_window=1,
            node_postprocessors=[ReusePostprocessor(metadata_mode=MetadataMode.NONE)],
        )
        for letter in "cba":
            await block.aput([user(letter_text(letter))])

        def order(text: str) -> str:
            return "".join(part[0] for part in text.split("<message role='user'>")[1:])

        assert order(await block.aget([user("q")])) == "abc"
        store.nodes.reverse()
        second = await block.aget([user("q")])
        assert order(second) == "abc"
        assert second.endswith(
            "The documents above are [Doc_1], [Doc_2], [Doc_3], in this order. Please read the "
            "context in the following priority order: [Doc_3] > [Doc_2] > [Doc_1] and answer the "
            "question."
        )

    async def test_a_condense_plus_context_engine_takes_the_memory(self) -> None:
        inner = RecordingLLM()
        engine = CondensePlusContextChatEngine.from_defaults(
            retriever=ReuseRetriever(LetterRetriever()),
            llm=inner,
            memory=plain_memory(ReuseMemoryBlock(memory=LetterMemory())),
            skip_condense=True,
            context_prompt="Context: {context_str}",
        )
        await engine.achat("ab one?")
        response = await engine.achat("bc two?")
        assert response.response == "answer 2"
        assert [message.content for message in engine.chat_history] == [
            "ab one?",
            "answer 1",
            "bc two?",
            "answer 2",
        ]
