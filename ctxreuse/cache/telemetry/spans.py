"""OpenTelemetry spans for planning, and what the cache did for the calls of models."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ctxreuse.context.checks import checked_each, checked_kind, checked_number
from ctxreuse.errors import MissingExtraError
from ctxreuse.planning.plan import AnsweredCall, Plan

_SDKS = frozenset(
    {"anthropic", "bedrock", "cohere", "genai", "generativeai", "googlegenai", "googlegenerativeai"}
    | {"groq", "langchain", "litellm", "llamaindex", "mistralai", "ollama", "openai", "replicate"}
    | {"together", "vertexai", "watsonx", "writer"}
)
"""What calls of models go through, as packages that instrument it are named."""

_MODEL_SPANS = ("gen_ai.", "llm.", "openinference.span.kind", "traceloop.span.kind")
"""What attributes of a model's own span begin with, whoever makes it."""


class PlannerSpans:
    """Writes what a planner does as OpenTelemetry spans: give it to `ReusePlanner(tracing=...)`.

    Planning has a span `ctxreuse plan`, and each answered call a span `ctxreuse call` with
    `ctxreuse.*`, as far as the engine reports them. It has `gen_ai.usage.*`, too, unless another
    instrumentation counts the call, of a framework or an SDK that it went through: backends add up
    what stands in all spans. No attribute holds a text or a name of a tenant, a conversation or a
    request.

    Args:
        tracer_provider: Where spans go; None takes OpenTelemetry's global one, whose spans are
            dropped until one is set.

    Raises:
        MissingExtraError: `opentelemetry` is not installed.

    Example:
        >>> from ctxreuse import ContextRequest, ReusePlanner
        >>> planner = ReusePlanner(tracing=PlannerSpans())
        >>> planner.plan(ContextRequest(["a text"], "Which?")).request_id
        'request-0'
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise MissingExtraError("spans for OpenTelemetry", "metrics") from error
        if tracer_provider is not None:
            checked_kind(
                "tracer_provider", tracer_provider, trace.TracerProvider, "a TracerProvider"
            )
        self._trace: Any = trace
        self._tracer = trace.get_tracer("ctxreuse", tracer_provider=tracer_provider)

    def __deepcopy__(self, memo: object) -> PlannerSpans:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannerSpans, ()  # in another process spans go to that one's provider

    def planned(self, plans: Sequence[Plan], seconds: float) -> None:
        """Write a span for requests that were planned just now, which took so many seconds."""
        plans = checked_each("plans", plans, Plan, "a list of plans")
        seconds = checked_number("seconds", seconds)
        sent = [plan.logged.prompt.tokens for plan in plans if plan.logged is not None]
        changed = sum(plan.order_annotation is not None for plan in plans)
        attributes: dict[str, int] = {
            "ctxreuse.requests": len(plans),
            "ctxreuse.blocks": sum(map(len, sent)),
            "ctxreuse.block_tokens": sum(map(sum, sent)),
            "ctxreuse.references": sum(len(plan.references) for plan in plans),
            "ctxreuse.reordered_requests": changed,
            "ctxreuse.expected_cached_tokens": sum(plan.expected_cached_tokens for plan in plans),
        }
        self._write("ctxreuse plan", attributes, seconds)

    def answered(self, call: AnsweredCall) -> None:
        """Write what an answered call has cost."""
        checked_kind("call", call, AnsweredCall, "an AnsweredCall")
        usage = {
            "input_tokens": call.prompt_tokens,
            "cache_read.input_tokens": call.cached_tokens,
            "cache_creation.input_tokens": call.written_tokens,
            "output_tokens": call.completion_tokens,
        }
        counts = {
            "ctxreuse.expected_cached_tokens": call.expected_cached_tokens,
            "ctxreuse.contexts": len(call.plans),
        }
        for prefix in ("ctxreuse.",) if self._is_counted(call) else ("ctxreuse.", "gen_ai.usage."):
            counts |= {prefix + name: count for name, count in usage.items() if count is not None}
        self._write("ctxreuse call", counts, call.seconds or 0.0)

    def _is_counted(self, call: AnsweredCall) -> bool:
        current = self._trace.get_current_span()
        names = getattr(current, "attributes", None) if current.is_recording() else None
        if any(str(name).startswith(_MODEL_SPANS) for name in names or ()):
            return True
        # the frameworks and SDKs that other instrumentations of this process watch
        made = sys.modules.get("opentelemetry.instrumentation.instrumentor")
        kinds, watched = [] if made is None else [made.BaseInstrumentor], set[str]()
        while kinds:
            kinds += (kind := kinds.pop()).__subclasses__()
            if kind._instance is not None and kind._instance.is_instrumented_by_opentelemetry:
                names = kind.__module__.replace("_", "").split(".")
                watched |= _SDKS.intersection(name.removesuffix("v2") for name in names)
        through = None if call.through is None else call.through.replace("_", "").lower()
        return any(through is None or sdk in through for sdk in watched)

    def _write(self, name: str, attributes: Mapping[str, int], seconds: float) -> None:
        now = time.time_ns()
        start = max(0, now - round(seconds * 1e9))  # exporters fail at times before 1970
        span = self._tracer.start_span(name, attributes=attributes, start_time=start)
        span.end(end_time=now)
