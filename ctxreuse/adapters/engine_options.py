"""vLLM's `cache_salt`: prompts with different salts share nothing in the engine's prefix cache."""

from __future__ import annotations

import hashlib

from ctxreuse.errors import InvalidRequestError

_LONGEST = 128
_FORBIDDEN = frozenset("@/\\\0")


def is_cache_salt(value: object) -> bool:
    """Return whether vLLM takes a value as `cache_salt`."""
    return (
        isinstance(value, str) and 0 < len(value) <= _LONGEST and not _FORBIDDEN.intersection(value)
    )


def checked_cache_salt(value: object) -> str | None:
    """Return a salt as it is, or None for none.

    Raises:
        InvalidRequestError: If vLLM would refuse it.
    """
    if value is None or (isinstance(value, str) and is_cache_salt(value)):
        return value
    raise InvalidRequestError(
        f"cache_salt must be a string of 1 to {_LONGEST} characters without '@', '/', '\\' and NUL,"
        " or None"
    )


def tenant_salt(tenant: str, key: str = "") -> str | None:
    """Return a tenant's salt; the default tenant has none.

    The tenant's name does not stand in it, and without the key nobody can tell whose it is.

    Args:
        tenant: The tenant's name.
        key: A secret of the application. Processes that share it share the cache.
    """
    if not tenant:
        return None
    return _digest(key, "tenant", tenant)


def conversation_session(tenant: str, conversation_id: str | int, key: str = "") -> str:
    """Return a session's name for routers that keep a conversation on one engine."""
    # hexadecimal: decimal conversion of integers stops at 4,300 digits
    name = conversation_id if isinstance(conversation_id, str) else format(conversation_id, "x")
    return _digest(key, "conversation", type(conversation_id).__name__, name, tenant)


def _digest(key: str, *parts: str) -> str:
    secret = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    digest = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        piece = part.encode("utf-8", "surrogatepass")
        digest.update(len(piece).to_bytes(8, "big") + piece)
    return digest.hexdigest()
