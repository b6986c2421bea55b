"""A chat model around another one, which is the inner model in all that frameworks ask it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from operator import is_
from typing import TYPE_CHECKING, Any, Self

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableSerializable
from langchain_core.runnables.config import merge_configs
from pydantic import field_validator, model_validator

from ctxreuse.context.checks import checked_kind, refuse_wrapped
from langchain_ctxreuse.configurable import configurable_around, without_bindings
from langchain_ctxreuse.scope import RequestCarrier

_log = logging.getLogger("ctxreuse")
_HOLDERS = (
    "bound",  # RunnableBinding, RunnableRetry, RunnableEach
    "first",  # RunnableSequence
    "middle",
    "last",
    "steps__",  # RunnableParallel
    "mapper",  # RunnableAssign
    "runnable",  # RunnableWithFallbacks
    "fallbacks",
    "branches",  # RunnableBranch
    "default",  # RunnableBranch, configurable runnables
)
"""Fields of runnables that hold what they call. Others, such as bound arguments, are left alone."""

_TAKEN_OVER = ("cache", "disable_streaming", "output_version", "profile", "rate_limiter", "verbose")


def _of_inner(name: str) -> Any:
    return property(lambda self: getattr(self.inner, name))


def _unless_disabled(name: str) -> Any:
    """Return a method that says whether to stream: as the inner model does, unless disabled."""
    return lambda self, **call: (
        not self._streaming_disabled(**call) and getattr(self.inner, name)(**call)
    )


def _around_inner(name: str) -> Any:
    """Return a method that has the inner model make something of itself, and takes its place."""

    @wraps(getattr(BaseChatModel, name))
    def make(self: DelegatingChatModel, *args: Any, **kwargs: Any) -> Runnable[Any, Any]:
        made: Runnable[Any, Any] = getattr(self.inner, name)(*args, **kwargs)
        around: Runnable[Any, Any] = with_substitutes(made, self._in_place_of)
        if around is made:
            _log.warning(
                "%s: %s.%s returned a %s in which no chat model was found; its calls go past the "
                "wrapper, unplanned",
                type(self).__name__,
                type(self.inner).__name__,
                name,
                type(made).__name__,
            )
        return around

    return make


class DelegatingChatModel(RequestCarrier, BaseChatModel):
    """What the inner model says of itself and can do; how it is called is left to a class below."""

    inner: BaseChatModel

    @field_validator("inner", mode="before")
    @classmethod
    def _check_inner(cls, inner: object) -> BaseChatModel:
        bare = without_bindings(inner)
        refuse_wrapped("inner", bare, DelegatingChatModel)
        remedy = "pass one such as ChatOpenAI(...)"
        if isinstance(inner, Runnable):
            made = f"{cls.__name__}(inner=model)"
            remedy = f"wrap the model first: {made}.bind(...), .with_retry(...), ..."
        return checked_kind("inner", inner, BaseChatModel, f"a LangChain chat model; {remedy}")

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_arguments(cls, arguments: Any) -> Any:
        """Log the arguments that are not used; LangChain's models ignore them silently."""
        unknown = ", ".join(sorted(map(str, set(arguments).difference(cls.model_fields))))
        if unknown:
            message = "%s does not use %s; give the inner model its parameters"
            _log.warning(message, cls.__name__, unknown)
        return arguments

    def model_post_init(self, context: Any, /) -> None:
        """Take over the inner model's settings."""
        super().model_post_init(context)
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
        theirs, ours = inner.metadata or {}, self.metadata or {}
        versions = {**(theirs.get("lc_versions") or {}), **(ours.get("lc_versions") or {})}
        self.metadata = {**theirs, **ours} | ({"lc_versions": versions} if versions else {})

    def __copy__(self) -> Self:
        _ = self._serialized  # kept by the model, or each call's copy would make it anew
        return super().__copy__()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, which traces name by its own settings."""
        made = super().model_copy(update=update, deep=deep)
        vars(made).pop("_serialized", None)
        return made

    def configurable_fields(self, **fields: Any) -> RunnableSerializable[Any, AIMessage]:
        """Return a model whose fields a config can set, as LangChain's models do."""
        return configurable_around(self, "inner", super().configurable_fields, fields)

    # Passthrough: what the inner model says of itself, for frameworks, traces and caches.

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the inner model that the wrapper lacks, such as a name."""
            try:
                if name in type(self).__private_attributes__:  # pydantic takes longer to find one
                    return object.__getattribute__(self, "__pydantic_private__")[name]
                return super().__getattr__(name)
            except (AttributeError, KeyError, TypeError) as error:
                inner = vars(self).get("inner")  # none while it is made, copied or restored
                if inner is None or name.startswith("_"):
                    raise AttributeError(f"{type(self).__name__} has no {name!r}") from error
                found = getattr(inner, name)
                if getattr(found, "__self__", None) is not inner:
                    return found

                @wraps(found)
                def call(*args: Any, **kwargs: Any) -> Any:  # a model that it returns is wrapped
                    return with_substitutes(found(*args, **kwargs), self._in_place_of)

                return call

    def _in_place_of(self, model: BaseChatModel) -> BaseChatModel:
        """Return the wrapper around the inner model, or around a copy that it made of itself."""
        return self if model is self.inner else self.model_copy(update={"inner": model})

    _llm_type = _of_inner("_llm_type")
    _get_ls_params = _of_inner("_get_ls_params")
    _get_invocation_params = _of_inner("_get_invocation_params")
    _combine_llm_outputs = _of_inner("_combine_llm_outputs")

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {**self.inner._identifying_params, "inner": _class_name(self.inner)}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # another one than the inner model's, whose cached answers are to the prompts as given
        inner = self.inner._get_llm_string(stop=stop, **kwargs)
        return f"{_class_name(self)}({_class_name(self.inner)})---{inner}"

    # Passthrough: what the inner model can do.

    _should_stream = _unless_disabled("_should_stream")
    _should_use_protocol_streaming = _unless_disabled("_should_use_protocol_streaming")

    def get_token_ids(self, text: str) -> list[int]:
        """Return the text's token ids, as the inner model counts unless told otherwise."""
        return (self.custom_get_token_ids or self.inner.get_token_ids)(text)

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

    bind_tools = _around_inner("bind_tools")
    with_structured_output = _around_inner("with_structured_output")


def _class_name(model: BaseChatModel) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def with_substitutes(made: Any, substitute: Callable[[BaseChatModel], BaseChatModel]) -> Any:
    """Return a runnable with each chat model in it replaced, or the same object if it has none."""
    if isinstance(made, BaseChatModel):
        return substitute(made)
    if isinstance(made, RunnableSerializable):
        held = {name: getattr(made, name) for name in _HOLDERS if name in type(made).model_fields}
        inside = {name: with_substitutes(value, substitute) for name, value in held.items()}
        changed = {name: value for name, value in inside.items() if value is not held[name]}
        return made.model_copy(update=changed) if changed else made
    if isinstance(made, Mapping):
        entries = {name: with_substitutes(value, substitute) for name, value in made.items()}
        return made if all(map(is_, made.values(), entries.values())) else entries
    if isinstance(made, (list, tuple)):
        items = [with_substitutes(item, substitute) for item in made]
        return made if all(map(is_, made, items)) else type(made)(items)
    return made
