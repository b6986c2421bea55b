"""Disks without room: calls go on, what stood there stays, and writing goes on when there is room.

A process of its own may write no further for a while (`RLIMIT_FSIZE`), as on a disk that is full.
"""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from fault_programs import PROGRAMS, assert_profits, no_room, told
from forked import in_children

from ctxreuse import ReusePlanner
from ctxreuse.errors import InputFileError
from ctxreuse.measure.traces.recorded_prompts import read_prompts
from ctxreuse.measure.traces.recording import TraceRecorder
from ctxreuse.measure.traces.recording import recording as recording_openai
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace
from langchain_ctxreuse.recording import recording as recording_langchain
from llamaindex_ctxreuse.recording import recording as recording_llamaindex

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

RECORDING: dict[str, Callable[[TraceRecorder], AbstractContextManager[Any]]] = {
    "LangChain": recording_langchain,
    "LlamaIndex": recording_llamaindex,
    "planner": recording_openai,
}


def recorded(folder: Path) -> list[Any]:
    """Return the requests of the only recording in a folder."""
    [corpus], [trace] = (folder.glob(f"**/{name}.jsonl") for name in ("corpus", "trace"))
    blocks = read_corpus(str(corpus))
    list(read_prompts(trace.with_name("prompts.jsonl"), blocks))
    return list(read_trace(str(trace), blocks))


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_that_is_recorded_goes_on_and_so_does_the_recording(kind, tmp_path):
    recording = RECORDING[kind.split()[0]]

    def run(_: int) -> None:
        ours, plain = PROGRAMS[kind](ReusePlanner()), PROGRAMS[kind](None)
        with told() as lines, TraceRecorder(tmp_path / "sent") as recorder, recording(recorder):
            assert ours.ask("abc") == plain.ask("abc")
            written = recorder.requests
            assert written == 2, "of both programs"
            [trace] = tmp_path.glob("**/trace.jsonl")
            with no_room(os.path.getsize(trace)):
                for letters in ("cab", "bca", "def"):
                    assert ours.ask(letters) == plain.ask(letters)
            lost = 6 if kind == "planner and client" else 12  # prompts, too
            assert (recorder.requests, recorder.faults) == (written, lost)
            assert_profits(ours)
            assert recorder.requests == written + 2
        assert len(lines) == 1
        assert lines[0].startswith("TraceRecorder: recording failed with OSError")
        assert ours.faults == 0

    in_children(1, run)
    shown = [[block.text for block in one.blocks] for one in recorded(tmp_path)]
    assert [sum(" says: " in text for text in texts) for texts in shown] == [3] * 4


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_planner_that_cannot_be_saved_plans_on_and_is_saved_later(kind, tmp_path):
    file = tmp_path / "sent.planner"

    def run(_: int) -> None:
        planner = ReusePlanner()
        ours = PROGRAMS[kind](planner)
        assert ours.order("abc") == "abc"
        planner.save(file)
        saved = file.read_bytes()
        with no_room(0), pytest.raises(InputFileError, match="make room"):
            planner.save(tmp_path / "other.planner")  # not even its key can be written
        with no_room(100):
            with pytest.raises(InputFileError, match="allow larger files"):
                planner.save(file)
            assert ours.order("cab") == "abc"
            assert ours.order("def") == "def"
        assert file.read_bytes() == saved
        assert len(list(tmp_path.iterdir())) == 2, "nothing but the file and its key"
        planner.save(file)

    in_children(1, run)
    after = PROGRAMS[kind](ReusePlanner.load(file, strict=True))
    assert after.order("bca") == "abc"
    assert after.order("fed") == "def"


@pytest.mark.parametrize("name", ["corpus.jsonl", "trace.jsonl"])
def test_a_child_that_cannot_open_its_recording_tries_again(name, tmp_path, monkeypatch):
    """Its files are opened with its first request, when there may be no room for them."""
    open_file = os.open

    def full(path: Any, *given: Any) -> int:
        if str(path).endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_file(path, *given)

    with TraceRecorder(tmp_path) as recorder:

        def run(_: int) -> tuple[int, int]:
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", full)
                recorder.record(["a text"], "one?")
            recorder.record(["a text"], "two?")
            recorder.record(["another text"], "three?")
            return recorder.requests, recorder.faults

        assert in_children(1, run) == [(2, 1)]
    [folder] = tmp_path.glob("forked-*")
    assert [one.query for one in recorded(folder)] == ["two?", "three?"]


APP = """
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

class Found(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(f"{query} text {number}. " * 20) for number in range(3)]

print([len(Found().invoke(f"question {number}")) for number in range(20)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "code", "told"),
    [
        (0, 2, ["20 lines could not be recorded; see the log", "nothing could be; see the log"]),
        (8, 0, ["could not be recorded; see the log", "recorded in sent: ", "next: "]),
    ],
)
def test_a_program_that_the_command_records_runs_as_it_is(blocks, code, told, tmp_path):
    """With room for some requests, or for none: then nobody says that there were none."""
    (tmp_path / "app.py").write_text(APP)
    limited = f"ulimit -f {blocks}; exec {sys.executable} -B -m ctxreuse record -o sent app.py"
    done = subprocess.run(
        ["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, f"{[3] * 20}\n"), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ctxreuse: ")]
    assert len(lines) == len(told)
    assert all(words in line for words, line in zip(told, lines, strict=True))
    if blocks:
        assert 0 < len(recorded(tmp_path)) < 20
