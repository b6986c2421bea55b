"""What OpenTelemetry is told of planning, and of the calls of models."""

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest
from client_helpers import connected, planned
from langchain_core.language_models import GenericFakeChatModel
from langchain_model_helpers import model, openai_model, question
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from planning_helpers import assistant, big_request

from ctxreuse import ReusePlanner
from ctxreuse.cache.telemetry import PlannerSpans
from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.serving import EmulatedEngine


class Traced:
    def __init__(self):
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("the user's")
        self.planner = ReusePlanner(tracing=PlannerSpans(provider))

    def spans(self, name=None):
        found = self.exporter.get_finished_spans()
        return [span for span in found if name in (None, span.name)]


@pytest.fixture
def traced():
    return Traced()


def test_planning_is_a_span_below_the_current_one(traced):
    first = traced.planner.plan(big_request((1, 2), history=[], conversation_id="c"))
    with traced.tracer.start_as_current_span("a request") as around:
        history = [*first.messages(), assistant("Yes.")]
        traced.planner.plan(big_request((2, 4), history=history, conversation_id="c"))
    _, span, _ = traced.spans()
    assert span.name == "ctxreuse plan"
    assert span.parent.span_id == around.get_span_context().span_id
    assert 0 < span.end_time - span.start_time < 10e9
    assert span.attributes == {
        "ctxreuse.requests": 1,
        "ctxreuse.blocks": 1,
        "ctxreuse.block_tokens": 100,
        "ctxreuse.references": 1,
        "ctxreuse.reordered_requests": 0,
        "ctxreuse.expected_cached_tokens": 0,
    }


def test_a_batch_is_one_span(traced):
    traced.planner.plan_batch([big_request((1, 2)), big_request((2, 1))])
    [span] = traced.spans()
    assert span.attributes["ctxreuse.requests"] == 2
    assert span.attributes["ctxreuse.expected_cached_tokens"] == 200
    assert span.attributes["ctxreuse.reordered_requests"] == 1


async def test_a_call_of_the_client_has_a_span_with_its_usage():
    traced, engine = Traced(), EmulatedEngine(block_size=4)
    async with connected(engine, planner=traced.planner) as client:
        for _ in range(2):
            await client.complete(planned(traced.planner, "Paris is in France. " * 40))
    _, span = traced.spans("ctxreuse call")
    usage = engine.requests and engine.usage
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == usage.cached_tokens > 0
    assert span.attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens // 2
    assert span.attributes["gen_ai.usage.output_tokens"] > 0
    assert span.attributes["ctxreuse.expected_cached_tokens"] > 0
    assert span.end_time > span.start_time


def usage_in(spans):
    return [name for span in spans for name in span.attributes if name.startswith("gen_ai.usage.")]


@pytest.mark.parametrize("attribute", ["gen_ai.request.model", "openinference.span.kind"])
def test_usage_is_left_to_a_span_of_the_model_around_the_call(attribute, traced):
    llm = model(openai_model(EmulatedEngine(block_size=4)), planner=traced.planner)
    with traced.tracer.start_as_current_span("chat emulated", attributes={attribute: "LLM"}):
        llm.invoke(question("abc"))
    [theirs], [ours] = traced.spans("chat emulated"), traced.spans("ctxreuse call")
    assert dict(theirs.attributes) == {attribute: "LLM"}
    assert ours.attributes["ctxreuse.input_tokens"] > 0
    assert not usage_in([ours])
    assert ours.parent.span_id == theirs.context.span_id


@pytest.mark.parametrize("prompt", ["Hello.", question("abc")])
def test_each_answered_call_has_a_span_planned_or_not(prompt, traced):
    llm = model(openai_model(EmulatedEngine(block_size=4)), planner=traced.planner)
    llm.invoke(prompt)
    [span] = traced.spans("ctxreuse call")
    assert span.attributes["ctxreuse.contexts"] == ("abc" in prompt)
    assert span.attributes["ctxreuse.input_tokens"] > 0


def test_an_answer_without_usage_has_a_span_without_counts(traced):
    silent = GenericFakeChatModel(messages=iter(["Yes."]))
    model(silent, planner=traced.planner).invoke(question("abc"))
    [span] = traced.spans("ctxreuse call")
    assert set(span.attributes) == {"ctxreuse.contexts", "ctxreuse.expected_cached_tokens"}


@pytest.fixture
def langchain_is_instrumented(monkeypatch):
    """An instrumentation of LangChain as OpenTelemetry knows it, which writes nothing."""

    class BaseInstrumentor:
        _instance = None

    class LangchainInstrumentor(BaseInstrumentor):
        is_instrumented_by_opentelemetry = True

    LangchainInstrumentor.__module__ = "opentelemetry.instrumentation.langchain"
    LangchainInstrumentor._instance = LangchainInstrumentor()
    made = SimpleNamespace(BaseInstrumentor=BaseInstrumentor)
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.instrumentor", made)
    yield
    LangchainInstrumentor._instance = None


@pytest.mark.usefixtures("langchain_is_instrumented")
@pytest.mark.parametrize(
    ("through", "is_theirs"),
    [("openai", False), ("", False), ("LangChain", True), ("x.Lang_Chain", True), (None, True)],
)
def test_a_call_that_another_instrumentation_counts_has_no_usage(through, is_theirs, traced):
    traced.planner.report_usage((), 300, 100, through=through)
    [span] = traced.spans()
    assert span.attributes["ctxreuse.cache_read.input_tokens"] == 100
    assert bool(usage_in([span])) is not is_theirs


def test_what_a_call_went_through_is_a_text():
    with pytest.raises(InvalidRequestError, match="through must be a text or None, not 7"):
        Traced().planner.report_usage((), 300, through=7)


def test_another_span_around_it_is_left_alone(traced):
    llm = model(openai_model(EmulatedEngine()), planner=traced.planner)
    with traced.tracer.start_as_current_span("GET /", attributes={"http.method": "GET"}):
        llm.invoke(question("abc"))
    [span] = traced.spans("GET /")
    assert dict(span.attributes) == {"http.method": "GET"}
    assert len(traced.spans("ctxreuse call")) == 1


def test_no_span_holds_a_text_or_a_name(traced):
    request = big_request((1, 2), "a secret question", tenant="anna", request_id="r-17")
    traced.planner.report_usage(traced.planner.plan(request), 300, 100)
    written = "".join(span.to_json() for span in traced.spans())
    assert len(traced.spans()) == 2
    assert not any(word in written for word in ("secret", "anna", "r-17", "text of"))


def test_counts_that_are_unknown_are_left_out(traced):
    traced.planner.report_usage((), 300)
    [span] = traced.spans()
    assert "gen_ai.usage.cache_read.input_tokens" not in span.attributes


def test_copies_go_on_tracing(traced):
    traced.planner.sibling().plan(big_request((1,)))
    copy.deepcopy(traced.planner).plan(big_request((1,)))
    assert len(traced.spans("ctxreuse plan")) == 2
    pickle.loads(pickle.dumps(traced.planner)).plan(big_request((1,)))


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtraError, match=r"\[metrics\]"):
        PlannerSpans()
