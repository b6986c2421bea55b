"""Language models for workflows: what they stream, and that leaving early ends the request."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

import httpx
import pytest
from pool_helpers import until
from virtual_time import virtual_time

from ctxreuse import ContextRequest
from ctxreuse.cache import CacheUsage
from ctxreuse.errors import EngineError, InvalidRequestError
from ctxreuse.serving import EmulatedEngine, EngineClient
from ctxreuse.serving.emulation.batching_engine import EngineRates
from ctxreuse.serving.emulation.word_tokenizer import ENGINE_TOKENIZER, chat_markup
from ctxreuse.workflow.models.emulated_llm import EmulatedLLM
from ctxreuse.workflow.models.language_model import LanguageModel, OpenAILLM, Piece, checked_llm
from virtual_clock import run_in_virtual_time

# a token each in 1 s, whatever else goes on; prompts cost nothing
RATES = EngineRates(prefill_tokens_per_s=1e12, decode_step_s=1.0, decode_step_per_request_s=0)
WORDS = " ".join(f"w{n}" for n in range(20))


def asking(text="Where is Paris?"):
    return [{"role": "user", "content": text}]


def emulated(answer="It is in France.", **options):
    return EmulatedLLM(lambda messages: answer, **{"rates": RATES, "chunk_tokens": 2, **options})


def now():
    return round(asyncio.get_running_loop().time(), 3)


async def read(llm, prompt=None, **params):
    async with aclosing(llm.stream(prompt or asking(), params)) as pieces:
        return [(now(), piece) async for piece in pieces]


def alone():
    return asyncio.all_tasks() == {asyncio.current_task()}


def test_pieces_come_when_the_engine_has_generated_them():
    llm = emulated("one two three four five")
    assert run_in_virtual_time(read(llm)) == [
        (2.0, Piece("one two", 2)),
        (4.0, Piece(" three four", 2)),
        (5.0, Piece(" five", 1)),
    ]
    assert llm.generated_tokens == 5


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_ends_with_its_most_tokens(name):
    llm = emulated("one two three four five")
    pieces = run_in_virtual_time(read(llm, **{name: 3, "temperature": 0}))
    assert [piece for _, piece in pieces] == [Piece("one two", 2), Piece(" three", 1)]
    assert llm.generated_tokens == 3


@pytest.mark.parametrize("text", ["", " ", "  two  spaces ", "a\n\nb", "Schrödingers, longwords!"])
def test_the_pieces_are_the_answer(text):
    pieces = [piece for _, piece in run_in_virtual_time(read(emulated(text)))]
    assert "".join(piece.text for piece in pieces) == text
    assert sum(piece.tokens for piece in pieces) == max(1, len(ENGINE_TOKENIZER.ids(text)))


@virtual_time
async def test_a_slow_reader_gets_what_has_come_meanwhile_in_one_piece():
    got = []
    async with aclosing(emulated("one two three four five six").stream(asking(), {})) as pieces:
        async for piece in pieces:
            got.append((now(), piece))
            await asyncio.sleep(3.5)
    assert got == [
        (2.0, Piece("one two", 2)),
        (5.5, Piece(" three four", 2)),
        (9.0, Piece(" five six", 2)),
    ]


@virtual_time
async def test_usage_counts_prompts_what_was_cached_of_them_and_answers(planner):
    llm = emulated("In France.")
    plan = planner.plan(ContextRequest(["Paris is in France. " * 20], "Where is Paris?"))
    length = len(ENGINE_TOKENIZER.ids(chat_markup(plan.messages())))
    await read(llm, plan)
    await read(llm, plan.messages())
    assert llm.usage == CacheUsage(2 * length, length // 16 * 16)
    assert length > 100
    assert llm.generated_tokens == 6


async def left_by_aclose(llm):
    pieces = llm.stream(asking(), {})
    await anext(pieces)
    await pieces.aclose()


async def left_by_cancel(llm):
    task = asyncio.create_task(read(llm))
    await asyncio.sleep(2.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def left_to_the_garbage_collector(llm):
    async for _ in llm.stream(asking(), {}):
        break
    await asyncio.sleep(0)  # asyncio closes it in a task
    await asyncio.sleep(0)


@pytest.mark.parametrize("way", [left_by_aclose, left_by_cancel, left_to_the_garbage_collector])
@virtual_time
async def test_who_leaves_early_ends_the_request_at_once_and_leaves_no_task(way):
    llm = emulated(WORDS)
    await way(llm)
    assert alone()
    assert (llm.requests, llm._engine.has_work) == (0, False)
    assert llm._engine.cache._users == {}
    assert now() in (2.0, 2.5)
    await asyncio.sleep(100)
    # two tokens were read, and the step that was going on is computed to its end
    assert llm.generated_tokens == 3
    assert [piece for _, piece in (await read(llm, asking("later"), max_tokens=1))] == [
        Piece("w0", 1)
    ]


@virtual_time
async def test_a_stream_that_is_never_read_sends_nothing():
    llm = emulated()
    await llm.stream(asking(), {}).aclose()
    assert (llm.requests, llm.usage, alone()) == (0, CacheUsage(), True)


def test_what_the_answering_function_raises_reaches_the_reader():
    def fail(messages):
        raise LookupError("no answer")

    llm = EmulatedLLM(fail)
    with pytest.raises(LookupError, match="no answer"):
        run_in_virtual_time(read(llm))
    assert llm.requests == 0


async def test_a_stream_that_breaks_half_way_is_an_engine_error():
    async with served(EmulatedEngine(answer="In France.", fail=["break"])) as llm:
        pieces = llm.stream(asking(), {})
        assert await anext(pieces) == Piece("In", 1)
        with pytest.raises(EngineError):
            await anext(pieces)
    assert alone()


def test_prompts_and_answers_of_the_wrong_kind_are_refused_without_their_text():
    with pytest.raises(InvalidRequestError, match="answer must return a text, not list"):
        run_in_virtual_time(read(EmulatedLLM(lambda messages: ["secret"])))
    with pytest.raises(InvalidRequestError, match="larger than the cache"):
        run_in_virtual_time(read(emulated(capacity_tokens=32), asking("word " * 50)))
    with pytest.raises(InvalidRequestError, match="a prompt must be a Plan or a list"):
        run_in_virtual_time(read(emulated(), "Where is Paris?"))
    with pytest.raises(
        InvalidRequestError, match="max_tokens must be an integer from 1 or None, not 0"
    ):
        run_in_virtual_time(read(emulated(), max_tokens=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer": "text"}, "answer must be a function of a prompt's messages, not 'text'"),
        ({"rates": 3}, "rates must be EngineRates, not 3"),
        ({"chunk_tokens": 0}, "chunk_tokens must be an integer from 1, not 0"),
        ({"max_running": 0}, "max_running must be an integer from 1, not 0"),
        ({"speed": 0}, "speed must be more than 0, not 0"),
    ],
)
def test_wrong_options_are_refused_at_once(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        EmulatedLLM(**{"answer": lambda messages: "", **options})


@virtual_time
async def test_a_loop_that_is_late_slows_the_engine_down_no_longer_than_that():
    llm = emulated("one two three four five six seven eight")
    # the third to sixth token came meanwhile
    loop = asyncio.get_running_loop()
    loop.call_at(3.5, loop._jump, 3.2)  # something else keeps the loop busy until 6.7
    assert await read(llm) == [
        (2.0, Piece("one two", 2)),
        (6.7, Piece(" three four", 2)),
        (6.7, Piece(" five six", 2)),
        (8.0, Piece(" seven eight", 2)),
    ]


async def test_it_is_read_piece_by_piece_in_real_time_too():
    llm = EmulatedLLM(lambda messages: "word " * 40, speed=1_000)
    answers = await asyncio.gather(*(pieces_of(llm, asking(str(n))) for n in range(20)))
    assert answers == [answers[0]] * 20
    assert "".join(piece.text for piece in answers[0]) == "word " * 40
    assert (llm.requests, alone()) == (0, True)

    engine = EmulatedEngine(answer="In France it is")
    async with served(engine, temperature=0, max_tokens=9) as llm:
        pieces = await pieces_of(llm, max_tokens=7)
    assert pieces == [Piece(text, 1) for text in ("In", " France", " it", " is")]
    (request,) = engine.requests
    assert (request["temperature"], request["max_tokens"]) == (0, 7)
    assert request["messages"] == asking()


@asynccontextmanager
async def served(engine, *, planner=None, **params):
    transport = engine.transport() if isinstance(engine, EmulatedEngine) else engine
    async with httpx.AsyncClient(transport=transport) as http:
        options = {"http_client": http, "backoff_s": 0, "planner": planner}
        async with OpenAILLM(EngineClient("http://engine", **options), **params) as llm:
            yield llm


async def pieces_of(llm, prompt=None, **params):
    return [piece for _, piece in await read(llm, prompt, **params)]


def event(delta=None, finish=None, **fields):
    choices = [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    return f"data: {json.dumps({**chunk, 'choices': choices, **fields})}\n\n".encode()


class Events(httpx.AsyncByteStream):
    """Sends parts of a body, then waits for ever; keeps whether it was read and closed."""

    def __init__(self, *parts):
        self.parts = parts
        self.is_read = False
        self.is_closed = False

    async def __aiter__(self):
        self.is_read = True
        for part in self.parts:
            yield part
        await asyncio.Event().wait()

    async def aclose(self):
        self.is_closed = True


def sending(stream):
    headers = {"content-type": "text/event-stream"}

    def answer(request):
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"object": "list", "data": [{"id": "m"}]})
        return httpx.Response(200, headers=headers, stream=stream)

    return httpx.MockTransport(answer)


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (5, [Piece("In", 1), Piece(" France", 1), Piece("", 3)]),
        (2, [Piece("In", 1), Piece(" France", 1)]),
        (None, [Piece("In", 1), Piece(" France", 1)]),
    ],
)
async def test_tokens_that_only_the_usage_tells_of_come_at_the_end(tokens, pieces):
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9}
    stream = Events(
        event({"content": "In"}),
        event({"content": " France"}, "stop"),
        event(usage=usage) if tokens else b"",
        b"data: [DONE]\n\n",
    )
    async with served(sending(stream)) as llm:
        assert await pieces_of(llm) == pieces


async def test_closing_a_stream_early_closes_the_connection():
    stream = Events(event({"content": "In"}), event({"content": " France"}))
    async with served(sending(stream)) as llm:
        await left_by_aclose(llm)
        assert stream.is_closed
    assert alone()


@pytest.mark.parametrize("parts", [[], [event({"content": "In"})]])
async def test_a_cancelled_reader_closes_the_connection_and_the_planner_hears_of_it(parts, planner):
    stream = Events(*parts)
    got = []

    async def reading(llm):
        plan = planner.plan(ContextRequest(["Paris is in France."], "Where?"))
        async with aclosing(llm.stream(plan, {})) as pieces:
            got.extend([await anext(pieces) for _ in parts])
            await anext(pieces)

    async with served(sending(stream), planner=planner) as llm:
        task = asyncio.create_task(reading(llm))
        await until(lambda: stream.is_read and len(got) == len(parts))
        assert not stream.is_closed
        assert planner.statistics().requests == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stream.is_closed
        assert planner.statistics().requests == 0
    assert alone()


async def test_it_closes_its_own_client_and_takes_no_wrong_arguments():
    own, users = OpenAILLM("http://127.0.0.1:1"), EngineClient("http://127.0.0.1:1")
    await OpenAILLM(users).aclose()
    await own.aclose()
    assert own._client._connection.openai.is_closed()
    assert not users._connection.openai.is_closed()
    await users.aclose()
    with pytest.raises(InvalidRequestError, match="client must be an EngineClient or an engine's"):
        OpenAILLM(3)
    with pytest.raises(InvalidRequestError, match="stream is set by the client"):
        OpenAILLM("http://127.0.0.1:1", stream=True)


def test_both_are_language_models_and_other_things_are_not():
    llm = emulated()
    assert isinstance(llm, LanguageModel)
    assert checked_llm(llm) is llm
    assert isinstance(OpenAILLM.__new__(OpenAILLM), LanguageModel)
    for wrong in (None, "http://engine", EmulatedLLM):
        with pytest.raises(InvalidRequestError, match=r"llm must have stream\(prompt, params\)"):
            checked_llm(wrong)
