"""Planning a whole trace and simulating the engine's cache."""

from ctxreuse.evaluation.replay.plan_trace import plan_trace, plan_under, replayed

__all__ = ["plan_trace", "plan_under", "replayed"]
