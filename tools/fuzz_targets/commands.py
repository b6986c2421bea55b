"""Commands on hostile folders and programs, and results that nobody has measured."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import typer
from matplotlib.figure import Figure

from ctxreuse import ContextBlock
from ctxreuse.cli import app
from ctxreuse.cli.recorded_program import ProgramEnd
from ctxreuse.cli.terminal import show
from ctxreuse.errors import CtxreuseError, InvalidRequestError
from ctxreuse.measure.demo import demo_run
from ctxreuse.measure.replay.explain_plan import TreeNode
from ctxreuse.measure.replay.simulate import RunResult, TraceSummary
from ctxreuse.measure.report import page
from ctxreuse.measure.report.report_page import charts
from ctxreuse.measure.results.results import Miss, Results
from ctxreuse.measure.results.tables import estimate_output, tables
from ctxreuse.measure.traces.trace_files import TraceRequest, read_corpus, read_trace
from fuzz_targets.mutation import NUMBERS, Target, text
from fuzz_targets.wrapped import DOCUMENTS, blocks

_USAGE = typer.BadParameter.__mro__[1]  # Typer has no name for it that it exports
_NAMES = ("out", "out", "a/b/c", "", ".", "file", "file/x", "link", "loop", "fixed", "-", "x" * 300)
_RETRIEVES = """
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda

class Found(BaseRetriever):
    def _get_relevant_documents(self, query, **others):
        return [Document(one, id=name) for name, one in FOUND]

FOUND = {found!r}
print(RunnableLambda(lambda query: Found().invoke(query)).invoke({query!r}))
"""
_SENDS = """
import httpx, openai
transport = httpx.MockTransport(lambda request: httpx.Response(200, json={{"choices": []}}))
http = httpx.Client(transport=transport)
client = openai.OpenAI(base_url="http://x", api_key="x", http_client=http)
client.chat.completions.create(model="m", messages={messages!r})
"""
_ENDS = (
    "",
    "raise KeyError('of the program')",
    "import sys; sys.exit(3)",
    "import sys; sys.exit('the end')",
    "import os; os.chdir('..')",
    "import sys; sys.argv.clear(); sys.path.clear()",
    "import shutil; shutil.rmtree('out', ignore_errors=True)",
    "import sys; sys.stdout.close()",
    "import sys; sys.modules.pop('__main__', None)",
    "not Python at all",
    "raise KeyboardInterrupt",
)


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """Work in a folder with files that are no folders, and links that lead astray."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="ctxreuse-fuzz-") as folder:
        deep = Path(folder, *"abcdefgh")  # names that lead upwards stay inside
        deep.mkdir(parents=True)
        os.chdir(deep)
        try:
            Path("file").write_bytes(b"\xff not JSON")
            Path("link").symlink_to("elsewhere")
            Path("loop").symlink_to("loop")
            Path("fixed", "results.json").mkdir(parents=True)
            Path("fixed", "computed_tokens.png").mkdir()
            Path("fixed", "trace.jsonl").write_text("{}")
            yield
        finally:
            os.chdir(before)


def _run(arguments: list[str]) -> str:
    """Run a command in this process; return what it printed."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            app(arguments, standalone_mode=False)
        except typer.Exit:
            pass
        except _USAGE as error:
            raise InvalidRequestError("refused") from error
    return "" if raw.closed else raw.getvalue().decode()


def _name(source: Random) -> str:
    name = source.choice(_NAMES) if source.random() < 0.8 else text(source)
    return name.replace("..", "_").replace("/etc", "_").removeprefix("/")


def _recording(source: Random) -> dict[str, Any]:
    found = [(name, text(source)) for name in source.sample("abc", source.randrange(4))]
    messages = [
        {"role": "system", "content": text(source)},
        {"role": "user", "content": text(source)},
    ]
    program = source.choice(
        (
            _RETRIEVES.format(found=found, query=text(source)),
            _SENDS.format(messages=messages),
            "print(__name__)",
            "",
        )
    ) + source.choice(_ENDS)
    options = ["-o", _name(source)] if source.random() < 0.9 else []
    for option in (
        ["--hash-only"],
        ["--source", source.choice(("openai", "anthropic", "langchain", text(source)))],
    ):
        if source.random() < 0.3:
            options += option
    if source.random() < 0.1:
        options += ["--module"]
    name = "program.py" if source.random() < 0.9 else _name(source)
    arguments = [text(source) for _ in range(source.randrange(3))]
    return {
        "program": program.encode("utf-8", "surrogatepass"),
        "arguments": ["record", *options, *source.choice(([name], [])), *arguments],
    }


def _record(given: Mapping[str, Any]) -> None:
    """Record a program, which runs as it is; what is written can be read again."""
    before = sys.argv, list(sys.path), sys.modules["__main__"], sys.excepthook
    with _folder():
        Path("program.py").write_bytes(given["program"])
        folder = Path.cwd()  # a program may go elsewhere
        files = _files(folder)
        try:
            _run(given["arguments"])
        except CtxreuseError:
            assert _files(folder) <= files, "what is refused leaves files"
            raise
        except ProgramEnd as end:
            if not isinstance(end.error, SystemExit) and not _is_of_the_program(end.error):
                raise end.error from None
        finally:  # the command puts nothing back: its process ends
            sys.argv, sys.path[:], sys.modules["__main__"], sys.excepthook = before
        for trace in folder.rglob("trace.jsonl"):
            if trace not in files:
                corpus = read_corpus(str(trace.with_name("corpus.jsonl")))
                assert read_trace(str(trace), corpus)


def _files(folder: Path) -> set[Path]:
    found = folder.rglob("*")
    return {one for one in found if one.is_file() and one.suffix != ".pyc"}


def _is_of_the_program(error: BaseException) -> bool:
    if isinstance(error, SyntaxError):  # a program that is no Python
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).name == "program.py" for frame in frames)


def _demo(source: Random) -> list[str]:
    options = ["-o", _name(source)] if source.random() < 0.95 else []
    return ["demo", *options, *source.choice(([], [], [text(source)]))]


def _few_questions() -> tuple[dict[Any, ContextBlock], list[TraceRequest]]:
    """Return a corpus and a trace as the demo retrieves them, which takes seconds."""
    corpus: dict[Any, ContextBlock] = {block.id: block for block in blocks(DOCUMENTS)}
    orders = ("abc", "cab", "bda", "fed")
    trace = [
        TraceRequest(name, "Which?", tuple(corpus[one] for one in name), "c", turn, "Be brief.")
        for turn, name in enumerate(orders)
    ]
    return corpus, trace


def _run_demo(arguments: list[str]) -> None:
    """Run the demo, of few questions, with folders of all kinds."""
    with _folder():
        retrieve_all = demo_run._retrieve_all
        demo_run._retrieve_all = _few_questions
        try:
            shown = _run(arguments)
        finally:
            demo_run._retrieve_all = retrieve_all
        results = Path(arguments[arguments.index("-o") + 1] if "-o" in arguments else "demo-output")
        assert "questions" in shown
        assert Path(results, "computed_tokens.png").read_bytes().startswith(b"\x89PNG")


def _results(source: Random) -> Results:
    """Return results that no command has measured."""
    trace = {one.name: _count(source) for one in fields(TraceSummary)}
    trace |= {"block_tokens": 10**9, "repeated_tokens": _count(source, 10**9)}
    return Results(
        title=text(source),
        level=source.choice(("blocks", "tokens", "engine")),
        trace=TraceSummary(**trace),
        runs=tuple(_one_run(source) for _ in range(source.randrange(6))),
        tree=_node(source, 3),
        misses=tuple(
            Miss(text(source), text(source), 5, text(source)) for _ in range(source.randrange(3))
        ),
        bounds=tuple((_count(source, 20), source.random()) for _ in range(source.randrange(3))),
        settings=tuple((text(source), text(source)) for _ in range(source.randrange(3))),
        notes=(text(source),),
        version=text(source),
    )


def _count(source: Random, most: int = 10**100 - 1) -> int:
    known = [one for one in NUMBERS if type(one) is int and 0 <= one <= most]
    return source.choice((*known, most))


def _one_run(source: Random) -> RunResult:
    prompts = tuple(_count(source, 10**30) for _ in range(source.choice((0, 1, 3))))
    run = RunResult(
        policy=source.choice(("as retrieved", "ctxreuse, online", text(source))),
        strategy=source.choice(("none", "reuse", "paper")),
        mode=source.choice(("online", "offline")),
        deduplicated=source.random() < 0.5,
        capacity_tokens=source.choice((None, 0, 1_000, _count(source))),
        planning_ms=source.choice((0, 0.5, 1e300)),
        prompt_tokens=prompts,
        cached_tokens=tuple(source.choice((0, one, one // 2)) for one in prompts),
        part=source.choice(["policies", "k"]),
        k=source.choice((None, 0, 5)),
        sessions=source.choice((1, 2, 10**9)),
        failures=source.choice((0, 3)),
    )
    if source.random() < 0.3:
        run = replace(
            run,
            request_ids=tuple(text(source) for _ in prompts),
            first_token_s=tuple(source.choice((0, 0.5, 1e300, 1e-300)) for _ in prompts),
            answers=tuple(text(source) for _ in prompts),
        )
    return run


def _node(source: Random, levels: int) -> TreeNode:
    children = tuple(_node(source, levels - 1) for _ in range(source.randrange(levels + 1)))
    own = source.choice((0, 1, 5, 10**12))
    return TreeNode(
        name=text(source),
        requests=sum(one.requests for one in children) + own,
        sent_tokens=sum(one.sent_tokens for one in children) + own,
        children=children,
    )


def _show_results(results: Results) -> None:
    """Show results in all ways that there are."""
    ways: list[Callable[[Results], Any]] = [estimate_output, tables]
    for way in ways:
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
            show(way(results))
    for chart in charts(results):
        chart.draw(Figure().add_subplot())


def _page(results: Results) -> None:
    assert "<script>alert" not in page(results)


TARGETS = {
    "recordings": Target(_recording, _record, most_seconds=5.0),
    "demos": Target(_demo, _run_demo, most_seconds=15.0),
    "written results": Target(_results, _show_results, most_seconds=5.0),
    "pages of results": Target(_results, _page, most_seconds=15.0),
}
