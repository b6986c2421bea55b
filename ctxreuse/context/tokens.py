"""Counting tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from numbers import Integral
from typing import Any

from ctxreuse.errors import InvalidRequestError, describe

ENGINE_BLOCK_TOKENS = 16
"""Engines reuse whole blocks of this many tokens; a shorter common prefix saves nothing."""

_BYTES_PER_TOKEN = 4


def estimate_tokens(text: str) -> int:
    """Estimate tokens: four bytes of UTF-8 each, within 20 % for English prose and code."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN)


def well_formed(text: str) -> str:
    """Return a text that tokenizers take: lone surrogates, which UTF-8 lacks, become '?'."""
    return text.encode("utf-8", "replace").decode("utf-8")


def as_token_counter(counter: Any) -> Callable[[str], int]:
    """Return a function from text to tokens, from None, such a function or a tokenizer."""
    if counter is None:
        return estimate_tokens
    encode = None if isinstance(counter, (str, bytes)) else getattr(counter, "encode", None)
    if callable(encode):
        return lambda text: _length(encode(well_formed(text), add_special_tokens=False))
    if callable(counter):
        return lambda text: _checked(counter(text))
    raise InvalidRequestError(
        f"token_counter must be a function or a tokenizer, not {describe(counter)}"
    )


def _length(encoded: Any) -> int:
    ids = getattr(encoded, "ids", encoded)
    if not isinstance(ids, Sized):
        raise InvalidRequestError(f"the tokenizer's encode returned {describe(encoded)}")
    return len(ids)


def _checked(count: Any) -> int:
    if not isinstance(count, Integral) or int(count) < 0:
        raise InvalidRequestError(
            f"token_counter returned {describe(count)}; it must return an integer from 0"
        )
    return int(count)


def joined_up_to(pieces: Iterable[str], most: int, length: Callable[[str], int]) -> list[str]:
    """Join neighbouring pieces as far as `most` allows; a longer piece stays alone."""
    joined: list[str] = []
    together: list[str] = []
    total = 0
    for piece in pieces:
        added = length(piece)
        if together and total + added > most:
            joined.append("".join(together))
            together, total = [], 0
        together.append(piece)
        total += added
    return [*joined, "".join(together)] if together else joined
