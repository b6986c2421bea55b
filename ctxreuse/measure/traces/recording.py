"""Records what an application or its clients send: a corpus and a trace, as JSON lines.

The files are those that `read_corpus` and `read_trace` take. In a recording without text, salted
hashes name blocks, conversations and tenants; the salt is kept nowhere.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, Self

from ctxreuse.context.blocks import (
    BlockId,
    BlockKey,
    ContextBlock,
    ContextRequest,
    id_size,
    text_digest,
)
from ctxreuse.context.checks import check_function, checked_each, checked_kind
from ctxreuse.context.copies import OnePerProcess
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.files import file_errors, make_folder
from ctxreuse.context.fork_safety import ForkSafeLock, process_name, renew_after_fork
from ctxreuse.context.lru_map import LRUMap, PartSize, TenantLRUMap
from ctxreuse.context.rendering import message_texts
from ctxreuse.context.scope import NO_SCOPE, RequestScope, current_scope
from ctxreuse.context.tokens import as_token_counter
from ctxreuse.errors import InputFileError, MissingExtraError
from ctxreuse.measure.traces.sent_calls import ReadCall, SentCall, read_call
from ctxreuse.pipeline.known_texts import Form, KnownSpan, KnownTexts, known_texts, words_at
from ctxreuse.pipeline.prompt_turn import PromptPart
from ctxreuse.planning.savings import counted

CORPUS, TRACE = "corpus.jsonl", "trace.jsonl"
PROMPTS = "prompts.jsonl"  # that a framework has made, and the texts that stand in them

_SHORT_DIGEST = 16
_SAID = re.compile(r"\w(?:.*\w)?")  # a line, but for what stands around its words
_CONVERSATIONS = 10_000  # conversations that are remembered
_TEXTS = 100_000  # texts of prompts that are remembered, to write each once
_BLOCKS = 500_000  # that are remembered, about 400 bytes each, or 64 characters of a long id


class TraceRecorder(OnePerProcess):
    """Writes requests into a folder as they come; safe for the threads of one process."""

    def __init__(
        self,
        folder: str | Path,
        *,
        hash_only: bool = False,
        token_counter: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checked_kind("folder", folder, (str, os.PathLike), "a path")
        self._hash_only = hash_only
        self._count_tokens = as_token_counter(token_counter)
        check_function("clock", clock, "a function")
        self._clock = clock
        self._begun_s = clock()
        self._salt = secrets.token_bytes(32)
        self._lock = ForkSafeLock()
        self._failing = FailOpen("TraceRecorder", "a request is not written", work="recording")
        with file_errors(folder, "written"):
            self._folder = Path(folder).absolute()  # a program may change its own
            make_folder(self._folder)
        self._is_closed = False
        self._start_anew()
        for name in (CORPUS, TRACE):
            if os.path.lexists(self._folder / name):
                raise _is_there(self._folder / name)
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Have written nothing; a child leaves the files to the parent."""
        self.requests = 0
        self.sources: Counter[str] = Counter()
        self._names: TenantLRUMap[BlockKey, BlockId] = TenantLRUMap(
            _BLOCKS, max_weight=_BLOCKS, weight_of=id_size
        )
        self._written: dict[bytes, bytes] = {}  # what the corpus has under a name, by digests
        self._turns = TenantLRUMap[bytes, int](_CONVERSATIONS)
        self._texts: LRUMap[bytes, int] = LRUMap(_TEXTS)  # numbers, by digest
        self._known = KnownTexts()  # what to name instead of writing it
        self._written_texts = 0
        self._blocks = self._requests_of_conversations = self._talks = 0
        self._paths: dict[str, Path] = {}  # of what has been written to

    def _path(self, name: str) -> Path:
        """Return a file, made anew at first; none is kept open: a program may close them all."""
        assert not self._is_closed, "closed"
        for one in (CORPUS, TRACE, name):
            if one not in self._paths:
                process = process_name().rstrip(".")
                path = self._folder / (f"forked-{process}" if process else "") / one
                make_folder(path.parent)
                with file_errors(path, "written"):
                    try:
                        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                    except FileExistsError as error:
                        raise _is_there(path) from error
                self._paths[one] = path
        return self._paths[name]

    @property
    def faults(self) -> int:
        """The number of requests that could not be written."""
        return self._failing.faults

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered, and how much may be; all tenants together."""
        with self._lock:
            return {"blocks": self._names.weight_size, "conversations": self._turns.size}

    def record(
        self,
        blocks: Iterable[ContextBlock | str],
        query: str = "",
        *,
        system: str | None = None,
        conversation_id: str | int | None = None,
        tenant: str = "",
        titles: Iterable[str] = (),
        source: str = "",
        sent: SentCall | None = None,
        marks: Sequence[int] | None = None,
    ) -> int | None:
        """Write a request; return its id in the trace, or None if it could not be written."""
        talk: Any = {"system": system, "conversation_id": conversation_id, "tenant": tenant}
        return self._failing.attempt(
            lambda: self._write(ContextRequest(blocks, query, **talk), titles, source, sent, marks)
        )

    def record_prompt(
        self,
        parts: Sequence[PromptPart],
        *,
        beside: str = "",
        retrieved: Sequence[int] = (),
        run: object = None,
        framework: str = "",
        scope: RequestScope = NO_SCOPE,
    ) -> None:
        """Write what a model is sent, of which run, and which requests its run has recorded."""

        def write() -> None:
            tenant, talk = scope.tenant or "", scope.conversation_id
            tools = PromptPart("tools", beside, is_text=False)
            told: dict[str, Any] = {
                "after": self.requests,
                "retrieved": list(retrieved),
                "run": None if run is None else self._digest(str(run)).hex()[:_SHORT_DIGEST],
                "framework": framework or None,
                "tenant": self._name(tenant) if tenant else None,
                "conversation_id": None if talk is None else self._name(talk),
                "beside": self._text_number(tools, tenant) if beside else None,
                "prompt": [self._text_number(one, tenant) for one in parts],
            }
            self._append(PROMPTS, {name: x for name, x in told.items() if x is not None})

        self._failing.attempt(write)

    def _text_number(self, part: PromptPart, tenant: str) -> int:
        """Return the number of a text, which the file has from now on."""
        digest = text_digest(f"{part.role} {part.is_text} {part.text}")
        with self._lock:
            number = self._texts.get(digest)
            if number is not None:
                return number
            number = self._written_texts = self._written_texts + 1
        spans = (self._known.standing_at(tenant, part.text) or ()) if part.is_text else ()
        line = {"text": number, "role": part.role, "content": self._content(part.text, spans)}
        ours = (known_texts().standing_at(tenant, part.text) or ()) if spans else ()
        if any(one.known.is_ours for one in ours):
            line["is_rendered"] = True
        self._append(PROMPTS, line if part.is_text else {**line, "is_text": False})
        with self._lock:
            self._texts.put(digest, number)
        return number

    def _content(self, text: str, spans: Sequence[KnownSpan]) -> list[object]:
        """Return a text with documents by name; without text, other lines are hashes as long."""

        def hidden(words: re.Match[str]) -> str:
            if not self._hash_only:
                return words[0]
            name = self._digest(words[0]).hex()
            return (name * len(words[0]))[: len(words[0])]

        content: list[object] = []
        words = [words_at(one.start, text[one.start : one.end]) for one in spans]
        ends, starts = [0, *(end for _, end in words)], [*(start for start, _ in words), len(text)]
        for number, (end, start) in enumerate(zip(ends, starts, strict=True)):
            content.append(_SAID.sub(hidden, text[end:start]))
            if number < len(spans):
                form: Any = spans[number].known.form
                name, length = form.name
                is_bare = {"is_bare": True} if len(form.text.strip()) < length else {}
                content.append({"block": name, **is_bare})
        return content

    def read_call(self, messages: object, fields: Mapping[str, Any]) -> ReadCall | None:
        """Read a request to a model as it is recorded; None if there is no question of a user."""
        return read_call(
            messages,
            fields,
            self._count_tokens,
            lambda text: self._digest(text).hex()[:_SHORT_DIGEST],
            hash_only=self._hash_only,
        )

    def summary(self) -> str:
        """Return in words what was recorded so far."""
        with self._lock:
            of = [f"{number:,} from {name}" for name, number in self.sources.most_common() if name]
            turns, talks = self._requests_of_conversations, self._talks
            documents = "1 block" if self._blocks == 1 else f"{self._blocks:,} different blocks"
        in_talks = f", {turns:,} of them in {counted(talks, 'conversation')}"
        count = counted(self.requests)
        return f"{count} with {documents}{in_talks * bool(turns)}{': ' * bool(of)}{', '.join(of)}"

    def close(self) -> None:
        """Write no more, keep nothing without a request; what comes later counts in `faults`."""
        with self._lock:
            self._is_closed = True
            for path in self._paths.values() if not self.requests else ():
                path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(
        self,
        request: ContextRequest,
        titles: Iterable[str],
        source: str,
        sent: SentCall | None,
        marks: Sequence[int] | None,
    ) -> int:
        """Write a request and return its id; hashes and counts its texts first."""
        told: dict[str, Any] = {
            "timestamp": round(1_000 * max(0.0, self._clock() - self._begun_s), 3)
        }
        if source:
            told["source"] = source
        if sent is not None:
            told["sent"] = checked_kind("sent", sent, SentCall, "a SentCall").as_json()
        if marks is not None:
            told["marks"] = checked_each("marks", marks, int, "an integer")
        named = zip(request.blocks, titles, strict=False)
        title_of = {block.key: title for block, title in named if title}
        with self._lock:
            new = [
                block
                for key, block in request.unique_blocks.items()
                if self._names.get(request.tenant, key) is None
            ]
        measured = {block.key: self._measured(block) for block in new}
        with self._lock:
            ids = [
                self._name_of(block, measured.get(key), request.tenant, title_of.get(key, ""))
                for key, block in request.unique_blocks.items()
            ]
            self._append_request(request, ids, told)
            self.sources[source] += 1
            return self.requests

    def _measured(self, block: ContextBlock) -> tuple[int, bytes]:
        tokens = self._count_tokens(block.text) if block.tokens is None else block.tokens
        return tokens, self._digest(block.text)

    def _append_request(
        self, request: ContextRequest, ids: Sequence[BlockId], told: Mapping[str, Any]
    ) -> None:
        """Append a request whose blocks the corpus has; the lock is held."""
        line: dict[str, Any] = {"request_id": self.requests + 1}
        if not self._hash_only:
            line["query"] = request.query
        if request.system is not None:
            line["system"] = self._name(request.system)
        if request.tenant:
            line["tenant"] = self._name(request.tenant)
        if request.conversation_id is not None:
            line["conversation_id"] = self._name(request.conversation_id)
            key = text_digest(repr(request.conversation_id))  # ids may be long, and 1 is not "1"
            line["turn"] = turn = self._turns.of(request.tenant).peek(key) or 0
            self._turns.put(request.tenant, key, turn + 1)
            self._talks += not turn
            self._requests_of_conversations += 1
        self._append(TRACE, {**line, **told, "blocks": ids})
        self.requests += 1
        texts = [one.text for one in request.unique_blocks.values()]
        self._known.add(
            request.tenant,
            [Form(text, name=(name, len(text))) for text, name in zip(texts, ids, strict=True)],
        )

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        """Write a line, all of it or nothing: behind half a line, the next would be lost, too."""
        with (
            self._lock,
            open(os.open(self._path(name), os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as file,
        ):
            before = file.seek(0, os.SEEK_END)
            left = memoryview(json.dumps(line).encode() + b"\n")
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(before)
                raise

    def _name_of(
        self, block: ContextBlock, measured: tuple[int, bytes] | None, tenant: str, title: str
    ) -> BlockId:
        """Return a block's name, which the corpus has from now on; the lock is held."""
        if (known := self._names.get(tenant, block.key)) is not None:
            return known
        # it may have been forgotten since it was looked up
        tokens, digest = measured or self._measured(block)
        own = digest.hex()
        name: BlockId = own if self._hash_only else block.id
        key = text_digest(repr(name))
        may_be_new = len(self._written) < _BLOCKS  # else the id may have had another text
        if self._written.get(key, digest if may_be_new else b"") != digest:
            name = f"{name}~{own}"
            key = text_digest(repr(name))
        if self._written.get(key) != digest:
            line: dict[str, Any] = {"id": name, "tokens": tokens}
            if not self._hash_only:
                line |= {"text": block.text} | ({"title": title} if title else {})
            self._append(CORPUS, line)
            self._blocks += 1
            if may_be_new:
                self._written[key] = digest
        self._names.put(tenant, block.key, name)
        return name

    def _name(self, name: str | int) -> str | int:
        return self._digest(repr(name)).hex() if self._hash_only else name

    def _digest(self, text: str) -> bytes:
        encoded = text.encode("utf-8", "surrogatepass")
        return blake2b(encoded, digest_size=16, key=self._salt).digest()


def _is_there(path: Path) -> InputFileError:
    return InputFileError(
        f"{path}: there is a recording already; choose another folder, or delete it"
    )


_LABEL = re.compile(
    r"""\s* (?: \[ [^\]\n]{1,20} \]                      # [1], [Doc_1]
          | \(? \d{1,3} [.):]                            # 1. or (1)
          | (?:document|doc|source|passage|context|chunk) [ _#]* \d{1,3} \s* [:.)-]?
        ) \s+""",
    re.VERBOSE | re.IGNORECASE,
)


def paragraphs(text: str) -> tuple[list[str], str]:
    """Return the documents and the question of a message, with empty lines between."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    blocks = [_LABEL.sub("", part, count=1) if _LABEL.match(part) else part for part in parts[:-1]]
    return [block for block in blocks if block], parts[-1] if parts else ""


class ConversationNames:
    """Names conversations by how they begin, where nobody else names them."""

    def __init__(self) -> None:
        self._numbers = LRUMap[str, int](_CONVERSATIONS)
        self._lock = ForkSafeLock()

    def of(self, beginning: str, *, is_first: bool) -> str:
        """Return the name of the latest conversation that began so, or of a new one."""
        digest = text_digest(beginning).hex()
        with self._lock:
            number = (self._numbers.peek(digest) or 0) + is_first
            self._numbers.put(digest, number)
        return f"{digest}-{number}"


_TITLES = ("title", "source", "file_name", "file_path", "url")
_LONGEST_TITLE = 200


def document_title(metadata: Mapping[str, Any]) -> str:
    """Return what people know a document by, as its metadata says; empty if it does not."""
    titles = (metadata.get(name) for name in _TITLES)
    title = next((one for one in titles if one and isinstance(one, str)), "")
    return title[:_LONGEST_TITLE]


class PromptRecorder:
    """Records chat prompts: their system message, and the blocks of their last user message."""

    def __init__(self, recorder: TraceRecorder, source: str = "OpenAI clients") -> None:
        self._recorder = recorder
        self._source = source
        self._conversations = ConversationNames()
        self._failing = FailOpen("PromptRecorder", "a prompt is not written", work="reading it")

    def note(self, messages: Any, fields: Mapping[str, Any] | None = None) -> int | None:
        """Record a prompt, return its id in the trace; skip anything else."""
        return self._failing.attempt(lambda: self._record(messages, fields or {}))

    def _record(self, messages: Any, fields: Mapping[str, Any]) -> int | None:
        call = self._recorder.read_call(messages, fields)
        if call is None:
            return None
        questions, system, tenant = call.questions, call.system, current_scope().tenant or ""
        blocks, query = paragraphs("\n\n".join(message_texts(questions[-1])))
        first = "\n\n".join(message_texts(questions[0]))
        talk = self._conversations.of(f"{tenant!r}{system}\n{first}", is_first=len(questions) == 1)
        told: dict[str, Any] = {"conversation_id": talk, "source": self._source, "sent": call.sent}
        told |= {"tenant": tenant, "marks": _marks(call, blocks, query)}
        return self._recorder.record(blocks, query, system=system or None, **told)


def _marks(call: ReadCall, texts: Sequence[str], query: str) -> list[int]:
    """Return after how many blocks marks stand; not those behind the question, which differs."""
    marks = {0} if call.sent.marks.get("system") else set()
    for end in call.marked_ends:
        at, seen = 0, set[str]()
        for text in texts:
            found = end.find(text, at)
            if found < 0:
                break
            at = found + len(text)
            seen.add(text)
        if seen and not (query and query in end[at:]):
            marks.add(len(seen))
    return sorted(marks)


def recording(recorder: TraceRecorder) -> AbstractContextManager[None]:
    """Record the prompts of all OpenAI clients made inside: chat completions, responses."""
    try:
        from openai.resources.chat.completions import AsyncCompletions, Completions
        from openai.resources.responses import AsyncResponses, Responses
    except ImportError as error:
        raise MissingExtraError("recording OpenAI clients", "openai") from error
    clients = (Completions, AsyncCompletions, Responses, AsyncResponses)
    return _noted(clients, PromptRecorder(recorder), "create")


def recording_anthropic(recorder: TraceRecorder) -> AbstractContextManager[None]:
    """Record the prompts of all Anthropic clients that are made inside."""
    try:
        from anthropic.resources.messages import AsyncMessages, Messages
    except ImportError as error:
        raise MissingExtraError("recording Anthropic clients", "anthropic") from error
    prompts = PromptRecorder(recorder, "Anthropic clients")
    # its stream() does not call create(), as OpenAI's does
    return _noted((Messages, AsyncMessages), prompts, "create", "stream")


@contextmanager
def _noted(kinds: Sequence[Any], prompts: PromptRecorder, *names: str) -> Iterator[None]:
    with ExitStack() as exits:
        for kind, name in product(kinds, names):
            method = getattr(kind, name)
            exits.callback(setattr, kind, name, method)
            setattr(kind, name, _noting(method, prompts))
        yield


def _noting(create: Callable[..., Any], prompts: PromptRecorder) -> Callable[..., Any]:
    @wraps(create)
    def noting(*args: Any, **fields: Any) -> Any:
        prompts.note(fields.get("messages", fields.get("input")), fields)
        return create(*args, **fields)

    return noting
