"""The frameworks' own orders."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.measure.replay.policies import MeasuredPolicy
from ctxreuse.measure.replay.simulate import Run
from ctxreuse.measure.traces.trace_files import TraceRequest

Order: TypeAlias = Callable[[Sequence[ContextBlock]], list[ContextBlock]]


@dataclass(frozen=True, slots=True)
class ReorderedTrace:
    """A trace as a peer reorders it; `wrong` requests are sent as retrieved."""

    requests: Sequence[TraceRequest]
    planning_ms: float
    wrong: int = 0


class PeerPolicy(MeasuredPolicy):
    """A policy that reorders a trace before it is sent."""

    def reordered(self, run: Run) -> ReorderedTrace:
        """Return the trace of a run in the peer's order."""
        raise NotImplementedError


@dataclass(frozen=True)
class FrameworkPolicy(PeerPolicy):
    """A framework's order of single contexts."""

    order: Order = list

    def reordered(self, run: Run) -> ReorderedTrace:
        """Return the trace with each context in the framework's order."""
        started = time.perf_counter()
        requests = [replace(one, blocks=tuple(self.order(one.blocks))) for one in run.trace]
        planning_s = time.perf_counter() - started
        return ReorderedTrace(requests, 1e3 * planning_s / max(1, len(requests)))


def framework_policies(missing: list[str]) -> Iterator[MeasuredPolicy]:
    """Yield the frameworks' `LongContextReorder`: the best at the ends; name what is missing."""
    for title, package, make in (
        ("LangChain LongContextReorder", "langchain-community", _langchain_order),
        ("LlamaIndex LongContextReorder", "llama-index-core", _llamaindex_order),
    ):
        try:
            yield FrameworkPolicy(title, "none", "online", order=make())
        except ImportError:
            missing.append(f"{title} took no part: pip install {package}")


def _langchain_order() -> Order:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package says that nobody keeps it any more
        from langchain_community.document_transformers import LongContextReorder
    from langchain_core.documents import Document

    def reordered(blocks: Sequence[ContextBlock]) -> list[ContextBlock]:
        found = [Document(page_content="", metadata={"at": at}) for at in range(len(blocks))]
        shown = LongContextReorder().transform_documents(found)
        return [blocks[one.metadata["at"]] for one in shown]

    return reordered


def _llamaindex_order() -> Order:
    from llama_index.core.postprocessor import LongContextReorder
    from llama_index.core.schema import NodeWithScore, TextNode

    def reordered(blocks: Sequence[ContextBlock]) -> list[ContextBlock]:
        nodes = [
            NodeWithScore(node=TextNode(id_=str(at)), score=float(-at)) for at in range(len(blocks))
        ]
        shown = LongContextReorder().postprocess_nodes(nodes)
        return [blocks[int(one.node.node_id)] for one in shown]

    return reordered
