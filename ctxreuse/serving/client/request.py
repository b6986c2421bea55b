"""One request of a client: what is sent, what has come back, and its answer piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

from ctxreuse.context.blocks import Message, copied_message
from ctxreuse.context.checks import checked_header, checked_kind, checked_list
from ctxreuse.errors import EngineError, InvalidRequestError, describe
from ctxreuse.pipeline.leader_first import CallInFlight, PrefixUse
from ctxreuse.planning.plan import Plan
from ctxreuse.rules.prompt_forms import as_form
from ctxreuse.serving.aio.concurrency import AsyncClosing
from ctxreuse.serving.client.reply import Completion, ReplyReader

Prompt: TypeAlias = Plan | Sequence[Message]
"""What is sent: a plan, or chat messages as they are."""

Protocol: TypeAlias = Literal["openai", "anthropic"]
"""What an engine is asked through: OpenAI's chat completions, or Anthropic's messages."""

_Answer = TypeVar("_Answer")

_RESERVED = ("messages", "stream", "prompt")


@dataclass(slots=True)
class EngineCall:
    """One request on its way through its attempts."""

    plan: Plan | None
    arguments: dict[str, Any]
    on_first_token: Callable[[], object] | None = None
    reads: Callable[[], ReplyReader] = ReplyReader
    use: PrefixUse | None = None  # what others may have to wait for
    in_flight: CallInFlight | None = None  # where they wait
    reader: ReplyReader = field(default_factory=ReplyReader)
    attempts: int = 0
    began_at: float = 0.0  # seconds of the client's clock, as below
    attempt_began_at: float = 0.0
    first_token_at: float | None = None

    def begin(self, now: float) -> None:
        """Begin an attempt; drop what an earlier one has brought."""
        self.attempts += 1
        if self.attempts == 1:
            self.began_at = now
        self.attempt_began_at, self.first_token_at = now, None
        self.reader = self.reads()


_ADDED_TO = ("extra_body", "extra_headers", "stream_options")


def messages_of(prompt: object) -> list[dict[str, Any]]:
    """Return a prompt as chat messages, copied."""
    if isinstance(prompt, Plan):
        return prompt.messages()
    words = "a Plan or a list of chat messages"
    messages = checked_list("a prompt", prompt, words, but=(str, bytes, Mapping))
    return [copied_message(checked_kind("a chat message", m, Mapping, "a dict")) for m in messages]


def prompt_fields(prompt: Prompt, protocol: Protocol, tools: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of a request that carry a prompt, without those that tell its cache."""
    if not isinstance(prompt, Plan) or not prompt.cache.marks:
        return as_form(messages_of(prompt), protocol)
    fields = prompt.body(protocol, tools=tools)
    return {name: one for name, one in fields.items() if not name.startswith("prompt_cache_")}


def check_params(params: Mapping[str, Any]) -> None:
    """Check what a caller adds to a request."""
    for name in checked_kind("params", params, Mapping, "a dict"):
        checked_kind("each parameter's name", name, str, "a string")
    for name in _ADDED_TO:
        checked_kind(name, params.get(name), (Mapping, NoneType), "a dict or None")
    for header, value in (params.get("extra_headers") or {}).items():
        checked_header("a name in extra_headers", header)
        if isinstance(value, str):  # openai leaves out what is its `omit`
            checked_header(f"extra_headers[{header!r}]", value)
    for name in _RESERVED:
        if name in params:
            raise InvalidRequestError(f"{name} is set by the client; leave it out")
    if params.get("n") not in (None, 1):
        raise InvalidRequestError(f"n must be 1, not {describe(params['n'])}")


class AnswerStream(AsyncClosing, Generic[_Answer]):
    """An answer in progress: an async iterator of its pieces; these set the answer at their end."""

    def __init__(self) -> None:
        self.pieces: AsyncGenerator[str]
        self.answer: _Answer | None = None
        self.drop: Callable[[], object] = lambda: None  # called if it is closed unsent
        self._has_begun = False

    def _whole(self) -> _Answer:
        if self.answer is None:
            raise EngineError("the answer has not ended; iterate over its pieces first")
        return self.answer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        self._has_begun = True
        return await anext(self.pieces)

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended or was not sent, and tell the planner."""
        if not self._has_begun:
            self._has_begun = True
            self.drop()  # a generator that was never started does not run its own clean-up
        await self.pieces.aclose()


class CompletionStream(AnswerStream[Completion]):
    """An answer in progress: an async iterator of its pieces, made by `EngineClient.stream`.

    The request is sent when the first piece is asked for.
    """

    @property
    def completion(self) -> Completion:
        """The whole answer and what it cost; EngineError before the answer has ended."""
        return self._whole()
