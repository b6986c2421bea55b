"""What README and the documentation show passes `mypy --strict` and pyright, as users' code does.

The Python blocks of a page are one program, as in `test_docs.py`. Packages without types of their
own are those that `[tool.mypy]` in pyproject.toml names.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, blocks_of

GIVEN = {
    "README.md": """
from typing import Any
from langchain_core.language_models import BaseChatModel
from langchain_core.retrievers import BaseRetriever

def given() -> Any: ...

llm: BaseChatModel = given()
retriever: BaseRetriever = given()
"""
}
"""What a page's reader has already, with its types."""

USERS = {
    "messages.py": """
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from ctxreuse import ContextRequest, ReusePlanner

planner = ReusePlanner()
history: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
plan = planner.plan(ContextRequest(["a text"], "Which?", history=history))
sent: list[ChatCompletionMessageParam] = plan.messages()
question: str = plan.messages()[-1]["content"]
chat = planner.conversation("c1")
chat.plan(["a text"], query="Which?")

def ask(client: OpenAI) -> str | None:
    reply = client.chat.completions.create(model="m", messages=chat.messages())
    return reply.choices[0].message.content

async def ask_later(client: AsyncOpenAI) -> str | None:
    reply = await client.chat.completions.create(model="m", messages=plan.messages())
    return reply.choices[0].message.content
""",
    "memories.py": """
from openai import OpenAI
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory

def ask(client: OpenAI, memory: ReuseMemory) -> None:
    client.chat.completions.create(model="m", messages=memory.messages("Where?"))

async def ask_later(client: OpenAI, memory: AsyncReuseMemory) -> None:
    client.chat.completions.create(model="m", messages=await memory.messages("Where?"))
""",
    "outcomes.py": """
from ctxreuse import BatchPlan
from ctxreuse.serving import Answered, EngineClient, Failed, Outcome, dispatch

async def texts(client: EngineClient, batch: BatchPlan) -> list[str]:
    outcomes = await dispatch(client, batch)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        print(outcome.completion.text.upper())
    return [one.completion.text if one.error is None else str(one.error.args) for one in outcomes]

def text(outcome: Outcome) -> str:
    match outcome:
        case Answered():
            return outcome.completion.text
        case Failed():
            return str(outcome.error)
""",
    "workflows.py": """
from ctxreuse.workflow import WorkflowEngine, WorkflowResult, one_shot

def answers(engine: WorkflowEngine) -> list[str]:
    return [one.answer for one in engine.run_batch([(one_shot(), "Which?")])]

async def answered(engine: WorkflowEngine) -> list[WorkflowResult | Exception]:
    return await engine.arun_batch([(one_shot(), "Which?")], return_exceptions=True)
""",
}
"""Programs that users write."""

WRONG = """
from ctxreuse import BatchPlan, ContextRequest, ReusePlanner
from ctxreuse.serving import EngineClient, dispatch

async def texts(client: EngineClient, batch: BatchPlan) -> list[str]:
    return [one.completion.text for one in await dispatch(client, batch)]

ReusePlanner().plan(ContextRequest(5, "Which?"))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="a package without docs"),
]


def program(page: str) -> str:
    blocks = [block.code for block in blocks_of(page) if block.language == "python"]
    return "\n\n".join([GIVEN.get(page, ""), *blocks]) if blocks else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for page in filter(program, PAGES):
        name = page.removesuffix(".md").replace("/", "_").replace("-", "_")
        (folder / f"{name}.py").write_text(program(page), encoding="utf-8")
    for name, text in USERS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def run_mypy(files: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def run_pyright(folder: Path) -> subprocess.CompletedProcess[str]:
    settings = {
        "include": ["."],
        "extraPaths": [str(ROOT), str(ROOT / "integrations"), str(ROOT / "agents")],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_mypy_finds_nothing_in_what_is_shown(folder):
    done = run_mypy(sorted(folder.glob("*.py")))
    assert done.stdout.startswith("Success: no issues found"), done.stdout + done.stderr


def test_pyright_finds_nothing_in_what_is_shown(folder):
    done = run_pyright(folder)
    assert "\n0 errors" in f"\n{done.stdout}", done.stdout + done.stderr


def test_both_find_an_outcome_that_is_not_checked_and_a_wrong_argument(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    by_mypy, by_pyright = run_mypy([tmp_path / "wrong.py"]).stdout, run_pyright(tmp_path).stdout
    assert '"None" of "Completion | None" has no attribute "text"' in by_mypy
    assert 'Argument 1 to "ContextRequest"' in by_mypy
    assert "Found 2 errors" in by_mypy
    assert '"text" is not a known attribute of "None"' in by_pyright
    assert "2 errors" in by_pyright
