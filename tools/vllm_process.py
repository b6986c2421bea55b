"""vLLM servers on this machine as processes: start, find, stop, kill.

A server's process id, start time and options stand in a file named after its port, so that another
process (`make vllm-stop`, a test) finds it again. A number alone names no process for long: what
carries it now is taken for the server only if its command line and its start time say so.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from packaged_models import SMALLEST, known_model
from vllm_environment import HOME, PYTHON, Say, SetupError, prepare_model

HOST = "127.0.0.1"
DEFAULT_PORT = 8000
MODEL_CONTEXT = 8192
LOCAL_SOCKETS = -1
"""Instead of a port for events: sockets in the file system, which only this machine reaches."""

_STATE = HOME / "servers"
# not there: paths of sockets have to be short
_SOCKETS = Path(tempfile.gettempdir()) / f"ctxreuse-vllm-{getattr(os, 'getuid', int)()}"
_MODULE = "vllm.entrypoints.openai.api_server"
_LONGEST_SOCKET_PATH = 100  # 107 on Linux, 103 on macOS
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server is started."""

    model: str = SMALLEST.name  # the name of one of the packaged models
    port: int = DEFAULT_PORT  # where it listens, on the loopback interface
    block_size: int = 32  # tokens of a cache block; attention on CPUs needs a multiple of 32
    # What the KV cache holds, in tokens. Whole blocks of it are used, and vLLM keeps one of them
    # back.
    kv_cache_tokens: int = 98_304
    # longest prompt and answer, in tokens; never more than the cache holds
    max_model_len: int = MODEL_CONTEXT
    # the port where the server publishes what its cache stores and drops, on all interfaces, with
    # replays on the next port; LOCAL_SOCKETS for sockets in the file system; None for no events
    kv_events: int | None = None
    extra: tuple[str, ...] = ()  # further arguments for vLLM

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache, the one that vLLM keeps back included."""
        return self.kv_cache_tokens // self.block_size

    @property
    def longest_request(self) -> int:
        """What `max_model_len` comes to with this cache."""
        return min(self.max_model_len, (self.blocks - 1) * self.block_size)

    @property
    def events_endpoint(self) -> str | None:
        """Where a subscriber connects for cache events."""
        return self._endpoint("events", 0, f"tcp://{HOST}:")

    @property
    def replay_endpoint(self) -> str | None:
        """Where a subscriber asks for events that it missed."""
        return self._endpoint("replay", 1, f"tcp://{HOST}:")

    def _endpoint(self, name: str, offset: int, tcp: str) -> str | None:
        if self.kv_events is None:
            return None
        if self.kv_events == LOCAL_SOCKETS:
            return f"ipc://{_SOCKETS}/{self.port}.{name}"
        return f"{tcp}{self.kv_events + offset}"

    def arguments(self, folder: Path) -> list[str]:
        """Return vLLM's command line for these options and the model's folder."""
        arguments = [
            *("--model", str(folder), "--served-model-name", self.model),
            *("--host", HOST, "--port", str(self.port)),
            # bfloat16 is ten times slower where the processor lacks AVX-512
            *("--dtype", "float32", "--enforce-eager"),
            *("--block-size", str(self.block_size)),
            *("--num-gpu-blocks-override", str(self.blocks)),
            *("--max-model-len", str(self.longest_request)),
            "--enable-prompt-tokens-details",
        ]
        if known_model(self.model).config is not None:
            arguments += ["--load-format", "dummy"]
        if self.kv_events is not None:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                # vLLM binds `*` and ipc endpoints only, and connects to any other
                "endpoint": self._endpoint("events", 0, "tcp://*:"),
                "replay_endpoint": self._endpoint("replay", 1, "tcp://*:"),
                "topic": "kv",
            }
            arguments += ["--kv-events-config", json.dumps(events)]
        return [*arguments, *self.extra]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that this tool started and that is running."""

    pid: int  # its process, which leads a process group of its own
    options: ServerOptions  # what it was started with
    # when its process began, as the system says it; None where that was not noted
    started: str | None = field(default=None, compare=False)

    @property
    def root_url(self) -> str:
        """Where `/health`, `/metrics` and `/tokenize` are."""
        return f"http://{HOST}:{self.options.port}"

    @property
    def base_url(self) -> str:
        """What OpenAI clients take as `base_url`."""
        return f"{self.root_url}/v1"

    @property
    def log(self) -> Path:
        """The server's output."""
        return _log_file(self.options.port)


def start(options: ServerOptions, *, timeout_s: float = 300, say: Say = print) -> Server:
    """Start a server and wait until it answers; one that runs already is returned as it is."""
    running = find(options.port)
    if running is not None and running.options != options:
        raise SetupError(
            f"a server with other options runs at {running.base_url}; stop it first, or choose "
            "another --port"
        )
    if running is None:
        _check(options)
        running = _launch(options, prepare_model(known_model(options.model), say))
        say(f"vLLM starts as process {running.pid}; its log is {running.log}")
    _await_health(running, timeout_s)
    say(f"vLLM answers at {running.base_url} (model {options.model})")
    return running


def find(port: int) -> Server | None:
    """Return the server that this tool started at a port, if it is still running."""
    state = _state_file(port)
    if not state.exists():
        return None
    saved = json.loads(state.read_text(encoding="utf-8"))
    options = saved["options"] | {"extra": tuple(saved["options"]["extra"])}
    server = Server(saved["pid"], ServerOptions(**options), saved.get("started"))
    if not _is_running(server):
        state.unlink(missing_ok=True)
        return None
    return server


def running_servers() -> Iterator[Server]:
    """Yield all servers that this tool started and that are running."""
    for state in sorted(_STATE.glob("*.json")):
        server = find(int(state.stem))
        if server is not None:
            yield server


def stop(server: Server, *, timeout_s: float = 30) -> None:
    """Ask a server to end, and end it if it does not within `timeout_s` seconds."""
    _signal(server, signal.SIGTERM)
    if _ends_within(server, timeout_s):
        _forget(server)
    else:
        kill(server)


def kill(server: Server) -> None:
    """End a server and all its processes at once, as a crash would."""
    _signal(server, signal.SIGKILL)
    if not _ends_within(server, 30):
        raise SetupError(f"process {server.pid} does not end; look at {server.log}")
    _forget(server)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_healthy(server: Server) -> bool:
    """Return whether a server answers."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{server.root_url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _check(options: ServerOptions) -> None:
    if options.block_size < 32 or options.block_size % 32:
        raise SetupError(
            f"block size {options.block_size}: attention on CPUs needs a multiple of 32"
        )
    if options.blocks < 2:
        raise SetupError(
            f"a KV cache of {options.kv_cache_tokens} tokens is less than two blocks of "
            f"{options.block_size}, and vLLM keeps one back; give it more"
        )
    local = (options.events_endpoint or "").removeprefix("ipc://")
    if local.startswith("/") and len(local) > _LONGEST_SOCKET_PATH:
        raise SetupError(
            f"{local} is too long a path for a socket; give --kv-events a port, or set "
            "TMPDIR to a folder with a shorter path"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((HOST, options.port))
        except OSError as error:
            raise SetupError(
                f"port {options.port} is taken by something that this tool did not start "
                f"({error.strerror}); choose another --port, or if it is the vLLM that you want "
                f"to use: export CTXREUSE_BASE_URL=http://{HOST}:{options.port}/v1"
            ) from error


def _launch(options: ServerOptions, folder: Path) -> Server:
    _STATE.mkdir(parents=True, exist_ok=True)
    _SOCKETS.mkdir(mode=0o700, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    cache_bytes = (
        options.blocks * options.block_size * known_model(options.model).kv_bytes_per_token
    )
    gibibytes = -(-cache_bytes // 2**30)
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(gibibytes),
        "VLLM_CPU_OMP_THREADS_BIND": _processors(),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **inherited,  # what the user has set wins
    }
    with _log_file(options.port).open("wb") as log:
        process = subprocess.Popen(
            # the `vllm` command needs package metadata that the CPU build lacks
            [str(PYTHON), "-m", _MODULE, *options.arguments(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=_STATE,  # Python looks for modules in the current folder first
            start_new_session=True,
        )
    _children[process.pid] = process
    server = Server(process.pid, options, _start_time(process.pid))
    _state_file(options.port).write_text(json.dumps(asdict(server)), encoding="utf-8")
    return server


def _await_health(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_healthy(server):
        ended = not _is_running(server)
        if ended or time.monotonic() > deadline:
            stop(server)
            tail = server.log.read_text(encoding="utf-8", errors="replace")[-3000:]
            what = "ended" if ended else f"did not answer within {timeout_s:.0f} s and was stopped"
            raise SetupError(f"{tail}\nvLLM {what}; its whole log is {server.log}")
        time.sleep(0.25)


def _forget(server: Server) -> None:
    _children.pop(server.pid, None)  # from now on the number may be another process's
    current = find(server.options.port)
    if current is None or current.pid == server.pid:  # a later one may run at the same port
        _state_file(server.options.port).unlink(missing_ok=True)


def _processors() -> str:
    if not hasattr(os, "sched_getaffinity"):
        return "auto"
    return ",".join(str(number) for number in sorted(os.sched_getaffinity(0)))


def _state_file(port: int) -> Path:
    return _STATE / f"{port}.json"


def _log_file(port: int) -> Path:
    return _STATE / f"{port}.log"


def _is_running(server: Server) -> bool:
    """Return whether the server runs; a process that cannot be told to be it is a stranger."""
    child = _children.get(server.pid)
    if child is not None:
        return child.poll() is None
    command = _command_line(server.pid)
    port = ("--port", str(server.options.port))
    if _MODULE not in command or port not in pairwise(command):
        return False
    return server.started is None or server.started == _start_time(server.pid)


def _command_line(pid: int) -> list[str]:
    """Return a process's arguments; none where there is no such process, or it has ended."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # no such process, or a system without /proc
        return _ps(pid, "command=").split()
    return raw.decode(errors="replace").split("\0")


def _start_time(pid: int) -> str | None:
    """Return when a process began, in words or ticks that only it has; None if that is unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _ps(pid, "lstart=").strip() or None
    # the 22nd field; the second is the program's name in parentheses, which may hold anything
    return stat.rpartition(")")[2].split()[19]


def _ps(pid: int, what: str) -> str:
    """Return what `ps` says of a process, in one language; "" where it says nothing."""
    try:
        shown = subprocess.run(
            ["ps", "-ww", "-o", what, "-p", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except OSError:
        return ""
    return shown.stdout if shown.returncode == 0 else ""


def _ends_within(server: Server, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while _is_running(server):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _signal(server: Server, number: signal.Signals) -> None:
    # a child's group may outlive it; the system keeps the number back as long as it does
    if server.pid not in _children and not _is_running(server):
        return
    try:
        os.killpg(server.pid, number)
    except ProcessLookupError:
        return
