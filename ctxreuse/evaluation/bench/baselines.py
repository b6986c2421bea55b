"""Orders that a benchmark compares: this package's, the papers', and the frameworks' own."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.evaluation.replay.policies import POLICIES, Policy
from ctxreuse.evaluation.traces.trace_files import TraceRequest


@dataclass(frozen=True, slots=True)
class OrderedContexts:
    """A trace in somebody else's order.

    Attributes:
        trace: The requests as they are sent.
        planning_ms: What ordering took, a request, in milliseconds.
        wrong: Requests for which other blocks came back than were given; they are sent as
            retrieved.
    """

    trace: Sequence[TraceRequest]
    planning_ms: float
    wrong: int = 0


Arrange = Callable[[Sequence[TraceRequest], bool], OrderedContexts]
"""From a trace, and whether shown blocks are left out, to the trace in another order."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy that takes part.

    Attributes:
        policy: How the requests are planned.
        arrange: Puts them in somebody else's order first; None where the planner orders.
    """

    policy: Policy
    arrange: Arrange | None = None


OURS = tuple(map(Contender, POLICIES))
"""As retrieved, the papers' order and this package's."""


def frameworks(missing: list[str]) -> Iterator[Contender]:
    """Yield LangChain's and LlamaIndex's own `LongContextReorder`.

    Both put the best at the ends: Liu et al., "Lost in the Middle" (2023).

    Args:
        missing: Takes what is not installed, in words.
    """
    for name, package, reorder in (
        ("LangChain", "langchain-community", _langchain),
        ("LlamaIndex", "llama-index-core", _llamaindex),
    ):
        title = f"{name} LongContextReorder"
        try:
            function = reorder()
        except ImportError:
            missing.append(f"{title} took no part: pip install {package}")
            continue
        yield Contender(Policy(title, "none", "online"), _each(function))


def chosen(contenders: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    """Return the contenders of these names, and the first, with which they are compared.

    Raises:
        InvalidRequestError: If there is none of a name.
    """
    known = [contender.policy.name for contender in contenders]
    for name in names:
        if name not in known:
            raise InvalidRequestError(
                f"there is no policy {describe(name)}; there are: {'; '.join(known)}"
            )
    first, *others = contenders
    return [first, *(one for one in others if one.policy.name in names)]


_Reorder = Callable[[Sequence[ContextBlock]], list[ContextBlock]]


def _each(reorder: _Reorder) -> Arrange:
    def arrange(trace: Sequence[TraceRequest], deduplicate: bool) -> OrderedContexts:
        started = time.perf_counter()
        arranged = [replace(one, blocks=tuple(reorder(one.blocks))) for one in trace]
        return OrderedContexts(arranged, 1e3 * (time.perf_counter() - started) / max(1, len(trace)))

    return arrange


def _langchain() -> _Reorder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package says that nobody keeps it any more
        transformers = import_module("langchain_community.document_transformers")
    document = import_module("langchain_core.documents").Document
    reorder = transformers.LongContextReorder()

    def reordered(blocks: Sequence[ContextBlock]) -> list[ContextBlock]:
        documents = [document(page_content="", metadata={"at": at}) for at in range(len(blocks))]
        return [blocks[one.metadata["at"]] for one in reorder.transform_documents(documents)]

    return reordered


def _llamaindex() -> _Reorder:
    reorder = import_module("llama_index.core.postprocessor").LongContextReorder()
    schema = import_module("llama_index.core.schema")

    def reordered(blocks: Sequence[ContextBlock]) -> list[ContextBlock]:
        nodes = [
            schema.NodeWithScore(node=schema.TextNode(id_=str(at)), score=float(-at))
            for at in range(len(blocks))
        ]
        return [blocks[int(one.node.node_id)] for one in reorder.postprocess_nodes(nodes)]

    return reordered
