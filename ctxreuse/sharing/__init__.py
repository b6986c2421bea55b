"""Sharing what planners have sent, between the processes that use one engine.

A wrong type or value raises `InvalidRequestError` everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxreuse.context.fork_safety import on_demand
from ctxreuse.sharing.exchange import LogRead, SharedLog, SharedLogs, SharingStatistics

if TYPE_CHECKING:
    from ctxreuse.sharing.redis_log import RedisLog
    from ctxreuse.sharing.sqlite_log import SQLiteLog

__all__ = ["LogRead", "RedisLog", "SQLiteLog", "SharedLog", "SharedLogs", "SharingStatistics"]

# planning alone needs no store
_STORES = {"RedisLog": "redis_log", "SQLiteLog": "sqlite_log"}
__getattr__, __dir__ = on_demand(__name__, _STORES)
