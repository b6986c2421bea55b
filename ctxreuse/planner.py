"""The front door of the core: requests in, plans out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from ctxreuse.context.blocks import BlockId, ContextBlock, ContextRequest, Message, checked_blocks
from ctxreuse.context.checks import (
    checked_choice,
    checked_each,
    checked_id,
    checked_integer,
    checked_kind,
    checked_list,
    checked_number,
    checked_optional_integer,
    checked_path,
    reported_count,
)
from ctxreuse.context.copies import FixedSettings, made_with
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.errors import (
    CtxreuseError,
    InputFileError,
    InvalidRequestError,
    UnknownStrategyError,
    describe,
)
from ctxreuse.memory.prefix_index import Evicted, IndexStatistics
from ctxreuse.memory.sent_log import KeyedDigests, SentEntry, SentWords, ToldEntry
from ctxreuse.planning.conversation import Conversation
from ctxreuse.planning.plan import (
    AnsweredCall,
    BatchPlan,
    GroupRates,
    HearsAnswers,
    Plan,
    Strategy,
    Tracing,
    group_of,
)
from ctxreuse.planning.prompt_records import PromptRecords
from ctxreuse.planning.savings import Mode, Savings
from ctxreuse.planning.savings_meter import SavingsMeter, TenantClasses
from ctxreuse.planning.shadow_mode import ShadowPlanner
from ctxreuse.planning.tenant_planner import PlannerSettings, PlanOptions, TenantPlanner
from ctxreuse.policy.as_retrieved import AS_RETRIEVED
from ctxreuse.policy.paper import Paper
from ctxreuse.policy.reuse import REUSE
from ctxreuse.policy.view import Policy
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules, cache_profile
from ctxreuse.sharing.environment import as_given, settled
from ctxreuse.sharing.exchange import Exchange, SharedLog, SharedLogs, SharingStatistics

__all__ = ["Mode", "ReusePlanner", "Strategy", "check_strategy"]

_STRATEGIES = get_args(Strategy)
_A_REQUEST = "a ContextRequest; build one with ContextRequest(blocks=[...], query='...')"
_JOINING_S = 0.5
_log = logging.getLogger("ctxreuse")


class ReusePlanner(FixedSettings):
    r"""Plans what to send so that the engine's prefix cache hits.

    The same requests in the same order give the same plans in any process. Threads and asyncio
    tasks may share a planner; run a large `plan_batch`, which takes seconds, in a thread. A copy or
    a pickle is a new planner with these settings; a forked process goes on with what is planned.

    Args:
        alpha: Weight of the ranks in the papers' distance (Equation 1); only for "paper".
        token_counter: A function from text to tokens, which threads may call at the same time, a
            tokenizer, or None for an estimate that engines' reports correct.
        capacity_tokens: Tokens that the engine's cache holds, where it does not report evictions.
        templates: The words of labels and annotations.
        deduplicate: Whether blocks that a conversation shows already become references.
        annotate: Whether the model is told of a changed order. None: unless `keep_best` is set.
        labels: Whether prompts show blocks under labels, to be cited. None: only where later turns
            or words of `templates` may refer to them.
        mode: "active", or "shadow": all is sent as retrieved, and `savings` says what planning
            would save. Where this, `capacity_tokens` or `shared_log` is None, `CTXREUSE_*` holds.
        shared_log: Where planners of other processes with the same engine tell what they have sent;
            planning never fails because of it, and waits for it once, half a second at most.
        tenant_class: From a tenant to the class that `savings` counts it in, as a function or a
            mapping; at most 16, and "other".
        tracing: Is told what is planned and answered: `ctxreuse.cache.telemetry.PlannerSpans`.
        cache: A `CacheRules`, or what `cache_profile` reads: "anthropic(minimum=4096)". None is
            vLLM's.
        keep_best: Whether the retriever's best block stays in front, for models that weigh what
            they read first: half the savings for documents. Only for "reuse".

    Raises:
        InvalidRequestError: wrong type or out of range; so do all methods.

    Example:
        >>> planner = ReusePlanner()
        >>> request = ContextRequest(blocks=["first text", "second text"], query="Which?")
        >>> planner.plan(request).messages()[-1]["content"]
        'first text\n\nsecond text\n\nWhich?'
    """

    def __init__(
        self,
        *given: object,
        alpha: float = 0.001,
        token_counter: Any = None,
        capacity_tokens: int | None = None,
        templates: Templates = DEFAULT_TEMPLATES,
        deduplicate: bool = True,
        annotate: bool | None = None,
        labels: bool | None = None,
        mode: Mode | None = None,
        shared_log: SharedLog | None = None,
        tenant_class: TenantClasses | None = None,
        tracing: Tracing | None = None,
        cache: CacheRules | str | None = None,
        keep_best: bool = False,
    ) -> None:
        if given:
            raise InvalidRequestError(
                f"settings are given by name, not as {describe(given[0])}: "
                "ReusePlanner(capacity_tokens=100_000)"
            )
        if mode is not None:
            checked_choice("mode", mode, get_args(Mode))
        mode, capacity_tokens, shared_log, self._is_told = settled(
            mode, checked_optional_integer("capacity_tokens", capacity_tokens), shared_log
        )
        checked_kind("keep_best", keep_best, bool, "True or False")
        checked_kind("annotate", annotate, (bool, NoneType), "True, False or None")
        self._mode: Mode = mode
        self._settings = PlannerSettings(
            alpha=checked_number("alpha", alpha),
            token_counter=token_counter,
            capacity_tokens=capacity_tokens,
            templates=checked_kind("templates", templates, Templates, "ctxreuse.Templates"),
            deduplicate=deduplicate,
            annotate=not keep_best if annotate is None else annotate,
            labels=checked_kind("labels", labels, (bool, NoneType), "True, False or None"),
            cache=DEFAULT_CACHE if cache is None else cache_profile(cache),
            keep_best=keep_best,
        )
        policies = REUSE, Paper(self._settings.alpha), AS_RETRIEVED
        self._policies = {one.name: one for one in policies}
        self.entries_expire = self._settings.cache.lifetime is not None
        rate = self._settings.cache.key_rate
        self._rates = None if rate is None else GroupRates(rate)
        self._shared_log = shared_log
        self._exchange: Exchange | None = None
        if shared_log is not None:
            self._exchange = Exchange(_checked_log(shared_log, mode), self._take_in)
        self._joins = True
        self._tenant_class = tenant_class
        self._meter = SavingsMeter(mode, self._settings, tenant_class, is_alone=shared_log is None)
        self._planning: TenantPlanner
        self._secret: bytes | None = None  # of what it was loaded from
        self._given_marks: tuple[int, ...] | None = None  # chosen; of provisional plans none
        if mode == "shadow":
            self._planning = ShadowPlanner(self._settings, self._meter)
        else:
            self._planning = TenantPlanner(self._settings, self._exchange)
        if tracing is not None:
            wanted = "a ctxreuse.cache.telemetry.PlannerSpans, or an object with its methods"
            checked_kind("tracing", tracing, Tracing, wanted)
        self._tracing = tracing
        self.prompt_records = PromptRecords()
        self.prompt_follower: Any = None  # a `KVEventSync`, which is told of answered prompts
        self.capacity_tracker: HearsAnswers | None = None
        self._counting = FailOpen("ReusePlanner", "requests go on all the same", work="counting")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        strict: bool = False,
        missing_ok: bool = False,
        **settings: Any,
    ) -> ReusePlanner:
        """Return a planner that goes on from a file of `save`.

        Args:
            path: The file; its key stands beside it, in `.key`.
            strict: Whether a damaged or newer file is an error; else it is logged, and left out.
            missing_ok: Whether the planner starts empty where there is no file, as at first.
            **settings: As for `ReusePlanner`, without `shared_log`.

        Raises:
            InputFileError: there is no file; it cannot be read, and `strict` is set.
        """
        planner, file = cls(**settings), checked_path("path", path)
        if planner._savable() is not None:
            planner._restore(file, strict, missing_ok)
        return planner

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was sent of late, but no conversations, into a file for `load`.

        It holds keyed digests of at most 200,000 blocks, and no text; its key stands beside it, in
        `.key`. Both have mode 0600, and the file is replaced as a whole.

        Raises:
            InvalidRequestError: the planner shares a log, or is in shadow mode; the key is
                another's.
            InputFileError: it cannot be written, or its folder does not exist.
        """
        from ctxreuse.sharing.secret_file import kept_secret
        from ctxreuse.sharing.snapshot import write_snapshot

        file = checked_path("path", path)
        planning = self._savable()
        if planning is None:
            return
        secret = kept_secret(file, self._secret, InputFileError)
        if self._secret not in (None, secret):
            raise InvalidRequestError(
                f"the key beside {file} belongs to another planner; name another file, or delete "
                "the key and the file"
            )
        write_snapshot(file, secret, planning.replay(KeyedDigests(secret)))

    def _restore(self, path: Path, strict: bool, missing_ok: bool) -> None:
        from ctxreuse.sharing.snapshot import read_snapshot

        try:
            secret, entries = read_snapshot(path)
        except FileNotFoundError as error:
            if not missing_ok:
                raise InputFileError(
                    f"there is no file {path}; name one that save has written, or pass "
                    "missing_ok=True to start empty"
                ) from error
            _log.info("there is no file %s yet; this planner starts empty", path)
            return
        except CtxreuseError as error:
            if strict:
                raise
            _log.error("%s. This planner starts empty.", error)
            return
        planning = TenantPlanner(self._settings, KeyedDigests(secret))
        planning.restore(entries)
        for entry in entries:
            if isinstance(entry, SentEntry):
                self._meter.note(entry)
        self._planning, self._secret = planning, secret

    def _savable(self) -> TenantPlanner | None:
        """Return what is saved and loaded; None where the environment has it that nothing is."""
        problem = (
            "a planner with a shared_log starts from that: call catch_up(), not save or load"
            if self._exchange is not None
            else "a planner in shadow mode sends everything as retrieved, so there is nothing to "
            'save or load; take mode="active"'
        )
        if self._exchange is None and self._mode == "active":
            return self._planning
        if not self._is_told:
            raise InvalidRequestError(problem)
        _log.warning("CTXREUSE_* is set, so no file is saved or loaded: %s", problem)
        return None

    @property
    def savings(self) -> Savings:
        """What planning has saved or, in shadow mode, would have saved; what engines reported."""
        return self._meter.savings()

    @property
    def labels(self) -> bool | None:
        """Whether prompts show blocks under labels; None where that depends on the request."""
        return self._settings.labels

    @property
    def templates(self) -> Templates:
        """The words of labels and annotations."""
        return self._settings.templates

    @property
    def cache(self) -> CacheRules:
        """The rules and prices of the prefix cache that is planned for."""
        return self._settings.cache

    @property
    def wire_cache(self) -> CacheRules:
        """The rules by which requests are marked and keyed; in shadow mode they are not."""
        return DEFAULT_CACHE if self._mode == "shadow" else self._settings.cache

    @property
    def shared_log(self) -> SharedLog | None:
        """The log shared with planners of other processes; None if this one plans alone."""
        return self._shared_log

    @property
    def mode(self) -> Mode:
        """Whether it plans, or only counts what planning would do."""
        return self._mode

    @property
    def counts_tokens(self) -> bool:
        """Whether a token counter was given, so that tokens are not estimated."""
        return self._settings.token_counter is not None

    def plan(
        self,
        request: ContextRequest,
        strategy: Strategy | Policy = "reuse",
        *,
        deduplicate: bool | None = None,
        now: float | None = None,
        primes: bool = False,
    ) -> Plan:
        """Plan one request that has just arrived.

        Args:
            request: What the application is about to send.
            strategy: "reuse", "paper" (Algorithms 1 and 2), "none" (as retrieved), or a
                `ctxreuse.policy.view.Policy` of your own.
            deduplicate: As in `ReusePlanner`; None is the planner's own setting.
            now: Seconds on a clock that never goes back, for caches whose entries expire; None
                takes all as alive. Planners that share a log or a file need one clock:
                `time.time()`.
            primes: Whether calls may be sent besides, up to where later requests will likely part
                from it: `Plan.primes`. Where states are kept at junctions, that saves tokens.

        Raises:
            UnknownStrategyError: there is no such strategy.
            InvalidRequestError: wrong type, or primes for a cache with prices.
        """
        if not isinstance(request, ContextRequest):
            checked_kind("a request", request, ContextRequest, _A_REQUEST)
        policy = self._policy(strategy)
        if now is not None:
            checked_number("now", now)
        began = time.perf_counter()
        if primes is not False:
            self._check_primes(primes)
        options = PlanOptions(deduplicate, now, self._given_marks, primes)
        plan = self._planning.plan(request, policy, options)
        if self._rates is not None:
            plan = self._sharded(plan, now)
        self._note_planned((plan,), time.perf_counter() - began)
        return plan

    def preview(
        self, request: ContextRequest, *, deduplicate: bool | None = None, now: float | None = None
    ) -> Plan:
        """Return what `plan` would, and record nothing; without request id and cached tokens."""
        checked_kind("a request", request, ContextRequest, _A_REQUEST)
        checked_number("now", 0 if now is None else now)
        return self._planning.plan(request, REUSE, PlanOptions(deduplicate, now), is_preview=True)

    def plan_batch(
        self,
        requests: Iterable[ContextRequest],
        strategy: Strategy | Policy = "reuse",
        *,
        deduplicate: bool | None = None,
        now: float | None = None,
        primes: bool = False,
    ) -> BatchPlan:
        """Plan requests that are known together; return the plans in execution order.

        Arguments are those of `plan`. "paper" is Algorithms 4 and 5; "none" keeps the order of the
        batch. Turns of one conversation have to come in their order. With `primes` it is planned
        for calls that are sent besides (`BatchPlan.primes`), where states are kept at junctions.

        Raises:
            BatchTooLargeError: the papers' algorithm cannot hold the batch; others as by `plan`.
        """
        words = "a list of ContextRequest; use plan() for a single one"
        batch = checked_list("requests", requests, words)
        for position, request in enumerate(batch):
            checked_kind(f"a request at position {position}", request, ContextRequest, _A_REQUEST)
        policy = self._policy(strategy)
        checked_number("now", 0 if now is None else now)
        self._check_primes(primes)
        began = time.perf_counter()
        options = PlanOptions(deduplicate, now, self._given_marks, primes)
        planned = self._planning.plan_batch(batch, policy, options)
        plans = tuple([self._sharded(plan, now) for plan in planned.plans])
        planned = BatchPlan(plans, planned.order)
        self._note_planned(planned.in_input_order(), time.perf_counter() - began)
        return planned

    def _check_primes(self, primes: bool) -> None:
        if checked_kind("primes", primes, bool, "True or False") and self.cache.lives:
            raise InvalidRequestError(
                f"primes cost money, and {self.cache.name!r} has prices; leave out primes=True"
            )

    def _policy(self, strategy: Strategy | Policy) -> Policy:
        if isinstance(strategy, Policy):
            return strategy
        if strategy not in _STRATEGIES:
            check_strategy(strategy)
        return self._policies[strategy]

    def _sharded(self, plan: Plan, now: float | None) -> Plan:
        if self._rates is None or now is None:
            return plan
        return replace(plan, shards=self._rates.shards(group_of(plan), now))

    def report_usage(
        self,
        plans: Plan | Iterable[Plan],
        prompt_tokens: int | None,
        cached_tokens: int | None = None,
        *,
        completion_tokens: int | None = None,
        written_tokens: int | Mapping[str, int] | None = None,
        seconds: float | None = None,
        tenant: str | None = None,
        through: str | None = None,
    ) -> None:
        """Note what the engine reports of an answered prompt, for `savings` and token estimates.

        `EngineClient`, `EnginePool` and the wrappers around models call it.

        Args:
            plans: The plans of the contexts in the prompt; none for one without any.
            prompt_tokens: Tokens of the prompt, cached and written ones included; None is unknown.
            cached_tokens: Those that came from the prefix cache; None is unknown.
            completion_tokens: Tokens of the answer, for traces.
            written_tokens: Those written into the cache, all or by time to live ("5m", "1h").
            seconds: How long the call took, for traces.
            tenant: Whose prompt it was; None takes that of the first plan.
            through: What sent it, as "openai", for traces; None is unknown.
        """
        given = (
            (plans,) if isinstance(plans, Plan) else checked_each("plans", plans, Plan, "a Plan")
        )
        written = self._written(written_tokens)
        prompt, cached = reported_count(prompt_tokens), reported_count(cached_tokens)
        if prompt is not None and (cached or 0) > prompt:  # which means nothing
            cached = None
        answered = AnsweredCall(
            plans=tuple(given),
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=reported_count(completion_tokens),
            seconds=None if seconds is None else checked_number("seconds", seconds),
            written_tokens=None if written is None else sum(written.values()),
            through=checked_kind("through", through, (str, NoneType), "a text or None"),
        )
        if _checked_tenant(tenant) is None:
            tenant = given[0].request.tenant if given else ""
        self._counting.attempt(
            lambda: self._count_answer(
                answered, tenant or "", written or {}, is_told=cached_tokens is not None
            )
        )

    def _written(self, told: int | Mapping[str, int] | None) -> dict[str, int] | None:
        """Return written tokens by time to live; those without one have the profile's own."""
        by_life = told if isinstance(told, Mapping) else {"": told}
        own = self._settings.cache.time_to_live.name
        counts = {life or own: reported_count(count) for life, count in by_life.items()}
        known = {str(life): count for life, count in counts.items() if count is not None}
        return known if known or told == {} else None

    def report_primes(self, plan: Plan, calls: int, computed_tokens: int) -> None:
        """Note the primes sent for a plan, and the tokens computed by them; see `report_usage`."""
        checked_kind("plan", plan, Plan, "a Plan")
        checked_integer("calls", calls)
        checked_integer("computed_tokens", computed_tokens)
        tenant = plan.request.tenant
        self._counting.attempt(lambda: self._meter.primed(tenant, calls, computed_tokens))

    def note_unreported(self, call: AnsweredCall, tenant: str) -> None:
        """Note an answer without usage; for wrappers around models."""
        self._counting.attempt(lambda: self._meter.unreported(tenant))
        if (tracing := self._tracing) is not None:
            self._counting.attempt(lambda: tracing.answered(call))

    def note_failure(self) -> None:
        """Count a prompt that was sent as it came because planning failed; for adapters."""
        self._counting.attempt(lambda: self._meter.besides(planning_failures=1))

    def note_without_context(self, prompts: int) -> None:
        """Count prompts in which no context was found; for wrappers around models."""
        checked_integer("prompts", prompts)
        self._counting.attempt(lambda: self._meter.besides(prompts_without_context=prompts))

    def evict(self, request_ids: Iterable[str | int], tenant: str | None = None) -> Evicted:
        """Tell the planner that the engine dropped these requests from its cache.

        Args:
            request_ids: Ids as given to or returned by the planner; unknown ones are reported.
            tenant: Whose they are; None takes the only tenant that has an id, and else reports it.
        """
        given = checked_list("request_ids", request_ids, "a list of ids")
        ids = [checked_id("a request id", one) for one in given]
        return self._note_evicted(self._planning.evict(ids, _checked_tenant(tenant)))

    def forget(self, sent: Plan | str | int, tenant: str | None = None) -> bool:
        """Take back a request that was not sent, or not answered: nothing of it is in the cache.

        Args:
            sent: Its plan, or its id.
            tenant: Of an id: as for `evict`.

        Returns:
            Whether it was known.
        """
        if isinstance(sent, Plan):
            if sent.logged is not None:
                counted = sent.logged.counted
                self._counting.attempt(lambda: self._meter.taken_back(counted))
            tenant, sent = sent.request.tenant, sent.request_id
        gone = self._planning.evict([checked_id("a request id", sent)], _checked_tenant(tenant))
        if self._given_marks is not None:
            self._meter.besides(unseen=-gone.requests)
        else:
            self._note_evicted(gone)
        return gone.requests > 0

    def evict_tokens(self, tokens: int) -> Evicted:
        """Tell the planner that the engine dropped this many block tokens, the least recently used.

        Whole blocks leave the index, some only when a running call of another thread ends.
        """
        evicted = self._planning.evict_tokens(checked_integer("tokens", tokens))
        if evicted.tokens:
            self._counting.attempt(lambda: self._meter.note(~self.statistics().tokens))
        return evicted

    def trim(self, request_id: str | int, blocks: int, tenant: str | None = None) -> Evicted:
        """Tell the planner that the engine holds only the first `blocks` of a request's blocks.

        The others leave the index, with what other requests sent behind them.
        """
        checked_id("request_id", request_id)
        blocks = checked_integer("blocks", blocks)
        evicted = self._planning.evict([request_id], _checked_tenant(tenant), blocks)
        return self._note_evicted(evicted)

    def count_tokens(self, text: str) -> int:
        """Return a text's length in tokens, counted or estimated as blocks are."""
        return self._planning.count_tokens(checked_kind("text", text, str, "a string"))

    def block_tokens(self, blocks: Iterable[ContextBlock], tenant: str = "") -> int:
        """Return how many tokens the index counts for a tenant's blocks."""
        checked_kind("tenant", tenant, str, "a string")
        return self._planning.block_tokens(checked_blocks("blocks", blocks), tenant)

    def cached_tokens(self, request: ContextRequest, *, in_order: bool = False) -> int:
        """Return how many block tokens of a request are expected in the cache; 0 with a history.

        The blocks stay in the request's order if `in_order` is set; else they have the best one.
        """
        checked_kind("a request", request, ContextRequest, _A_REQUEST)
        return 0 if request.history else self._planning.cached_tokens(request, in_order=in_order)

    def sibling(self, engine: str | None = None) -> ReusePlanner:
        """Return a planner with these settings that has seen nothing, for an engine of the log."""
        make, args, options = self.__reduce__()[1]
        if engine is not None and self._shared_log is not None:
            words = (
                "an object with of_engine(name), as SQLiteLog and RedisLog have, where there are "
                "several engines"
            )
            logs = checked_kind("shared_log", self._shared_log, SharedLogs, words)
            checked_kind("engine", engine, str, "an engine's name or None")
            options["shared_log"] = logs.of_engine(engine)
        made: ReusePlanner = make(*args, **options)
        made._is_told = self._is_told
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return made_with(
            as_given,
            ReusePlanner,
            **vars(self._settings),
            mode=self._mode,
            shared_log=self._shared_log,
            tenant_class=self._tenant_class,
            tracing=self._tracing,
        )

    @property
    def sharing(self) -> SharingStatistics:
        """What became of what this planner and others told each other; zeros if it plans alone."""
        if self._exchange is None:
            return SharingStatistics(faults=int(not self.catch_up(0)))
        return self._exchange.statistics()

    def catch_up(self, timeout_s: float = 10.0) -> bool:
        """Wait until the shared log is taken in; return whether it is, in `timeout_s` seconds."""
        checked_number("timeout_s", timeout_s)
        if self._exchange is None:  # the environment may name one that cannot be used
            return not self._is_told or self._mode == "shadow"
        return self._exchange.catch_up(timeout_s)

    def words_of(self, tenant: str) -> SentWords:
        """Return what a tenant's prompts say around contexts; for wrappers."""
        return self._planning.words_of(checked_kind("tenant", tenant, str, "a string"))

    def edit_of(self, tenant: str, message: bytes) -> bytes | None:
        """Return how a wrapper sent a message, by its digest; None if that is not known."""
        checked_kind("tenant", tenant, str, "a string")
        checked_kind("message", message, bytes, "bytes")
        edit = self._planning.edit_of(tenant, message)
        if edit is None and self._joins and self._exchange is not None:
            self._joins = False  # once: what others have sent is read before the first history
            self._exchange.catch_up(_JOINING_S)
            edit = self._planning.edit_of(tenant, message)
        return edit

    def note_edit(self, tenant: str, messages: Sequence[bytes], edit: bytes) -> None:
        """Remember how a wrapper sends a message that has some digests: no text, but an edit."""
        checked_kind("tenant", tenant, str, "a string")
        checked_kind("edit", edit, bytes, "bytes")
        self._planning.note_edit(tenant, checked_each("messages", messages, bytes, "bytes"), edit)

    @property
    def provisional(self) -> ReusePlanner:
        """This planner, for plans of which nobody knows what becomes of them.

        They are known to it as any others; `savings` only says how many, and they set no marks.
        """
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _given_marks=())
        return twin

    def conversation(
        self, conversation_id: str | int, tenant: str = "", system: str | None = None
    ) -> Conversation:
        """Start a conversation that keeps its own messages, with a system message's text."""
        return Conversation(self.plan, self.without_blocks, conversation_id, tenant, system)

    def end_conversation(self, conversation_id: str | int, tenant: str = "") -> bool:
        """Forget what a conversation was shown; return whether it was known."""
        checked_id("conversation_id", conversation_id)
        checked_kind("tenant", tenant, str, "a string")
        return self._planning.end_conversation(conversation_id, tenant)

    def shown_blocks(self, request: ContextRequest) -> dict[str, ContextBlock]:
        """Return the blocks that stand in a request's history, by label, such as for `outdated`."""
        checked_kind("a request", request, ContextRequest, _A_REQUEST)
        return self._planning.shown_blocks(request)

    def without_blocks(
        self,
        messages: Iterable[Message],
        block_ids: Iterable[BlockId],
        conversation_id: str | int,
        tenant: str = "",
    ) -> list[dict[str, Any]]:
        """Return copies of a conversation's messages without the texts of blocks with these ids."""
        history = ContextRequest((), history=messages).history or ()
        ids = [checked_id("a block id", one) for one in checked_list("block_ids", block_ids, "ids")]
        checked_id("conversation_id", conversation_id)
        checked_kind("tenant", tenant, str, "a string")
        return self._planning.without_blocks(history, ids, conversation_id, tenant)

    def statistics(self) -> IndexStatistics:
        """Return the size of all that the planner remembers; running plans may not count."""
        return self._planning.statistics()

    def _note_planned(self, plans: Sequence[Plan], seconds: float) -> None:
        try:
            if self._given_marks is not None:
                self._meter.besides(unseen=len(plans))
            else:
                self._meter.planned(plans, seconds)
            if self._tracing is not None:
                self._tracing.planned(plans, seconds)
        except Exception as error:
            self._counting.note(error)

    def _note_evicted(self, evicted: Evicted) -> Evicted:
        self._counting.attempt(lambda: self._meter.note(evicted.tokens))
        return evicted

    def _count_answer(
        self, answered: AnsweredCall, tenant: str, written: Mapping[str, int], *, is_told: bool
    ) -> None:
        before, plans = 0, answered.plans
        system = plans[0].request.system if answered.expected_cached_tokens else None
        if system:  # it is cached if any block is, and counted once
            before = self._planning.block_tokens([ContextBlock(text=system)], tenant, system)
        if len(answered.plans) == 1 and answered.prompt_tokens:
            self._planning.note_length(answered.plans[0], answered.prompt_tokens)
        warning = self._meter.answered(answered, tenant, before, written, is_told=is_told)
        if warning is not None:
            _log.warning("%s", warning)
        for one in (self.capacity_tracker, self._tracing):
            if one is not None:
                one.answered(answered)

    def _take_in(self, entry: ToldEntry) -> None:
        self._planning.take_in(entry)
        if isinstance(entry, SentEntry):
            self._meter.note(entry)


def check_strategy(strategy: object) -> str:
    """Return a strategy, or raise UnknownStrategyError if there is no such one."""
    return checked_choice("strategy", strategy, _STRATEGIES, error=UnknownStrategyError)


def _checked_tenant(tenant: str | None) -> str | None:
    return checked_kind("tenant", tenant, (str, NoneType), "a string")


def _checked_log(shared_log: object, mode: Mode) -> SharedLog:
    if mode == "shadow":
        raise InvalidRequestError(
            "a planner in shadow mode sends everything as retrieved, so it has nothing to "
            "share; leave shared_log out"
        )
    wanted = "a ctxreuse.sharing.SQLiteLog or RedisLog, or an object with their methods"
    return checked_kind("shared_log", shared_log, SharedLog, wanted)
