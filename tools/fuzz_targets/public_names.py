"""Everything that the reference pages name, and why some of it is not called with anything.

The pages decide: what a page shows is called by the target "public calls", or has a reason here.
`tests/project/test_fuzz.py` checks that there is no third kind.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = (
    "ctxreuse",
    "ctxreuse.cache",
    "ctxreuse.cache.telemetry",
    "ctxreuse.distance",
    "ctxreuse.distributed",
    "ctxreuse.serving",
    "ctxreuse.sharing",
    "ctxreuse.workflow",
    "langchain_ctxreuse",
    "llamaindex_ctxreuse",
    "mem0_ctxreuse",
    "chain_of_agents",
)
_OURS = {name.partition(".")[0] for name in PACKAGES}
_PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"
_DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)
_MEMBERS = re.compile(r"members: \[(.*?)\]")

_INTERFACE = "the framework's own interface, which hands its arguments to what is wrapped"
_EVENTS = "the framework calls it with what it has made itself"
_GPU = "needs a GPU"
_FAISS = "takes faiss's own objects"

REASONS = {
    "ctxreuse.policy.*": "a policy is handed these by a planner, and hands them back",
    "*.model_post_init": "pydantic calls it",
    "*.model_copy": "pydantic's own, which builds what plans anew",
    "llamaindex_ctxreuse.ReplayMemory": "a target of its own compares it with LlamaIndex's",
    "langchain_ctxreuse.ReuseChatModel.*": _INTERFACE,
    "langchain_ctxreuse.ReuseCompressor.*": _INTERFACE,
    "langchain_ctxreuse.ReuseRetriever.*": _INTERFACE,
    "langchain_ctxreuse.ReuseStore.*batch": _INTERFACE,
    "langchain_ctxreuse.ReuseStore.*search": _INTERFACE,
    "langchain_ctxreuse.ReuseMiddleware.*": _EVENTS,
    "langchain_ctxreuse.recording.TraceCallbackHandler.*": _EVENTS,
    "llamaindex_ctxreuse.ReuseLLM.*": _INTERFACE,
    "llamaindex_ctxreuse.ReuseMemoryBlock.*": _INTERFACE,
    "llamaindex_ctxreuse.ReplayMemory.*": _INTERFACE,
    "llamaindex_ctxreuse.recording.*SpanHandler*": _EVENTS,
    "ctxreuse.cache.telemetry.PlannerSpans.*": "the planner calls it with what it has made itself",
    "ctxreuse.measure.bench.recorded_bench.bench_recording": "needs an engine, as its tests have",
    "ctxreuse.sharing.RedisLog.append": "needs a server, which its tests start",
    "ctxreuse.sharing.RedisLog.read": "needs a server, which its tests start",
    "ctxreuse.serving.EnginePool.watch": "ends when it is cancelled; `check` is its step",
    "ctxreuse.distributed.plan_dataset": "starts a cluster; its rows have a target of their own",
    "ctxreuse.workflow.GpuTier*": _GPU,
    "ctxreuse.workflow.fastest_tier": _GPU,
    "ctxreuse.workflow.HotTier.swap": _FAISS,
    "ctxreuse.workflow.IVFIndex.accelerate": _FAISS,
    "ctxreuse.workflow.IVFIndex.serve_from": _FAISS,
    "ctxreuse.workflow.IVFIndex.read": "faiss reads its files in C++, and trusts them",
}
"""Why, by names with wildcards."""


@cache
def documented() -> dict[str, Any]:
    """Return what pages of the reference show and packages list in `__all__`, by dotted name."""
    found: dict[str, Any] = {}
    for page in sorted(_PAGES.glob("*.md")):
        for path, options in _DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            thing = _resolved(path)
            if isinstance(thing, ModuleType):
                found |= _shown_of(thing, options)
            else:
                found[path] = thing
    for package in PACKAGES:
        found |= _shown_of(import_module(package), "")
    return found


def calls() -> Iterator[tuple[str, type | None, Callable[..., Any]]]:
    """Yield all that takes arguments of a user's: its name, class and function.

    The class of a function that needs an object to be called on, else None.
    """
    seen = set()
    for name, thing in documented().items():
        if id(thing) in seen or not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        seen.add(id(thing))
        if inspect.isclass(thing) and _is_not_made(thing):
            continue
        if _parameters(thing):
            yield name, None, thing
        if inspect.isclass(thing):
            for method, needs_object in _methods(thing).items():
                function = getattr(thing, method)
                if _parameters(function)[needs_object:]:
                    yield f"{name}.{method}", thing if needs_object else None, function


def reason(name: str) -> str | None:
    """Return why a documented name is not called with anything; None if it is."""
    return next((why for one, why in REASONS.items() if fnmatchcase(name, one)), None)


def _resolved(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return import_module(path)
    except ModuleNotFoundError:
        return getattr(_resolved(module), name)


def _shown_of(module: ModuleType, options: str) -> dict[str, Any]:
    listed = _MEMBERS.search(options)
    names = listed[1].replace(" ", "").split(",") if listed else getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, thing in vars(module).items()
            if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
        ]
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names if name}


def _is_not_made(thing: type) -> bool:
    """Return whether users derive from a class, catch it or name a member of it."""
    is_base = getattr(thing, "_is_protocol", False) or inspect.isabstract(thing)
    return is_base or issubclass(thing, (BaseException, Enum))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _methods(thing: type) -> dict[str, bool]:
    """Return the names of public methods that are this package's, and if they need an object."""
    return {
        name: inspect.isfunction(method)
        for base in reversed(thing.__mro__)
        if base.__module__.partition(".")[0] in _OURS
        for name, method in vars(base).items()
        if not name.startswith("_")
        and (inspect.isfunction(method) or isinstance(method, (classmethod, staticmethod)))
    }
