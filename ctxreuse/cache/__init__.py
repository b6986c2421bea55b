"""The engine's prefix cache, as seen from outside.

A wrong type or value raises `InvalidRequestError` everywhere.
"""

from ctxreuse.cache.capacity_tracker import CapacityTracker
from ctxreuse.cache.kv_events.event_sync import KVEventStatistics, KVEventSync
from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.cache.prompt_ends import block_ends
from ctxreuse.cache.simulator import BlockLevelCache, CacheUsage, PrefixCacheSimulator

__all__ = [
    "BlockLevelCache",
    "CacheUsage",
    "CapacityTracker",
    "KVEventStatistics",
    "KVEventSync",
    "PrefixCacheMetrics",
    "PrefixCacheSimulator",
    "block_ends",
]
