"""Replies of servers to the clients of LangChain and LlamaIndex, compared with and without us."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from random import Random
from typing import Any

import httpx
import langchain_hostile_calls as of_langchain
import llamaindex_hostile_calls as of_llamaindex
from hostile_chat_servers import (
    CALL,
    HOSTILE,
    REPLIES,
    USAGE,
    WORDS,
    BreakingOff,
    Outcome,
    chunk,
    of_call,
    whole,
)
from langchain_model_helpers import question

from fuzz_targets.mutation import NUMBERS, Target, as_json, mutated, mutated_bytes, text
from langchain_ctxreuse import ReuseChatModel
from llamaindex_ctxreuse import ReuseLLM

_CALLS: dict[str, tuple[str, ...]] = {
    "langchain": ("invoke", "ainvoke", "stream", "astream", "bind_tools streamed"),
    "llamaindex": ("chat", "achat", "stream_chat", "astream_chat", "complete", "stream_complete"),
}


def _reply(of: str, source: Random) -> dict[str, Any]:
    cuts = sorted(source.randrange(len(WORDS) + 1) for _ in range(source.randrange(4)))
    pieces = [WORDS[at:end] for at, end in zip([0, *cuts], [*cuts, None], strict=True)]
    words: Any = source.choice((WORDS, text(source), WORDS + text(source)))
    chunks = [chunk({"content": one}) for one in (*pieces, text(source))]
    chunks.append(chunk({"content": words, "tool_calls": [CALL]}, "stop", usage=USAGE))
    changed = [mutated(one, source, 2) if source.random() < 0.3 else one for one in chunks]
    message = {"role": "assistant", "content": words, "tool_calls": [CALL]}
    complete = mutated(whole(message), source)
    if source.random() < 0.1 and isinstance(complete, dict):
        complete["usage"] = {name: source.choice(NUMBERS) for name in USAGE}
    end = source.choice((b"data: [DONE]\n\n", b"data: [DONE]\n\n", b": a comment\n\n", b""))
    stream = b"".join(b"data: " + as_json(one, source) + b"\n\n" for one in changed) + end
    return {
        "call": source.choice(_CALLS[of]),
        "stream": mutated_bytes(stream, source),
        "whole": as_json(complete, source),
        "status": source.choice((200,) * 8 + (400, 429, 500)),
        "packet": source.choice((10**9, 10**9, 1000, 7)),
        "breaks_off": source.random() < 0.1,
    }


def _answer(given: dict[str, Any], request: httpx.Request) -> httpx.Response:
    is_stream = bool(json.loads(request.content).get("stream"))
    if HOSTILE.encode() not in request.content:
        stream, complete = REPLIES["honest"]
        return httpx.Response(200, content=stream if is_stream else complete)
    body = given["stream" if is_stream else "whole"]
    size = given["packet"]
    packets = [body[at : at + size] for at in range(0, len(body), size)]
    kind = "text/event-stream" if is_stream else "application/json"
    headers = {"content-type": kind}
    if given["breaks_off"]:
        return httpx.Response(given["status"], headers=headers, stream=BreakingOff(*packets))
    return httpx.Response(given["status"], headers=headers, stream=_Packets(packets))


class _Packets(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that comes in packets."""

    def __init__(self, packets: list[bytes]) -> None:
        self._packets = packets

    def __iter__(self) -> Iterator[bytes]:
        yield from self._packets

    async def __aiter__(self) -> Any:
        for packet in self._packets:
            yield packet


def _compare(plain: Outcome, wrapped: Outcome) -> None:
    """Check that both calls said, returned or raised the same."""
    for name in ("said", "value", "error"):
        one, other = getattr(plain, name), getattr(wrapped, name)
        assert one == other, f"{name}: {one[:300]} -> {other[:300]}"


@cache
def _langchain_wrapper(call: str) -> ReuseChatModel:
    inner = of_langchain.plain_model(partial(_answer, {}))
    wrapper = ReuseChatModel(inner=inner, window_s=0)
    of_call(partial(of_langchain.CALLS[call], wrapper, question("abc")))
    return wrapper


def _call_langchain(given: dict[str, Any]) -> None:
    call, wrapper = of_langchain.CALLS[given["call"]], _langchain_wrapper(given["call"])
    plain = of_langchain.plain_model(partial(_answer, given))
    wrapped = wrapper.model_copy(update={"inner": plain})
    _call_both(call, plain, wrapped, question("cab", HOSTILE))


@cache
def _llamaindex_wrapper(call: str) -> ReuseLLM:
    wrapper = ReuseLLM(inner=of_llamaindex.plain_model(partial(_answer, {})), window_s=0)
    of_call(partial(of_llamaindex.CALLS[call], wrapper, of_llamaindex.question("abc")))
    return wrapper


def _call_llamaindex(given: dict[str, Any]) -> None:
    call, wrapper = of_llamaindex.CALLS[given["call"]], _llamaindex_wrapper(given["call"])
    wrapper._model = plain = of_llamaindex.plain_model(partial(_answer, given))
    _call_both(call, plain, wrapper, of_llamaindex.question("cab", HOSTILE))


def _call_both(call: Callable[..., Any], plain: Any, wrapped: Any, prompt: str) -> None:
    known, faults = wrapped.planner.statistics().requests, wrapped.faults
    outcomes = [of_call(partial(call, model, prompt)) for model in (plain, wrapped)]
    _compare(*outcomes)
    assert wrapped.faults == faults, "the reply was taken for a fault of ours"
    assert wrapped.planner.statistics().requests <= known + 1


TARGETS = {
    "langchain client": Target(partial(_reply, "langchain"), _call_langchain),
    "llamaindex client": Target(partial(_reply, "llamaindex"), _call_llamaindex),
}
