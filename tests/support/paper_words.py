"""Planners of tests that see by labels and the papers' words what a plan holds.

Most tests are about orders, conversations and scopes, not about words. They read them off a
prompt's labels and annotations, so their planners show all of these: blocks under labels, all
blocks ranked, a place for each that is left out, and blocks are moved as if words cost nothing.
What planners do without being asked is tested where modules do not ask for these words.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ctxreuse import PAPER_TEMPLATES, ReusePlanner
from ctxreuse.planning import tenant_planner
from ctxreuse.planning.tenant_planner import PlannerSettings


def no_words(number: int) -> int:
    """Return what words on the order of blocks cost."""
    return 0


@contextmanager
def with_paper_words() -> Iterator[None]:
    """Let planners, and what makes some, show labels and the papers' words unless asked."""
    from llamaindex_ctxreuse import ReuseMemoryBlock
    from mem0_ctxreuse.planned_memory import MemoryWrapper

    with pytest.MonkeyPatch.context() as patch:
        shown = ReusePlanner.__init__.__kwdefaults__
        patch.setitem(shown, "templates", replace(PAPER_TEMPLATES, label="[Doc_{id}]"))
        patch.setitem(shown, "labels", True)
        patch.setattr(PlannerSettings, "words", lambda self, number, is_labelled: no_words(number))
        patch.setattr(tenant_planner, "_LABELLED_TOKENS", 0)
        memories = MemoryWrapper.__init__.__kwdefaults__
        for name, value in (("labels", True), ("annotate", True), ("growth_limit", None)):
            patch.setitem(memories, name, value)
        fields = ReuseMemoryBlock.model_fields
        for name in ("labels", "annotate"):
            patch.setattr(fields[name], "default", True)
        ReuseMemoryBlock.model_rebuild(force=True)
        yield
    ReuseMemoryBlock.model_rebuild(force=True)
