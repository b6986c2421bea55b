"""One hypothesis profile: repeatable in CI, and no deadlines, for machines differ. No telemetry."""

import os

import mem0_stores  # noqa: F401  # before mem0, whichever test imports it first
from hypothesis import settings

settings.register_profile("ctxreuse", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("ctxreuse")
