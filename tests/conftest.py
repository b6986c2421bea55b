"""One hypothesis profile: repeatable in CI, and no deadlines, for machines differ."""

import os

from hypothesis import settings

settings.register_profile("ctxreuse", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("ctxreuse")
