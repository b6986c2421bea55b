"""Why a prompt hits or misses the prefix cache, in words.

Compares a prompt with those sent before it: which one is closest, at which block they part, and
what was computed again for no better reason than order, system text, tenant or eviction. Counted in
block tokens; labels, questions and annotations are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any, NamedTuple

from ctxreuse.context.blocks import BlockId, BlockKey, id_size, ids_size
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS, well_formed

_REMEMBERED_PROMPTS = 256
_LONGEST_NAME = 60
MOST_BLOCK_TOKENS = 2**40
"""Tokens of a block count up to this, so that numbers stay printable."""


class Cause(StrEnum):
    """What decided how much of a prompt is served from the cache."""

    hit = "hit"
    new_blocks = "new blocks"
    other_order = "other order"
    other_text = "other text"
    other_labels = "with labels and without"
    other_system = "other system text"
    other_tenant = "other tenant"
    later_turn = "later turn"
    older_prompt = "older prompt"
    evicted = "evicted"
    too_short = "shorter than an engine block"
    empty = "no blocks"


class SentPrompt(NamedTuple):
    """A prompt that was sent, without any text.

    Attributes:
        request_id: Its request.
        tenant: Whose it is.
        system: Anything that is equal for equal system texts.
        is_later_turn: Whether a conversation's history stands before its own blocks.
        after: The request that the history ends with, if it is known.
        keys: The identities of its own blocks, in order.
        ids: Their ids.
        tokens: Their tokens, each at most `MOST_BLOCK_TOKENS`.
        is_labelled: Whether it shows them under labels.
    """

    request_id: str | int
    tenant: str
    system: str | bytes | None
    is_later_turn: bool
    after: str | int | None
    keys: tuple[BlockKey, ...]
    ids: tuple[BlockId, ...]
    tokens: tuple[int, ...]
    is_labelled: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt hits or misses.

    Attributes:
        request_id: The prompt's request.
        cause: What decided it.
        closest: The request of the earlier prompt that shares the longest beginning, or, if none
            shares any, the most block tokens; None if there is none to compare with.
        shared_blocks: How many of the prompt's first blocks are that one's first blocks, too.
        shared_tokens: Their tokens: the first block token at which the two part.
        block: The id of the prompt's own block there; None at its end.
        other_block: The id of the earlier prompt's block there; None at its end.
        lost_tokens: Tokens of blocks that the closest prompt has, too, and that are computed again.
        words: All this as a sentence.
    """

    request_id: str | int
    cause: Cause
    closest: str | int | None
    shared_blocks: int
    shared_tokens: int
    block: BlockId | None
    other_block: BlockId | None
    lost_tokens: int
    words: str

    def __str__(self) -> str:
        return self.words


class PromptLog:
    """The latest prompts of one tenant with the times at which they were planned.

    A copy of a plan shares the log of the original; an unpickled one has an empty log.

    Attributes:
        size: The sizes (`id_size`) of the ids of all prompts' blocks, and 1 a prompt.
    """

    __slots__ = ("_prompts", "size")

    def __init__(self, size: int = _REMEMBERED_PROMPTS) -> None:
        # (time, size, the fields of a prompt): the collector need not look into these
        self._prompts: deque[tuple[int, int, tuple[Any, ...]]] = deque(maxlen=size)
        self.size = 0

    def add(self, time: int, prompt: SentPrompt) -> None:
        """Remember a prompt; the oldest goes if there are too many."""
        if len(self._prompts) == self._prompts.maxlen:
            self.forget_oldest()
        size = id_size(prompt.request_id) + ids_size(prompt.ids)
        self._prompts.append((time, size, tuple(prompt)))
        self.size += size

    def forget_oldest(self) -> None:
        """Forget the oldest prompt, if there is one."""
        if self._prompts:
            self.size -= self._prompts.popleft()[1]

    def before(self, time: int) -> list[SentPrompt]:
        """Return the remembered prompts that were planned before a time."""
        prompts = list(self._prompts)  # one step: other threads append meanwhile
        return [SentPrompt(*fields) for planned, _, fields in prompts if planned < time]

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptLog:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (PromptLog, ())


class LoggedPrompt(NamedTuple):
    """A prompt and when it was planned, by a clock that only goes forward."""

    prompt: SentPrompt
    log: PromptLog
    time: int

    def earlier(self) -> list[SentPrompt]:
        """Return the prompts before it that the log still holds."""
        return self.log.before(self.time)


def explain(
    prompt: SentPrompt,
    earlier: Iterable[SentPrompt],
    cached_tokens: int | None = None,
    *,
    across_tenants: bool = False,
    engine_block_tokens: int = ENGINE_BLOCK_TOKENS,
) -> Explanation:
    """Return why a prompt hits or misses.

    Args:
        prompt: The prompt.
        earlier: The prompts that were sent before it, the latest last.
        cached_tokens: Block tokens that were expected or seen to be cached; fewer than an earlier
            prompt shares means that they were evicted, more that `earlier` is not all. None takes
            everything as still cached.
        across_tenants: Whether other tenants' prompts are looked at. That reveals what they sent.
        engine_block_tokens: Tokens of an engine's block; a shorter beginning is not served.
    """
    before = list(earlier)
    if prompt.is_later_turn:
        return _later_turn(prompt)
    if not prompt.keys:
        return _explained(
            prompt, Cause.empty, "The prompt has no blocks: there is nothing to reuse."
        )
    opening = [one for one in before if not one.is_later_turn]
    same_system = [
        one for one in opening if one.tenant == prompt.tenant and one.system == prompt.system
    ]
    same_root = [one for one in same_system if one.is_labelled == prompt.is_labelled]
    closest = _closest(prompt, same_root)
    shared = 0 if closest is None else _shared_tokens(prompt, closest)
    if cached_tokens is not None and cached_tokens > shared:
        return _older(prompt, cached_tokens)
    elsewhere = [
        (Cause.other_labels, same_system),
        (Cause.other_system, [one for one in opening if one.tenant == prompt.tenant]),
        (Cause.other_tenant, opening if across_tenants else []),
    ]
    for cause, others in elsewhere:
        other = _closest(prompt, others)
        if other is not None and _shared_tokens(prompt, other) >= engine_block_tokens > shared:
            return _apart(prompt, other, cause)
    if closest is None:
        words = (
            "No earlier prompt with this tenant and system text is known: everything is computed."
        )
        return _explained(prompt, Cause.new_blocks, words)
    return _compared(prompt, closest, same_root, cached_tokens, engine_block_tokens)


def _compared(
    prompt: SentPrompt,
    closest: SentPrompt,
    before: list[SentPrompt],
    cached_tokens: int | None,
    engine_block_tokens: int,
) -> Explanation:
    blocks = _shared_blocks(prompt, closest)
    shared = sum(prompt.tokens[:blocks])
    own = prompt.ids[blocks] if blocks < len(prompt.ids) else None
    other = closest.ids[blocks] if blocks < len(closest.ids) else None
    in_closest = set(closest.keys)
    moved = sum(
        tokens
        for key, tokens in zip(prompt.keys[blocks:], prompt.tokens[blocks:], strict=True)
        if key in in_closest
    )
    too_short = shared if shared < engine_block_tokens else 0
    evicted = 0 if cached_tokens is None or too_short else shared - cached_tokens
    if evicted < engine_block_tokens:  # engines serve whole blocks of theirs
        evicted = 0
    lost = moved + max(evicted, too_short)
    name = f"request {_named(closest.request_id)}"
    begins = f"No earlier prompt begins as it does; the closest is {name}"
    if blocks:
        begins = (
            f"It begins as {name} does, for {blocks} of its {len(prompt.keys)} blocks "
            f"({shared:,} of {sum(prompt.tokens):,} block tokens)"
        )
    parts = f"They part at block {_named(own)}, where the earlier prompt has {_named(other)}."
    if own is None or other is None:
        parts = f"{'This' if own is None else 'The earlier'} prompt ends there."
    if evicted > moved:
        cause = Cause.evicted
        words = f"{begins}, but {evicted:,} of these tokens have left the cache since. {parts}"
    elif too_short > moved:
        cause = Cause.too_short
        words = (
            f"{begins}, but that is less than an engine block of {engine_block_tokens} tokens, the "
            f"least that a cache serves. {parts}"
        )
    elif own is None:
        cause, words = Cause.hit, f"{begins}: all of it can be served. {parts}"
    elif moved:
        cause = Cause.other_order
        words = (
            f"{begins}. {parts} From there on blocks with {moved:,} tokens stand in the earlier "
            "prompt, too, but in another order or place: they are computed again."
        )
    elif (changed := _changed(prompt, blocks, before)) is not None:
        cause = Cause.other_text
        words = (
            f"{begins}. {parts} Block {_named(changed)} had another text when it was sent before."
        )
    else:
        cause = Cause.new_blocks
        words = f"{begins}. {parts} No block from there on stands in that prompt."
    return _explained(prompt, cause, words, closest.request_id, blocks, other, lost)


def _older(prompt: SentPrompt, cached_tokens: int) -> Explanation:
    """Explain by what the index knows, where the prompts that are remembered say less."""
    total, blocks, shared = sum(prompt.tokens), 0, 0
    while blocks < len(prompt.tokens) and shared + prompt.tokens[blocks] <= cached_tokens:
        shared += prompt.tokens[blocks]
        blocks += 1
    words = (
        "A prompt that is not among those compared begins as it does: "
        f"{min(cached_tokens, total):,} of {total:,} block tokens are cached, "
        f"{blocks} of its {len(prompt.keys)} blocks whole."
    )
    cause = Cause.hit if blocks == len(prompt.keys) else Cause.older_prompt
    return _explained(prompt, cause, words, shared_blocks=blocks)


def _later_turn(prompt: SentPrompt) -> Explanation:
    behind = "" if prompt.after is None else f" behind request {_named(prompt.after)}"
    words = (
        f"It continues a conversation{behind} and repeats what was sent there; "
        f"its own {len(prompt.keys)} blocks ({sum(prompt.tokens):,} tokens) stand behind that "
        "history, where no other prompt can have put them."
    )
    return _explained(prompt, Cause.later_turn, words, prompt.after)


def _apart(prompt: SentPrompt, other: SentPrompt, cause: Cause) -> Explanation:
    blocks = _shared_blocks(prompt, other)
    lost = sum(prompt.tokens[:blocks])
    name = other_block = None
    if cause is Cause.other_tenant:
        who, why = "Another tenant's prompt", "tenants share nothing"
    else:
        name, other_block = other.request_id, other.ids[0]
        who = f"Request {_named(name)}"
        why = "its system text is another one and stands before them"
        if cause is Cause.other_labels:
            why = "one of the two prompts shows them under labels and the other does not"
    words = (
        f"{who} began with the same {blocks} blocks ({lost:,} tokens), but {why}; they are "
        "computed again."
    )
    return _explained(prompt, cause, words, name, 0, other_block, lost)


def _explained(
    prompt: SentPrompt,
    cause: Cause,
    words: str,
    closest: str | int | None = None,
    shared_blocks: int = 0,
    other_block: BlockId | None = None,
    lost_tokens: int = 0,
) -> Explanation:
    return Explanation(
        prompt.request_id,
        cause,
        closest,
        shared_blocks,
        sum(prompt.tokens[:shared_blocks]),
        prompt.ids[shared_blocks] if shared_blocks < len(prompt.ids) else None,
        other_block,
        lost_tokens,
        words,
    )


def _closest(prompt: SentPrompt, others: Iterable[SentPrompt]) -> SentPrompt | None:
    """Return the prompt of the longest common beginning; of these the one of most common tokens."""
    weight = dict(zip(prompt.keys, prompt.tokens, strict=True))

    def closeness(numbered: tuple[int, SentPrompt]) -> tuple[int, int, int]:
        number, other = numbered
        common = sum(weight.get(key, 0) for key in set(other.keys))
        return (_shared_tokens(prompt, other), common, number)

    best = max(enumerate(others), key=closeness, default=None)
    return None if best is None else best[1]


def _shared_blocks(prompt: SentPrompt, other: SentPrompt) -> int:
    pairs = zip(prompt.keys, other.keys, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shared_tokens(prompt: SentPrompt, other: SentPrompt) -> int:
    return sum(prompt.tokens[: _shared_blocks(prompt, other)])


def _changed(prompt: SentPrompt, first: int, before: list[SentPrompt]) -> BlockId | None:
    """Return a block, from the `first`-th on, that an earlier prompt has with another text."""
    seen = {key for other in before for key in other.keys}
    texts = {(type(id_), id_) for other in before for id_ in other.ids}
    for key, id_ in zip(prompt.keys[first:], prompt.ids[first:], strict=True):
        if key not in seen and (type(id_), id_) in texts:
            return id_
    return None


def _named(name: str | int | None) -> str:
    """Return an id as it can be printed anywhere, a very long one cut."""
    if name is not None and not isinstance(name, str):
        name = int(name)  # of numpy, maybe
    try:
        text = repr(name)
    except ValueError:  # an integer past the limit of digits
        text = hex(int(name or 0))
    return well_formed(text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…")
