"""The errors that a caller can meet.

    CtxreuseError
    ├── InvalidBlockError      a block that has no usable id, text or token count
    ├── InvalidRequestError    a request, message or argument of the wrong kind
    ├── UnknownStrategyError   a strategy that does not exist
    ├── BatchTooLargeError     a batch that the papers' algorithm cannot hold in memory
    ├── ConversationError      conversation calls in an order that makes no sense
    ├── InputFileError         a trace, corpus or plan file that cannot be read as one
    ├── EngineError            a request that the engine did not answer
    └── MissingExtraError      an optional dependency that is not installed

Every message names the value at fault and the remedy. `describe` cuts a value after 60 characters,
so that no whole document ends up in a log.
"""

from __future__ import annotations

_LONGEST_VALUE = 60


class CtxreuseError(Exception):
    """Base class of all errors that ctxreuse raises on purpose."""


class InvalidBlockError(CtxreuseError, ValueError):
    """A context block was given an id, text or token count that it cannot have."""


class InvalidRequestError(CtxreuseError, ValueError):
    """Something that should be a request, or a part of one, is something else."""


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
    """

    def __init__(self, message: str, status: int | None = None, attempts: int = 1) -> None:
        super().__init__(message)
        self.status = status
        self.attempts = attempts


class MissingExtraError(CtxreuseError, ImportError):
    """An optional dependency is missing; the message holds the pip command."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs optional packages: pip install 'ctxreuse[{extra}]'")


def describe(value: object) -> str:
    """Return a short, safe description of a value for an error message.

    Args:
        value: Anything, including objects whose `repr` fails or is very long.

    Returns:
        The type's name and at most 60 characters of the value.
    """
    kind = type(value).__name__
    try:
        text = repr(value)
    except Exception:  # a foreign __repr__, or an integer past the digit limit
        return f"a value of type {kind}"
    if len(text) > _LONGEST_VALUE:
        text = text[: _LONGEST_VALUE - 1] + "…"
    return f"{text} ({kind})"
