"""The same chat model in another class, in which some methods do something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakSet

from langchain_core.language_models import BaseChatModel

_views: WeakSet[type] = WeakSet()  # classes of models that are called through a wrapper

_Model = TypeVar("_Model", bound=BaseChatModel)

_ENTRANCES = (
    "invoke",
    "ainvoke",
    "stream",
    "astream",
    "batch",
    "abatch",
    "batch_as_completed",
    "abatch_as_completed",
    "generate",
    "agenerate",
    "generate_prompt",
    "agenerate_prompt",
    "_chat_model_stream_v3",
    "_achat_model_stream_v3",
)
"""The methods by which a chat model is called; all others come to these."""

_STATE = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")


def view_class(kind: type[_Model], methods: Mapping[str, Callable[..., Any]]) -> type[_Model]:
    """Return a subclass of a model's class that is called as the class itself."""
    if kind.__basicsize__ != BaseChatModel.__basicsize__:
        raise TypeError(f"{kind.__qualname__} has slots of its own")
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(kind)
    subclass: type[_Model] = metaclass(kind.__name__, (kind,), {**names, **methods})
    return subclass


def seen_as(model: BaseChatModel, kind: type[_Model]) -> _Model:
    """Return a model as an object of another class; what is set on one is set on both."""
    view = kind.__new__(kind)
    for name in _STATE:
        object.__setattr__(view, name, getattr(model, name))
    return view


def called_through(
    model: _Model, wrapped: Callable[[BaseChatModel], BaseChatModel], made_again: Callable[..., Any]
) -> _Model:
    """Return a model as an object of its own class whose calls go through a wrapper."""
    kind = type(model)

    def wrapper(view: BaseChatModel) -> BaseChatModel:
        return wrapped(model if vars(view) is vars(model) else seen_as(view, kind))

    def through(name: str) -> Callable[..., Any]:
        @wraps(getattr(BaseChatModel, name))
        def call(self: BaseChatModel, *args: Any, **kwargs: Any) -> Any:
            return getattr(wrapper(self), name)(*args, **kwargs)

        return call

    methods = {name: through(name) for name in _ENTRANCES if hasattr(kind, name)}
    methods["__reduce__"] = lambda self: (made_again, (wrapper(self),))
    view = view_class(kind, methods)
    _views.add(view)
    return seen_as(model, view)


def is_called_through(model: object) -> bool:
    """Return whether `called_through` has made a model."""
    return type(model) in _views
