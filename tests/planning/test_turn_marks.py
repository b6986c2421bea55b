"""Marks of a conversation's turns: of the first one, of later ones, and of previews."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from caching_provider import count_tokens
from caching_server import CachingServer, caching_server
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.context.content_parts import ContentPart, joined, without_blank_parts
from ctxreuse.context.rendering import Templates
from ctxreuse.errors import InvalidRequestError
from ctxreuse.rules import cache_marks
from ctxreuse.rules.cache_rules import cache_profile

SYSTEM = "Answer from these. " * 10


@pytest.fixture(params=["openai", "anthropic"])
def server(request: pytest.FixtureRequest) -> Iterator[CachingServer]:
    with caching_server(request.param) as server:
        yield server


def blocks(*names: str) -> list[ContextBlock]:
    return [ContextBlock(id=one, text=f"{one} says: {'well ' * 700}") for one in names]


def planner_for(server: CachingServer) -> ReusePlanner:
    return ReusePlanner(cache=server.provider.protocol, token_counter=count_tokens)


def send(server: CachingServer, plan: Plan) -> int:
    form: Any = server.provider.protocol
    server.reckon(plan.body(form), {})
    return server.usages[-1].read


def share(server: CachingServer, planner: ReusePlanner, *names: str, times: int = 3) -> int:
    """Have others ask about documents; return how many tokens they read in the end."""
    for _ in range(times):
        chat = planner.conversation(f"{len(server.bodies)}", system=SYSTEM)
        plan = chat.plan(blocks(*names), f"Question {len(server.bodies)}?", now=server.now)
        read = send(server, plan)
    return read


def test_a_turn_that_comes_late_reads_what_others_keep_alive(server):
    planner, life = planner_for(server), 300 if server.provider.protocol == "anthropic" else 1_800
    shared = share(server, planner, "one", "two")
    assert shared > 1_400
    chat = planner.conversation("c", system=SYSTEM)

    def turn(question: str, *names: str) -> int:
        plan = chat.plan(blocks(*names), question, now=server.now)
        read = send(server, plan)
        chat.record("Yes.")
        return read

    assert turn("Which?", "one", "two") == shared
    for question in ("And?", "Well?"):
        server.now += life - 10
        assert share(server, planner, "one", "two", times=1) == shared
        server.now += 20
        assert turn(question, f"{question} three") == shared
        assert turn(f"{question} now", f"{question} four") > shared
    assert not server.refusals


def test_a_turn_asked_in_other_words_reads_its_documents(server):
    planner = planner_for(server)
    chat = planner.conversation("c", system=SYSTEM)
    send(server, chat.plan(blocks("one", "two"), "Which?"))
    chat.record("Yes.")
    first = server.usages[-1].total
    send(server, chat.plan(blocks("three"), "And this?"))
    read = send(server, chat.plan(blocks("three"), "What of this?"))
    assert read > first + 700
    assert chat.plan([], "Sure?").marks == ()


@pytest.mark.parametrize("names", [("one", "two"), ()])
def test_turns_whose_history_holds_the_marks_that_were_sent_read_the_turn_before(server, names):
    planner = planner_for(server)
    if names:
        share(server, planner, *names)
    history: list[Any] = []
    for number in range(9):
        found = blocks(*names) if not number else blocks(f"new {number}")
        before = server.usages[-1].total if number else 0
        request = ContextRequest(
            found, f"Turn {number}?", system=SYSTEM, history=history, conversation_id="c"
        )
        plan = planner.plan(request, now=server.now)
        read = send(server, plan)
        assert not number or read == (before if before >= 1_024 else 0)
        sent = plan.messages(parts=True)
        history = [one for one in sent if one["role"] != "system"]
        history.append({"role": "assistant", "content": "Yes."})
    assert not server.refusals


def test_the_end_of_a_first_turn_does_not_push_out_what_is_read(server):
    planner = planner_for(server)
    names = ["one", "two", "three", "four", "five"]
    for depth in (1, 2, 3, 4, 5):
        share(server, planner, *names[:depth], times=4)
    chat = planner.conversation("c", system=SYSTEM)
    plan = chat.plan(blocks(*names, "mine"), "Which?", now=server.now)
    assert send(server, plan) > 3_000


contexts = st.lists(
    st.lists(st.sampled_from("abcdef"), unique=True, max_size=4), min_size=1, max_size=8
)


@given(contexts, contexts, st.sampled_from(["openai", "anthropic"]))
@examples(40)
def test_a_preview_shows_the_marks_that_a_plan_would_have(found, tried, cache):
    planner = ReusePlanner(cache=cache, token_counter=count_tokens)
    plain = ReusePlanner(cache=cache, token_counter=count_tokens)
    history: list[Any] = []
    for number, names in enumerate(found):
        for other in tried[:2]:
            planner.preview(ContextRequest(blocks(*other), "Other?"), now=number)
        fields: Any = {"history": history, "conversation_id": "c"} if number % 2 else {}
        request = ContextRequest(blocks(*names), "Which?", **fields)
        preview, plan = planner.preview(request, now=number), planner.plan(request, now=number)
        assert preview.marks == plan.marks
        assert preview.body() == plan.body()
        assert plan.marks == plain.plan(request, now=number).marks
        history = [*plan.messages(), {"role": "assistant", "content": "Yes."}]


OPENAI, ANTHROPIC = cache_profile("openai"), cache_profile("anthropic")
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def planned(
    blocks: list[Any], query: str = "Which?", marks: tuple[int, ...] = (), **request: Any
) -> Plan:
    given = ContextRequest(blocks, query, **request)
    plan = ReusePlanner(labels=False).plan(given, "none")
    return replace(plan, marks=marks, cache=OPENAI)


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def message(role: str, *content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content), **fields}


def of_responses(words: str, **fields: Any) -> dict[str, Any]:
    return text(words, **fields) | {"type": "input_text"}


texts = st.text(alphabet="ab \n\t\u00a0\ud800", max_size=6)


@given(
    st.lists(texts, max_size=6),
    texts,
    st.lists(st.integers(0, 7), max_size=4),
    st.booleans(),
    st.sampled_from(["\n\n", " ", "", "---", "\n-\n"]),
    st.sampled_from(["before_question", "after_question"]),
)
def test_parts_add_up_to_the_content_none_blank(blocks, query, marks, labels, separator, position):
    templates = Templates(separator=separator, order_position=position)
    planner = ReusePlanner(labels=labels, templates=templates)
    planner.plan(ContextRequest(blocks[::-1]))
    plan = planner.plan(ContextRequest(blocks, query))
    plan = replace(plan, marks=tuple(marks), cache=OPENAI)
    parts = plan.content_parts()
    if plan.content.strip():
        assert joined(parts) == plan.content
        assert all(part.text.strip() for part in parts)
    else:
        assert parts == ()
    [message] = plan.messages(parts=True)
    content = message["content"]
    said = content if isinstance(content, str) else "".join(one["text"] for one in content)
    assert said == plan.content == plan.messages()[-1]["content"]


@given(st.lists(texts, min_size=1, max_size=6), st.lists(texts, max_size=3), texts, texts)
def test_prompts_that_begin_with_equal_blocks_begin_with_equal_parts(shared, more, query, other):
    shared = [*shared, "end"]  # a blank block's part depends on the one behind it
    ids = range(len(shared) + len(more))
    blocks = [ContextBlock(id=n, text=one) for n, one in zip(ids, [*shared, *more], strict=True)]
    one = planned(blocks[: len(shared)], f"{query}?").content_parts()  # blanks at the end stay
    two = planned(blocks, f"{other}!").content_parts()
    alike = [a for a, b in zip(one, two, strict=False) if a.text == b.text]
    assert len(alike) >= sum(bool(text.strip()) for text in shared)


def test_a_mark_on_a_blank_part_moves_to_the_part_before_it():
    parts = [ContentPart("a"), ContentPart("\n", is_marked=True), ContentPart("b")]
    assert without_blank_parts(parts) == [ContentPart("a", is_marked=True), ContentPart("\nb")]


def test_marks_stand_behind_blocks_and_behind_the_system_text():
    plan = planned(["one", "two", "three"], marks=(0, 2), system="Be brief.")
    assert plan.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\n\ntwo\n\nthree\n\nWhich?"},
    ]

    def shown(part: Any, mark: dict[str, Any]) -> dict[str, Any]:
        marked = part("\n\ntwo", **mark)
        return message("user", part("one"), marked, part("\n\nthree"), part("\n\nWhich?"))

    system = message("system", text("Be brief.", **MARK))
    assert plan.messages(parts=True) == [system, shown(text, MARK)]
    assert plan.body("responses") == {
        "input": [message("system", of_responses("Be brief.", **MARK)), shown(of_responses, MARK)],
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "prompt_cache_key": plan.prompt_cache_key,
    }
    hour = replace(plan, cache=cache_profile("anthropic(life=1h)"))
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert hour.body("anthropic") == {
        "system": [text("Be brief.", **mark)],
        "messages": [shown(text, mark)],
    }
    assert hour.messages(parts=True)[0]["content"] == [text("Be brief.", **mark)]


def test_blocks_become_search_results_that_answers_cite():
    blocks = [ContextBlock(id="d1", text="one"), ContextBlock(id=2, text="two")]
    plan = planned(blocks, marks=(1,))
    [message] = plan.messages(parts=True, form="anthropic", citations=True)

    def result(source: str, words: str, **fields: Any) -> dict[str, Any]:
        return {
            "type": "search_result",
            "source": source,
            "title": source,
            "content": [{"type": "text", "text": words}],
            "citations": {"enabled": True},
            **fields,
        }

    assert message["content"] == [
        result("d1", "one", **EPHEMERAL), result("2", "two"), text("\n\nWhich?"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"form": "anthropic"}, {"parts": True, "form": "gemini"}, {"parts": True, "citations": True}],
)
def test_options_that_do_not_go_together_are_refused(options):
    with pytest.raises(InvalidRequestError):
        planned(["one"]).messages(**options)


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
HISTORY: list[dict[str, Any]] = [
    message("user", text("look", **EPHEMERAL), PICTURE, name="ann", extra=1),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "found"},
    {"role": "assistant", "content": "It is."},
]


def test_what_a_history_says_is_kept_in_every_form():
    plan = planned(["one"], history=HISTORY)
    assert plan.messages()[:4] == HISTORY
    assert plan.messages(parts=True)[:4] == HISTORY
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    picture = {"type": "image", "source": source}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    assert plan.body("anthropic")["messages"][:4] == [
        message("user", text("look", **EPHEMERAL), picture, extra=1),
        message("assistant", use),
        message("user", {"type": "tool_result", "tool_use_id": "t1", "content": "found"}),
        {"role": "assistant", "content": "It is."},
    ]
    result = message("user", {"type": "tool_result", "tool_use_id": "t1", "content": "found"})
    for first in (HISTORY[2], result):
        both = planned(["one"], history=[*HISTORY[:2], first, {**HISTORY[2], "tool_call_id": "t2"}])
        assert [len(one["content"]) for one in both.body("anthropic")["messages"][:3]] == [2, 1, 2]
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    assert plan.body("responses")["input"][:4] == [
        message("user", of_responses("look", **EPHEMERAL), picture, name="ann", extra=1),
        {"type": "function_call", "call_id": "t1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "t1", "output": "found"},
        {"role": "assistant", "content": "It is."},
    ]


@pytest.fixture
def once(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    cache_marks._log_too_many.cache_clear()
    caplog.set_level(logging.WARNING, "ctxreuse")
    return caplog


def marks_of(body: Any) -> list[str]:
    messages = [{"content": body.get("system", [])}, *body["messages"]]
    parts = [
        part
        for message in messages
        for part in (message["content"] if isinstance(message["content"], list) else ())
    ]
    return [part["text"] for part in parts if "cache_control" in part]


@pytest.mark.parametrize("users", range(7))
def test_a_fifth_mark_never_leaves_us(users, once):
    marked = [text(f"user {n}", **EPHEMERAL) for n in range(users)]
    history = [message("user", *marked), {"role": "assistant", "content": "Yes."}]
    plan = planned(["one", "two", "three"], "", marks=(0, 1, 2, 3), system="S", history=history)
    plan = replace(plan, cache=ANTHROPIC)
    for _ in range(2):
        marked = marks_of(plan.body("anthropic"))
        # the end of the turn is needed most, then its beginning, then what may be asked again
        ours = ["\n\nthree", "S", "one", "\n\ntwo"]
        expected = [f"user {n}" for n in range(users)][-4:]
        kept = ours[: max(0, 4 - users)]
        assert sorted(marked) == sorted([*expected, *kept])
        assert len(marked) == 4
    assert len(once.records) == (users > 2)


def test_marks_on_tools_count_too():
    plan = replace(planned(["one", "two"], marks=(1, 2)), cache=ANTHROPIC)
    tools = [{"name": f"t{n}", "input_schema": {}, **EPHEMERAL} for n in range(3)]
    assert marks_of(plan.body("anthropic", tools=tools)) == ["\n\ntwo"]


@pytest.mark.parametrize(
    ("ours", "before", "sent"), [("1h", "5m", None), ("5m", "1h", None), ("1h", "1h", "1h")]
)
def test_a_longer_time_to_live_never_stands_behind_a_shorter_one(ours, before, sent):
    mark = {"cache_control": {"type": "ephemeral", "ttl": before}}
    history = [message("user", text("first", **mark)), {"role": "assistant", "content": "Yes."}]
    plan = planned(["one"], marks=(1,), history=history)
    plan = replace(plan, cache=cache_profile(f"anthropic(life={ours})"))
    part = plan.body("anthropic")["messages"][-1]["content"][0]
    assert part["cache_control"].get("ttl") == sent


LONG = ["alpha " * 600, "beta " * 600, "gamma " * 600]


def test_the_sdks_read_what_a_plan_before_has_written():
    one = planned(LONG, "Which one?", marks=(2,), system="Be brief.")
    two = planned([*LONG[:2], "else " * 600], "Which other?", marks=(2,), system="Be brief.")
    shared = count_tokens("Be brief.") + 1_200
    with caching_server("openai") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k")
        with client:
            client.chat.completions.create(model="m", **one.body())
            client.chat.completions.create(model="m", **two.body())
            client.responses.create(model="m", **one.body("responses"))
            client.responses.create(model="m", **two.body("responses"))
        assert [usage.read for usage in server.usages] == [0, shared, shared, shared]
        assert server.usages[0].written == {"30m": shared}
    with caching_server("anthropic") as server:
        plans = [replace(one, cache=ANTHROPIC), replace(two, cache=ANTHROPIC)]
        with anthropic.Anthropic(base_url=server.url, api_key="k") as claude:
            for plan in plans:
                claude.messages.create(model="m", max_tokens=9, **plan.body("anthropic"))
        assert [usage.read for usage in server.usages] == [0, shared]
