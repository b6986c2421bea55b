"""Memories in front of hosted caches: content parts and marks say what messages say."""

from typing import Any, get_args

import pytest
from caching_provider import count_tokens
from caching_server import caching_server

from ctxreuse import ReusePlanner
from ctxreuse.pipeline.memories import Placement
from mem0_ctxreuse import ReuseMemory


class Memories:
    """A memory that finds some memories, long enough to be cached."""

    def search(self, query: str, **kwargs: Any) -> dict[str, Any]:
        words = query.split()
        return {
            "results": [{"id": word, "memory": f"{word} " * 800, "score": 1.0} for word in words]
        }


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(one["text"] for one in content)


@pytest.mark.parametrize("placement", get_args(Placement))
@pytest.mark.parametrize("form", ["openai", "anthropic"])
def test_parts_say_what_messages_say_and_later_searches_read_them(placement, form):
    planner = ReusePlanner(cache=form, token_counter=count_tokens)
    memory = ReuseMemory(Memories(), planner=planner, placement=placement)
    with caching_server(form) as server:
        for query in ("one two three", "one two four", "one two five", "two one six"):
            context = memory.context(query, system="Be brief.")
            body = context.body(form)
            said = [*body.get("system", []), *body["messages"]]
            texts = [text_of(one["content"]) if "content" in one else one["text"] for one in said]
            assert "".join(texts) == "".join(text_of(m["content"]) for m in context.messages())
            server.reckon(body, {})
        assert server.usages[-1].read > 1_024
        assert not server.refusals
