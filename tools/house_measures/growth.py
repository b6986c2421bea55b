"""Where a planner and a wrapper keep what was sent: what grows with the requests, by owner."""

from __future__ import annotations

import random
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

HOLDERS = {"TenantState", "SavingsMeter", "KnownTexts"}
"""Classes whose attributes are places; elsewhere the outermost attribute is one."""

ADAPTERS = ("ctxreuse.pipeline", "langchain_ctxreuse", "llamaindex_ctxreuse", "mem0_ctxreuse")
PACKAGES = {"ctxreuse", *(one for one in ADAPTERS if "." not in one), "chain_of_agents"}
_LEAVES = (str, bytes, int, float, type, ModuleType, FunctionType, CodeType)
_REQUESTS = 1_000
_GROWS = 100  # entries more after the requests than after the first fifth of them


def growing_places() -> dict[str, list[str]]:
    """Return the places that grow over 1,000 requests, of the planner and of the adapters."""
    traffic = _traffic()
    for _ in range(_REQUESTS // 5):
        owners = next(traffic)
    before = _sizes(owners)
    for _ in range(_REQUESTS - _REQUESTS // 5):
        owners = next(traffic)
    after = _sizes(owners)
    places = {"planner": set(), "adapters": set()}
    for place, size in after.items():
        if size - before.get(place, 0) >= _GROWS:
            module, name = place
            places["adapters" if module.startswith(ADAPTERS) else "planner"].add(name)
    return {who: sorted(names) for who, names in places.items()}


def _traffic() -> Iterator[list[Any]]:
    """Send a request a step: by a planner, for a hosted cache, of a conversation, by wrappers."""
    from langchain_core.documents import Document
    from langchain_core.language_models import FakeListChatModel
    from langchain_core.messages import HumanMessage
    from langchain_core.retrievers import BaseRetriever

    from ctxreuse import ContextRequest, ReusePlanner
    from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context

    class Found(BaseRetriever):
        """Finds any five texts."""

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            return [Document(text) for text in draw.sample(texts, 5)]

    draw = random.Random(0)
    texts = [f"{number} says: " + f"w{number} " * 100 for number in range(3_000)]
    planner, hosted = ReusePlanner(), ReusePlanner(cache="anthropic")
    model = ReuseChatModel(
        inner=FakeListChatModel(responses=["In France."]), planner=ReusePlanner()
    )
    retriever = ReuseRetriever(retriever=Found(), planner=model.planner)
    owners = [planner, hosted, model, retriever]
    for number in range(_REQUESTS):
        found = draw.sample(texts, 5)
        question = f"Which is number {number}?"
        if number % 5 == 0:
            planner.plan(ContextRequest(found, question))
        elif number % 5 == 1:
            hosted.plan(ContextRequest(found, question), now=float(number))
        elif number % 5 == 2:
            conversation = planner.conversation(str(number // 15))
            conversation.plan(found, query=question)
            conversation.record("In France.")
        else:
            documents = [Document(text) for text in found]
            shown = format_context(retriever.invoke(question) if number % 5 == 3 else documents)
            prompt = HumanMessage(f"{shown}\n\n{question}")
            model.invoke([prompt, model.invoke([prompt]), HumanMessage("And then?")])
        yield owners


def _sizes(owners: list[Any]) -> Mapping[tuple[str, str], int]:
    """Return how many entries the containers below some objects hold, by module and owner."""
    sizes: dict[tuple[str, str], int] = {}
    seen: set[int] = set()
    ahead: deque[tuple[Any, tuple[str, str], bool]] = deque(
        (one, ("", ""), False) for one in owners
    )
    ahead.extend((value, place, True) for place, value in _globals())
    while ahead:
        thing, place, is_fixed = ahead.popleft()
        if thing is None or isinstance(thing, _LEAVES) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (dict, list, set, deque, array, bytearray, np.ndarray)):
            sizes[place] = sizes.get(place, 0) + len(thing)
        kind = type(thing)
        if kind.__module__.split(".")[0] in PACKAGES and not isinstance(thing, tuple):
            for name, value in _attributes(thing):
                if kind.__name__ in HOLDERS or not is_fixed:
                    owner = (kind.__module__, f"{kind.__name__}.{name}")
                    ahead.append((value, owner, kind.__name__ in HOLDERS))
                else:
                    ahead.append((value, place, True))
        elif isinstance(thing, MethodType):
            ahead.append((thing.__self__, place, is_fixed))
        elif hasattr(thing, "__dict__") and kind.__module__ not in ("threading", "logging"):
            ahead.extend((value, place, is_fixed) for value in vars(thing).values())
        if isinstance(thing, dict):
            ahead.extend((one, place, is_fixed) for one in (*thing, *thing.values()))
        elif isinstance(thing, (list, tuple, set, frozenset, deque)):
            ahead.extend((one, place, is_fixed) for one in tuple(thing))
    return sizes


def _globals() -> Iterator[tuple[tuple[str, str], Any]]:
    for module, loaded in list(sys.modules.items()):
        if module.split(".")[0] in PACKAGES:
            for name, value in vars(loaded).items():
                if not name.startswith("__"):
                    yield (module, f"{module}.{name}"), value


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    yield from (getattr(thing, "__pydantic_private__", None) or {}).items()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield name, getattr(thing, name)
