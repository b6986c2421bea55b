"""The tenant of a Mem0 search: the user whose memories it reads.

An order reveals what was asked before, so the memories of one user never influence the order of
another's. Every integration that searches Mem0 uses this module, so that one user is one tenant in
all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ctxreuse.errors import InvalidRequestError, describe

ENTITIES = ("user_id", "agent_id", "app_id", "run_id")
"""The ids by which mem0 keeps memories apart."""

_LOGICAL = ("AND", "OR", "NOT")
_DIGEST_BYTES = 16


class _Condition(NamedTuple):
    """A filter on one entity id: `entity relation value`."""

    entity: str
    relation: str
    value: str


def tenant_of(filters: Mapping[str, Any] | None = None, **entity_ids: Any) -> str:
    """Return the tenant whose memories a search with these filters reads.

    It is the user, within the app if the filters name one; without a user it is the agent, app and
    run. All agents and runs of a user are one tenant, because one person asks. Filters that join
    several users make a tenant of their own.

    Args:
        filters: As given to Mem0's `search`, with `AND`, `OR`, `NOT` and operators.
        entity_ids: `user_id` and the like, for memories that take them outside the filters.

    Returns:
        A digest, because ids are often e-mail addresses: it may stand in logs, and is a valid
        `cache_salt` for vLLM. "" if the filters name no entity.

    Raises:
        InvalidRequestError: filters that are in one another, or no JSON.

    Example:
        >>> tenant_of({"AND": [{"user_id": "alice"}, {"run_id": "r1"}]}) == tenant_of(
        ...     {"user_id": "alice"}
        ... )
        True
    """
    try:
        conditions = set(_conditions(entity_ids)) | set(_conditions(filters))
    except (RecursionError, ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"filters name no tenant: {describe(str(error))}; pass dicts of ids, less deep"
        ) from error
    if any(one.entity == "user_id" and one.relation == "is" for one in conditions):
        conditions = {one for one in conditions if one.entity in ("user_id", "app_id")}
    if not conditions:
        return ""
    canonical = json.dumps(sorted(conditions)).encode()
    return "mem0-" + hashlib.blake2b(canonical, digest_size=_DIGEST_BYTES).hexdigest()


def _conditions(filters: object, negated: str = "") -> Iterator[_Condition]:
    """Yield the conditions on entities, at any depth; metadata filters have none."""
    if isinstance(filters, (list, tuple)):
        for one in filters:
            yield from _conditions(one, negated)
    if not isinstance(filters, Mapping):
        return
    for name, value in filters.items():
        if name in ENTITIES and value is not None:
            for relation, entity_id in _compared(value):
                yield _Condition(name, negated + relation, entity_id)
        elif isinstance(name, str) and name.lstrip("$").upper() in _LOGICAL:
            below = "not " if name.lstrip("$").upper() == "NOT" else ""
            yield from _conditions(value, negated + below)


def _compared(value: Any) -> Iterator[tuple[str, str]]:
    """Yield relation and id; to mem0, 7, "7" and " 7 " are the same id."""
    if isinstance(value, Mapping):
        for operator, operand in value.items():
            if operator in ("eq", "in"):
                yield from _compared(operand)
            else:
                yield str(operator), json.dumps(operand, sort_keys=True, default=str)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from _compared(one)
    else:
        yield "is", str(value).strip()
