"""What the user has put on messages stays in prompts that a wrapped LlamaIndex model sends."""

from collections.abc import Sequence
from typing import Any

from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    ChatResponse,
    ImageBlock,
    MessageRole,
    TextBlock,
)
from llama_index.core.llms import MockLLM
from llama_index.core.schema import NodeWithScore, TextNode
from message_contents import CONTEXT, MOST_MARKS
from pydantic import PrivateAttr

from ctxreuse import ReusePlanner
from llamaindex_ctxreuse import ReuseLLM, format_context


class Anthropic(MockLLM):
    """Takes cache points, by its name, and records what it is called with."""

    _calls: list[list[ChatMessage]] = PrivateAttr(default_factory=list)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        self._calls.append(list(messages))
        return ChatResponse(message=ChatMessage(role="assistant", content="Yes."))


POINT = CachePoint(cache_control=CacheControl(type="ephemeral"))
words = st.text("ab \n[]", max_size=12)
texts = words.map(lambda text: TextBlock(text=text))
others = st.one_of(
    texts, st.just(POINT), st.builds(ImageBlock, image=st.sampled_from([b"x", b"y"]))
)
around = st.tuples(words, words).map(
    lambda pair: TextBlock(text=f"{pair[0]}\n{CONTEXT}\n{pair[1]}")
)
histories = st.lists(
    st.tuples(
        st.sampled_from([MessageRole.USER, MessageRole.ASSISTANT, MessageRole.SYSTEM]),
        st.lists(others, max_size=4),
        st.dictionaries(st.sampled_from(["mine", "name"]), words, max_size=1),
    ),
    max_size=3,
)
last = st.tuples(st.lists(others, max_size=4), around, st.lists(others, max_size=4))


def said(message: ChatMessage) -> tuple[list[Any], list[tuple[int, int]]]:
    """Return a message's texts, joined, and other blocks; and where it is marked."""
    items: list[Any] = []
    marks: list[tuple[int, int]] = []
    characters = media = 0
    for block in message.blocks:
        if isinstance(block, CachePoint):
            marks.append((characters, media))
        elif isinstance(block, TextBlock):
            characters += len(block.text)
            if items and isinstance(items[-1], str):
                items[-1] += block.text
            elif block.text:
                items.append(block.text)
        else:
            media += 1
            items.append(block)
    return items, marks


@given(histories, last, st.sampled_from(["anthropic", "vllm"]))
@examples(150)
def test_blocks_and_fields_are_kept(history, newest, cache):
    inner = Anthropic()
    llm = ReuseLLM(inner=inner, planner=ReusePlanner(cache=cache), window_s=0, strategy="none")
    nodes = [NodeWithScore(node=TextNode(id_=one, text=one * 5_000), score=1.0) for one in "ab"]
    before, (first, around, behind) = history, newest
    for _ in range(3):
        text = TextBlock(text=around.text.replace(CONTEXT, format_context(nodes)))
        given = [
            ChatMessage(role=role, blocks=list(blocks), additional_kwargs=kwargs)
            for role, blocks, kwargs in before
        ]
        given.append(ChatMessage(role=MessageRole.USER, blocks=[*first, text, *behind]))
        copies = [one.model_copy(deep=True) for one in given]
        llm.chat(given)
        assert given == copies
        sent = inner._calls[-1]
        assert [said(one)[0] for one in sent] == [said(one)[0] for one in given]
        assert [(o.role, o.additional_kwargs) for o in sent] == [
            (o.role, o.additional_kwargs) for o in given
        ]
        users = [(n, mark) for n, one in enumerate(given) for mark in said(one)[1]]
        ours = [(n, mark) for n, one in enumerate(sent) for mark in said(one)[1]]
        if cache == "anthropic":
            assert len(ours) <= max(MOST_MARKS, 0)
            assert set(users[-MOST_MARKS:]) <= set(ours)
        else:
            assert ours == users
