"""Makes commands of configurations: an option for each field that `option` describes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

import typer

from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.options import option


class Runs(Protocol):
    """A command: a frozen dataclass whose docstring is its help."""

    def run(self) -> None:
        """Do what the command does."""


@dataclass(frozen=True, kw_only=True)
class PrintsJson:
    """A command that prints a table or JSON."""

    as_json: bool = option("Print JSON instead of a table.", False, "--json")


def api_key() -> str:
    """Return the engine's key, which no option takes: command lines can be read by others."""
    return os.environ.get("OPENAI_API_KEY") or "EMPTY"


def command_of(command: type[Runs]) -> Callable[..., None]:
    """Return a function for Typer that makes a command of what is given, and runs it."""
    hints = get_type_hints(command)
    options = [one for one in fields(command) if "help" in one.metadata]  # type: ignore[arg-type]
    options.sort(key=lambda one: one.name == "as_json")  # last, as everywhere
    parameters = [other for one in options for other in _parameters(one, hints[one.name])]
    many = {one.name for one in parameters if get_origin(get_args(one.annotation)[0]) is list}

    def run(**given: Any) -> None:
        for name in [one for one in given if one.endswith(_NAMED)]:
            own, named = name.removesuffix(_NAMED), given.pop(name)
            if (given[own] is None) == (named is None):
                raise InvalidRequestError(f"give the {own} once, as an argument or with --{own}")
            given[own] = named if given[own] is None else given[own]
        command(
            **{name: tuple(one or ()) if name in many else one for name, one in given.items()}
        ).run()

    run.__doc__ = inspect.cleandoc(command.__doc__ or "")
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


_NAMED = "_named"


def _parameters(one: Field[Any], hint: Any) -> Iterator[inspect.Parameter]:
    """Yield a command's parameter, or two where it takes an argument by an option's name, too."""
    if one.metadata.get("argument") and one.metadata["names"]:
        argument = {**one.metadata, "names": ()}
        yield _parameter(one.name, None, argument, str | None)
        named = {"names": one.metadata["names"], "help": "The same, by name."}
        yield _parameter(f"{one.name}{_NAMED}", None, named, str | None)
    else:
        yield _parameter(one.name, one.default, one.metadata, hint)


def _parameter(
    name: str, default: Any, metadata: Mapping[str, Any], hint: Any
) -> inspect.Parameter:
    settings = dict(metadata)
    names, kind = settings.pop("names"), settings.pop("type", hint)
    default = inspect.Parameter.empty if default is MISSING else default
    origin: Any = get_origin(kind)
    if origin is Sequence:
        kind, default = list[get_args(kind)[0]], default or None  # type: ignore[misc]
    if settings.pop("argument", False):
        info: Any = typer.Argument(**settings)
    else:
        info = typer.Option(*(names or [f"--{name.replace('_', '-')}"]), **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )
