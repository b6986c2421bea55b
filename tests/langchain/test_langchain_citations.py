"""Programs that show sources: a label in an answer names the document that they gave it to."""

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_model_helpers import text_of
from pydantic import BaseModel, Field, PrivateAttr

from ctxreuse import ReusePlanner, Templates
from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, cited_documents, format_context
from langchain_ctxreuse.chat_model import answer_stream, model_answer

pytestmark = pytest.mark.usefixtures("paper_words")

Says = Callable[[dict[str, str], str], str]


def labels_of(text: str) -> dict[str, str]:
    """Return, for each letter, the label under which a prompt shows its document."""
    found = re.findall(r"(\[Doc_\d+\]) ([a-z]) says", text)
    return {letter: label for label, letter in found}


def cites_a(labels: dict[str, str], text: str) -> str:
    return f"It is so {labels['a']}."


class CitingModel(BaseChatModel):
    """Answers what `says` returns for the labels it was shown; streams it letter by letter."""

    says: Says = Field(default=cites_a)
    message: Callable[[str], AIMessage] = AIMessage
    calls_tool: bool = False
    step: int = 1
    _seen: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    @property
    def seen(self) -> list[list[BaseMessage]]:
        return self._seen

    @property
    def _llm_type(self) -> str:
        return "citing"

    def _text(self, messages: list[BaseMessage]) -> str:
        self._seen.append(messages)
        text = text_of(messages)
        return self.says(labels_of(text), text)

    def _answer(self, messages: list[BaseMessage]) -> AIMessage:
        text = self._text(messages)
        if not self.calls_tool:
            return self.message(text)
        call = {"name": "note", "args": {"sources": [text], "n": 1}, "id": "1"}
        raw = {"id": "1", "function": {"name": "note", "arguments": json.dumps(call["args"])}}
        return AIMessage("", tool_calls=[call], additional_kwargs={"tool_calls": [raw]})

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._answer(messages))])

    def _chunks(self, messages: list[BaseMessage]) -> Iterator[ChatGenerationChunk]:
        text = self._text(messages)
        if self.calls_tool:
            text = json.dumps({"sources": [text], "n": 1})
        for start in range(0, len(text), self.step):
            piece = text[start : start + self.step]
            if self.calls_tool:
                call = {"name": None, "args": piece, "id": None, "index": 0}
                if not start:
                    call |= {"name": "note", "id": "1"}
                yield ChatGenerationChunk(message=AIMessageChunk("", tool_call_chunks=[call]))
            else:
                yield ChatGenerationChunk(message=AIMessageChunk(piece))

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in self._chunks(messages):
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in self._chunks(messages):
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


def documents(letters: str) -> list[Document]:
    return [Document(f"{letter} says: {letter * 400}", id=f"id-{letter}") for letter in letters]


def prompt(letters: str, asked: str = "Which?") -> str:
    return f"{format_context(documents(letters))}\n\n{asked}"


def wrapped(**fields: Any) -> ReuseChatModel:
    """Return a model that has cached the documents a, b, c in this order."""
    model = ReuseChatModel(inner=CitingModel(**fields), window_s=0, planner=ReusePlanner())
    model.invoke(prompt("abc"))
    model.inner.seen.clear()
    return model


def shown(text: str, letters: str) -> str:
    """Return the letter that an application shows as the source of an answer."""
    [number] = re.findall(r"\[Doc_(\d+)\]", text)
    return documents(letters)[int(number) - 1].page_content[0]


def is_reordered(model: ReuseChatModel) -> bool:
    return "priority order" in text_of(model.inner.seen[-1])


class TestWholeAnswers:
    @pytest.mark.parametrize("letters", ["abc", "cab", "bca", "cba", "dcab"])
    def test_a_label_names_the_document_at_that_position(self, letters):
        model = wrapped()
        answer = model.invoke(prompt(letters))
        assert shown(str(answer.content), letters) == "a"
        assert is_reordered(model) == (letters != "abc")
        assert cited_documents(answer, documents(letters)) == documents("a")

    @pytest.mark.parametrize("letters", ["ccab", "cbcac", "bbbba", "aab"])
    def test_so_it_does_where_two_searches_have_found_the_same_document(self, letters):
        model = wrapped()
        plain = model.inner.invoke(prompt(letters))
        answer = model.invoke(prompt(letters))
        for one in (plain, answer, answer.model_copy(update={"response_metadata": {}})):
            assert shown(str(one.content), letters) == "a"
            assert cited_documents(one, documents(letters)) == documents("a")
        sources = answer.response_metadata["ctxreuse"]["labels"].values()
        assert {one["id"] for one in sources} == {f"id-{letter}" for letter in letters}
        for one in sources:
            assert documents(letters)[one["rank"]].id == one["id"]
        asked = str(prompt(letters))
        turns = [HumanMessage(asked), answer, HumanMessage("And [Doc_2]?")]
        model.invoke(turns)
        seen = model.inner.seen[-1]
        assert labels_of(text_of(seen[:1]))[letters[1]] in str(seen[2].content)
        assert labels_of(text_of(seen[:1]))["a"] in str(seen[1].content)

    async def test_so_it_does_asynchronously_and_in_batches(self):
        model = wrapped()
        given = ["cab", "bca", "cba", "abc"]
        prompts = [prompt(letters) for letters in given]
        answers = model.batch(prompts[:2]) + await model.abatch(prompts[2:])
        for answer, letters in zip(answers, given, strict=True):
            assert shown(str(answer.content), letters) == "a"
        answer = await model.ainvoke(prompt("cab"))
        assert shown(str(answer.content), "cab") == "a"

    def test_the_answer_says_what_its_labels_stand_for(self):
        model = wrapped()
        answer = model.invoke(prompt("cab"))
        assert answer.response_metadata["ctxreuse"] == {
            "labels": {
                "[Doc_1]": {"id": "id-c", "rank": 0, "sent": "[Doc_3]"},
                "[Doc_2]": {"id": "id-a", "rank": 1, "sent": "[Doc_1]"},
                "[Doc_3]": {"id": "id-b", "rank": 2, "sent": "[Doc_2]"},
            }
        }
        assert json.loads(json.dumps(answer.response_metadata)) == answer.response_metadata

    def test_a_cached_answer_says_the_same(self):
        model = wrapped()
        model.cache = InMemoryCache()
        asked = prompt("cab")
        first = model.invoke(asked)
        second = model.invoke(asked)
        assert len(model.inner.seen) == 1
        assert second.content == first.content
        assert second.response_metadata == first.response_metadata

    def test_all_ways_to_cite_are_read(self):
        def says(labels: dict[str, str], text: str) -> str:
            a, b = labels["a"], labels["b"]
            return f"[{a[1:-1]}, {b[1:-1]}] and {a[1:-1]}; {a}{b}. {a[1:-1]}.pdf [Doc_99]"

        answer = wrapped(says=says).invoke(prompt("cab"))
        assert answer.content == ("[Doc_2, Doc_3] and Doc_2; [Doc_2][Doc_3]. Doc_1.pdf [Doc_99]")

    @pytest.mark.parametrize("step", [1, 3, 100])
    def test_labels_in_markdown_are_read(self, step):
        model = wrapped(says=lambda labels, text: labels["a"].replace("_", "\\_"), step=step)
        streamed = "".join(str(one.content) for one in model.stream(prompt("cab")))
        answer = model.invoke(prompt("cab"))
        assert streamed == answer.content == "[Doc\\_2]"
        assert cited_documents(answer, documents("cab")) == documents("a")

    def test_labels_in_tool_calls_are_read_in_markdown_too(self):
        answer = wrapped(calls_tool=True).invoke(prompt("cab"))
        assert answer.tool_calls[0]["args"] == {"sources": ["It is so [Doc_2]."], "n": 1}
        [raw] = answer.additional_kwargs["tool_calls"]
        assert json.loads(raw["function"]["arguments"]) == answer.tool_calls[0]["args"]

        says = lambda labels, text: labels["a"].replace("_", "\\_")  # noqa: E731
        answer = wrapped(says=says, calls_tool=True).invoke(prompt("cab"))
        raw = answer.additional_kwargs["tool_calls"][0]["function"]["arguments"]
        assert json.loads(raw) == answer.tool_calls[0]["args"]
        assert answer.tool_calls[0]["args"]["sources"] == ["[Doc\\_2]"]

    def test_parts_and_contents_of_other_kinds_stay(self):
        thought = {"type": "thinking", "thinking": "[Doc_1]", "signature": "x"}
        model = wrapped(message=lambda text: AIMessage([thought, {"type": "text", "text": text}]))
        answer = model.invoke(prompt("cab"))
        assert answer.content == [thought, {"type": "text", "text": "It is so [Doc_2]."}]
        odd = {"type": "text", "text": "[Doc_1]"}
        model = wrapped(message=lambda _: AIMessage("").model_copy(update={"content": odd}))
        assert model.invoke(prompt("cab")).content == odd
        assert is_reordered(model)
        model = ReuseChatModel(inner=CitingModel(says=lambda labels, text: "[Doc_1]?"), window_s=0)
        answer = model.invoke("Which?")
        assert (answer.content, answer.response_metadata) == ("[Doc_1]?", {})

    @pytest.mark.parametrize("kind", [["text"], {"a": 1}, None, 5])
    def test_a_part_of_a_kind_that_nobody_knows_stays_beside_the_others(self, kind):
        odd = {"type": kind, "text": "[Doc_1]"}
        model = wrapped(message=lambda text: AIMessage([odd, {"type": "text", "text": text}]))
        answer = model.invoke(prompt("cab"))
        assert answer.content[1] == {"type": "text", "text": "It is so [Doc_2]."}
        assert answer.content[0]["type"] == kind
        assert model.faults == 0

    def test_structured_output_has_the_labels_given(self):
        class Cited(BaseModel):
            source: str

        def parsed(text: str) -> AIMessage:
            return AIMessage("", additional_kwargs={"parsed": Cited(source=text)})

        answer = wrapped(message=parsed).invoke(prompt("cab"))
        assert answer.additional_kwargs["parsed"] == Cited(source="It is so [Doc_2].")

    def test_labels_of_templates_of_ones_own_are_read(self):
        templates = Templates(label="<{ordinal}>", block="{label} {text}")
        says = lambda labels, text: re.findall(r"(<\d+>) a", text)[0]  # noqa: E731
        planner = ReusePlanner(templates=templates)
        model = ReuseChatModel(inner=CitingModel(says=says), window_s=0, planner=planner)
        for letters in ("abc", "cab"):
            context = format_context(documents(letters), templates)
            answer = model.invoke(f"{context}\n\nWhich?")
        assert answer.content == "<2>"
        assert cited_documents(answer, documents("cab"), templates) == documents("a")

    def test_a_number_is_no_label(self):
        templates = Templates(label="{ordinal}.")
        model = ReuseChatModel(
            inner=CitingModel(says=lambda labels, text: "In 1.5 years: 3. 2. 1."),
            window_s=0,
            planner=ReusePlanner(templates=templates),
        )
        for letters in ("abc", "cab"):
            answer = model.invoke(f"{format_context(documents(letters), templates)}\n\nWhich?")
        assert answer.content == "In 1.5 years: 3. 2. 1."
        labels = answer.response_metadata["ctxreuse"]["labels"]
        assert [labels[f"{n}."]["id"] for n in (1, 2, 3)] == ["id-a", "id-b", "id-c"]
        assert [labels[f"{n}."]["rank"] for n in (1, 2, 3)] == [1, 2, 0]


class TestStreams:
    @pytest.mark.parametrize("step", [1, 2, 3, 5, 100])
    def test_a_streamed_answer_has_the_labels_given(self, step):
        model = wrapped(step=step)
        chunks = list(model.stream(prompt("cab")))
        assert "".join(str(one.content) for one in chunks) == "It is so [Doc_2]."
        assert all("Doc_1" not in str(one.content) for one in chunks)
        whole = chunks[0]
        for one in chunks[1:]:
            whole += one
        assert whole.response_metadata["ctxreuse"]["labels"]["[Doc_2]"]["id"] == "id-a"

    async def test_so_it_has_asynchronously_with_a_label_at_its_end(self):
        model = wrapped(says=lambda labels, text: f"See {labels['a'][:-1]}")
        chunks = [one async for one in model.astream(prompt("cab"))]
        assert "".join(str(one.content) for one in chunks) == "See [Doc_2"

    def test_streamed_tool_calls_have_the_labels_given(self):
        model = wrapped(calls_tool=True)
        chunks = list(model.stream(prompt("cab")))
        whole = chunks[0]
        for one in chunks[1:]:
            whole += one
        assert whole.tool_calls[0]["args"] == {"sources": ["It is so [Doc_2]."], "n": 1}
        assert (whole.tool_calls[0]["name"], whole.tool_calls[0]["id"]) == ("note", "1")

    def test_a_raw_tool_call_gets_no_arguments_that_the_server_did_not_send(self):
        raw = {"index": 0, "id": "1", "function": {"name": "note"}}

        class Raw(CitingModel):
            def _chunks(self, messages: list[BaseMessage]) -> Iterator[ChatGenerationChunk]:
                self._text(messages)
                message = AIMessageChunk("", additional_kwargs={"tool_calls": [raw]})
                yield ChatGenerationChunk(message=message)

        model = ReuseChatModel(inner=Raw(), window_s=0)
        list(model.stream(prompt("abc")))
        first, *_ = model.stream(prompt("cab"))
        assert first.additional_kwargs == {"tool_calls": [raw]}
        assert is_reordered(model)

    @pytest.mark.parametrize("end", [" [Doc_2", " Doc_1", " for vitamin D", " [Doc_1]."])
    @pytest.mark.parametrize("way", ["invoke", "ainvoke", "chunkless", "stream"])
    async def test_callbacks_hear_the_answer_to_its_end(self, way, end):
        heard: list[str] = []

        class Listener(BaseCallbackHandler):
            def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
                heard.append(token)

            def on_llm_end(self, response: Any, **kwargs: Any) -> None:
                heard.append(f" END {response.generations[0][0].text}")

        class Telling(CitingModel):
            def _told(self, messages: Any, run_manager: Any) -> tuple[list[Any], Any]:
                text = self._text(messages)
                chunks = [ChatGenerationChunk(message=AIMessageChunk(one)) for one in text]
                options = [{} if way == "chunkless" else {"chunk": one} for one in chunks]
                told = [
                    run_manager.on_llm_new_token(one.text, **option)
                    for one, option in zip(chunks, options, strict=True)
                ]
                return told, ChatResult(generations=[ChatGeneration(message=AIMessage(text))])

            def _generate(
                self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any
            ) -> Any:
                return self._told(messages, run_manager)[1]

            async def _agenerate(
                self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any
            ) -> Any:
                told, result = self._told(messages, run_manager)
                for one in told:
                    await one
                return result

        model = ReuseChatModel(inner=Telling(says=lambda labels, text: f"Good{end}"), window_s=0)
        model.invoke(prompt("abc"))
        config: Any = {"callbacks": [Listener()]}
        if way == "ainvoke":
            text = (await model.ainvoke(prompt("cab"), config)).text
        elif way == "stream":
            text = "".join(one.text for one in model.stream(prompt("cab"), config))
        else:
            text = model.invoke(prompt("cab"), config).text
        assert text == "Good [Doc_2]." or end != " [Doc_1]."
        assert "".join(heard) == f"{text} END {text}"

    async def test_events_of_all_versions_have_the_labels_given(self):
        model = wrapped()
        events = [one async for one in model.astream_events(prompt("cab"), version="v2")]
        texts = [one["data"]["chunk"].content for one in events if "stream" in one["event"]]
        assert "".join(texts) == "It is so [Doc_2]."
        assert events[-1]["data"]["output"].content == "It is so [Doc_2]."
        model = wrapped()
        stream = model.stream_events(prompt("cab"), version="v3")
        assert str(stream.output.text) == "It is so [Doc_2]."


class TestConversations:
    def test_answers_and_tool_calls_go_back_to_the_model_as_it_gave_them(self):
        model = wrapped()
        first = HumanMessage(prompt("cab"))
        answer = model.invoke([first])
        assert answer.content == "It is so [Doc_2]."
        model.invoke([first, answer, HumanMessage("And?")])
        again = model.inner.seen[-1]
        assert again[0] == model.inner.seen[-2][0]
        assert again[1].content == "It is so [Doc_1]."

        model = wrapped(calls_tool=True)
        first = HumanMessage(prompt("cab"))
        answer = model.invoke([first])
        model.invoke([first, answer, ToolMessage("noted [Doc_2]", tool_call_id="1")])
        again = model.inner.seen[-1]
        assert again[1].tool_calls[0]["args"]["sources"] == ["It is so [Doc_1]."]
        assert again[2].content == "noted [Doc_2]"

    def test_what_a_user_asks_about_a_source_reaches_the_model_under_its_label(self):
        model = wrapped(says=lambda labels, text: ["", *re.findall(r"about \[Doc_\d+\]", text)][-1])
        first = HumanMessage(prompt("cab", "What about [Doc_2]?"))
        rules = SystemMessage("Cite like [Doc_1].")
        model.invoke([rules, HumanMessage(prompt("abc"))])
        answer = model.invoke([rules, first])
        assert answer.content == "about [Doc_2]"
        assert "What about [Doc_1]?" in text_of(model.inner.seen[-1])
        assert model.inner.seen[-1][0] == rules
        answer = model.invoke([rules, first, answer, HumanMessage("More about [Doc_3]!")])
        assert answer.content == "about [Doc_3]"
        assert "More about [Doc_2]!" in text_of(model.inner.seen[-1])

    def test_a_source_of_an_earlier_turn_does_not_pass_for_one_of_this(self):
        model = wrapped()
        config: Any = {"configurable": {"thread_id": "t"}}
        first = HumanMessage(prompt("cab"))
        answer = model.invoke([first], config)
        assert answer.content == "It is so [Doc_2]."
        second = HumanMessage(prompt("xyz", "And?"))
        answer = model.invoke([first, answer, second], config)
        assert labels_of(model.inner.seen[-1][2].content) == {
            "x": "[Doc_4]",
            "y": "[Doc_5]",
            "z": "[Doc_6]",
        }
        # a is the first document that the model has seen: no number of x, y, z
        labels = answer.response_metadata["ctxreuse"]["labels"]
        assert answer.content == "It is so [Doc_4]."
        assert labels["[Doc_4]"] == {"id": "id-a", "sent": "[Doc_1]"}
        assert labels["[Doc_1]"] == {"id": "id-x", "rank": 0, "sent": "[Doc_4]"}
        every = [*documents("xyz"), *documents("cab")]
        assert cited_documents(answer, every) == documents("a")
        assert cited_documents(answer, documents("xyz")) == []

    def test_a_source_that_a_turn_finds_again_has_the_number_of_this_turn(self):
        model = wrapped()
        config: Any = {"configurable": {"thread_id": "t"}}
        first = HumanMessage(prompt("cab"))
        answer = model.invoke([first], config)
        answer = model.invoke([first, answer, HumanMessage(prompt("xa", "And?"))], config)
        assert "Please refer to [Doc_1]" in text_of(model.inner.seen[-1])
        assert answer.content == "It is so [Doc_2]."
        assert cited_documents(answer, documents("xa")) == documents("a")


def test_documents_that_are_planned_keep_the_labels_they_carry():
    class Fixed(BaseRetriever):
        letters: str = "abc"

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            return documents(self.letters)

    planner, inner = ReusePlanner(), CitingModel()
    model = ReuseChatModel(inner=inner, window_s=0, planner=planner)
    for letters in ("abc", "cab"):
        retriever = ReuseRetriever(retriever=Fixed(letters=letters), planner=planner)
        found = retriever.invoke("Which?")
        answer = model.invoke(f"{format_context(found)}\n\nWhich?")
        cited = cited_documents(answer, found)
        assert [one.page_content[0] for one in cited] == ["a"]


def test_a_fault_of_ours_lets_an_answer_through(monkeypatch):
    def fails(*args: Any) -> None:
        raise RuntimeError("a fault")

    model = wrapped()
    monkeypatch.setattr(model_answer.ModelAnswer, "_whole", fails)
    monkeypatch.setattr(answer_stream.AnswerStream, "chunk", fails)
    assert model.invoke(prompt("cab")).content == "It is so [Doc_1]."
    assert "".join(one.text for one in model.stream(prompt("cab"))) == "It is so [Doc_1]."
    assert model.faults > 1


@pytest.mark.parametrize(
    "carried",
    [5, "text", [], {"labels": 5}, {"labels": ["[Doc_1]"]}, {"labels": {"[Doc_2]": 5}}]
    + [{"labels": {"[Doc_2]": {"id": one}}} for one in ([], {}, None)],
)
def test_metadata_of_another_form_says_nothing_of_labels(carried):
    answer = AIMessage("It is so [Doc_2].", response_metadata={"ctxreuse": carried})
    assert cited_documents(answer, documents("ab")) == documents("b")


@pytest.mark.parametrize("rank", [1.0, True, None, [], "1"])
def test_a_rank_of_another_form_is_a_position_or_none(rank):
    twice = [Document("first", id="x"), Document("second", id="x")]
    labels = {"[Doc_1]": {"id": "x", "rank": rank}}
    answer = AIMessage("It is so [Doc_1].", response_metadata={"ctxreuse": {"labels": labels}})
    assert cited_documents(answer, twice) == [twice[rank == 1]]
