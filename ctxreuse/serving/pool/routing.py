"""Routing: a request goes to the engine that is expected to have computed its prompt first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeAlias
from weakref import ref

from ctxreuse.context.blocks import ContextRequest, text_digest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantLRUMap
from ctxreuse.context.rendering import message_texts
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import EngineError
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.pool.admission import Plannable
from ctxreuse.serving.pool.placement import rendezvous_order
from ctxreuse.serving.pool.replica import Replica

_ANSWER_COST = 144
"""What an answer of 96 tokens delays others, in prompt tokens: 0.15 ms each, at 10,000 tokens/s."""
_TOKENS_PER_S = 10_000
"""What a second of waiting for a busy engine costs, in prompt tokens that another could compute."""
_REMEMBERED_CONVERSATIONS = 10_000

_ServedBy: TypeAlias = tuple[ref[Replica], int]
"""Which replica has served a conversation last, and the epoch of its cache then."""


class RequestRouter:
    """Chooses among replicas by what they are expected to have cached, and by their queues."""

    def __init__(self, queue_weight: float, in_order: bool) -> None:
        self._queue_weight = queue_weight
        self._in_order = in_order  # whether requests are sent in their own order
        self._lock = ForkSafeLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._served_by: TenantLRUMap[bytes, _ServedBy] = TenantLRUMap(_REMEMBERED_CONVERSATIONS)

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered, and how much may be; all tenants together."""
        with self._lock:
            return {"conversations": self._served_by.size}

    def choose(
        self,
        replicas: Iterable[Replica],
        prompt: Plannable,
        wanted: str | None = None,
        tried: Collection[str] = (),
    ) -> Replica:
        """Return the wanted candidate, or the best; among equals the first block decides."""
        by_name: dict[Any, Replica] = {one.name: one for one in candidates(replicas, tried)}
        if wanted in by_name and wanted not in tried and not by_name[wanted].busy_s:
            return by_name[wanted]
        if not by_name:
            raise EngineError(
                "no engine of the pool may be sent anything: all are draining; call resume() or "
                "add()",
                attempts=0,
            )
        request = request_of(prompt)
        seed = request.blocks[0].key if request.blocks else text_digest(request.query)
        scores = {
            name: self._cached_tokens(replica, prompt)
            - self._queue_weight * replica.queued_tokens
            - _TOKENS_PER_S * replica.busy_s
            for name, replica in by_name.items()
        }
        return by_name[max(rendezvous_order(seed, by_name), key=scores.__getitem__)]

    def to_compute(self, replica: Replica, prompt: Plannable) -> int:
        """Return what a request would cost a replica, in prompt tokens, its answer included."""
        request = request_of(prompt)
        tokens = replica.block_tokens(prompt, request.tenant)
        tokens += estimate_tokens(request.query) + _history_tokens(request)
        return max(0, tokens - self._cached_tokens(replica, prompt)) + _ANSWER_COST

    def note(self, request: ContextRequest, replica: Replica) -> None:
        """Remember which replica has served a conversation: it has cached the history."""
        if request.conversation_id is not None:
            with self._lock:
                served_by = ref(replica), replica.cache_epoch
                self._served_by.put(request.tenant, _conversation(request), served_by)

    def _cached_tokens(self, replica: Replica, prompt: Plannable) -> int:
        request = request_of(prompt)
        if request.history:
            with self._lock:
                served_by = self._served_by.of(request.tenant).peek(_conversation(request))
            is_cached = served_by == (ref(replica), replica.cache_epoch)
            return _history_tokens(request) if is_cached else 0
        if isinstance(prompt, Plan):
            as_sent = ContextRequest(prompt.blocks, system=request.system, tenant=request.tenant)
            return replica.cached_tokens(as_sent, in_order=True)
        return replica.cached_tokens(request, in_order=self._in_order)


def candidates(replicas: Iterable[Replica], tried: Collection[str]) -> list[Replica]:
    """Return where a request may go: never to a draining replica, to an open circuit if it must."""
    staying = [one for one in replicas if not one.is_draining]
    usable = [one for one in staying if one.is_available] or staying
    return [one for one in usable if one.name not in tried] or usable


def request_of(prompt: object) -> ContextRequest:
    """Return the request of what is to be sent; raise InvalidRequestError for another type."""
    if isinstance(prompt, Plan):
        return prompt.request
    return checked_kind("a prompt", prompt, ContextRequest, "a ContextRequest or a Plan")


def _history_tokens(request: ContextRequest) -> int:
    messages = request.history or ()
    return sum(estimate_tokens(text) for message in messages for text in message_texts(message))


def _conversation(request: ContextRequest) -> bytes:
    """Return what stands for a conversation: ids may be long, and 1 is not "1"."""
    return text_digest(repr(request.conversation_id))
