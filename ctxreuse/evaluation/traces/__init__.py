"""Corpora and traces as files: reading them, and recording an application's."""

from ctxreuse.evaluation.traces.trace_files import TraceRequest, read_corpus, read_trace

__all__ = ["TraceRequest", "read_corpus", "read_trace"]
