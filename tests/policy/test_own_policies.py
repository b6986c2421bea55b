"""Policies of users: in a planner, in a batch, and measured beside the others."""

import json

import pytest
from cli_helpers import run
from planning_helpers import big_request, sent_ids

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError, UnknownStrategyError
from ctxreuse.policy import Policy
from ctxreuse.sharing import SQLiteLog

__all__ = ["run"]


class ById(Policy):
    name = "by id"

    def order(self, view):
        blocks = view.blocks
        return sorted(view.weights, key=lambda key: str(blocks[key].id))


class Losing(Policy):
    name = "losing"

    def order(self, view):
        return list(view.weights)[1:]


@pytest.mark.parametrize("cache", ["vllm", "anthropic(minimum=100)", "openai-before-5.6"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_policy_of_ones_own_orders_requests_and_batches(tmp_path, cache, is_shared):
    log = SQLiteLog(tmp_path / "log") if is_shared else None
    planner = ReusePlanner(cache=cache, shared_log=log)
    assert sent_ids(planner.plan(big_request("cab"), ById())) == ["a", "b", "c"]
    again = planner.plan(big_request("bca"), ById())
    assert sent_ids(again) == ["a", "b", "c"]
    assert again.expected_cached_tokens == (300 if cache == "vllm" else 0)
    batch = planner.plan_batch([big_request("xyc"), big_request("ba"), big_request("cyx")], ById())
    assert [sent_ids(one) for one in batch.plans] == [["c", "x", "y"], ["c", "x", "y"], ["a", "b"]]


def test_an_order_that_loses_a_block_is_refused_and_nothing_is_recorded(planner):
    with pytest.raises(InvalidRequestError, match="'losing' returned an order of 2 keys"):
        planner.plan(big_request("abc"), Losing())
    with pytest.raises(InvalidRequestError, match="no permutation of the 3 blocks"):
        planner.plan_batch([big_request("abc")], Losing())
    assert planner.statistics().requests == 0
    with pytest.raises(UnknownStrategyError):
        planner.plan(big_request("abc"), "by id")


def test_a_policy_is_measured_beside_the_others(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_policy.py").write_text(
        "from ctxreuse.policy import Policy\n"
        "class Reversed(Policy):\n"
        "    name = 'reversed'\n"
        "    def order(self, view):\n"
        "        return list(view.weights)[::-1]\n"
    )
    trace = tmp_path / "trace.jsonl"
    texts = [{"id": name, "text": f"Text {name}."} for name in "ab"]
    (tmp_path / "corpus.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in texts))
    asked = [{"request_id": number, "query": "?", "blocks": ["a", "b"]} for number in range(3)]
    trace.write_text("".join(f"{json.dumps(one)}\n" for one in asked))
    code, shown, told = run("estimate", trace, "--policy", "own_policy:Reversed")
    assert (code, told, "reversed, online" in shown) == (0, "", True)
    for wrong in ("own_policy:Nothing", "nothing:Reversed", "own_policy", "pathlib:Path"):
        assert run("estimate", trace, "--policy", wrong)[0] == 2
