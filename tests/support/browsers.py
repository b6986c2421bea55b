"""The browser in which tests open pages."""

import os
import shutil

import pytest


def chromium() -> str:
    """Return what CTXREUSE_BROWSER names, which has to be there, or what is found; else skip."""
    named = os.environ.get("CTXREUSE_BROWSER")
    found = shutil.which(named or "chromium")
    if named and found is None:
        pytest.fail(
            f"CTXREUSE_BROWSER is {named!r}, and there is no such program; unset it or mend it"
        )
    if found is None:
        pytest.skip("needs chromium")
    return found
