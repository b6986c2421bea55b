"""The server's routes: chat requests are planned and sent on; others are told plans."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from http.cookiejar import DefaultCookiePolicy
from itertools import chain
from threading import Thread
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ctxreuse.cache.telemetry import PlannerCollector
from ctxreuse.context.blocks import BlockId, ContextRequest
from ctxreuse.context.checks import checked_choice, checked_each, checked_kind
from ctxreuse.context.files import read_whole
from ctxreuse.context.lru_map import TenantLRUMap
from ctxreuse.context.reported_usage import usage_in
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import CtxreuseError, EngineError, InputFileError, InvalidRequestError
from ctxreuse.pipeline.engine_options import SESSION_HEADER, EngineOptions
from ctxreuse.pipeline.prompt_turn import PlannedPrompt
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan, keyed_digest
from ctxreuse.rules.answers import takes_salt
from ctxreuse.serving.door import chat_bodies, forwarding
from ctxreuse.serving.pool.engine_pool import EnginePool, host_of

ENGINE_KEY, KEYS_SECRET = "CTXREUSE_ENGINE_KEY", "CTXREUSE_KEYS_SECRET"
SETTINGS = "CTXREUSE_SERVE"  # in which worker processes find theirs, as JSON
_KEY_HEADERS = {"authorization", "x-api-key"}
_log = logging.getLogger("ctxreuse")
_NO_LIMITS = httpx.Limits(max_keepalive_connections=100)
_NO_PROMPT = ContextRequest(())
_MOST_CHARACTERS, _MOST_TURNS = 32_000_000, 64
_ROW = ("documents", "query", "conversation", "history", "template", "labels")
_FIELD = re.compile(r"(?:each of |there is no field ')?(\w+)(?: must|')")  # that an error names
_END = re.compile(
    rb"(?m)^(data: ?\[DONE\]|event: ?message_stop)"
)  # of OpenAI's, Anthropic's streams
_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
_KEPT_BACK = forwarding.HOP_BY_HOP | {
    *("host", "content-length", "accept-encoding", "cookie", "expect"),
    chat_bodies.CONVERSATION_HEADER,
}


def hashed_key(key: str, secret: str) -> str:
    """Return a key's hash, which tells nothing of it without the secret."""
    if not secret:
        raise InvalidRequestError(f"set {KEYS_SECRET}, which the hashes of API keys need")
    return keyed_digest(secret, "API key", key)


def read_keys(path: str, secret: str) -> dict[str, str] | None:
    """Return the tenants by the hashes of their keys; None without a file."""
    if not path:
        return None
    hashed = hashed_key("", secret)  # raises without a secret, before the first request
    text = read_whole(path)
    try:
        read = {bytes.fromhex(known).hex(): own for known, own in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        read = {}
    is_known = (len(one) == len(hashed) and own and type(own) is str for one, own in read.items())
    if not (read and all(is_known)):
        raise InputFileError(f'{path}: must be JSON, {{"hash of --hash-key": "tenant", ...}}')
    return read


class _Relay(StreamingResponse):
    """Sends an answer on as it comes, in a place that it gives back; a caller may go away."""

    def __init__(self, pieces: Any, places: asyncio.Semaphore, limit: asyncio.Timeout) -> None:
        super().__init__(pieces)
        self._pieces, self._places, self._limit = pieces, places, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._places.release()

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:
            async with self._limit:
                head = await anext(pieces)
            kind = head.headers.get("content-type", "")
            is_stream = kind.startswith("text/event-stream")
            self.status_code, self.body_iterator = head.status, _data_of(pieces, is_stream)
            self.init_headers(head.headers)
            try:
                await super().stream_response(send)
            except EngineError as error:  # no end is sent: the connection breaks, as it did
                _log.warning("an answer broke off: %s", error)


async def _data_of(pieces: AsyncIterator[Any], is_stream: bool) -> AsyncIterator[bytes]:
    """Yield an answer's bytes, the end when all is counted: whoever has read it may go away."""
    held = b""
    try:
        async for data in (one.data async for one in pieces if one.data):
            if not is_stream:
                data, held = held, data
            elif held or _END.search(data):  # all that follows belongs to the end
                data, held = b"", held + data
            yield data
    except EngineError:  # it breaks behind what has come
        yield held
        raise
    yield held


class _Door:
    """Plans what comes in, and sends it on to a pool of engines. For one event loop."""

    def __init__(self, planner: ReusePlanner, settings: Any) -> None:
        self.planner, self._settings = planner, settings
        self._places = asyncio.Semaphore(settings.concurrency)
        self._key, self._secret = (os.environ.get(one, "") for one in (ENGINE_KEY, KEYS_SECRET))
        self._tenants = read_keys(settings.keys, self._secret)
        self._http = httpx.AsyncClient(timeout=settings.timeout_s, limits=_NO_LIMITS)
        # an engine's cookies would go to it with the requests of other tenants
        self._http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))
        client = partial(
            forwarding.ForwardingClient,
            self._http,
            api_key=self._key or "EMPTY",
            timeout_s=settings.timeout_s,
        )
        engines = {host_of(one): partial(client, one) for one in settings.engines}
        # prompts have waited for each other before
        self.pool = EnginePool(
            engines, planner=planner, window_s=0.0, concurrency=settings.concurrency
        )
        self.pool._patience_s = settings.timeout_s  # no caller waits longer for a busy engine
        window_s = settings.window_ms / 1_000
        self._chats = chat_bodies.ChatPlanner(planner, "ctxreuse serve", window_s)
        salts = bool(settings.tenant_header or settings.keys) and takes_salt(planner.cache)
        cache = planner.wire_cache
        self._options = EngineOptions(cache, salts, False, SESSION_HEADER, self._secret)
        self._issued: TenantLRUMap[str, Plan] = TenantLRUMap(
            max_weight=_MOST_CHARACTERS, weight_of=lambda plan: 1_000 + len(plan.content)
        )
        self._turns: TenantLRUMap[BlockId, tuple[str, ...]] = TenantLRUMap(
            max_weight=_MOST_CHARACTERS, weight_of=lambda turns: sum(map(len, turns)) + 100
        )

    def routes(self) -> list[Route]:
        posts: Any = {"chat/completions": self.chat, "messages": self.chat, "forget": self.forget}
        posts |= {"plan": self.plan, "plans": self.plans, "usage": self.usage}
        gets: Any = {"healthz": self.health, "readyz": self.ready, "metrics": self.metrics}
        gets |= {"v1/models": self.models, "v1/savings": self.savings}
        return [
            *(Route(f"/v1/{path}", does, methods=["POST"]) for path, does in posts.items()),
            *(Route(f"/{path}", does) for path, does in gets.items()),
        ]

    async def chat(self, request: Request) -> ASGIApp:
        tenant, raw = self._tenant(request), await self._body(request)
        fields = _object(raw)
        # a caller's own would open another tenant's cache
        held = self._options.salts and fields.pop("cache_salt", None)
        body = chat_bodies.PromptBody.of(fields, request.headers)
        planned, written = await self._chats.planned(body, tenant)
        scope = RequestScope(tenant or None, body and body.conversation)
        groups = planned.groups if planned else ()
        added = self._options.added(groups, scope, {}, fields, {}).get("extra_body")
        if held or added or written is not None:
            raw = json.dumps({**(written or fields), **(added or {})}).encode()
        plan = planned.plans[0] if planned and planned.plans else None
        told = body and written and body.tells and body.told(plan, self.planner)
        # a later turn goes where its conversation is
        named, shown = scope.conversation_id, "".join(planned.texts if planned else ())
        turns = None if named is None else [{"role": "user", "content": shown}]
        later = ContextRequest((), history=turns, conversation_id=named, tenant=tenant)
        return await self._relayed(request, raw, planned, plan or later, told, fields.get("stream"))

    async def _relayed(
        self,
        request: Request,
        raw: bytes = b"",
        planned: PlannedPrompt | None = None,
        prompt: ContextRequest | Plan = _NO_PROMPT,
        told: object = None,
        streams: object = None,
    ) -> ASGIApp:
        if self._places.locked():
            self._chats.gateway.forget(planned)
            raise HTTPException(503, "too many requests at a time", {"retry-after": "1"})
        await self._places.acquire()  # waits for nobody
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        held = _KEPT_BACK | {self._settings.tenant_header.lower()}
        if self._key or self._settings.keys:  # the callers' keys are this server's
            held |= _KEY_HEADERS
        headers = {name: one for name, one in request.headers.items() if name not in held}
        if self._key:
            headers |= {"authorization": f"Bearer {self._key}", "x-api-key": self._key}
        limit = asyncio.timeout(self._settings.timeout_s)
        begins = limit if streams else None
        forward = forwarding.ForwardedRequest(request.method, path, raw, headers, begins, told)
        start = partial(self.pool.stream, prompt, forward=forward)
        pieces = self._chats.gateway.astream(planned, start)
        return _Relay(pieces, self._places, limit)

    async def plan(self, request: Request) -> Response:
        body, tenant = await self._read(request, *_ROW)
        asked = _asked(body, tenant)
        named = asked.conversation_id
        if named is None or asked.history is not None:
            return _json(self._issue(self.planner.plan(asked)))
        turns = self._turns.get(tenant, named) or ()
        history = tuple({"role": "user", "content": one} for one in turns)
        plan = self.planner.plan(replace(asked, history=history))
        self._turns.put(tenant, named, (*turns, plan.content)[-_MOST_TURNS:])
        return _json(self._issue(plan))

    async def plans(self, request: Request) -> Response:
        body, tenant = await self._read(request, "requests", "template", "primes")
        listed = checked_each("requests", body.get("requests"), dict, "an object")
        for name in chain(*listed):
            checked_choice("field", name, _ROW)
        asked = [_asked({"template": body.get("template"), **one}, tenant) for one in listed]
        primes = body.get("primes", False)
        # a large batch takes seconds
        planned = await asyncio.to_thread(self.planner.plan_batch, asked, primes=primes)
        issued = [self._issue(plan) for plan in planned.in_input_order()]
        return _json({"plans": issued, "order": list(planned.order)})

    def _issue(self, plan: Plan) -> dict[str, Any]:
        """Keep a plan until its usage is reported; return it as JSON."""
        self._issued.put(plan.request.tenant, str(plan.request_id), plan)
        return {
            "plan_id": plan.request_id,
            "order": [block.id for block in plan.blocks],
            "left_out": list(plan.references),
            "labels": dict(plan.labels),
            "annotation": plan.order_annotation,
            "text": plan.content,
            "expected_cached_tokens": plan.expected_cached_tokens,
            "primes": list(plan.primes),
        }

    async def usage(self, request: Request) -> Response:
        """Note what a provider counted of a plan's prompt, once."""
        body, tenant = await self._read(request, "plan_id", "usage")
        if (told := usage_in(body)) is None:
            raise InvalidRequestError("usage must be an answer's object of this name")
        plan = self._taken(body, tenant)
        if plan is not None:
            self.planner.report_usage(plan, **told._asdict())
        return _json({"known": plan is not None})

    async def forget(self, request: Request) -> Response:
        plan = self._taken(*await self._read(request, "plan_id"))
        if plan is not None:
            self.planner.forget(plan)
            named, tenant = plan.request.conversation_id, plan.request.tenant
            if named is not None and (turns := self._turns.get(tenant, named)):
                left = tuple(one for one in turns if one != plan.content)
                self._turns.put(tenant, named, left)
        return _json({"known": plan is not None})

    def _taken(self, body: Mapping[str, Any], tenant: str) -> Plan | None:
        name = checked_kind("plan_id", body.get("plan_id"), str, "a plan's plan_id")
        return self._issued.pop(tenant, name)

    async def models(self, request: Request) -> ASGIApp:
        self._tenant(request)
        return await self._relayed(request)

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        states = {one.name: one.state for one in self.pool.statistics()}
        return _json({"engines": states}, 200 if self.pool.available() else 503)

    async def savings(self, request: Request) -> Response:
        self._tenant(request)
        savings, seen = self.planner.savings, self._chats.gateway.statistics()
        return _json({"words": str(savings), "in_place": seen.in_place, **savings.as_json()})

    async def metrics(self, request: Request) -> Response:
        registry = CollectorRegistry()
        # its engines' planners see what is planned already: they would count it once more
        pool: Any = SimpleNamespace(planners={}, statistics=self.pool.statistics)
        PlannerCollector(self.planner, pool).register(registry)
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def _read(self, request: Request, *fields: str) -> tuple[dict[str, Any], str]:
        tenant, body = self._tenant(request), _object(await self._body(request))
        for name in body:
            checked_choice("field", name, fields)
        return body, tenant

    async def _body(self, request: Request) -> bytes:
        most, read = self._settings.max_body_bytes, bytearray()
        async with asyncio.timeout(self._settings.timeout_s):
            async for data in request.stream():
                read += data
                if len(read) > 2 * most:
                    break
        if len(read) > most:  # read a little further, so that the caller reads why
            raise HTTPException(413, f"the request has more than {most:,} bytes")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # pages of any origin can send others
            raise InvalidRequestError("the content-type of the body must be application/json")
        return bytes(read)

    def _tenant(self, request: Request) -> str:
        """Return who asks: by a header, or by the key; raise a 401 for an unknown key."""
        headers = request.headers
        if self._tenants is None:
            return headers.get(self._settings.tenant_header, "")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if (tenant := self._tenants.get(hashed_key(given, self._secret))) is None:
            raise HTTPException(401, "this API key is not known here")
        return tenant


def make_app(planner: ReusePlanner, settings: Any) -> ASGIApp:
    """Return the server as an ASGI application; `settings` has the fields of the command."""
    door = _Door(planner, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(door.pool.watch())
        # what other processes have sent, from the first request on
        await asyncio.gather(asyncio.to_thread(planner.catch_up, 1.0), door.pool.catch_up(1.0))
        yield
        watching.cancel()
        await door.pool.aclose()
        await door._http.aclose()

    kinds = CtxreuseError, ClientDisconnect, HTTPException, TimeoutError, Exception
    handlers: Any = dict.fromkeys(kinds, _told)
    return Starlette(lifespan=lifespan, routes=door.routes(), exception_handlers=handlers)


def app_of_environment() -> ASGIApp:
    """Return the application that the command `ctxreuse serve` has described, for one process."""
    settings = SimpleNamespace(**json.loads(os.environ[SETTINGS]))
    if parent := multiprocessing.parent_process():  # who is killed ends no workers
        Thread(target=_end_with, args=(parent,), daemon=True).start()
    return make_app(ReusePlanner(cache=settings.cache), settings)


def _end_with(parent: Any) -> None:
    parent.join()
    signal.raise_signal(signal.SIGTERM)


def _asked(body: Mapping[str, Any], tenant: str) -> ContextRequest:
    documents = chat_bodies.read_documents(body.get("documents"), body.get("template"))
    return ContextRequest(
        documents,
        body.get("query", ""),
        conversation_id=body.get("conversation"),
        history=body.get("history"),
        tenant=tenant,
        labels=body.get("labels"),
        request_id=f"plan-{uuid4().hex}",  # unlike those of other processes, and of other tenants
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the body is no JSON") from None
    return checked_kind("the body", parsed, dict, "a JSON object")


def _json(fields: Mapping[str, Any], status: int = 200, headers: Any = None) -> Response:
    return Response(json.dumps(fields), status, headers, "application/json")


def _told(request: Request, error: Exception) -> Response:
    """Return an error in the words of OpenAI's and Anthropic's protocols; an engine's as it is."""
    status, words, headers = 500, "an internal error, which the server's log names", {}
    # a redirect would take the prompt, and the caller's key, elsewhere
    if isinstance(error, forwarding.RefusedError) and error.response.status_code >= 400:
        return Response(error.body, error.response.status_code, error.headers)
    if isinstance(error, HTTPException):
        status, words, headers = error.status_code, error.detail, dict(error.headers or {})
        if status == 404:
            words = f"{request.url.path[:100]!r} is not served here; send it to the engine itself"
    elif isinstance(error, ClientDisconnect):
        status, words = 499, "the caller has gone away"
    elif isinstance(error, TimeoutError):
        status, words = 504, "no answer has begun in time"
    elif isinstance(error, EngineError):
        status, words = 503 if error.retry_after_s else 502, str(error).partition("; ")[0]
        headers = {"retry-after": f"{error.retry_after_s:.0f}"} if error.retry_after_s else {}
    elif isinstance(error, CtxreuseError):
        status, words = 400, chat_bodies.json_words(error)
    named = _FIELD.match(words)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    about = {"message": words, "type": kind, "param": named and named[1], "code": None}
    return _json({"type": "error", "error": about}, status, headers)
