"""The whole prompts of planned requests: as blocks, as tokens, and as pieces that may be marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from ctxreuse.cache.provider_cache import PromptPiece
from ctxreuse.cache.simulator import block_key
from ctxreuse.context.blocks import BlockKey, ContextBlock
from ctxreuse.context.content_parts import ContentPart, joined, turn_parts
from ctxreuse.context.rendering import (
    DEFAULT_TEMPLATES,
    Reference,
    SentBlock,
    TurnPart,
    word_tokens,
)
from ctxreuse.context.tokens import estimate_tokens, well_formed
from ctxreuse.errors import InputFileError, describe
from ctxreuse.measure.replay.plan_file import ANSWER, PlannedRequest
from ctxreuse.measure.traces.trace_files import Corpus, block_tokens

_Prompt = TypeVar("_Prompt")


class Tokenizer(Protocol):
    """A `tokenizers.Tokenizer`."""

    def encode(self, sequence: str, *, add_special_tokens: bool = ...) -> Any:
        """Return the tokens of a text, their numbers as `ids`."""


def said_tokens(request: PlannedRequest) -> int:
    """Return about how many tokens the words have that a turn adds to its blocks and question."""
    labels = DEFAULT_TEMPLATES.label_tokens * len(request.blocks) if request.is_labelled else 0
    return labels + _annotation_tokens(request)


def _annotation_tokens(request: PlannedRequest) -> int:
    said = (request.order_annotation, *(annotation for *_, annotation in request.parts))
    return sum(map(word_tokens, filter(None, said)))


def _as_shown(block: ContextBlock, request: PlannedRequest) -> tuple[BlockKey, int]:
    """Return the key and the tokens of a block with its label, if the prompt shows labels."""
    if not request.is_labelled:
        return block.key, block_tokens(block)
    return BlockKey(block.key + b" "), block_tokens(block) + DEFAULT_TEMPLATES.label_tokens


def _in_turns(
    planned: Sequence[PlannedRequest],
    prompt_of: Callable[[int, PlannedRequest, _Prompt | None], _Prompt],
) -> Iterator[_Prompt]:
    """Yield each request's whole prompt, made of the one that it continues, if it does."""
    prompts: dict[str | int, _Prompt] = {}
    continued = Counter(request.after for request in planned)
    for number, request in enumerate(planned):
        before = None
        if (after := request.after) is not None:  # which stands before it, in files, too
            continued[after] -= 1
            before = prompts[after] if continued[after] else prompts.pop(after)
        prompt = prompt_of(number, request, before)
        if continued[request.request_id]:
            prompts[request.request_id] = prompt
        yield prompt


_Blocks: TypeAlias = tuple[list[BlockKey], list[int]]


def prompt_blocks(
    planned: Sequence[PlannedRequest], corpus: Corpus, *, counts_words: bool = False
) -> Iterator[_Blocks]:
    """Yield each request's whole prompt as context blocks and their tokens."""

    def prompt(number: int, request: PlannedRequest, before: _Blocks | None) -> _Blocks:
        shown = [
            _as_shown(block, request) if counts_words else (block.key, block_tokens(block))
            for block in sent_blocks(request, corpus)
        ]
        said = _annotation_tokens(request) if counts_words else 0
        if before is not None:
            # the turn before ends in a question and an answer that no other prompt has
            shown = [*zip(*before, strict=True), (block_key(f"turn {number}"), 0), *shown]
        if said:
            shown.append((block_key(f"words {number}"), said))
        return [key for key, _ in shown], [tokens for _, tokens in shown]

    return _in_turns(planned, prompt)


def prompt_tokens(
    planned: Sequence[PlannedRequest], corpus: Corpus, tokenizer: Tokenizer
) -> Iterator[list[int]]:
    """Yield each request's whole prompt as token ids."""

    def encode(role: str, content: str) -> list[int]:
        return _token_ids(tokenizer, _said(role, content))

    def prompt(_: int, request: PlannedRequest, before: list[int] | None) -> list[int]:
        front = [] if request.system is None else encode("system", request.system)
        if before is not None:
            front = before + encode("assistant", ANSWER)
        return front + encode("user", joined(_turn(request, corpus)))

    opening = _token_ids(tokenizer, "<|im_start|>assistant\n")
    return (one + opening for one in _in_turns(planned, prompt))


def prime_ends(
    request: PlannedRequest,
    corpus: Corpus,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    block_tokens: int,
) -> Iterator[int]:
    """Yield at which token of a request's prompt each of its primes ends."""
    shown = _shown(request, corpus)
    system = "" if request.system is None else _said("system", request.system)
    for blocks in request.primes:
        begun = turn_parts(
            shown[:blocks], None, "", DEFAULT_TEMPLATES, is_labelled=request.is_labelled
        )
        front = _token_ids(tokenizer, f"{system}<|im_start|>user\n{joined(begun)}")
        pairs = zip(front, prompt, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # one token more: of a prompt, an engine keeps the state before its last token
        yield common - common % block_tokens + 1


def _token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(well_formed(text), add_special_tokens=False).ids
    return ids


def _said(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


class CutPrompt(NamedTuple):
    """A whole prompt, cut as it would be sent to a hosted cache; nothing is marked yet."""

    pieces: list[PromptPiece]
    turn_ends: list[int]
    block_ends: list[int]


def prompt_pieces(
    planned: Sequence[PlannedRequest], corpus: Corpus, tokenizer: Tokenizer | None = None
) -> Iterator[CutPrompt]:
    """Yield each request's whole prompt in pieces: system text, blocks, and what is around them."""

    def count(text: str) -> int:
        return 0 if tokenizer is None else len(_token_ids(tokenizer, text))

    def prompt(number: int, request: PlannedRequest, before: CutPrompt | None) -> CutPrompt:
        pieces: list[PromptPiece] = []
        if before is not None:
            pieces = [*before.pieces, PromptPiece(ANSWER, count(ANSWER))]
        elif request.system:
            tokens = estimate_tokens(request.system) if tokenizer is None else count(request.system)
            pieces = [PromptPiece(f"system {request.system}", tokens)]
        block_ends = [before.block_ends[0] if before else len(pieces)]  # behind the system text
        if tokenizer is None:
            for block in sent_blocks(request, corpus):
                key, tokens = _as_shown(block, request)
                pieces.append(PromptPiece(key.hex(), tokens))
                block_ends.append(len(pieces))
            # without its text, no question is another one's
            said = _annotation_tokens(request)
            pieces.append(PromptPiece(f"question {request.query or number}", said))
        else:
            for part in _turn(request, corpus):
                pieces.append(PromptPiece(part.text, count(part.text)))
                if part.block is not None:
                    block_ends.append(len(pieces))
        turn_ends = [*(before.turn_ends if before else ()), len(pieces)]
        return CutPrompt(pieces, turn_ends, block_ends)

    return _in_turns(planned, prompt)


def _turn(request: PlannedRequest, corpus: Corpus) -> list[ContentPart]:
    shown, said, has_labels = _shown(request, corpus), request.order_annotation, request.is_labelled
    return turn_parts(shown, said, request.query, DEFAULT_TEMPLATES, is_labelled=has_labels)


def _shown(request: PlannedRequest, corpus: Corpus) -> list[TurnPart]:
    return [
        SentBlock(label, _corpus_block(corpus, block_id, request, has_text=True))
        if annotation is None
        else Reference(label, block_id, annotation)
        for label, block_id, annotation in request.parts
    ]


def sent_blocks(request: PlannedRequest, corpus: Corpus) -> list[ContextBlock]:
    """Return the blocks that a plan sends, in order."""
    return [_corpus_block(corpus, block_id, request) for block_id in request.blocks]


def _corpus_block(
    corpus: Corpus, block_id: str | int, request: PlannedRequest, *, has_text: bool = False
) -> ContextBlock:
    block, named = corpus.get(block_id), f"{request.place}: block {describe(block_id)}"
    if block is None:
        raise InputFileError(
            f"{named} is not in the corpus; pass the corpus that the plan was made with"
        )
    if has_text and block.tokens and not block.text:
        raise InputFileError(
            f"{named}: the corpus has no text of it, only its length; leave out --tokenizer"
        )
    return block
