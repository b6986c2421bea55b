"""Generated retrievals: some topics, and some blocks of each, come up far more than others."""

from __future__ import annotations

import numpy as np

from ctxreuse import ContextBlock, ContextRequest

CONTEXTS_A_TOPIC = 40
BLOCKS_A_TOPIC = 80
STRAY_SHARE = 0.1


def topic_contexts(number: int, k: int = 15, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Return contexts of block numbers, their topics by a Zipf distribution, and blocks' tokens.

    A context draws its topic with probability 1/rank, and from the topic's 80 blocks k
    different ones with probability 1/rank**0.7; one block in ten comes from anywhere instead.
    There are 40 times fewer topics than contexts, at least 20. A block has 100 to 1,000 tokens.
    """
    random = np.random.default_rng(seed)
    topics = max(20, number // CONTEXTS_A_TOPIC)
    blocks = topics * BLOCKS_A_TOPIC
    drawn = random.choice(topics, number, p=_zipf(topics, 1.0))
    popularity = _zipf(BLOCKS_A_TOPIC, 0.7)
    contexts = []
    for topic in drawn:
        strays = random.binomial(k, STRAY_SHARE)
        own = random.choice(BLOCKS_A_TOPIC, k - strays, replace=False, p=popularity)
        context = [*(topic * BLOCKS_A_TOPIC + own), *random.integers(0, blocks, strays)]
        contexts.append(list(dict.fromkeys(int(block) for block in context)))
    return contexts, random.integers(100, 1_000, blocks).tolist()


def requests_of(contexts: list[list[int]], tokens: list[int] | None = None) -> list[ContextRequest]:
    """Return the requests of some contexts; blocks have ids and, mostly, given token counts."""
    made: dict[int, ContextBlock] = {}
    for context in contexts:
        for number in context:
            if number not in made:
                made[number] = ContextBlock(
                    id=number,
                    text=f"The text of block {number}. " * 10,
                    tokens=300 if tokens is None else tokens[number],
                )
    return [
        ContextRequest(blocks=[made[number] for number in context], query="Why?")
        for context in contexts
    ]


def _zipf(number: int, exponent: float) -> np.ndarray:
    shares = 1 / np.arange(1, number + 1) ** exponent
    return shares / shares.sum()
