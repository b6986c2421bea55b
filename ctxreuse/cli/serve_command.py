"""`ctxreuse serve`: a server before engines, for every language."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ctxreuse.cli.terminal import put, say
from ctxreuse.context.fork_safety import importing_late
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.measure.options import CACHES, option
from ctxreuse.planner import ReusePlanner
from ctxreuse.rules.cache_rules import cache_profile
from ctxreuse.sharing.environment import SHARED_LOG, as_given, settled, shared_log_at

_ASKING_S = 0.5
_UVICORN: dict[str, Any] = dict.fromkeys(("access_log", "proxy_headers", "server_header"), False)
_UVICORN |= {"http": "h11", "ws": "none", "log_level": "warning", "timeout_graceful_shutdown": 60}
_UVICORN["timeout_keep_alive"] = 100  # in which clients and balancers close idle connections
_TRY = """Try it:
curl {at}/v1/chat/completions -H 'content-type: application/json' -d '{{"model": "MODEL", \
"messages": [{{"role": "user", "content": "Which?"}}], "documents": [{{"text": "A text."}}]}}'"""


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Run a server in front of engines that plans chat requests, for clients in any language.

    `ctxreuse serve --engine http://127.0.0.1:8000`

    Send documents, best first, beside `messages` to /v1/chat/completions or /v1/messages:

    `"documents": [{"id": "a", "title": "A", "text": "..."}]`

    They are shown where `{documents}` stands, else before the last question, in the order that hits
    the engine's cache. All else goes through as it came. Clients that send prompts themselves ask
    /v1/plan. The engines' key is CTXREUSE_ENGINE_KEY; without it, the callers' keys go through.
    """

    engines: Sequence[str] = option("An engine; repeat it.", (), "--engine", metavar="URL")
    cache: str = option(CACHES, "vllm")
    shared_log: str = option(
        "The shared log of all servers of these engines: a file of SQLite or the URL of a Redis. "
        "Several workers share one by themselves.",
        "",
        metavar="ADDRESS",
    )
    host: str = option("Where to listen.", "127.0.0.1")
    port: int = option("0 takes a free one.", 8100, min=0, max=65_535)
    workers: int = option("Processes.", 1, min=1)
    window_ms: float = option("How long prompts wait to be planned together.", 0.0, min=0)
    concurrency: int = option("Requests of a process at a time; more get 503.", 1_000, min=1)
    timeout_s: float = option("Seconds until an answer has to begin.", 600.0, "--timeout", min=0.01)
    max_body_bytes: int = option("The largest request, in bytes.", 32 << 20, "--max-body", min=1)
    tenant_header: str = option("The header in which a trusted gateway names the tenant.", "")
    keys: str = option(
        "The callers' API keys: a JSON file of an object from the hash of each to its tenant. The "
        "hashes' secret is CTXREUSE_KEYS_SECRET.",
        "",
        metavar="FILE",
    )
    hash_key: bool = option("Print the hash of a key on standard input.", False, "--hash-key")

    def run(self) -> None:
        """Serve until told to end."""
        try:
            with importing_late:
                import uvicorn

                from ctxreuse.serving.door import app
        except ImportError as error:
            raise MissingExtraError("ctxreuse serve", "serve") from error
        secret = os.environ.get(app.KEYS_SECRET, "")
        if self.hash_key:
            return put(app.hashed_key(sys.stdin.readline().strip(), secret))
        if not self.engines:
            raise InvalidRequestError("name at least one engine: --engine http://127.0.0.1:8000")
        if re.search(r"(?a)[^\w-]", self.tenant_header):
            raise InvalidRequestError(
                f"--tenant-header {describe(self.tenant_header)}: give a name such as x-tenant"
            )
        app.read_keys(self.keys, secret)
        cache_profile(self.cache)  # raises, as do the others, before anything is begun
        if self.shared_log:
            shared_log_at(self.shared_log)
            os.environ[SHARED_LOG] = self.shared_log
        if not (self.keys or self.tenant_header or self.host in ("127.0.0.1", "::1", "localhost")):
            say(f"all who reach {self.host} are served; --keys FILE asks for a key")
        states = asyncio.run(_states(self.engines))
        with ExitStack() as within:
            shares = self.workers > 1 and not os.environ.get(SHARED_LOG)
            if shares and settled(None, None, None)[0] == "active":
                folder = within.enter_context(TemporaryDirectory(prefix="ctxreuse-"))
                os.environ[SHARED_LOG] = str(Path(folder) / "log.sqlite")
            listening = within.enter_context(_listening(self.host, self.port))
            at = f"http://{self.host}:{listening.getsockname()[1]}"
            put(f"Serving at {at}\n{states}\n{_TRY.format(at=at)}")
            sys.stdout.flush()
            os.environ[app.SETTINGS] = json.dumps(asdict(self))
            uvicorn.run(
                f"{app.__name__}:{app.app_of_environment.__name__}",
                factory=True,
                fd=listening.fileno(),
                workers=self.workers,
                limit_concurrency=2 * self.concurrency + 100,  # refused in words before
                **_UVICORN,
            )
        return None


async def _states(engines: Sequence[str]) -> str:
    from ctxreuse.serving import EnginePool

    async with EnginePool(engines, planner=as_given(ReusePlanner)) as pool:
        ready = await pool.check(_ASKING_S)
    return "\n".join(
        f"Engine {name}: {'' if is_so else 'not '}ready" for name, is_so in ready.items()
    )


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2_048)
    except OSError as error:
        words = f"cannot listen at {host}:{port} ({error}); give another --host or --port"
        raise InvalidRequestError(words) from error
    # accepted connections inherit it; without, an answer waits 40 ms for an acknowledgement
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
