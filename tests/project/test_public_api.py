import importlib
import inspect
import json

import pytest
from python_processes import python

import ctxreuse
from ctxreuse import (
    BatchPlan,
    ContextBlock,
    ContextRequest,
    Conversation,
    Plan,
    ReusePlanner,
    request_context,
)
from ctxreuse.distance import context_distance

EXPORTED = {
    "ctxreuse": "BatchPlan CacheRules ContextBlock ContextRequest Conversation CtxreuseError "
    "Evicted PAPER_TEMPLATES Plan ReusePlanner Templates TimeToLive cache_profile request_context",
    "langchain_ctxreuse": "LangChainLLM RetrieverStage ReuseChatModel ReuseCompressor "
    "ReuseMiddleware ReuseRetriever ReuseStore SpeculativeRAGChain WorkflowRetriever "
    "WorkflowRunnable cited_documents format_context",
    "llamaindex_ctxreuse": "LlamaIndexLLM ReplayMemory RetrieverStage ReuseChatEngine ReuseLLM "
    "ReuseMemoryBlock ReusePostprocessor ReuseRetriever SpeculativeRAGQueryEngine "
    "WorkflowRetriever cited_nodes format_context reuse_memory",
    "mem0_ctxreuse": "AsyncReuseMemory MemoryContext ReuseMemory SearchableMemory tenant_of",
    "chain_of_agents": "Answer ChainOfAgents ChainPrompts ManagerError Step Trace UnreadError",
}


@pytest.mark.parametrize("package", EXPORTED)
def test_a_package_exports_these_names(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == EXPORTED[package].split()
    assert {*module.__all__} <= {*dir(module)}


def test_each_exported_name_is_described():
    for name in {*ctxreuse.__all__} - {"PAPER_TEMPLATES"}:
        assert inspect.getdoc(getattr(ctxreuse, name)), name


def test_a_name_of_another_package_is_said_to_be_there():
    with pytest.raises(AttributeError, match="has no 'ReuseLLM'; it is in llamaindex_ctxreuse"):
        assert ctxreuse.ReuseLLM


def parameters(function):
    found = inspect.signature(function).parameters
    return {name: one.default for name, one in found.items() if name not in ("self", "given")}


EMPTY = inspect.Parameter.empty


def test_the_fixed_signatures():
    planner = parameters(ReusePlanner)
    assert list(planner)[:3] == ["alpha", "token_counter", "capacity_tokens"]
    assert [planner[name] for name in list(planner)[:3]] == [0.001, None, None]
    assert EMPTY not in planner.values()
    assert parameters(ContextRequest) == {
        "blocks": EMPTY,
        "query": "",
        "system": None,
        "history": None,
        "conversation_id": None,
        "tenant": "",
        "request_id": None,
        "outdated": (),
        "labels": None,
    }
    assert parameters(ReusePlanner.plan) == {
        "request": EMPTY,
        "strategy": "reuse",
        "deduplicate": None,
        "now": None,
        "primes": False,
    }
    assert parameters(ReusePlanner.plan_batch) == {
        "requests": EMPTY,
        "strategy": "reuse",
        "deduplicate": None,
        "now": None,
        "primes": False,
    }
    for function in (ReusePlanner.plan, ReusePlanner.plan_batch):
        kind = inspect.signature(function).parameters["deduplicate"].kind
        assert kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters(Plan.explain) == {"response": None}
    assert parameters(request_context) == {"tenant": None, "conversation_id": None, "history": None}
    assert parameters(ReusePlanner.evict) == {"request_ids": EMPTY, "tenant": None}
    assert parameters(ReusePlanner.evict_tokens) == {"tokens": EMPTY}
    assert parameters(ReusePlanner.conversation) == {
        "conversation_id": EMPTY,
        "tenant": "",
        "system": None,
    }
    assert list(parameters(Conversation.plan))[:2] == ["blocks", "query"]
    assert list(parameters(Conversation.record)) == ["answer"]
    assert list(parameters(Conversation.compact)) == ["summary"]
    assert parameters(context_distance) == {"ids_a": EMPTY, "ids_b": EMPTY, "alpha": 0.001}


def test_the_example_of_the_design_runs_as_written():
    planner = ReusePlanner(alpha=0.001, token_counter=None, capacity_tokens=None)
    request = ContextRequest(
        blocks=[ContextBlock(id="d1", text="...")],
        query="...",
        system=None,
        history=None,
        conversation_id=None,
        tenant="",
        request_id=None,
        labels=True,
    )
    plan = planner.plan(request, strategy="reuse")
    assert isinstance(plan, Plan)
    assert plan.request_id == "request-0"
    assert plan.blocks == (ContextBlock(id="d1", text="..."),)
    assert (plan.references, plan.location_annotations) == ((), ())
    label = plan.templates.label_of(request.blocks[0])
    assert (plan.labels, plan.order_annotation) == ({label: "d1"}, None)
    assert plan.expected_cached_tokens == 0
    assert plan.messages() == [{"role": "user", "content": f"{label} ...\n\n..."}]

    batch = planner.plan_batch([request], strategy="reuse")
    assert isinstance(batch, BatchPlan)
    assert (len(batch.plans), batch.order) == (1, (0,))
    assert batch.plans[0].expected_cached_tokens == 1
    assert planner.evict([plan.request_id, "unknown"]).unknown == ("unknown",)
    assert planner.evict_tokens(1).tokens == 1

    assert str(plan.explain()) == plan.explain().words

    with ctxreuse.request_context(tenant="t", conversation_id="c1", history=[]) as scope:
        assert (scope.tenant, scope.conversation_id, scope.history) == ("t", "c1", ())

    chat = planner.conversation("c1", tenant="", system=None)
    chat.plan(["a text"], query="...")
    chat.record("the answer")
    chat.compact("summary")
    assert chat.messages() == [{"role": "user", "content": "summary"}]
    assert context_distance([3, 5, 1, 7], [2, 6, 3, 5], alpha=0.001) == pytest.approx(0.502)


IMPORT = """
import sys
events = []
sys.addaudithook(
    lambda event, arguments: events.append(event) if event.startswith("socket.") else None
)
before = set(sys.modules)
import ctxreuse
ctxreuse.ReusePlanner().plan(ctxreuse.ContextRequest(["a text"]))
ctxreuse.ReusePlanner().plan_batch([ctxreuse.ContextRequest(["a", "b"])] * 3)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
import json, logging
print(json.dumps([
    sorted(loaded - sys.stdlib_module_names),
    events,
    logging.getLogger().handlers,
    sorted(name for name in sys.modules if name in ("ctxreuse.cli", "ctxreuse.measure.demo")),
]))
"""


def test_importing_and_planning_load_numpy_and_scipy_only_and_touch_no_network():
    result = python(IMPORT, PYTHONWARNINGS="error")
    loaded, events, handlers, commands = json.loads(result.stdout)
    assert set(loaded) <= {"ctxreuse", "numpy", "scipy"}
    assert "ctxreuse" in loaded
    assert (events, handlers, commands, result.stderr) == ([], [], [], "")


def test_chain_of_agents_has_a_name_that_says_whose_it_is():
    import chain_of_agents
    import chain_of_agents_ctxreuse

    assert chain_of_agents_ctxreuse.__all__ == chain_of_agents.__all__
    for name in chain_of_agents.__all__:
        assert getattr(chain_of_agents_ctxreuse, name) is getattr(chain_of_agents, name)
