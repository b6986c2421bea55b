"""Plans for clients that send prompts themselves, and what the server says of itself."""

import pytest
from door_helpers import asking, documents, served

from ctxreuse.serving import EmulatedEngine


async def planned(door, names, length=60, **fields):
    answer = await door.post("/v1/plan", json={"documents": documents(names, length), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_plan_says_what_to_send():
    async with served(EmulatedEngine()) as door:
        await planned(door, "abc", query="One?")
        plan = await planned(door, "cab", query="Two?")
    assert plan["order"] == ["a", "b", "c"]
    assert plan["left_out"] == []
    assert plan["annotation"] == "Read documents 3, 1, 2 first."
    assert plan["text"].startswith("A\na says")
    assert plan["text"].endswith("Two?")
    assert plan["expected_cached_tokens"] > 50
    assert plan["plan_id"].startswith("plan-")


@pytest.mark.parametrize("sends_history", [True, False])
async def test_a_conversation_leaves_out_what_it_has_shown(sends_history):
    async with served(EmulatedEngine()) as door:
        more = {"length": 300} | ({"history": []} if sends_history else {})
        one = await planned(door, "abc", query="One?", conversation="c", **more)
        if sends_history:
            more["history"] = [{"role": "user", "content": one["text"]}]
        two = await planned(door, "bcd", query="Two?", conversation="c", **more)
        other = await planned(door, "bcd", query="Two?", conversation="other", **more)
    assert (one["left_out"], two["left_out"]) == ([], ["b", "c"])
    assert two["order"] == ["d"]
    assert set(two["labels"].values()) == set("abcd")
    assert all(label in one["text"] + two["text"] for label in two["labels"])
    assert (other["left_out"] == []) is not sends_history


async def test_a_turn_that_is_forgotten_is_not_left_out_afterwards():
    async with served(EmulatedEngine()) as door:
        await planned(door, "ab", conversation="c")
        two = await planned(door, "cd", conversation="c")
        forgotten = await door.post("/v1/forget", json={"plan_id": two["plan_id"]})
        three = await planned(door, "abcd", conversation="c")
        again = await door.post("/v1/forget", json={"plan_id": two["plan_id"]})
    assert (forgotten.json(), again.json()) == ({"known": True}, {"known": False})
    assert three["left_out"] == ["a", "b"]


async def test_a_batch_is_planned_together_with_its_order_and_primes():
    rows = [
        {"documents": documents(names), "query": f"{names}?"} for names in ("abc", "def", "bca")
    ]
    async with served(EmulatedEngine()) as door:
        answer = (await door.post("/v1/plans", json={"requests": rows})).json()
        states = "vllm(states=junctions)"
    assert sorted(answer["order"]) == [0, 1, 2]
    assert abs(answer["order"].index(0) - answer["order"].index(2)) == 1
    assert answer["plans"][0]["order"] == answer["plans"][2]["order"]
    assert [plan["text"].rpartition("\n\n")[2] for plan in answer["plans"]] == [
        "abc?",
        "def?",
        "bca?",
    ]
    async with served(EmulatedEngine(), cache=states) as door:
        more = [{"documents": documents("abcd"[:3] + one, 400), "query": "?"} for one in "efgh"]
        primed = (await door.post("/v1/plans", json={"requests": more, "primes": True})).json()
    assert sum(len(plan["primes"]) for plan in primed["plans"]) > 0


USAGES = {
    "openai": {
        "prompt_tokens": 400,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 320},
    },
    "anthropic": {
        "input_tokens": 80,
        "cache_read_input_tokens": 320,
        "cache_creation_input_tokens": 0,
    },
}


@pytest.mark.parametrize("protocol", USAGES)
async def test_usage_is_reported_by_the_plans_id_once(protocol):
    async with served(EmulatedEngine()) as door:
        plan = await planned(door, "abc")
        body = {"plan_id": plan["plan_id"], "usage": USAGES[protocol]}
        known = [(await door.post("/v1/usage", json=body)).json() for _ in range(2)]
        reported = door.planner.savings.reported
    assert known == [{"known": True}, {"known": False}]
    assert (reported.answers, reported.prompt_tokens, reported.cached_tokens) == (1, 400, 320)


async def test_plans_that_nobody_asks_about_again_are_forgotten(monkeypatch):
    monkeypatch.setattr("ctxreuse.serving.door.app._MOST_CHARACTERS", 20_000)
    async with served(EmulatedEngine()) as door:
        plans = [await planned(door, "abc", query=f"{n}?") for n in range(40)]
        known = [
            (await door.post("/v1/forget", json={"plan_id": one["plan_id"]})).json()["known"]
            for one in plans
        ]
    assert known == [False] * known.index(True) + [True] * known.count(True)
    assert 5 < known.count(True) < 20


async def test_what_the_server_says_of_itself():
    async with served(EmulatedEngine(), engines=("http://127.0.0.1:9",)) as door:
        models = (await door.get("/v1/models")).json()
        await door.chat("abc", "Cite the number of each document.")
        await door.chat("abc")
        await door.chat("cab")
        savings, metrics = (await door.get("/v1/savings")).json(), await door.get("/metrics")
        assert (await door.get("/healthz")).json() == {"status": "ok"}
        ready = await door.get("/readyz")
        await door.engines[0].die()
        for _ in range(4):
            await door.post("/v1/chat/completions", json=asking())
        down = await door.get("/readyz")
    assert [one["id"] for one in models["data"]] == ["emulated"]
    assert (ready.status_code, down.status_code) == (200, 503)
    assert set(ready.json()["engines"].values()) == {"up", "resting"}
    assert savings["requests"] == 2
    assert savings["words"].startswith("As reported by the engine: 3 answers")
    assert savings["in_place"] == {"numbers": 1}
    counted = [one for one in metrics.text.splitlines() if one.startswith("ctxreuse_requests_tot")]
    assert counted == ['ctxreuse_requests_total{planner="default",tenant_class=""} 2.0']
    assert 'ctxreuse_replica_state{pool="default"' in metrics.text
    assert "says" not in metrics.text + str(savings)


NO_USAGES = [None, {}, {"prompt_tokens": "7"}, [], "x"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("plan", {"template": "{titel}: {text}"}, None, "names 'titel'"),
        ("plan", {"template": "{title}"}, "template", "must hold {text}"),
        ("plan", {"documents": [{"text": "t", "title": {"x": 1}}]}, None, "title"),
        (
            "plan",
            {"documents": [{"text": "t", "of": [1]}], "template": "{of} {text}"},
            None,
            "'of'",
        ),
        ("plan", {"documents": [None]}, "documents", "each of documents must be an object"),
        ("plan", {"query": None}, "query", "query must be a string, not null"),
        ("plan", {"labels": "True"}, "labels", "must be true, false or null, not 'True'"),
        ("plan", {"conversation": []}, "conversation", "must be a string or an integer"),
        ("plan", {"documets": []}, "documets", "choose one of 'documents', 'query'"),
        ("plans", {"requests": [{"documents": [], "qeury": ""}]}, "qeury", "'qeury'"),
        ("plans", {"query": "?"}, "query", "choose one of 'requests', 'template', 'primes'"),
        ("usage", {"plan": "x"}, "plan", "choose one of 'plan_id', 'usage'"),
        *(("usage", {"usage": one}, "usage", "usage must be an answer's") for one in NO_USAGES),
        ("forget", {"plan_id": True}, "plan_id", "not true"),
        ("forget", {"id": "x"}, "id", "choose one of 'plan_id'"),
    ],
)
async def test_what_is_wrong_is_refused_in_the_words_of_json(path, fields, param, words):
    given = {"documents": documents("ab")} if path == "plan" else {}
    async with served(EmulatedEngine()) as door:
        answer = await door.post(f"/v1/{path}", json={**given, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


async def test_another_path_is_answered_with_where_it_is_served():
    async with served(EmulatedEngine()) as door:
        assert (await door.get("/v1/plan")).json()["type"] == "error"
        answer = await door.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 404
    assert "'/v1/embeddings' is not served here; send it to the engine" in answer.text
