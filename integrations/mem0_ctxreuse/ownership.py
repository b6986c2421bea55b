"""Whose memories a call of `search` reads, however its arguments are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxreuse.adapters.memory_owners import ENTITIES, tenant_of


def tenant_of_call(
    search: Callable[..., Any], query: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return the tenant whose memories a call of `search` reads.

    Args:
        search: The method that was called.
        query: Its first argument.
        args: Its other positional arguments, such as the hosted client's options.
        kwargs: Its keyword arguments.
    """
    arguments = _named_arguments(search, query, args, kwargs)
    options = arguments.get("options")
    if options is not None and "filters" not in arguments:
        given = options if isinstance(options, Mapping) else vars(options)
        arguments["filters"] = given.get("filters")
    ids = {name: arguments[name] for name in ENTITIES if name in arguments}
    return tenant_of(arguments.get("filters"), **ids)


def _named_arguments(
    search: Callable[..., Any], query: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    if not args:
        return dict(kwargs)
    signature = inspect.signature(search)
    bound = signature.bind(query, *args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(parameter.name, {}))
    return dict(bound)
