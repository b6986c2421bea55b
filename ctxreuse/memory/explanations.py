"""Why a prompt hits or misses the prefix cache, in words, compared with prompts before it.

Counted in block tokens; labels, questions and annotations are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ctxreuse.context.blocks import BlockId
from ctxreuse.context.reported_usage import MissReason, ReportedMiss
from ctxreuse.context.tokens import well_formed
from ctxreuse.memory.prefix_index import common_blocks
from ctxreuse.memory.sent_log import SentEntry
from ctxreuse.rules.answers import read_end, why_unread
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

_LONGEST_NAME = 60


class Cause(StrEnum):
    """What decided how much of a prompt is served from the cache."""

    reason: MissReason | None
    """The cause in the words of providers' diagnostics; None where nothing is missed."""

    def __new__(cls, value: str, reason: MissReason | None = None) -> Cause:
        """Return a cause with its reason."""
        cause = str.__new__(cls, value)
        cause._value_, cause.reason = value, reason
        return cause

    hit = "hit"
    new_blocks = "new blocks", MissReason.messages
    other_order = "other order", MissReason.messages
    other_text = "other text", MissReason.messages
    other_labels = "with labels and without", MissReason.messages
    other_system = "other system text", MissReason.system
    other_tenant = "other tenant", MissReason.key
    later_turn = "later turn"
    older_prompt = "older prompt"
    evicted = "evicted", MissReason.expired
    too_short = "shorter than an engine block", MissReason.below_minimum
    empty = "no blocks"
    other_tools = "other tools", MissReason.tools
    other_key = "other key", MissReason.key
    other_model = "other model", MissReason.model
    compacted = "compacted", MissReason.compacted
    expired = "expired", MissReason.expired
    below_minimum = "below the minimum", MissReason.below_minimum
    never_written = "never written", MissReason.never_written


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt hits or misses.

    Attributes:
        request_id: The prompt's request.
        cause: What decided it.
        closest: The request of the earlier prompt that shares the longest beginning or, if none
            does, the most block tokens; None if there is none to compare with.
        shared_blocks: How many first blocks the two have in common.
        shared_tokens: Their tokens.
        block: The id of the prompt's own block where the two part; None at its end.
        other_block: The id of the earlier prompt's block there; None at its end.
        lost_tokens: Tokens of blocks that the closest prompt has, too, and that are computed again.
        words: All this in words.
        reported: What the provider says of it; None if that is not known.
        why: The beginning of the words, without where the two part.
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
    reported: ReportedMiss | None = None
    why: str = field(default="", compare=False)

    @property
    def reason(self) -> MissReason | None:
        """The cause in the words of providers' diagnostics; None where nothing is missed."""
        if self.cause is Cause.new_blocks and self.closest is None:
            return MissReason.never_written
        return self.cause.reason

    def __str__(self) -> str:
        return " ".join(filter(None, (self.words, self.comparison)))

    @property
    def comparison(self) -> str:
        """What provider and planner say, in words; "" if the provider says nothing."""
        if self.reported is None:
            return ""
        ours, theirs = self.reason or "no miss", self.reported
        return f"The provider says: {theirs} ({theirs.term}); the planner: {ours}."


def explain(
    prompt: SentEntry,
    earlier: Sequence[SentEntry],
    cached_tokens: int | None = None,  # of blocks; None takes all as still cached
    *,
    across_tenants: bool = False,  # reveals what other tenants sent
    cache: CacheRules = DEFAULT_CACHE,
) -> Explanation:
    """Return why a prompt hits or misses, compared with earlier ones, the latest last."""
    if prompt.is_later_turn:
        return _later_turn(prompt, earlier, cache)
    if not prompt.keys:
        words = "The prompt has no blocks: there is nothing to reuse."
        return _explained(prompt, Cause.empty, words)
    same_root = [one for one in earlier if not one.is_later_turn]
    # each with what parts it from the next
    wider: list[tuple[tuple[Cause, str], list[SentEntry]]] = []
    for name, what in _IN_FRONT.items():
        if name != "key" or cache.is_routed:
            wider.append((what, same_root))
            same_root = [one for one in same_root if getattr(one, name) == getattr(prompt, name)]
    closest = _closest(prompt, same_root)
    shared = 0 if closest is None else _shared_tokens(prompt, closest)
    if cached_tokens is not None and cached_tokens > shared:
        return _older(prompt, cached_tokens)
    least = max(1, cache.least_tokens - prompt.front_tokens)
    compared = len(same_root)
    for what, others in reversed(wider):
        if len(others) > compared and (what[0] is not Cause.other_tenant or across_tenants):
            compared, other = len(others), _closest(prompt, others)
            if other is not None and _shared_tokens(prompt, other) >= least > shared:
                return _apart(prompt, other, *what)
    if closest is None:
        words = "No prompt compared is this tenant's and begins alike: everything is computed."
        return _explained(prompt, Cause.new_blocks, words)
    return _compared(prompt, closest, same_root, cached_tokens, cache)


_IN_FRONT = {
    "tenant": (Cause.other_tenant, "tenants share nothing"),
    "model": (Cause.other_model, "another model was asked, whose cache is another one"),
    "key": (Cause.other_key, "its key is another one and leads to another cache"),
    "tools": (Cause.other_tools, "its tools are others and stand before them"),
    "system": (Cause.other_system, "another text stands before them"),
    "is_labelled": (
        Cause.other_labels,
        "one of the two prompts shows them under labels and the other does not",
    ),
}
"""What stands in front of all blocks; the cause where only that differs, and words on it."""


def _kept(
    prompt: SentEntry, blocks: int, before: list[SentEntry], cache: CacheRules
) -> tuple[int, Cause | None]:
    """Return how many tokens can be read of first blocks that were sent before; why no more."""
    shared = sum(prompt.tokens[:blocks])
    if prompt.front_tokens + shared < cache.least_tokens:
        return 0, Cause.below_minimum if cache.lives else Cause.too_short
    kept, expired = 0, 0
    shares = [(one, common_blocks(prompt.keys, one.keys)) for one in before]
    parted = _parted(shares)
    for one, common in shares:
        end = read_end(cache, one.marks, prompt.marks, min(blocks, common), parted)
        tokens = sum(prompt.tokens[:end])
        if prompt.front_tokens + tokens < cache.least_tokens:
            continue
        if _is_alive(one, prompt, cache):
            kept = max(kept, tokens)
        else:
            expired = max(expired, tokens)
    if kept == shared:
        return kept, None
    return kept, Cause.expired if expired > kept else Cause.never_written


def _parted(shares: Iterable[tuple[SentEntry, int]]) -> list[int]:
    """Return after how many common blocks earlier prompts part, each with how many it has."""
    going_on: dict[int, set[object]] = {}
    for one, common in shares:
        behind = one.keys[common] if common < len(one.keys) else one.request_id
        going_on.setdefault(common, set()).add(behind)
    longest = max(going_on, default=0)
    return [end for end, behind in going_on.items() if end < longest or len(behind) > 1]


def _is_alive(one: SentEntry, now: SentEntry, cache: CacheRules) -> bool:
    """Return whether what a prompt has written or read is kept until another is sent."""
    if cache.lifetime is None or one.time_s is None or now.time_s is None:
        return True
    return now.time_s - one.time_s <= cache.lifetime


def _compared(
    prompt: SentEntry,
    closest: SentEntry,
    before: list[SentEntry],
    cached_tokens: int | None,
    cache: CacheRules,
) -> Explanation:
    blocks = common_blocks(prompt.keys, closest.keys)
    shared = sum(prompt.tokens[:blocks])
    own = prompt.ids[blocks] if blocks < len(prompt.ids) else None
    other = closest.ids[blocks] if blocks < len(closest.ids) else None
    in_closest = set(closest.keys)
    moved = sum(
        tokens
        for key, tokens in zip(prompt.keys[blocks:], prompt.tokens[blocks:], strict=True)
        if key in in_closest
    )
    kept, unread_cause = _kept(prompt, blocks, before, cache)
    unread = shared - kept
    in_front = prompt.front_tokens if unread_cause is Cause.too_short else 0
    evicted = 0 if cached_tokens is None else kept - cached_tokens
    if evicted < cache.step_tokens:  # engines serve whole blocks of theirs
        evicted = 0
    lost = moved + unread + evicted
    name = f"request {_named(closest.own_id)}"
    begins = f"No earlier prompt begins as it does; the closest is {name}"
    if blocks:
        begins = (
            f"It begins as {name} does, for {blocks} of its {len(prompt.keys)} blocks "
            f"({shared:,} of {sum(prompt.tokens):,} block tokens)"
        )
    elif prompt.front_tokens:
        begins = (
            f"It begins as {name} does, for its system text alone ({prompt.front_tokens:,} tokens)"
        )
    parts = f"They part at block {_named(own)}, where the earlier prompt has {_named(other)}."
    if own is None or other is None:
        parts = f"{'This' if own is None else 'The earlier'} prompt ends there."
    if evicted > max(moved, unread):
        cause = Cause.evicted
        begins += f", but {evicted:,} of these tokens have left the cache since"
    elif unread_cause is not None and unread + in_front > moved:
        cause = unread_cause
        begins += f", but {_unread(cause, unread, cache)}"
    elif own is None:
        cause = Cause.hit
        begins += ": all of it can be served"
    elif moved:
        cause = Cause.other_order
        parts += (
            f" From there on blocks with {moved:,} tokens stand in the earlier prompt, too, but in "
            "another order or place: they are computed again."
        )
    elif (changed := _changed(prompt, blocks, before)) is not None:
        cause = Cause.other_text
        parts += f" Block {_named(changed)} had another text when it was sent before."
    else:
        cause = Cause.new_blocks
        parts += " No block from there on stands in that prompt."
    return _explained(prompt, cause, f"{begins}.", closest.own_id, blocks, other, lost, parts)


def _unread(cause: Cause, tokens: int, cache: CacheRules) -> str:
    if cause is Cause.too_short:
        return (
            f"that is less than an engine block of {cache.step_tokens} tokens, the least that a "
            "cache serves"
        )
    if cause is Cause.below_minimum:
        return (
            f"with what stands in front that is less than {cache.least_tokens:,} tokens, the "
            f"shortest prefix that the cache ({cache.name}) keeps"
        )
    if cause is Cause.expired:
        return (
            f"{tokens:,} of these tokens were sent more than {cache.lifetime:,.0f} seconds before, "
            f"and the cache ({cache.name}) keeps them no longer"
        )
    return why_unread(cache, tokens)


def _older(prompt: SentEntry, cached_tokens: int) -> Explanation:
    """Explain by what the index knows, where the remembered prompts say less."""
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


def _later_turn(prompt: SentEntry, before: Sequence[SentEntry], cache: CacheRules) -> Explanation:
    turns = (
        one
        for one in reversed(before)
        if one.tenant == prompt.tenant and one.conversation == prompt.conversation
    )
    last = None if prompt.conversation is None else next(turns, None)
    rewritten = None if last is None else _rewritten(prompt, last, cache)
    if last is not None and rewritten is not None:
        cause, why = rewritten
        words = (
            f"It continues a conversation behind request {_named(last.own_id)}, but {why}: "
            "what was sent there is computed again."
        )
        return _explained(prompt, cause, words, last.own_id, lost_tokens=sum(last.tokens))
    behind = "" if prompt.after is None else f" behind request {_named(prompt.after)}"
    words = (
        f"It continues a conversation{behind} and repeats what was sent there; "
        f"its own {len(prompt.keys)} blocks ({sum(prompt.tokens):,} tokens) stand behind that "
        "history, where no other prompt can have put them."
    )
    return _explained(prompt, Cause.later_turn, words, prompt.after)


def _rewritten(prompt: SentEntry, last: SentEntry, cache: CacheRules) -> tuple[Cause, str] | None:
    """Return why nothing of a conversation's last turn is read; None if all of it can be."""
    for name, what in _IN_FRONT.items():
        is_in_front = name not in ("tenant", "is_labelled") and (name != "key" or cache.is_routed)
        if is_in_front and getattr(prompt, name) != getattr(last, name):
            return what
    if prompt.history < last.history:
        shortened = f"of {last.history} messages was shortened to {prompt.history}"
        return Cause.compacted, f"its history {shortened}, which is another beginning"
    if not _is_alive(last, prompt, cache):
        later = f"more than {cache.lifetime:,.0f} seconds later"
        return Cause.expired, f"{later}, when the cache ({cache.name}) keeps it no longer"
    return None


def _apart(prompt: SentEntry, other: SentEntry, cause: Cause, why: str) -> Explanation:
    blocks = common_blocks(prompt.keys, other.keys)
    lost = sum(prompt.tokens[:blocks])
    name = other_block = None
    if cause is Cause.other_tenant:
        who = "Another tenant's prompt"
    else:
        name, other_block = other.own_id, other.ids[0]
        who = f"Request {_named(name)}"
    words = (
        f"{who} began with the same {blocks} blocks ({lost:,} tokens), but {why}; "
        "they are computed again."
    )
    return _explained(prompt, cause, words, name, 0, other_block, lost)


def _explained(
    prompt: SentEntry,
    cause: Cause,
    why: str,
    closest: str | int | None = None,
    shared_blocks: int = 0,
    other_block: BlockId | None = None,
    lost_tokens: int = 0,
    where: str = "",
) -> Explanation:
    return Explanation(
        prompt.own_id,
        cause,
        closest,
        shared_blocks,
        sum(prompt.tokens[:shared_blocks]),
        prompt.ids[shared_blocks] if shared_blocks < len(prompt.ids) else None,
        other_block,
        lost_tokens,
        f"{why} {where}".rstrip(),
        why=why,
    )


def _closest(prompt: SentEntry, others: Sequence[SentEntry]) -> SentEntry | None:
    weight = dict(zip(prompt.keys, prompt.tokens, strict=True))
    closeness = [
        (_shared_tokens(prompt, one), sum(weight.get(key, 0) for key in set(one.keys)), number)
        for number, one in enumerate(others)
    ]
    return others[max(closeness)[-1]] if closeness else None


def _shared_tokens(prompt: SentEntry, other: SentEntry) -> int:
    return sum(prompt.tokens[: common_blocks(prompt.keys, other.keys)])


def _changed(prompt: SentEntry, first: int, before: list[SentEntry]) -> BlockId | None:
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
