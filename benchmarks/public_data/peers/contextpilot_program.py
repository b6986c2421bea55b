"""Runs the published `contextpilot` package on contexts of numbers; `published_pilot.py` starts it.

The interpreter that has that package runs it, so it imports nothing of this one. It reads a JSON
object from standard input: `batch` (whether first turns are ordered together), `deduplicate`
(whether later turns keep the retriever's order, as that package's own `deduplicate` has it), and
`requests` (each with `blocks`: numbers, best first, and `conversation`: a string or null). To the
file that its argument names it writes another: `version`, `seconds`, `orders` (for each request the
numbers as they came back) and `execution` (places of requests, in the order to run them).
"""

import json
import sys
import time
from importlib import import_module
from typing import Any


def main() -> None:
    """Read, order, write."""
    question = json.load(sys.stdin)
    contextpilot = import_module("contextpilot")
    pilot = contextpilot.ContextPilot(use_gpu=False)
    started = time.perf_counter()
    orders, execution = ordered(
        pilot, question["requests"], question["batch"], question["deduplicate"]
    )
    answer = {
        "version": contextpilot.__version__,
        "seconds": time.perf_counter() - started,
        "orders": orders,
        "execution": execution,
    }
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(answer, file)


def ordered(
    pilot: Any, requests: list[dict[str, Any]], batch: bool, deduplicate: bool
) -> tuple[list[list[int]], list[int]]:
    """Return the order of each request's blocks, and the places in the order to run them."""
    orders: list[list[int]] = [request["blocks"] for request in requests]
    first: list[int] = []
    later: dict[str | None, list[int]] = {}
    for place, request in enumerate(requests):
        conversation = request["conversation"]
        if conversation is not None and conversation in later:
            later[conversation].append(place)
        else:
            first.append(place)
            later[conversation] = []
    turns = {place for places in later.values() for place in places}

    def order_one(place: int) -> None:
        keeps = deduplicate and place in turns
        if orders[place] and not keeps:
            one = f"request {place}"  # else all share what its conversations remember
            orders[place] = pilot.reorder([orders[place]], conversation_id=one)[0][0]

    if not batch:
        for place in range(len(requests)):
            order_one(place)
        return orders, list(range(len(requests)))
    given = [place for place in first if orders[place]]
    reordered, positions = pilot.reorder([orders[place] for place in given])
    execution = []
    scheduled = [given[position] for position in positions]
    for place, blocks in zip(scheduled, reordered, strict=True):
        orders[place] = blocks
    for place in scheduled + [place for place in first if not orders[place]]:
        execution.append(place)
        conversation = requests[place]["conversation"]
        if conversation is not None:
            for turn in later[conversation]:
                order_one(turn)
                execution.append(turn)
    return orders, execution


if __name__ == "__main__":
    main()
