"""The engine's prefix cache, as seen from outside.

Nothing is imported here that needs an optional package; `pyzmq` and `msgspec` are imported when a
`KVEventSync` is made.
"""

from ctxreuse.cache.block_level import BlockLevelCache
from ctxreuse.cache.capacity_tracker import ShadowCache
from ctxreuse.cache.kv_events.engine_blocks import EngineBlocks
from ctxreuse.cache.kv_events.event_sync import KVEventStatistics, KVEventSync
from ctxreuse.cache.metrics import EngineMetrics
from ctxreuse.cache.prompt_ends import block_ends
from ctxreuse.cache.simulator import PrefixCacheSimulator
from ctxreuse.cache.usage import CacheUsage

__all__ = [
    "BlockLevelCache",
    "CacheUsage",
    "EngineBlocks",
    "EngineMetrics",
    "KVEventStatistics",
    "KVEventSync",
    "PrefixCacheSimulator",
    "ShadowCache",
    "block_ends",
]
