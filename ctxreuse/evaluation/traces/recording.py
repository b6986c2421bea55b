"""Records what an application sends: a corpus and a trace, as JSON lines.

The files are those that `read_corpus` and `read_trace` take. In a recording
without text, salted hashes name blocks, conversations and tenants; the salt is kept nowhere.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, Any, Self

from ctxreuse.context.blocks import BlockId, ContextBlock, ContextRequest
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.context.tokens import as_token_counter
from ctxreuse.errors import InputFileError
from ctxreuse.evaluation.traces.json_lines import file_errors

CORPUS, TRACE = "corpus.jsonl", "trace.jsonl"
"""The files of a recording."""

_CONVERSATIONS = 10_000
"""Conversations whose turns are counted; the least recently used is forgotten first."""


class TraceRecorder:
    """Writes requests into a folder as they come; safe for the threads of one process.

    Nothing is changed on its way, and an error here never fails a request: it is logged once and
    counted in `faults`.

    Args:
        folder: Where to write `corpus.jsonl` and `trace.jsonl`; made if it is not there. Only its
            owner may read the files.
        hash_only: Whether to store no text: no document, no question, no system message, and no
            name of a block, a conversation or a tenant.
        token_counter: As for `ReusePlanner`.

    Raises:
        InputFileError: The folder cannot be written, or holds a recording already.

    Attributes:
        requests: The number of requests written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, TraceRecorder(folder) as recorder:
        ...     recorder.record([ContextBlock(id=7, text="The Seine.")], "Which river?")
        ...     print(Path(folder, "trace.jsonl").read_text().rstrip())
        {"request_id": 1, "query": "Which river?", "blocks": [7]}
    """

    def __init__(
        self, folder: str | Path, *, hash_only: bool = False, token_counter: Any = None
    ) -> None:
        self.requests = 0
        self._hash_only = hash_only
        self._count_tokens = as_token_counter(token_counter)
        self._salt = secrets.token_bytes(32)
        self._digests: dict[BlockId, bytes] = {}
        self._turns = LRUMap[tuple[str, str | int], int](_CONVERSATIONS)
        self._lock = Lock()
        self._failing = FailOpen("TraceRecorder", "a request is not written", work="recording")
        self._paths = [Path(folder) / name for name in (CORPUS, TRACE)]
        self._files = list(map(_new_file, self._paths))

    @property
    def faults(self) -> int:
        """The number of requests that could not be written."""
        return self._failing.faults

    def record(
        self,
        blocks: Iterable[ContextBlock | str],
        query: str = "",
        *,
        system: str | None = None,
        conversation_id: str | int | None = None,
        tenant: str = "",
    ) -> None:
        """Write a request.

        Args:
            blocks: Its blocks, in the order in which they are sent.
            query: The question.
            system: The system message's text.
            conversation_id: Names the conversation, within the tenant; its turns are counted.
            tenant: The tenant that the request belongs to.
        """
        self._failing.attempt(
            lambda: self._write(
                ContextRequest(
                    blocks, query, system=system, conversation_id=conversation_id, tenant=tenant
                )
            ),
            lambda: None,
        )

    def close(self) -> None:
        """Close the files; what is recorded afterwards counts in `faults`."""
        with self._lock:
            for file in self._files:
                file.close()

    def discard(self) -> None:
        """Close the files and delete them."""
        self.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self.close()

    def _write(self, request: ContextRequest) -> None:
        with self._lock:
            corpus, trace = self._files
            ids = [self._written(block, corpus) for block in request.unique_blocks.values()]
            line: dict[str, Any] = {"request_id": self.requests + 1}
            if not self._hash_only:
                line["query"] = request.query
            if request.system is not None:
                line["system"] = self._name(request.system)
            if request.tenant:
                line["tenant"] = self._name(request.tenant)
            if request.conversation_id is not None:
                line["conversation_id"] = self._name(request.conversation_id)
                line["turn"] = self._next_turn(request.tenant, request.conversation_id)
            _append(trace, line | {"blocks": ids})
            self.requests += 1

    def _written(self, block: ContextBlock, corpus: IO[str]) -> BlockId:
        """Return a block's name, which the corpus has from now on."""
        digest = self._digest(block.text)
        name: BlockId = digest.hex() if self._hash_only else block.id
        while self._digests.get(name, digest) != digest:  # the same id with another text
            name = f"{name}~{digest.hex()}"
        if name not in self._digests:
            tokens = self._count_tokens(block.text) if block.tokens is None else block.tokens
            line: dict[str, Any] = {"id": name, "tokens": tokens}
            if not self._hash_only:
                line["text"] = block.text
            _append(corpus, line)
            self._digests[name] = digest
        return name

    def _name(self, name: str | int) -> str | int:
        return self._digest(repr(name)).hex() if self._hash_only else name

    def _digest(self, text: str) -> bytes:
        encoded = text.encode("utf-8", "surrogatepass")
        return blake2b(encoded, digest_size=16, key=self._salt).digest()

    def _next_turn(self, tenant: str, conversation_id: str | int) -> int:
        key = (tenant, conversation_id)
        turn = self._turns.peek(key) or 0
        self._turns.put(key, turn + 1)
        return turn


def _append(file: IO[str], line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def _new_file(path: Path) -> IO[str]:
    with file_errors(path, "written"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except FileExistsError as error:
            raise InputFileError(
                f"{path}: there is a recording already; choose another folder, or delete it"
            ) from error
    return os.fdopen(handle, "w", encoding="utf-8")
