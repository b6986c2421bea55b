"""Recordings of whole prompts: how requests were sent, and what providers say of them."""

import json
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from caching_server import caching_server
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import request_context
from ctxreuse.errors import InputFileError
from ctxreuse.measure.replay.plan_file import read_plan
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.traces.recording import (
    PromptRecorder,
    TraceRecorder,
    recording,
    recording_anthropic,
)
from ctxreuse.measure.traces.sent_calls import SentCall, read_call
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace

MARK = {"type": "ephemeral"}
TOOLS = [
    {"name": "search", "input_schema": {"type": "object"}},
    {"name": "sum", "input_schema": {"type": "object"}, "cache_control": MARK},
]
SECRETS = ("Seine", "Loire", "river", "search", "claude", "helpful")


def text(words, *, marked=False):
    part = {"type": "text", "text": words}
    return part | {"cache_control": MARK} if marked else part


def anthropic_call(client, **more):
    return client.messages.create(
        model="claude-x",
        max_tokens=10,
        system=[text("Be helpful.", marked=True)],
        tools=TOOLS,
        messages=[
            {
                "role": "user",
                "content": [
                    text("The Seine flows through Paris.\n\n"),
                    text("The Loire is long.\n\n", marked=True),
                    text("Which river?"),
                ],
            }
        ],
        **more,
    )


def lines(folder):
    return [json.loads(line) for line in Path(folder, "trace.jsonl").read_text().splitlines()]


def clocked():
    """Return a clock that is a quarter of a second later each time."""
    times = iter(range(1_000))
    return lambda: next(times) / 4


def recorded(folder):
    corpus = read_corpus(str(Path(folder, "corpus.jsonl")))
    return read_trace(str(Path(folder, "trace.jsonl")), corpus)


@contextmanager
def recorded_client(folder, **options):
    anthropic = pytest.importorskip("anthropic")
    with ExitStack() as exits:
        server = exits.enter_context(caching_server("anthropic"))
        recorder = exits.enter_context(TraceRecorder(folder, **options))
        client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        exits.enter_context(client)
        exits.enter_context(recording_anthropic(recorder))
        yield server, client, recorder


def test_a_prompt_of_an_anthropic_client_is_recorded_with_tools_marks_and_time(tmp_path):
    with recorded_client(tmp_path, clock=clocked()) as (server, client, recorder):
        answer = anthropic_call(client)
    assert answer.content[0].text == server.answer
    (line,) = lines(tmp_path)
    assert [name.partition("#")[0] for name in line["sent"].pop("tools")] == ["search", "sum"]
    assert line == {
        "request_id": 1,
        "query": "Which river?",
        "system": "Be helpful.",
        "conversation_id": line["conversation_id"],
        "turn": 0,
        "timestamp": 250.0,
        "source": "Anthropic clients",
        "sent": {
            "model": "claude-x",
            "tool_tokens": line["sent"]["tool_tokens"],
            "system_tokens": 3,
            "marks": {"tools": 1, "system": 1, "turn": 1},
        },
        "marks": [0, 2],
        "blocks": line["blocks"],
    }
    assert len(line["blocks"]) == 2
    assert recorder.sources == {"Anthropic clients": 1}


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_prompts_of_openai_clients_are_recorded_alike_in_both_protocols(tmp_path, api):
    openai = pytest.importorskip("openai")
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    kind = "text" if api == "chat" else "input_text"
    parts = [
        {"type": kind, "text": "The Seine flows through Paris.\n\n", **mark},
        {"type": kind, "text": "The Loire is long.\n\n"},
        {"type": kind, "text": "Which river?"},
    ]
    turn = [{"role": "user", "content": parts}]
    with (
        caching_server("openai") as server,
        TraceRecorder(tmp_path) as recorder,
        recording(recorder),
        request_context(tenant="acme"),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        if api == "chat":
            system = [{"role": "system", "content": "Be helpful."}]
            client.chat.completions.create(
                model="gpt-x", messages=[*system, *turn], prompt_cache_key="of Alice"
            )
        else:
            client.responses.create(
                model="gpt-x", instructions="Be helpful.", input=turn, prompt_cache_key="of Alice"
            )
    (one,) = recorded(tmp_path)
    assert (one.system, one.query, one.marks) == ("Be helpful.", "Which river?", (1,))
    assert one.tenant == "acme"
    assert one.sent == SentCall(model="gpt-x", key=one.sent.key, system_tokens=3, marks={"turn": 1})
    assert one.sent.key
    assert "Alice" not in Path(tmp_path, "trace.jsonl").read_text()


async def test_async_clients_answer_as_before(tmp_path):
    anthropic = pytest.importorskip("anthropic")
    with (
        caching_server("anthropic") as server,
        TraceRecorder(tmp_path) as recorder,
        recording_anthropic(recorder),
    ):
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0)
        async with client:
            answer = await anthropic_call(client)
            stream = await anthropic_call(client, stream=True)
            assert [event.type for event in [one async for one in stream]]
    assert answer.content[0].text == server.answer
    assert len(recorded(tmp_path)) == 2
    assert recorder.faults == 0


def test_a_stream_is_recorded_once_in_each_way_to_ask_for_it(tmp_path):
    turn = [{"role": "user", "content": "A.\n\nWhich?"}]
    with recorded_client(tmp_path) as (server, client, _):
        with client.messages.stream(model="m", max_tokens=9, messages=turn) as stream:
            assert stream.get_final_text() == server.answer
        other = type(client)(base_url=server.url, api_key="x", max_retries=0)
        with other, other.messages.stream(model="m", max_tokens=9, messages=turn) as stream:
            assert stream.get_final_text() == server.answer
    assert [one.query for one in recorded(tmp_path)] == ["Which?"] * 2


def test_outside_of_a_recording_clients_are_as_they_were(tmp_path):
    messages = pytest.importorskip("anthropic.resources.messages")
    before = messages.Messages.create, messages.AsyncMessages.create
    with TraceRecorder(tmp_path) as recorder, recording_anthropic(recorder):
        assert messages.Messages.create is not before[0]
    assert (messages.Messages.create, messages.AsyncMessages.create) == before


def test_an_error_of_the_api_is_the_programs_and_the_prompt_is_recorded(tmp_path):
    anthropic = pytest.importorskip("anthropic")
    parts = [text(f"Part {n}.\n\n", marked=True) for n in range(5)]
    turn = [{"role": "user", "content": parts}]
    with recorded_client(tmp_path) as (_, client, _), pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="m", max_tokens=1, messages=turn)
    (one,) = recorded(tmp_path)
    assert one.sent.mark_count == 5


def test_without_texts_nothing_of_a_call_can_be_read(tmp_path):
    with recorded_client(tmp_path, hash_only=True) as (_, client, _):
        anthropic_call(client)
        anthropic_call(client)
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert not any(secret in written for secret in SECRETS)
    first, second = recorded(tmp_path)
    assert first.sent == second.sent
    assert len(first.sent.tools) == 2
    assert first.sent.system_tokens == 3


def note(recorder, messages, **fields):
    PromptRecorder(recorder).note(messages, fields)


def test_equal_tools_have_equal_names_with_marks_and_without(tmp_path):
    bare = [{name: one[name] for name in one if name != "cache_control"} for one in TOOLS]
    turn = [{"role": "user", "content": "a\n\nb"}]
    with TraceRecorder(tmp_path) as recorder:
        for tools in (TOOLS, bare, bare[::-1], [{**bare[0], "name": "find"}]):
            note(recorder, turn, tools=tools)
    marked, plain, turned, other = (one.sent.tools for one in recorded(tmp_path))
    assert marked == plain == turned[::-1]
    assert other[0] not in plain


def test_a_mark_behind_the_question_is_counted_and_stands_behind_no_document(tmp_path):
    parts = [text("A.\n\n"), text("B.\n\n"), text("Which?", marked=True)]
    with TraceRecorder(tmp_path) as recorder:
        note(recorder, [{"role": "user", "content": parts}])
        note(recorder, [{"role": "user", "content": "A.\n\nB.\n\nWhich?"}], cache_control=MARK)
    for one in recorded(tmp_path):
        assert (one.marks, one.sent.marks) == ((), {"turn": 1})


@pytest.mark.parametrize("place", ["tools", "system", "question", ""])
def test_as_sent_today_has_the_application_s_tools_and_breakpoints(tmp_path, place):
    tools = [{"description": "It searches. " * 400}]
    tools[0] |= {"cache_control": MARK} if place == "tools" else {}
    system = [text("Be brief. " * 400, marked=place == "system")]
    parts = [text("A.\n\nB.\n\n"), text("Which?", marked=place == "question")]
    with TraceRecorder(tmp_path) as recorder:
        prompts, fields = PromptRecorder(recorder), {"tools": tools, "system": system}
        for _ in range(3):
            prompts.note([{"role": "user", "content": parts}], fields)
    measured = measure_savings(EstimateConfig(trace=str(tmp_path), cache="anthropic"))
    today, sent = measured.runs[0], recorded(tmp_path)[0].sent
    ends = {"tools": sent.tool_tokens, "system": sent.tool_tokens + sent.system_tokens}
    read = (ends | {"question": today.prompt_tokens[0], "": 0})[place]
    assert (today.policy, today.cached_tokens) == ("as sent today", (0, read, read))
    assert sum(today.written.values()) == read
    assert measured.trace.conversations == 0  # nobody went on


def test_history_is_counted_without_the_system_text_and_the_last_question(tmp_path):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A.\n\nWhich?"},
        {"role": "assistant", "content": [text("It is A.", marked=True)]},
        {"role": "user", "content": "B.\n\nSure?"},
    ]
    with TraceRecorder(tmp_path) as recorder:
        note(recorder, messages)
    (one,) = recorded(tmp_path)
    assert (one.sent.history, one.sent.marks, one.query) == (2, {"history": 1}, "Sure?")
    assert one.sent.history_tokens == 5
    (planned,) = read_plan(str(tmp_path / "trace.jsonl"))
    assert planned.sent == one.sent


def test_tools_that_no_api_takes_lose_no_request():
    tools = [{"name": "n" * 99, "schema": {(1,): "no JSON"}}] * 1_001
    sent = read_call("Which?", {"tools": tools}, len, str).sent
    assert sent.tools == ("n" * 60 + "#['name', 'schema']",) * 1_000


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (7, "field 'sent' is 7 (int); it must be dict"),
        ({"tools": "search"}, "in 'sent': field 'tools' is 'search' (str); it must be list"),
        ({"tools": [1]}, "in 'sent': field 'tools' must hold strings"),
        ({"history": -1}, "in 'sent': field 'history' is -1 (int); it must be an integer from 0"),
        ({"marks": {"turn": "1"}}, "in 'sent', in 'marks': field 'turn' is '1' (str)"),
        (
            {"marks": {"turn": -1}},
            "in 'sent', in 'marks': field 'turn' is -1 (int); it must be an integer",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path, sent, problem):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"request_id": 1, "blocks": [], "sent": sent}))
    for read in (lambda: read_trace(str(path), {}), lambda: read_plan(str(path))):
        with pytest.raises(InputFileError) as caught:
            read()
        assert problem in str(caught.value)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
_fields = st.fixed_dictionaries(
    {},
    optional={
        "system": _json,
        "instructions": _json,
        "model": _json,
        "prompt_cache_key": _json,
        "cache_control": _json | st.just(MARK),
        "tools": _json | st.lists(st.sampled_from(TOOLS) | _json),
    },
)
_content = st.text() | st.lists(
    st.builds(text, st.text(max_size=9), marked=st.booleans()) | _json, max_size=4
)
_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": _content}
    ),
    max_size=4,
)


@given(_messages | _json, _fields)
def test_whatever_is_sent_its_recording_can_be_read(tmp_path_factory, messages, fields):
    folder = tmp_path_factory.mktemp("recording")
    with TraceRecorder(folder) as recorder:
        prompts = PromptRecorder(recorder)
        noted = prompts.note(messages, fields)
    assert recorder.faults == 0
    trace = [] if noted is None else recorded(folder)
    assert len(trace) == (noted is not None) == len([*folder.iterdir()]) / 2
    assert read_plan(str(folder / "trace.jsonl"))[0].sent == trace[0].sent if trace else True
