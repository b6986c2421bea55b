"""Why the requests of a plan file hit or miss, each compared with those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from rich.markup import escape
from rich.table import Table

from ctxreuse.blocks import BlockId
from ctxreuse.evaluation.planfile import PlannedRequest
from ctxreuse.evaluation.simulate import Tokenizer, corpus_block, prompt_tokens
from ctxreuse.evaluation.traces import Corpus
from ctxreuse.explanations import Explanation, SentPrompt, explain
from ctxreuse.tokens import estimate_tokens

_LATEST = 200
"""How many earlier prompts with a block are looked at, for each block."""


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """A request of a plan file with its explanation.

    Attributes:
        explanation: Why it hits or misses, in block tokens.
        prompt_tokens: Length of the whole prompt; None without a tokenizer.
        parts_at_token: How many tokens it shares with the closest earlier prompt, labels and
            everything else counted: the index of the first token where the two part. None without
            a tokenizer or an earlier prompt.
    """

    explanation: Explanation
    prompt_tokens: int | None = None
    parts_at_token: int | None = None


def explain_plan(
    planned: Sequence[PlannedRequest], corpus: Corpus, tokenizer: Tokenizer | None = None
) -> Iterator[ExplainedRequest]:
    """Yield an explanation for each request, other tenants' requests looked at, too.

    Args:
        planned: The requests in execution order.
        corpus: The blocks.
        tokenizer: Where given, the prompts are also compared token by token.

    Raises:
        InputFileError: If a plan names a block that the corpus lacks.
    """
    sent = _SentPrompts()
    tokens_of: dict[str | int, list[int]] = {}
    prompts = None if tokenizer is None else prompt_tokens(planned, corpus, tokenizer)
    for request in planned:
        prompt = _sent_prompt(request, corpus)
        related = sent.related(prompt)
        explanation = explain(prompt, related, request.expected_cached_tokens, across_tenants=True)
        sent.add(prompt)
        if prompts is None:
            yield ExplainedRequest(explanation)
            continue
        tokens = next(prompts)
        closest = None if explanation.closest is None else tokens_of.get(explanation.closest)
        tokens_of[request.request_id] = tokens
        yield ExplainedRequest(
            explanation, len(tokens), None if closest is None else _common(tokens, closest)
        )


class _SentPrompts:
    """The prompts so far, by the ids of their blocks, so that a long trace stays quick."""

    def __init__(self) -> None:
        self._prompts: list[SentPrompt] = []
        self._with: dict[BlockId, deque[int]] = {}

    def add(self, prompt: SentPrompt) -> None:
        for block_id in set(prompt.ids):
            self._with.setdefault(block_id, deque(maxlen=_LATEST)).append(len(self._prompts))
        self._prompts.append(prompt)

    def related(self, prompt: SentPrompt) -> list[SentPrompt]:
        """Return the earlier prompts that have a block in common, in order; the latest of each."""
        numbers = {number for block_id in prompt.ids for number in self._with.get(block_id, ())}
        return [self._prompts[number] for number in sorted(numbers)]


def _sent_prompt(request: PlannedRequest, corpus: Corpus) -> SentPrompt:
    blocks = [corpus_block(corpus, block_id, request) for block_id in request.blocks]
    return SentPrompt(
        request_id=request.request_id,
        tenant=request.tenant,
        system=request.system,
        is_later_turn=request.after is not None,
        after=request.after,
        keys=tuple(block.key for block in blocks),
        ids=tuple(block.id for block in blocks),
        tokens=tuple(
            estimate_tokens(block.text) if block.tokens is None else block.tokens
            for block in blocks
        ),
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def in_words(explained: ExplainedRequest) -> str:
    """Return the explanation of one request as text."""
    explanation = explained.explanation
    lines = [f"{explanation.request_id}: {explanation.cause}", explanation.words]
    if explained.parts_at_token is not None:
        lines.append(
            f"Token by token the two prompts part at token {explained.parts_at_token:,} of "
            f"{explained.prompt_tokens:,}."
        )
    return "\n".join(lines)


def explanation_json(explained: ExplainedRequest) -> dict[str, Any]:
    """Return the explanation of one request as a JSON object."""
    return {
        **asdict(explained.explanation),
        "prompt_tokens": explained.prompt_tokens,
        "parts_at_token": explained.parts_at_token,
    }


def explanation_tables(explained: Sequence[ExplainedRequest], worst: int) -> list[Table]:
    """Return the causes, and the requests that lost most, as tables."""
    causes = Table("cause", "requests", "tokens computed again", title="Why requests hit or miss")
    by_cause: dict[str, list[int]] = {}
    for one in explained:
        by_cause.setdefault(one.explanation.cause, []).append(one.explanation.lost_tokens)
    for cause, lost in sorted(by_cause.items(), key=lambda item: (-sum(item[1]), item[0])):
        causes.add_row(cause, f"{len(lost):,}", f"{sum(lost):,}")
    tables = [causes]
    losers = [one.explanation for one in explained if one.explanation.lost_tokens]
    losers.sort(key=lambda one: -one.lost_tokens)
    if worst and losers:
        table = Table()
        for column in ("request", "cause", "closest", "shared", "parts at", "computed again"):
            table.add_column(column, overflow="fold")
        for one in losers[:worst]:
            table.add_row(
                *(escape(str(name)) for name in (one.request_id, one.cause, one.closest)),
                f"{one.shared_tokens:,} tokens",
                escape("its end" if one.block is None else str(one.block)),
                f"{one.lost_tokens:,}",
            )
        table.title = "Requests that lost most (`--request ID` says more)"
        tables.append(table)
    return tables
