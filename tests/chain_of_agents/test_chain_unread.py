"""What was not read: no answer from nothing, no note lost, nothing cut without a word."""

import json
import logging
import pickle
import re
from itertools import product
from typing import Any

import httpx
import pytest
from chain_helpers import (
    Agents,
    InTurn,
    SaysModel,
    chain_of,
    client_of,
    is_managers,
    notes_in,
    pool_of,
    question,
)
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk
from llamaindex_helpers import RecordingLLM
from openai import APIStatusError

from chain_of_agents import ChainOfAgents, UnreadError
from chain_of_agents.agent_memory import ConversationKey
from chain_of_agents.trace.steps import is_too_long
from ctxreuse import ContextBlock
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool

MODES = pytest.mark.parametrize("mode", ["sequential", "parallel"])


def worker_text(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def digits(text: str) -> list[int]:
    """Return a token for each word, digit and sign: many tokenizers take digits one by one."""
    return [ord(one[0]) for one in re.findall(r"[^\W\d]+|\d|[^\w\s]", text)]


TABLE = "\n".join(f"{n},{n * 7919 % 9973},{n * 104729 % 99991}" for n in range(2_500))


def refusal(status: int, body: Any) -> Exception:
    request = httpx.Request("POST", "http://e/v1/chat/completions")
    response = httpx.Response(status, request=request)
    return APIStatusError("refused", response=response, body=body)


SAID_WHERE_NOTHING_IS = [
    "There is nothing relevant in this part.",
    "[GNEW] does not mention who built the Maria Pia bridge.",
    "Sorry, I could not find out who built the Maria Pia bridge.",
    "None of the documents helps to answer the question.",
    "Note: Nothing relevant.",
    "Nichts Relevantes.",
    "\u6ca1\u6709\u76f8\u5173\u5185\u5bb9",
    "n.a.",
]


class TestNothingRead:
    @MODES
    def test_where_all_workers_fail_the_manager_is_not_asked(self, mode):
        engine = EmulatedEngine(
            fail=lambda number, body: None if is_managers(body["messages"]) else 503
        )
        with pytest.raises(UnreadError) as raised:
            chain_of(engine, mode=mode, packing="single").invoke(question(3))
        assert str(raised.value).startswith(
            "none of the documents was read, so the manager was not asked: 3 of 3 calls failed, "
            "the first one because the engine at engine did not answer: status 503"
        )
        trace = raised.value.trace
        assert [step.outcome for step in trace.steps] == ["failed"] * 3
        assert len(trace.unread) == 3
        assert trace.read_share == 0
        assert not any(is_managers(body["messages"]) for body in engine.requests)
        again = pickle.loads(pickle.dumps(raised.value))
        assert (str(again), again.trace) == (str(raised.value), trace)

    @MODES
    def test_an_answer_from_less_than_min_read_is_an_error(self, mode):
        def fail(number: int, body: dict[str, Any]) -> int | None:
            read = re.search(r"Document (\d) says", worker_text(body))
            return 503 if read and read[1] in "012" else None

        engine = EmulatedEngine(fail=fail)
        with pytest.raises(UnreadError, match="25 % of the documents' tokens were read, and min_r"):
            chain_of(engine, mode=mode, packing="single").invoke(question(4))
        answer = chain_of(engine, mode=mode, packing="single", min_read=0.2).invoke(question(4))
        assert answer == "OK."
        assert 0.24 < answer.trace.read_share < 0.26

    def test_what_was_not_read_is_said_where_the_answer_is_given(self, caplog):
        def fail(number: int, body: dict[str, Any]) -> int | None:
            return 503 if "Document 1 says" in worker_text(body) else None

        documents = [{"id": n, "text": f"Document {n} says so. " * 20} for n in range(4)]
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            answer = chain_of(EmulatedEngine(fail=fail), packing="single").invoke(
                question(documents=documents)
            )
        assert answer.trace.unread == (1,)
        assert "an answer rests on 75 % of its documents' tokens" in caplog.messages[-1]
        assert "says so" not in caplog.text

    @MODES
    @pytest.mark.parametrize("documents", [[], [""], [" \n", {"id": 1, "text": ""}]])
    def test_no_documents_are_no_reason_to_ask_the_manager(self, mode, documents):
        model = SaysModel()
        for ask in (
            lambda chain: chain.invoke(question(documents=documents)),
            lambda chain: list(chain.stream(question(documents=documents))),
        ):
            wanted = "no text in documents" if documents else "documents is empty"
            with pytest.raises(InvalidRequestError, match=wanted):
                ask(ChainOfAgents(llm=model, mode=mode))
        assert model.prompts == []


class TestBusyEngines:
    def test_some_seconds_of_a_restarting_engine_do_not_fail_a_chain(self):
        """The pool that a chain makes asks more often than one for single requests."""
        failed: dict[str, int] = {}

        def fail(number: int, body: dict[str, Any]) -> int | None:
            key = json.dumps(body["messages"])
            failed[key] = failed.get(key, 0) + 1
            return 503 if failed[key] <= 4 else None

        engine = EmulatedEngine(fail=fail)
        chain = ChainOfAgents(
            llm="http://engine", http_client=client_of(engine), backoff_s=0.001, failures=100
        )
        assert chain.invoke(question(2)).trace.failures == ()

    def test_an_engine_that_says_nothing_is_asked_elsewhere(self):
        mute = EmulatedEngine(answer=lambda body: "" if not is_managers(body["messages"]) else "A")
        engines = [mute, EmulatedEngine(answer="A note.")]
        chain = chain_of(*engines, mode="parallel", packing="single", workers=4)
        answer = chain.invoke(question(4))
        assert answer.trace.failures == ()
        assert {step.replica for step in answer.trace.workers} == {"e1"}


class TestTooLongForTheModel:
    @MODES
    def test_a_table_of_numbers_is_read_whole(self, mode):
        """Four bytes are no token there: the engine refuses, and smaller parts are sent."""
        engine = EmulatedEngine(answer="A note.", max_model_len=4_000, tokenize=digits)
        chain = chain_of(engine, mode=mode, workers=4, note_tokens=64, answer_tokens=64)
        answer = chain.invoke({"question": "Which?", "documents": [{"id": "t", "text": TABLE}]})
        assert answer.trace.failures == ()
        assert answer.trace.read_share == 1
        read = "\n".join(
            re.sub(r"\[\w+\] ", "", worker_text(body).rpartition("\n\nQuestion:")[0]).partition(
                "\n\nNote of the readers"
            )[0]
            for body in engine.requests
            if not is_managers(body["messages"])
            and len(engine.prompt_tokens(body["messages"])) <= 4_000
        )
        assert set(TABLE.split()) <= set(read.split())
        assert len(engine.requests) > len(answer.trace.steps), "nothing was refused"

    @MODES
    def test_a_document_is_cut_once_whatever_else_is_asked_in_whichever_chain(self, mode):
        """Denser documents, longer questions, other chains and processes move no cut."""
        engine = EmulatedEngine(answer="A note.", max_model_len=4_000, tokenize=digits)

        def chain():  # another one has learnt nothing, as in another process
            return chain_of(engine, mode=mode, note_tokens=64, answer_tokens=64)

        log = [f"{n}: line of the log that tells of mill {n * 31 % 97}" for n in range(2_372)]
        read = ["\n".join(log), "A sentence about something. " * 900, TABLE, "n" * 9_000]
        first, computed = chain(), []
        for asks, documents, words in (
            (first, read[:1], "Which?"),
            (first, read[1:], "Which else?"),
            (first, read[:1], "And which? " * 100),
            (chain(), read[1::-1], "When?"),
            (chain(), read[:1:-1], "Why?"),
            (first, read, "Who?"),
        ):
            before = engine.usage.prefilled_tokens
            trace = asks.invoke({"question": words, "documents": documents}).trace
            computed.append((engine.usage.prefilled_tokens - before) / len(trace.steps))
        asked = len(digits("And which? " * 100))
        assert max(computed[3:]) < 80, "the question, the note and the words around them"
        assert computed[2] < asked + 80
        assert min(computed[:2]) > 500
        for line in log:  # whole, and so behind a label, a line's end or a part's beginning
            assert any(f"{line}\n" in worker_text(body) for body in engine.requests), line

    @MODES
    def test_of_a_document_that_grows_each_engine_computes_what_is_new(self, mode):
        engines = [EmulatedEngine(answer="A note.", max_model_len=2_000) for _ in range(3)]
        chain = ChainOfAgents(pool_of(*engines), 9, mode=mode, note_tokens=64, answer_tokens=64)
        for conversation, named in product((None, "c"), (False, True)):
            computed = []
            for length in (1_600, 1_700, 1_800):
                text = "".join(f"{n} {conversation} {named}: mill {n}.\n" for n in range(length))
                document = {"id": "log", "text": text} if named else text
                before = sum(engine.usage.prefilled_tokens for engine in engines)
                asked = {"question": f"What of {length}?", "documents": [document]}
                trace = chain.invoke(asked | {"conversation_id": conversation}).trace
                after = sum(engine.usage.prefilled_tokens for engine in engines)
                computed.append((after - before) / len(trace.steps))
            assert computed[0] > 500
            assert max(computed[1:]) < 300, "the question, the last piece and what is new"

    def test_a_manager_reads_shorter_notes_where_the_model_has_no_room(self):
        note = " ".join(f"{n * 7919 % 9973}," for n in range(60))
        engine = EmulatedEngine(answer=note, max_model_len=3_000, tokenize=digits)
        chain = chain_of(engine, mode="parallel", packing="single", answer_tokens=64)
        manager = chain.invoke(question(20)).trace.steps[-1]
        assert manager.remark == "notes were cut to fit the model's context"

    def test_an_engine_that_finds_everything_too_long_is_not_asked_without_end(self):
        engine = EmulatedEngine(answer="A note.", max_model_len=1)
        chain = chain_of(engine, context_window=8_192, mode="parallel", min_read=0)
        with pytest.raises(UnreadError, match="maximum context length is 1 token"):
            chain.invoke({"question": "Which?", "documents": ["word " * 5_000]})
        assert len(engine.requests) < 64

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            (400, "This model's maximum context length is 300 tokens."),
            (
                400,
                "The decoder prompt (length 400) is longer than the maximum model length of 300.",
            ),
            (400, "The input (400 tokens) is longer than the model's context length (300 tokens)."),
            (400, "request (400 tokens) exceeds the available context size (300 tokens)"),
            (422, "Input validation error: `inputs` must have less than 300 tokens. Given: 400"),
            (422, "`inputs` tokens + `max_new_tokens` must be <= 300. Given: 400 `inputs` tokens"),
            (400, "input length 400 exceeds session_len 300"),
            (400, "prompt too long; exceeded max context length by 3 tokens"),
            (413, "Payload Too Large"),
        ],
    )
    def test_a_segment_is_too_long_in_the_words_of_any_server(self, status, words):
        assert is_too_long(refusal(status, {"message": words}))
        assert is_too_long(refusal(status, words)), "an error that is a text"
        assert not is_too_long(refusal(500, words))

    @pytest.mark.parametrize(
        "words", ["max_tokens must be at least 1, got 0.", "Invalid 'user': string too long.", ""]
    )
    def test_other_refusals_are_not_read_in_parts(self, words):
        assert not is_too_long(refusal(400, words))

    def test_langchain_models_that_refuse_are_asked_for_parts_too(self):
        class TooLongError(ValueError):
            status_code = 400
            body = {"message": "prompt is too long: 9 tokens > 8 maximum"}  # noqa: RUF012

        def says(prompt: str) -> Any:
            if prompt.startswith("Several readers"):
                return "The answer."
            return TooLongError() if prompt.count("Document") > 20 else "A note."

        answer = ChainOfAgents(llm=SaysModel(says=says), workers=1).invoke(question(4))
        assert answer.trace.failures == ()
        assert all("in parts" in step.remark for step in answer.trace.workers)


class TestNotes:
    def test_a_worker_that_finds_nothing_replaces_no_note(self):
        answers = iter(["[KQTZ]: 1877.", "Nothing relevant.", "**Nothing relevant**", "Answer."])
        agents = Agents(lambda messages: next(answers), workers=3)
        trace = agents.run(["a", "b", "c"])
        assert notes_in(agents.model.prompts[-1][-1]["content"]) == ["[KQTZ]: 1877."]
        assert [step.remark for step in trace.workers] == [
            "",
            *["it found nothing; the note before it stands"] * 2,
        ]

    def shown_to_the_manager(self, notes, question="Which?"):
        answers = iter([*notes, "Answer."])
        agents = Agents(lambda messages: next(answers), workers=len(notes), note_tokens=100)
        agents.run(list("abc"[: len(notes)]), question)
        return agents.model.prompts[-1][-1]["content"]

    def test_what_stands_behind_a_nothing_is_added(self):
        said = ["[KQTZ]: 1877.", "Nothing relevant here, but [KQTZ] is in Porto."]
        shown = self.shown_to_the_manager(said)
        assert "1877." in shown
        assert "is in Porto." in shown

    @pytest.mark.parametrize("said", SAID_WHERE_NOTHING_IS)
    def test_a_nothing_in_any_words_replaces_no_note(self, said):
        note = "[KQTZ]: The Maria Pia bridge was built by Gustave Eiffel in 1877."
        shown = self.shown_to_the_manager([note, said, said], "Who built the Maria Pia bridge?")
        assert note in shown
        assert shown.count(said) <= 1, "said again, it adds nothing"

    @pytest.mark.parametrize(
        ("note", "reply"),
        [
            ("[KQTZ]: Eiffel built it.", "[GNEW]: It opened in 1877."),
            ("[KQTZ]: k10 is v130", "[BWHM]: k1 is v13"),
            ("[KQTZ]: Invoice 1042 is over 130 euros.", "[GNEW]: Invoice 1043 is over 139 euros."),
            ("[KQTZ]: Alice lives in Porto.", "[GNEW]: Bob lives in Porto."),
            ("[KQTZ]: Plant A let out 130 t of it.", "[GNEW]: Plant B let out 130 t of it."),
            (
                "[KQTZ]: In 2021 the factory at the river let out sulphur dioxide for a week.",
                "[GNEW]: In 2021 the factory at the river let out nitrogen oxide for a week.",
            ),
            (
                "\u7231\u4e3d\u4e1d\u4f4f\u5728\u6ce2\u5c14\u56fe\u3002",
                "\u9c8d\u52c3\u4f4f\u5728\u6ce2\u5c14\u56fe\u3002",
            ),
        ],
    )
    def test_a_worker_that_notes_almost_the_same_of_another_replaces_no_note(self, note, reply):
        shown = self.shown_to_the_manager([note, reply], "Which are there?")
        assert f"Reader 2: {note}\n{reply}\n\n" in shown

    def test_a_note_written_again_takes_the_place_of_the_one_before(self):
        first, again = "[KQTZ]: Gustave Eiffel built it in 1877.", "This part adds nothing."
        last = "In 1877 Gustave Eiffel built the bridge [KQTZ]; it is 60 m high [GNEW]."
        shown = self.shown_to_the_manager([first, again, last], "What of the bridge?")
        assert f"Notes:\nReader 3: {again}\n{last}\n\n" in shown

    def test_a_note_does_not_grow_on_and_on(self):
        numbers = iter(range(100, 1_000))
        engine = EmulatedEngine(answer=lambda messages: " ".join(f"{next(numbers)}," * 20))
        chain = chain_of(engine, note_tokens=80, packing="single")
        answer = chain.invoke(question(12))
        lengths = [len(str(one["messages"])) for one in engine.requests]
        assert max(lengths) < min(lengths) + 2 * 80 * 4 + 400
        assert answer.trace.steps[-2].remark == "its note was cut to note_tokens"

    @MODES
    def test_a_note_within_max_tokens_is_handed_on_whole(self, mode):
        """Four bytes are no token in most scripts."""
        note = "Мост Марии Пиа в Порту построил Гюстав Эйфель. " * 4
        engine = EmulatedEngine(answer=note)
        chain = chain_of(engine, mode=mode, note_tokens=80, packing="single")
        answer = chain.invoke(question(2))
        assert engine.prompt_tokens(engine.requests[-1]["messages"])
        assert note.strip() in str(engine.requests[-1]["messages"])
        assert {step.remark for step in answer.trace.steps} == {""}


THOUGHTS = {
    "think": AIMessage("<think>Is it 1877?</think>\n\nIn 1889."),
    "thinking": AIMessage("\n<thinking>\nIs it 1877?</thinking>In 1889."),
    "two": AIMessage("<think>Is it</think><think>1877?</think> In 1889."),
    "apart": AIMessage("In 1889.", additional_kwargs={"reasoning_content": "Is it 1877?"}),
    "parts": AIMessage(["In 1889.", {"type": "thinking", "thinking": "Is it 1877?"}][::-1]),
}
UNENDED = {
    "think": AIMessage("<think>Is it 1877?"),
    "thinking": AIMessage(" <thinking>Is it 1877?"),
    "apart": AIMessage(" ", additional_kwargs={"reasoning_content": "Is it 1877?"}),
    "parts": AIMessage([{"type": "thinking", "thinking": "Is it 1877?"}]),
}


class Reasoning(SaysModel):
    async def _astream(self, messages, stop=None, run_manager=None, **kwargs):
        given = (await self._agenerate(messages)).generations[0].message.content
        pieces = re.findall("(?s).{1,3}", given) if isinstance(given, str) else [given]
        for piece in pieces:
            yield ChatGenerationChunk(message=AIMessageChunk(content=piece))


def thinking(door, message):
    if door == "LangChain":
        return Reasoning(says=lambda prompt: message)
    if not isinstance(message.content, str):
        pytest.skip("a form of LangChain's messages")
    said = message.content
    return (
        RecordingLLM(answer=said) if door == "LlamaIndex" else pool_of(EmulatedEngine(answer=said))
    )


class TestThoughts:
    @MODES
    @pytest.mark.parametrize("door", ["LangChain", "LlamaIndex", "addresses"])
    @pytest.mark.parametrize("form", THOUGHTS)
    @pytest.mark.parametrize("streams", [False, True])
    def test_they_are_no_notes_and_no_part_of_the_answer(self, mode, door, form, streams):
        model = thinking(door, THOUGHTS[form])
        chain = ChainOfAgents(model, 2, mode=mode, packing="single", assignment=InTurn)
        asked = question(2, conversation_id="c")
        for _ in range(2):
            pieces = list(chain.stream(asked)) if streams else [chain.invoke(asked)]
            assert "".join(pieces) == "In 1889."
            for step in pieces[-1].trace.steps:
                assert (step.note, step.outcome) == ("In 1889.", "answered")
        history = chain._memory.history(ConversationKey("", "c"), 0)
        assert [one["content"] for one in history[1::2]] == ["In 1889."] * 2

    @MODES
    @pytest.mark.parametrize("door", ["LangChain", "LlamaIndex", "addresses"])
    @pytest.mark.parametrize("form", UNENDED)
    @pytest.mark.parametrize("streams", [False, True])
    def test_a_worker_that_only_thought_has_read_nothing(self, mode, door, form, streams):
        chain = ChainOfAgents(thinking(door, UNENDED[form]), 2, mode=mode)
        with pytest.raises(UnreadError, match="none of the documents was read"):
            list(chain.stream(question(2))) if streams else chain.invoke(question(2))


class TestOddInput:
    def test_a_lone_surrogate_fails_no_worker(self, caplog):
        engine = EmulatedEngine()
        documents = ["a \ud800 b", ContextBlock(id="x", text="\udfff"), {"id": 3, "text": "ok"}]
        answer = chain_of(engine, packing="single").invoke(
            {"question": "Why \ud801?", "documents": documents}
        )
        assert answer.trace.failures == ()
        assert "a ? b" in str(engine.requests[0]["messages"])
        assert "lone surrogates" in caplog.text

    def refused(self, status, words, asked):
        transport = httpx.MockTransport(
            lambda _: httpx.Response(status, json={"error": {"message": words}})
        )
        client = httpx.AsyncClient(transport=transport)
        pool = EnginePool({"e": lambda: EngineClient("http://e", model="m", http_client=client)})
        with pytest.raises(UnreadError) as raised:
            ChainOfAgents(llm=pool).invoke(asked)
        return str(raised.value), raised.value.trace.steps[0].error

    def test_the_servers_words_stand_in_the_step_and_in_the_error(self):
        words = "The model `m` does not exist. Run `serve m` first.\n" + "x" * 1_000
        error, of_step = self.refused(404, words, question(1))
        assert "'The model `m` does not exist. Run `serve" in error
        assert len(of_step) < 600

    def test_words_that_quote_a_document_are_left_out(self):
        asked = {"question": "q", "documents": ["The PIN is 4711 0815."]}
        error, of_step = self.refused(400, "bad input: The PIN is 4711 0815.", asked)
        assert "4711" not in error + of_step

    def test_an_unknown_argument_is_named_as_the_chains(self):
        with pytest.raises(TypeError) as raised:
            ChainOfAgents(llm="http://127.0.0.1:9/v1", wokers=3)
        assert str(raised.value) == (
            "ChainOfAgents() got an unexpected keyword argument 'wokers' (did you mean 'workers'?)"
        )
        with pytest.raises(TypeError, match=r"EnginePool\(\) got an unexpected .* 'concurency'"):
            EnginePool("http://127.0.0.1:9/v1", concurency=3)
        with pytest.raises(TypeError, match="wokers"):
            ChainOfAgents(llm=pool_of(EmulatedEngine()), wokers=3)
