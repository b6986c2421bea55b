"""The tool that starts vLLM servers never signals a process that is not one of them."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MODULE = "vllm.entrypoints.openai.api_server"

pytestmark = pytest.mark.skipif(
    not TOOLS.is_dir() or not hasattr(os, "killpg"), reason="no tools here, or none that can run"
)


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """The tool, with its files in a folder of the test's own."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import vllm_process

    monkeypatch.setattr(vllm_process, "_STATE", tmp_path)
    monkeypatch.setattr(vllm_process, "_children", {})
    return vllm_process


@pytest.fixture
def run():
    """Start processes that do nothing, with the given arguments, each in a group of its own."""
    processes = []

    def begin(*arguments):
        code = "import sys; print(flush=True); sys.stdin.read()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        processes.append(process)
        process.stdout.readline()
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def saved(tool, tmp_path, pid, port=8123, **fields):
    state = {"pid": pid, "options": asdict(tool.ServerOptions(port=port)), **fields}
    (tmp_path / f"{port}.json").write_text(json.dumps(state), encoding="utf-8")


def lacking_proc(monkeypatch, tool):
    """Make the tool ask `ps`, as it does on systems without /proc."""
    if shutil.which("ps") is None:
        pytest.skip("there is no ps here")

    def path(text, *more):
        return Path("/nowhere" + text if str(text).startswith("/proc/") else text, *more)

    monkeypatch.setattr(tool, "Path", path)


@pytest.mark.parametrize("has_proc", [True, False])
def test_a_server_is_found_by_its_command_and_start_time(
    tool, run, tmp_path, monkeypatch, has_proc
):
    if not has_proc:
        lacking_proc(monkeypatch, tool)
    server = run("-m", MODULE, "--host", "127.0.0.1", "--port", "8123")
    started = tool._start_time(server.pid)
    assert started is not None
    for fields in ({"started": started}, {}):  # files of earlier versions lack the time
        saved(tool, tmp_path, server.pid, **fields)
        assert tool.find(8123) == tool.Server(server.pid, tool.ServerOptions(port=8123))
        assert [one.pid for one in tool.running_servers()] == [server.pid]


@pytest.mark.parametrize("has_proc", [True, False])
@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["notes-on-vllm.txt"], {}),
        (["-m", "vllm.entrypoints.other", "--port", "8123"], {}),
        (["-m", MODULE, "--port", "8124"], {}),
        (["-m", MODULE, "--port", "8123"], {"started": "another time"}),
    ],
    ids=["not vLLM", "not the server", "another port", "a later process"],
)
def test_a_process_that_has_got_the_servers_number_is_neither_found_nor_signalled(
    tool, run, tmp_path, monkeypatch, has_proc, arguments, fields
):
    if not has_proc:
        lacking_proc(monkeypatch, tool)
    stranger = run(*arguments)
    server = tool.Server(stranger.pid, tool.ServerOptions(port=8123), fields.get("started"))
    tool.stop(server, timeout_s=0)
    tool.kill(server)
    assert stranger.poll() is None
    saved(tool, tmp_path, stranger.pid, **fields)
    assert tool.find(8123) is None
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_which_nothing_can_be_told_is_not_signalled(tool, run, monkeypatch):
    lacking_proc(monkeypatch, tool)
    monkeypatch.setenv("PATH", "/nowhere")
    process = run("-m", MODULE, "--port", "8123")
    assert tool._start_time(process.pid) is None
    tool.kill(tool.Server(process.pid, tool.ServerOptions(port=8123)))
    assert process.poll() is None


def test_a_server_that_another_process_started_is_ended(tool, run, tmp_path):
    server = run("-m", MODULE, "--port", "8123")
    saved(tool, tmp_path, server.pid, started=tool._start_time(server.pid))
    tool.stop(tool.find(8123))
    assert server.wait(timeout=10) != 0
    assert tool.find(8123) is None
    assert list(tmp_path.iterdir()) == []
