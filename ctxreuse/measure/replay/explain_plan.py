"""Explains why the requests of a plan file hit or miss, and the prefix tree that they make."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ctxreuse.context.blocks import BlockId, ContextBlock, text_digest
from ctxreuse.context.tokens import estimate_tokens, well_formed
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.prompts import sent_blocks
from ctxreuse.measure.table import shortened
from ctxreuse.measure.traces.sent_calls import SentCall
from ctxreuse.measure.traces.trace_files import Corpus, Titles, block_tokens
from ctxreuse.memory.explanations import Cause, Explanation, explain
from ctxreuse.memory.sent_log import MOST_BLOCK_TOKENS, SentEntry
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

_LATEST = 200  # earlier prompts that are compared for each block, beside those that begin alike
_BEGINNING = 240  # characters of a text, among which its first words are
_MOST_COMPARED = 2_000  # of these, the latest that are compared for all blocks of a prompt together


def explain_plan(
    planned: Sequence[PlannedRequest], corpus: Corpus, *, cache: CacheRules = DEFAULT_CACHE
) -> Iterator[Explanation]:
    """Yield an explanation for each request, compared with other tenants' requests, too."""
    prompts: list[SentEntry] = []
    latest: dict[Hashable, int] = {}  # by beginning, and by conversation
    showing: dict[BlockId, deque[int]] = {}  # so that long traces stay fast
    for number, request in enumerate(planned):
        prompt = _sent_prompt(request, corpus)
        beginnings, talk = list(_beginnings(prompt)), (prompt.tenant, prompt.conversation)
        names = [*beginnings, talk] if prompt.is_later_turn else beginnings
        closest = {latest[name] for name in names if name in latest}
        holding = {at for block_id in prompt.ids for at in showing.get(block_id, ())}
        closest.update(sorted(holding)[-_MOST_COMPARED:])
        related, expected = [prompts[at] for at in sorted(closest)], request.expected_cached_tokens
        yield explain(prompt, related, expected, across_tenants=True, cache=cache)
        prompts.append(prompt)
        for block_id in set(prompt.ids):
            showing.setdefault(block_id, deque(maxlen=_LATEST)).append(number)
        if prompt.conversation is not None:
            latest[talk] = number
        if not prompt.is_later_turn:
            latest |= dict.fromkeys(beginnings, number)


_FRONTS = ("tenant", "model", "key", "tools", "system", "is_labelled")  # what is before blocks


def _beginnings(prompt: SentEntry) -> Iterator[Hashable]:
    """Yield a name for each beginning of a prompt, the empty one included."""
    own = tuple([getattr(prompt, name) for name in _FRONTS])
    for length in range(len(own), -1, -1):
        root = own[:length]
        digest = hashlib.blake2b(digest_size=16)
        yield (root, b"")
        for key in prompt.keys:
            digest.update(key)
            yield (root, digest.digest())


def _sent_prompt(request: PlannedRequest, corpus: Corpus) -> SentEntry:
    blocks = sent_blocks(request, corpus)
    sent = request.sent or SentCall()
    system_tokens, conversation = sent.system_tokens, request.conversation_id
    if system_tokens is None:
        system_tokens = estimate_tokens(request.system or "")
    return SentEntry(
        request_id=request.request_id,
        tenant=request.tenant,
        system=request.system,
        is_later_turn=request.after is not None or bool(sent.history),
        after=request.after,
        keys=tuple(block.key for block in blocks),
        ids=tuple(block.id for block in blocks),
        tokens=tuple(min(block_tokens(block), MOST_BLOCK_TOKENS) for block in blocks),
        is_labelled=request.is_labelled,
        model=sent.model,
        key=sent.key,
        tools="\n".join(sent.tools),
        front_tokens=sent.tool_tokens + system_tokens,
        marks=request.primes or request.marks,
        time_s=None if request.timestamp_ms is None else request.timestamp_ms / 1_000,
        conversation=None if conversation is None else text_digest(repr(conversation)),
        history=sent.history,
    )


def explanation_json(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation of one request as a JSON object."""
    told = asdict(explanation)
    del told["reported"], told["why"]
    return told | {"reason": explanation.reason}


def block_label(block: ContextBlock, titles: Titles) -> str:
    """Return what people know a block by: its title, its first words or, without any, its id."""
    words = " ".join((titles.get(block.id) or block.text[:_BEGINNING]).split())
    return well_formed(shortened(words or str(block.id)))


REMEDIES = {  # of what is computed again
    Cause.other_order: "Plan such requests together (plan_batch, or a model's window_s). "
    "One by one, later requests keep the order of the first.",
    Cause.other_labels: "Show labels in all prompts or in none: ReusePlanner(labels=True).",
    Cause.other_system: "Keep the system text the same, byte for byte; put what varies (a date, a "
    "name) behind the documents.",
    Cause.other_tenant: "Tenants share nothing, on purpose. Give one tenant to all who may see the "
    "same documents.",
    Cause.other_text: "Keep a document's text as it is between requests; what varies in it (a "
    "score, a time) makes it another one.",
    Cause.evicted: "Give the engine's cache more memory, tell the planner its size "
    "(capacity_tokens), or plan requests together, so that those that share follow each other.",
    Cause.too_short: "Nothing: it is less than a block of the engine's cache.",
    Cause.other_tools: "Send the same tools in the same order with every request; choose among "
    "them with tool_choice.",
    Cause.other_key: "Send plan.prompt_cache_key, which is the same for requests that share a "
    "beginning.",
    Cause.other_model: "Keep the model and its settings the same, or give each model requests of "
    "its own.",
    Cause.compacted: "Shorten a conversation rarely, and by much: each time all is computed again.",
    Cause.expired: "Send requests that share documents closer together (plan_batch), or keep "
    "entries longer: anthropic(life=1h).",
    Cause.below_minimum: "Put more constant text in front: such short prompts are never kept.",
    Cause.never_written: "Set breakpoints where prompts fork: ReusePlanner(cache=...) plans them, "
    "plan.body() has them. Plan waiting requests together. If the engine keeps states, plan with "
    "primes=True, and send plan.primes.",
}


TREE_DEPTH = 5  # blocks of a prompt that the prefix tree shows

_LEAST_SHARE = 0.004


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A block in the prefix tree."""

    name: str
    requests: int
    sent_tokens: int
    children: tuple[TreeNode, ...] = ()
    label: str = ""
    light_tokens: int = 0  # of prompts that go on with too few tokens to be shown


def sent_tree(planned: Sequence[PlannedRequest], corpus: Corpus, titles: Titles) -> TreeNode:
    """Return the top of the tree of the prompts' blocks; a later turn begins at the root."""
    sent = []
    for request in planned:
        blocks = sent_blocks(request, corpus)
        sent.append((blocks, sum(map(block_tokens, blocks))))
    return _node(sent, 0, _LEAST_SHARE * sum(tokens for _, tokens in sent), titles)


def _node(
    sent: Sequence[tuple[list[ContextBlock], int]], depth: int, least: float, titles: Titles
) -> TreeNode:
    """Return the node of prompts that begin with the same blocks, `depth` of them."""
    own = sent[0][0][depth - 1] if depth else None
    name, label = ("", "") if own is None else (str(own.id), block_label(own, titles))
    after: dict[tuple[type, BlockId], list[tuple[list[ContextBlock], int]]] = {}
    for blocks, tokens in sent:
        if depth < min(len(blocks), TREE_DEPTH):
            block_id = blocks[depth].id
            after.setdefault((type(block_id), block_id), []).append((blocks, tokens))
    children = [(key, _node(prompts, depth + 1, least, titles)) for key, prompts in after.items()]
    children.sort(key=lambda child: (-child[1].sent_tokens, str(child[0])))
    heavy = tuple(child for _, child in children if child.sent_tokens >= least)
    light = sum(child.sent_tokens for _, child in children[len(heavy) :])
    return TreeNode(name, len(sent), sum(tokens for _, tokens in sent), heavy, label, light)
