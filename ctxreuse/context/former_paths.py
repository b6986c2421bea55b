"""Module paths that earlier documentation showed; they keep working as other names of the modules.

The modules moved into folders. An import of a former path gives the very module of today, so that
classes stay one class whichever path they are imported by.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

FORMER_PATHS = {
    f"ctxreuse.{former}": f"ctxreuse.{now}"
    for former, now in {
        "assignment": "serving.pool.placement",
        "bench": "evaluation.bench",
        "demo": "evaluation.demo",
        "demo.corpus": "evaluation.demo.corpus",
        "demo.questions": "evaluation.demo.corpus",
        "demo.retrieval": "evaluation.demo.corpus",
        "evaluation.answers": "evaluation.results.answers",
        "evaluation.demo.questions": "evaluation.demo.corpus",
        "evaluation.demo.retrieval": "evaluation.demo.corpus",
        "evaluation.estimate": "evaluation.replay.estimate",
        "evaluation.explain": "evaluation.replay.explain_plan",
        "evaluation.openai_recording": "evaluation.traces.recording",
        "evaluation.outcomes": "evaluation.replay.simulate",
        "evaluation.planfile": "evaluation.replay.plan_file",
        "evaluation.policies": "evaluation.replay.policies",
        "evaluation.recording": "evaluation.traces.recording",
        "evaluation.replay.outcomes": "evaluation.replay.simulate",
        "evaluation.replay.simulated_run": "evaluation.replay.simulate",
        "evaluation.results.runs": "evaluation.results.results_file",
        "evaluation.results.trace_savings": "evaluation.results.results_file",
        "evaluation.runs": "evaluation.results.results_file",
        "evaluation.simulate": "evaluation.replay.simulate",
        "evaluation.traces.openai_recording": "evaluation.traces.recording",
        "evaluation.virtual_time": "serving.aio.virtual_time",
        "explanations": "index.explain",
        "marks": "adapters.plan_metadata",
        "prompts": "context.rendering",
        "report": "evaluation.report",
        "report.page": "evaluation.report.report_page",
        "shadow_mode": "planning.shadow_mode",
        "tokens": "context.tokens",
        "workflow.embedders": "workflow.models.embedders",
        "workflow.llm": "workflow.models.language_model",
    }.items()
}


class _FormerPaths:
    """Finds a former path; the first in line, or a package's own folder would be read twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FORMER_PATHS:
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]  # it has what is asked of one

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # the usual one, which `exec_module` replaces

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(FORMER_PATHS[module.__name__])


def keep_former_paths() -> None:
    """Make former module paths importable, once a process."""
    if not any(type(finder).__name__ == _FormerPaths.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _FormerPaths())
