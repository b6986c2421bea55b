"""What a request that was not answered says of its engine, and who may answer it."""

from __future__ import annotations

from typing import Final, NamedTuple


class StatusRule(NamedTuple):
    """What follows from a status."""

    again: bool  # the same engine may answer it when it is sent again
    elsewhere: bool  # another engine may answer it
    engine: str  # what is wrong with the engine


FAILS: Final = StatusRule(True, True, "fails")
"""It rests after several in a row."""
BUSY: Final = StatusRule(True, True, "is busy")
"""It works, and is left alone for as long as it says."""
REFUSES: Final = StatusRule(False, True, "refuses")
"""It rests once another engine has answered the same request: else that may be at fault."""
WORKS: Final = StatusRule(False, False, "works")
"""The request is at fault."""

_OF_STATUS: Final = {
    **dict.fromkeys((408, 409, 425), FAILS),
    **dict.fromkeys((429, 529), BUSY),
    # the key, or the account; the model, or the path
    **dict.fromkeys((401, 402, 403, 407), REFUSES),
    **dict.fromkeys((404, 405, 410, 421), REFUSES),
}
_OF_HUNDRED: Final = {3: REFUSES, 4: WORKS, 5: FAILS}


def status_rule(status: int | None, retry_after_s: float | None = None) -> StatusRule:
    """Return what an HTTP status means; None is no answer, or a broken one."""
    if status is None:
        return FAILS
    if status == 503 and retry_after_s is not None:
        return BUSY
    return _OF_STATUS.get(status) or _OF_HUNDRED.get(min(status // 100, 5), WORKS)
