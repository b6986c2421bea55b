"""The fake provider as the official SDKs see it, by the rules that providers have written down."""

from typing import Any

import anthropic
import pytest
from caching_provider import Provider, Usage
from caching_server import CachingServer, caching_server

LONG = "word " * 1_100
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def ask_anthropic(
    server: CachingServer, content: list[Any], **fields: Any
) -> anthropic.types.Usage:
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        messages = [{"role": "user", "content": content}]
        return client.messages.create(model="m", max_tokens=9, messages=messages, **fields).usage


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([text(f"word{n}", **EPHEMERAL) for n in range(5)], "maximum of 4"),
        (
            [text("a", **EPHEMERAL), text("b", cache_control={"type": "ephemeral", "ttl": "1h"})],
            "must not come after",
        ),
        ([text(" ", **EPHEMERAL)], "non-whitespace"),
    ],
)
def test_anthropic_refuses_too_many_marks_wrong_order_and_blank_blocks(content, why):
    with caching_server("anthropic") as server, pytest.raises(anthropic.BadRequestError, match=why):
        ask_anthropic(server, content)


def test_anthropic_looks_back_twenty_blocks_and_stores_no_short_prefixes():
    for between, read in ((19, 1_100), (20, 0)):
        with caching_server("anthropic") as server:
            ask_anthropic(server, [text(LONG, **EPHEMERAL)])
            more = [text(f"block{n}") for n in range(between)]
            more[-1] |= EPHEMERAL
            usage = ask_anthropic(server, [text(LONG), *more])
            assert usage.cache_read_input_tokens == read
    with caching_server("anthropic", minimum=2_048) as server:
        for _ in range(2):
            usage = ask_anthropic(server, [text(LONG, **EPHEMERAL)])
            assert (usage.input_tokens, usage.cache_creation_input_tokens) == (1_100, 0)


def test_openai_writes_the_latest_four_of_more_marks():
    provider = Provider("openai", minimum=1)
    content = [text(f"word{n}", **MARK) for n in range(6)]
    options = {"mode": "explicit"}

    def sent(marked: int) -> Usage:
        body = {
            "messages": [{"role": "user", "content": content[:marked]}],
            "prompt_cache_options": options,
        }
        return provider.take(body, now=0.0)

    assert sent(6).written == {"30m": 6}
    assert sent(2) == Usage(0, 0, {"30m": 2})  # the first two were not stored
    assert sent(3).read == 3
