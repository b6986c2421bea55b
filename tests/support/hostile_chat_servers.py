"""OpenAI-compatible servers that answer anything, for the clients of LangChain and LlamaIndex.

The measure is the framework's own model: what becomes of a reply there, value or error, has to
become of it in the model that wraps it.
"""

import asyncio
import json
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import httpx
from hostile_servers import BROKEN, BreakingOff, event
from http_servers import Received, Script, engine_script
from openai_models import clients_of

from ctxreuse.serving import EmulatedEngine

BEGIN, MIDDLE, REST = "As [KWBC] and [ZT", "SN, H", "ZZJ] say, and not KWBC.pdf."
WORDS = BEGIN + MIDDLE + REST
"""An answer that names labels, and the places where a stream cuts it."""

ARGUMENTS = '{"of": ["[KWBC]"], "name": "ZTSN"}'
HOSTILE = "a hostile question"

CALL: dict[str, Any] = {
    "index": 0,
    "id": "c",
    "type": "function",
    "function": {"name": "look", "arguments": ARGUMENTS},
}
USAGE: dict[str, Any] = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 5},
}


def _text_of(message: Any) -> str:
    """Return what a model says that only completes a text; the same as one that chats."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, str) else ""


def chunk(delta: Any, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "text": _text_of(delta), "finish_reason": finish}
    return {
        "id": "r",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
        **fields,
    }


def whole(message: Any, **fields: Any) -> dict[str, Any]:
    """Return a reply that is not streamed."""
    choice = {"index": 0, "message": message, "text": _text_of(message), "finish_reason": "stop"}
    return {
        "id": "r",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": USAGE,
        **fields,
    }


def stream_of(*chunks: Any) -> bytes:
    """Return a stream of events that ends as it should."""
    return b"".join(map(event, (*chunks, "[DONE]")))


def nested(depth: int = 500, inside: Any = "x") -> Any:
    value: Any = inside
    for _ in range(depth):
        value = [value]
    return value


ODD: list[Any] = [
    *(5, -5, "ten", "", True, None, 1.5, float("nan"), 1e308, 10**400),
    *([1], {"a": 1}, [[]], [None], ["x", {"type": "text", "text": "x"}], nested()),
]
_PLACES = [
    *("choices", "choices.0", "choices.0.index", "choices.0.finish_reason", "choices.0.logprobs"),
    *("choices.0.text", "choices.0.MESSAGE"),
    *(
        f"choices.0.MESSAGE.{name}"
        for name in (
            *("role", "content", "refusal", "reasoning_content", "function_call", "tool_calls"),
            *("tool_calls.0", "tool_calls.0.index", "tool_calls.0.id", "tool_calls.0.type"),
            *("tool_calls.0.function", "tool_calls.0.function.name"),
            "tool_calls.0.function.arguments",
        )
    ),
    *("usage", "usage.prompt_tokens", "usage.completion_tokens", "usage.total_tokens"),
    *("usage.prompt_tokens_details", "usage.prompt_tokens_details.cached_tokens"),
    *("id", "object", "created", "model", "system_fingerprint", "service_tier", "error"),
]
PLACES = {one.replace("choices.0.MESSAGE", "message"): one for one in _PLACES}
"""Where a reply may be odd."""

_CONTENTS: list[Any] = [
    ["[KWBC]", " and [ZT", "xx]"],
    [{"type": "text", "text": "[KWBC] and [ZT", "index": [1]}, {"type": ["text"], "text": "xx]"}],
    [{"type": "text", "text": "[kw", "index": 0}, {"type": "text", "text": "xx]", "index": {}}],
    [{"type": "text", "text": 5}, {"type": "tool_use", "input": nested(15, "[KWBC]")}],
    [{"type": "text", "text": "[KWBC"}, " [ZTSN ", {"type": "output_text", "text": "[HZZJ]"}],
    "[KWBC]" * 3_000,
    "\ud800 [KWBC] \x00 [ZTSN",
]
_CALLS: list[Any] = [
    [{**CALL, "function": {"name": "look", "arguments": one}}]
    for one in (
        *("", "[KWBC]", "{", '{"of": "[KWBC', "[" * 500 + "]" * 500, '{"a": NaN}', "\ud800"),
        *('"[KWBC]"', '["[KWBC]"]', "null", '{"of": ' * 300 + '"KWBC"' + "}" * 300),
        '{"of": "[KWBC]", "of": "[ZTSN]"}',
    )
] + [
    [CALL, CALL],
    [CALL, {**CALL, "index": None}],
    [{**CALL, "id": None}, {**CALL, "id": ["c"], "index": 1}],
    [{name: one for name, one in CALL.items() if name != "index"}, CALL],
    [{**CALL, "function": {"name": "unknown", "arguments": ARGUMENTS}}],
    [{**CALL, "function": {"name": "", "arguments": '{"of": "[kw'}}] * 2,
]


def _with_odd(reply: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a reply with one place set to a value."""
    changed = deepcopy(reply)
    holder: Any = changed
    *path, last = place.split(".")
    for step in path:
        holder = holder[int(step) if step.isdigit() else step]
    holder[int(last) if last.isdigit() else last] = value
    return changed


def _streamed(reply: dict[str, Any]) -> bytes:
    return stream_of(chunk({"role": "assistant", "content": BEGIN}), reply, *_ENDING)


_ENDING = [chunk({"content": REST}), chunk({}, "stop"), {**chunk({}), "choices": []}]
_ODD_CHUNK = chunk({"content": MIDDLE, "tool_calls": [CALL]}, usage=USAGE)
_ODD_WHOLE = whole({"role": "assistant", "content": WORDS, "tool_calls": [CALL]})


def both_with(place: str, value: Any) -> tuple[bytes, bytes]:
    """Return a stream and a whole reply that are odd in the same place."""
    streamed = _with_odd(_ODD_CHUNK, place.replace("MESSAGE", "delta"), value)
    complete = _with_odd(_ODD_WHOLE, place.replace("MESSAGE", "message"), value)
    return _streamed(streamed), json.dumps(complete).encode()


_FUNCTIONS: list[Any] = [
    {"name": "look", "arguments": one} for one in (ARGUMENTS, '{"of": "[KWBC', 5, ["[KWBC]"], {})
]

REPLIES: dict[str, tuple[bytes, bytes]] = {
    "honest": (_streamed(_ODD_CHUNK), json.dumps(_ODD_WHOLE).encode()),
    "an error in a stream": (
        stream_of(chunk({"content": BEGIN}), {"error": {"message": "no", "code": 5}}),
        b'{"error": {"message": "no"}}',
    ),
    "labels cut anywhere": (
        stream_of(*(chunk({"content": one}) for one in WORDS), *_ENDING),
        json.dumps(whole({"role": "assistant", "content": WORDS})).encode(),
    ),
    "arguments cut anywhere": (
        stream_of(
            chunk({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "look"}}]}),
            *(
                chunk({"tool_calls": [{"index": 0, "function": {"arguments": one}}]})
                for one in ARGUMENTS
            ),
            *_ENDING[1:],
        ),
        json.dumps(whole({"role": "assistant", "tool_calls": [CALL]})).encode(),
    ),
    "no end": (
        event(chunk({"content": BEGIN})) + b"data: {",
        json.dumps(_ODD_WHOLE).encode()[:-20],
    ),
    "comments": (
        b": hello\n\n" + _streamed(_ODD_CHUNK).replace(b"\n\n", b"\n: more\nid: 5\n\n"),
        b"// hello\n{}",
    ),
    "no UTF-8": (
        _streamed(_ODD_CHUNK).replace(b"say", b"s\xffy"),
        json.dumps(_ODD_WHOLE).encode().replace(b"say", b"s\xffy"),
    ),
    "JSON": (
        _streamed(chunk({"content": ARGUMENTS})),
        json.dumps(whole({"role": "assistant", "content": ARGUMENTS})).encode(),
    ),
    "no choices": (stream_of({**chunk({}), "choices": []}), b'{"id": "r", "choices": []}'),
    "nothing": (b"", b""),
    **{f"broken {one[:30]!r}": (one, one) for one in BROKEN},
    **{
        f"broken behind words {one[:30]!r}": (event(chunk({"content": BEGIN})) + one, one)
        for one in BROKEN
    },
}
for _number, _content in enumerate(_CONTENTS):
    REPLIES[f"content {_number}"] = both_with("choices.0.MESSAGE.content", _content)
for _number, _calls in enumerate(_CALLS):
    REPLIES[f"calls {_number}"] = both_with("choices.0.MESSAGE.tool_calls", _calls)
for _number, _function in enumerate(_FUNCTIONS):
    REPLIES[f"function {_number}"] = both_with("choices.0.MESSAGE.function_call", _function)
REPLIES["refusal"] = both_with("choices.0.MESSAGE.refusal", "Not even [KWBC]")
for _name, _place in PLACES.items():
    for _number, _value in enumerate(ODD):
        REPLIES[f"{_name} = {repr(_value)[:20]}"] = both_with(_place, _value)

KINDS = {name: reply for name, reply in REPLIES.items() if " = " not in name}
SAMPLES = KINDS | {
    name: reply for number, (name, reply) in enumerate(REPLIES.items()) if not number % len(ODD) % 4
}
"""Some of all kinds, for what takes longer."""

Handler = Callable[[httpx.Request], httpx.Response]


def replying(
    reply: tuple[bytes, bytes], honest: tuple[bytes, bytes] | None = None, once: bool = False
) -> Handler:
    """Return what answers as a server does that is hostile to some.

    Args:
        reply: Its stream, and what it sends if none is asked for, to prompts that say `HOSTILE`.
        honest: The same for others; None takes the one that is as it should be.
        once: Whether it is hostile only as long as nothing stands behind the user's words.
    """

    def answer(request: httpx.Request) -> httpx.Response:
        is_met = HOSTILE.encode() in request.content
        if is_met and once:
            is_met = json.loads(request.content)["messages"][-1]["role"] == "user"
            is_met = is_met and b"And then?" not in request.content
        given = reply if is_met else honest or REPLIES["honest"]
        if json.loads(request.content).get("stream"):
            headers = {"content-type": "text/event-stream"}
            return httpx.Response(200, headers=headers, content=given[0])
        headers = {"content-type": "application/json"}
        return httpx.Response(200, headers=headers, content=given[1])

    return answer


def breaking_off(*parts: bytes) -> Handler:
    """Return what answers a hostile prompt with a body that breaks off, others as it should."""
    honest = replying(REPLIES["honest"])

    def answer(request: httpx.Request) -> httpx.Response:
        if HOSTILE.encode() not in request.content:
            return honest(request)
        kind = "text/event-stream" if json.loads(request.content).get("stream") else "text/json"
        return httpx.Response(200, headers={"content-type": kind}, stream=BreakingOff(*parts))

    return answer


def answered_as_it_should_be_unless(hostile_to: str, script: Script) -> Script:
    """Return a script that serves an emulated engine, and another one to prompts with a text."""
    honest = engine_script(EmulatedEngine(answer="Here."))

    async def serve(received: Received, writer: asyncio.StreamWriter) -> None:
        await (script if hostile_to.encode() in received.body else honest)(received, writer)

    return serve


def clients(answer: Handler) -> tuple[httpx.Client, httpx.AsyncClient]:
    """Return clients that reach this server without a socket."""
    return clients_of(httpx.MockTransport(answer))


class Outcome:
    """What became of a call.

    Attributes:
        said: What it has said, piece by piece: in a stream before its end or its error.
        value: What it returned, written out.
        error: The type and the words of what it raised.
    """

    def __init__(self) -> None:
        self.said = ""
        self.value = ""
        self.error = ""

    def note(self, error: Exception) -> None:
        words = f"{type(error).__name__}: {error}"
        self.error = re.sub(r"0x[0-9a-f]+|position \d+", "", words)

    def __repr__(self) -> str:
        return f"said {self.said!r}, returned {self.value}, raised {self.error}"


def of_call(call: Callable[[Outcome], Any]) -> Outcome:
    """Return what becomes of a call, which may be awaited."""
    outcome = Outcome()

    async def awaited(made: Any) -> Any:
        return await made

    try:
        made = call(outcome)
        made = asyncio.run(awaited(made)) if hasattr(made, "__await__") else made
        outcome.value = repr(made)
    except Exception as error:
        outcome.note(error)
    return outcome
