"""Time against input size: what a hostile caller could send, each size twice the one before.

Every row must grow no faster than its input, times a logarithm: a growth of 1.0 is linear, 2.0 is
quadratic. `python benchmarks/input_size.py` prints all rows; `--limit` sets the seconds after which
a row stops doubling. The last two columns are the longest times, in milliseconds, that a small
`plan()` of another thread took meanwhile; Python's threads alone make it some 10.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache import PrefixCacheMetrics
from ctxreuse.cache.kv_events.engine_blocks import (
    EngineBlocks,
    HeldRequests,
    RecordedRequests,
    SentRequest,
)
from ctxreuse.cache.kv_events.event_stream import BlocksRemoved, BlocksStored
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.context.scope import RequestScope
from ctxreuse.pipeline.context_finder import contexts_in
from ctxreuse.pipeline.formatting import joined_forms
from ctxreuse.pipeline.known_texts import Form, KnownTexts
from ctxreuse.pipeline.prompt_turn import PromptPart, PromptPlanner, ScopedPrompt
from ctxreuse.planning.prompt_records import Edit, Left, LeftText, Slice
from shared import new_table

SIZES = 7
_FILLER = "The river rises in the hills and flows to the sea. "


def _block(text: str, name: int | None = None, tokens: int | None = None) -> ContextBlock:
    return ContextBlock(id=text if name is None else name, text=text, tokens=tokens)


def _label(text: str) -> str:
    return DEFAULT_TEMPLATES.label_of(ContextBlock(text=text))


class Prepared(NamedTuple):
    """A call to time, and the planner that it uses if it uses one."""

    call: Callable[[], object]
    planner: ReusePlanner | None = None


Case = Callable[[int], Prepared]
"""Prepares an input of a size."""


def _found_in(texts: list[str], message: str) -> Prepared:
    known = KnownTexts()
    known.add("", texts)
    return Prepared(lambda: contexts_in(known, "", message))


def repeated_beginning(size: int) -> Prepared:
    """Search a text of `size` characters that repeats how a known text begins."""
    text = _FILLER * (size // len(_FILLER) + 1)
    return _found_in([text], f"\n{text[:64]}" * (size // 65))


def repeated_openings(size: int) -> Prepared:
    """Search a text of `size` characters full of what many known texts begin with."""
    texts = ["a" * 64 + f"{number} " + "b" * (number % 97) for number in range(size // 100)]
    return _found_in(texts, ("\n" + "a" * 64) * (size // 65))


def nested_texts(size: int) -> Prepared:
    """Search a text in which known texts of all lengths begin at the same place."""
    whole = "a" * size
    return _found_in([whole[:length] for length in range(100, size, 100)], whole[:-1])


def _rendered(texts: list[str], tenant: str = "") -> str:
    return joined_forms(
        list(map(Form, texts)),
        texts,
        "\n\n",
        tenant,
        DEFAULT_TEMPLATES,
        labels=True,
        ids=[None] * len(texts),
    )


def prompt_of_many_messages(size: int) -> Prepared:
    """Plan a prompt of `size` short messages with a context in each second one."""
    prompts = PromptPlanner(ReusePlanner())
    parts = []
    for number in range(size // 2):
        context = _rendered([f"Text {number}. {_FILLER}", f"{number}. {_FILLER}"])
        parts += [PromptPart("user", f"{context}\n\nWhy?"), PromptPart("assistant", "So.")]
    parts.append(PromptPart("user", _rendered([f"Last. {_FILLER}", f"Else. {_FILLER}"])))
    return Prepared(lambda: prompts.plan([ScopedPrompt(tuple(parts))]))


def many_contexts_in_one_message(size: int) -> Prepared:
    """Plan one message that holds `size` contexts."""
    prompts = PromptPlanner(ReusePlanner())
    contexts = [_rendered([f"Text {n}. {_FILLER}", f"{n}. {_FILLER}"]) for n in range(size)]
    prompt = ScopedPrompt((PromptPart("user", "\nAnd:\n".join(contexts)),))
    return Prepared(lambda: prompts.plan([prompt]))


def named_labels(size: int) -> Prepared:
    """Plan a reordered context of `size` blocks; the words behind it name as many others."""
    prompts = PromptPlanner(ReusePlanner())
    texts = [f"The text number {n}." for n in range(size)]
    prompts.plan([ScopedPrompt((PromptPart("user", _rendered(texts)),))])
    words = "".join(f" {_label(f'Text {n}.')}" for n in range(size, 2 * size))
    prompt = ScopedPrompt((PromptPart("user", f"{_rendered(texts[::-1])}\n\nWhat of{words}?"),))
    return Prepared(lambda: prompts.plan([prompt]))


def retried_first_turn(size: int) -> Prepared:
    """Plan a second turn behind `size` retries of the first: one label, and as many lengths."""
    planner, unit = ReusePlanner(), "\n[BCDF] "
    for number in range(1, size + 1):
        block = _block("x" * (len(unit) * number), name=number)
        planner.plan(ContextRequest([block], "Why?", conversation_id="one"))
    return _later_turn(planner, (unit * (2 * size)).strip())


def edited_document(size: int) -> Prepared:
    """Plan a turn whose history shows a document of `size` characters twice, changed at its end."""
    planner, line = ReusePlanner(), "[BCDF] and so on\n"
    text = line * (size // len(line))
    planner.plan(ContextRequest([text], "Why?", conversation_id="one"))
    changed = text[:-5] + "of\n\n"
    return _later_turn(planner, f"[BCDF] {changed}{changed}Why?")


def many_labels(size: int) -> Prepared:
    """Plan a turn behind a history of `size` characters of labels, all of them in use."""
    planner = ReusePlanner()
    planner.plan(ContextRequest([f"t{n}" for n in range(2_000)], "Why?", conversation_id="one"))
    labels = [_label(f"t{n}") for n in range(2_000)]
    text = "".join(f"\n\n{labels[n % 2_000]} t{n % 7}" for n in range(size // 11))
    return _later_turn(planner, text)


def _later_turn(planner: ReusePlanner, content: str) -> Prepared:
    history = [{"role": "user", "content": content}, {"role": "assistant", "content": "So."}]
    request = ContextRequest(["Next."], "And?", conversation_id="one", history=history)
    return Prepared(lambda: planner.plan(request), planner)


def long_conversation(size: int) -> Prepared:
    """Plan a hundred turns more of a conversation of `size` turns, each with a short history."""
    planner = ReusePlanner()
    history = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]

    def say(turns: int) -> None:
        for number in range(turns):
            block = _block("text", name=number, tokens=1)
            request = ContextRequest([block], "And?", conversation_id="one", history=history)
            planner.plan(request)

    say(size)
    return Prepared(lambda: say(100), planner)


def tied_paths(size: int) -> Prepared:
    """Plan a request of `size` blocks that ties with as many that were sent before."""
    planner, blocks = _tied(size)
    return Prepared(lambda: planner.plan(ContextRequest(blocks), "reuse"), planner)


def _tied(size: int) -> tuple[ReusePlanner, list[ContextBlock]]:
    planner = ReusePlanner()
    blocks = [_block(f"b{number}", tokens=1) for number in range(size)]
    for first in blocks[: min(size // 2, 1_600)]:
        planner.plan(ContextRequest([first, *blocks[size // 2 :]]), "none")
    return planner, blocks


def tied_orders(size: int) -> Prepared:
    """Plan a request of `size` blocks each of which came together with fewer than the one before.

    So every block that is placed leaves nearly all others to be looked at again.
    """
    planner = ReusePlanner()
    blocks = [_block(f"b{number}", tokens=1) for number in range(size)]
    sent = min(1_000, size, 400_000 // size)
    for number in range(sent):
        staircase = [_block(f"s{number}", tokens=1), *blocks[: size - number * size // sent]]
        planner.plan(ContextRequest(staircase), "none")
    return Prepared(lambda: planner.plan(ContextRequest(blocks[::-1]), "reuse"), planner)


def tied_paper_paths(size: int) -> Prepared:
    """Plan a request of `size` blocks as the papers do, where as many sent before are as near."""
    planner, blocks = _tied(size)
    return Prepared(lambda: planner.plan(ContextRequest(blocks), "paper"), planner)


def tied_batch(size: int) -> Prepared:
    """Plan a batch of `size` requests that share one block each with all others."""
    planner, requests = ReusePlanner(), _sharing(size)
    return Prepared(lambda: planner.plan_batch(requests), planner)


def tied_paper_batch(size: int) -> Prepared:
    """Plan the same batch as the papers do, who compare all pairs: at most 20,000 requests."""
    planner, requests = ReusePlanner(), _sharing(size)
    return Prepared(lambda: planner.plan_batch(requests, "paper"), planner)


def _sharing(size: int) -> list[ContextRequest]:
    shared = _block("shared", tokens=10)
    return [
        ContextRequest([shared, _block(f"own {n}", tokens=10), _block(f"{n}", tokens=9)])
        for n in range(size)
    ]


def batch_of_shuffled_contexts(size: int) -> Prepared:
    """Plan a batch of `size` requests for blocks that were sent in thousands of orders."""
    planner, chance = ReusePlanner(), random.Random(7)
    blocks = [_block(f"b{number}", tokens=16) for number in range(20)]
    for _ in range(5_000):
        planner.plan(ContextRequest(chance.sample(blocks, 20)), "none")
    requests = [ContextRequest(chance.sample(blocks, 20)) for _ in range(size)]
    return Prepared(lambda: planner.plan_batch(requests), planner)


def batch_behind_a_long_context(size: int) -> Prepared:
    """Plan a batch of `size` pairs, all of which lie within its first context."""
    planner = ReusePlanner()
    blocks = [_block(f"b{number}", tokens=1) for number in range(size)]
    pairs = [ContextRequest(list(pair)) for pair in itertools.pairwise(blocks)]
    return Prepared(lambda: planner.plan_batch([ContextRequest(blocks), *pairs]), planner)


def trimmed_subtree(size: int) -> Prepared:
    """Report the first block of a request as lost, behind which `size` others stand."""
    planner, first = ReusePlanner(), _block("first", tokens=16)
    for number in range(size):
        blocks = [first, _block(f"b{number}", tokens=16)]
        planner.plan(ContextRequest(blocks, request_id=number), "none")
    return Prepared(lambda: planner.trim(0, 0), planner)


def trimmed_repetitions_of_a_prompt(size: int) -> Prepared:
    """Report a prompt that was planned `size` times as lost, block after block, then as a whole."""
    planner, blocks = ReusePlanner(), [_block(f"b{number}", tokens=16) for number in range(100)]
    for number in range(100):
        planner.plan(ContextRequest(blocks[: number + 1], request_id=f"{number}"), "none")
    for number in range(size):
        planner.plan(ContextRequest(blocks, request_id=number), "none")
    return Prepared(lambda: [planner.trim(0, 99 - number) for number in range(100)], planner)


def evicted_conversation(size: int) -> Prepared:
    """Evict a conversation of `size` turns that all had the same request id."""
    planner, history = ReusePlanner(), [{"role": "user", "content": "Why?"}]
    fields: dict[str, Any] = {"history": history, "conversation_id": "one", "request_id": "same"}
    for number in range(size):
        planner.plan(ContextRequest([_block("text", number, 16)], "And?", **fields))
    return Prepared(lambda: planner.evict(["same"]), planner)


def room_for_a_large_request(size: int) -> Prepared:
    """Plan a block for which `size` others have to go."""
    planner = ReusePlanner(capacity_tokens=16 * size)
    for number in range(size):
        planner.plan(ContextRequest([_block("text", number, 16)]), "none")
    large = ContextRequest([_block("large", tokens=16 * size)])
    return Prepared(lambda: planner.plan(large, "none"), planner)


def labels_of_metrics(size: int) -> Prepared:
    """Read `/metrics` of lines of `size` characters of what looks like labels."""
    name = "vllm:prefix_cache_queries"
    texts = [
        f'{name}{{a="' + '\\"' * (size // 2),
        f"{name}{{" + 'a="b' * (size // 4),
        f"{name}{{{'a' * size}}} 1",
        f"{name}{{{'a ' * (size // 2)}}} 1",
        f"{name}{{{'a = ' * (size // 4)}}} 1",
        "vllm:" + "a" * size + "{",
        f"{name} {'9' * size}",
    ]
    return Prepared(lambda: list(map(PrefixCacheMetrics.parse, texts)))


def repeated_documents(size: int) -> Prepared:
    """Plan `size` LangChain documents of one text that differ in their metadata only."""
    from langchain_core.documents import Document

    from langchain_ctxreuse import ReuseCompressor

    planner = ReusePlanner()
    found = [Document(id="a", page_content=_FILLER, metadata={"n": n}) for n in range(size)]
    compressor = ReuseCompressor(planner=planner)
    return Prepared(lambda: compressor.compress_documents(found, "Why?"), planner)


def pieces_of_one_agent(size: int) -> Prepared:
    """Put `size` pieces of documents together into one agent's segment."""
    from chain_of_agents.segments import segments_of

    pieces, each = [_block(f"{n}") for n in range(size)], [[n] for n in range(size)]
    ones, none = [1] * size, [0] * size
    return Prepared(lambda: segments_of(pieces, each, none, ones, size * 9, 1, one_each=False))


def unbroken_document(size: int) -> Prepared:
    """Cut a document of `size` characters without a blank into pieces of a third."""
    from chain_of_agents.segments import pieces_of

    document = _block("a" * size)
    return Prepared(lambda: pieces_of(document, size // 3, len))


def shown_again(size: int) -> Prepared:
    """Look in an agent's history of `size` messages for what each repeats; none is shown before."""
    from langchain_core.messages import ToolMessage

    from langchain_ctxreuse.agents.planned_messages import sent_messages, with_edit
    from langchain_ctxreuse.messages import TextPart

    def message(number: int) -> ToolMessage:
        text = f"text {number}"
        left = LeftText((Slice(0, len(text)),), _label(text))
        edit = Edit((Left((left,), "\n\n"),))
        return with_edit(ToolMessage(text, tool_call_id=f"{number}"), TextPart(text, None), edit)

    messages = [message(number) for number in range(size)]
    return Prepared(lambda: sent_messages(messages, DEFAULT_TEMPLATES))


def results_of_many_tools(size: int) -> Prepared:
    """Plan the results of `size` tools that an agent's model has called at once."""
    from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage

    from langchain_ctxreuse.agents.middleware import ReuseMiddleware

    planner = ReusePlanner()
    middleware: Any = ReuseMiddleware(planner=planner, tools=["search"])
    calls = [{"name": "search", "args": {}, "id": f"{number}"} for number in range(size)]
    messages: list[AnyMessage] = [
        HumanMessage("Why?", id="question"),
        AIMessage("", id="calls", tool_calls=calls),
    ]
    for number in range(size):
        text = f"Text {number}.\n\n{_FILLER}"
        messages.append(ToolMessage(text, tool_call_id=f"{number}", id=f"{number}", name="search"))
    return Prepared(lambda: middleware.before_model({"messages": messages}, None), planner)


def prompts_of_many_tenants(size: int) -> Prepared:
    """Plan `size` prompts of as many tenants together."""
    prompts = PromptPlanner(ReusePlanner())
    waiting = []
    for number in range(size):
        context = _rendered([f"Text {number}. {_FILLER}", f"{number}. {_FILLER}"], f"{number}")
        part = PromptPart("user", context)
        waiting.append(ScopedPrompt((part,), RequestScope(tenant=f"{number}")))
    return Prepared(lambda: prompts.plan(waiting))


def calls_given_up(size: int) -> Prepared:
    """Look whether `size` calls are stalled of which the first half was given up."""
    from ctxreuse.pipeline.ordered_release import OrderedQueue, Slot

    queue: OrderedQueue[int, int] = OrderedQueue(places=0)
    slots = [Slot(queue, number) for number in range(size)]
    queue.line_up(slots)
    for slot in slots[: size // 2]:
        slot.leave(release=False)
    return Prepared(lambda: [queue.release_if_stalled(math.inf) for _ in slots[size // 2 :]])


def ends_of_blocks(size: int) -> Prepared:
    """Look for the ends of `size` blocks in a prompt whose tokens a function counts."""
    from ctxreuse.cache import block_ends

    plan = ReusePlanner().plan(ContextRequest([f"{n}. {_FILLER}" for n in range(size)], "Why?"))

    def count(text: str) -> int:
        return sum(letter == " " for letter in text)

    return Prepared(lambda: block_ends(plan, count, render=lambda shown: shown[0]["content"]))


def workflow_chain(size: int) -> Prepared:
    """Compile a workflow of `size` nodes, each of which reads what the one before wrote."""
    from ctxreuse.workflow import END, START, WorkflowGraph

    graph = WorkflowGraph(inputs=["n0"])
    names = [START, *(f"n{number + 1}" for number in range(size)), END]
    for number, name in enumerate(names[1:-1]):
        graph.add_generation(name, prompt=f"{{n{number}}}")
    for source, target in itertools.pairwise(names):
        graph.add_edge(source, target)
    return Prepared(graph.compile)


def workflow_side_by_side(size: int) -> Prepared:
    """Compile a workflow of `size` nodes that run side by side."""
    from ctxreuse.workflow import END, START, WorkflowGraph

    graph = WorkflowGraph()
    for number in range(size):
        graph.add_function(f"n{number}", len)
        graph.add_edge(START, f"n{number}").add_edge(f"n{number}", END)
    return Prepared(graph.compile)


def recorded_prompts(size: int) -> Prepared:
    """Record a prompt of `size` messages, half of them system messages."""
    from ctxreuse.measure.traces.recording import PromptRecorder, TraceRecorder

    roles = ("system", "user")
    messages = [{"role": roles[n % 2], "content": f"{n}"} for n in range(size)]

    def record() -> None:
        with TemporaryDirectory() as folder, TraceRecorder(folder) as recorder:
            PromptRecorder(recorder).note(messages)

    return Prepared(record)


def dropped_cache_blocks(size: int) -> Prepared:
    """Follow an engine that drops a prompt of `size` cache blocks from its beginning on."""
    blocks, tokens = EngineBlocks(), list(range(size))
    blocks.stored(BlocksStored(tokens, None, tokens, 1))
    blocks.follow("one", tokens)
    return Prepared(lambda: (blocks.removed(tokens), blocks.take_lowered()))


def growing_cache_chain(size: int) -> Prepared:
    """Follow a late listener's prompt that grows by `size` cache blocks, one event for each."""
    blocks = EngineBlocks()
    return Prepared(lambda: [blocks.stored(BlocksStored([n + 1], n, [n], 1)) for n in range(size)])


def followed_prompt(size: int) -> Prepared:
    """Follow `size` requests of one prompt of 64 cache blocks through 20 turns and its eviction."""
    planner, tokens = ReusePlanner(), array("q", range(64 * 16))
    blocks, names = [_block(f"b{number}", tokens=256) for number in range(4)], list(range(64))
    recorded = RecordedRequests(planner, max(10_000, size))
    requests = HeldRequests(recorded, EngineBlocks(), settle_s=1.0)
    requests.apply(BlocksStored(tuple(names[:32]), None, tuple(tokens[: 32 * 16]), 16))
    ends = [256 * number for number in range(1, 5)]
    for number in range(size):
        planner.plan(ContextRequest(blocks, request_id=number), "none")
        recorded.add(SentRequest(number, "", tokens, ends, None, None, 0.0))

    def follow() -> None:
        for number in range(20):
            requests.apply(BlocksStored((-1 - number,), None, (number,) * 16, 16))
            requests.settle(0.0)
        requests.apply(BlocksStored(tuple(names[32:]), 31, tuple(tokens[32 * 16 :]), 16))
        for name in reversed(names):
            requests.settle(0.0)
            requests.apply(BlocksRemoved((name,)))
        requests.settle(0.0)

    return Prepared(follow, planner)


def full_cache_mirror(size: int) -> Prepared:
    """Follow an engine that stores `size` cache blocks more than the `size` that are remembered."""
    blocks = EngineBlocks(max_blocks=size)
    blocks.stored(BlocksStored(range(size), None, range(size), 1))
    return Prepared(
        lambda: [blocks.stored(BlocksStored([n], None, [n], 1)) for n in range(size, 2 * size)]
    )


def cache_blocks_of_all_sizes(size: int) -> Prepared:
    """Look a prompt of `size` tokens up where the engine has stored blocks of as many sizes."""
    blocks, tokens = EngineBlocks(), list(range(size))
    for number in range(1, size):
        blocks.stored(BlocksStored([number], None, tokens[:number], number))
    return Prepared(lambda: blocks.follow("p", [0, *tokens]))


def explained_prompts(size: int) -> Prepared:
    """Explain a plan file of `size` requests of 10 of 40 blocks each."""
    from ctxreuse.measure.replay.explain_plan import explain_plan
    from ctxreuse.measure.replay.plan_file import PlannedRequest

    corpus = {name: _block(f"{name}", name, 20) for name in range(40)}

    def planned(number: int) -> PlannedRequest:
        names = [(number * step + step * step) % 40 for step in range(1, 11)]
        parts = tuple((f"[Doc_{n}]", name, None) for n, name in enumerate(dict.fromkeys(names), 1))
        return PlannedRequest(number, parts, query="Why?")

    requests = [planned(number) for number in range(size)]
    return Prepared(lambda: list(explain_plan(requests, corpus)))


def simulated_conversations(size: int) -> Prepared:
    """Serve a plan file of `size` requests, twenty turns to a conversation, from a cache."""
    from ctxreuse.cache.simulator import BlockLevelCache
    from ctxreuse.measure.replay.plan_file import PlannedRequest
    from ctxreuse.measure.replay.simulate import simulate_blocks

    corpus = {number: _block("text", number, 1) for number in range(size)}
    requests = [
        PlannedRequest(n, (("[BCDF]", n, None),), after=n - 1 if n % 20 else None)
        for n in range(size)
    ]
    return Prepared(lambda: list(simulate_blocks(requests, corpus, BlockLevelCache())))


def hashed_prompts(size: int) -> Prepared:
    """Simulate two prompts of `size` blocks of a trace in Mooncake's format."""
    from ctxreuse.measure.replay.hashed_trace import HashedRequest, simulate_hashed

    requests = [HashedRequest(16 * size, tuple(range(size)))] * 2
    return Prepared(lambda: simulate_hashed(requests, (None, size), 16) and None)


def template_of_braces(size: int) -> Prepared:
    """Parse a workflow's template of `size` characters of doubled braces."""
    from ctxreuse.workflow.graph.state import Template

    return Prepared(lambda: Template.parse("{{" * (size // 2)))


def blank_subquestion(size: int) -> Prepared:
    """Read a model's answer of a label and `size` blanks."""
    from ctxreuse.workflow.library import asks_nothing

    texts = ["sub-question" + " " * size + "x", " " * size + "x", "none" + " " * size + "x?"]
    return Prepared(lambda: list(map(asks_nothing, texts)))


CASES: dict[str, tuple[Case, int]] = {
    "repeated_beginning": (repeated_beginning, 5_000),
    "repeated_openings": (repeated_openings, 5_000),
    "nested_texts": (nested_texts, 5_000),
    "prompt_of_many_messages": (prompt_of_many_messages, 50),
    "many_contexts_in_one_message": (many_contexts_in_one_message, 50),
    "named_labels": (named_labels, 50),
    "retried_first_turn": (retried_first_turn, 50),
    "edited_document": (edited_document, 50_000),
    "many_labels": (many_labels, 50_000),
    "long_conversation": (long_conversation, 500),
    "tied_paths": (tied_paths, 200),
    "tied_orders": (tied_orders, 200),
    "tied_paper_paths": (tied_paper_paths, 200),
    "tied_batch": (tied_batch, 200),
    "tied_paper_batch": (tied_paper_batch, 100),
    "batch_of_shuffled_contexts": (batch_of_shuffled_contexts, 100),
    "batch_behind_a_long_context": (batch_behind_a_long_context, 100),
    "trimmed_subtree": (trimmed_subtree, 2_500),
    "trimmed_repetitions_of_a_prompt": (trimmed_repetitions_of_a_prompt, 1_000),
    "evicted_conversation": (evicted_conversation, 2_500),
    "room_for_a_large_request": (room_for_a_large_request, 2_500),
    "labels_of_metrics": (labels_of_metrics, 1_000),
    "repeated_documents": (repeated_documents, 50),
    "pieces_of_one_agent": (pieces_of_one_agent, 1_000),
    "unbroken_document": (unbroken_document, 5_000),
    "shown_again": (shown_again, 50),
    "results_of_many_tools": (results_of_many_tools, 25),
    "prompts_of_many_tenants": (prompts_of_many_tenants, 100),
    "calls_given_up": (calls_given_up, 200),
    "ends_of_blocks": (ends_of_blocks, 50),
    "workflow_chain": (workflow_chain, 15),
    "workflow_side_by_side": (workflow_side_by_side, 15),
    "recorded_prompts": (recorded_prompts, 100),
    "dropped_cache_blocks": (dropped_cache_blocks, 200),
    "growing_cache_chain": (growing_cache_chain, 500),
    "followed_prompt": (followed_prompt, 50),
    "full_cache_mirror": (full_cache_mirror, 1_000),
    "cache_blocks_of_all_sizes": (cache_blocks_of_all_sizes, 50),
    "explained_prompts": (explained_prompts, 60),
    "simulated_conversations": (simulated_conversations, 200),
    "hashed_prompts": (hashed_prompts, 200),
    "template_of_braces": (template_of_braces, 10_000),
    "blank_subquestion": (blank_subquestion, 1_000),
}


class Bystander:
    """A thread for each of two tenants, which plans small requests and notes its longest wait.

    Attributes:
        waited: Tenant -> seconds of its longest call; "" is the tenant of the cases.
    """

    def __init__(self, planner: ReusePlanner) -> None:
        self._planner = planner
        self._is_done = False
        self.waited = {"": 0.0, "other": 0.0}
        self._threads = [Thread(target=self._run, args=(tenant,)) for tenant in self.waited]

    def __enter__(self) -> Bystander:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done = True
        for thread in self._threads:
            thread.join()

    def _run(self, tenant: str) -> None:
        request = ContextRequest(["A small text."], "What?", tenant=tenant, system="small")
        while not self._is_done:
            started = time.perf_counter()
            self._planner.plan(request)
            self.waited[tenant] = max(self.waited[tenant], time.perf_counter() - started)
            time.sleep(0.0005)


class Measured(NamedTuple):
    """A call's input size, its seconds, and the longest waits of a bystander."""

    size: int
    seconds: float
    waited: Mapping[str, float]


def measured(case: Case, first: int, limit: float) -> Iterator[Measured]:
    """Time a case at doubling sizes until one call takes longer than the limit."""
    for doubling in range(SIZES):
        size = first << doubling
        begun = time.perf_counter()
        prepared = case(size)
        with Bystander(prepared.planner or ReusePlanner()) as bystander:
            started = time.perf_counter()
            prepared.call()
            seconds = time.perf_counter() - started
        yield Measured(size, seconds, bystander.waited)
        if seconds > limit or (doubling and time.perf_counter() - begun > 5 * limit):
            return


def main() -> None:
    """Print one row for each case: the times, how fast they grow, and how long others wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", help=f"some of {', '.join(CASES)}; all unless given")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds; 2 unless given")
    arguments = parser.parse_args()
    numbers = ("smallest", "largest", "ms", "growth", "same tenant waits", "other tenant waits")
    table = new_table("time against input size", ("case",), numbers)
    for name in track(arguments.case or list(CASES), console=Console(stderr=True)):
        case, first = CASES[name]
        rows = list(measured(case, first, arguments.limit))
        before, last = rows[-3 if len(rows) > 2 else 0], rows[-1]
        doublings = max(1, min(2, len(rows) - 1))
        growth = math.log(last.seconds / before.seconds, 2) / doublings
        waits = [f"{last.waited[tenant] * 1000:,.1f}" for tenant in ("", "other")]
        milliseconds = f"{last.seconds * 1000:,.1f}"
        table.add_row(name, f"{first:,}", f"{last.size:,}", milliseconds, f"{growth:.2f}", *waits)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
