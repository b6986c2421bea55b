"""What LlamaIndex tells of the calls that it makes, as spans, without keeping any of them."""

from __future__ import annotations

import inspect
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

    def entered(self, call: str, around: str, instance: object, arguments: dict[str, Any]) -> None:
        """Take note that a call begins; changes of its arguments reach it."""

    def ended(self, call: str, result: object) -> None:
        """Take note of what a call has returned."""

    def failed(self, call: str) -> None:
        """Take note that a call has raised an error."""

    def span_enter(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Call `entered`."""
        self.entered(id_, parent_id or "", instance, bound_args.arguments)

    def span_exit(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> None:
        """Call `ended`."""
        self.ended(id_, result)

    def span_drop(self, id_: str, *args: Any, **kwargs: Any) -> None:
        """Call `failed`."""
        self.failed(id_)

    def new_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no spans."""

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no spans."""

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no spans."""
