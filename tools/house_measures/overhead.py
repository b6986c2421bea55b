"""What a wrapped call costs beside a plain one."""

from __future__ import annotations

import random
from statistics import median
from time import process_time
from typing import Any

_RUNS, _CALLS = 9, 60


def invoke_overhead() -> float:
    """Return the processor time of a wrapped `invoke` beyond the plain one, in plain ones.

    LangChain's fake model; both send the same prompts in turn, each of five documents of
    some 80 words; the median of several runs.
    """
    from langchain_core.documents import Document
    from langchain_core.language_models import FakeListChatModel

    from langchain_ctxreuse import ReuseChatModel, format_context

    plain = FakeListChatModel(responses=["In France."])
    wrapped = ReuseChatModel(inner=plain)
    draw = random.Random(0)
    texts = [f"{number} says: " + f"word{number} " * 80 for number in range(200)]
    ratios = []
    for _ in range(_RUNS + 1):
        taken = {id(plain): 0.0, id(wrapped): 0.0}
        for _ in range(_CALLS):
            documents = [Document(text) for text in draw.sample(texts, 5)]
            prompt = f"{format_context(documents)}\n\nWhich?"
            for model in (plain, wrapped):
                taken[id(model)] += _taken(model, prompt)
        ratios.append(taken[id(wrapped)] / taken[id(plain)] - 1)
    return median(ratios[1:])  # the first fills caches


def _taken(model: Any, prompt: str) -> float:
    begin = process_time()
    model.invoke(prompt)
    return process_time() - begin
