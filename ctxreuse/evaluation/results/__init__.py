"""Results of measured runs: one file format, its tables, and answer scores."""

from ctxreuse.evaluation.results.results_file import Miss, Results

__all__ = ["Miss", "Results"]
