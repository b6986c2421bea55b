"""The engine's prefix cache, as seen from outside."""

from ctxreuse.cache.block_level import BlockLevelCache
from ctxreuse.cache.simulator import PrefixCacheSimulator
from ctxreuse.cache.usage import CacheUsage

__all__ = ["BlockLevelCache", "CacheUsage", "PrefixCacheSimulator"]
