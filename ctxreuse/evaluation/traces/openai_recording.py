"""Records what OpenAI clients send, without changing any of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.blocks import ContextBlock, text_digest
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.rendering import message_texts
from ctxreuse.errors import MissingExtraError
from ctxreuse.evaluation.traces.recording import TraceRecorder

_LABEL = re.compile(
    r"""\s* (?: \[ [^\]\n]{1,20} \]                      # [1], [Doc_1]
          | \(? \d{1,3} [.):]                            # 1. or (1)
          | (?:document|doc|source|passage|context|chunk) [ _#]* \d{1,3} \s* [:.)-]?
        ) \s+""",
    re.VERBOSE | re.IGNORECASE,
)


_CONVERSATIONS = 10_000
"""Beginnings of conversations that are kept; the least recently used is forgotten first."""


class SentContext(NamedTuple):
    """The blocks and the question of a prompt's last user message."""

    blocks: Sequence[ContextBlock | str]
    query: str


ReadContext: TypeAlias = Callable[[str], SentContext]
"""From the text of a user message to its blocks and question."""


def paragraphs(text: str) -> SentContext:
    r"""Read a message whose documents stand before the question, with empty lines between.

    A number or label before a paragraph names its position and is not part of it.

    Args:
        text: The message's text.

    Example:
        >>> paragraphs("[1] The Seine flows through Paris.\n\nWhich river?").blocks
        ['The Seine flows through Paris.']
    """
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    blocks = [_LABEL.sub("", part, count=1) if _LABEL.match(part) else part for part in parts[:-1]]
    return SentContext([block for block in blocks if block], parts[-1] if parts else "")


class PromptRecorder:
    """Records chat prompts: their system message, and the blocks of their last user message.

    A prompt with earlier turns belongs to the latest conversation that began with the same
    messages; one without begins a conversation, even if another began with the same.

    Args:
        recorder: Writes them.
        read_context: Reads the blocks from a user message; see `paragraphs`.
    """

    def __init__(self, recorder: TraceRecorder, read_context: ReadContext = paragraphs) -> None:
        self._recorder = recorder
        self._read_context = read_context
        self._conversations = LRUMap[str, int](_CONVERSATIONS)
        self._lock = Lock()
        self._failing = FailOpen("PromptRecorder", "a prompt is not written", work="reading it")

    def note(self, messages: Any) -> None:
        """Record a prompt; skip anything else."""
        self._failing.attempt(lambda: self._record(messages), lambda: None)

    def _record(self, messages: Any) -> None:
        if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
            return
        spoken = [one for one in messages if one.get("role") not in ("system", "developer")]
        questions = [one for one in spoken if one.get("role") == "user"]
        if not questions:
            return
        system = "\n\n".join(
            text for one in messages if one not in spoken for text in message_texts(one)
        )
        context = self._read_context("\n\n".join(message_texts(questions[-1])))
        first = "\n\n".join(message_texts(questions[0]))
        self._recorder.record(
            context.blocks,
            context.query,
            system=system or None,
            conversation_id=self._conversation(f"{system}\n{first}", is_first=len(questions) == 1),
        )

    def _conversation(self, beginning: str, *, is_first: bool) -> str:
        """Return the name of the latest conversation that began so, or of a new one."""
        digest = text_digest(beginning).hex()
        with self._lock:
            number = (self._conversations.peek(digest) or 0) + is_first
            self._conversations.put(digest, number)
        return f"{digest}-{number}"


def record_client(
    client: Any, recorder: TraceRecorder, read_context: ReadContext = paragraphs
) -> Any:
    """Make an OpenAI client record the chat prompts that it sends.

    Args:
        client: An `openai.OpenAI` or `openai.AsyncOpenAI` that has not been used.
        recorder: Writes them.
        read_context: Reads the blocks from a user message.

    Returns:
        The client itself.
    """
    completions = client.chat.completions
    prompts = PromptRecorder(recorder, read_context)
    completions.create = _noting(completions.create, prompts)
    return client


@contextmanager
def recording(recorder: TraceRecorder, read_context: ReadContext = paragraphs) -> Iterator[None]:
    """Record the chat prompts of all OpenAI clients that are made inside.

    Args:
        recorder: Writes them.
        read_context: Reads the blocks from a user message.

    Raises:
        MissingExtraError: If `openai` is not installed.
    """
    try:
        from openai.resources.chat.completions import AsyncCompletions, Completions
    except ImportError as error:
        raise MissingExtraError("recording OpenAI clients", "openai") from error
    prompts = PromptRecorder(recorder, read_context)
    before = {kind: kind.create for kind in (Completions, AsyncCompletions)}
    try:
        for kind, create in before.items():
            kind.create = _noting(create, prompts)  # type: ignore[method-assign]
        yield
    finally:
        for kind, create in before.items():
            kind.create = create  # type: ignore[method-assign]


def _noting(create: Callable[..., Any], prompts: PromptRecorder) -> Callable[..., Any]:
    @wraps(create)
    def noting(*args: Any, **fields: Any) -> Any:
        prompts.note(fields.get("messages"))
        return create(*args, **fields)

    return noting
