"""One hypothesis profile: repeatable in CI, and no deadlines, for machines differ. No telemetry."""

import os
from collections.abc import Iterator

import mem0_stores  # noqa: F401  # before mem0, whichever test imports it first
import pytest
from hypothesis import settings
from paper_words import with_paper_words

from ctxreuse.adapters import rendered_contexts
from ctxreuse.adapters.issued_plans import ISSUED_PLANS

settings.register_profile("ctxreuse", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("ctxreuse")


@pytest.fixture(scope="module", autouse=True)
def own_rendered_contexts() -> None:
    """Let a module begin without what the modules before it rendered and planned.

    Planners that were given no registry share one a process, so a text that one module renders
    would be recognised, and planned, in prompts of another.
    """
    rendered_contexts._shared_registry.cache_clear()
    ISSUED_PLANS._forget_all()


@pytest.fixture(scope="module")
def paper_words() -> Iterator[None]:
    """Let a module's planners show labels and the papers' words; see `paper_words.py`."""
    with with_paper_words():
        yield
