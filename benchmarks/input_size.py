"""Time against input size: what a hostile caller could send, each size twice the one before.

Every row must grow no faster than its input, times a logarithm: a growth of 1.0 is linear, 2.0 is
quadratic. `python benchmarks/input_size.py` prints all rows; `--limit` sets the seconds after which
a row stops doubling.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from shared import new_table

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.adapters.prompt_planner import PromptPart, PromptPlanner, ScopedPrompt
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.cache import PrefixCacheMetrics

SIZES = 7
_FILLER = "The river rises in the hills and flows to the sea. "


def _block(text: str, name: int | None = None, tokens: int | None = None) -> ContextBlock:
    return ContextBlock(id=text if name is None else name, text=text, tokens=tokens)


Case = Callable[[int], Callable[[], object]]
"""Prepares an input of a size and returns the call to time."""


def repeated_beginning(size: int) -> Callable[[], object]:
    """Parse a text of `size` characters that repeats how a remembered context begins."""
    registry = ContextRegistry()
    rendered = registry.render([_block(_FILLER * (size // len(_FILLER) + 1))])
    text = rendered[:64] * (size // 64)
    return lambda: registry.parse(text)


def repeated_openings(size: int) -> Callable[[], object]:
    """Parse a text of `size` characters full of labels that begin many remembered contexts."""
    registry = ContextRegistry()
    for number in range(size // 100):
        registry.render([_block("a" * 64 + f"{number} " + "b" * (number % 97))])
    text = ("[Doc_1] " + "a" * 64) * (size // 72)
    return lambda: registry.parse(text)


def nested_contexts(size: int) -> Callable[[], object]:
    """Parse a text in which contexts of all lengths begin at the same place."""
    registry = ContextRegistry()
    whole = "a" * size
    for length in range(100, size, 100):
        registry.render([_block(whole[:length])])
    text = "[Doc_1] " + whole[:-1]
    return lambda: registry.parse(text)


def prompt_of_many_messages(size: int) -> Callable[[], object]:
    """Plan a prompt of `size` short messages with a context in each second one."""
    registry = ContextRegistry()
    prompts = PromptPlanner(registry=registry)
    parts = []
    for number in range(size // 2):
        context = registry.render([_block(f"Text {number}. {_FILLER}")])
        parts += [PromptPart("user", f"{context}\n\nWhy?"), PromptPart("assistant", "So.")]
    parts.append(PromptPart("user", registry.render([_block("Last.")])))
    return lambda: prompts.plan([ScopedPrompt(tuple(parts))])


def many_contexts_in_one_message(size: int) -> Callable[[], object]:
    """Plan one message that holds `size` contexts."""
    registry = ContextRegistry()
    prompts = PromptPlanner(registry=registry)
    contexts = [registry.render([_block(f"Text {n}. {_FILLER}")]) for n in range(size)]
    prompt = ScopedPrompt((PromptPart("user", "\n--\n".join(contexts)),))
    return lambda: prompts.plan([prompt])


def retried_first_turn(size: int) -> Callable[[], object]:
    """Plan a second turn behind `size` retries of the first, each with texts of its own."""
    planner = ReusePlanner()
    for number in range(size):
        block = _block(f"{_FILLER}{'x' * (number % 50)}{number}", name=number)
        plan = planner.plan(ContextRequest([block], "Why?", conversation_id="one"))
    content = plan.messages()[-1]["content"] + ("\n\n[Doc_1] " + _FILLER) * size
    history = [{"role": "user", "content": content}, {"role": "assistant", "content": "So."}]
    request = ContextRequest(["Next."], "And?", conversation_id="one", history=history)
    return lambda: planner.plan(request)


def edited_document(size: int) -> Callable[[], object]:
    """Plan a turn whose history shows a document of `size` characters, changed at its end."""
    planner = ReusePlanner()
    text = "[Doc_1] and so on\n" * (size // 18)
    plan = planner.plan(ContextRequest([text], "Why?", conversation_id="one"))
    content = plan.messages()[-1]["content"].replace("on\n\nWhy?", "of\n\nWhy?")
    content = content[:-10] + "changed"
    history = [{"role": "user", "content": content}, {"role": "assistant", "content": "So."}]
    request = ContextRequest(["Next."], "And?", conversation_id="one", history=history)
    return lambda: planner.plan(request)


def tied_paths(size: int) -> Callable[[], object]:
    """Plan a request of `size` blocks that ties with many requests that were sent before."""
    planner = ReusePlanner()
    blocks = [_block(f"b{number}", tokens=1) for number in range(size)]
    for start in range(200):
        planner.plan(ContextRequest(blocks[start : start + 1] + blocks[size // 2 :]), "none")
    return lambda: planner.plan(ContextRequest(blocks), "reuse")


def tied_batch(size: int) -> Callable[[], object]:
    """Plan a batch of `size` requests that share one block each with all others."""
    planner = ReusePlanner()
    shared = _block("shared", tokens=10)
    requests = [
        ContextRequest([shared, _block(f"own {n}", tokens=10), _block(f"{n}", tokens=9)])
        for n in range(size)
    ]
    return lambda: planner.plan_batch(requests)


def trimmed_overlaps(size: int) -> Callable[[], object]:
    """Plan `size` blocks with `trim_overlaps`, none of which repeats another's end."""
    planner = ReusePlanner(trim_overlaps=True)
    blocks = [_block(f"{_FILLER}{number} " + _FILLER) for number in range(size)]
    return lambda: planner.plan(ContextRequest(blocks))


def labels_of_metrics(size: int) -> Callable[[], object]:
    """Read `/metrics` whose one line has `size` characters of what looks like labels."""
    text = 'vllm:prefix_cache_queries{a="' + '\\"' * (size // 2)
    other = "vllm:prefix_cache_queries{" + 'a="b' * (size // 4)
    return lambda: (PrefixCacheMetrics.parse(text), PrefixCacheMetrics.parse(other))


CASES: dict[str, tuple[Case, int]] = {
    "repeated_beginning": (repeated_beginning, 5_000),
    "repeated_openings": (repeated_openings, 5_000),
    "nested_contexts": (nested_contexts, 5_000),
    "prompt_of_many_messages": (prompt_of_many_messages, 50),
    "many_contexts_in_one_message": (many_contexts_in_one_message, 50),
    "retried_first_turn": (retried_first_turn, 50),
    "edited_document": (edited_document, 50_000),
    "tied_paths": (tied_paths, 200),
    "tied_batch": (tied_batch, 200),
    "trimmed_overlaps": (trimmed_overlaps, 100),
    "labels_of_metrics": (labels_of_metrics, 1_000),
}


def measured(case: Case, first: int, limit: float) -> Iterator[tuple[int, float]]:
    """Time a case at doubling sizes until one call takes longer than the limit."""
    for doubling in range(SIZES):
        size = first << doubling
        call = case(size)
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        yield size, seconds
        if seconds > limit:
            return


def main() -> None:
    """Print one row for each case: the times, and how fast they grow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", help=f"some of {', '.join(CASES)}; all unless given")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds; 2 unless given")
    arguments = parser.parse_args()
    table = new_table("time against input size", ("case",), ("smallest", "largest", "ms", "growth"))
    for name in arguments.case or CASES:
        case, first = CASES[name]
        times = list(measured(case, first, arguments.limit))
        (_, before), (size, seconds) = times[-3 if len(times) > 2 else 0], times[-1]
        growth = math.log(seconds / before, 2) / min(2, len(times) - 1) if len(times) > 1 else 0.0
        table.add_row(name, f"{first:,}", f"{size:,}", f"{seconds * 1000:,.1f}", f"{growth:.2f}")
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
