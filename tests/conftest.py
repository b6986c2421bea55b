"""One hypothesis profile: repeatable in CI, and no deadlines, for machines differ. No telemetry."""

import os
from collections.abc import Iterator

import mem0_stores  # noqa: F401  # before mem0, whichever test imports it first
import pytest
from hypothesis import settings
from paper_words import with_paper_words

settings.register_profile("ctxreuse", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("ctxreuse")


@pytest.fixture(scope="module")
def paper_words() -> Iterator[None]:
    """Let a module's planners show labels and the papers' words; see `paper_words.py`."""
    with with_paper_words():
        yield
