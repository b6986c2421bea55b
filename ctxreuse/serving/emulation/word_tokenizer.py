"""A tokenizer that needs no model, and chat prompts as the text that it reads."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ctxreuse.context.rendering import message_texts


class WordEncoding(NamedTuple):
    """A text's token ids, under the name that real tokenizers give them."""

    ids: list[int]


class WordTokenizer:
    """Cuts a text into words, and long words into pieces; a piece has one id in all processes."""

    # with six letters, English and code come out about as long as with 50,000 real tokens
    def __init__(self, letters: int = 6, *, chat: bool = False) -> None:
        word = rf" ?\w{{1,{letters}}}| ?[^\w\s]"
        self._piece = re.compile(rf"<\|\w+\|>|{word}|\s+" if chat else rf"{word}|\s")
        # a replay encodes the same prompts for every cache size
        self._encoded = lru_cache(maxsize=10_000)(self.ids)

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of a text that are a token each; together they are the text."""
        return self._piece.findall(text)

    def ids(self, text: str) -> list[int]:
        """Return a text's token ids."""
        return list(map(_id_of, self.pieces(text)))

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> WordEncoding:
        """Return a text's tokens as other tokenizers do; there are no special ones to add."""
        return WordEncoding(self._encoded(sequence).copy())


@lru_cache(1 << 16)  # few words make up most of a text
def _id_of(piece: str) -> int:
    return zlib.crc32(piece.encode("utf-8", "replace"))


ENGINE_TOKENIZER = WordTokenizer(letters=8, chat=True)
"""What emulated engines count tokens with."""


_OPENING = "<|im_start|>assistant\n"
CLOSING: Final = f"<|im_end|>\n{_OPENING}"
"""What stands behind the last message."""


def chat_markup(messages: Sequence[Mapping[str, Any]], tools: object = None) -> str:
    """Return a chat prompt as the text that a model reads (ChatML), with the answer's opening."""
    parts = [f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n"] if tools else []
    for message in messages:
        content = "".join(message_texts(message))
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"<|im_start|>{message.get('role')}\n{content}{calls}<|im_end|>\n")
    return "".join(parts) + _OPENING
