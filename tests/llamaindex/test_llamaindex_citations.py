"""Programs that show sources: a label in an answer names the nodes that have it."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from block_labels import label
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llamaindex_helpers import RecordingLLM, letter_nodes, letter_text
from llamaindex_llm_helpers import City, context

from ctxreuse import Templates
from ctxreuse.errors import InvalidRequestError
from llamaindex_ctxreuse import ReuseLLM, cited_nodes

A, B, C = (label(letter_text(letter)) for letter in "abc")
TEXT = f"As {A}, [Doc_1] and {B[:3]}"
CALL = ToolCallBlock(tool_name="cite", tool_kwargs={"sources": [A]})
COMPLETIONS = [CompletionResponse(text=TEXT[:end], delta=TEXT[end - 1]) for end in range(1, 20)]
CHATS = [
    ChatResponse(message=ChatMessage(blocks=[TextBlock(text=one.text), CALL]), delta=one.delta)
    for one in COMPLETIONS
]
CITIES = [City(name=A[:3]), City(name=A)]


class Given(RecordingLLM):
    """Answers with the same objects each time, whole or piece by piece."""

    def chat(self, *args: Any, **kwargs: Any) -> ChatResponse:
        return CHATS[-1]

    async def achat(self, *args: Any, **kwargs: Any) -> ChatResponse:
        return CHATS[-1]

    def stream_chat(self, *args: Any, **kwargs: Any) -> Any:
        return (one for one in CHATS)

    async def astream_chat(self, *args: Any, **kwargs: Any) -> Any:
        return given(CHATS)

    def complete(self, *args: Any, **kwargs: Any) -> CompletionResponse:
        return COMPLETIONS[-1]

    async def acomplete(self, *args: Any, **kwargs: Any) -> CompletionResponse:
        return COMPLETIONS[-1]

    def stream_complete(self, *args: Any, **kwargs: Any) -> Any:
        return (one for one in COMPLETIONS)

    async def astream_complete(self, *args: Any, **kwargs: Any) -> Any:
        return given(COMPLETIONS)

    def structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        return CITIES[-1]

    def stream_structured_predict(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from CITIES


async def given(pieces: Any) -> AsyncIterator[Any]:
    for one in pieces:
        yield one


async def test_an_answer_is_the_inner_models_own_whatever_labels_it_holds():
    llm, template = ReuseLLM(inner=Given(), window_s=0), PromptTemplate("{found}\n\nWhich?")
    before = [one.model_copy(deep=True) for one in (*COMPLETIONS, *CHATS, *CITIES)]
    for letters in ("abc", "cab"):
        text = f"{context(letters)}\n\nWhich?"
        chat = [ChatMessage(role="user", content=text)]
        found = {"found": context(letters)}
        wholes = [
            (llm.complete(text), COMPLETIONS),
            (await llm.acomplete(text), COMPLETIONS),
            (llm.chat(chat), CHATS),
            (await llm.achat(chat), CHATS),
            (llm.structured_predict(City, template, **found), CITIES),
        ]
        streams = [
            (list(llm.stream_complete(text)), COMPLETIONS),
            ([one async for one in await llm.astream_complete(text)], COMPLETIONS),
            (list(llm.stream_chat(chat)), CHATS),
            ([one async for one in await llm.astream_chat(chat)], CHATS),
            (list(llm.stream_structured_predict(City, template, **found)), CITIES),
        ]
        assert all(answer is said[-1] for answer, said in wholes)
        for pieces, said in streams:
            assert list(map(id, pieces)) == list(map(id, said))
    assert [*COMPLETIONS, *CHATS, *CITIES] == before


def test_a_label_names_its_node_in_every_form_of_an_answer():
    nodes = letter_nodes("cab")
    for said, cited in ((f"It is so {B}, as {C} says.", "bc"), (f"See [{A[1:-1]}; {C[1:]}", "ac")):
        answers = [
            said,
            CompletionResponse(text=said),
            ChatResponse(message=ChatMessage(role="assistant", content=said)),
        ]
        for answer in answers:
            found = cited_nodes(answer, nodes, metadata_mode=MetadataMode.NONE)
            assert [one.node.node_id for one in found] == [f"id-{letter}" for letter in cited]
    assert cited_nodes(ChatResponse(message=ChatMessage(blocks=[CALL])), nodes) == []


def test_the_metadata_that_the_model_was_shown_is_part_of_what_a_label_names():
    nodes = letter_nodes("ab")
    shown = label(f"source: b.txt\n\n{letter_text('b')}")
    assert cited_nodes(shown, nodes) == nodes[1:]
    assert cited_nodes(shown, nodes, metadata_mode=MetadataMode.NONE) == []


def test_nodes_that_share_a_label_are_cited_together():
    nodes = [NodeWithScore(node=TextNode(id_=name, text="the same")) for name in "xy"]
    assert cited_nodes(label("the same"), nodes) == nodes
    assert cited_nodes("(y)", nodes, templates=Templates(label="[{id}]")) == nodes[1:]


def test_wrong_arguments_are_named():
    with pytest.raises(InvalidRequestError, match="cited_nodes takes a list of NodeWithScore"):
        cited_nodes(A, "nodes")
    with pytest.raises(InvalidRequestError, match="not 7"):
        cited_nodes(7, letter_nodes("a"))
