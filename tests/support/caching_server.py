"""The provider of `caching_provider` behind HTTP, for the official SDKs as clients."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

from caching_provider import Json, Protocol, Provider, RefusedError, Usage, count_tokens

ANSWER = "In France [Doc_1]."


class CachingServer:
    """Answers chat completions, responses and messages.

    Attributes:
        bodies: The requests that came, in order.
        headers: Their headers; names are lower case.
        usages: What each that was answered is billed for.
        refusals: Why the others were refused.
        now: The provider's time, in seconds; tests set it.
        diagnostics: What answers of Anthropic's protocol say of a miss; tests set it.
        before_first_token: Called when a prompt was looked up and nothing of it is stored yet.
    """

    def __init__(self, protocol: Protocol, minimum: int = 1_024) -> None:
        self.provider = Provider(protocol, minimum)
        self.answer = ANSWER
        self.bodies: list[Json] = []
        self.headers: list[dict[str, str]] = []
        self.usages: list[Usage] = []
        self.refusals: list[str] = []
        self.now = 1_000.0
        self.diagnostics: Json | None = None
        self.before_first_token: Callable[[], object] = lambda: None
        self.url = ""
        self._lock = threading.Lock()

    @property
    def bill(self) -> float:
        """What all prompts cost, in uncached tokens."""
        return sum(usage.bill() for usage in self.usages)

    def let_all_come(self) -> None:
        """Have the first call answered when another one has come, if any is sent before that."""
        others, numbers = threading.Event(), count()

        def hold() -> None:
            if next(numbers):
                others.set()
            else:
                others.wait(0.5)

        self.before_first_token = hold

    def reckon(self, body: Json, headers: dict[str, str]) -> Usage:
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            try:
                usage, stored = self.provider.read(body, self.now)
            except RefusedError as error:
                self.refusals.append(str(error))
                raise
        self.before_first_token()
        with self._lock:
            self.provider.store(stored, self.now)
            self.usages.append(usage)
        return usage


@contextmanager
def caching_server(protocol: Protocol, minimum: int = 1_024) -> Iterator[CachingServer]:
    server = CachingServer(protocol, minimum)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_": server}))
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_: CachingServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            usage = self.server_.reckon(body, headers)
        except RefusedError as error:
            kind = {"type": "invalid_request_error", "message": str(error)}
            self._send(400, {"type": "error", "error": kind})
            return
        path = self.path.partition("?")[0]
        if path == "/v1/messages":
            self._messages(body, usage)
        elif path == "/v1/responses":
            self._responses(body, usage)
        else:
            self._chat(body, usage)

    def _chat(self, body: Json, usage: Usage) -> None:
        answer = self.server_.answer
        told = _openai_usage(usage, answer)
        base = {"id": "c1", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": answer},
                "finish_reason": "stop",
            }
            self._send(
                200, base | {"object": "chat.completion", "choices": [choice], "usage": told}
            )
            return
        base["object"] = "chat.completion.chunk"
        deltas = [({"role": "assistant", "content": answer}, None), ({}, "stop")]
        events = [
            base | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
            for delta, finish in deltas
        ]
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(base | {"choices": [], "usage": told})
        self._stream([(None, one) for one in events], done=True)

    def _responses(self, body: Json, usage: Usage) -> None:
        answer = self.server_.answer
        told = _openai_usage(usage, answer)
        content = [{"type": "output_text", "text": answer, "annotations": []}]
        message = {
            "type": "message", "id": "m1", "role": "assistant", "status": "completed",
            "content": content,
        }  # fmt: skip
        reply = {
            "id": "r1", "object": "response", "created_at": 1, "model": body["model"],
            "status": "completed", "output": [message], "parallel_tool_calls": True,
            "tool_choice": "auto", "tools": [],
            "usage": {
                "input_tokens": told["prompt_tokens"],
                "input_tokens_details": told["prompt_tokens_details"],
                "output_tokens": told["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": told["total_tokens"],
            },
        }  # fmt: skip
        self._send(200, reply)

    def _messages(self, body: Json, usage: Usage) -> None:
        answer = self.server_.answer
        told = {
            "input_tokens": usage.uncached,
            "cache_read_input_tokens": usage.read,
            "cache_creation_input_tokens": sum(usage.written.values()),
            "cache_creation": {
                "ephemeral_5m_input_tokens": usage.written.get("5m", 0),
                "ephemeral_1h_input_tokens": usage.written.get("1h", 0),
            },
            "output_tokens": count_tokens(answer),
        }
        reply = {
            "id": "a1", "type": "message", "role": "assistant", "model": body["model"],
            "content": [{"type": "text", "text": answer}], "stop_reason": "end_turn",
            "stop_sequence": None, "usage": told, "diagnostics": self.server_.diagnostics,
        }  # fmt: skip
        if not body.get("stream"):
            self._send(200, reply)
            return
        start = reply | {"content": [], "stop_reason": None, "usage": told | {"output_tokens": 1}}
        steps: list[Json] = [
            {"type": "message_start", "message": start},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": answer},
            },
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": told,
            },
            {"type": "message_stop"},
        ]
        self._stream([(one["type"], one) for one in steps])

    def _send(self, status: int, body: Json) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.send_header("connection", "close")  # no thread stays with a client's connection
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, events: list[tuple[str | None, Any]], *, done: bool = False) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for name, event in events:
            line = "" if name is None else f"event: {name}\n"
            self.wfile.write(f"{line}data: {json.dumps(event)}\n\n".encode())
        if done:
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def _openai_usage(usage: Usage, answer: str) -> Json:
    output = count_tokens(answer)
    return {
        "prompt_tokens": usage.total,
        "completion_tokens": output,
        "total_tokens": usage.total + output,
        "prompt_tokens_details": {
            "cached_tokens": usage.read,
            "cache_write_tokens": sum(usage.written.values()),
        },
    }
