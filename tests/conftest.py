"""One hypothesis profile: repeatable in CI, and no deadlines, for machines differ. No telemetry."""

import os
from collections.abc import Iterator

import mem0_stores  # noqa: F401  # before mem0, whichever test imports it first
import pytest
from hypothesis import settings
from paper_words import paper_words

AS_USERS_HAVE_IT = ("project", "words", "mem0", "chain_of_agents", "evaluation")
"""The folders whose tests see planners as they are where nothing is asked of them."""

settings.register_profile("ctxreuse", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("ctxreuse")


@pytest.fixture(scope="module", autouse=True)
def _words(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let most planners show labels and the papers' words; see `paper_words`."""
    if request.path.parent.name in AS_USERS_HAVE_IT:
        yield
        return
    with paper_words():
        yield
