"""A client for engines that speak OpenAI's protocol; it tells what each prompt cost."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args

from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.context.checks import (
    check_function,
    checked_choice,
    checked_header,
    checked_kind,
    reported_count,
)
from ctxreuse.context.copies import FixedSettings, OnePerProcess
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.engine_options import (
    REQUEST_HEADER,
    SESSION_HEADER,
    EngineOptions,
    checked_cache_salt,
    request_header,
)
from ctxreuse.pipeline.leader_first import CallsInFlight, PrefixUse
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan, shard_of
from ctxreuse.rules.answers import id_fields, streams_token_ids
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules
from ctxreuse.serving.aio.concurrency import AsyncClosing, TimeLimit
from ctxreuse.serving.client.connection import (
    EngineConnection,
    EngineFact,
    TokenIdCalls,
    client_library_errors,
    status_of,
    without,
)
from ctxreuse.serving.client.own_calls import PrimeCall, Primer
from ctxreuse.serving.client.reply import (
    AnthropicReplyReader,
    BrokenReplyError,
    Completion,
    ReplyReader,
    field_of,
)
from ctxreuse.serving.client.request import (
    CompletionStream,
    EngineCall,
    Prompt,
    Protocol,
    check_params,
    messages_of,
    prompt_fields,
)

if TYPE_CHECKING:
    from ctxreuse.cache.kv_events.event_sync import KVEventSync


_log = logging.getLogger("ctxreuse")
_WORD = re.compile(r"\w+")
_OWN_FIELDS = ("return_token_ids", "rid")
_REFUSED = "%s refuses the field %s, which is not sent to it any more"


class EngineClient(FixedSettings, OnePerProcess, AsyncClosing):
    """Sends plans to an OpenAI-compatible engine, asks for streams, and measures each request.

    Broken connections, 429 and 5xx are tried again, with growing random waits, until the caller has
    got a piece of the answer. The planner is told of a request that fails or is cancelled.

    Args:
        base_url: The engine's address, with or without `/v1`.
        model: The model's name; None takes `lora` or asks the engine.
        api_key: Its key; vLLM takes any unless it was started with one.
        planner: Is told of failed requests, and of the usage of answers.
        events: Is told which tokens a prompt had, for engines that report evictions.
        lora: The LoRA adapter that `model` is, if any, for `events`. A call with another `model=`
            counts as without.
        http_client: An `httpx.AsyncClient` of your own, which you close, and which serves one
            process only; None makes one.
        retries: How often a request is sent again.
        backoff_s: Longest wait before the first retry, in seconds; it doubles with each.
        timeout_s: Seconds for a request, all attempts and waits included, but not what the caller
            does between two pieces of a stream. None waits.
        max_reply_bytes: The longest reply that is read; a longer one is broken.
        cache_salt: "tenant" sends a hash of each plan's tenant as vLLM's `cache_salt`; with
            "anthropic", to an engine only whose `/openapi.json` names it.
        session_id: What a router keeps on one engine: "conversation" sends a hash of tenant and
            conversation, "group" the affinity id of the plan's prefix group.
        session_header: The header of the session id, such as "x-smg-routing-key".
        protocol: "openai" for chat completions, "anthropic" for messages.
        salt_key: A secret for all hashes; processes that share it share the cache.
        clock: Seconds from any start.

    Raises:
        MissingExtraError: `openai` or `tenacity` is not installed.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str = "EMPTY",
        planner: ReusePlanner | None = None,
        events: KVEventSync | None = None,
        lora: str | None = None,
        http_client: Any = None,
        retries: int = 2,
        backoff_s: float = 0.5,
        timeout_s: float | None = 600.0,
        max_reply_bytes: int = 64 * 2**20,
        cache_salt: Literal["tenant"] | None = None,
        session_id: Literal["conversation", "group"] | None = None,
        session_header: str = SESSION_HEADER,
        protocol: Protocol = "openai",
        salt_key: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        checked_kind("planner", planner, (ReusePlanner, NoneType), "a ReusePlanner")
        checked_kind("lora", lora, (str, NoneType), "an adapter's name")
        for name, value, known in (
            ("cache_salt", cache_salt, ("tenant",)),
            ("session_id", session_id, ("conversation", "group")),
        ):
            if value is not None and value not in known:
                raise InvalidRequestError(
                    f"{name} must be {' or '.join(map(repr, known))} or None, not "
                    f"{describe(value)}; a literal one goes into complete(..., {name}=...)"
                )
        checked_choice("protocol", protocol, get_args(Protocol))
        self._protocol: Protocol = protocol
        self._session_header = checked_header("session_header", session_header)
        self._connection = EngineConnection(
            base_url, api_key, http_client, retries, backoff_s, timeout_s, max_reply_bytes
        )
        self._primer = Primer(self._connection)
        self._model = EngineFact(lora if model is None else model, self._connection.first_model)
        always = "cache_salt" if protocol == "openai" else None
        self._salt_field = EngineFact(always, self._connection.salt_field)
        self._lora = lora
        self._planner = planner
        self._events = events
        if events is not None:
            events.expect()
        self._options = cache_salt is not None, session_id, self._session_header, salt_key
        self._clock = clock
        self._has_reported = False  # cached tokens
        self._refused = set[str]()  # fields
        self._in_flight = CallsInFlight()
        self._bookkeeping = FailOpen(
            "EngineClient", "the answer is returned all the same", work="bookkeeping"
        )
        self._token_ids = TokenIdCalls(self._bookkeeping)

    @property
    def faults(self) -> int:
        """How often the bookkeeping after an answer has failed; the answers were returned."""
        return self._bookkeeping.faults

    async def complete(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        session_id: str | None = None,
        on_first_token: Callable[[], object] | None = None,
        leader_first: bool | None = None,
        **params: Any,
    ) -> Completion:
        """Send a prompt and wait for the whole answer.

        Args:
            prompt: A plan, or chat messages.
            cache_salt: vLLM's `cache_salt` for this request, instead of the tenant's.
            session_id: The session id of this request, instead of the conversation's.
            on_first_token: Called when the first token has come; it must not raise.
            leader_first: Whether to wait, 3 seconds at most, for the first token of another call
                that is about to write a prefix which this one shares; None: for hosted caches only.
            **params: What `chat.completions.create`, or Anthropic's messages, take.

        Raises:
            EngineError: the engine did not answer; the cause is the library's error.
        """
        call = self._call(prompt, cache_salt, session_id, params, on_first_token, leader_first)
        limit = self._connection.time_limit()
        with self._reporting(call):
            await self._wait_for_leader(call)
            await limit.wait_for(self._sent(call, limit, whole=True))
            return self._completed(call)

    def stream(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        session_id: str | None = None,
        leader_first: bool | None = None,
        **params: Any,
    ) -> CompletionStream:
        """Return the answer's pieces as they come; arguments as in `complete`.

        Iterate inside `async with`, so that a request whose answer is left early is cancelled at
        once.
        """
        call = self._call(prompt, cache_salt, session_id, params, None, leader_first)
        stream = CompletionStream()
        stream.pieces, stream.drop = self._stream(call, stream), partial(self._drop, call)
        return stream

    async def prime(
        self,
        plan: Plan,
        *,
        cache_salt: str | None = None,
        session_id: str | None = None,
        **params: Any,
    ) -> list[CacheUsage]:
        """Send a plan's primes, before the plan itself; what fails costs nothing but itself.

        Only plans of `plan_batch(requests, primes=True)` have some. Further arguments as in
        `complete`: tools, fields and headers are a prime's, too.

        Returns:
            The tokens of each call that was answered.

        Raises:
            InvalidRequestError: primes with Anthropic's protocol.
        """
        checked_kind("plan", plan, Plan, "a Plan")
        given = self._call(plan, cache_salt, session_id, params).arguments
        if not plan.primes:
            return []
        if self._protocol != "openai":
            raise InvalidRequestError(
                "primes go out by OpenAI's protocol only; plan without primes=True"
            )
        headers = without(given["extra_headers"], REQUEST_HEADER)  # a prime has an id of its own
        fields = without({**given["extra_body"], "tools": given.get("tools")}, *_OWN_FIELDS)
        fields["model"] = given.get("model") or await self.model()
        whole, rules = plan.messages(), plan.cache
        fronts = [plan.front(blocks) for blocks in plan.primes]
        primes = [PrimeCall(whole, front, rules, fields, headers) for front in fronts]
        calls = await self._primer.send_all(primes)
        if self._planner is not None and calls:
            computed = sum(one.prefilled_tokens for one in calls)
            self._planner.report_primes(plan, len(calls), computed)
        return calls

    async def model(self) -> str:
        """Return the model's name, given or the engine's first; EngineError if it is silent."""
        return await self._model.get()

    async def check_health(self) -> None:
        """Raise EngineError unless the engine is ready (vLLM's `/health`)."""
        await self._connection.ask("GET", "/health")

    async def context_window(self) -> int | None:
        """Return the engine's `max_model_len` in tokens, None without; EngineError if silent."""
        models = await self._connection.ask_json("GET", "/v1/models")
        return reported_count(field_of(models, "data", 0, "max_model_len")) or None

    async def metrics(self) -> PrefixCacheMetrics:
        """Return what the engine's `/metrics` say of its prefix cache; EngineError if silent."""
        return PrefixCacheMetrics.parse(await self._connection.ask("GET", "/metrics"))

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Return a prompt's tokens as the engine sees them; EngineError without `/tokenize`."""
        body = {"model": await self.model(), "messages": messages_of(prompt)}
        return tuple(await self._connection.token_ids(body))

    def forget(self, plan: Plan) -> None:
        """Tell the planner that a plan's prompt is not in the engine's cache."""
        checked_kind("plan", plan, Plan, "a Plan")
        if self._planner is not None:
            self._planner.forget(plan)

    async def aclose(self) -> None:
        """Close the connections, unless an `http_client` of yours has them."""
        for asking in [*self._token_ids.running]:
            asking.cancel()
        await self._connection.aclose()

    def _call(
        self,
        prompt: Prompt,
        cache_salt: str | None,
        session_id: str | None,
        params: Mapping[str, Any],
        on_first_token: Callable[[], object] | None = None,
        leader_first: bool | None = None,
    ) -> EngineCall:
        check_params(params)
        checked_kind("leader_first", leader_first, (bool, NoneType), "True, False or None")
        if session_id is not None:
            checked_header("session_id", session_id)
        check_function("on_first_token", on_first_token)
        plan = prompt if isinstance(prompt, Plan) else None
        own = {name: params.get(name) or {} for name in ("extra_body", "extra_headers")}
        body, headers = dict[str, Any](), dict[str, Any]()
        if plan is not None:
            body, headers = self._added(plan, params, *own.values())
        if (salt := checked_cache_salt(cache_salt)) is not None:
            body["cache_salt"] = salt
        if session_id is not None:
            headers[self._session_header] = session_id
        arguments = {
            **params,
            **prompt_fields(prompt, self._protocol, params.get("tools") or ()),
            "stream": True,
            "stream_options": {**(params.get("stream_options") or {}), "include_usage": True},
            "extra_body": {**body, **own["extra_body"]},
            "extra_headers": {**headers, **own["extra_headers"]},
        }
        reads: Callable[[], ReplyReader] = ReplyReader
        if self._protocol == "anthropic":
            del arguments["stream_options"]
            reads = AnthropicReplyReader
            if "max_tokens" not in params:
                raise InvalidRequestError(
                    "Anthropic's protocol needs max_tokens, the longest answer; pass "
                    "complete(..., max_tokens=1024)"
                )
        use = None if plan is None or leader_first is False else PrefixUse.of(plan, leader_first)
        return EngineCall(plan, arguments, on_first_token, reads, use)

    def _added(self, plan: Plan, *own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        rules = plan.cache if self._protocol == "openai" else DEFAULT_CACHE
        scope = RequestScope(plan.request.tenant, plan.request.conversation_id)
        options = EngineOptions(rules, *self._options)
        groups = [shard_of(plan)] if rules.is_routed or options.sessions == "group" else []
        told = options.added(groups, scope, *own)
        names = request_header(plan.request_id)
        fields: dict[str, Any] = told.get("extra_body", {})
        if names:
            fields |= id_fields(plan.cache, *names.values())
        if self._events is not None and streams_token_ids(plan.cache):
            fields["return_token_ids"] = True
        return without(fields, *self._refused), {**told.get("extra_headers", {}), **names}

    async def _wait_for_leader(self, call: EngineCall) -> None:
        """Wait until the call that this one follows has begun to be answered; let others wait."""
        use = call.use
        if use is not None:
            call.in_flight = self._in_flight.enter(use)
            await call.in_flight.wait()

    async def _pieces(self, call: EngineCall, model: str) -> AsyncGenerator[str]:
        """Send the request once; yield the answer's pieces."""
        arguments = {"model": model, **call.arguments}
        call.begin(self._clock())
        reader = call.reader
        async with aclosing(self._taken(arguments)) as reply:
            async for received in reply:
                for text in reader.take(received):
                    if reader.has_token and call.first_token_at is None:
                        call.first_token_at = self._clock()
                        if call.in_flight is not None:  # those that wait for it go on
                            call.in_flight.begin()
                        if call.on_first_token is not None:
                            call.on_first_token()
                    if text:
                        yield text
                if reader.has_ended:
                    break
        reader.end()

    async def _taken(self, arguments: dict[str, Any]) -> AsyncGenerator[bytes]:
        """Yield the reply; send again without the fields of ours that a refusal names, for good."""
        has_begun, own = False, arguments["extra_body"]
        while True:
            try:
                async with aclosing(self._connection.reply(self._protocol, arguments)) as reply:
                    async for received in reply:
                        has_begun = True
                        yield received
                return
            except client_library_errors() as error:
                words = set(_WORD.findall(str(error))) if status_of(error) == 400 else ()
                named = [name for name in _OWN_FIELDS if name in own and name in words]
                if has_begun or not named:
                    raise
                for name in named:
                    del own[name]
                    if name not in self._refused:
                        self._refused.add(name)
                        _log.warning(_REFUSED, self._connection.host, name)

    async def _sent(
        self, call: EngineCall, limit: TimeLimit, *, whole: bool
    ) -> tuple[AsyncGenerator[str], str | None]:
        """Send the request until it begins, or is answered as a whole; return where it stands."""
        if "cache_salt" in call.arguments["extra_body"]:
            await self._salt_field.get()
        model = await self.model()
        async for attempt in self._connection.attempts(limit):
            with attempt:
                pieces = self._pieces(call, model)
                piece = await anext(pieces, None)
                while whole and piece is not None:
                    piece = await anext(pieces, None)
                return pieces, piece
        raise AssertionError("tenacity makes at least one attempt")

    async def _stream(self, call: EngineCall, stream: CompletionStream) -> AsyncGenerator[str]:
        """Yield the answer's pieces; send the request again only until the first one is there."""
        limit = self._connection.time_limit()
        with self._reporting(call):
            await self._wait_for_leader(call)
            pieces, piece = await limit.wait_for(self._sent(call, limit, whole=False))
            async with aclosing(pieces):
                while piece is not None:
                    yield piece
                    piece = await limit.wait_for(anext(pieces, None))
            stream.answer = self._completed(call)

    def _completed(self, call: EngineCall) -> Completion:
        reader, ended = call.reader, self._clock()
        cached, usage = None, reader.usage
        if reader.has_odd_counts:
            self._bookkeeping.note(BrokenReplyError("counts that cannot be right are unknown"))
        else:
            cached = usage.cached_tokens
            self._has_reported |= cached is not None
            # many versions of vLLM leave the count out where no token was cached
            if cached is None and self._has_reported and usage.prompt_tokens is not None:
                cached = 0
        first_token = ended if call.first_token_at is None else call.first_token_at
        completion = Completion(
            text=reader.text,
            request_id=reader.reply_id if call.plan is None else call.plan.request_id,
            finish_reason=reader.finish_reason or "",
            **usage._replace(cached_tokens=cached)._asdict(),
            miss=reader.miss,
            time_to_first_token_s=first_token - call.attempt_began_at,
            total_s=ended - call.began_at,
            attempts=call.attempts,
            prompt_token_ids=reader.prompt_token_ids,
            tool_calls=reader.tool_calls,
        )
        self._bookkeeping.attempt(lambda: self._note(call, completion))
        return completion

    def _note(self, call: EngineCall, completion: Completion) -> None:
        if self._planner is not None:
            usage = call.reader.usage._replace(cached_tokens=completion.cached_tokens)
            if call.reader.has_odd_counts:
                usage = usage._replace(prompt_tokens=None)
            told, seconds = usage._asdict(), completion.total_s
            self._planner.report_usage(call.plan or (), **told, seconds=seconds, through="")
        plan, events = call.plan, self._events
        if plan is None or events is None:
            return
        own = call.arguments.get("model")  # an adapter is asked for by its name
        record = partial(
            events.record,
            plan,
            cache_salt=call.arguments["extra_body"].get("cache_salt"),
            lora=self._lora if own in (None, self._lora) else None,
        )
        if completion.prompt_token_ids is not None:
            record(completion.prompt_token_ids)
        elif self._protocol != "openai" or streams_token_ids(plan.cache):
            host = self._connection.host
            self._token_ids.note_none(f"{host} returns no token ids (vLLM does since 0.11)")
        else:
            ask = partial(self._tell_ids, call.arguments, plan.cache, record)
            self._token_ids.start(ask, lambda work: asyncio.create_task(work()))

    async def _tell_ids(
        self, sent: Mapping[str, Any], rules: CacheRules, record: Callable[[Sequence[int]], None]
    ) -> None:
        fields = without(sent["extra_body"], *_OWN_FIELDS)
        fields |= {name: sent.get(name) for name in ("model", "messages", "tools")}
        headers = without(sent["extra_headers"], REQUEST_HEADER)
        record(await self._connection.token_ids(fields, headers, rules))

    @contextmanager
    def _reporting(self, call: EngineCall) -> Iterator[None]:
        """Map the libraries' errors to EngineError; tell the planner of any error."""
        try:
            yield
        except BaseException as error:
            self._drop(call)
            if isinstance(error, client_library_errors()):
                raise self._connection.error(error, call.attempts) from error
            raise
        finally:
            if call.in_flight is not None:  # those that wait for a first token go on
                call.in_flight.give_up()

    def _drop(self, call: EngineCall) -> None:
        plan = call.plan
        if plan is not None:
            self._bookkeeping.attempt(lambda: self.forget(plan))
