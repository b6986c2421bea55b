"""Policies: the ways to order the blocks of requests that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal, TypeAlias, get_args

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.policy.paper import Paper
from ctxreuse.policy.view import Policy
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules
from ctxreuse.sharing.environment import as_given

TraceMode: TypeAlias = Literal["online", "offline"]


@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """One way to order the requests' blocks."""

    name: str
    strategy: Strategy | Policy
    mode: TraceMode
    is_scheduled: bool = True
    is_annotated: bool = True
    is_marked: bool = True
    is_primed: bool = False
    keep_best: bool = False

    def planner(
        self, *, deduplicate: bool, capacity_tokens: int | None, cache: CacheRules = DEFAULT_CACHE
    ) -> ReusePlanner:
        """Return a planner for an engine or a provider whose cache is empty."""
        return as_given(
            ReusePlanner,
            annotate=None if self.is_annotated else False,
            labels=self.labels(deduplicate=deduplicate),
            deduplicate=deduplicate,
            capacity_tokens=capacity_tokens,
            cache=cache,
            keep_best=self.keep_best,
        )

    @property
    def order_name(self) -> str:
        """The name of the order."""
        return self.strategy if isinstance(self.strategy, str) else self.strategy.name

    def labels(self, *, deduplicate: bool) -> bool | None:
        """Return whether its prompts show labels: everywhere, or nowhere, so that all can share."""
        return None if self.strategy == "reuse" else deduplicate


AS_SENT = MeasuredPolicy("as retrieved", "none", "online")
PAPERS_ONLINE = MeasuredPolicy("papers' order, online", Paper(), "online")
PAPERS_BATCH = MeasuredPolicy("papers' order, batch", Paper(), "offline")
OURS_ONLINE = MeasuredPolicy("ctxreuse, online", "reuse", "online")
OURS_BATCH = MeasuredPolicy("ctxreuse, batch", "reuse", "offline")
PRIMED = (
    MeasuredPolicy("ctxreuse, online, primed", "reuse", "online", is_primed=True),
    MeasuredPolicy("ctxreuse, batch, primed", "reuse", "offline", is_primed=True),
)
TODAY = MeasuredPolicy("as sent today", "none", "online", is_marked=False)
POLICIES = (AS_SENT, PAPERS_ONLINE, PAPERS_BATCH, OURS_ONLINE, OURS_BATCH)


def own_policies(named: Sequence[str]) -> tuple[MeasuredPolicy, ...]:
    """Return the policies that `module:Class` names, each online and as one batch."""
    tried: list[MeasuredPolicy] = []
    for one in named:
        module, _, name = one.partition(":")
        try:
            policy = getattr(import_module(module), name)()
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise InvalidRequestError(
                f"the policy {describe(one)} cannot be made ({type(error).__name__}: {error}); "
                "name a class as module:Class, of a module that Python finds from here, which is "
                "made without arguments"
            ) from error
        if not isinstance(policy, Policy):
            raise InvalidRequestError(
                f"{describe(one)} is no policy; derive it from ctxreuse.policy.Policy"
            )
        modes = zip(("online", "batch"), get_args(TraceMode), strict=True)
        tried += (MeasuredPolicy(f"{policy.name}, {way}", policy, mode) for way, mode in modes)
    return tuple(tried)


def tried_policies(cache: CacheRules, *, keep_best: bool = False) -> tuple[MeasuredPolicy, ...]:
    """Return what is measured with a cache; our own may keep the retriever's best in front."""
    tried = (*POLICIES, *(PRIMED if cache.takes_primes else ()))
    if cache.lives:
        tried = (*((TODAY,) if cache.marks else ()), AS_SENT, OURS_ONLINE, OURS_BATCH)
    return tuple(replace(one, keep_best=keep_best and one.strategy == "reuse") for one in tried)


def check_own_engine(cache: CacheRules, options: str, *given: object) -> None:
    """Raise InvalidRequestError where options that only an engine has are given for a bill."""
    if cache.lives and any(one is not None and one not in ((), []) for one in given):
        raise InvalidRequestError(
            f"{options} are an engine's, and {cache.name!r} is a provider's cache; leave them out"
        )
