import itertools
import logging
import re
from typing import Any

import pytest
from block_labels import label
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.llms import MockLLM
from llama_index.core.schema import ImageNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from llamaindex_helpers import (
    LetterRetriever,
    RecordingLLM,
    grow,
    labelled,
    letter_nodes,
    letter_text,
    located,
    ranked,
    said,
)
from llamaindex_llm_helpers import CHATS, FaultyPlanner, say

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReuseChatEngine, ReuseLLM, ReusePostprocessor, ReuseRetriever
from llamaindex_ctxreuse.chat import chat_turn
from llamaindex_ctxreuse.nodes.run_nodes import AnnotationNode


def engine(llm: Any = None, **options: Any) -> ReuseChatEngine:
    retriever = options.pop("retriever", None) or LetterRetriever()
    llm = RecordingLLM() if llm is None else llm
    return ReuseChatEngine(retriever, llm, **{"metadata_mode": MetadataMode.NONE, **options})


class TestPrompts:
    @pytest.mark.parametrize("way", CHATS)
    def test_a_conversation_is_sent_in_full(self, way, inner):
        chat = engine(inner, system_prompt="Be brief.")
        answers = [say(chat, way, message) for message in ("ab one?", "cb two?")]
        assert [str(answer) for answer in answers] == ["answer 1", "answer 2"]
        first = f"<system>Be brief.</><user>{labelled('ab')}\n\nab one?</>"
        assert inner.prompts == [
            first,
            f"{first}<assistant>answer 1</><user>{labelled('c')}\n\n{located('b')}\n\ncb two?</>",
        ]
        assert chat.faults == 0

    @pytest.mark.parametrize("way", CHATS)
    def test_thoughts_reach_neither_the_history_nor_a_search(self, way):
        inner, retriever = RecordingLLM(answer="<think>Hm.</think>\n\nAb"), LetterRetriever()
        chat = engine(inner, retriever=retriever, skip_condense=False)
        for message in ("ab one?", "cb \udfff two?"):
            say(chat, way, message)
        assert len(inner.prompts) == 3
        assert "Hm." not in "".join(inner.prompts)
        said = [one.content for one in chat._transcript.said()]
        assert said == ["ab one?", "Ab", "cb ? two?", "Ab"]
        assert retriever.queries == ["ab one?", "Ab"]

    def test_first_turns_share_their_order_within_a_tenant(self):
        inner, planner = RecordingLLM(), ReusePlanner()
        engine(inner, planner=planner).chat("abc one?")
        engine(inner, planner=planner).chat("cba one?")
        opening = inner.prompts[0].removesuffix("abc one?</>")
        assert inner.prompts[1] == f"{opening}{ranked('cba')}\n\ncba one?</>"

        inner, planner = RecordingLLM(), ReusePlanner()
        for tenant in ("one", "two", "one"):
            with request_context(tenant=tenant):
                engine(inner, planner=planner).chat("abc?" if len(inner.prompts) < 1 else "cba?")
        assert ["Read documents" in prompt for prompt in inner.prompts] == [False, False, True]

    def test_nothing_retrieved_leaves_the_question_and_metadata_is_shown_as_the_mode_says(self):
        inner = RecordingLLM()
        engine(inner).chat(" hello?")
        assert inner.prompts == ["<user> hello?</>"]
        inner = RecordingLLM()
        engine(inner, metadata_mode=MetadataMode.LLM).chat("a one?")
        text = f"source: a.txt\n\n{letter_text('a')}"
        assert f"{label(text)} {text}" in inner.prompts[0]

    async def test_planned_nodes_are_planned_once(self):
        inner, planner = RecordingLLM(), ReusePlanner()
        chat = engine(
            inner,
            retriever=ReuseRetriever(LetterRetriever(), planner=planner),
            node_postprocessors=[ReusePostprocessor(planner=planner)],
            planner=planner,
        )
        with request_context(conversation_id="c"):
            for message in ("abc one?", "cba two?", "bd three?"):
                await chat.achat(message)
        assert grow(inner.prompts)
        assert inner.prompts[2].count("says:") == 4
        assert "Read documents" not in inner.prompts[2]

    def test_a_model_that_schedules_leaves_the_prompt_alone(self):
        inner, plain = RecordingLLM(), RecordingLLM()
        wrapped, bare = engine(ReuseLLM(inner=inner, window_s=0)), engine(plain)
        for message in ("pqr one?", "rqs two?"):
            wrapped.chat(message)
            bare.chat(message)
        assert inner.prompts == plain.prompts


class TestHistory:
    async def test_it_is_what_was_sent(self, inner):
        chat = engine(inner, system_prompt="Be brief.")
        chat.chat("ab one?")
        assert [message.role.value for message in chat.chat_history] == ["user", "assistant"]
        assert chat.chat_history == [*inner.chats[0][1:], said("answer 1")]
        assert [message.content for message in chat.said] == ["ab one?", "answer 1"]

    @pytest.mark.parametrize("shown", ["chat_history", "said"])
    def test_handed_in_again_it_is_replayed_as_it_was_sent(self, shown, inner):
        chat = engine(inner)
        chat.chat("ab one?")
        chat.chat("cb two?", chat_history=getattr(chat, shown))
        assert grow(inner.prompts)
        assert len(chat.said) == 4

    def test_another_engine_goes_on_from_it(self):
        inner, planner = RecordingLLM(), ReusePlanner()
        with request_context(conversation_id="c"):
            chat = engine(inner, planner=planner)
            chat.chat("ab one?")
            other = engine(inner, planner=planner, chat_history=chat.chat_history)
            other.chat("b two?")
        assert grow(inner.prompts)
        assert inner.prompts[1].endswith(f"<user>{located('b')}\n\nb two?</>")

    def test_what_the_caller_does_to_a_history_changes_nothing(self, inner):
        chat = engine(inner)
        chat.chat("ab one?")
        for message in (*chat.chat_history, *chat.said):
            message.blocks.clear()
        chat.chat("cd two?")
        assert grow(inner.prompts)

    @pytest.mark.parametrize("way", CHATS)
    def test_a_turn_that_fails_is_not_part_of_it(self, way):
        def fails(prompt: str) -> Exception | None:
            return TimeoutError("busy") if "two?" in prompt else None

        inner, planner = RecordingLLM(fails=fails), ReusePlanner()
        chat = engine(inner, planner=planner)
        say(chat, way, "ab one?")
        with pytest.raises(TimeoutError, match="busy"):
            say(chat, way, "cd two?")
        assert len(chat.chat_history) == 2
        assert planner.statistics().requests == 1
        say(chat, way, "cd three?")
        assert grow(inner.prompts)
        assert inner.prompts[-1].count("says:") == 4

    # LlamaIndex raises it in its writer's thread as well
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize("way", ["stream_chat", "astream_chat"])
    def test_a_stream_that_breaks_is_not_part_of_it(self, way):
        inner, planner = RecordingLLM(breaks_after=1), ReusePlanner()
        chat = engine(inner, planner=planner)
        with pytest.raises(ConnectionError):
            say(chat, way, "ab one?")
        assert chat.chat_history == []
        assert planner.statistics().requests == 0

    def test_turns_that_overlap_are_both_kept(self):
        chat = engine()
        first, second = chat.stream_chat("ab one?"), chat.stream_chat("cd two?")
        for response in (first, second):
            "".join(response.response_gen)
        assert sorted(message.content or "" for message in chat.said) == [
            "ab one?",
            "answer 1",
            "answer 2",
            "cd two?",
        ]

    def test_what_was_streamed_so_far_is_understood_and_white_space_around_it_kept(self):
        class Cumulative(RecordingLLM):
            def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
                return (ChatResponse(message=said(text)) for text in ("ans", "answer"))

        chat = engine(Cumulative())
        "".join(chat.stream_chat("ab one?").response_gen)
        assert [message.content for message in chat.said] == ["ab one?", "answer"]

        inner = RecordingLLM(answer="  an answer\n")
        chat = engine(inner)
        "".join(chat.stream_chat("ab one?").response_gen)
        chat.chat("cd two?")
        assert "<assistant>  an answer\n</>" in inner.prompts[1]


class TestWindow:
    def test_the_oldest_turns_go_when_the_models_window_is_full(self):
        inner, planner = RecordingLLM(context_window=1_000, num_output=100), ReusePlanner()
        chat = engine(inner, planner=planner, token_counter=lambda text: len(text) // 4)
        for number, letters in enumerate(("ab", "cd", "ef", "gh", "ij", "kl")):
            chat.chat(f"{letters} {number}?")
            assert planner.statistics().requests == number + 1, "only what is sent is counted"
        assert all(len(prompt) // 4 <= 900 for prompt in inner.prompts)
        cut = [
            number
            for number, (earlier, later) in enumerate(itertools.pairwise(inner.prompts), start=1)
            if not later.startswith(earlier)
        ]
        assert cut, "the conversation is longer than the window"
        assert all(b - a > 1 for a, b in itertools.pairwise(cut)), "and is cut by half at once"
        for number in cut:
            assert re.match(r"<user>\[[A-Z]{4}\] \w says", inner.prompts[number])

    def test_a_turn_that_cannot_be_planned_is_cut_as_it_is_sent(self):
        inner = RecordingLLM(context_window=1_000, num_output=100)
        chat = engine(inner, planner=FaultyPlanner(), token_counter=lambda text: len(text) // 4)
        for number in range(6):
            chat.chat(f"ab {number}?")
        assert all(len(prompt) // 4 <= 900 for prompt in inner.prompts)
        assert inner.prompts[1].count("says:") == 4, "nothing is left out"
        assert chat.faults == 6

    def test_what_dropped_turns_showed_is_sent_again(self):
        inner = RecordingLLM(context_window=1_000, num_output=100)
        chat = engine(inner, token_counter=lambda text: len(text) // 4)
        for number, letters in enumerate(("ab", "cd", "ef", "gh", "ij", "kl", "ab")):
            chat.chat(f"{letters} {number}?")
            shown = inner.prompts[-1]
            for letter in letters:
                assert letter_text(letter) in shown
        assert "a says" not in inner.prompts[-2]

    def test_a_turn_that_is_too_long_alone_is_sent_and_said_so_once(self, caplog):
        inner = RecordingLLM(context_window=300, num_output=100)
        chat = engine(inner)
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            chat.chat("abcd one?")
            chat.chat("efgh two?")
        assert [prompt.count("says:") for prompt in inner.prompts] == [4, 4]
        assert len(caplog.records) == 1
        assert "context_window of 300" in caplog.text
        assert "one?" not in caplog.text

    def test_models_without_a_length_and_histories_without_a_question_are_cut_too(self):
        inner = RecordingLLM(context_window=500, num_output=-1)
        chat = engine(inner, token_counter=lambda text: len(text) // 4)
        for letters in ("a", "b", "c"):
            chat.chat(f"{letters}?")
        assert max(len(prompt) // 4 for prompt in inner.prompts) <= 250

        inner = RecordingLLM(context_window=500, num_output=100)
        given = [said("hello " * 400), ChatMessage(role="user", content="hi"), said("ho")]
        chat = engine(inner, chat_history=given)
        chat.chat("a one?")
        assert inner.prompts[0].startswith(f"<user>hi</><assistant>ho</><user>{labelled('a')}")


class TestResponses:
    @pytest.mark.parametrize("way", ["chat", "stream_chat"])
    def test_sources_are_the_retrievers_own_nodes(self, way):
        class Keeping(LetterRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                nodes[:] = super()._retrieve(query_bundle)
                return list(nodes)

        nodes: list[NodeWithScore] = []
        chat = engine(retriever=Keeping())
        chat.chat("ab one?")
        response = getattr(chat, way)("cb two?")
        assert list(map(id, response.source_nodes)) == list(map(id, nodes))
        assert nodes == letter_nodes("cb")
        assert response.sources[0].tool_name == "retriever"
        assert response.sources[0].raw_output == response.source_nodes

    def test_events_go_where_the_user_wants_them(self):
        debug = LlamaDebugHandler(print_trace_on_end=False)
        manager = CallbackManager([debug])
        chat = engine(RecordingLLM(callback_manager=manager), callback_manager=manager)
        chat.chat("ab one?")
        assert len(debug.get_event_pairs(CBEventType.LLM)) == 1


class TestRetrieval:
    @pytest.mark.parametrize("way", ["chat", "achat"])
    def test_a_follow_up_can_be_condensed(self, way, inner):
        retriever = LetterRetriever()
        chat = engine(
            inner,
            retriever=retriever,
            skip_condense=False,
            condense_prompt="{chat_history} | {question}",
        )
        say(chat, way, "ab one?")
        say(chat, way, "cb two?")
        assert retriever.queries == ["ab one?", "answer 2"]
        assert inner.prompts[1] == "user: ab one?\nassistant: answer 1 | cb two?"
        assert inner.prompts[2].endswith("cb two?</>")

    @pytest.mark.parametrize("way", CHATS)
    def test_a_question_may_be_a_query_bundle(self, way):
        seen: list[Any] = []

        class Retriever(LetterRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                seen.append(query_bundle.custom_embedding_strs)
                return super()._retrieve(query_bundle)

        inner = RecordingLLM()
        chat = engine(inner, retriever=Retriever())
        bundle: Any = QueryBundle("ab one?", custom_embedding_strs=["a river"])
        say(chat, way, bundle)
        assert seen == [["a river"]]
        assert inner.prompts[0].endswith("ab one?</>")
        assert chat.said[0].content == "ab one?"

    def test_only_texts_are_shown_and_each_once(self, inner):
        class Retriever(LetterRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                a, b = super()._retrieve(query_bundle)
                copy = NodeWithScore(node=TextNode(id_="copy", text=a.text), score=0.5)
                image = NodeWithScore(node=ImageNode(image_url="http://i", text=""), score=0.4)
                return [image, a, copy, b]

        response = engine(inner, retriever=Retriever()).chat("ab one?")
        assert inner.prompts[0] == f"<user>{labelled('ab')}\n\nab one?</>"
        assert len(response.source_nodes) == 4

    def test_a_planning_fault_sends_the_texts_as_retrieved(self, caplog, inner):
        chat = engine(inner, planner=FaultyPlanner())
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            response = chat.chat("ba one?")
            chat.chat("ab two?")
        first = f"<user>{letter_text('b')}\n\n{letter_text('a')}\n\nba one?</>"
        assert inner.prompts[0] == first
        assert grow(inner.prompts)
        assert [node.text[0] for node in response.source_nodes] == ["b", "a"]
        assert chat.faults == 2
        assert len(caplog.records) == 1

    def test_a_token_counter_that_fails_costs_no_turn_and_no_reuse(self, caplog):
        def counter(text: str) -> int:
            calls.append(text)
            if len(calls) > 1:
                raise OverflowError(text)
            return len(text) // 4

        calls: list[str] = []
        inner = RecordingLLM(context_window=600, num_output=100)
        chat = engine(inner, token_counter=counter)
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            for message in ("ab one?", "ba two?", "cd three?", "ef four?"):
                chat.chat(message)
        assert inner.prompts[1].startswith(inner.prompts[0])
        assert inner.prompts[1].endswith(f"<user>{located('ba')}\n\nba two?</>")
        assert all(len(prompt) // 4 <= 500 for prompt in inner.prompts), "estimates keep it short"
        assert chat.faults == len(calls) - 1 > 0
        assert len(caplog.records) == 1
        assert "says" not in caplog.text

    @pytest.mark.parametrize("is_ours", [True, False])
    def test_nodes_that_cannot_be_prepared_are_sent_as_retrieved(self, monkeypatch, is_ours):
        def fails(nodes: Any, planner: Any) -> Any:
            raise KeyError("a fault of ours")

        template = "{key}: {value}" if is_ours else "{odd}"
        nodes = [
            TextNode(text="b", metadata={"k": "v"}, metadata_template=template),
            TextNode(text="a", metadata={"k": "v"}),
            AnnotationNode(text="[BCDF] > [GHJK]"),
        ]
        found = [NodeWithScore(node=node) for node in nodes]
        if is_ours:
            monkeypatch.setattr(chat_turn, "as_retrieved", fails)
        inner, planner = RecordingLLM(), ReusePlanner()
        options: dict[str, Any] = {"planner": planner, "metadata_mode": MetadataMode.LLM}
        chat = engine(inner, retriever=LetterRetriever(change=lambda _: found), **options)
        response = chat.chat("one?")
        texts = "k: v\n\nb\n\nk: v\n\na" if is_ours else "b\n\na"
        assert inner.prompts == [f"<user>{texts}\n\none?</>"]
        assert [one.node for one in response.source_nodes] == nodes
        assert chat.faults == (1 if is_ours else 2)
        assert planner.statistics().requests == 0


class TestMaking:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"llm": None}, "llm must be a LlamaIndex LLM"),
            ({"retriever": None}, "retriever must be a LlamaIndex BaseRetriever"),
            ({"planner": 3}, r"planner must be a ctxreuse\.ReusePlanner"),
            ({"system_prompt": 3}, "system must be a string"),
            ({"node_postprocessors": ["x"]}, "node_postprocessors must be a LlamaIndex"),
            ({"metadata_mode": "some"}, "no metadata mode"),
            ({"token_counter": 3}, "token_counter must be"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments, message):
        given: dict[str, Any] = {"retriever": LetterRetriever(), "llm": MockLLM(), **arguments}
        with pytest.raises(ValueError, match=message):
            ReuseChatEngine(**given)
