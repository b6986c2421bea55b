"""The server's routes: chat requests are planned and sent on; plans for those who send themselves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.checks import checked_kind
from ctxreuse.errors import CtxreuseError, EngineError, InvalidRequestError
from ctxreuse.pipeline.engine_options import REQUEST_HEADER, tenant_salt
from ctxreuse.pipeline.model_gateway import ModelGateway
from ctxreuse.pipeline.prompt_turn import PlannedPrompt
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.door.chat_bodies import ChatBody, ShownDocuments, read_documents, sent_fields
from ctxreuse.serving.door.forwarding import Forward, ForwardingClient, Piece, RefusedError
from ctxreuse.serving.pool.engine_pool import EnginePool

_log = logging.getLogger("ctxreuse")
_CHAT, _MESSAGES = "/v1/chat/completions", "/v1/messages"
_CONVERSATION = "x-conversation-id"
_TELL = "x-ctxreuse-plan"
_PASSED = ("content-type", "accept", "anthropic-version", "anthropic-beta", "x-request-id", "user-agent")
_KEYS = ("authorization", "x-api-key")
_TYPES = {400: "invalid_request_error", 413: "invalid_request_error", 503: "overloaded_error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """How the server serves.

    Attributes:
        engines: Their addresses, with or without `/v1`.
        api_key: The key that engines get; "" passes the caller's on.
        tenant_header: The header in which a trusted gateway names the tenant; "" for none.
        cache_salt: Whether engines keep tenants apart by vLLM's `cache_salt`.
        window_s: Seconds for which a prompt waits for others to be planned with.
        concurrency: Requests that are served at a time; more are refused with 503.
        max_body_bytes: The largest request that is read.
        timeout_s: Seconds for an answer's next bytes; None waits.
        max_reply_bytes: The longest answer.
    """

    engines: Sequence[str]
    api_key: str = ""
    tenant_header: str = ""
    cache_salt: bool = False
    window_s: float = 0.0
    concurrency: int = 1_000
    max_body_bytes: int = 32 << 20
    timeout_s: float = 600.0
    max_reply_bytes: int = 256 << 20


class ServedError(Exception):
    """What a caller is told instead of an answer."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Door:
    """Plans what comes in, and sends it on to a pool of engines. For one event loop."""

    def __init__(self, planner: ReusePlanner, settings: DoorSettings) -> None:
        import httpx

        self.planner, self._settings = planner, settings
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self._http = httpx.AsyncClient(timeout=settings.timeout_s, limits=limits)
        key = settings.api_key or "EMPTY"
        connect = partial(
            ForwardingClient,
            http=self._http,
            api_key=key,
            max_reply_bytes=settings.max_reply_bytes,
            timeout_s=settings.timeout_s,
        )
        self.pool = EnginePool(
            {address: partial(connect, address) for address in settings.engines},
            planner=planner,
            window_s=settings.window_s,
            concurrency=settings.concurrency,
        )
        self._gateway = ModelGateway(
            planner, "reuse", settings.window_s, "ctxreuse serve", "", lambda piece: piece.usage
        )
        self._shown = ShownDocuments(planner.templates)
        self._serving = 0

    async def aclose(self) -> None:
        """Close the connections."""
        await self.pool.aclose()
        await self._http.aclose()

    async def chat(self, request: Request) -> Response:
        """Plan a chat request's documents, send it on, and give the answer back as it is."""
        raw = await self._body(request)
        tenant, headers = self._tenant(request), request.headers
        body = ChatBody.of(_parsed(raw), headers.get(_CONVERSATION), tells=_TELL in headers)
        planned: PlannedPrompt | None = None
        if body is not None:
            given = self._shown.given(body, tenant)
            planned = await self._gateway.aplan(given.prompt)
            fields = sent_fields(body.fields, given, planned, self.planner.cache)
            salt = tenant_salt(tenant) if self._settings.cache_salt else None
            if salt is not None:
                fields.setdefault("cache_salt", salt)
            raw = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
        plan = planned.plans[0] if planned is not None and planned.plans else None
        forward = Forward(request.url.path, raw, self._passed_on(request, plan))
        prompt = ContextRequest((), tenant=tenant) if plan is None else plan
        pieces = self._gateway.astream(planned, lambda: self._sent(prompt, forward))
        return await self._answered(request, pieces)

    async def plan(self, request: Request) -> Response:
        """Plan documents for a caller that sends the prompt itself."""
        body = checked_kind("the body", _parsed(await self._body(request)), dict, "an object")
        given = read_documents(body.get("documents"), body.get("template"))
        asked = ContextRequest(
            [ContextBlock(id=one.id, text=one.text) for one in given],
            body.get("query", ""),
            conversation_id=body.get("conversation"),
            history=body.get("history"),
            tenant=self._tenant(request),
            labels=body.get("labels"),
        )
        plan = self.planner.plan(asked)
        return JSONResponse(
            {
                "plan_id": plan.request_id,
                "order": [block.id for block in plan.blocks],
                "left_out": list(plan.references),
                "labels": dict(plan.labels),
                "annotation": plan.order_annotation,
                "text": plan.rendered(),
                "expected_cached_tokens": plan.expected_cached_tokens,
            }
        )

    async def forget(self, request: Request) -> Response:
        """Take back a plan whose prompt was not sent."""
        body = checked_kind("the body", _parsed(await self._body(request)), dict, "an object")
        known = self.planner.forget(body.get("plan_id"), self._tenant(request))
        return JSONResponse({"forgotten": known})

    async def models(self, request: Request) -> Response:
        """Give what the engines say of their models."""
        found: dict[str, Any] = {}
        for address in self._settings.engines:
            asked = await self._get(request, address, "/v1/models")
            for one in asked.get("data", []) if isinstance(asked, dict) else []:
                found.setdefault(str(one.get("id")), one)
        return JSONResponse({"object": "list", "data": list(found.values())})

    async def health(self, request: Request) -> Response:
        """Say that the server runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Say whether an engine can be sent anything."""
        states = {one.name: one.state for one in self.pool.statistics()}
        status = 200 if self.pool.available() else 503
        return JSONResponse({"engines": states}, status)

    async def savings(self, request: Request) -> Response:
        """Say what was saved so far."""
        savings = self.planner.savings
        return JSONResponse({"savings": str(savings)})

    async def metrics(self, request: Request) -> Response:
        """Give metrics as Prometheus reads them."""
        from prometheus_client import CollectorRegistry, generate_latest

        from ctxreuse.cache import PlannerCollector

        registry = CollectorRegistry()
        PlannerCollector(self.planner).register(registry)
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def _get(self, request: Request, address: str, path: str) -> Any:
        root = address.rstrip("/").removesuffix("/v1")
        try:
            answer = await self._http.get(f"{root}{path}", headers=self._keys(request))
            return answer.json()
        except Exception:  # one engine that is silent, or lies, hides no other
            return None

    async def _sent(self, prompt: ContextRequest | Plan, forward: Forward) -> AsyncGenerator[Any]:
        async def pieces() -> AsyncGenerator[Any]:
            async with self.pool.stream(prompt, forward=forward) as answer:
                async for piece in answer:
                    yield piece

        return pieces()

    async def _answered(self, request: Request, pieces: AsyncGenerator[Piece]) -> Response:
        """Wait for an answer's head, unless the caller goes away; give the answer back."""
        begun = asyncio.ensure_future(anext(pieces))
        gone = asyncio.ensure_future(_gone(request))
        await asyncio.wait((begun, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not begun.done():
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
            await pieces.aclose()
            raise ClientDisconnect
        head = (await begun).head
        assert head is not None, "an answer begins with its head"

        async def data() -> AsyncGenerator[bytes]:
            async with aclosing(pieces):
                async for piece in pieces:
                    if piece.data:
                        yield piece.data

        return StreamingResponse(data(), head.status, head.headers)

    async def _body(self, request: Request) -> bytes:
        most, read = self._settings.max_body_bytes, bytearray()
        async for data in request.stream():
            read += data
            if len(read) > most:
                raise ServedError(413, f"the request has more than {most:,} bytes")
        return bytes(read)

    def _tenant(self, request: Request) -> str:
        name = self._settings.tenant_header
        return request.headers.get(name, "") if name else ""

    def _keys(self, request: Request) -> dict[str, str]:
        """Return the headers that name who asks the engine."""
        key = self._settings.api_key
        if key:
            return {"authorization": f"Bearer {key}", "x-api-key": key}
        return {name: one for name in _KEYS if (one := request.headers.get(name))}

    def _passed_on(self, request: Request, plan: Plan | None) -> dict[str, str]:
        passed = {name: one for name in _PASSED if (one := request.headers.get(name))}
        if plan is not None:
            passed.setdefault(REQUEST_HEADER.lower(), str(plan.request_id))
        return {**passed, **self._keys(request)}


def make_app(planner: ReusePlanner, settings: DoorSettings) -> Starlette:
    """Return the server as an ASGI application."""
    door = Door(planner, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        yield
        await door.aclose()

    def route(path: str, handler: Callable[[Request], Any], method: str = "GET") -> Route:
        return Route(path, _guarded(door, handler), methods=[method])

    return Starlette(
        lifespan=lifespan,
        routes=[
            route(_CHAT, door.chat, "POST"),
            route(_MESSAGES, door.chat, "POST"),
            route("/v1/plan", door.plan, "POST"),
            route("/v1/forget", door.forget, "POST"),
            route("/v1/models", door.models),
            route("/v1/savings", door.savings),
            route("/healthz", door.health),
            route("/readyz", door.ready),
            route("/metrics", door.metrics),
        ],
    )


def _guarded(door: Door, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Return a handler that tells every error in the words of the engines' protocol."""

    async def handled(request: Request) -> Response:
        try:
            answer: Response = await handler(request)
            return answer
        except RefusedError as error:  # as the engine says it
            return Response(error.body, error.head.status, error.head.headers)
        except ServedError as error:
            return _told(error.status, str(error))
        except InvalidRequestError as error:
            return _told(400, str(error))
        except EngineError as error:
            return _told(503 if error.status is None else 502, str(error))
        except ClientDisconnect:
            return Response(status_code=499)
        except CtxreuseError as error:
            return _told(500, str(error))

    return handled


def _told(status: int, words: str) -> JSONResponse:
    kind = _TYPES.get(status, "api_error")
    return JSONResponse({"error": {"message": words, "type": kind, "code": None, "param": None}}, status)


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise ServedError(400, "the body is no JSON") from None


async def _gone(request: Request) -> None:
    """Wait until the caller goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
