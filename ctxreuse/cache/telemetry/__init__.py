"""What planners do, for those who watch: metrics for Prometheus, spans for OpenTelemetry."""

from ctxreuse.cache.telemetry.collector import PlannerCollector
from ctxreuse.cache.telemetry.spans import PlannerSpans

__all__ = ["PlannerCollector", "PlannerSpans"]
