"""Small made-up requests, the same in every run, and plans as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from ctxreuse import ContextBlock, ContextRequest, Plan
from golden_cases.recording import digest

_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "islet", "jetty")


def block(number: int, tokens: int | None = None) -> ContextBlock:
    """Return a block with a text of some words; it weighs enough that moving it pays."""
    random = Random(number)
    text = " ".join(random.choice(_WORDS) for _ in range(random.randint(3, 7)))
    weight = random.randint(40, 300) if tokens is None else tokens
    return ContextBlock(id=f"b{number}", text=f"{text} {number}.", tokens=weight)


def contexts(number: int, *, seed: int, size: int = 6, topics: int = 4) -> list[list[int]]:
    """Return the blocks' numbers of some requests; those of one topic share most of theirs."""
    random = Random(seed)
    made = []
    for _ in range(number):
        topic = random.randrange(topics)
        own = [100 * topic + n for n in range(2 * size)]
        others = list(range(1000, 1010))
        chosen: list[int] = []
        while len(chosen) < size:
            one = random.choice(own if random.random() < 0.85 else others)
            if one not in chosen:
                chosen.append(one)
        made.append(chosen)
    return made


def requests(number: int, *, seed: int, size: int = 6, **fields: Any) -> list[ContextRequest]:
    """Return requests over the blocks of `contexts`; `fields` are for all of them."""
    return [
        ContextRequest([block(one) for one in context], f"question {place}?", **fields)
        for place, context in enumerate(contexts(number, seed=seed, size=size))
    ]


def whole(plan: Plan) -> dict[str, Any]:
    """Return everything that a plan says."""
    explanation = plan.explain()
    return {
        "request_id": plan.request_id,
        "messages": plan.messages(),
        "blocks": [one.id for one in plan.blocks],
        "references": list(plan.references),
        "labels": dict(plan.labels),
        "label_of": list(plan.label_of.values()),
        "order_annotation": plan.order_annotation,
        "location_annotations": list(plan.location_annotations),
        "expected_cached_tokens": plan.expected_cached_tokens,
        "explain": {
            "cause": str(explanation.cause),
            "closest": explanation.closest,
            "shared": [explanation.shared_blocks, explanation.shared_tokens],
            "parts_at": [explanation.block, explanation.other_block],
            "lost_tokens": explanation.lost_tokens,
            "words": str(explanation),
        },
    }


def short(plan: Plan) -> str:
    """Return a plan as one line: its blocks, what it expects, and a digest of the rest.

    The words of the explanation are no part of that; those of whole plans show them.
    """
    parts = [
        str(plan.request_id),
        " ".join(str(one.id) for one in plan.blocks),
        f"cached {plan.expected_cached_tokens}",
    ]
    if plan.references:
        parts.insert(2, "left out " + " ".join(map(str, plan.references)))
    rest = whole(plan)
    rest["explain"].pop("words")
    return ": ".join([*parts, digest(rest)])


def some_whole(plans: Sequence[Plan], places: Iterable[int] = (0, 1, -1)) -> dict[str, Any]:
    """Return some plans whole, and all as lines."""
    return {
        "whole": [whole(plans[place]) for place in places],
        "all": [short(plan) for plan in plans],
    }
