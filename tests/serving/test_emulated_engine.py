import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from example_counts import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from ctxreuse.cache import CacheUsage, PrefixCacheMetrics, PrefixCacheSimulator
from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.serving import EmulatedEngine, ToolCall
from ctxreuse.serving.emulation import emulated_engine
from ctxreuse.serving.emulation.word_tokenizer import ENGINE_TOKENIZER, WordTokenizer, chat_markup

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def client_of(engine):
    return httpx.Client(transport=engine.transport(), base_url="http://engine")


def chat_body(content="Where is Paris?", **fields):
    return {"model": "emulated", "messages": [{"role": "user", "content": content}], **fields}


def send(engine, body, path=CHAT):
    reply = client_of(engine).post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def cached(engine, body):
    return send(engine, body)["usage"]["prompt_tokens_details"]["cached_tokens"]


def events(reply):
    lines = [line for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_chat_is_answered_as_vllm_answers_it():
    engine = EmulatedEngine(answer="In France.")
    assert send(engine, chat_body(return_token_ids=True)) == {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "emulated",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "logprobs": None,
                "message": {"role": "assistant", "content": "In France."},
                "token_ids": ENGINE_TOKENIZER.ids("In France."),
            }
        ],
        "usage": {
            "prompt_tokens": 13,
            "completion_tokens": 3,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_token_ids": engine.prompt_tokens(chat_body()["messages"]),
    }
    assert "prompt_token_ids" not in send(engine, chat_body())


def test_a_stream_has_a_role_the_pieces_the_end_and_the_usage():
    engine = EmulatedEngine(answer="In France.")
    body = chat_body(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    reply = client_of(engine).post(CHAT, json=body)
    assert reply.headers["content-type"] == "text/event-stream"
    opening, *middle, closing = events(reply)
    assert opening["prompt_token_ids"] == engine.prompt_tokens(body["messages"])
    assert {chunk["object"] for chunk in (opening, *middle, closing)} == {"chat.completion.chunk"}
    assert [
        (chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"])
        for chunk in (opening, *middle)
    ] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "In"}, None),
        ({"content": " France."}, None),
        ({"content": ""}, "stop"),
    ]
    assert closing["choices"] == []
    assert closing["usage"] == send(EmulatedEngine(answer="In France."), chat_body())["usage"]


def test_a_stream_without_include_usage_has_none():
    reply = client_of(EmulatedEngine()).post(CHAT, json=chat_body(stream=True))
    assert [len(event["choices"]) for event in events(reply)] == [1, 1, 1]


def test_plain_completions_are_answered_whole_and_streamed():
    engine = EmulatedEngine(answer="In France.")
    body = {"model": "emulated", "prompt": "Where is Paris?"}
    whole = send(engine, body, TEXT)
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == "In France."
    assert whole["usage"]["prompt_tokens"] == 4
    streamed = client_of(engine).post(TEXT, json=body | {"stream": True})
    texts = [event["choices"][0]["text"] for event in events(streamed)]
    assert texts == ["In", " France.", ""]
    tokens = ENGINE_TOKENIZER.ids("Where is Paris?")
    assert send(engine, body | {"prompt": tokens}, TEXT)["usage"]["prompt_tokens"] == 4


def test_prompts_are_cached_up_to_their_last_token_and_apart_from_other_salts():
    engine = EmulatedEngine(block_size=4)
    assert [cached(engine, chat_body()) for _ in range(2)] == [0, 12]
    assert cached(engine, chat_body("Where is London?")) == 4
    assert engine.usage == CacheUsage(39, 16)
    engine = EmulatedEngine(block_size=4)
    salts = ("a", "b", "a", None, None)
    bodies = [chat_body() | ({"cache_salt": salt} if salt else {}) for salt in salts]
    assert [cached(engine, body) for body in bodies] == [0, 0, 12, 0, 12]


def test_an_answer_is_cached_for_the_next_turn_without_its_last_token():
    engine = EmulatedEngine(block_size=1, answer="In France it is.")
    first = chat_body()
    sent = send(engine, first)
    answer = sent["choices"][0]["message"]
    again = chat_body()
    again["messages"] = [*first["messages"], answer, {"role": "user", "content": "Sure?"}]
    answered = sent["usage"]["prompt_tokens"] + sent["usage"]["completion_tokens"]
    assert cached(engine, again) == answered - 1


def test_tools_are_part_of_the_prompt_and_tool_calls_come_whole_and_streamed():
    call = ToolCall("search", '{"query": "Paris"}', id="call-1")
    engine = EmulatedEngine(answer=lambda body: call if body.get("tools") else "no tools")
    tools = [{"type": "function", "function": {"name": "search"}}]
    assert send(engine, chat_body())["choices"][0]["message"]["content"] == "no tools"
    whole = send(engine, chat_body(tools=tools))
    shown = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "search", "arguments": '{"query": "Paris"}'},
    }
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [shown],
    }
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["usage"]["prompt_tokens"] > 13
    streamed = client_of(engine).post(CHAT, json=chat_body(tools=tools, stream=True))
    deltas = [event["choices"][0]["delta"] for event in events(streamed)]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0} | shown]},
        {"content": ""},
    ]


def test_messages_of_every_kind_are_part_of_the_prompt():
    engine = EmulatedEngine(block_size=1)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    assert chat_markup(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhere?<|im_end|>\n"
        '<|im_start|>assistant\n[{"id": "1"}]<|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    prompt = send(engine, {"messages": messages})["usage"]["prompt_tokens"]
    assert prompt == len(engine.prompt_tokens(messages))


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_an_answer_stops_at_the_limit(limit):
    reply = send(EmulatedEngine(answer="one two three"), chat_body(**{limit: 2}))
    assert reply["choices"][0]["message"]["content"] == "one two"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 2


def test_the_other_routes():
    engine = EmulatedEngine(block_size=4, capacity_tokens=40, model="m-x", max_model_len=99)
    client = client_of(engine)
    assert client.get("/health").status_code == 200
    card = {"id": "m-x", "object": "model", "created": 0, "owned_by": "ctxreuse"}
    assert client.get("/v1/models").json()["data"] == [card | {"max_model_len": 99}]
    body = chat_body() | {"model": "m-x"}
    tokens = engine.prompt_tokens(body["messages"])
    assert client.post("/tokenize", json=body).json() == {
        "count": 13,
        "max_model_len": 99,
        "tokens": tokens,
    }
    send(engine, body)
    send(engine, body)
    assert client.get("/metrics").text == engine.metrics()
    assert PrefixCacheMetrics.parse(engine.metrics()) == PrefixCacheMetrics(
        prefix_cache_queries=26,
        prefix_cache_hits=12,
        block_size=4,
        num_gpu_blocks=10,
        kv_cache_size_tokens=40,
    )
    client.post("/reset_prefix_cache")
    assert cached(engine, body) == 0


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        (CHAT, b"{", 400),
        (CHAT, b"[]", 400),
        (CHAT, b'{"messages": []}', 400),
        (CHAT, b'{"messages": [1]}', 400),
        (CHAT, b'{"messages": [{}], "n": 2}', 400),
        (CHAT, b'{"messages": [{}], "max_tokens": 1.5}', 400),
        (CHAT, b'{"messages": [{}], "model": "other"}', 404),
        (CHAT, b'{"messages": [{}], "cache_salt": ""}', 400),
        (CHAT, b'{"messages": [{}], "cache_salt": "a/b"}', 400),
        (TEXT, b'{"prompt": 1}', 400),
        (TEXT, b'{"prompt": "one two three four five six seven eight"}', 400),
        ("/tokenize", b"{}", 400),
        ("/v1/embeddings", b"{}", 404),
    ],
)
def test_bad_requests_are_refused_with_an_error_object(path, content, status):
    engine = EmulatedEngine(max_model_len=7)
    reply = client_of(engine).post(path, content=content)
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == status
    assert engine.usage == CacheUsage()


def test_requests_fail_on_demand_in_order_of_arrival():
    failures = [503, None, "refuse", "break"]
    engine = EmulatedEngine(fail=failures)
    failures.append("break")
    client = client_of(engine)
    assert client.post(CHAT, json=chat_body("0")).status_code == 503
    assert client.post(CHAT, json=chat_body("1")).status_code == 200
    with pytest.raises(httpx.ConnectError):
        client.post(CHAT, json=chat_body("2"))
    with pytest.raises(httpx.ReadError):
        client.post(CHAT, json=chat_body("3"))
    with client.stream("POST", CHAT, json=chat_body("4", stream=True)) as reply:
        pieces = reply.iter_bytes()
        assert b"OK." in next(pieces)
        with pytest.raises(httpx.ReadError):
            next(pieces)
    assert client.post(CHAT, json=chat_body("5")).status_code == 200
    contents = [body["messages"][0]["content"] for body in engine.requests]
    assert contents == ["0", "1", "2", "3", "4", "5"]


async def test_an_async_client_takes_awaitables_and_iterators_of_text():
    async def later(body):
        await asyncio.sleep(0)
        return "la" + "ter"

    async def in_pieces(body):
        yield "in "
        yield "pieces"

    for answer, text in ((later, "later"), (in_pieces, "in pieces"), ("at once", "at once")):
        transport = EmulatedEngine(answer=answer).transport()
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            whole = (await client.post(CHAT, json=chat_body())).json()
            assert whole["choices"][0]["message"]["content"] == text
            streamed = events(await client.post(CHAT, json=chat_body(stream=True)))
            deltas = [event["choices"][0]["delta"]["content"] for event in streamed]
            assert "".join(deltas) == text


@pytest.mark.parametrize("said", [3, None, ["text"]])
def test_an_answer_that_is_none_is_named(said):
    with pytest.raises(InvalidRequestError, match="must be a text or ToolCalls"):
        send(EmulatedEngine(answer=lambda body: said), chat_body())


def test_wrong_arguments_are_named():
    with pytest.raises(InvalidRequestError, match="answer must be a text or a function, not 3"):
        EmulatedEngine(answer=3)
    with pytest.raises(InvalidRequestError, match="fail must be a list or a function, not 3"):
        EmulatedEngine(fail=3)
    with pytest.raises(InvalidRequestError, match="block_size"):
        EmulatedEngine(block_size=0)
    with pytest.raises(InvalidRequestError, match="must be True, False or 'if cached', not 'no'"):
        EmulatedEngine(prompt_tokens_details="no")
    with pytest.raises(InvalidRequestError, match="library must be httpx or httpx2, not 'httpx'"):
        EmulatedEngine().transport("httpx")


def test_a_missing_http_library_names_the_extra(monkeypatch):
    monkeypatch.setattr(emulated_engine, "_HTTP_LIBRARIES", ("no_such_library",))
    with pytest.raises(MissingExtraError, match=r"pip install .*\[openai\]"):
        EmulatedEngine().transport()


async def test_threads_and_the_other_http_library_are_served_too():
    engine = EmulatedEngine(block_size=4)
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(lambda number: send(engine, chat_body(f"Where is {number}?")), range(64))
        )
    assert engine.usage == CacheUsage(64 * 13, 63 * 4)
    assert {reply["id"] for reply in replies} == {f"chatcmpl-{number}" for number in range(64)}
    assert len(engine.requests) == 64

    httpx2 = pytest.importorskip("httpx2")
    transport = EmulatedEngine().transport(httpx2)
    async with httpx2.AsyncClient(transport=transport, base_url="http://engine") as client:
        assert (await client.post(CHAT, json=chat_body())).status_code == 200
    with httpx2.Client(transport=transport, base_url="http://engine") as client:
        assert client.post(CHAT, json=chat_body()).status_code == 200


@examples(100)
@given(
    st.lists(st.text("ab \n.", max_size=30), max_size=8),
    st.sampled_from(("", "a", "a b a b.")),
    st.integers(1, 5),
    st.none() | st.integers(0, 80),
)
def test_it_serves_what_the_simulator_serves(contents, answer, block_size, capacity):
    engine = EmulatedEngine(block_size, capacity, answer)
    simulator = PrefixCacheSimulator(capacity, block_size, null_block=True)
    for number, content in enumerate(contents):
        messages = [*chat_body(content)["messages"], {"role": "user", "content": f"{number}?"}]
        tokens = engine.prompt_tokens(messages)
        # the simulator refuses a request of which the answer has no room, an engine begins it
        lengths = (len(tokens), len(tokens) + max(0, len(ENGINE_TOKENIZER.ids(answer)) - 1))
        blocks = None if capacity is None else capacity // block_size - 1
        if blocks is not None:
            assume(len({-(-length // block_size) <= blocks for length in lengths}) == 1)
        usage = simulator.serve(tokens, generated=ENGINE_TOKENIZER.ids(answer))
        assert cached(engine, {"messages": messages}) == usage.cached_tokens


@given(st.text(), st.text())
def test_tokens_of_a_text_are_those_of_its_beginning_up_to_the_last_word(before, after):
    tokens = ENGINE_TOKENIZER.ids(before + after)
    start = ENGINE_TOKENIZER.ids(before)
    assert tokens[: max(0, len(start) - 1)] == start[:-1]


def test_the_tokenizer_for_prose_counts_six_letters_and_each_space_apart():
    tokenizer = WordTokenizer()
    assert tokenizer.pieces("Paris, longwords\n\nx") == [
        "Paris",
        ",",
        " longwo",
        "rds",
        "\n",
        "\n",
        "x",
    ]
    assert tokenizer.encode("a b a", add_special_tokens=False).ids == tokenizer.ids("a b a")


def test_the_tokenizer_for_chats_counts_eight_letters_and_markers_and_spaces_as_one():
    assert ENGINE_TOKENIZER.pieces("<|im_end|>\n\nlongwords <|x") == [
        *("<|im_end|>", "\n\n", "longword", "s", " <", "|", "x")
    ]


@given(st.text(), st.booleans())
def test_the_pieces_of_a_text_are_the_text(text, chat):
    tokenizer = WordTokenizer(chat=chat)
    assert "".join(tokenizer.pieces(text)) == text
    assert len(tokenizer.ids(text)) == len(tokenizer.pieces(text))
