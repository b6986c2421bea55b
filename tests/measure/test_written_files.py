"""What the package writes: for its owner only, whole or not at all, with one line of error."""

import errno
import json
import os
import stat
import subprocess
import sys

import pytest
from planning_helpers import write_jsonl

from ctxreuse.context.files import make_folder, write_text, written_file
from ctxreuse.errors import InputFileError, InvalidRequestError
from ctxreuse.measure.demo import demo_run
from ctxreuse.measure.traces.recording import TraceRecorder
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace

WRONG_KINDS = [None, 3, 1.5, b"name", ["name"], object()]


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def tree(folder):
    return {str(one.relative_to(folder)): oct(mode_of(one)) for one in sorted(folder.rglob("*"))}


@pytest.fixture
def trace(tmp_path):
    blocks = [{"id": n, "text": f"text number {n} of some length"} for n in range(6)]
    write_jsonl(tmp_path / "corpus.jsonl", *blocks)
    requests = [
        {"request_id": n, "query": "which?", "blocks": [n % 6, (n + 1) % 6, (n + 2) % 6]}
        for n in range(12)
    ]
    return write_jsonl(tmp_path / "trace.jsonl", *requests)


@pytest.fixture
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def command(tmp_path, trace):
    buffering = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    def run_in_shell(*arguments, before="", after=""):
        words = " ".join((before, sys.executable, "-m", "ctxreuse", *arguments, after))
        return subprocess.run(
            ["bash", "-c", words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env=buffering,
        )

    return run_in_shell


PLAN = ("plan", "--trace", "trace.jsonl", "--corpus", "corpus.jsonl", "--mode", "online")


# Modes


@pytest.mark.usefixtures("usual_umask")
def test_a_new_file_is_its_owners_alone_and_an_earlier_one_keeps_its_mode(tmp_path):
    path = tmp_path / "out"
    write_text(path, "one")
    assert mode_of(path) == 0o600
    for mode in (0o600, 0o640, 0o644, 0o666, 0o400, 0o4755):
        path.chmod(mode)
        write_text(path, f"again, {mode}")
        assert mode_of(path) == mode & 0o777
        assert path.read_text() == f"again, {mode}"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.usefixtures("usual_umask")
def test_the_mode_that_another_user_gave_a_file_is_not_kept(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.write_text("made by somebody else, for all to read")
    path.chmod(0o666)
    if os.geteuid() == 0:
        os.chown(path, 12_345, -1)
        write_text(path, "private")
        assert (mode_of(path), path.stat().st_uid) == (0o600, 0)


@pytest.mark.usefixtures("usual_umask")
def test_new_folders_are_their_owners_alone(tmp_path):
    (tmp_path / "old").mkdir(mode=0o755)
    make_folder(tmp_path / "old" / "a" / "b")
    make_folder(tmp_path / "old" / "a" / "b")
    assert tree(tmp_path) == {"old": "0o755", "old/a": "0o700", "old/a/b": "0o700"}
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(InputFileError, match=r"file.*cannot be written: (Not a dir|File exi)"):
            make_folder(folder)


@pytest.mark.usefixtures("usual_umask", "trace")
def test_all_that_commands_write_is_their_owners_alone(run_in, tmp_path):
    for arguments in (
        (*PLAN, "-o", "out/plan.jsonl"),
        ("estimate", "trace.jsonl", "--html", "out/one.html"),
        ("report", "trace.jsonl", "-o", "out/two.html", "--pictures", "out/pictures/all"),
    ):
        make_folder("out")
        assert run_in(*arguments)[0] == 0
    modes = tree(tmp_path / "out")
    assert {mode for name, mode in modes.items() if "." in name} == {"0o600"}
    assert {mode for name, mode in modes.items() if "." not in name} == {"0o700"}
    assert {"plan.jsonl", "one.html", "two.html", "pictures/all/tree.png"} <= set(modes)


@pytest.fixture
def run_in(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.usefixtures("usual_umask")
def test_recordings_are_their_owners_alone(tmp_path):
    with TraceRecorder(tmp_path / "new" / "recording") as recorder:
        recorder.record(["a text"], "a question")
    assert tree(tmp_path) == {
        "new": "0o700",
        "new/recording": "0o700",
        "new/recording/corpus.jsonl": "0o600",
        "new/recording/trace.jsonl": "0o600",
    }


# Links


def test_a_link_of_ones_own_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "file"
    file.write_text("old")
    file.chmod(0o640)
    (tmp_path / "folder" / "link").symlink_to("file")
    (tmp_path / "link").symlink_to("folder/link")
    (tmp_path / "dangling").symlink_to("folder/new")
    write_text(tmp_path / "link", "new")
    write_text(tmp_path / "dangling", "made")
    (tmp_path / "device").symlink_to(os.devnull)
    write_text(tmp_path / "device", "lost")
    assert (tmp_path / "device").is_symlink()
    assert [os.readlink(tmp_path / name) for name in ("link", "folder/link", "dangling")] == [
        "folder/link",
        "file",
        "folder/new",
    ]
    assert (file.read_text(), mode_of(file)) == ("new", 0o640)
    assert (tmp_path / "folder" / "new").read_text() == "made"


def test_a_link_of_another_user_is_not_followed(tmp_path, monkeypatch):
    """The attack: in a folder that all may write to, `out` is made to lead to the user's own."""
    own = tmp_path / ".bashrc"
    own.write_text("mine")
    link = tmp_path / "out"
    link.symlink_to(own)
    if os.geteuid() == 0:
        os.lchown(link, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(InputFileError, match="is a link of another user, and could lead to any"):
        write_text(link, "planned")
    assert own.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == [".bashrc", "out"]


def test_links_that_lead_nowhere_are_an_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InputFileError, match="Too many levels of symbolic links; name the file"):
        write_text(tmp_path / "a", "text")


# Whole or not at all


class Full:
    def __init__(self, error=errno.ENOSPC):
        self.error = error

    def __call__(self, *arguments, **options):
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_what_stood_there_stays_where_a_system_call_fails(tmp_path, monkeypatch, call, error):
    path = tmp_path / "out"
    path.write_text("earlier")
    monkeypatch.setattr(os, call, Full(error))
    with pytest.raises(InputFileError) as caught:
        write_text(path, "later")
    assert str(caught.value).startswith(f"{path}: cannot be written: {os.strerror(error)}")
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["out"]


def test_what_stood_there_stays_where_the_writer_fails(tmp_path):
    path = tmp_path / "out"
    path.write_text("earlier")

    def write_half():
        with written_file(path) as file:
            file.write(b"half of it")
            raise LookupError

    with pytest.raises(LookupError):
        write_half()
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_names_that_no_file_can_have_are_an_error(tmp_path, name):
    for write in (lambda path: write_text(path, "x"), make_folder):
        with pytest.raises(InputFileError, match="cannot be written"):
            write(f"{tmp_path}/{name}")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("value", WRONG_KINDS)
def test_a_path_of_the_wrong_kind_is_named(value):
    for write in (lambda path: write_text(path, "x"), make_folder):
        with pytest.raises(InvalidRequestError, match="path must be a path, not "):
            write(value)


def test_a_place_that_takes_no_file_is_named_with_the_remedy(tmp_path):
    for path, remedy in ((tmp_path / "no" / "out", "make its folder"), (tmp_path, "name a file")):
        with pytest.raises(InputFileError, match=f"cannot be written: .*; {remedy}"):
            write_text(path, "text")


def test_a_name_may_be_as_long_as_names_can_be(tmp_path):
    write_text(tmp_path / ("n" * 255), "text")
    assert os.listdir(tmp_path) == ["n" * 255]


FULL = "No space left on device; make room, or name a file elsewhere\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        (*PLAN, "-o", "/dev/full"),
        ("estimate", "trace.jsonl", "--json", "--html", "/dev/full"),
        ("estimate", "trace.jsonl"),
        ("explain", "trace.jsonl", "--json"),
        ("--version",),
        ("plan", "--help"),
    ],
)
def test_output_that_nobody_takes_is_one_line(command, arguments):
    is_file = "/dev/full" in arguments
    done = command(*arguments, after="" if is_file else "> /dev/full")
    name = "/dev/full" if is_file else "standard output"
    told = f"ctxreuse: {name}: cannot be written: {FULL}"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [PLAN, ("estimate", "trace.jsonl"), ("--help",)])
def test_output_to_a_closed_stream_is_one_line(command, arguments):
    done = command(*arguments, after=">&-")
    assert (done.returncode, done.stderr) == (
        2,
        "ctxreuse: standard output: cannot be written: Bad file descriptor; "
        "it is closed; lead it to a file or a pipe\n",
    )


ESTIMATE = ("estimate", "trace.jsonl", "--json", "--html", "page.html")


@pytest.mark.slow
@pytest.mark.parametrize("nobody", ["2>&-", "2> /dev/full", "<&- 2>&-"])
def test_notes_that_nobody_takes_are_lost_and_nothing_else(command, tmp_path, nobody):
    expected = command(*ESTIMATE)
    assert expected.stderr == "ctxreuse: wrote page.html\n"
    (tmp_path / "page.html").unlink()
    done = command(*ESTIMATE, after=nobody)
    assert done.returncode == 0
    printed, shown = (json.loads(one.stdout) for one in (expected, done))
    assert shown.keys() == printed.keys()
    assert (tmp_path / "page.html").read_text().endswith("</html>")
    done = command("report", "nothing.json", after=nobody)
    assert (done.returncode, done.stdout) == (2, ""), "an error is no output"
    assert command("nothing", after=nobody).returncode == 2


def test_no_file_takes_the_place_of_a_closed_stream(command, tmp_path):
    done = command(*PLAN, "-o", "plan.jsonl", after="<&- >&- 2>&-")
    assert done.returncode == 0
    expected = command(*PLAN).stdout
    assert (tmp_path / "plan.jsonl").read_text() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [PLAN, ("estimate", "trace.jsonl"), ("--help",), ("plan", "--help")]
)
def test_a_pipe_whose_reader_is_gone_ends_it_in_silence(command, arguments):
    # the reader has ended long before Python has begun
    done = command(*arguments, after="| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (141, "")


def test_the_demo_names_what_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputFileError, match=r"file: cannot be written: (Not a dir|File exists)"):
        list(demo_run.run_demo(tmp_path / "file"))


# Recordings, which grow line by line


def test_a_recording_on_a_full_disk_loses_requests_and_breaks_none(tmp_path):
    program = f"""
import resource, sys
from ctxreuse.measure.traces.recording import TraceRecorder
with TraceRecorder({str(tmp_path / "recording")!r}) as recorder:
    recorder.record(["the first text"], "one?")
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
    for number in range(4):
        recorder.record(["a long text " * 40, f"short {{number}}"], "two?" * 40)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    recorder.record(["the last text"], "three?")
    print(recorder.requests, recorder.faults)
"""
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
    assert done.stdout == "2 4\n", done.stderr
    corpus = read_corpus(str(tmp_path / "recording" / "corpus.jsonl"))
    requests = read_trace(str(tmp_path / "recording" / "trace.jsonl"), corpus)
    assert [one.query for one in requests] == ["one?", "three?"]


def test_a_folder_with_half_a_recording_is_left_as_it_is(tmp_path):
    (tmp_path / "trace.jsonl").write_text("earlier")
    with pytest.raises(InputFileError, match="there is a recording already"):
        TraceRecorder(tmp_path)
    assert os.listdir(tmp_path) == ["trace.jsonl"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("estimate", "{}"),
        ("report", "{}"),
        ("record", "{}"),
        ("simulate", "--plan", "{}", "--corpus", "corpus.jsonl"),
        ("simulate", "--plan", "trace.jsonl", "--corpus", "{}"),
        ("plan", "--trace", "{}", "--corpus", "corpus.jsonl", "--mode", "online"),
        ("bench", "{}", "--base-url", "http://x"),
        ("bench", "recording", "--base-url", "http://x", "--answers", "{}"),
        (*PLAN, "-o", "{}"),
        ("report", "trace.jsonl", "-o", "{}"),
    ],
)
@pytest.mark.parametrize("name", ["n" * 300, "loop/inside", "trace.jsonl/inside"])
@pytest.mark.usefixtures("trace")
def test_a_name_that_leads_nowhere_is_one_line(run_in, tmp_path, arguments, name):
    (tmp_path / "loop").symlink_to("loop")
    code, out, err = run_in(*(one.format(name) for one in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("ctxreuse: ")
    assert err.count("\n") == 1
