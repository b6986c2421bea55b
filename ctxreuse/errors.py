"""The errors that a caller can meet.

    CtxreuseError
    ├── InvalidBlockError      a block that has no usable id, text or token count
    ├── InvalidRequestError    a request, message or argument of the wrong kind
    │   └── UnknownArgumentError   an argument that nothing takes
    ├── UnknownStrategyError   a strategy that does not exist
    ├── BatchTooLargeError     a batch that the papers' algorithm cannot hold in memory
    ├── ConversationError      conversation calls in an order that makes no sense
    ├── InputFileError         a trace, corpus or plan file that cannot be read as one
    ├── EngineError            a request that the engine did not answer
    ├── SharedLogError         a shared log that cannot be read or written
    └── MissingExtraError      an optional dependency that is not installed

Every message names the value at fault and the remedy.
"""

from __future__ import annotations

import re

_LONGEST_VALUE = 60
_LONGEST_LOOKED_AT = 4_000
_LONGEST_URL = 200
_ADDRESS = re.compile(r"""(?i)(https?://)(?:[^\s'"]*@)?([^\s'"?#]*)(?:[?#][^\s'"]*)?""")


class CtxreuseError(Exception):
    """Base class of all errors that ctxreuse raises on purpose."""


class InvalidBlockError(CtxreuseError, ValueError):
    """A context block was given an id, text or token count that it cannot have."""


class InvalidRequestError(CtxreuseError, ValueError):
    """Something that should be a request, or a part of one, is something else."""


class UnknownArgumentError(InvalidRequestError, TypeError):
    """An argument that is handed on has a name that nothing takes."""


class UnknownStrategyError(CtxreuseError, ValueError):
    """There is no strategy of this name."""


class BatchTooLargeError(CtxreuseError, ValueError):
    """The papers' clustering needs a matrix of all pairs, which this batch makes too large."""


class ConversationError(CtxreuseError, RuntimeError):
    """A conversation was asked for something that its state does not allow."""


class InputFileError(CtxreuseError, ValueError):
    """A trace, corpus or plan file is broken; the message names the file and the line."""


class EngineError(CtxreuseError, RuntimeError):
    """The engine did not answer a request; the client's own error is the cause.

    Attributes:
        status: The HTTP status that it answered; None where no answer came at all.
        attempts: How often the request was sent.
        retry_after_s: Seconds after which the engine wants to be asked again, if it says so.
    """

    def __init__(
        self,
        message: str,
        status: int | None = None,
        attempts: int = 1,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.attempts = attempts
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        said, stop, remedy = super().__str__().partition("; ")
        sent = f" (attempts: {self.attempts})" if self.attempts > 1 else ""
        return f"{said}{sent}{stop}{remedy}"


class SharedLogError(CtxreuseError, RuntimeError):
    """A shared log cannot be read or written; the store's own error is the cause."""


class MissingExtraError(CtxreuseError, ImportError):
    """An optional dependency is missing; the message holds the pip command."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs optional packages: {_pip_install(extra)}")


def _pip_install(extra: str) -> str:
    """Return the pip command that installs an extra from where this package is from (PEP 610)."""
    from importlib.metadata import PackageNotFoundError, distribution
    from json import loads
    from shlex import quote

    try:
        origin = loads(distribution("ctxreuse").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError, OSError):
        origin = {}
    url = origin.get("url", "")
    if "dir_info" in origin:
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        option = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {option}{quote(f'{url2pathname(urlsplit(url).path)}[{extra}]')}"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install {quote(f'ctxreuse[{extra}] @ {url}' if url else f'ctxreuse[{extra}]')}"


def describe(value: object) -> str:
    """Return at most 60 characters of a value, without secrets, for an error message."""
    kind = type(value).__name__
    try:
        text = repr(value)
    except Exception:  # a foreign __repr__, or an integer past the digit limit
        return f"a value of type {kind}"
    text = _ADDRESS.sub(r"\1\2", text[:_LONGEST_LOOKED_AT])
    if len(text) > _LONGEST_VALUE:
        text = text[: _LONGEST_VALUE - 1] + "…"
    return f"{text} ({kind})"


def shown_url(url: object) -> str:
    """Return a URL as messages, logs and files may show it: without secrets."""
    if not isinstance(url, str):
        return describe(url)
    scheme, separator, rest = url.rpartition("://")
    # up to the last "@": a password may hold any sign unescaped
    rest = rest.rpartition("@")[2].partition("?")[0].partition("#")[0]
    shown = scheme.rpartition("@")[2] + separator + rest
    return "".join(sign if sign.isprintable() else "?" for sign in shown[:_LONGEST_URL])
