"""How many examples of properties are drawn, what modules begin without, and no telemetry."""

import gc
import os
import sys
from collections.abc import Iterator

import mem0_stores  # noqa: F401  # before mem0, whichever test imports it first
import pytest
from hypothesis import settings
from paper_words import with_paper_words

from ctxreuse import ReusePlanner
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.pipeline import engine_options
from ctxreuse.pipeline.known_texts import known_texts

# per cent of the number that a test names (`example_counts.py`); no deadlines: machines differ
settings.register_profile(
    "few", max_examples=20, deadline=None, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile("many", settings.get_profile("few"), max_examples=500, print_blob=True)
settings.load_profile("few")


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at the modules: that is a second a time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def new_objects_only() -> None:
    """Let the collector look at nothing that was there before a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test begin without what tests before it rendered, retrieved and planned."""
    known_texts().forget_all()
    monkeypatch.setattr(engine_options, "_planners", LRUMap())
    # `ctxreuse record` puts nothing back, since its process ends
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def planner() -> ReusePlanner:
    return ReusePlanner()


@pytest.fixture(scope="module")
def paper_words() -> Iterator[None]:
    """Let a module's planners show labels and the papers' words; see `paper_words.py`."""
    with with_paper_words():
        yield
