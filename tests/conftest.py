"""One hypothesis profile: repeatable in CI, and no deadlines, for machines differ. No telemetry."""

import os
import tempfile

from hypothesis import settings

settings.register_profile("ctxreuse", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("ctxreuse")

# mem0 reads these when it is imported, by whichever test comes first
os.environ["MEM0_TELEMETRY"] = "False"
os.environ.setdefault("MEM0_DIR", tempfile.mkdtemp(prefix="mem0-"))
