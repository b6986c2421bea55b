"""Asks an engine: a made-up prompt twice, one that shares its first half, and the first again.

Where the half was not found, another one asks whether it is from its third sight on.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.context.checks import checked_number
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import CtxreuseError, EngineError, InputFileError, InvalidRequestError
from ctxreuse.measure.options import BESIDE_TRACE, option
from ctxreuse.serving.client.connection import SEE_CAUSE, EngineConnection
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.pool.engine_pool import host_of
from ctxreuse.sharing import SharedLog, SQLiteLog
from ctxreuse.sharing.entries import UnreadableEntryError, decode
from ctxreuse.sharing.redis_log import DEFAULT_STREAM, FIELD_MARK, RedisLog

_LATEST = 2_000
_READ_AT_ONCE = 5_000


class LogWatch:
    """Reads a shared log before and after a while; what cannot be read is said in `error`."""

    def __init__(self, log: str, stream: str | None = None, timeout_s: float = 5.0) -> None:
        self.is_in_redis = "://" in log
        if stream is not None and not self.is_in_redis:
            raise InvalidRequestError(
                "--stream names a stream of a server; leave it out, because the log is a file"
            )
        self._path = Path(log)
        self._stream = _Stream(log, stream, timeout_s) if self.is_in_redis else None
        self.entries = self.writers = self.appended = self.unreadable = self.secrets = 0
        self.error: str | None = None
        self._position = ""
        self._latest: deque[bytes] = deque(maxlen=_LATEST)

    def end(self) -> None:
        """Read what has come since."""
        self.appended = self.read()
        writers = list[bytes]()
        for one in self._latest:
            with suppress(UnreadableEntryError):
                writers.append(decode(one)[0])
        self.writers = len(set(writers))
        self.unreadable = len(self._latest) - len(writers)
        if self._stream is not None:
            self.secrets = len(set(self._stream.fields) - {b""})
            if not self.entries and self.error is None:
                self.error = f"{self._stream!r} holds no entries: no process has written to it"

    def read(self) -> int:
        """Read on; return how many entries there were."""
        before, path = self.entries, self._path
        log: SharedLog | None = self._stream
        try:
            if log is None:
                if not (path.is_file() and path.with_name(f"{path.name}.key").is_file()):
                    raise InputFileError(
                        f"{path}: there is no such log, or not its key: no process has opened it"
                    )
                log = SQLiteLog(path)
            more = True
            while more:
                read = log.read(self._position, _READ_AT_ONCE)
                self._position = read.position
                self._latest.extend(read.entries)
                self.entries += len(read.entries)
                more = len(read.entries) == _READ_AT_ONCE
        except (sqlite3.Error, OSError, CtxreuseError) as error:
            self.error = str(error)
        return self.entries - before


class _Stream(RedisLog):
    """A stream of which all entries are read, whatever the secret that they were written with."""

    def __init__(self, url: str, stream: str | None, timeout_s: float) -> None:
        super().__init__(
            url, secret=secrets.token_bytes(), stream=stream or DEFAULT_STREAM, timeout_s=timeout_s
        )
        self.fields: deque[bytes] = deque(maxlen=_LATEST)

    def _entry(self, fields: Mapping[bytes, bytes]) -> bytes:
        name = next((one for one in fields if one.startswith(FIELD_MARK)), b"")
        self.fields.append(name)
        return fields[name] if name else b""


MOST_TOKENS = 20_000  # the longest prompt that is sent
PROMPTS = 4  # how many prompts are sent

DEFAULT_TOKENS = 2_800  # half of it is more than the 1,024 tokens from which hosted APIs cache

_FEWEST_TOKENS = 64
_BLOCKS_A_PROMPT = 4
_HALF_ENOUGH = 0.5
_PART_OF_A_WINDOW = 0.7  # lengths are estimated
_MOST_REPLY_BYTES = 16 * 2**20
_SETTLE_S = 0.25
_FORMS_OF_A_LIMIT: tuple[dict[str, Any], ...] = ({"max_tokens": 1}, {"max_completion_tokens": 16})
"""Newer models of hosted APIs refuse the first form; several of them refuse less than 16."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """What is looked at; at least one of them."""

    recording: str | None = option(
        "A folder that `ctxreuse record` wrote, or a trace: does anything vary in front of the "
        "contexts?",
        None,
        argument=True,
    )
    corpus: str | None = option(BESIDE_TRACE, None)
    base_url: str | None = option(
        "Send this engine four made-up prompts, each at most 20,000 tokens long: is the cache on, "
        "does usage report it, does a common half hit? The key is taken from OPENAI_API_KEY.",
        None,
    )
    metrics_url: str | None = option(
        "Where vLLM's metrics are, if not at /metrics beside the API. It gets no key.",
        None,
        "--metrics",
    )
    shared_log: str | None = option(
        "The log that the processes share: who writes to it? The file of a SQLiteLog, or the URL "
        "of a RedisLog's server. Put a URL that has a password into CTXREUSE_SHARED_LOG.",
        None,
        secret=True,
        envvar="CTXREUSE_SHARED_LOG",
    )
    stream: str | None = option(
        "The name of the RedisLog's stream, if it is not the usual one.", None
    )
    workers: int | None = option(
        "How many processes of yours send prompts to the engine.", None, min=1
    )
    model: str | None = option("The model to ask; the server's first one if not given.", None)
    tokens: int | None = option(
        "How long a prompt is, about; without it 2,800, or what large cache blocks need.",
        None,
        min=64,
        max=MOST_TOKENS,
    )
    quiet_s: float = option(
        "Seconds without a prompt, to see those of others.", 2.0, "--watch", min=0, max=3_600
    )
    timeout_s: float = option(
        "Seconds that an answer may take.", 30.0, "--timeout", min=0.1, max=3_600
    )
    report: bool = option("Say first what is installed, to report a bug.", False)
    api_key: str = field(default="EMPTY", repr=False)

    def __post_init__(self) -> None:
        looked_at = self.recording, self.base_url, self.metrics_url, self.shared_log, self.report
        if not any(looked_at):
            raise InvalidRequestError(
                "there is nothing to look at; give --base-url, --metrics, --shared-log, --report "
                "or a folder that ctxreuse record wrote"
            )
        checked_number("quiet_s", self.quiet_s)
        checked_number("timeout_s", self.timeout_s)


class PromptReading(NamedTuple):
    """What is known of one prompt."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counted: CacheUsage | None = None  # by `/metrics`
    is_odd: bool = False  # with a count that cannot be right, which is left out

    @property
    def cached(self) -> int | None:
        """The cached tokens, from the answer or as the metrics have counted."""
        if self.cached_tokens is not None or self.counted is None or self.prompt_tokens is None:
            return self.cached_tokens
        if self.counted.prompt_tokens != self.prompt_tokens:
            return None
        return min(self.counted.cached_tokens, self.prompt_tokens)


NOT_ASKED = PromptReading()  # that of a prompt that was not sent, or not answered


@dataclass(slots=True)
class EngineReadings:
    """All that was asked of an engine."""

    host: str = ""
    error: str | None = None
    status: int | None = None
    metrics_error: str | None = None
    metrics: PrefixCacheMetrics = field(default_factory=PrefixCacheMetrics)
    first: PromptReading = NOT_ASKED
    again: PromptReading = NOT_ASKED
    half: PromptReading = NOT_ASKED
    third: PromptReading = NOT_ASKED
    later: PromptReading = NOT_ASKED
    quiet: CacheUsage | None = None
    quiet_s: float = 0.0
    shared_part: float = 0.5

    @property
    def sent(self) -> list[PromptReading]:
        """What is known of the prompts that were answered, in order."""
        asked = (self.first, self.again, self.half, self.third, self.later)
        return [one for one in asked if one is not NOT_ASKED]

    def shares(self, reading: PromptReading) -> int:
        """Return about how many tokens of a prompt are those of the common half."""
        return int(self.shared_part * (reading.prompt_tokens or 0))

    def found(self, reading: PromptReading, part: float = 1.0) -> bool:
        """Return whether most of a part of a prompt that had come before was cached."""
        cached = reading.cached or 0
        return cached > 0 and cached >= _HALF_ENOUGH * part * (reading.prompt_tokens or 0)

    def found_half(self, reading: PromptReading) -> bool:
        """Return whether most of the common half was cached in a prompt with another end."""
        return self.found(reading, self.shared_part)


async def probe(
    config: DoctorConfig, announce: Callable[[str], object], log: LogWatch | None = None
) -> EngineReadings:
    """Ask an engine."""
    readings = EngineReadings()
    async with AsyncExitStack() as exits:
        page = _page(config)
        if page is not None:
            exits.push_async_callback(page[0].aclose)
            readings.host = page[0].host
        client: EngineClient | None = None
        if config.base_url is not None:
            client = EngineClient(
                config.base_url,
                config.model,
                api_key=config.api_key,
                retries=0,
                timeout_s=config.timeout_s,
                max_reply_bytes=_MOST_REPLY_BYTES,
            )
            await exits.enter_async_context(client)
            readings.host = host_of(config.base_url)
        asking = _Asking(readings, page, log)
        readings.metrics = await asking.read_metrics()
        try:
            if client is None:
                await asking.be_quiet(config.quiet_s)
            else:
                await asking.send_all(client, config, announce)
        except EngineError as error:
            # whoever reads it does not have the error itself
            readings.error, readings.status = str(error).removesuffix(SEE_CAUSE), error.status
    return readings


@dataclass(slots=True)
class _Asking:
    readings: EngineReadings
    page: tuple[EngineConnection, str] | None  # where metrics are: at a server, and a path
    log: LogWatch | None
    limit: dict[str, Any] = field(default_factory=lambda: _FORMS_OF_A_LIMIT[0])

    async def send_all(
        self, client: EngineClient, config: DoctorConfig, announce: Callable[[str], object]
    ) -> None:
        readings = self.readings
        window = await _context_window(client, config.model)
        # some of the engine's blocks, but less than its window
        blocks = _BLOCKS_A_PROMPT * (readings.metrics.block_size or 0)
        tokens = config.tokens or max(DEFAULT_TOKENS, blocks)
        longest = MOST_TOKENS if window is None else int(_PART_OF_A_WINDOW * window)
        tokens = max(_FEWEST_TOKENS, min(tokens, longest, MOST_TOKENS))
        announce(
            f"sends {PROMPTS} prompts of about {tokens:,} tokens to {readings.host}, about "
            f"{PROMPTS * tokens:,} tokens in all, and asks for the shortest answers; the prompts "
            "are made up here"
        )
        # a random beginning, so that nothing of it was cached before
        one, other, third, readings.shared_part = made_up_prompts(secrets.token_hex(16), tokens)
        readings.first = await self._send(client, one)
        readings.again = await self._send(client, one)
        readings.half = await self._send(client, other)
        if readings.found(readings.again) and not readings.found_half(readings.half):
            readings.third = await self._send(client, third)
        await self.be_quiet(config.quiet_s)
        readings.later = await self._send(client, one)

    async def be_quiet(self, quiet_s: float) -> None:
        await asyncio.sleep(min(_SETTLE_S, quiet_s))  # the page has our own prompts by then
        before = await self.read_metrics()
        if self.log is not None:
            self.log.read()
        await asyncio.sleep(quiet_s)
        if self.log is not None:
            self.log.end()
        self.readings.quiet_s = quiet_s
        self.readings.quiet = _counted(before, await self.read_metrics())

    async def read_metrics(self) -> PrefixCacheMetrics:
        """Return what the metrics say now: nothing where they do not answer, now or before."""
        if self.page is not None and self.readings.metrics_error is None:
            connection, path = self.page
            try:
                return PrefixCacheMetrics.parse(await connection.ask("GET", path))
            except EngineError as error:
                self.readings.metrics_error = str(error).removesuffix(SEE_CAUSE)
        return PrefixCacheMetrics()

    async def _send(self, client: EngineClient, text: str) -> PromptReading:
        before, faults = await self.read_metrics(), client.faults
        messages = [{"role": "user", "content": text}]
        try:
            answer = await client.complete(messages, **self.limit)
        except EngineError as error:
            if error.status != 400 or self.limit is _FORMS_OF_A_LIMIT[-1]:
                raise
            self.limit = _FORMS_OF_A_LIMIT[-1]
            answer = await client.complete(messages, **self.limit)
        counted = _counted(before, await self.read_metrics())
        is_odd = client.faults > faults
        return PromptReading(answer.prompt_tokens, answer.cached_tokens, counted, is_odd)


def made_up_prompts(name: str, tokens: int) -> tuple[str, str, str, float]:
    """Return prompts of about as many tokens, and what share of the second they all begin with."""
    common = _passage(f"Probe {name}: a list of places, made up to look at a cache.", tokens // 2)
    rest = tokens - tokens // 2
    ends = ("It goes on in one way.", "Now it takes another turn.", "At last it ends elsewhere.")
    one, other, third = (common + _passage(end, rest) for end in ends)
    return one, other, third, len(common) / len(other)


def _passage(opening: str, tokens: int) -> str:
    lines, length = [opening], estimate_tokens(opening)
    while length < tokens:
        lines.append(f"In place {len(lines)} there is a river, a bridge and an old market.")
        length += estimate_tokens(lines[-1]) + 1
    return "\n".join(lines) + "\n"


async def _context_window(client: EngineClient, model: str | None) -> int | None:
    """Return the engine's window; None if it does not say that of a model that is known."""
    try:
        return await client.context_window()
    except EngineError as error:
        if model is None or error.status is None:
            raise
        return None  # a server without this route answers to a model's name all the same


def _page(config: DoctorConfig) -> tuple[EngineConnection, str] | None:
    """Return where metrics are: as given, or else beside the API."""
    root, key, path = config.base_url, config.api_key, ""
    if config.metrics_url is not None:
        root, key = config.metrics_url, "EMPTY"  # whoever else serves metrics does not get the key
        with suppress(ValueError):  # a broken address, which the connection names
            parts = urlsplit(root)
            root, path = parts._replace(path="").geturl(), parts.path.rstrip("/")
    if root is None:
        return None
    page = EngineConnection(root, key, None, 0, 0.0, config.timeout_s, _MOST_REPLY_BYTES)
    return page, path or "/metrics"


def _counted(before: PrefixCacheMetrics, after: PrefixCacheMetrics) -> CacheUsage | None:
    """Return what was counted between two readings; None if that is not known, or was reset."""
    earlier = before.prefix_cache_queries, before.prefix_cache_hits
    later = after.prefix_cache_queries, after.prefix_cache_hits
    if None in (*earlier, *later):
        return None
    queries, hits = (int(new or 0) - int(old or 0) for old, new in zip(earlier, later, strict=True))
    return CacheUsage(queries, hits) if queries >= 0 and hits >= 0 else None
