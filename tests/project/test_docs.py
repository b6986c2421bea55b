"""What README and the documentation show runs as it stands, and prints what they say.

One rule for Python: the blocks of a page are one program, run from top to bottom in a folder of its
own, with an emulated engine behind every address; on the page of hosted caches, one that bills
prefixes by the provider's rules. A `text` block right behind it is what it prints.
The commands of `console` blocks run in between, where they need nothing but this package; what they
are said to print is compared, too. Others are checked against what they name.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from importlib.metadata import distribution
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import httpx
import mem0_stores  # noqa: F401  # before mem0, which reads its environment at import
import pytest
import redis
from caching_server import caching_server
from doc_pages import PAGES, ROOT, Block, Command, blocks_of, commands_of
from redis_servers import redis_server
from uvicorn.main import main as uvicorn_command

import ctxreuse
from ctxreuse.cli import main
from ctxreuse.cli.serve_command import ServeCommand
from ctxreuse.serving import EmulatedEngine
from ctxreuse.sharing import environment

MODEL = "smollm2-135m-instruct"
LANGUAGES = {"python", "console", "text", "typescript"}

NOT_COMPARED = {
    ("docs/background/results.md", "29% fewer prompt tokens to compute with ctxreuse, online, "): (
        "compared by a test of its own"
    )
}
"""Outputs that no block before them prints here, and why; named by page and beginning."""

NOT_RUN = {
    "make": "makes environments, or takes minutes; the target has to exist",
    "pip": "installs; the extras have to exist",
    "vllm": "needs a model and a server; the flags have to be those that the tests' server gets",
    "python": "takes minutes, or is another engine, of which nothing but the page says the flags",
    "uvicorn": "serves until it is ended; a test of its own starts the application",
    "celery": "needs a broker; the module has to exist",
    "docker": "needs a daemon; the file has to exist",
    "curl": "needs a server; a test of the server runs it",
}
"""Commands that are checked, not run, and why."""

PROVIDERS = "docs/guides/hosted-caches.md"
SEND = httpx.HTTPTransport.handle_request

VOLATILE = [(re.compile(r"(\d\.\d\d │) *[\d,]*\d\.\d{3} │$", re.MULTILINE), r"\1 # │")]
"""What differs from run to run: milliseconds, the last column of tables of policies."""

README_APP = """
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

class Found(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document("The Seine flows through Paris."), Document("Rome is in Italy.")]

for question in ("Which river?", "Which country?"):
    Found().invoke(question)
"""
DATED_APP = """
from openai import OpenAI

client = OpenAI(base_url="http://engine.invalid/v1", api_key="EMPTY")
for day in range(10, 20):
    system = f"You answer questions about rivers. Today is 2026-11-{day}. Use the documents alone."
    user = "The Seine flows through Paris.\\n\\nThe Tiber flows through Rome.\\n\\nWhich river?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    client.chat.completions.create(model="...", messages=messages)
"""
FILES = {
    "README.md": {"app.py": README_APP},
    PROVIDERS: {"app.py": README_APP},
    "docs/guides/troubleshooting.md": {"app.py": DATED_APP},
}
"""What a page takes for granted: files of the user's own."""

OWN = {
    "README.md": """
import os

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_openai import ChatOpenAI

texts = [
    "The Seine flows through Paris. Its barges carry grain to the sea, and its banks are quays.",
    "Rome is in Italy. The Tiber crosses it in a wide bend, and seven hills stand on both banks.",
]


class Found(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(text, metadata={"source": "rivers.txt"}) for text in texts]


base_url, retriever = os.environ["CTXREUSE_BASE_URL"], Found()
llm = ChatOpenAI(model="MODEL", base_url=base_url, api_key="EMPTY")
""".replace("MODEL", MODEL)
}
"""What a page's reader has already: objects of the user's own."""

REACHES = {
    ("README.md", "LangChain, with headings"): "# rivers.txt\nThe Seine flows through Paris.",
    ("docs/start/any-client.md", "A batch"): "river",
    ("docs/start/mem0.md", "Send it"): "Alice",
    ("docs/start/chain-of-agents.md", "A chain"): "in Porto",
    ("docs/start/workflows.md", "RAG workflows"): "The Seine flows through Paris.",
    ("docs/start/langchain.md", "Wrap the model"): "The Seine flows through Paris.",
    ("docs/start/llamaindex.md", "Query engines"): "The Seine flows through Paris.",
}
"""What each prompt that an example sends has to hold."""


class Sent:
    """An engine that answers whatever goes through httpx, at any address."""

    def __init__(self) -> None:
        self.engine = EmulatedEngine(model=MODEL, answer="The Seine.")

    @property
    def prompts(self) -> list[str]:
        """The prompts that read documents: no manager's, and no hypothesis."""
        return [
            body["messages"][-1]["content"]
            for body in self.engine.requests
            if "readers have each read" not in body["messages"][0]["content"]
            and "Write a " not in body["messages"][-1]["content"]
        ]


def named(request: httpx.Request) -> httpx.Request:
    """Return a request for the emulated model where a page names another one, or none: "..."."""
    if request.method == "GET":
        return request
    body = json.loads(request.content)
    if body.get("model") == "...":
        body["model"] = MODEL
    return httpx.Request(request.method, request.url, json=body)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent = Sent()
    monkeypatch.setenv("CTXREUSE_BASE_URL", "http://engine.invalid/v1")

    transport = sent.engine.transport()

    def handle(_: object, request: httpx.Request) -> httpx.Response:
        return transport.handle_request(named(request))

    async def handle_async(_: object, request: httpx.Request) -> httpx.Response:
        return await transport.handle_async_request(named(request))

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle_async)
    return sent


@contextmanager
def printed() -> Iterator[StringIO]:
    """Collect what is printed; progress and logs go elsewhere."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        yield out


def comparable(text: str) -> str:
    text = "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))
    for pattern, mask in VOLATILE:
        text = pattern.sub(mask, text)
    return text


@contextmanager
def answering_redis(page: str, folder: Path) -> Iterator[None]:
    """Have a server of the test's answer at any address of a log in Redis that a page names."""
    if not any("RedisLog(" in block.code for block in blocks_of(page)):
        yield
        return
    connect = redis.Redis.from_url
    with redis_server(folder) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis.Redis, "from_url", lambda _, **given: connect(server.url, **given))
        yield


@contextmanager
def answering_providers(page: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have servers of the test's behind the addresses and keys that the providers' SDKs know."""
    if page != PROVIDERS:
        yield
        return
    emulated = httpx.HTTPTransport.handle_request
    with ExitStack() as stack:
        openai, anthropic = (
            stack.enter_context(caching_server(protocol)) for protocol in ("openai", "anthropic")
        )
        openai.answer = anthropic.answer = "The Seine."
        patch.setenv("OPENAI_BASE_URL", f"{openai.url}/v1")
        patch.setenv("ANTHROPIC_BASE_URL", anthropic.url)
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
            patch.setenv(name, "k")

        def handle(self: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
            is_theirs = str(request.url).startswith((openai.url, anthropic.url))
            return (SEND if is_theirs else emulated)(self, request)

        patch.setattr(httpx.HTTPTransport, "handle_request", handle)
        yield


def run_command(command: Command) -> None:
    """Run a command of this package; compare what it prints, if the page says that.

    A command that has found a problem, as the page says, ends with exit code 1.
    """
    with printed() as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(command.words))
        with pytest.raises(SystemExit) as exit_:
            main()
    code = int(bool(re.search(r"^problem  |^\d+ findings? in ", command.output, re.MULTILINE)))
    assert (exit_.value.code or 0) == code, (
        f"{' '.join(command.words)}: exit code {exit_.value.code}"
    )
    if command.output:
        assert comparable(out.getvalue()) == comparable(command.output)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check_make(words: tuple[str, ...]) -> None:
    targets = {word for word in words[1:] if "=" not in word}
    assert targets
    assert targets <= make_targets()


def check_pip(words: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[1] == "install"
    packages = words[2:]
    assert packages
    for package in packages:
        own = re.fullmatch(r"(?:\.|ctxreuse)\[([\w,-]+)\]", package)
        if own:
            assert set(own[1].split(",")) <= set(project["optional-dependencies"])
        elif package != "ctxreuse":
            distribution(package)  # there is one, for the tests use it


def check_vllm(words: tuple[str, ...]) -> None:
    folders = ("tools", "tests_vllm")
    sources = "".join(one.read_text() for name in folders for one in ROOT.glob(f"{name}/*.py"))
    assert words[1] == "serve"
    for word in words[2:]:
        if word.startswith("--"):
            assert f'"{word}"' in sources, f"no test starts vLLM with {word}"
        elif word.startswith("{"):
            assert all(f'"{key}"' in sources for key in json.loads(word))


def check_python(words: tuple[str, ...]) -> None:
    if words[1].endswith(".py"):
        known = (ROOT / words[1]).read_text(encoding="utf-8")
        named = [*words[2:3], *(word for word in words[3:] if word.startswith("--"))]
        assert all(f'"{word}"' in known for word in named)
    else:
        assert words[1:3] == ("-m", "sglang.launch_server")


def check_uvicorn(words: tuple[str, ...]) -> None:
    module, _, name = words[1].partition(":")
    program = ast.parse((ROOT / f"examples/production/{module}.py").read_text(encoding="utf-8"))
    assert any(ast.unparse(one).startswith(f"{name} = ") for one in program.body)
    known = {option for one in uvicorn_command.params for option in one.opts}
    assert {word for word in words if word.startswith("--")} <= known


def check_celery(words: tuple[str, ...]) -> None:
    assert words[1] == "-A"
    assert (ROOT / f"examples/production/{words[2]}.py").exists()


def check_docker(words: tuple[str, ...]) -> None:
    assert words[1:3] == ("compose", "-f")
    files = [file for option, file in pairwise(words) if option == "-f"]
    assert all((ROOT / file).exists() for file in files)


def check_serve(words: tuple[str, ...]) -> None:
    known = {name for one in fields(ServeCommand) for name in one.metadata["names"]}
    known |= {f"--{one.name.replace('_', '-')}" for one in fields(ServeCommand)}
    assert {word for word in words if word.startswith("--")} <= known


def check_curl(words: tuple[str, ...]) -> None:
    assert json.loads(words[words.index("-d") + 1])


CHECKS: dict[str, Callable[[tuple[str, ...]], None]] = {
    "make": check_make,
    "pip": check_pip,
    "vllm": check_vllm,
    "python": check_python,
    "uvicorn": check_uvicorn,
    "celery": check_celery,
    "docker": check_docker,
    "curl": check_curl,
}


def run_console(block: Block) -> None:
    for command in commands_of(block.code):
        if command.words[:2] == ("ctxreuse", "serve"):
            check_serve(command.words)  # it serves until it is ended
        elif command.words[0] == "ctxreuse":
            run_command(command)
        else:
            assert not command.output, "only the output of this package's commands is compared"
            CHECKS[command.words[0]](command.words)


def exception(block: Block) -> str | None:
    page, first = block.name
    found = [key for key in NOT_COMPARED if key[0] == page and first.startswith(key[1])]
    return NOT_COMPARED[found[0]] if found else None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the frameworks' own, in code that users copy
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_a_page_is_a_program_that_prints_what_it_says(page, sent, tmp_path, monkeypatch):
    with answering_redis(page, tmp_path), answering_providers(page, monkeypatch):
        run_page(page, sent, tmp_path / "page", monkeypatch)


def run_page(page: str, sent: Sent, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page's blocks in a folder, and compare what they print with what it says."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, text in FILES.get(page, {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(OWN.get(page, ""), namespace)
    output, ran = "", None
    for block in blocks_of(page):
        if block.language == "python":
            sent.engine.requests.clear()
            code = compile("\n" * (block.line - 1) + block.code, page, "exec")
            with printed() as out:
                exec(code, namespace)
            output, ran = out.getvalue(), block
            known = REACHES.get((page, block.heading))
            if known is not None:
                assert "The Seine." in output or "print(" not in block.code
                assert sent.prompts
                missing = [prompt for prompt in sent.prompts if known not in prompt]
                assert missing == []
        elif block.language == "console":
            run_console(block)
        elif block.language == "text":
            if exception(block) is None:
                assert block.follows is ran, f"{page}, line {block.line}: nothing prints this"
                assert comparable(output) == comparable(block.code)
        elif block.language == "typescript":
            assert page == "docs/guides/serve.md"  # which a test of the server runs
        else:
            pytest.fail(f"{page}, line {block.line}: nothing runs {block.language!r} blocks")


@pytest.mark.filterwarnings("ignore")
def test_the_switch_sends_what_readme_s_programs_were_given_unchanged(sent, monkeypatch, tmp_path):
    """As the questions answer: `CTXREUSE_MODE=shadow`, without a deploy."""
    monkeypatch.setenv("CTXREUSE_MODE", "shadow")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(OWN["README.md"], namespace)
    with printed() as out:
        for block in blocks_of("README.md"):
            if block.language == "python":
                exec(compile(block.code, "README.md", "exec"), namespace)
    tiber, loire, seine = (namespace[name] for name in ("tiber", "loire", "seine"))
    asked = "\n\n".join([tiber, loire, seine, "Which river is the longest?"])
    assert out.getvalue().startswith(f"{asked}\n")
    bodies = [body["messages"][-1]["content"] for body in sent.engine.requests]
    context = "\n\n".join(f"# rivers.txt\n{text}" for text in namespace["texts"])
    assert f"{context}\n\nQuestion: Which river is in Paris?" in bodies
    assert not [body for body in bodies if "Read documents" in body]
    assert namespace["planner"].savings.mode == "shadow"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_in_a_language_that_is_run_or_compared(page):
    assert {block.language for block in blocks_of(page)} <= LANGUAGES


def test_every_exception_is_of_use():
    blocks = [block for page in PAGES for block in blocks_of(page)]
    used = {
        key
        for key in NOT_COMPARED
        for block in blocks
        if block.language == "text" and block.page == key[0] and block.code.startswith(key[1])
    }
    assert used == set(NOT_COMPARED)
    headings = {(block.page, block.heading) for block in blocks if block.language == "python"}
    assert set(REACHES) <= headings
    commands = {
        command.words[0]
        for block in blocks
        if block.language == "console"
        for command in commands_of(block.code)
    }
    assert commands == {"ctxreuse", *NOT_RUN}
    assert set(NOT_RUN) == set(CHECKS)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the reference differs by version")
def test_the_documentation_shows_what_the_demo_prints(tmp_path):
    (shown,) = [
        block.code
        for block in blocks_of("docs/background/results.md")
        if exception(block) == "compared by a test of its own"
    ]
    shown_command = [sys.executable, "-m", "ctxreuse", "demo", "-o", str(tmp_path)]
    ran = subprocess.run(shown_command, capture_output=True, text=True, check=True)
    assert comparable(shown) in comparable(ran.stdout)


def test_the_pages_of_settings_and_planner_name_all_of_them():
    page = (ROOT / "docs/reference/settings.md").read_text()
    packages = ["ctxreuse", "ctxreuse.serving", "ctxreuse.sharing", "llamaindex_ctxreuse"]
    modules = map(resolve_name, [*packages, "langchain_ctxreuse", "mem0_ctxreuse"])
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    known = set(re.findall(r'"(CTXREUSE_\w+)"', inspect.getsource(environment)))
    for heading, text in re.findall(r"^##+ (`.+)\n([^#]+)", page, re.MULTILINE):
        rows = re.findall(r"^\| (`\w+`.*?) \| (.+?) \|", text, re.MULTILINE)
        cells = [[re.findall("`(.+?)`", cell) for cell in row] for row in rows]
        for owner in re.findall("`(.+?)`", heading):
            settings = inspect.signature(attrgetter(owner)(SimpleNamespace(**public))).parameters
            for name, default in (pair for row in cells for pair in zip(*row, strict=True)):
                assert eval(default, public.copy()) == settings[name].default, (owner, name)
            if owner in ("ReusePlanner", "EngineClient", "EnginePool"):
                known |= settings.keys()
    missing = {name for name in known if f"`{name}`" not in page}
    assert missing == {"base_url", "client", "clock", "engines", "given"}
    page = (ROOT / "docs/reference/ctxreuse.md").read_text()
    [listed] = re.findall(r"^::: ctxreuse\.ReusePlanner\n.*?\[(.*?)\]", page, re.MULTILINE | re.S)
    public = [name for name in vars(ctxreuse.ReusePlanner) if not name.startswith("_")]
    assert sorted(re.findall(r"\w+", listed)) == sorted(public)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_what_a_page_names_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!\w+:|#)([^)#]+)", re.sub("```.*?```", "", text, flags=re.DOTALL))
    assert [one for one in links if not (ROOT / page).parent.joinpath(one).exists()] == []
    packages = "ctxreuse|(?:langchain|llamaindex|mem0)_ctxreuse|chain_of_agents"
    names = set(re.findall(rf"(?<![\w./-])(?:{packages})(?:\.\w+)+", text))
    if find_spec("litellm") is None:  # whose proxy needs an older rich than the command does
        names.discard("ctxreuse.serving.litellm_hook.hook")
    for name in names:
        resolve_name(name)
    folders = "ctxreuse|integrations|agents|tests|tools|benchmarks|notebooks|examples"
    paths = set(re.findall(rf"`((?:{folders})/[\w/.-]+)`", text))
    assert {path for path in paths if not (ROOT / path).exists()} <= {"integrations/NAME_ctxreuse/"}
    tests = re.findall(r"`(tests/[\w/.-]+\.py)::(\w+)(?:::(\w+))?`", text)
    for file, *nested in tests:
        scope: ast.AST | None = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        for name in filter(None, nested):
            scope = next((one for one in ast.walk(scope) if getattr(one, "name", "") == name), None)
            assert scope is not None, f"{file} has no {name}"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("$ make nothing\n", "nothing"),
        ("$ pip install '.[nothing]'\n", "nothing"),
        ("$ vllm serve M --no-such-flag\n", "--no-such-flag"),
        ("$ ctxreuse plan --no-such-option 1\n", "exit code 2"),
    ],
)
def test_a_command_that_does_not_exist_is_found(code, message):
    block = Block("page.md", 1, "", "console", code, None)
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_console(block)


def test_blocks_are_read_with_their_headings_lines_and_neighbours():
    text = (
        "# A\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n"
        "More.\n\n    ```console\n    $ x\n    ```\n"
    )
    one, two, three = blocks_of("page.md", text)
    assert one == Block("page.md", 4, "A", "python", "print(1)\n", None)
    assert two == Block("page.md", 8, "A", "text", "1\n", one)
    assert three == Block("page.md", 14, "A", "console", "$ x\n", None)
    with pytest.raises(AssertionError, match="not read"):
        blocks_of("page.md", "```python\nprint(1)\n")


def stated_bounds(page: str) -> dict[str, dict[str, int]]:
    """Return the bounds in the tables of a page, by the last cell of their row, then by name.

    Several names before a number share it.
    """
    stated: dict[str, dict[str, int]] = {}
    for line in page.splitlines():
        *_, cell, where = ["", *(one.strip() for one in line.strip("|").split("|"))]
        names: list[str] = []
        for name, number, unit in re.findall(r"`(\w+)`|(\d[\d,]*)( MiB)?", cell):
            if name:
                names.append(name)
            elif names:
                bound = int(number.replace(",", "")) * (2**20 if unit else 1)
                stated.setdefault(where, {}).update(dict.fromkeys(names, bound))
                names = []
    return stated


def test_the_bounds_on_memory_are_those_of_the_code(tmp_path):
    from chain_of_agents.agent_memory import AgentMemory
    from chain_of_agents.agent_placement import AgentPlacement
    from ctxreuse.cache import KVEventSync
    from ctxreuse.measure.traces.recording import TraceRecorder
    from ctxreuse.pipeline.prompt_turn import PromptPlanner
    from ctxreuse.serving import EnginePool
    from ctxreuse.serving.pool.placement import DocumentAffinity
    from ctxreuse.workflow.runtime.services import Services, WorkflowOptions
    from langchain_ctxreuse.documents.run_documents import run_documents
    from llamaindex_ctxreuse import ReuseMemoryBlock
    from llamaindex_ctxreuse.nodes.run_nodes import run_parts

    planner = ctxreuse.ReusePlanner()
    pool = EnginePool({"a": EmulatedEngine})  # never asked
    of_engine = EnginePool(
        [ctxreuse.serving.EngineSpec(base_url="http://a", capacity_tokens=1)], "model"
    )
    chain = AgentMemory().parts | AgentPlacement(2, pool, DocumentAffinity).parts
    services = Services(None, {}, None, WorkflowOptions(), None, float)
    with TraceRecorder(tmp_path / "recording") as recorder:
        kept = {
            "`planner.savings.parts`": planner.savings.parts,
            "`run_documents().parts`": run_documents().parts,
            "`run_parts()`": run_parts(),
            "`model.prompt_statistics.parts`": PromptPlanner(planner).statistics().parts,
            "`block.parts`": ReuseMemoryBlock(memory=SimpleNamespace(search=list)).parts,
            "`chain.parts`": chain,
            "`pool.parts`": pool.parts,
            "`pool.statistics()[0].parts`": of_engine.statistics()[0].parts,
            "`sync.parts`": KVEventSync(planner, "tcp://127.0.0.1:1").parts,
            "`engine.metrics().parts`": services.parts,
            "`recorder.parts`": recorder.parts,
        }
    page = (ROOT / "docs/guides/security.md").read_text()
    of_planner = planner.statistics().parts
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", page, re.MULTILINE)
    assert rows == [(name, f"{size.bound:,}") for name, size in of_planner.items()]
    stated = stated_bounds(page)
    for where, parts in kept.items():
        said = [bounds for place, bounds in stated.items() if place.startswith(where)]
        bounds = {name: part.bound for name, part in parts.items()}
        if where == "`pool.statistics()[0].parts`":
            assert bounds.items() >= {name: size.bound for name, size in of_planner.items()}.items()
            bounds = {name: bound for name, bound in bounds.items() if name not in of_planner}
        assert said == [bounds], where


def test_the_bounds_on_work_are_those_of_the_code():
    from ctxreuse.memory import conversations, prefix_index
    from ctxreuse.policy import paper, reuse

    page = (ROOT / "docs/guides/security.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*\d[^|]* [^|]+) \|$", page, re.MULTILINE)
    stated = {
        name: [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", bound)]
        for name, bound in rows
    }
    assert conversations._LEAST_WORK == prefix_index._STEPS_A_BATCH == 1 << 20  # "a million"
    assert stated == {
        "cached_paths": [prefix_index._STEPS, *[prefix_index._STEPS_A_BLOCK] * 2],
        "greedy_paths": [prefix_index._VISITS],
        "continuations": [reuse._STEPS, reuse._STEPS_A_BLOCK],
        "paper_orders": [paper._STEPS, paper._STEPS_A_BLOCK],
        "shown_blocks": [conversations._WORK_A_CHARACTER],
    }
    assert stated.keys() == ctxreuse.ReusePlanner().statistics().limits_reached.keys()
