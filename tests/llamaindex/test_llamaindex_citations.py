"""Programs that show sources: a label in an answer names the node that they gave it to."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import MetadataMode
from llama_index.core.tools import FunctionTool
from llamaindex_helpers import RecordingLLM, letter_nodes
from llamaindex_llm_helpers import context
from openai_models import clients_of, openai_like

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.emulation.emulated_engine import EmulatedEngine
from ctxreuse.serving.emulation.openai_replies import ToolCall
from llamaindex_ctxreuse import ReuseLLM, cited_nodes


def label_of_a(prompt: str) -> str:
    """Return the label under which a prompt shows the document a."""
    return [*re.findall(r"(\[Doc_\d+\]) a says", prompt), "[Doc_0]"][0]


class CitingLLM(RecordingLLM):
    """Cites the document a; streams letter by letter."""

    words: str = "It is so {}."

    def _answer(self, prompt: str, options: dict[str, Any]) -> str:
        super()._answer(prompt, options)
        return self.words.format(label_of_a(prompt))

    def _pieces(self, answer: str) -> Iterator[tuple[str, str]]:
        for end, letter in enumerate(answer, start=1):
            yield answer[:end], letter


def asked(letters: str, words: str = "Which?") -> str:
    return f"{context(letters)}\n\n{words}"


def chat(letters: str, words: str = "Which?") -> list[ChatMessage]:
    return [ChatMessage(role="user", content=asked(letters, words))]


@pytest.fixture
def llm() -> ReuseLLM:
    llm = ReuseLLM(inner=CitingLLM(), window_s=0, planner=ReusePlanner())
    llm.complete(asked("abc"))
    llm.chat(chat("abc"))
    return llm


LABELS = {
    "[Doc_1]": {"id": "id-c", "rank": 0, "sent": "[Doc_3]"},
    "[Doc_2]": {"id": "id-a", "rank": 1, "sent": "[Doc_1]"},
    "[Doc_3]": {"id": "id-b", "rank": 2, "sent": "[Doc_2]"},
}


async def test_a_label_names_the_node_at_that_position(llm):
    answers = [
        llm.complete(asked("cab")),
        await llm.acomplete(asked("cab")),
        llm.chat(chat("cab")),
        await llm.achat(chat("cab")),
        *await llm.acomplete_batch([asked("cab"), asked("bac")]),
        *await llm.achat_batch([chat("cab"), chat("bac")]),
    ]
    assert "Read documents 2, 1, 3 first." in llm.inner.prompts[-1]
    for answer in answers:
        text = answer.text if isinstance(answer, CompletionResponse) else answer.message.content
        assert text == "It is so [Doc_2]."
        letters = "cab" if answer.additional_kwargs["ctxreuse"]["labels"] == LABELS else "bac"
        [cited] = cited_nodes(answer, letter_nodes(letters))
        assert cited.node.node_id == "id-a"
        assert cited_nodes(text, letter_nodes(letters)) == [cited]
    assert json.loads(answers[0].model_dump_json())["additional_kwargs"]["ctxreuse"]


@pytest.mark.parametrize("letters", ["ccab", "cbcac"])
def test_so_it_does_where_two_searches_have_found_the_same_node(llm, letters):
    answer = llm.complete(asked(letters))
    nodes = letter_nodes(letters)
    [number] = re.findall(r"\[Doc_(\d+)\]", answer.text)
    assert nodes[int(number) - 1].node.node_id == "id-a"
    for one in (answer, answer.text):
        assert [cited.node.node_id for cited in cited_nodes(one, nodes)] == ["id-a"]


async def test_streams_have_the_labels_given(llm):
    completions = [*llm.stream_complete(asked("cab"))]
    completions += [one async for one in await llm.astream_complete(asked("cab"))]
    chats = [*llm.stream_chat(chat("cab"))]
    chats += [one async for one in await llm.astream_chat(chat("cab"))]
    wanted = "It is so [Doc_2]."
    assert "".join(str(one.delta) for one in completions) == wanted * 2
    assert "".join(str(one.delta) for one in chats) == wanted * 2
    assert completions[-1].text == chats[-1].message.content == wanted
    shown = ""
    for one in completions[: len(completions) // 2]:
        shown += str(one.delta)
        assert one.text == shown
    assert all("Doc_1" not in str(one.message.content) for one in chats)
    assert chats[0].additional_kwargs["ctxreuse"]["labels"] == LABELS


def test_a_stream_that_ends_within_a_label_is_whole():
    inner = CitingLLM(words="See {:.6}")
    llm = ReuseLLM(inner=inner, window_s=0)
    llm.complete(asked("abc"))
    pieces = list(llm.stream_complete(asked("cab")))
    assert pieces[-1].text == "".join(str(one.delta) for one in pieces) == "See [Doc_2"


def test_an_answer_goes_back_to_the_model_as_it_gave_it(llm):
    first = chat("cab")
    answer = llm.chat(first).message
    assert answer.content == "It is so [Doc_2]."
    llm.chat([*first, answer, ChatMessage(role="user", content="More on [Doc_2]?")])
    again = llm.inner.chats[-1]
    assert again[1].content == "It is so [Doc_1]."
    assert again[2].content == "More on [Doc_1]?"
    assert again[0].content == llm.inner.chats[-2][0].content


class Cited(BaseModel):
    """A source."""

    source: str = ""


def cites_by_tool(body: dict[str, Any]) -> Any:
    text = "\n".join(str(one["content"]) for one in body["messages"])
    cited = json.dumps({"source": label_of_a(text)})
    if body.get("tools"):
        return ToolCall(body["tools"][0]["function"]["name"], cited)
    return cited


@pytest.fixture
def engine() -> EmulatedEngine:
    return EmulatedEngine(answer=cites_by_tool)


def served(engine: EmulatedEngine, **options: Any) -> ReuseLLM:
    bare = openai_like(*clients_of(engine.transport()), **options)
    llm = ReuseLLM(inner=bare, window_s=0, planner=ReusePlanner())
    llm.chat(chat("abc"))
    return llm


@pytest.mark.parametrize("function_calls", [False, True])
async def test_structured_answers_have_the_labels_given(engine, function_calls):
    llm = served(engine, is_function_calling_model=function_calls)
    template = PromptTemplate("{found}\n\nWhich?")
    assert llm.structured_predict(Cited, template, found=context("abc")).source == "[Doc_1]"
    assert llm.structured_predict(Cited, template, found=context("cab")).source == "[Doc_2]"
    answer = await llm.astructured_predict(Cited, template, found=context("cab"))
    assert answer.source == "[Doc_2]"
    *_, last = llm.stream_structured_predict(Cited, template, found=context("cab"))
    assert last.source == "[Doc_2]"


class Change(BaseModel):
    """An object of the user's with a field that a streamed answer has, too."""

    delta: str = ""


def test_a_users_object_is_not_taken_for_a_piece_of_an_answer():
    class Changes(CitingLLM):
        def stream_structured_predict(self, *args: Any, **kwargs: Any) -> Any:
            yield Change(delta="by 1 [Do")
            yield Change(delta="by 1 [Doc_1]")

    llm = ReuseLLM(inner=Changes(), window_s=0, planner=ReusePlanner())
    llm.chat(chat("abc"))
    template = PromptTemplate("{found}\n\nWhich?")
    pieces = [*llm.stream_structured_predict(Change, template, found=context("cab"))]
    assert [one.delta for one in pieces] == ["by 1 [Do", "by 1 [Doc_2]"]


async def test_tools_are_called_with_the_labels_given(engine):
    called: list[str] = []
    tool = FunctionTool.from_defaults(lambda source: called.append(source) or "ok", name="cite")
    llm = served(engine, is_function_calling_model=True)
    llm.predict_and_call([tool], chat_history=chat("abc"))
    llm.predict_and_call([tool], chat_history=chat("cab"))
    await llm.apredict_and_call([tool], chat_history=chat("cab"))
    assert called == ["[Doc_1]", "[Doc_2]", "[Doc_2]"]
    response = llm.chat_with_tools([tool], chat_history=chat("cab"))
    engine.requests.clear()
    result = ChatMessage(role="tool", content="ok", additional_kwargs={"tool_call_id": "1"})
    llm.chat([*chat("cab"), response.message, result])
    [request] = engine.requests
    [call] = request["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"source": "[Doc_1]"}


def test_blocks_of_an_answer_are_renamed_each_in_its_way():
    class Blocks(CitingLLM):
        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            label = label_of_a("\n".join(str(one.content) for one in messages))
            call = ToolCallBlock(tool_name="cite", tool_kwargs={"sources": [label]})
            return ChatResponse(
                message=ChatMessage(role="assistant", blocks=[TextBlock(text=label), call])
            )

    llm = ReuseLLM(inner=Blocks(), window_s=0)
    llm.chat(chat("abc"))
    text, call = llm.chat(chat("cab")).message.blocks
    assert isinstance(text, TextBlock)
    assert isinstance(call, ToolCallBlock)
    assert (text.text, call.tool_kwargs) == ("[Doc_2]", {"sources": ["[Doc_2]"]})


def test_wrong_arguments_are_named():
    with pytest.raises(InvalidRequestError, match="cited_nodes takes a list of NodeWithScore"):
        cited_nodes("[Doc_1]", "nodes")
    with pytest.raises(InvalidRequestError, match="not 7"):
        cited_nodes(7, letter_nodes("a"))
    assert cited_nodes("[Doc_2]", letter_nodes("a"), metadata_mode=MetadataMode.NONE) == []


@pytest.mark.parametrize(
    "carried",
    [5, "text", [], {"labels": 5}, {"labels": ["[Doc_1]"]}, {"labels": {"[Doc_2]": 5}}]
    + [{"labels": {"[Doc_2]": {"id": one}}} for one in ([], {}, None)],
)
def test_metadata_of_another_form_says_nothing_of_labels(carried):
    answer = CompletionResponse(text="See [Doc_2].", additional_kwargs={"ctxreuse": carried})
    found = letter_nodes("ab")
    assert cited_nodes(answer, found) == found[1:]
