"""Who asks: tenants by keyed hashes of their API keys, or as a trusted gateway names them."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from starlette.exceptions import HTTPException

from ctxreuse.context.files import file_errors
from ctxreuse.errors import InputFileError, InvalidRequestError

KEYS_SECRET = "CTXREUSE_KEYS_SECRET"
KEY_HEADERS = ("authorization", "x-api-key")
_HASH = re.compile("[0-9a-f]{64}")


def hashed_key(key: str, secret: str) -> str:
    """Return a key's hash, which tells nothing of it without the secret."""
    if not secret:
        raise InvalidRequestError(f"set {KEYS_SECRET}, which the hashes of API keys need")
    return hmac.new(secret.encode(), key.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


class Tenants:
    """Tells the tenant of a request.

    Args:
        header: The header in which a trusted gateway names the tenant; "" for none.
        keys: A file with a line for each key: its hash, a space and its tenant; "" for none.
        secret: Of the hashes.

    Raises:
        InputFileError: the file cannot be read as that.
        InvalidRequestError: there is no secret.
    """

    def __init__(self, header: str, keys: str, secret: str) -> None:
        self._header, self._secret = header, secret
        self._tenants = _read(keys, secret) if keys else None
        self.has_any = bool(header or keys)

    def of(self, headers: Mapping[str, str]) -> str:
        """Return who asks; raise a 401 for an unknown key."""
        if self._tenants is None:
            return headers.get(self._header, "") if self._header else ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        given_hash = hashed_key(given, self._secret)
        # all are compared, so that time tells nothing
        found = [one for known, one in self._tenants if hmac.compare_digest(known, given_hash)]
        if not found:
            raise HTTPException(401, "this API key is not known here")
        return found[0]


def _read(path: str, secret: str) -> list[tuple[str, str]]:
    hashed_key("", secret)  # raises without a secret, before the first request
    with file_errors(path, "read"):
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    read = []
    for number, line in enumerate(lines, start=1):
        known, _, tenant = line.strip().partition(" ")
        if not line.strip() or line.startswith("#"):
            continue
        if not (_HASH.fullmatch(known) and tenant.strip()):
            raise InputFileError(f"{path}:{number}: give a hash of --hash-key, a space, a tenant")
        read.append((known, tenant.strip()))
    return read
