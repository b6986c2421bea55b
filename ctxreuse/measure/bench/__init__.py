"""`ctxreuse bench`: ways to order blocks, side by side on public data and on your own."""

from ctxreuse.measure.bench.benchmark import BenchConfig, read_workload, run

__all__ = ["BenchConfig", "read_workload", "run"]
