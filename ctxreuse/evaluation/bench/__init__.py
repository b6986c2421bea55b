"""`ctxreuse bench`: ways to order blocks, side by side on public data and on your own."""

from ctxreuse.evaluation.bench.benchmark import BenchConfig, run

__all__ = ["BenchConfig", "run"]
