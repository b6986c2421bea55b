"""Requests as digests: where they go, and in which order, whichever worker reads them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse.context.blocks import ContextRequest, encoded
from ctxreuse.memory.sent_log import MOST_BLOCK_TOKENS

Digests: TypeAlias = npt.NDArray[np.uint64]
Integers: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]

_BYTES = 8


@dataclass(frozen=True, slots=True)
class Contexts:
    """What decides where requests go, as arrays; digests of 64 bits stand for names."""

    scopes: Digests  # tenant and system text
    digests: Digests  # of all that is planned of a request
    conversations: Digests  # 0 for none
    are_later: Booleans  # behind a history
    lengths: Integers  # in blocks
    blocks: Digests  # of all requests, one after the other
    weights: Integers  # the tokens of each, at least 1

    def where(self, chosen: Booleans) -> Contexts:
        """Return some of them."""
        held = np.repeat(chosen, self.lengths)
        return Contexts(
            self.scopes[chosen],
            self.digests[chosen],
            self.conversations[chosen],
            self.are_later[chosen],
            self.lengths[chosen],
            self.blocks[held],
            self.weights[held],
        )

    def names(self) -> Digests:
        """Return what requests go by: later turns by their conversation."""
        go_together = self.are_later & (self.conversations != 0)
        return np.where(go_together, self.conversations, self.digests)


def contexts_of(requests: Sequence[ContextRequest], count_tokens: Callable[[str], int]) -> Contexts:
    """Return what decides where requests go, without any text."""
    names = {(one.tenant, one.system): 0 for one in requests}
    for tenant, system in names:
        names[tenant, system] = _digest((tenant, "" if system is None else f"system {system}"))
    weights: dict[bytes, int] = {}
    blocks: list[bytes] = []
    for request in requests:
        for key, block in request.unique_blocks.items():
            if key not in weights:
                tokens = count_tokens(block.text) if block.tokens is None else block.tokens
                weights[key] = min(max(tokens, 1), MOST_BLOCK_TOKENS)
            blocks.append(key)
    return Contexts(
        scopes=_array(names[one.tenant, one.system] for one in requests),
        digests=_array(_distinct(map(request_digest, requests))),
        conversations=_array(map(conversation_digest, requests)),
        are_later=np.array([bool(one.history) for one in requests], dtype=np.bool_),
        lengths=np.array([len(one.unique_blocks) for one in requests], dtype=np.int64),
        blocks=_array(int.from_bytes(key[:_BYTES], "little") for key in blocks),
        weights=np.array([weights[key] for key in blocks], dtype=np.int64),
    )


def joined(many: Iterable[Contexts]) -> Contexts:
    """Return contexts of several batches as one."""
    parts = [contexts_of([], len), *many]
    columns = ([getattr(one, column.name) for one in parts] for column in fields(Contexts))
    return Contexts(*map(np.concatenate, columns))


def reproducible_order(requests: Sequence[ContextRequest]) -> list[int]:
    """Return positions in an order that does not depend on that of the requests."""
    digests = [request_digest(request) for request in requests]

    def key(position: int) -> tuple[int, int, int]:
        request, digest = requests[position], digests[position]
        conversation = conversation_digest(request)  # its turns stand together, in order
        return conversation or digest, len(request.history or ()), digest

    return sorted(range(len(requests)), key=key)


def request_digest(request: ContextRequest) -> int:
    """Return 64 bits that stand for what is planned of a request."""
    history = [str(message.get("content")) for message in request.history or ()]
    return _digest(
        (
            request.tenant,
            repr(request.system is None),
            request.system or "",
            request.query,
            repr(type(request.request_id)),
            str(request.request_id),
            *history,
        ),
        (block.key for block in request.blocks),
    )


def conversation_digest(request: ContextRequest) -> int:
    """Return 64 bits that stand for the conversation whose turns stay in order; 0 for none."""
    if request.history is None or request.conversation_id is None:
        return 0
    kind = type(request.conversation_id).__name__
    return _digest((request.tenant, kind, str(request.conversation_id))) or 1


def _digest(texts: Iterable[str], keys: Iterable[bytes] = ()) -> int:
    hashed = hashlib.blake2b(digest_size=_BYTES)
    for text in texts:
        data = encoded(text)
        hashed.update(len(data).to_bytes(_BYTES, "little"))
        hashed.update(data)
    for key in keys:
        hashed.update(key)
    return int.from_bytes(hashed.digest(), "little")


def _distinct(digests: Iterable[int]) -> list[int]:
    """Return digests of which equal ones differ, so that equal requests can be spread."""
    seen: Counter[Hashable] = Counter()
    found = []
    for digest in digests:
        found.append(_digest((f"{digest} {seen[digest]}",)) if seen[digest] else digest)
        seen[digest] += 1
    return found


def _array(digests: Iterable[int]) -> Digests:
    return np.fromiter(digests, dtype=np.uint64)
