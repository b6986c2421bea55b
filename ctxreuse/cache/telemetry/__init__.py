"""What planners do, for those who watch: metrics for Prometheus, spans for OpenTelemetry.

Nothing is imported here that needs an optional package (extra `metrics`); `prometheus_client` and
`opentelemetry` are imported when a collector, or spans, are made.
"""

from ctxreuse.cache.telemetry.collector import PlannerCollector
from ctxreuse.cache.telemetry.spans import PlannerSpans

__all__ = ["PlannerCollector", "PlannerSpans"]
