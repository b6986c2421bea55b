"""What mkdocstrings is told about docstrings: an example of ours is an example of its own."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Reads `Example:`, with one example, as the `Examples:` that griffe knows."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in the docstring of a class, function or module."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
