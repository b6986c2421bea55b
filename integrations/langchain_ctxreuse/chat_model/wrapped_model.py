"""A chat model that is another one in all but how its calls are sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import merge_configs
from langchain_core.tools import BaseTool
from pydantic import BaseModel, field_validator, model_validator

from ctxreuse.errors import InvalidRequestError, describe
from langchain_ctxreuse.chat_model.substitute_model import rebound

if TYPE_CHECKING:
    from langchain_core.language_models.model_profile import ModelProfile

_log = logging.getLogger("ctxreuse")
_TAKEN_OVER = ("cache", "disable_streaming", "output_version", "rate_limiter", "verbose")


class WrappedChatModel(BaseChatModel):
    """What a wrapper takes from the model inside; a subclass sends the calls.

    The inner model's settings (callbacks, tags, metadata, cache, rate limiter and the like) are
    taken over when the wrapper is made, for only the wrapper's own ones take effect.

    Args:
        inner: Any chat model.
    """

    inner: BaseChatModel

    @field_validator("inner", mode="before")
    @classmethod
    def _check_inner(cls, inner: object) -> BaseChatModel:
        if not isinstance(inner, BaseChatModel):
            raise InvalidRequestError(
                f"inner must be a LangChain chat model, not {describe(inner)}; pass one such as "
                "ChatOpenAI(base_url=...), and bind tools or config to the wrapper instead"
            )
        return inner

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_arguments(cls, arguments: Any) -> Any:
        """Say what is not used; LangChain's models ignore unknown arguments silently."""
        unknown = sorted(str(name) for name in arguments if name not in cls.model_fields)
        if unknown:
            _log.warning(
                "%s does not use %s; give the inner model its parameters",
                cls.__name__,
                ", ".join(unknown),
            )
        return arguments

    @model_validator(mode="after")
    def _take_over_settings(self) -> Self:
        inner = self.inner
        for name in _TAKEN_OVER:
            if name not in self.model_fields_set:
                setattr(self, name, getattr(inner, name))
        if inner.callbacks and self.callbacks:
            both = merge_configs({"callbacks": inner.callbacks}, {"callbacks": self.callbacks})
            self.callbacks = both["callbacks"]
        else:
            self.callbacks = self.callbacks or inner.callbacks
        self.tags = list(dict.fromkeys([*(inner.tags or ()), *(self.tags or ())])) or None
        self.metadata = _merged_metadata(inner.metadata or {}, self.metadata or {})
        return self

    def _resolve_model_profile(self) -> ModelProfile | None:
        return self.inner.profile

    # Identity: for traces, and for the keys of LangChain's cache.

    @property
    def _llm_type(self) -> str:
        return f"ctxreuse-{self.inner._llm_type}"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {**self.inner._identifying_params, "inner": _class_name(self.inner)}

    def _get_invocation_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return self.inner._get_invocation_params(stop=stop, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = self.inner._get_ls_params(stop=stop, **kwargs)
        if params.get("ls_model_name"):
            return params
        return LangSmithParams(**{**params, "ls_model_name": type(self.inner).__name__})

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # of its own: the inner model's cached answers are answers to the prompts as given
        inner = self.inner._get_llm_string(stop=stop, **kwargs)
        return f"{_class_name(self)}({_class_name(self.inner)})---{inner}"

    # What the model can do.

    def _streaming_disabled(self, **kwargs: Any) -> bool:
        return super()._streaming_disabled(**kwargs) or self.inner._streaming_disabled(**kwargs)

    def _should_stream(
        self,
        *,
        async_api: bool,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> bool:
        return not self._streaming_disabled(**kwargs) and self.inner._should_stream(
            async_api=async_api, run_manager=run_manager, **kwargs
        )

    def _should_use_protocol_streaming(
        self,
        *,
        async_api: bool,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> bool:
        return not self._streaming_disabled(**kwargs) and self.inner._should_use_protocol_streaming(
            async_api=async_api, run_manager=run_manager, **kwargs
        )

    def _combine_llm_outputs(self, _llm_outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        return self.inner._combine_llm_outputs(_llm_outputs)

    def get_token_ids(self, text: str) -> list[int]:
        """Return the text's token ids, as the inner model counts unless told otherwise."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.inner.get_token_ids(text)

    def get_num_tokens(self, text: str) -> int:
        """Return the number of tokens in the text, counted as `get_token_ids` does."""
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens(text)
        return self.inner.get_num_tokens(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> int:
        """Return the number of tokens in the messages, counted as `get_token_ids` does."""
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens_from_messages(messages, *args, **kwargs)
        return self.inner.get_num_tokens_from_messages(messages, *args, **kwargs)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return a model that may call the tools, bound as the inner model does it."""
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        return self._around("bind_tools", self.inner.bind_tools(tools, **kwargs))

    def with_structured_output(
        self, schema: dict[str, Any] | type | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return a model whose answers have the schema, made as the inner model does it."""
        # a schema that is left out is some model's way to say "any JSON"
        made = self.inner.with_structured_output(schema, **kwargs)  # type: ignore[arg-type]
        return self._around("with_structured_output", made)

    def _around(self, method: str, made: Runnable[Any, Any]) -> Runnable[Any, Any]:
        """Return what the inner model made of itself, with the wrapper in its place."""
        around: Runnable[Any, Any] = rebound(made, self._in_place_of)
        if around is made:
            _log.warning(
                "%s: %s.%s returned a %s in which no chat model was found; its calls go past the "
                "wrapper, unplanned",
                type(self).__name__,
                type(self.inner).__name__,
                method,
                type(made).__name__,
            )
        return around

    def _in_place_of(self, model: BaseChatModel) -> BaseChatModel:
        # some models bind by returning a changed copy of themselves
        return self if model is self.inner else self.model_copy(update={"inner": model})


def _merged_metadata(inner: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    versions = {**(inner.get("lc_versions") or {}), **(own.get("lc_versions") or {})}
    merged = {**inner, **own}
    return {**merged, "lc_versions": versions} if versions else merged


def _class_name(model: BaseChatModel) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
