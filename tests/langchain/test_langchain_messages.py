from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_model_helpers import PIXEL

from ctxreuse.pipeline.prompt_turn import PromptPart
from langchain_ctxreuse.messages import prompt_texts


class TestMessageTexts:
    def test_roles_have_openais_names(self):
        messages = [
            SystemMessage("s"),
            HumanMessage("u"),
            AIMessage("a"),
            AIMessageChunk("c"),
            ToolMessage("t", tool_call_id="1"),
            FunctionMessage("f", name="f"),
            ChatMessage("o", role="critic"),
        ]
        assert list(prompt_texts(messages, {}).parts) == [
            PromptPart("system", "s"),
            PromptPart("user", "u"),
            PromptPart("assistant", "a"),
            PromptPart("assistant", "c"),
            PromptPart("tool", "t"),
            PromptPart("function", "f"),
            PromptPart("critic", "o"),
        ]

    def test_what_is_no_text_stands_for_itself(self):
        def segments(*parts: Any) -> list[PromptPart]:
            return list(prompt_texts([HumanMessage(list(parts))], {}).parts)

        [first, image, last] = segments("a", PIXEL, {"type": "text", "text": "b"})
        assert (first, last) == (PromptPart("user", "a"), PromptPart("user", "b"))
        assert image.role == "user"
        assert "AAAA" not in image.text
        other = {"type": "image_url", "image_url": {"url": "other"}}
        assert segments(PIXEL) == [image]
        assert segments(other) != [image]

    def test_tool_calls_and_empty_messages_count(self):
        one = AIMessage("", tool_calls=[{"name": "look", "args": {"at": 1}, "id": "1"}])
        other = AIMessage("", tool_calls=[{"name": "look", "args": {"at": 2}, "id": "1"}])
        assert prompt_texts([one], {}).parts != prompt_texts([other], {}).parts
        assert prompt_texts([one], {}).parts[0] == PromptPart("assistant", "")
        assert prompt_texts([AIMessage([])], {}).parts == (PromptPart("assistant", ""),)
