"""Plans of made-up requests, and the commands on a made-up trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from ctxreuse import ContextRequest, ReusePlanner, Templates, request_context
from ctxreuse.cache import CapacityTracker, PrefixCacheSimulator, block_ends
from ctxreuse.planning.savings import Savings
from golden_cases.command import command
from golden_cases.planning import block, contexts, requests, short, some_whole, whole
from golden_cases.recording import Cases, digest

CASES = Cases()
STRATEGIES = ("reuse", "paper", "none")


@CASES
def online() -> Any:
    """Requests one after the other."""
    found = {}
    for strategy in STRATEGIES:
        planner = ReusePlanner()
        plans = [planner.plan(request, strategy) for request in requests(50, seed=1)]
        found[strategy] = some_whole(plans) | {"statistics": _statistics(planner)}
    return found


@CASES
def online_with_sizes_and_estimates() -> Any:
    """Contexts of many sizes, blocks without ids or token counts, blocks that stand twice."""
    random, planner, plans = Random(2), ReusePlanner(), []
    for number in range(40):
        texts = [f"{word} " * (5 + len(word) * 9) for word in ("ash", "beech", "oak", "yew", "fir")]
        chosen = [texts[random.randrange(5)] for _ in range(random.randrange(6))]
        numbers = [random.randrange(12) for _ in range(random.randrange(16))]
        plans.append(planner.plan(ContextRequest([*chosen, *map(block, numbers)], f"{number}?")))
    return some_whole(plans, (0, 5))


@CASES
def batch() -> Any:
    """Requests that are known together, alone and behind what was planned before."""
    found = {}
    for strategy in STRATEGIES:
        planner = ReusePlanner()
        first = planner.plan_batch(requests(40, seed=3), strategy)
        second = planner.plan_batch(requests(40, seed=4, size=9), strategy)
        found[strategy] = {
            "first": some_whole(first.plans, (0, 1)) | {"order": list(first.order)},
            "second": some_whole(second.plans, (0,)) | {"order": list(second.order)},
            "in_input_order": [plan.request_id for plan in second.in_input_order()],
            "statistics": _statistics(planner),
        }
    return found


@CASES
def batch_of_everything() -> Any:
    """Tenants, system texts, conversations and later turns in one batch."""
    random = Random(5)
    made = []
    for number, context in enumerate(contexts(60, seed=6, size=5)):
        fields: dict[str, Any] = {
            "tenant": random.choice(["", "one", "two"]),
            "system": random.choice([None, "Be brief."]),
        }
        if random.random() < 0.4:
            fields["conversation_id"] = random.choice([1, "1", "c"])
            fields["history"] = random.choice(
                [[], [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Ah."}]]
            )
        if random.random() < 0.3:
            fields["request_id"] = random.choice([number, f"r{number}"])
        made.append(ContextRequest(map(block, context), f"{number}?", **fields))
    found = {}
    for strategy in STRATEGIES:
        planner = ReusePlanner()
        planned = planner.plan_batch(made, strategy)
        found[strategy] = some_whole(planned.plans, (0, 20)) | {"order": list(planned.order)}
        found[strategy]["tenants"] = [plan.request.tenant for plan in planned.plans]
    return found


@CASES
def tenants_and_system_texts() -> Any:
    """What was sent for one tenant, or behind one system text, is of no use to another."""
    planner = ReusePlanner()
    plans = []
    for number, context in enumerate(contexts(36, seed=7, topics=2)):
        tenant, system = ("", "one", "two")[number % 3], (None, "Be brief.")[number % 2]
        request = ContextRequest(map(block, context), "Why?", tenant=tenant, system=system)
        plans.append(planner.plan(request))
    return some_whole(plans, (0, 12)) | {"statistics": _statistics(planner)}


def _talk(planner: ReusePlanner, **named: Any) -> list[Any]:
    """Return the prompts of a conversation over some turns, one of them asked twice."""
    chat = planner.conversation("c", **named)
    told: list[Any] = []
    for number, context in enumerate(contexts(5, seed=8, topics=1, size=4)):
        plan = chat.plan(map(block, context), f"question {number}?")
        if number == 2:
            told.append(short(plan))
            plan = chat.plan(map(block, context[::-1]), "question 2, again?", request_id="again")
        told.append(whole(plan))
        chat.record(f"answer {number}.")
        if number == 3:
            chat.compact("So far: [BCDF] was read.")
    return [*told, chat.messages()]


@CASES
def conversation() -> Any:
    """A conversation that keeps its messages, in several planners."""
    several = ReusePlanner()
    for request in requests(10, seed=8):
        several.plan(request)
    return {
        "alone": _talk(ReusePlanner()),
        "among others": _talk(several, tenant="", system="Be brief."),
        "nothing left out": digest(_talk(ReusePlanner(deduplicate=False))),
        "no annotations": digest(_talk(ReusePlanner(annotate=False), system="Be brief.")),
        "shadow": digest(_talk(ReusePlanner(mode="shadow"))),
    }


@CASES
def histories_of_others() -> Any:
    """Histories that the application keeps: whole, edited, shortened, unknown, forgotten."""
    planner = ReusePlanner()
    history: list[dict[str, Any]] = []
    told: dict[str, Any] = {}

    def turn(name: str, numbers: list[int], shown: list[Any], **fields: Any) -> Any:
        request = ContextRequest(
            map(block, numbers), f"{name}?", history=shown, conversation_id="c", **fields
        )
        told[name] = whole(planner.plan(request))
        return told[name]["messages"]

    history = turn("first", [1, 2, 3], [])
    history = [*history, {"role": "assistant", "content": "One."}]
    turn("second", [2, 4, 1], history)
    edited = [{"role": "user", "content": history[0]["content"][:60]}, history[1]]
    turn("edited", [2, 3, 5], edited)
    parts = [{"type": "text", "text": history[0]["content"]}, {"type": "image_url", "image_url": 1}]
    turn("in parts", [3, 1, 6], [{"role": "user", "content": parts}])
    turn("of another tenant", [1, 2], history, tenant="other")
    turn("other labels", [7], [{"role": "user", "content": "[BCDF] something"}])
    told["forgotten"] = planner.end_conversation("c"), planner.end_conversation("c")
    turn("after that", [1, 2, 8], history)
    kept = ContextRequest([block(1), block(2)], history=history, conversation_id="c")
    told["kept"] = [short(planner.plan(kept, deduplicate=choice)) for choice in (False, True)]
    return told


@CASES
def evictions() -> Any:
    """What the engine drops is expected no more, and orders follow."""
    told: list[Any] = []
    planner = ReusePlanner()
    made = requests(60, seed=9)
    for number, request in enumerate(made):
        told.append(short(planner.plan(request)))
        if number % 7 == 6:
            told.append(asdict(planner.evict([f"request-{number - 3}", "unknown"])))
        if number % 11 == 10:
            told.append(asdict(planner.evict_tokens(700)))
        if number % 13 == 12:
            told.append(asdict(planner.trim(f"request-{number - 1}", 2)))
        if number % 15 == 14:
            told.append(_statistics(planner))
            told += [
                [planner.cached_tokens(one), planner.cached_tokens(one, in_order=True)]
                for one in made[::12]
            ]
    told.append(asdict(planner.evict_tokens(10**9)))
    return [*told, _statistics(planner), short(planner.plan(made[0]))]


@CASES
def evictions_of_tenants() -> Any:
    """The engine's cache is one: what was used least lately goes first, whoever's it is."""
    planner = ReusePlanner()
    told: list[Any] = []
    for number, context in enumerate(contexts(60, seed=24, topics=2)):
        tenant = ("", "one", "two", "one")[number % 4]
        plan = planner.plan(ContextRequest(map(block, context), tenant=tenant))
        told.append(short(plan))
        if number % 5 == 4:
            told.append(asdict(planner.evict_tokens(150 * number)))
    return [*told, _statistics(planner)]


@CASES
def small_blocks() -> Any:
    """Blocks of a few tokens: what is shorter than an engine's block cannot be cached."""
    found = {}
    for strategy in STRATEGIES:
        planner = ReusePlanner()
        made = [
            ContextRequest([block(one, tokens=one % 9) for one in context], "Which?")
            for context in contexts(40, seed=25, size=4, topics=2)
        ]
        plans = [planner.plan(request, strategy) for request in made[:15]]
        plans += planner.plan_batch(made[15:], strategy).plans
        found[strategy] = [*map(short, plans), _statistics(planner)]
    return found


@CASES
def scopes() -> Any:
    """Whose request it is, inside one another."""
    said: tuple[dict[str, Any], ...] = (
        {},
        {"tenant": "one"},
        {"tenant": "two", "conversation_id": 1},
        {"conversation_id": "1", "history": [{"role": "user", "content": "Hm?"}]},
        {"history": []},
        {"tenant": "one", "conversation_id": "c", "history": [{"role": "user", "content": "So?"}]},
    )
    told = []
    for outer in said:
        for middle in said:
            for inner in said:
                with (
                    request_context(**outer),
                    request_context(**middle),
                    request_context(**inner) as scope,
                ):
                    told.append(str([scope.tenant, scope.conversation_id, scope.history]))
    return told


@CASES
def capacity() -> Any:
    """Planners that know what the engine's cache holds, from nothing on."""
    found = {}
    for tokens in (0, 600, 3_000, 20_000):
        planner = ReusePlanner(capacity_tokens=tokens)
        plans = [planner.plan(request) for request in requests(40, seed=10)]
        plans += planner.plan_batch(requests(20, seed=11)).plans
        found[str(tokens)] = [*map(short, plans), _statistics(planner)]
    return found


@CASES
def request_ids() -> Any:
    """Ids of the application's, of both kinds, some given twice, among those counted."""
    planner, plans = ReusePlanner(), []
    for number, context in enumerate(contexts(12, seed=12)):
        given = [None, number, f"request-{number + 1}", "same"][number % 4]
        plans.append(planner.plan(ContextRequest(map(block, context), request_id=given)))
    return [*map(short, plans), asdict(planner.evict(["same", 1, "1", "request-0"]))]


@CASES
def words_around_blocks() -> Any:
    """Other templates, no annotations, another way to count, another weight of ranks."""
    templates = Templates(
        label="<{letters}>",
        block="{label}\n{text}\n--",
        order="Read in this order: {order}!",
        order_separator=", then ",
        location="See {label} above.",
        separator="\n",
        order_position="after_question",
    )
    planners = {
        "templates": ReusePlanner(templates=templates),
        "no annotations": ReusePlanner(annotate=False),
        "nothing left out": ReusePlanner(deduplicate=False),
    }
    found: dict[str, Any] = {}
    for name, planner in planners.items():
        plans = [planner.plan(request) for request in requests(5, seed=13, size=4)]
        found[name] = {"plans": [whole(plan) for plan in plans[3:]], "turns": _talk(planner)[:2]}
    texts = [
        ContextRequest([one.text * 4 for one in request.blocks])
        for request in requests(12, seed=14, size=4)
    ]
    counting = ReusePlanner(token_counter=lambda text: 3 * len(text))
    found["counter"] = [
        counting.counts_tokens,
        counting.count_tokens("four"),
        counting.block_tokens(texts[0].blocks),
        *(short(counting.plan(one)) for one in texts),
        *(short(counting.sibling().plan(one)) for one in texts[:2]),
    ]
    for alpha in (0, 0.5):
        weighing = ReusePlanner(alpha=alpha)
        plans = [weighing.plan(request, "paper") for request in requests(12, seed=15)]
        plans += weighing.plan_batch(requests(12, seed=16), "paper").plans
        found[f"alpha {alpha}"] = [short(plan) for plan in plans]
    return found


@CASES
def shadow_mode() -> Any:
    """Everything goes out as retrieved; what planning would have saved is counted."""
    found = {}
    for strategy in STRATEGIES:
        planner = ReusePlanner(mode="shadow", capacity_tokens=9_000)
        plans = [planner.plan(request, strategy) for request in requests(20, seed=17)]
        plans += planner.plan_batch(requests(20, seed=18), strategy).plans
        chat = planner.conversation("c")
        for context in contexts(3, seed=19, topics=1):
            plans.append(chat.plan(map(block, context), "And?"))
            chat.record("So.")
        evicted = planner.evict(["request-1"]), planner.evict_tokens(99), planner.trim(0, 1)
        plans.append(planner.plan(requests(1, seed=20)[0], strategy))
        found[strategy] = {
            "plans": some_whole(plans, (1,)),
            "evicted": [asdict(one) for one in evicted],
            "savings": _compared(planner.savings),
            "saved_share": round(planner.savings.saved_share, 9),
            "sibling": _compared(planner.sibling().savings),
        }
    return found


def _compared(savings: Savings) -> dict[str, int]:
    """Return what shadow mode compares: no times."""
    names = (
        "requests", "changed", "block_tokens", "cached_as_sent", "cached_if_planned", "left_out",
    )  # fmt: skip
    return {name: getattr(savings, name) for name in names}


@CASES
def caches() -> Any:
    """The engine's cache as seen from outside."""
    random = Random(21)
    prompts = [
        [random.randrange(3) for _ in range(32)] + list(range(random.randrange(90)))
        for _ in range(30)
    ]
    prompts += [prompt[: random.randrange(len(prompt))] for prompt in prompts]
    simulator = PrefixCacheSimulator(400, 16)
    salted = PrefixCacheSimulator(None, 4)
    tokens = [
        [simulator.serve(prompt).cached_tokens, salted.serve(prompt, str(n % 2)).cached_tokens]
        for n, prompt in enumerate(prompts)
    ]
    planner = ReusePlanner()
    shadow = CapacityTracker(planner, 2_500)
    told = []
    for number, request in enumerate(requests(30, seed=22)):
        plan = planner.plan(request)
        characters = len(plan.messages()[-1]["content"])
        cached = None if number % 5 == 4 else plan.expected_cached_tokens
        planner.report_usage(plan, 40 + characters // 4, cached, completion_tokens=10)
        ends = block_ends(plan, len, lambda messages: str(messages[-1]["content"]))
        told.append([short(plan), round(shadow.block_share, 9), list(ends)])
        if number % 9 == 8:
            planner.forget(plan)
    return {"tokens": tokens, "shadow": told}


@CASES
def commands() -> Any:
    """`ctxreuse plan`, `simulate` and `explain` on a small trace."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus, trace, plan = (str(Path(folder) / name) for name in ("corpus", "trace", "plan"))
        _write_trace(corpus, trace)
        for more in ("online", "offline", "online --dedup", "offline --dedup"):
            made = command("plan", "--trace", trace, "--corpus", corpus, "--mode", *more.split())
            Path(plan).write_text(made, encoding="utf-8")
            files = ("--plan", plan, "--corpus", corpus)
            lines = made.splitlines()
            told[more] = {
                "plan": [*lines[:3], *map(_planned_line, lines[3:])],
                "simulate": json.loads(command("simulate", *files, "--json")),
                "small": json.loads(
                    command("simulate", *files, "--json", "--capacity-tokens", "900")
                ),
                "explain": digest(command("explain", *files, "--json")),
                "one": command("explain", *files, "--request", "3"),
            }
        process = subprocess.run(
            [sys.executable, "-m", "ctxreuse", "simulate", *files],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    return told | {"in a process of its own": process.stdout}


def _planned_line(line: str) -> str:
    planned = json.loads(line)
    return f"{planned['request_id']}: {' '.join(planned['blocks'])}: {digest(line)}"


def _write_trace(corpus: str, trace: str) -> None:
    used = contexts(24, seed=23, size=4, topics=2)
    numbers = sorted({number for context in used for number in context})
    lines = [{"id": one.id, "text": one.text, "tokens": one.tokens} for one in map(block, numbers)]
    Path(corpus).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    asked = [
        {
            "request_id": number,
            "conversation_id": None if number % 3 == 0 else f"c{number % 2}",
            "turn": 0 if number % 3 == 0 else number // 2,
            "query": f"question {number}?",
            "blocks": [block(one).id for one in context],
        }
        for number, context in enumerate(used)
    ]
    Path(trace).write_text("".join(json.dumps(line) + "\n" for line in asked), encoding="utf-8")


def _statistics(planner: ReusePlanner) -> dict[str, int]:
    size = planner.statistics()
    return {"nodes": size.nodes, "tokens": size.tokens, "requests": size.requests}
