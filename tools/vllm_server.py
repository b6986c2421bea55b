"""A model on a real vLLM server, on a machine without a GPU.

    python tools/vllm_server.py start     install what is missing, start, wait until it answers
    python tools/vllm_server.py status    what runs, where, with which options
    python tools/vllm_server.py stop      stop what this tool started
    python tools/vllm_server.py install   only build the environment, .venv-vllm
    python tools/vllm_server.py model     only prepare the model

The model is SmolLM2-135M-Instruct, or with --model a larger one, with a context of 8,192 tokens.
Larger ones are qwen2.5-coder-0.5b (2.5 GB of disk) and qwen2.5-coder-1.5b (8 GB). With a GPU you
need none of this: run any vLLM with --enable-prompt-tokens-details and export
CTXREUSE_BASE_URL=http://HOST:PORT/v1.
CTXREUSE_VLLM_HOME names another folder than .venv-vllm for all of this.
"""

from __future__ import annotations

import argparse
import sys

from packaged_models import MODELS, SMALLEST, known_model
from vllm_environment import SetupError, install, prepare_model
from vllm_process import (
    DEFAULT_PORT,
    LOCAL_SOCKETS,
    ServerOptions,
    find,
    is_healthy,
    running_servers,
    start,
    stop,
)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return 1 if it failed."""
    options = _parser().parse_args(arguments)
    try:
        match options.command:
            case "install":
                install()
            case "model":
                prepare_model(known_model(options.model))
            case "start":
                _start(options)
            case "stop":
                _stop(options.port)
            case "status":
                _status()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _start(options: argparse.Namespace) -> None:
    server = start(
        ServerOptions(
            model=options.model,
            port=options.port,
            block_size=options.block_size,
            kv_cache_tokens=options.kv_cache_tokens,
            max_model_len=options.max_model_len,
            kv_events=options.kv_events,
            extra=tuple(options.vllm),
        ),
        timeout_s=options.timeout,
    )
    if server.options.kv_events is not None:
        print(f"cache events: {server.options.events_endpoint}")
        print(f"     replays: {server.options.replay_endpoint}")
    print(f"\nexport CTXREUSE_BASE_URL={server.base_url}")
    print(
        f"curl -s {server.base_url}/chat/completions -H 'Content-Type: application/json' "
        f"""-d '{{"model": "{options.model}", "max_tokens": 50, """
        """"messages": [{"role": "user", "content": "Where is Paris?"}]}'"""
    )


def _stop(port: int | None) -> None:
    if port is None:
        servers = list(running_servers())
    else:
        servers = [server for server in [find(port)] if server is not None]
    for server in servers:
        stop(server)
        print(f"stopped {server.base_url}")
    if not servers:
        print("no server of this tool runs" + (f" at port {port}" if port is not None else ""))


def _status() -> None:
    servers = list(running_servers())
    for server in servers:
        options = server.options
        state = "answers" if is_healthy(server) else "does not answer (yet)"
        print(
            f"{server.base_url}  {options.model}  {state}  process {server.pid}  log {server.log}"
        )
        print(
            f"  cache of {options.kv_cache_tokens:,} tokens in blocks of {options.block_size}, "
            f"requests of up to {options.longest_request:,} tokens, "
            f"events: {options.events_endpoint or 'off'}"
        )
    if not servers:
        print("no server of this tool runs; start one with: python tools/vllm_server.py start")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("install", help="build .venv-vllm: about 3.5 GB and four minutes, once")
    preparing = commands.add_parser("model", help="prepare a model: half a minute or more, once")
    commands.add_parser("status", help="show the servers that this tool started")
    stopping = commands.add_parser("stop", help="stop the servers that this tool started")
    stopping.add_argument("--port", type=int, help="only the one at this port")
    starting = commands.add_parser(
        "start",
        help="start a server, or find it running, and wait until it answers",
        description="Listens on 127.0.0.1 only. Arguments after -- go to vLLM as they are.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for command in (preparing, starting):
        command.add_argument(
            "--model",
            default=SMALLEST.name,
            help=f"one of {', '.join(MODELS)} (default: %(default)s)",
        )
    default = ServerOptions()
    starting.add_argument("--port", type=int, default=DEFAULT_PORT, help="where to listen")
    starting.add_argument(
        "--kv-cache-tokens",
        type=int,
        default=default.kv_cache_tokens,
        help="what the KV cache holds; small, it has to evict. 24 to 57 KB of memory a token",
    )
    starting.add_argument(
        "--block-size", type=int, default=default.block_size, help="tokens of a cache block"
    )
    starting.add_argument(
        "--max-model-len", type=int, default=default.max_model_len, help="longest request"
    )
    starting.add_argument(
        "--kv-events",
        type=int,
        nargs="?",
        const=LOCAL_SOCKETS,
        metavar="PORT",
        help="publish what the cache stores and drops: at this port of all interfaces (replays at "
        "the next one; it shows the prompts' tokens to whoever connects), or without a port on "
        "sockets in the file system",
    )
    starting.add_argument("--timeout", type=float, default=300, help="seconds to wait for it")
    starting.add_argument("vllm", nargs="*", help="arguments for vLLM, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
