"""`ctxreuse serve` as a process: it starts soon, says where, and drains at its end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import fields

import httpx
import pytest
import yaml
from caching_server import caching_server
from cli_helpers import words as words_of
from doc_pages import ROOT
from door_helpers import CHAT, asking

from ctxreuse.cli.serve_command import _UVICORN, ServeCommand
from ctxreuse.errors import MissingExtraError

PROGRAM = "if __name__ == '__main__':\n    from ctxreuse.cli import main; main()"


@contextmanager
def process(tmp_path, *options, **environment):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with open(tmp_path / "errors", "w") as errors:
        running = subprocess.Popen(
            [sys.executable, str(program), "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "NO_PROXY": "*", **environment},
        )
    said = []
    try:
        for line in running.stdout:
            said.append(line)
            if line.startswith("curl "):
                break
        yield running, said
    finally:
        running.terminate()
        running.wait(20)
        running.stdout.close()


def test_it_says_where_it_serves_the_engines_health_and_a_line_to_try(tmp_path):
    with caching_server("openai") as engine:
        engines = ("--engine", engine.url, "--engine", "http://user:secret@127.0.0.1:9")
        with process(tmp_path, *engines) as (running, said):
            url = said[0].split()[-1]
            assert said[:4] == [
                f"Serving at {url}\n",
                f"Engine {engine.url.removeprefix('http://')}: ready\n",
                "Engine 127.0.0.1:9: not ready\n",
                "Try it:\n",
            ]
            assert httpx.get(f"{url}/healthz", trust_env=False).json() == {"status": "ok"}
            line = said[4].replace("MODEL", "m")
            tried = subprocess.run(
                [sys.executable, "-c", TRY, line], capture_output=True, text=True, check=True
            )
            assert json.loads(tried.stdout)["choices"]
            assert "A text." in engine.bodies[-1]["messages"][0]["content"]
            running.send_signal(signal.SIGTERM)
            assert running.wait(10) in (0, -signal.SIGTERM)
    logged = {"127.0.0.1:9 rests for 10 s: it was asked and is not ready"}
    assert set((tmp_path / "errors").read_text().splitlines()) == logged


# what curl does with the line
TRY = """
import httpx, shlex, sys
_, url, _, header, _, body = shlex.split(sys.argv[1])
name, _, value = header.partition(": ")
print(httpx.post(url, content=body, headers={name: value}, trust_env=False).text)
"""


@pytest.mark.slow
def test_several_workers_share_what_was_sent_and_leave_no_file(tmp_path):
    with caching_server("openai") as engine:
        options = ("--engine", engine.url, "--workers", "2")
        with process(tmp_path, *options, TMPDIR=str(tmp_path)) as (_, said):
            url = said[0].split()[-1]
            orders = []
            for number in range(13):
                names = "bca" if number else "abc"
                with httpx.Client(trust_env=False, timeout=20) as client:  # whichever takes it
                    answer = client.post(f"{url}{CHAT}", json=asking(names, ctxreuse=True))
                orders.append("".join(answer.json()["ctxreuse"]["order"]))
                time.sleep(0.1 if number else 1.0)  # for the log
        left = [one.name for one in tmp_path.iterdir() if one.name.startswith("ctxreuse-")]
    assert orders == ["abc"] * 13
    assert left == []


@pytest.mark.slow
def test_workers_in_shadow_mode_name_no_log_and_end_with_their_parent(tmp_path):
    with caching_server("openai") as engine:
        options = ("--engine", engine.url, "--workers", "2")
        with process(tmp_path, *options, CTXREUSE_MODE="shadow") as (running, said):
            url = said[0].split()[-1]
            with httpx.Client(trust_env=False, timeout=20) as client:
                assert client.post(f"{url}{CHAT}", json=asking("abc")).status_code == 200
            running.kill()
            begun = time.monotonic()
            with suppress(httpx.NetworkError, httpx.RemoteProtocolError):
                while httpx.get(f"{url}/healthz", trust_env=False):
                    assert time.monotonic() < begun + 10
    assert "set and not used" not in (tmp_path / "errors").read_text()


def test_at_its_end_it_answers_what_it_has_begun(tmp_path):
    with caching_server("openai") as engine:
        came, goes_on = threading.Event(), threading.Event()

        def hold():
            came.set()
            goes_on.wait(10)

        engine.before_first_token = hold
        with process(tmp_path, "--engine", engine.url) as (running, said):
            url, answers = said[0].split()[-1], []

            def ask():
                answers.append(httpx.post(f"{url}{CHAT}", json=asking("ab"), trust_env=False))

            asking_ = threading.Thread(target=ask)
            asking_.start()
            assert came.wait(10)
            running.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            goes_on.set()
            asking_.join(10)
            running.wait(10)
    assert answers[0].status_code == 200


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        ([], {}, "name at least one engine"),
        (["--engine", "nowhere"], {}, "base_url must be the engine's address"),
        (["--engine", "http://h", "--cache", "none"], {}, "none"),
        (["--engine", "http://h", "--engine", "http://h/v1"], {}, "to one --engine only"),
        (["--engine", "http://h", "--workers", "0"], {}, "--workers"),
        (["--engine", "http://h", "--timeout", "-1"], {}, "--timeout"),
        (["--engine", "http://h", "--tenant-header", "x-é"], {}, "give a name such as x-tenant"),
        (["--engine", "http://h", "--keys", "no-file"], {"CTXREUSE_KEYS_SECRET": "s"}, "no-file"),
        (["--engine", "http://h", "--keys", "no-file"], {}, "CTXREUSE_KEYS_SECRET"),
        (["--engine", "http://h", "--shared-log", "redis://h"], {}, "CTXREUSE_SHARED_LOG_SECRET"),
        (["--engine", "http://h", "--shared-log", "postgres://h"], {}, "such as 'redis://host"),
        (["--engine", "http://127.0.0.1:9", "--host", "256.1.1.1"], {}, "cannot listen"),
        (["--engine", "http://127.0.0.1:9", "--host", "256.1.1.1"], {}, "all who reach 256.1.1.1"),
        (["--engine", "http://127.0.0.1:9", "--port", "99999"], {}, "--port"),
    ],
)
def test_what_is_wrong_is_told_before_it_serves(run, monkeypatch, options, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, out, err = run("serve", *options)
    assert (code, out) == (2, "")
    assert words in words_of(err)


def test_a_missing_extra_is_told_before_any_work(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = run("serve")
    assert code == 2
    assert str(MissingExtraError("ctxreuse serve", "serve")) in err


def test_idle_connections_are_closed_by_clients_first():
    assert _UVICORN["timeout_keep_alive"] > 90  # as Go does; .NET and AWS's balancers at 60


def test_its_help_teaches_in_80_lines(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("serve", "--help")
    assert len(out.splitlines()) <= 80
    for word in ("documents", "/v1/messages", "CTXREUSE_ENGINE_KEY", "--shared-log"):
        assert word in out


def test_the_compose_file_starts_the_command_with_options_that_exist():
    folder = ROOT / "examples/serve"
    service = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["serve"]
    dockerfile = (folder / "Dockerfile").read_text()
    assert service["build"]["dockerfile"] == "examples/serve/Dockerfile"
    assert set(service["environment"]) == {"CTXREUSE_ENGINE_KEY", "CTXREUSE_MODE"}
    port = service["ports"][0].rpartition(":")[2]
    assert f"EXPOSE {port}\n" in dockerfile
    assert '".[redis,serve]"' in dockerfile
    names = [one for one in service["command"] if one.startswith("--")]
    assert service["command"][:2] == ["ctxreuse", "serve"]
    taken = {*names} - {f"--{one.name}" for one in fields(ServeCommand)}
    assert taken == {"--engine"}
    assert int(port) == ServeCommand().port
