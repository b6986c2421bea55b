"""Where a turn is marked for a cache that keeps marked prefixes only, and what that comes to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ctxreuse.memory.sent_log import SentEntry
from ctxreuse.memory.tenant_state import TenantState
from ctxreuse.planning.turns import PreparedRequest, SentTurn
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_profile import CacheProfile


class TurnMarks(NamedTuple):
    """Where a turn is marked, and where the first turn of its conversation was; see `Plan`."""

    marks: tuple[int, ...] = ()
    opening: int | None = None


NO_MARKS = TurnMarks()


def chosen_marks(
    turn: PreparedRequest,
    state: TenantState,
    sent: SentTurn,
    now: float | None,
) -> TurnMarks:
    """Return the marks of a turn: of a first one where it is read, or written for others."""
    request, root = turn.request, turn.root
    if state.prefixes is None:
        return NO_MARKS
    if request.history:
        opening = state.conversations.opening_mark_of(request.conversation_id, root)
        # the whole turn is written for the next one, so this mark costs nothing
        return TurnMarks((len(sent.keys),) if sent.keys else (), opening)
    path = sent.named, sent.weights
    return TurnMarks(state.prefixes.marked(root, turn.front_tokens, *path, now).marks)


def note_marking(state: TenantState, entry: SentEntry) -> None:
    """Note in a state that is held what a prompt has written, by the id to take it back by."""
    if state.prefixes is not None:
        given = entry.root, entry.front_tokens, entry.keys, entry.weights, entry.marks or ()
        state.prefixes.note(*given, entry.time_s, learns=entry.is_alone, name=entry.request_id)


def expected_bill(
    cache: CacheProfile,
    system_tokens: int,
    tokens: Sequence[int],
    marks: Sequence[int],
    read: int,
    *,
    marks_end: bool,
) -> BilledTokens:
    """Return what a first turn's system text and blocks cost."""
    ends = [system_tokens, *(system_tokens + end for end in accumulate(tokens))]
    places = [*marks, len(tokens)] if marks_end else marks
    found = ends[read] if read >= 0 else 0
    written = max((ends[place] for place in places if ends[place] >= cache.least_tokens), default=0)
    by_life = {cache.time_to_live.name: written - found} if written > found else {}
    return BilledTokens(ends[-1] - max(found, written), found, by_life)
