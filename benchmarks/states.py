"""Hit ratios on engines that keep states at prompts' ends and junctions, with primes and without.

    python benchmarks/states.py             simulated, on $CTXREUSE_DATA or on made-up data
    python benchmarks/states.py --server URL --requests 600
                                            what a vLLM reports that has windows and blocks of 32:
                                            make vllm MODEL=windows

`LPM 64` is SGLang's own scheduler: of 64 requests that wait, as retrieved, the one goes next of
which most is held. `64 at a time` plans as many as a batch, as RAGBoost does in production.

Whole prompts. What primes compute counts as not cached; behind `@` stands how many are sent a
request. The server's cache has to hold all: 600 requests of MT-RAG k=10 need 3,000,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Any
from uuid import uuid4

from rich.console import Console

from ctxreuse import BatchPlan, CacheRules, ContextRequest, Plan, ReusePlanner, cache_profile
from ctxreuse.cache import CacheUsage, PrefixCacheSimulator
from ctxreuse.context.blocks import BlockKey
from ctxreuse.measure.traces.trace_files import block_tokens
from ctxreuse.planning.plan import Strategy
from ctxreuse.serving import EngineClient, dispatch
from shared import data_folder, new_table, read_requests

TRACES = ("mtrag_k10", "xquad_k15", "xquad_k5", "locomo_k20")
ON_SERVER = "mtrag_k10"
ENGINES = {
    "each block": "vllm",
    "windows": "vllm(states=junctions)",
    "recurrent": "vllm(states=junctions, block_tokens=528)",
    "windows of the server": "vllm(states=junctions, block_tokens=32)",
}
SIMULATED = ("each block", "windows", "recurrent")
_SMALL = 100_000
_LABEL_TOKENS = 2
_ORDER_TOKENS = 20


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--server", help="address of a vLLM, with /v1")
    parser.add_argument("--requests", type=int, default=200, help="how many the server is sent")
    options = parser.parse_args()
    data, console = data_folder("xquad", "mtrag", "locomo"), Console(width=120)
    if options.server is None:
        traces = {name: read_requests(data, name) for name in TRACES}
        for engine in SIMULATED:
            _simulate(console, engine, traces)
        _simulate(console, SIMULATED[0], traces, _SMALL)
        return
    requests = read_requests(data, ON_SERVER, options.requests)
    asyncio.run(_ask(console, requests, options.server))


def _simulate(
    console: Console,
    engine: str,
    traces: dict[str, list[ContextRequest]],
    capacity: int | None = None,
) -> None:
    """Print the table of one kind of engine."""
    rules = cache_profile(ENGINES[engine])
    primed = ("online, primed", "batch, primed") if rules.takes_primes else ()
    windows = ("64 at a time", "512 at a time") if rules.serves_all else ()
    waiting = () if capacity is None else ("LPM 64", "LPM 512")  # else any order finds as much
    arms = ("as retrieved", *waiting, "online", *windows, "batch", *primed)
    size = "unlimited" if capacity is None else f"{capacity:,} tokens"
    table = new_table(f"{engine}: {ENGINES[engine]}, {size}", ("trace",), arms)
    for name, requests in traces.items():
        batches = [_planned(arm, requests, rules) for arm in arms]
        table.add_row(name, *(_reached(batch, rules, capacity) for batch in batches))
    console.print(table)


def _planned(arm: str, requests: Sequence[ContextRequest], rules: CacheRules) -> BatchPlan:
    """Return the requests as one way plans them, in the order in which they are sent."""
    planner, primes = ReusePlanner(cache=rules), arm.endswith("primed")
    if arm.startswith("batch"):
        return planner.plan_batch(requests, primes=primes)
    strategy: Strategy = "reuse" if arm.startswith("online") else "none"
    if arm.endswith("at a time"):
        size = int(arm.split()[0])
        starts = range(0, len(requests), size)
        batches = [planner.plan_batch(requests[start : start + size]) for start in starts]
        plans = [plan for batch in batches for plan in batch.plans]
        return BatchPlan(tuple(plans), tuple(range(len(plans))))
    plans = [planner.plan(one, strategy, primes=primes) for one in requests]
    if arm.startswith("LPM"):
        plans = list(_longest_match_first(plans, int(arm.split()[1])))
    return BatchPlan(tuple(plans), tuple(range(len(plans))))


def _longest_match_first(plans: Sequence[Plan], waiting: int) -> Iterator[Plan]:
    """Yield plans as SGLang's policy `lpm` takes them out of a queue that others join meanwhile."""
    held: dict[BlockKey, Any] = {}
    arriving = iter(plans)
    queue = list(islice(arriving, waiting))
    while queue:
        one = queue.pop(max(range(len(queue)), key=lambda at: (_matched(held, queue[at]), -at)))
        queue += islice(arriving, 1)
        node = held
        for block in one.blocks:
            node = node.setdefault(block.key, {})
        yield one


def _matched(held: dict[BlockKey, Any], plan: Plan) -> int:
    """Return how many tokens of a plan's blocks stand in the cache, from the first one on."""
    tokens, node = 0, held
    for block in plan.blocks:
        if block.key not in node:
            break
        tokens, node = tokens + block_tokens(block), node[block.key]
    return tokens


def _reached(batch: BatchPlan, rules: CacheRules, capacity: int | None = None) -> str:
    """Return the share of the prompts' tokens that an engine need not compute, and the primes."""
    cache = PrefixCacheSimulator(capacity, rules.step_tokens, states=rules.states)
    ids: dict[object, int] = {}
    total, computed = CacheUsage(), 0
    for plan in batch.plans:
        whole = _tokens(plan, len(plan.blocks), ids)
        for blocks in plan.primes:
            end = rules.readable(len(_tokens(plan, blocks, ids, is_whole=False)))
            computed += cache.serve(whole[: end + 1]).prefilled_tokens if end else 0
        total += cache.serve(whole)
    share = (total.cached_tokens - computed) / total.prompt_tokens
    return f"{share:.3f}" + (f" @ {len(batch.primes) / len(batch.plans):.2f}" if computed else "")


def _tokens(plan: Plan, blocks: int, ids: dict[object, int], *, is_whole: bool = True) -> list[int]:
    """Return a prompt, or its beginning, as token ids: equal texts have equal ones."""
    parts: list[object] = [
        (block.key, number)
        for block in plan.blocks[:blocks]
        for number in range(block_tokens(block) + _LABEL_TOKENS)
    ]
    if is_whole:
        words = len(plan.request.query.split()) + _ORDER_TOKENS
        parts += [(plan.request.query, number) for number in range(words)]
    return [ids.setdefault(part, len(ids)) for part in parts]


async def _ask(console: Console, requests: Sequence[ContextRequest], base_url: str) -> None:
    """Print what a server reports of the same requests, sent in several ways."""
    rules = cache_profile(ENGINES["windows of the server"])
    columns = ("of the requests' tokens", "net of primes", "primes a request", "as simulated")
    table = new_table(f"{len(requests)} requests of {ON_SERVER} on {base_url}", ("sent",), columns)
    for arm in ("as retrieved", "online", "batch", "batch, primed"):
        # without primes the order of a batch is that of an engine which reads each block
        unlike = arm == "batch"
        batch = _planned(arm, requests, cache_profile("vllm") if unlike else rules)
        planner, salt = ReusePlanner(), uuid4().hex
        async with EngineClient(base_url, planner=planner) as client:
            outcomes = await dispatch(
                client, batch, max_tokens=1, temperature=0, cache_salt=salt, concurrency=1
            )
            cached: dict[object, int | None] = {
                one.plan.request_id: one.completion and one.completion.cached_tokens
                for one in outcomes
            }
            alike = await _as_simulated(client, batch, cached, rules)
        table.add_row(arm, *_told(planner), f"{alike:.1%}")
    for framework, answer in (("LangChain", _langchain), ("LlamaIndex", _llamaindex)):
        planner = ReusePlanner(cache=rules)
        await asyncio.to_thread(answer, requests, planner, base_url, uuid4().hex)
        table.add_row(f"{framework}, prime=True", *_told(planner), "")
    console.print(table)


def _told(planner: ReusePlanner) -> tuple[str, str, str]:
    """Return what a server reported of the requests: their hits, net of primes, and primes."""
    reported = planner.savings.reported
    net = reported.cached_tokens - reported.prime_tokens
    return (
        f"{reported.hit_ratio:.3f}",
        f"{net / max(1, reported.prompt_tokens):.3f}",
        f"{reported.primes / max(1, reported.answers):.2f}",
    )


def _langchain(
    requests: Sequence[ContextRequest], planner: ReusePlanner, base_url: str, salt: str
) -> None:
    """Ask through LangChain's `batch`."""
    from langchain_core.documents import Document
    from langchain_openai import ChatOpenAI

    from langchain_ctxreuse import ReuseChatModel, format_context

    prompts = [
        format_context([Document(text) for text in _texts(one)]) + f"\n\n{one.query}"
        for one in requests
    ]
    body = {"cache_salt": salt, "max_tokens": 1}
    model = ChatOpenAI(
        base_url=base_url, api_key="EMPTY", model=_model(base_url), temperature=0, extra_body=body
    )
    wrapped = ReuseChatModel(inner=model, planner=planner, prime=True)
    wrapped.batch(prompts, {"max_concurrency": 4})


def _llamaindex(
    requests: Sequence[ContextRequest], planner: ReusePlanner, base_url: str, salt: str
) -> None:
    """Ask through LlamaIndex's model, many chats at once."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.llms.openai_like import OpenAILike

    from llamaindex_ctxreuse import ReuseLLM, format_context

    chats = []
    for one in requests:
        nodes = [NodeWithScore(node=TextNode(text=text)) for text in _texts(one)]
        chats.append([ChatMessage(f"{format_context(nodes)}\n\n{one.query}")])
    model = OpenAILike(
        api_base=base_url,
        api_key="EMPTY",
        model=_model(base_url),
        is_chat_model=True,
        context_window=100_000,
        max_tokens=1,
        additional_kwargs={"extra_body": {"cache_salt": salt}},
    )
    ReuseLLM(inner=model, planner=planner, prime=True).chat_batch(chats, workers=4)


def _texts(request: ContextRequest) -> list[str]:
    """Return a request's texts, each once: `drop_repeats=True` of a wrapped retriever."""
    return list(dict.fromkeys(block.text for block in request.blocks))


def _model(base_url: str) -> str:
    """Return the name of the server's model."""

    async def ask() -> str:
        async with EngineClient(base_url) as client:
            return await client.model()

    return asyncio.run(ask())


async def _as_simulated(
    client: EngineClient, batch: BatchPlan, cached: dict[object, int | None], rules: CacheRules
) -> float:
    """Return for which share of the requests a simulator finds as many tokens, to a block."""
    cache = PrefixCacheSimulator(None, rules.step_tokens, states=rules.states)
    alike = 0
    for plan in batch.plans:
        whole = await client.tokenize(plan)
        for blocks in plan.primes:
            front = await client.tokenize(plan.front(blocks))
            pairs = zip(whole, front, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            cache.serve(whole[: rules.readable(common) + 1])
        found = cache.serve(whole).cached_tokens
        alike += abs(found - (cached[plan.request_id] or 0)) <= rules.step_tokens
    return alike / len(batch.plans)


if __name__ == "__main__":
    main()
