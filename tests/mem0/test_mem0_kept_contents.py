"""What the user has put on messages stays in prompts that show memories."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from message_contents import check_kept, conversations

from ctxreuse import ReusePlanner
from ctxreuse.adapters.memory_planner import Placement
from mem0_ctxreuse import ReuseMemory


class Memories:
    """A memory that finds the same two memories."""

    def search(self, query: str, **kwargs: Any) -> dict[str, Any]:
        return {"results": [{"id": one, "memory": one * 5_000, "score": 1.0} for one in ("a", "b")]}


@pytest.mark.parametrize("placement", get_args(Placement))
@given(conversations(), st.sampled_from(["openai", "anthropic", "vllm"]))
@examples(40)
def test_histories_are_kept(placement, messages, cache):
    history = [
        {"role": one.role, "content": one.content, **one.beside}
        for one in messages[:-1]
        if one.role != "system"
    ]
    memory = ReuseMemory(Memories(), planner=ReusePlanner(cache=cache), placement=placement)
    roles = [one["role"] for one in history]
    pairs = itertools.pairwise(roles)
    answered = [number for number, pair in enumerate(pairs) if pair == ("user", "assistant")]
    for number in range(3):
        context = memory.context(
            f"Which {number}?", system="Be brief.", history=history, conversation_id=f"c{number}"
        )
        for sent in (context.messages(), context.body()["messages"]):
            earlier = [one for one in sent if one["role"] != "system"][: len(history)]
            check_kept(
                [one["content"] for one in history],
                [one["content"] for one in earlier],
                answered[:-1],
                cache,
            )
            for one, other in zip(earlier, history, strict=True):
                assert {**one, "content": 0} == {**other, "content": 0}
