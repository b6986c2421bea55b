"""Policies that a benchmark compares: this package's, the papers', and the frameworks' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.evaluation.plugins import (
    BASELINES,
    NotInstalledError,
    naming_what_is_missing,
    registered,
)
from ctxreuse.evaluation.replay.policies import Policy, Reorder, ReorderedTrace
from ctxreuse.evaluation.traces.trace_files import TraceRequest

ReorderBlocks: TypeAlias = Callable[[Sequence[ContextBlock]], Sequence[ContextBlock]]


def framework_policies(missing: list[str]) -> Iterator[Policy]:
    """Yield the frameworks' own orders, such as LangChain's and LlamaIndex's `LongContextReorder`.

    Both put the best at the ends: Liu et al., "Lost in the Middle" (2023).

    Args:
        missing: Takes what is not installed, in words.
    """
    for name, entry in registered(BASELINES).items():
        title = name.replace(".", " ")
        try:
            with naming_what_is_missing():
                reorder = entry.load()()
        except NotInstalledError as error:
            missing.append(f"{title} took no part: pip install {error.package}")
            continue
        yield Policy(title, "none", "online", reorder=_each(reorder))


def chosen(policies: Sequence[Policy], names: Sequence[str]) -> list[Policy]:
    """Return the policies of these names, and the first, with which they are compared.

    Raises:
        InvalidRequestError: There is no policy of a name.
    """
    known = [policy.name for policy in policies]
    for name in names:
        if name not in known:
            raise InvalidRequestError(
                f"there is no policy {describe(name)}; there are: {'; '.join(known)}"
            )
    first, *others = policies
    return [first, *(one for one in others if one.name in names)]


def _each(reorder_blocks: ReorderBlocks) -> Reorder:
    def reorder(trace: Sequence[TraceRequest], deduplicate: bool) -> ReorderedTrace:
        started = time.perf_counter()
        requests = [replace(one, blocks=tuple(reorder_blocks(one.blocks))) for one in trace]
        planning_s = time.perf_counter() - started
        return ReorderedTrace(requests, 1e3 * planning_s / max(1, len(trace)))

    return reorder
