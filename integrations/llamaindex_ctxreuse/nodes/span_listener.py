"""What LlamaIndex tells of the calls that it makes, as spans, without keeping any of them."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler

from ctxreuse.context.fork_safety import ForkSafeLock

_REGISTERING = ForkSafeLock()


class SpanListener(BaseSpanHandler[BaseSpan]):
    """Is told when calls begin and end; keeps no spans."""

    def listen(self) -> None:
        """Be told of all calls from now on; asking again changes nothing."""
        handlers = get_dispatcher().span_handlers
        if not any(one is self for one in handlers):
            with _REGISTERING:
                if not any(one is self for one in handlers):
                    get_dispatcher().add_span_handler(self)

    def new_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no spans."""

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no spans."""

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no spans."""
