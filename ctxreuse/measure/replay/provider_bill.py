"""What a provider with a hosted cache charges for a planned trace, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ctxreuse.cache.provider_cache import PromptPiece, ProviderCache
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.prompts import CutPrompt, Tokenizer, prompt_pieces
from ctxreuse.measure.traces.trace_files import Corpus
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import CacheRules


class BilledPrompts(NamedTuple):
    """The prompts of a trace by what is paid for them."""

    prompts: list[BilledTokens]
    never_read: int


def billed_prompts(
    planned: Sequence[PlannedRequest],
    corpus: Corpus,
    profile: CacheRules,
    tokenizer: Tokenizer | None = None,
    *,
    is_marked: bool = True,
    is_timed: bool = True,
    advance: Callable[[], object] = lambda: None,
) -> BilledPrompts:
    """Return what is charged for requests sent one after the other, each answered first."""
    marks_end = not is_marked and profile.marks_end
    cache, billed, now = ProviderCache(profile, marks_end=marks_end), [], 0.0
    for request, prompt in zip(planned, prompt_pieces(planned, corpus, tokenizer), strict=True):
        if is_timed and request.timestamp_ms is not None:
            now = max(now, request.timestamp_ms / 1_000)
        marks = _marks(request, prompt) if is_marked else _default_marks(prompt, marks_end)
        pieces = [
            PromptPiece(one.content, one.tokens, number in marks)
            for number, one in enumerate(prompt.pieces, start=1)
        ]
        billed.append(cache.serve(pieces, now=now, key=request.tenant))
        advance()
    return BilledPrompts(billed, cache.never_read)


def _marks(request: PlannedRequest, prompt: CutPrompt) -> set[int]:
    """Return behind which pieces `Plan.body` puts a mark."""
    marks = {prompt.block_ends[mark] for mark in request.marks or ()}
    if request.conversation_id is not None:
        marks.update(prompt.turn_ends[-2:])  # what the turn before has written, and for the next
    return marks


def _default_marks(prompt: CutPrompt, marks_end: bool) -> set[int]:
    """Return where earlier turns had the mark that the provider puts at the end of each."""
    return set(prompt.turn_ends[:-1]) if marks_end else set()
