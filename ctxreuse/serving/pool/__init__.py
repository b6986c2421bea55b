"""Several engines that serve one model: routing, admission, placement."""

from ctxreuse.serving.pool.engine_pool import EnginePool

__all__ = ["EnginePool"]
