"""What several files of engine tests begin with."""

import pytest

from ctxreuse.workflow.runtime import workflow_run
from ctxreuse.workflow.runtime.services import PreviewStability
from ctxreuse.workflow.vector_search import scheduler


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have searches go in small steps, and everything that can be begun early be begun early."""
    monkeypatch.setattr(scheduler, "sub_stage_s", lambda *_, **__: 1e-6)
    monkeypatch.setattr(workflow_run, "_SEARCH_AT", (0.03, 0.1))
    monkeypatch.setattr(PreviewStability, "is_worth_it", lambda self, progress: True)
