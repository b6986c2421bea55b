"""What LlamaIndex's own chat engines with a context do, ours does too; each test runs with all."""

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.memory import Memory
from llama_index.core.postprocessor import SimilarityPostprocessor
from llamaindex_helpers import LetterRetriever, ListChatStore, RecordingLLM, letter_text
from llamaindex_memory_helpers import assistant, user

from llamaindex_ctxreuse import ReuseChatEngine, ReuseLLM, ReusePostprocessor, ReuseRetriever

OWN: list[Any] = [ContextChatEngine, CondensePlusContextChatEngine]
each = pytest.mark.parametrize("kind", [*OWN, ReuseChatEngine])


def engine(kind: Any, llm: Any, retriever: Any = None, **options: Any) -> BaseChatEngine:
    """Return a chat engine that asks the retriever with the question itself."""
    if kind in OWN:
        options["memory"] = Memory.from_defaults(chat_store=ListChatStore())
    if kind is CondensePlusContextChatEngine:
        options["skip_condense"] = True
    made: BaseChatEngine = kind.from_defaults(
        retriever=retriever or LetterRetriever(), llm=llm, system_prompt="Be brief.", **options
    )
    return made


def texts(prompt: str) -> str:
    """Return the letters whose texts a prompt shows, in its order."""
    found = {letter: prompt.find(letter_text(letter)) for letter in "abcdef"}
    return "".join(sorted((one for one in found if found[one] >= 0), key=found.__getitem__))


@each
class TestChatEngine:
    def test_an_answer_comes_with_its_sources(self, kind):
        llm = RecordingLLM()
        response = engine(kind, llm).chat("ab first?")
        assert str(response) == "answer 1"
        assert [one.node_id for one in response.source_nodes] == ["id-a", "id-b"]
        assert [one.score for one in response.source_nodes] == [1.0, 0.9]
        assert len(response.sources) == 1
        [prompt] = llm.prompts
        assert "Be brief." in prompt
        assert texts(prompt) == "ab"
        assert prompt.rindex("ab first?") > prompt.index("b says")

    async def test_answers_and_streams_are_the_same_when_they_are_awaited(self, kind):
        waited, asked = RecordingLLM(), RecordingLLM()
        response = await engine(kind, waited).achat("ab first?")
        engine(kind, asked).chat("ab first?")
        assert str(response) == "answer 1"
        assert waited.prompts == asked.prompts
        assert [one.node_id for one in response.source_nodes] == ["id-a", "id-b"]

        llm = RecordingLLM()
        chat = engine(kind, llm)
        streamed = await chat.astream_chat("ab first?")
        assert "".join([piece async for piece in streamed.async_response_gen()]) == "answer 1"
        assert str(await chat.achat("bc second?")) == "answer 2"
        assert "answer 1" in llm.prompts[1]

    def test_a_streamed_answer_is_the_same(self, kind):
        llm = RecordingLLM()
        chat = engine(kind, llm)
        streamed = chat.stream_chat("ab first?")
        assert "".join(streamed.response_gen) == "answer 1"
        assert str(streamed) == "answer 1"
        assert [one.node_id for one in streamed.source_nodes] == ["id-a", "id-b"]
        assert str(chat.chat("bc second?")) == "answer 2"
        assert "answer 1" in llm.prompts[1]

    def test_the_next_turn_knows_the_one_before(self, kind):
        llm = RecordingLLM()
        chat = engine(kind, llm)
        chat.chat("ab first?")
        chat.chat("cd second?")
        assert [one.role for one in chat.chat_history] == [
            MessageRole.USER,
            MessageRole.ASSISTANT,
        ] * 2
        assert str(chat.chat_history[0].content).endswith("ab first?")
        assert chat.chat_history[1].content == "answer 1"
        prompt = llm.prompts[1]
        asked = [prompt.index(part) for part in ("ab first?", "answer 1", "cd second?")]
        assert asked == sorted(asked)
        assert {"c", "d"} <= set(texts(prompt))

    def test_resetting_begins_anew(self, kind):
        llm = RecordingLLM()
        chat = engine(kind, llm)
        chat.chat("ab first?")
        chat.reset()
        assert chat.chat_history == []
        chat.chat("cd second?")
        assert "ab first?" not in llm.prompts[1]
        assert "Be brief." in llm.prompts[1]

    def test_a_given_history_takes_the_place_of_the_engines_and_is_not_written_into(self, kind):
        llm = RecordingLLM()
        chat = engine(kind, llm)
        chat.chat("ab first?")
        chat.chat("cd second?", chat_history=[user("Hello"), assistant("Hi")])
        assert "ab first?" not in llm.prompts[1]
        assert llm.prompts[1].index("Hello") < llm.prompts[1].index("cd second?")
        assert len(chat.chat_history) == 4
        assert chat.chat_history[0].content == "Hello"

        given = [user("Hello"), assistant("Hi")]
        chat = engine(kind, RecordingLLM())
        chat.chat("ab first?", chat_history=given)
        chat.chat("cd second?")
        assert given == [user("Hello"), assistant("Hi")]

    def test_postprocessors_are_applied(self, kind):
        llm = RecordingLLM()
        cut = SimilarityPostprocessor(similarity_cutoff=0.95)
        response = engine(kind, llm, node_postprocessors=[cut]).chat("abc first?")
        assert [one.node_id for one in response.source_nodes] == ["id-a"]
        assert texts(llm.prompts[0]) == "a"

    @pytest.mark.parametrize("is_wrapped", [True, False])
    def test_planned_nodes_and_models_fit_in(self, kind, is_wrapped, inner):
        llm = ReuseLLM(inner=inner, window_s=0) if is_wrapped else inner
        chat = engine(
            kind, llm, ReuseRetriever(LetterRetriever()), node_postprocessors=[ReusePostprocessor()]
        )
        for question in ("abc first?", "cba second?", "bcd third?"):
            response = chat.chat(question)
            assert {one.node_id[-1] for one in response.source_nodes} == set(question[:3])
            assert all(" says: " in one.text for one in response.source_nodes)
        assert {"b", "c", "d"} <= set(texts(inner.prompts[2]))

    def test_an_error_of_the_model_is_the_callers_and_the_chat_goes_on(self, kind):
        llm = RecordingLLM(
            fails=lambda prompt: ConnectionError("gone") if "cd second?" in prompt else None
        )
        chat = engine(kind, llm)
        with pytest.raises(ConnectionError, match="gone"):
            chat.chat("cd second?")
        chat.reset()
        assert str(chat.chat("ab third?")) == "answer 1"

    def test_messages_of_any_kind_may_be_in_the_history(self, kind):
        llm = RecordingLLM()
        called = ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": []})
        said = ChatMessage(role="tool", content="42", additional_kwargs={"tool_call_id": "1"})
        history = [user("Hello"), called, said, assistant("Hi")]
        engine(kind, llm).chat("ab first?", chat_history=history)
        sent = llm.chats[0]
        assert [one.content for one in sent if one.role is MessageRole.TOOL] == ["42"]
