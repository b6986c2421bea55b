"""Sharing what planners have sent, between the processes that use one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxreuse.sharing.exchange import LogRead, SharedLog, SharedLogs, SharingStatistics

if TYPE_CHECKING:
    from ctxreuse.sharing.redis_log import RedisLog
    from ctxreuse.sharing.sqlite_log import SQLiteLog

__all__ = ["LogRead", "RedisLog", "SQLiteLog", "SharedLog", "SharedLogs", "SharingStatistics"]


def __getattr__(name: str) -> Any:
    """Import a store when it is first asked for: planning alone needs none."""
    if name == "SQLiteLog":
        from ctxreuse.sharing.sqlite_log import SQLiteLog

        return SQLiteLog
    if name == "RedisLog":
        from ctxreuse.sharing.redis_log import RedisLog

        return RedisLog
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
