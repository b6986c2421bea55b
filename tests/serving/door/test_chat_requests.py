"""`ctxreuse serve` plans documents that come with chat requests, and sends all else on."""

import asyncio
import json
import re

import httpx
import pytest
from door_helpers import CHAT, MESSAGES, answering, asking, documents, served
from http_servers import response

from ctxreuse.serving import EmulatedEngine
from ctxreuse.serving.door import chat_bodies


def shown(body, message=-1):
    """The names of documents in a message, in the order of the prompt."""
    text = body["messages"][message]["content"]
    return sorted((name for name in "abcdef" if f"{name} says" in text), key=text.index)


async def test_documents_stand_before_the_question_in_the_order_that_hits():
    async with served(EmulatedEngine()) as door:
        first, second = await door.chat("abc"), await door.chat("bcad")
        bodies = door.bodies()
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached[0] == 0
    assert cached[1] > 150
    assert shown(bodies[1])[:3] == ["a", "b", "c"]
    text = bodies[1]["messages"][-1]["content"]
    assert text.startswith("A\na says")
    assert text.endswith("\n\nRead documents 2, 3, 1 first.\n\nWhich?")
    assert bodies[0].keys() == {"model", "messages"}


@pytest.mark.parametrize(
    "messages",
    [
        [
            {"role": "system", "content": "<{documents}>"},
            {"role": "user", "content": "What is {documents}?"},
        ],
        [{"role": "user", "content": [{"type": "text", "text": "<{documents}>"}]}],
        [
            {"role": "user", "content": "Of {documents}"},
            {"role": "assistant", "content": "OK, {documents}."},
            {"role": "user", "content": "<{documents}> and {documents}"},
        ],
    ],
    ids=["system", "part", "newest"],
)
async def test_documents_stand_where_the_prompt_asks_for_them(messages):
    async with served(EmulatedEngine()) as door:
        await door.chat("ab", messages=messages)
        sent = json.dumps(door.bodies()[0]["messages"])
    assert "<A\\na says" in sent
    whole = json.dumps(messages)
    before, place, behind = whole.partition("<{documents}>")
    assert place
    assert sent.startswith(before.replace("Of {documents}", "Of "))
    assert sent.endswith(f">{behind}".replace("is {documents}", "is "))


async def test_a_question_with_a_picture_gets_its_documents_in_front_of_its_text():
    picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/never-fetched.png"}}
    content = [picture, {"type": "text", "text": "What is it?"}]
    async with served(EmulatedEngine()) as door:
        await door.post(CHAT, json=asking("ab", messages=[{"role": "user", "content": content}]))
        sent = door.bodies()[0]["messages"][0]["content"]
    assert sent[0] == picture
    assert sent[1]["text"].startswith("A\na says")
    assert sent[1]["text"].endswith("\n\nWhat is it?")


async def test_a_conversation_is_shown_again_as_it_was_and_repeats_nothing():
    messages = [{"role": "user", "content": "{documents}\n\nOne?"}]
    async with served(EmulatedEngine()) as door:
        first = await door.chat("abc", messages=messages, conversation="c")
        said = first["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "Two?"}]
        await door.chat("bcd", messages=messages, conversation="c")
        messages += [said, {"role": "user", "content": "Three?"}]
        headers = {"x-conversation-id": "c"}
        await door.post(CHAT, json=asking(messages=messages), headers=headers)
        one, two, three = door.bodies()
    assert shown(one) == ["a", "b", "c"]
    assert two["messages"][0] == one["messages"][0]
    assert shown(two) == ["d"]
    assert "above" in two["messages"][-1]["content"]
    assert three["messages"][:3] == two["messages"]
    assert three["messages"][-1] == {"role": "user", "content": "Three?"}
    assert "conversation" not in three


async def test_documents_that_a_process_has_not_shown_are_left_out_and_that_is_logged_once(caplog):
    turn = {"role": "user", "content": "{documents}\n\nOne?"}
    messages = [turn, {"role": "assistant", "content": "OK."}, turn]
    async with served(EmulatedEngine()) as door:
        await door.chat("ab", messages=[turn], conversation="c")
        await door.chat("cd", messages=messages, conversation="c")
        assert caplog.text == ""
        for _ in range(2):
            await door.chat("cd", messages=messages, conversation="d")
        assert door.bodies()[-1]["messages"][0]["content"] == "\n\nOne?"
    assert caplog.text.count("history asks for {documents} that this process has not shown") == 1


async def test_an_empty_name_is_no_conversation_and_a_number_its_digits():
    messages = [{"role": "user", "content": "{documents}\n\nHi"}]
    async with served(EmulatedEngine()) as door:
        for name in ("", 5):
            said = (await door.chat("ab", messages=messages, conversation=name))["choices"][0]
            later = [*messages, said["message"], {"role": "user", "content": "Two?"}]
            headers = {"x-conversation-id": str(name)}
            await door.post(CHAT, json=asking(messages=later), headers=headers)
        _, unnamed, first, second = [one["messages"][0]["content"] for one in door.bodies()]
    assert (unnamed, second) == ("\n\nHi", first)


@pytest.mark.parametrize("cache", ["openai", "anthropic"])
async def test_in_shadow_mode_documents_are_sent_as_given_and_repeats_are_counted(
    cache, monkeypatch
):
    monkeypatch.setenv("CTXREUSE_MODE", "shadow")
    texts = {one["id"]: f"{one['title']}\n{one['text']}" for one in documents("abcd")}
    messages = [{"role": "user", "content": "One?"}]
    async with served(EmulatedEngine(), cache=cache) as door:
        first = await door.chat("abc", messages=messages, conversation="c")
        messages += [first["choices"][0]["message"], {"role": "user", "content": "Two?"}]
        second = await door.chat("cbd", messages=messages, conversation="c", ctxreuse=True)
        bodies, savings = door.bodies(), door.planner.savings
    assert bodies[1].keys() == {"model", "messages"}
    said = [one["content"] for one in bodies[1]["messages"]]
    assert said[0] == "\n\n".join([*map(texts.get, "abc"), "One?"])
    assert said[2] == "\n\n".join([*map(texts.get, "cbd"), "Two?"])
    assert second["ctxreuse"]["labels"] == {}
    assert savings.references == 2


async def test_only_answers_that_are_asked_for_tell_the_plan():
    async with served(EmulatedEngine()) as door:
        plain = await door.chat("abc")
        told = await door.chat("cba", ctxreuse=True, conversation="c")
        single = await door.chat("a", ctxreuse=True)
        kept = await door.chat("d", ctxreuse=True, conversation="c")
        bodies = door.bodies()
    assert "ctxreuse" not in plain
    assert set(told["ctxreuse"]) == {"order", "labels", "expected_cached_tokens"}
    assert sorted(told["ctxreuse"]["order"]) == ["a", "b", "c"]
    for label, name in told["ctxreuse"]["labels"].items():
        assert f"{label} {name.upper()}\n{name} says" in bodies[1]["messages"][0]["content"]
    assert len(told["ctxreuse"]["labels"]) == 3
    assert told["ctxreuse"]["expected_cached_tokens"] == 0
    assert (single["ctxreuse"]["order"], single["ctxreuse"]["labels"]) == (["a"], {})
    [label] = kept["ctxreuse"]["labels"]
    assert bodies[3]["messages"][0]["content"].startswith(f"{label} D\nd says")
    assert all("ctxreuse" not in one for one in bodies)


EVENTS = (
    b'data: {"choices": [{"delta": {"content": "data: {"}}]}\n\n: beat\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 9}}\n\ndata: [DONE]\n\n'
)
CLAUDE = (
    b'event: message_start\ndata: {"type": "message_start"}\n\n'
    b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
)
TOLD = re.compile(
    rb',?"ctxreuse":\{"order": \["a", "b"\], "labels": \{\}, "expected_cached_tokens": \d+\}'
)
PRETTY = b'{\n "choices": [{"message": {"content": "}"}}]\n}\n'


@pytest.mark.parametrize(
    ("path", "answer", "kind", "expected"),
    [
        (CHAT, EVENTS, "text/event-stream", EVENTS.replace(b"9}}", b"9}%}")),
        (MESSAGES, CLAUDE, "text/event-stream", CLAUDE.replace(b'stop"}', b'stop"%}')),
        (CHAT, PRETTY, "application/json", PRETTY.replace(b"\n}\n", b"\n%}\n")),
        (CHAT, b"{ }", "application/json", b"{ %}"),
        (CHAT, b"no object", "text/plain", b"no object"),
    ],
    ids=["events", "anthropic", "indented", "empty", "text"],
)
@pytest.mark.parametrize("size", [1, 7, 1_000])
async def test_the_plan_stands_in_the_last_object(path, answer, kind, expected, size):
    async def script(received, writer):
        if received.method == "GET":
            return writer.write(response(200))
        writer.write(f"HTTP/1.1 200 X\r\ncontent-type: {kind}\r\n\r\n".encode())
        for start in range(0, len(answer), size):
            writer.write(answer[start : start + size])
            await writer.drain()
        return None

    async with served(script) as door:
        plain = await door.post(path, json=asking("ab"))
        told = await door.post(path, json=asking("ab", ctxreuse=True))
    assert plain.content == answer
    assert TOLD.sub(b"%", told.content) == expected


@pytest.mark.parametrize("status", [200, 400, 401, 404, 422, 429])
@pytest.mark.parametrize("given", ["", "ab"])
async def test_answers_are_the_engines_byte_for_byte(status, given):
    body = b'{"any":\t"bytes", "of": [1.0, 1e5], "an": "\xc3\xa9\\u00e9"}\r\n'
    script = answering(status, body, x_own="1", retry_after="0", openai_processing_ms="7")
    async with served(script) as door:
        answer = await door.post(CHAT, json=asking(given))
    assert (answer.status_code, answer.content) == (status, body)
    assert answer.headers["x-own"] == "1"
    assert answer.headers["openai-processing-ms"] == "7"
    assert answer.headers["content-length"] == str(len(body))


@pytest.mark.parametrize("given", ["", "ab"])
async def test_streams_are_the_engines_byte_for_byte_as_they_come(given):
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    engine = EmulatedEngine(answer="A longer answer, of several words and events.")
    async with served(engine) as door:
        await door.post(CHAT, json=asking(given, **fields))
        answer = await door.post(CHAT, json=asking(given, **fields))
        async with httpx.AsyncClient(trust_env=False) as http:
            again = await http.post(door.engines[0].url + CHAT, json=door.bodies()[-1])
    assert answer.headers["content-type"] == again.headers["content-type"]
    assert answer.text.replace("chatcmpl-1", "chatcmpl-2") == again.text
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_without_anything_of_ours_a_body_goes_through_as_it_came():
    raw = b'{ "model":"m","messages" : "of no list", "unknown": [1.50, 1e400], "unknown": 2 }'
    async with served(EmulatedEngine()) as door:
        headers = {"content-type": "application/json; charset=utf-8", "te": "x"}
        await door.post(CHAT, content=raw, headers={"x-trace": "t", "cookie": "c", **headers})
        received = next(one for one in door.engines[0].received if one.method == "POST")
        assert door.planner.savings.prompts_without_context == 1
    assert received.body == raw
    assert received.headers["x-trace"] == "t"
    assert not {"cookie", "te"} & received.headers.keys()


async def test_a_planning_fault_sends_the_request_as_it_came_and_counts(monkeypatch):
    def fail(*arguments):
        raise ArithmeticError("a fault")

    monkeypatch.setattr(chat_bodies.ChatPlanner, "_given", fail)
    async with served(EmulatedEngine()) as door:
        await door.chat("ab")
        assert door.bodies() == [asking("ab")]
        assert door.planner.savings.planning_failures == 1
        assert (await door.get("/v1/savings")).json()["planning_failures"] == 1


async def test_what_was_answered_is_reported_and_what_was_not_is_taken_back():
    async with served(EmulatedEngine(fail=[400])) as door:
        refused = await door.post(CHAT, json=asking("abc"))
        assert refused.status_code == 400
        assert door.planner.savings.requests == 0
        await door.chat("abc", stream=False)
        stream = asking("abc", stream=True, stream_options={"include_usage": True})
        await door.post(CHAT, json=stream)
        reported = door.planner.savings.reported
    assert reported.answers == 2
    assert reported.cached_tokens > 50


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_counts_whose_caller_goes_away_when_it_has_read_it(streams):
    fields = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    end = b"[DONE]" if streams else b"}}"
    async with served(EmulatedEngine()) as door:
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", door.base_url.port)
            body = json.dumps(asking("abc", **fields)).encode()
            kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\n" % CHAT.encode() + kind + body)
            answer = b""
            while end not in answer:
                answer += await reader.read(1 << 16)
            writer.close()
            await asyncio.sleep(0.1)
        reported = door.planner.savings.reported
        [engine] = [
            line
            for line in (await door.get("/metrics")).text.splitlines()
            if line.startswith("ctxreuse_replica_answered_requests_total")
        ]
    assert (reported.answers, engine.split()[-1]) == (4, "4.0")


async def test_a_conversation_stays_with_its_engine_and_documents_go_where_they_are_cached():
    async with served(EmulatedEngine(), EmulatedEngine()) as door:
        for number in range(6):
            await door.chat("abc" if number % 2 else "def")
        shares = [{tuple(sorted(shown(one))) for one in door.bodies(at)} for at in (0, 1)]
        assert not shares[0] & shares[1]
        messages = [{"role": "user", "content": "One?"}]
        said = (await door.chat("abc", messages=messages, conversation="c"))["choices"][0]
        counts = [len(door.bodies(at)) for at in (0, 1)]
        for _ in range(4):
            messages += [said["message"], {"role": "user", "content": "More?"}]
            await door.chat(messages=messages, conversation="c")
        after = [len(door.bodies(at)) for at in (0, 1)]
    assert sorted(b - a for a, b in zip(counts, after, strict=True)) == [0, 4]


async def test_requests_that_wait_together_are_planned_together():
    async with served(EmulatedEngine(), window_ms=200) as door:
        await asyncio.gather(*(door.chat(names) for names in ("abc", "cbd", "bce")))
        texts = [one["messages"][0]["content"] for one in door.bodies()]
    assert len({text[:300] for text in texts}) == 1  # they begin alike


async def test_templates_of_plans_show_any_key_and_nothing_of_texts():
    given = [{"text": f"{{title}} {one}", "title": "T", "n": 3} for one in "{b"]
    async with served(EmulatedEngine()) as door:
        asked = {"documents": given, "template": "{title}|{n}: {text} {"}
        text = (await door.post("/v1/plan", json=asked)).json()["text"]
    assert text.startswith("T|3: {title} { {")
    assert "T|3: {title} b {" in text


@pytest.mark.parametrize("documents_", [documents("ab"), []])
async def test_a_body_of_anthropics_protocol_with_a_system_text(documents_):
    body = {"model": "m", "system": "Of {documents}", "messages": asking()["messages"]}
    async with served(answering(200, b"{}")) as door:
        await door.post(MESSAGES, json={**body, "documents": documents_})
        sent = door.bodies()[0]
    assert ("a says" in sent["system"]) == bool(documents_)
    assert sent["messages"] == body["messages"]
    assert "documents" not in sent


@pytest.mark.parametrize("given", [{"documents": []}, {"conversation": "c"}, {"documents": "ab"}])
async def test_only_the_first_placeholder_of_a_message_is_ours_and_no_document_is_changed(given):
    if given.get("documents"):
        given = {"documents": documents("ab")}
        given["documents"][0]["text"] += "See {documents}."
    question = "{documents}\n\nWhich? {documents}"
    messages = [{"role": one, "content": question} for one in ("system", "user")]
    async with served(EmulatedEngine()) as door:
        await door.chat(messages=messages, **given)
        shown = [one["content"] for one in door.bodies()[0]["messages"]]
    assert shown[1] == "\n\nWhich? {documents}"
    assert "".join(shown).count("{documents}") == 2 + bool(given.get("documents"))
    assert shown[0].endswith("Which? {documents}")
