"""What the user has put on messages stays in plans, and in what EngineClient sends."""

import asyncio
import itertools
import json
from typing import Any

import httpx
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from message_contents import Message, check_kept, conversations

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.serving import EngineClient


def as_openai(messages: list[Message]) -> list[dict[str, Any]]:
    return [{"role": one.role, "content": one.content, **one.beside} for one in messages]


def passed(messages: list[Message]) -> list[int]:
    """Return the turns that were answered before the latest one that was."""
    roles = [one.role for one in messages]
    pairs = itertools.pairwise(roles)
    answered = [number for number, pair in enumerate(pairs) if pair == ("user", "assistant")]
    return answered[:-1]


def check(history: list[Message], sent: list[dict[str, Any]], cache: str) -> None:
    earlier = [one for one in sent if one["role"] != "system"][: len(history)]
    before, after = [one.content for one in history], [one["content"] for one in earlier]
    check_kept(before, after, passed(history), cache)
    for one, message in zip(history, earlier, strict=True):
        assert {**message, "content": 0} == {"role": one.role, "content": 0, **one.beside}


histories = conversations().map(lambda found: [one for one in found[:-1] if one.role != "system"])


@given(histories, st.sampled_from(["openai", "anthropic", "vllm"]), st.booleans())
@examples(150)
def test_histories_are_kept_in_plans(history, cache, is_named):
    planner = ReusePlanner(cache=cache)
    for number in range(3):
        request = ContextRequest(
            [ContextBlock(id=one, text=one * 5_000) for one in "ab"],
            f"Which {number}?",
            system="Be brief.",
            history=as_openai(history),
            conversation_id="c" if is_named else None,
        )
        plan = planner.plan(request)
        assert plan.messages()[1:-1] == as_openai(history)
        check(history, plan.messages(parts=True), cache)


@given(histories, st.sampled_from(["openai", "anthropic"]))
@examples(25)
def test_histories_are_kept_in_what_the_client_sends(history, cache):
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        done = {"choices": [{"index": 0, "delta": {"content": "Yes"}, "finish_reason": "stop"}]}
        stream = f"data: {json.dumps({'id': 'x', **done})}\n\ndata: [DONE]\n\n"
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=stream)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            planner = ReusePlanner(cache=cache)
            client = EngineClient("http://engine/v1", "m", planner=planner, http_client=http)
            plan = planner.plan(
                ContextRequest(["first", "second"], "Which?", history=as_openai(history))
            )
            await client.complete(plan)
            await client.complete(as_openai(history))

    asyncio.run(ask())
    check(history, bodies[0]["messages"], cache)
    assert bodies[1]["messages"] == as_openai(history)
