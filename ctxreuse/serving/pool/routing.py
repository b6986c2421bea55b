"""Where a request goes: to the engine that is expected to have computed its prompt first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple, TypeAlias
from weakref import ref

from ctxreuse.context.blocks import ContextRequest, text_digest
from ctxreuse.context.rendering import message_texts
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.emulation.rates import COMMON_RATES, NOTE_TOKENS
from ctxreuse.serving.pool.admission import Plannable
from ctxreuse.serving.pool.placement import rendezvous_order
from ctxreuse.serving.pool.replica import Replica

_ANSWER_COST = round(
    NOTE_TOKENS * COMMON_RATES.decode_step_per_request_s * COMMON_RATES.prefill_tokens_per_s
)
"""What an answer delays others, in prompt tokens: what it adds to their steps."""
_REMEMBERED_CONVERSATIONS = 10_000

_Conversation: TypeAlias = tuple[str, type, str | int | None]


class _Home(NamedTuple):
    """Where a conversation was served last, and with which cache."""

    replica: ref[Replica]
    generation: int


class RequestRouter:
    """Chooses among replicas by what they are expected to have cached, and by their queues.

    Args:
        queue_weight: What waiting for one token costs, compared with computing one.
        in_order: Whether requests are sent in their own order, not in the best one.
    """

    def __init__(self, queue_weight: float, in_order: bool) -> None:
        self._queue_weight = queue_weight
        self._in_order = in_order
        self._served_by: OrderedDict[_Conversation, _Home] = OrderedDict()
        self._lock = Lock()

    def best(self, replicas: Sequence[Replica], prompt: Plannable) -> Replica:
        """Return the replica with most expected cached tokens, less what it has in its queue.

        Among equals the request's first block decides, by rendezvous hashing.

        Args:
            replicas: Whom to choose from, at least one.
            prompt: The request, or a plan whose order stands.
        """
        by_name = {replica.name: replica for replica in replicas}
        scores = {
            name: self._cached_tokens(replica, prompt) - self._queue_weight * replica.queued_tokens
            for name, replica in by_name.items()
        }
        request = request_of(prompt)
        seed = request.blocks[0].key if request.blocks else text_digest(request.query)
        order = [str(name) for name in rendezvous_order(seed, by_name)]
        return by_name[max(order, key=scores.__getitem__)]

    def to_compute(self, replica: Replica, prompt: Plannable) -> int:
        """Return what a request would cost a replica, in prompt tokens, its answer included."""
        request = request_of(prompt)
        tokens = replica.planner.block_tokens(prompt.blocks)
        tokens += estimate_tokens(request.query) + _history_tokens(request)
        return max(0, tokens - self._cached_tokens(replica, prompt)) + _ANSWER_COST

    def note(self, request: ContextRequest, replica: Replica) -> None:
        """Remember who has served a conversation: its history is cached there."""
        if request.conversation_id is None:
            return
        key = _conversation(request)
        with self._lock:
            self._served_by[key] = _Home(ref(replica), replica.generation)
            self._served_by.move_to_end(key)
            if len(self._served_by) > _REMEMBERED_CONVERSATIONS:
                self._served_by.popitem(last=False)

    def _cached_tokens(self, replica: Replica, prompt: Plannable) -> int:
        request = request_of(prompt)
        if request.history:
            with self._lock:
                home = self._served_by.get(_conversation(request))
            is_cached = home is not None and home == (ref(replica), replica.generation)
            return _history_tokens(request) if is_cached else 0
        if isinstance(prompt, Plan):
            as_sent = ContextRequest(prompt.blocks, system=request.system, tenant=request.tenant)
            return replica.planner.cached_tokens(as_sent, in_order=True)
        return replica.planner.cached_tokens(request, in_order=self._in_order)


def request_of(prompt: object) -> ContextRequest:
    """Return the request of what is to be sent.

    Raises:
        InvalidRequestError: If it is neither a request nor a plan.
    """
    if isinstance(prompt, Plan):
        return prompt.request
    if not isinstance(prompt, ContextRequest):
        raise InvalidRequestError(
            f"a prompt must be a ContextRequest or a Plan, not {describe(prompt)}"
        )
    return prompt


def _history_tokens(request: ContextRequest) -> int:
    """Return the tokens of what a later turn repeats, estimated."""
    messages = request.history or ()
    return sum(estimate_tokens(text) for message in messages for text in message_texts(message))


def _conversation(request: ContextRequest) -> _Conversation:
    return request.tenant, type(request.conversation_id), request.conversation_id
