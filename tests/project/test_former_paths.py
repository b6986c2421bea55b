import subprocess
import sys
from importlib import import_module

import pytest

from ctxreuse.context.former_paths import FORMER_PATHS


@pytest.mark.parametrize("former", FORMER_PATHS)
def test_a_former_path_is_the_very_module_of_today(former):
    assert import_module(former) is import_module(FORMER_PATHS[former])


def test_former_paths_work_whichever_is_imported_first():
    program = (
        "from ctxreuse.demo.questions import Question as former\n"
        "from ctxreuse.evaluation.demo.questions import Question\n"
        "import ctxreuse.tokens\n"
        "from ctxreuse.context.tokens import estimate_tokens\n"
        "assert former is Question\n"
        "assert ctxreuse.tokens.estimate_tokens is estimate_tokens\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.parametrize(
    ("module", "former", "now"),
    [
        ("ctxreuse.cache", "EngineMetrics", "PrefixCacheMetrics"),
        ("ctxreuse.cache.metrics", "EngineMetrics", "PrefixCacheMetrics"),
        ("ctxreuse.cache", "ShadowCache", "CapacityTracker"),
        ("ctxreuse.serving", "Engine", "EngineSpec"),
        ("ctxreuse.serving", "Served", "PoolResult"),
        ("ctxreuse.assignment", "DocumentHomes", "DocumentAffinity"),
        ("ctxreuse.evaluation.demo.questions", "Question", "DemoQuestion"),
        ("ctxreuse.evaluation.outcomes", "Outcome", "RunResult"),
        ("ctxreuse.evaluation.runs", "Run", "RunResult"),
        ("ctxreuse.workflow", "EngineOptions", "WorkflowOptions"),
        ("langchain_ctxreuse", "LinkedChain", "SpeculativeRAGChain"),
        ("llamaindex_ctxreuse", "LinkedQueryEngine", "SpeculativeRAGQueryEngine"),
    ],
)
def test_a_former_name_is_the_very_class_of_today(module, former, now):
    package = import_module(module)
    assert getattr(package, former) is getattr(package, now)
