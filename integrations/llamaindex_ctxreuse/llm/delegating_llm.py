"""A LlamaIndex model that delegates everything but its answers to the model inside it."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatResponse, LLMMetadata
from llama_index.core.bridge.pydantic import ConfigDict, Field, SerializeAsAny, field_validator
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.schema import BaseComponent
from llama_index.core.tools import BaseTool

from ctxreuse.context.checks import checked_kind, refuse_wrapped
from ctxreuse.errors import InvalidRequestError

_log = logging.getLogger("ctxreuse")
DELEGATED = frozenset(
    (
        "callback_manager",
        "rate_limiter",
        "system_prompt",
        "messages_to_prompt",
        "completion_to_prompt",
        "output_parser",
        "pydantic_program_mode",
        "query_wrapper_prompt",
    )
)
"""Attributes that LlamaIndex reads and sets on a model; here they are the inner model's."""


class DelegatingLLM(FunctionCallingLLM):
    """Metadata, settings and tool calling are the inner model's."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    inner: SerializeAsAny[LLM] = Field(frozen=True)

    @field_validator("inner", mode="before")
    @classmethod
    def _check_inner(cls, inner: object) -> LLM:
        refuse_wrapped("inner", inner, DelegatingLLM)
        remedy = f"pass {cls.__name__}(inner=OpenAILike(...))"
        checked = checked_kind("inner", inner, LLM, f"a LlamaIndex LLM; {remedy}")
        if isinstance(inner, StructuredLLM):
            raise InvalidRequestError(
                "inner is a StructuredLLM, which builds its prompts inside; "
                f"wrap its model instead: {cls.__name__}(inner=llm).as_structured_llm(...)"
            )
        return checked

    def model_post_init(self, context: Any, /) -> None:
        """Refuse the settings that only the inner model can have."""
        super().model_post_init(context)
        for name in sorted(DELEGATED & self.model_fields_set):
            raise InvalidRequestError(
                f"{name} is the inner model's; set it there, or on the "
                f"{type(self).__name__} once it is made"
            )

    def __getattribute__(self, name: str) -> Any:
        if name in DELEGATED:
            return getattr(super().__getattribute__("inner"), name)
        return super().__getattribute__(name)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a setting of the inner model that the wrapper lacks, such as its name."""
            try:
                return super().__getattr__(name)
            except AttributeError:
                inner = vars(self).get("inner")  # none while it is made, copied or restored
                kind = type(inner)
                is_property = isinstance(getattr(kind, name, None), property)
                # its methods would call it past the wrapper
                if name.startswith("_") or not (
                    is_property or name in getattr(kind, "model_fields", ())
                ):
                    raise
                return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DELEGATED:
            setattr(self.inner, name, value)
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[Any, Any]:
        return pickled_state(self, DELEGATED)

    @property
    def metadata(self) -> LLMMetadata:
        """The inner model's metadata."""
        return self.inner.metadata

    def _prepare_chat_with_tools(
        self, tools: Sequence[BaseTool], *args: Any, tool_required: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        options = {"tool_required": tool_required, **kwargs}
        return self._function_calling()._prepare_chat_with_tools_compat(tools, *args, **options)

    def _validate_chat_with_tools_response(self, *args: Any, **kwargs: Any) -> ChatResponse:
        return self._function_calling()._validate_chat_with_tools_response(*args, **kwargs)

    def get_tool_calls_from_response(self, *args: Any, **kwargs: Any) -> list[ToolSelection]:
        """Return the calls in an answer; a `CodeActAgent` asks for those of any model."""
        if isinstance(self.inner, FunctionCallingLLM):
            return self.inner.get_tool_calls_from_response(*args, **kwargs)
        return []

    def _function_calling(self) -> FunctionCallingLLM:
        if not isinstance(self.inner, FunctionCallingLLM):
            raise NotImplementedError(
                f"{type(self.inner).__name__} takes no tools: it is no FunctionCallingLLM; "
                "wrap a model that is one"
            )
        return self.inner


def pickled_state(component: BaseComponent, left_out: Set[str] = frozenset()) -> dict[Any, Any]:
    """Return the state of a component's copy in another process: its fields, with a new planner."""
    state = {name: value for name, value in vars(component).items() if name not in left_out}
    try:
        pickle.dumps(state.get("planner"))
    except Exception as error:  # a tokenizer of any kind, whose pickling may raise anything
        del state["planner"]
        _log.warning(
            "the planner of %s cannot be pickled (%s), so the copy makes one with default "
            "settings; give it a token_counter that is a module's function",
            type(component).__name__,
            type(error).__name__,
        )
    return {
        "__dict__": state,
        "__pydantic_extra__": None,
        "__pydantic_fields_set__": component.model_fields_set & state.keys(),
        "__pydantic_private__": None,
    }
