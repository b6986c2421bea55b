"""Who asks: tenants by keyed hashes of their API keys, or as a trusted gateway names them."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from pathlib import Path

from starlette.exceptions import HTTPException

from ctxreuse.context.files import file_errors
from ctxreuse.errors import InputFileError, InvalidRequestError

KEYS_SECRET = "CTXREUSE_KEYS_SECRET"


def hashed_key(key: str, secret: str) -> str:
    """Return a key's hash, which tells nothing of it without the secret."""
    if not secret:
        raise InvalidRequestError(f"set {KEYS_SECRET}, which the hashes of API keys need")
    return hmac.new(secret.encode(), key.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


class Tenants:
    """Tells who asks: by a header, or by a file of the keys' hashes; neither is ""."""

    def __init__(self, header: str, keys: str, secret: str) -> None:
        self._header, self._secret = header, secret
        self._tenants = _read(keys, secret) if keys else None

    def of(self, headers: Mapping[str, str]) -> str:
        """Return the tenant; raise a 401 for an unknown key."""
        if self._tenants is None:
            return headers.get(self._header, "") if self._header else ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        hashed = hashed_key(given, self._secret)
        # all are compared, so that time tells nothing
        found = [own for known, own in self._tenants.items() if hmac.compare_digest(known, hashed)]
        if not found:
            raise HTTPException(401, "this API key is not known here")
        return found[0]


def _read(path: str, secret: str) -> dict[str, str]:
    hashed_key("", secret)  # raises without a secret, before the first request
    with file_errors(path, "read"):
        text = Path(path).read_bytes()
    try:
        read = {bytes.fromhex(known).hex(): own for known, own in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        read = {"": ""}
    if not all(len(known) == 64 and own and isinstance(own, str) for known, own in read.items()):
        raise InputFileError(f'{path}: must be JSON, {{"hash of --hash-key": "tenant", ...}}')
    return read
