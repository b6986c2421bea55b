"""Primes beside a wrapped model: calls of its own, up to where the prompts of a batch part."""

import pytest
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike
from llamaindex_llm_helpers import CHATS, called
from served_engines import CONTEXTS, RULES, URL, assert_primes_pay, split

from ctxreuse import ReusePlanner, request_context
from ctxreuse.errors import InvalidRequestError
from llamaindex_ctxreuse import ReuseLLM, format_context

NODES = {
    name: NodeWithScore(node=TextNode(text=f"{name} " * 80, id_=name), score=1.0)
    for name in "abcdefgh"
}


def prompts():
    return [
        f"{format_context([NODES[name] for name in context])}\n\nWhich, {context}?"
        for context in CONTEXTS
    ]


def wrapped(**fields):
    model = OpenAILike(
        model="emulated",
        api_base=URL,
        api_key="secret",
        is_chat_model=True,
        context_window=100_000,
        max_retries=0,
        additional_kwargs={"extra_body": {"cache_salt": "salt"}},
    )
    return ReuseLLM(inner=model, planner=ReusePlanner(cache=RULES), **{"prime": True, **fields})


def chats(model):
    return model.chat_batch(
        [[ChatMessage("Answer.", role="system"), ChatMessage(one)] for one in prompts()]
    )


@pytest.mark.parametrize("ask", [chats, lambda model: model.complete_batch(prompts())])
def test_what_shares_a_primed_beginning_reads_it_from_its_first_sight_on(served, ask):
    engine = assert_primes_pay(served, wrapped, ask)
    assert {body["cache_salt"] for body in engine.requests} == {"salt"}


@pytest.mark.parametrize("way", CHATS)
def test_requests_that_come_one_by_one_are_primed_too(served, way):
    engine, model = served(states="junctions"), wrapped(window_s=0)
    for _ in range(3):
        for prompt in prompts():
            assert called(model, way, [ChatMessage(prompt)])
    primes, requests = split(engine)
    assert 0 < len(primes) <= 0.75 * len(requests) == 0.75 * 3 * len(CONTEXTS)
    assert model.faults == 0


def test_a_prime_has_its_tenants_salt_though_a_stream_is_read_elsewhere(served):
    engine, model = served(states="junctions"), wrapped(window_s=0, send_cache_salt=True)
    model.inner.additional_kwargs = {}
    model = model.model_copy(update={"send_cache_salt": True})
    for _ in range(3):
        for number in range(len(CONTEXTS)):
            with request_context(tenant="t"):
                answer = model.stream_chat([ChatMessage(prompts()[number])])
            assert list(answer)
    primes, requests = split(engine)
    assert primes
    assert requests[0]["cache_salt"]
    assert {body["cache_salt"] for body in engine.requests} == {requests[0]["cache_salt"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"planner": ReusePlanner(cache="deepseek")}, "'deepseek' is no rule of one"),
        ({"planner": ReusePlanner()}, "prime=True is for engines of your own that keep states"),
        ({"inner": MockLLM()}, "wrap one with an address"),
    ],
)
def test_a_model_that_cannot_be_primed_is_refused_when_it_is_made(fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        wrapped().model_copy(update=fields)
