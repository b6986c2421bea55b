"""Bad input, workers and managers that fail, and cancellation: the chain goes on, or says why."""

import asyncio
import re
from typing import Any

import httpx
import pytest
from chain_helpers import (
    Agents,
    Busy,
    SaysModel,
    chain_of,
    is_managers,
    no_tasks_left,
    pool_of,
    question,
    word_count,
)
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk
from pool_helpers import until
from virtual_time import virtual_time

from chain_of_agents import ChainOfAgents, ManagerError
from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool

MODES = pytest.mark.parametrize("mode", ["sequential", "parallel"])
SECRET = "The secret is 4711."


def failing(*outcomes: Any) -> SaysModel:
    def says(prompt: str) -> Any:
        if prompt.startswith("Several readers have each"):
            return "The answer."
        read = re.search(r"Document (\d+) says", prompt)  # readers are asked in any order
        assert read is not None
        return outcomes[int(read[1])]

    return SaysModel(says=says)


def outcomes(answer: Any) -> list[str]:
    return [step.outcome for step in answer.trace.steps]


class TestDocuments:
    @MODES
    def test_a_document_longer_than_the_model_s_context_is_read_in_pieces(self, mode):
        engine = EmulatedEngine(answer="A note.", max_model_len=700)
        planner = ReusePlanner(
            token_counter=lambda text: len(engine._tokenize(text)), annotate=False
        )
        chain = chain_of(
            engine, planner=planner, mode=mode, workers=3, note_tokens=16, answer_tokens=16
        )
        text = "".join(f"Sentence {n} of a long text. " for n in range(400))
        answer = chain.invoke({"question": "Which?", "documents": [{"id": "d", "text": text}]})
        assert answer.trace.failures == ()
        names = [name for step in answer.trace.workers for name in step.documents]
        assert len(names) > 10
        assert sorted(names) == sorted(f"d ({n}/{len(names)})" for n in range(1, len(names) + 1))

    def test_an_empty_question_is_asked(self):
        agents = Agents()
        agents.run(["text"], "")
        assert agents.model.prompts[0][-1]["content"].endswith("Question: \n\nWrite your note.")


class TestWorkers:
    @MODES
    def test_a_worker_that_says_nothing_or_garbage_or_fails_leaves_no_note(self, mode):
        model = failing(
            "First note.",
            "",
            "...!",
            ValueError(SECRET),
            AIMessage(content="", tool_calls=[{"name": "f", "args": {}, "id": "1"}]),
            AIMessage(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
            AIMessage(content=[{"type": "text", "text": "Last"}, " note."]),
        )
        chain = ChainOfAgents(llm=model, mode=mode, packing="single", min_read=0.1)
        answer = chain.invoke(question(7))

        assert answer == "The answer."
        assert outcomes(answer) == [
            "answered",
            "empty",
            "garbage",
            "failed",
            "empty",
            "empty",
            "answered",
            "answered",
        ]
        assert answer.trace.steps[3].error == "ValueError"
        assert [step.outcome for step in answer.trace.failures] == outcomes(answer)[1:6]
        shown = str(model.prompts[-1][-1].content)
        notes = {
            "sequential": ["7: First note.\nLast note."],
            "parallel": ["1: First note.", "7: Last note."],
        }
        assert shown == (
            "Notes:\n"
            + "\n\n".join(f"Reader {note}" for note in notes[mode])
            + "\n\nQuestion: Which?\n\nAnswer:"
        )

    @MODES
    @virtual_time
    async def test_a_worker_s_engine_that_takes_too_long_has_timed_out(self, mode):
        busy = Busy()
        busy.holds = lambda messages: "says 0" in str(messages) and not is_managers(messages)
        pool = pool_of(EmulatedEngine(answer=busy), attempts=1)
        chain = ChainOfAgents(llm=pool, mode=mode, packing="single", timeout_s=0.3)
        answer = await chain.ainvoke(question(2))
        assert sorted(outcomes(answer)) == ["answered", "answered", "timed out"]
        assert "did not answer within 0.3 s" in answer.trace.failures[0].error
        assert busy.running == 0

    @MODES
    def test_a_note_that_is_too_long_is_cut_for_who_reads_it_and_whole_in_the_trace(self, mode):
        long = " ".join(f"word{n}" for n in range(100))
        agents = Agents(lambda messages: long, word_count, mode=mode)
        trace = agents.run(["a", "b"])
        assert [step.note for step in trace.workers] == [long, long]
        assert {step.remark for step in trace.workers} == {"its note was cut to note_tokens"}
        shown = agents.model.prompts[-1][-1]["content"]
        assert "word14 ...\n" in shown
        assert "word15" not in shown

    @MODES
    def test_an_engine_that_goes_down_in_the_middle_loses_no_document(self, mode):
        down = False

        def say(body: dict[str, Any]) -> str:
            nonlocal down
            down = down or "says 3" in str(body)
            return "A note."

        def fail(number: int, body: Any) -> Any:
            return "refuse" if down else None

        engines = [EmulatedEngine(answer=say, fail=fail), *(EmulatedEngine() for _ in range(2))]
        pool = pool_of(*engines)
        chain = ChainOfAgents(llm=pool, mode=mode, packing="single", workers=6)
        first = chain.invoke(question(12))
        down = True
        second = chain.invoke(question(12))
        third = chain.invoke(question(12))

        for answer in (first, second, third):
            assert answer.trace.failures == ()
            assert len({step.documents for step in answer.trace.workers}) == 12
        assert {step.replica for step in third.trace.steps} <= {"e1", "e2"}


class Stalls(SaysModel):
    async def _astream(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        for word in ("The", " answer"):
            yield ChatGenerationChunk(message=AIMessageChunk(content=word))
        await asyncio.sleep(60)


class TestManager:
    @MODES
    @pytest.mark.parametrize("is_streamed", [False, True])
    def test_a_manager_that_fails_is_an_error_with_the_notes_and_the_cause(self, mode, is_streamed):
        def says(prompt: str) -> Any:
            return "A note." if "Several readers" not in prompt else ValueError(SECRET)

        class Model(SaysModel):
            async def _astream(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                raise ValueError(SECRET)
                yield  # pragma: no cover

        chain = ChainOfAgents(llm=Model(says=says), mode=mode, packing="single")
        with pytest.raises(ManagerError) as failed:
            list(chain.stream(question(2))) if is_streamed else chain.invoke(question(2))
        assert str(failed.value) == (
            "the manager did not answer: ValueError; the 2 notes of the workers are in this "
            "error's trace"
        )
        assert isinstance(failed.value.__cause__, ValueError)
        trace = failed.value.trace
        assert [step.note for step in trace.workers] == ["A note.", "A note."]
        assert (trace.steps[-1].name, trace.steps[-1].outcome) == ("manager", "failed")
        assert all("4711" not in step.error for step in trace.steps)

    def test_a_manager_that_says_nothing_has_failed_too(self):
        model = SaysModel(says=lambda prompt: "" if prompt.startswith("Several") else "A note.")
        chain = ChainOfAgents(llm=model)
        with pytest.raises(ManagerError, match="it said nothing; the 1 notes") as raised:
            chain.invoke(question(1))
        assert [step.outcome for step in raised.value.trace.steps] == ["answered", "empty"]
        with pytest.raises(ManagerError, match="the 1 notes"):
            list(chain.stream(question(1)))

    @virtual_time
    async def test_a_timeout_holds_even_if_each_piece_is_taken_in_another_task(self):
        stream: Any = ChainOfAgents(llm=Stalls(), timeout_s=0.02).astream(question(1))
        for piece in ("The", " answer"):
            assert await asyncio.create_task(anext(stream)) == piece
        with pytest.raises(ManagerError) as failed:
            await asyncio.create_task(anext(stream))
        assert isinstance(failed.value.__cause__, TimeoutError)
        assert failed.value.trace.steps[-1].outcome == "timed out"


STAGES: dict[str, Any] = {
    "workers": lambda messages: not is_managers(messages),
    "the second document": lambda messages: "Document 1 says" in str(messages),
    "manager": is_managers,
}


class TestCancellation:
    @MODES
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("way", ["ainvoke", "astream", "abatch"])
    async def test_who_is_cancelled_leaves_no_request_under_way(self, mode, stage, way):
        busy = Busy()
        busy.holds = STAGES[stage]
        pool = pool_of(EmulatedEngine(answer=busy))
        chain = ChainOfAgents(llm=pool, mode=mode, packing="single")

        async def call() -> Any:
            if way == "ainvoke":
                return await chain.ainvoke(question(3))
            if way == "abatch":
                return await chain.abatch([question(3)] * 3)
            return [piece async for piece in chain.astream(question(3))]

        with no_tasks_left():
            task = asyncio.create_task(call())
            await until(lambda: busy.held > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert busy.running == 0
        [replica] = pool.statistics()
        assert (replica.running, replica.waiting, replica.queued_tokens) == (0, 0, 0)
        busy.holds = lambda messages: False
        assert (await chain.ainvoke(question(3))).trace.failures == ()

    @MODES
    async def test_a_question_that_fails_cancels_the_others_or_has_an_error_in_its_place(
        self, mode
    ):
        busy = Busy()
        busy.holds = lambda messages: True
        chain = chain_of(EmulatedEngine(answer=busy), mode=mode)
        questions = [question(2), question(2, documents=3), question(2)]
        with no_tasks_left(), pytest.raises(InvalidRequestError, match="documents must be a list"):
            await chain.abatch(questions)
        assert busy.running == 0

        chain = chain_of(EmulatedEngine(), mode=mode)
        first, second, third = await chain.abatch(questions, return_exceptions=True)
        assert (first, third) == ("OK.", "OK.")
        assert isinstance(second, InvalidRequestError)

    @pytest.mark.parametrize("is_sync", [False, True])
    async def test_a_stream_that_is_left_early_is_cancelled(self, is_sync):
        closed: list[str] = []

        async def say(body: dict[str, Any]) -> Any:
            try:
                for number in range(1_000):
                    yield f"{number} "
                    await asyncio.sleep(0.001)
            finally:
                closed.append("closed")

        def answer(body: dict[str, Any]) -> Any:
            return say(body) if is_managers(body["messages"]) else "A note."

        pool = pool_of(EmulatedEngine(answer=answer))
        chain = ChainOfAgents(llm=pool)
        if is_sync:
            sync_stream = chain.stream(question(2))
            assert next(sync_stream) == "0 "
            sync_stream.close()  # a generator
        else:
            with no_tasks_left():
                stream = chain.astream(question(2))
                assert await anext(stream) == "0 "
                await stream.aclose()  # a generator
        assert closed == ["closed"]
        [replica] = pool.statistics()
        assert (replica.running, replica.queued_tokens) == (0, 0)

    def test_connections_of_a_stream_that_is_left_early_are_closed(self):
        closed: list[str] = []

        class Http(httpx.AsyncClient):
            async def aclose(self) -> None:
                await asyncio.sleep(0)
                closed.append("closed")
                await super().aclose()

        class Client(EngineClient):
            async def aclose(self) -> None:
                await http.aclose()

        http = Http(transport=EmulatedEngine(answer="one two three").transport())
        chain = ChainOfAgents(llm=EnginePool({"e": lambda: Client("http://e", http_client=http)}))
        stream = chain.stream(question(1))
        next(stream)
        stream.close()  # a generator
        assert closed == ["closed"]


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"llm": 3},
                "llm must be a LangChain chat model, a LlamaIndex LLM, an address such as",
            ),
            ({"llm": "no address"}, "base_url must be the engine's address"),
            ({"workers": 0}, "workers must be an integer from 1, not 0 (int)"),
            ({"planner": "p"}, "planner must be a ReusePlanner, not 'p' (str)"),
            (
                {"mode": "both"},
                "there is no mode 'both' (str); choose one of 'sequential', 'parallel'",
            ),
            (
                {"packing": 1},
                "there is no packing 1 (int); choose one of 'auto', 'single', 'packed'",
            ),
            ({"prompts": "p"}, "prompts must be ChainPrompts, not 'p' (str)"),
            ({"note_tokens": 0}, "note_tokens must be an integer from 1, not 0 (int)"),
            ({"answer_tokens": "9"}, "answer_tokens must be an integer from 1, not '9' (str)"),
            ({"segment_tokens": -1}, "segment_tokens must be an integer from 1 or None, not -1"),
            ({"context_window": 1.5}, "context_window must be an integer from 1 or None, not 1.5"),
            ({"timeout_s": 0}, "timeout_s must be more than 0, not 0 (int)"),
            ({"timeout_s": float("nan")}, "timeout_s must be a number from 0, not nan"),
            ({"min_read": 1.1}, "min_read must be a number from 0 to 1"),
            ({"bound": 0.5}, "the bound must be a number from 1, not 0.5 (float)"),
            ({"assignment": 3}, "assignment must be a function that makes what assigns documents"),
            ({"concurrency": 0}, "concurrency must be an integer from 1, not 0 (int)"),
            ({"params": 3}, "params must be a dict, not 3 (int)"),
            ({"params": {"temperature": 0}}, "temperature: these are for addresses; set them on"),
            ({"api_key": "k"}, "api_key: these are for addresses; set them on the model"),
            ({"llm": "http://e", "params": {"max_tokens": 3}}, "params must not have max_tokens"),
            ({"llm": "http://e", "params": {"stream": 1}}, "stream is set by the client"),
        ],
    )
    def test_a_wrong_argument_is_named_with_what_it_should_be(self, arguments, message):
        with pytest.raises(InvalidRequestError) as refused:
            ChainOfAgents(**{"llm": SaysModel(), **arguments})
        assert str(refused.value).startswith(message)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                "text",
                "the chain's input must be a dict with 'question' and 'documents', not 'text'",
            ),
            ({}, "the chain's input has no 'question'; it has none"),
            ({"question": "q"}, "the chain's input has no 'documents'; it has 'question'"),
            ({"question": 3, "documents": []}, "the question must be a string, not 3 (int)"),
            ({"question": "q", "documents": "d"}, "documents must be a list, not 'd' (str)"),
            ({"question": "q", "documents": [1]}, "document 0: a document must be a string"),
        ],
    )
    def test_a_wrong_input_is_refused_in_every_way_to_ask(self, given, message):
        chain = ChainOfAgents(llm=SaysModel())
        for ask in (chain.invoke, lambda one: list(chain.stream(one)), lambda o: chain.batch([o])):
            with pytest.raises(InvalidRequestError) as refused:
                ask(given)
            assert str(refused.value).startswith(message)

    def test_an_unknown_keyword_of_a_call_or_option_of_a_pool_is_refused(self):
        with pytest.raises(TypeError, match="unexpected keyword argument 'stop'"):
            ChainOfAgents(llm=SaysModel()).invoke(question(1), stop=["x"])
        with pytest.raises(InvalidRequestError, match="model: give these to the EnginePool"):
            ChainOfAgents(llm=pool_of(EmulatedEngine()), model="m")
