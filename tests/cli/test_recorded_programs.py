"""A program ends under `ctxreuse record` as under `python`: output, errors, exit code, children.

A table of ways to fork, ways to end, and what is open; each program runs plain and recorded.
"""

import os
import re
import subprocess
import sys
from itertools import product
from textwrap import indent
from zipfile import ZipFile

import pytest

from ctxreuse.measure.traces.json_lines import read_lines

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")

CLIENT = """
class Messages:
    def create(self, **fields):
        if "fails" in fields:
            raise LookupError("none")
    def stream(self, **fields): ...
class AsyncMessages(Messages): ...
"""
ASKING = """
import atexit, multiprocessing, os, signal, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
from anthropic.resources.messages import Messages
MESSAGES = [{"role": "user", "content": "one\\n\\nother\\n\\nWhich?"}]
Messages().create(messages=MESSAGES)
def twice(x): return 2 * x
def code(child): return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
HANDLERS = "signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)"
ENDS = {
    "returns": "pass",
    "asks again": "Messages().create(messages=MESSAGES)",
    "exits with 0": "sys.exit(0)",
    "exits with 3": "sys.exit(3)",
    "exits with words": "sys.exit('words')",
    "raises": "raise ValueError('no')",
    "raises from a client": "Messages().create(messages=MESSAGES, fails=1)",
    "raises from what a client raised": (
        "try:\n    Messages().create(messages=MESSAGES, fails=1)\nexcept LookupError as error:\n"
        "    raise ExceptionGroup('both', [error, ValueError('no')]) from error"
    ),
    "raises a base exception": "raise BaseException('none')",
    "leaves at once": "os._exit(4)",
    "is interrupted": "raise KeyboardInterrupt",
    "gets SIGINT": "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "gets SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "fails at its end": "atexit.register(lambda: 1 / 0)",
    "has a hook": "sys.excepthook = lambda *error: sys.stderr.write('hook\\n')\n1 / 0",
    "handles SIGTERM": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"
    ),
    "looks at handlers": f"""__builtins__.print(
    {HANDLERS}, sys.excepthook is sys.__excepthook__, sys.argv)""",
    "changes its folder": "os.chdir('/'); Messages().create(messages=MESSAGES)",
    "takes its arguments away": "sys.argv = []",
    "leaves a thread": "threading.Timer(0.1, lambda: print('thread', sys.argv)).start()",
}
FORKED = """
child = os.fork()
if not child:
    time.sleep({pause})
{inside}
    print("went on")
else:
    {signal}
    print(code(child))
"""
WAYS = {
    "alone": "{end}",
    "fork": FORKED.format(pause=0, inside="{inside}", signal="pass"),
    # one processor: the child has not run yet when the signal comes
    "fork and SIGTERM at once": "os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})"
    + FORKED.format(pause=0.3, inside="{inside}", signal="os.kill(child, signal.SIGTERM)"),
    "process": """
def work():
{inside}
child = multiprocessing.get_context("fork").Process(target=work, name="one")
child.start(); child.join(); print(child.exitcode)
""",
    "pool": """
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.map(twice, [1, 2]))
{end}
""",
    "executor": """
with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
    print(list(pool.map(twice, [1, 2])))
{end}
""",
    "thread that forks": """
def fork():
    child = os.fork()
    if not child:
{deep}
        os._exit(0)
    print(code(child))
one = threading.Thread(target=fork, name="one"); one.start(); one.join()
""",
    "grandchild": """
child = os.fork()
if not child:
    other = os.fork()
    if not other:
{deep}
    else:
        sys.exit(abs(code(other)) % 9)
else:
    print(code(child))
""",
}
KEPT = """
os.closerange(3, 64)
kept = open("kept", "w")
Messages().create(messages=MESSAGES)
kept.write("kept"); kept.flush()
print(open("kept").read())
"""
OPEN = {
    "all": ("", ""),
    "no descriptors but the first": ("", "os.closerange(3, 64)"),
    "a file where one was closed": ("", KEPT),
    "no output any more": ("", "os.close(1)"),
    "no error output any more": ("", "sys.stderr.close()"),
    "nothing that it has closed": ("", "sys.stdin.close(); sys.stdout.close()"),
    "no output": (">&-", ""),
    "no error output": ("2>&-", ""),
    "no input": ("<&-", ""),
}
# Python's own modules show these errors, with the line that notes what a client is sent
IN_LINE = {
    *product(("thread that forks", "process"), (one for one in ENDS if "raises from" in one)),
}
TABLE = [case for case in product(WAYS, ENDS, OPEN) if case[:2] not in IN_LINE]
FEW = [
    ("fork", "raises from a client", "a file where one was closed"),
    ("fork and SIGTERM at once", "leaves at once", "all"),
    ("fork", "raises from what a client raised", "all"),
    ("grandchild", "looks at handlers", "all"),
    ("process", "gets SIGINT", "no output"),
    ("alone", "returns", "nothing that it has closed"),
]


def shown(errors: str) -> str:
    """Return what is shown, without our lines and what differs from run to run."""
    errors = re.sub(r"^ctxreuse: .*\n", "", errors, flags=re.MULTILINE)
    return re.sub(r"0x[0-9a-f]+|refcount : \d+", "#", errors)


def ended(folder, command, redirected):
    """Return how a command ends in a process group of its own: exit code, output, errors."""
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" {redirected}', "bash", *command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
    )
    try:
        output, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "hangs"
    return process.returncode, re.sub("0x[0-9a-f]+", "#", output), shown(errors)


def differing(folder, way, end, opened):
    redirected, before = OPEN[opened]
    folder.mkdir()
    package = folder / "anthropic" / "resources"
    package.mkdir(parents=True)
    for one in (package.parent / "__init__.py", package / "__init__.py"):
        one.touch()
    (package / "messages.py").write_text(CLIENT)
    inside, deep = (indent(ENDS[end], " " * depth) for depth in (4, 8))
    program = WAYS[way].format(end=ENDS[end], inside=inside, deep=deep)
    (folder / "app.py").write_text(f"{ASKING}{before}\n{program}")
    record = [sys.executable, "-m", "ctxreuse", "record", "--source", "anthropic"]
    plain = ended(folder, [sys.executable, "app.py", "one"], redirected)
    recorded = ended(folder, [*record, "-o", "out", "app.py", "one"], redirected)
    assert list(read_lines(str(folder / "out" / "trace.jsonl")))
    return None if plain == recorded else (plain, recorded)


@pytest.mark.parametrize("case", FEW, ids=lambda case: ", ".join(case))
def test_a_program_ends_as_under_python(tmp_path, case):
    assert differing(tmp_path / "one", *case) is None


def test_a_zip_file_is_run_as_python_runs_it(tmp_path):
    path = tmp_path / "app.zip"
    with ZipFile(path, "w") as packed:
        packed.writestr("__main__.py", "import sys, beside\nprint(beside.X, sys.argv, __file__)")
        packed.writestr("beside.py", "X = 5")
    record = [sys.executable, "-m", "ctxreuse", "record", "-o", "out", str(path), "one"]
    plain = ended(tmp_path, [sys.executable, str(path), "one"], "")
    assert (
        ended(tmp_path, record, "")[1] == plain[1] == f"5 {[str(path), 'one']} {path}/__main__.py\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_programs_end_as_under_python_whatever_forks_ends_and_is_open(tmp_path, way):
    """Every fifth of the table: each end meets each way, and most of what is open."""
    cases = [case for case in TABLE[::5] if case[0] == way]
    found = {case: differing(tmp_path / str(n), *case) for n, case in enumerate(cases)}
    assert {case: one for case, one in found.items() if one is not None} == {}


def test_the_table_is_large_and_meets_every_way_end_and_what_is_open():
    chosen = TABLE[::5]
    assert len(chosen) >= 200
    for column, known in enumerate((WAYS, ENDS, OPEN)):
        assert {case[column] for case in chosen} == set(known)
