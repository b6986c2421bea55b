"""Primes beside a wrapped model: calls of its own, up to where the prompts of a batch part."""

import asyncio

import pytest
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_openai import ChatOpenAI

from ctxreuse import ReusePlanner, request_context
from ctxreuse.errors import InvalidRequestError
from langchain_ctxreuse import ReuseChatModel, format_context
from tests.support.served_engines import CONTEXTS, RULES, URL, assert_primes_pay, served, split  # noqa: F401 - a fixture

DOCUMENTS = {name: Document(f"{name} " * 80, id=name) for name in "abcdefgh"}


def prompts():
    return [
        f"{format_context([DOCUMENTS[name] for name in context])}\n\nWhich, {context}?"
        for context in CONTEXTS
    ]


def wrapped(**fields):
    model = ChatOpenAI(model="emulated", base_url=URL, api_key="secret", max_retries=0)
    return ReuseChatModel(
        inner=model, planner=ReusePlanner(cache=RULES), **{"prime": True, **fields}
    )


@pytest.mark.parametrize("way", ["batch", "abatch", "as_completed"])
def test_what_shares_a_primed_beginning_reads_it_from_its_first_sight_on(served, way):  # noqa: F811
    def answers(model):
        if way == "abatch":
            return asyncio.run(model.abatch(prompts()))
        if way == "as_completed":
            return [answer for _, answer in model.batch_as_completed(prompts())]
        return model.batch(prompts())

    assert_primes_pay(served, wrapped, answers)


def test_requests_that_come_one_by_one_are_primed_too(served):  # noqa: F811
    engine, model = served(states="junctions"), wrapped(window_s=0)
    for _ in range(3):
        for prompt in prompts():
            model.invoke(prompt)
    primes, requests = split(engine)
    assert 0 < len(primes) <= 0.75 * len(requests) == 0.75 * 3 * len(CONTEXTS)


def test_a_prime_has_the_tenants_salt_the_tools_and_the_key(served):  # noqa: F811
    engine = served(states="junctions")
    model = wrapped(send_cache_salt=True).bind_tools(
        [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    )
    with request_context(tenant="t"):
        model.batch(prompts())
    primes, requests = split(engine)
    assert primes
    assert {body["cache_salt"] for body in engine.requests} == {requests[0]["cache_salt"]}
    whole = [engine._prompt(body) for body in requests]  # tools stand in front
    ends = [body["prompt"][:-1] for body in primes]
    assert all(any(one[: len(end)] == end for one in whole) for end in ends)


def test_an_engine_that_takes_no_primes_answers_all_the_same(served, caplog):  # noqa: F811
    served(states="junctions", fail=lambda number, body: 400 if "max_tokens" in body else None)
    model = wrapped()
    assert len(model.batch(prompts())) == len(CONTEXTS)
    assert model.faults == model.planner.savings.reported.primes == 0
    assert [one for one in caplog.messages if "a prime was not answered" in one]
    assert "Which" not in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"planner": ReusePlanner(cache="deepseek")}, "'deepseek' is no rule of one"),
        ({"planner": ReusePlanner()}, "prime=True is for engines of your own that keep states"),
        ({"inner": FakeListChatModel(responses=["ok"])}, "wrap one with an address"),
    ],
)
def test_a_model_that_cannot_be_primed_is_refused_when_it_is_made(fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        wrapped().model_copy(update=fields)
