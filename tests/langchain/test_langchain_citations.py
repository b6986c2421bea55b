"""Programs that show sources: answers stay as they are, and a label names its document anywhere."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_document_helpers import documents
from langchain_model_helpers import letters_in, model
from pydantic import PrivateAttr

from ctxreuse import PAPER_TEMPLATES, ReusePlanner, Templates
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.errors import InvalidRequestError
from langchain_ctxreuse import cited_documents, format_context

BY_ID = Templates(label="[Doc_{id}]")


def label_of(letter: str, templates: Templates = DEFAULT_TEMPLATES) -> str:
    return format_context(documents(letter), labels=True, templates=templates).split()[0]


def prompt(letters: str, templates: Templates = DEFAULT_TEMPLATES) -> str:
    return f"{format_context(documents(letters), labels=True, templates=templates)}\n\nWhich?"


class GivenModel(BaseChatModel):
    """Answers with the messages that it was given, and streams the chunks that it was given."""

    message: AIMessage = AIMessage("")
    chunks: list[AIMessageChunk] = []  # noqa: RUF012  # pydantic copies it
    _seen: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "given"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self._seen.append(messages)
        return ChatResult(generations=[ChatGeneration(message=self.message)])

    def _stream(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        for one in self.chunks:
            yield ChatGenerationChunk(message=one)

    async def _astream(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for one in self.chunks:
            yield ChatGenerationChunk(message=one)


A = label_of("a")
CALL = {"name": "note", "args": {"sources": [A]}, "id": A, "type": "tool_call"}
ANSWERS = [
    AIMessage(f"It is so {A}."),
    AIMessage([{"type": "thinking", "thinking": A}, {"type": ["text"], "text": A}, A]),
    AIMessage("", tool_calls=[CALL], additional_kwargs={"parsed": {"source": A}}),
    AIMessage(A, response_metadata={"ctxreuse": {"labels": {A: {"id": "id-b"}}}}),
    AIMessage("").model_copy(update={"content": {"text": A}}),
]


@pytest.mark.parametrize("given", ANSWERS)
async def test_an_answer_is_the_inner_models_own_whatever_labels_it_holds(given):
    wrapper = model(GivenModel(message=given))
    before = given.model_copy(deep=True)
    wrapper.invoke(prompt("abc"))
    answers = [
        wrapper.invoke(prompt("cab")),
        await wrapper.ainvoke(prompt("cab")),
        *wrapper.batch([prompt("cab"), prompt("bac")]),
    ]
    assert all(one is given for one in answers)
    assert given.model_copy(update={"id": None}) == before


@pytest.mark.parametrize("step", [1, 3, 100])
async def test_a_streamed_answer_is_the_inner_models_own_too(step):
    said = f"It is so {A}."
    chunks = [AIMessageChunk(said[at : at + step]) for at in range(0, len(said), step)]
    chunks.append(AIMessageChunk("", tool_call_chunks=[{**CALL, "args": A[:3], "index": 0}]))
    wrapper = model(GivenModel(chunks=chunks))
    wrapper.invoke(prompt("abc"))
    streamed = list(wrapper.stream(prompt("cab")))
    again = [one async for one in wrapper.astream(prompt("cab"))]
    for sent in (streamed, again):
        assert all(one is given for one, given in zip(sent, chunks, strict=False))
        assert "".join(one.text for one in sent) == said


@pytest.mark.parametrize("letters", ["abc", "cab", "dcab", "ccab"])
@pytest.mark.parametrize("templates", [DEFAULT_TEMPLATES, PAPER_TEMPLATES, BY_ID])
def test_a_label_names_its_document_in_whatever_order_the_model_sees_it(letters, templates, inner):
    wrapper = model(inner, planner=ReusePlanner(templates=templates))
    for one in ("abc", letters):
        wrapper.invoke(prompt(one, templates))
    shown = inner.calls[1].text
    label = label_of("a", templates)
    assert letters_in(shown).startswith("abc")
    assert f"{label} a says: " in shown
    assert cited_documents(
        f"It is so {label}.", documents(letters), templates=templates
    ) == documents("a")


def test_all_documents_with_a_label_are_cited_by_it():
    twice = documents("aba")
    assert cited_documents(A, twice) == [twice[0], twice[2]]
    assert cited_documents(AIMessage(f"It is so {A}."), documents("xyz")) == []
    with pytest.raises(InvalidRequestError, match="templates must be Templates"):
        cited_documents(A, twice, templates=float("nan"))


def test_documents_are_cited_by_labels_of_the_applications_own():
    found = [Document("text one", metadata={"n": 7}), Document("text two", metadata={"n": 8})]
    assert format_context(found, label=lambda one: f"[{one.metadata['n']}]") == (
        "[7] text one\n\n[8] text two"
    )
    assert cited_documents("So it is [8].", found, label=lambda one: f"[{one.metadata['n']}]") == [
        found[1]
    ]
    assert cited_documents("As 7 says.", found, label="n") == [found[0]]
    titled = "{n}: {page_content}"
    name = format_context(found[1:], titled, labels=True).split()[0]
    assert cited_documents(f"So {name}.", found, titled) == found[1:]
