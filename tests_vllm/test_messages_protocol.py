"""vLLM answers Anthropic's messages protocol, and reports the reads that its profile predicts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import combinations, takewhile
from random import Random
from uuid import uuid4

from engine import Engine

from ctxreuse import ContextRequest, Plan, ReusePlanner
from ctxreuse.cache import CacheUsage, PrefixCacheSimulator
from ctxreuse.rules.cache_rules import CacheRules, cache_profile
from ctxreuse.serving import Completion, EngineClient

SYSTEM = "Answer from the records."
TOPICS = ("the harbour", "the library", "the observatory", "the tannery", "the mill")
REQUESTS = 12


@dataclass(frozen=True, slots=True)
class Answered:
    """A plan, its prompt's tokens in the engine, and what the engine said of it."""

    plan: Plan
    tokens: tuple[int, ...]
    completion: Completion


async def answers(engine: Engine, cache: str | CacheRules) -> AsyncIterator[Answered]:
    """Ask questions that share records through `/v1/messages`, one token each."""
    records = [
        f"{topic.title()}. " + " ".join(f"Page {page} tells of {topic}." for page in range(16))
        for topic in TOPICS
    ]
    retrieved = Random(7).choices(list(combinations(records, 3)), k=REQUESTS)
    planner, salt = ReusePlanner(cache=cache, token_counter=engine.count_tokens), uuid4().hex
    client = EngineClient(engine.base_url, planner=planner, protocol="anthropic")
    async with client:
        for number, blocks in enumerate(retrieved):
            query = f"What does record {number} tell?"
            plan = planner.plan(ContextRequest(blocks[:: (-1) ** number], query, system=SYSTEM))
            completion = await client.complete(plan, cache_salt=salt, max_tokens=1, temperature=0)
            yield Answered(plan, await client.tokenize(plan), completion)


def tokens_ahead(engine: Engine, plan: Plan) -> int:
    """Return how many tokens of a prompt stand before its first block."""
    rendered = engine.render(plan.messages())
    return engine.count_tokens(rendered[: rendered.index(plan.blocks[0].text)])


def shared_length(tokens: tuple[int, ...], earlier: tuple[int, ...]) -> int:
    """Return with how many tokens two prompts begin alike."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, earlier, strict=False))
    )


async def test_the_reads_are_those_that_the_profile_predicts(engine: Engine) -> None:
    profile = cache_profile(f"vllm(block_tokens={engine.block_size})")
    simulated = PrefixCacheSimulator(block_size=profile.step_tokens)
    sent: list[tuple[int, ...]] = []
    reads = 0
    async for one in answers(engine, profile):
        reported = one.completion.cached_tokens
        assert reported is not None
        shared = max((shared_length(one.tokens, before) for before in sent), default=0)
        # the last token is computed even of a prompt that is all in the cache
        assert reported == profile.readable(min(shared, len(one.tokens) - 1))
        assert one.completion.prompt_tokens == len(one.tokens)
        assert simulated.serve(one.tokens) == CacheUsage(len(one.tokens), reported)
        if sent:
            expected = tokens_ahead(engine, one.plan) + one.plan.expected_cached_tokens
            assert abs(expected - reported) < profile.step_tokens
        sent.append(one.tokens)
        reads += reported
    assert reads > 0.4 * sum(map(len, sent))


async def test_parts_and_marks_for_a_hosted_cache_are_the_same_prompt(engine: Engine) -> None:
    simulated = PrefixCacheSimulator(block_size=engine.block_size)
    marks = 0
    async for one in answers(engine, "anthropic(minimum=256)"):
        marks += len(one.plan.marks)
        served = simulated.serve(one.tokens)
        assert one.completion.prompt_tokens == served.prompt_tokens
        assert one.completion.cached_tokens == served.cached_tokens
        assert sum((one.completion.written_tokens or {}).values()) <= served.prefilled_tokens
    assert marks > 0


async def test_a_tenants_salt_keeps_its_prompts_apart(engine: Engine) -> None:
    planner, key, read = ReusePlanner(), uuid4().hex, list[int | None]()
    client = EngineClient(engine.base_url, protocol="anthropic", cache_salt="tenant", salt_key=key)
    async with client:
        for tenant in ("one", "two", "one"):
            request = ContextRequest(["The mill grinds at night. " * 40], "When?", tenant=tenant)
            answer = await client.complete(planner.plan(request), max_tokens=1)
            read.append(answer.cached_tokens)
    assert read[:2] == [0, 0]
    assert read[2]
