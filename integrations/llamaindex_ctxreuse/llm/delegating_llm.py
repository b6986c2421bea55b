"""A model around another one that is, seen from outside, that one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata
from llama_index.core.bridge.pydantic import ConfigDict, Field, SerializeAsAny, field_validator
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import LLM, ToolSelection
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.tools import BaseTool

from ctxreuse.errors import InvalidRequestError
from llamaindex_ctxreuse.llm.pickling import state_without

_OF_THE_INNER = frozenset(
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
"""What LlamaIndex reads, and sets, on a model; the inner one's is what counts."""


class WrappedLLM(FunctionCallingLLM):
    """Whatever LlamaIndex asks of a model besides its answers is the inner model's.

    Args:
        inner: The model to wrap.

    Raises:
        ValueError: If it is none, or one whose prompts are built inside of it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    inner: SerializeAsAny[LLM] = Field(frozen=True)

    @field_validator("inner", mode="before")
    @classmethod
    def _check_inner(cls, inner: object) -> LLM:
        if not isinstance(inner, LLM):
            raise InvalidRequestError(
                f"inner must be a LlamaIndex LLM, not {type(inner).__name__}; "
                f"pass {cls.__name__}(inner=OpenAILike(...))"
            )
        if isinstance(inner, StructuredLLM):
            raise InvalidRequestError(
                "inner is a StructuredLLM, which builds its prompts inside; "
                f"wrap its model instead: {cls.__name__}(inner=llm).as_structured_llm(...)"
            )
        return inner

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what only the inner model can have."""
        super().model_post_init(context)
        for name in sorted(_OF_THE_INNER & self.model_fields_set):
            raise InvalidRequestError(
                f"{name} is the inner model's; set it there, or on the "
                f"{type(self).__name__} once it is made"
            )

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_THE_INNER:
            return getattr(super().__getattribute__("inner"), name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_THE_INNER:
            self._set_inside(name, value)
        else:
            super().__setattr__(name, value)

    def _set_inside(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def __getstate__(self) -> dict[Any, Any]:
        """Return what a copy in another process is made of; see `state_without`."""
        return state_without(self, {"planner", *_OF_THE_INNER})

    @property
    def metadata(self) -> LLMMetadata:
        """What is known of the inner model."""
        return self.inner.metadata

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return self._function_calling()._prepare_chat_with_tools_compat(
            tools,
            user_msg=user_msg,
            chat_history=chat_history,
            verbose=verbose,
            allow_parallel_tool_calls=allow_parallel_tool_calls,
            tool_required=tool_required,
            **kwargs,
        )

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        return self._function_calling()._validate_chat_with_tools_response(
            response, tools, allow_parallel_tool_calls=allow_parallel_tool_calls, **kwargs
        )

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tools that the inner model wants to be called."""
        return self._function_calling().get_tool_calls_from_response(
            response, error_on_no_tool_call=error_on_no_tool_call, **kwargs
        )

    def _function_calling(self) -> FunctionCallingLLM:
        if not isinstance(self.inner, FunctionCallingLLM):
            raise NotImplementedError(
                f"{type(self.inner).__name__} takes no tools: it is no FunctionCallingLLM; "
                "wrap a model that is one"
            )
        return self.inner
