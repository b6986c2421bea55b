"""OpenAI's SDK for TypeScript and LangChain.js on Node, from a lock file that names no registry."""

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from door_helpers import served
from test_clients import answer

from ctxreuse.serving import EmulatedEngine

FOLDER = Path(__file__).parent / "typescript"
GUIDE = Path(__file__).parents[3] / "docs/guides/serve.md"


def example(pattern, door):
    code = re.search(pattern, GUIDE.read_text(), re.DOTALL | re.MULTILINE)[1]
    return code.replace("http://127.0.0.1:8100", str(door.base_url)).replace("MODEL", "emulated")


async def ran(*command, folder, **environment):
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, "NO_PROXY": "*", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def folder(tmp_path):
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node and npm are not installed")
    where = shutil.copytree(FOLDER, tmp_path / "typescript")
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
    code, _, err = await ran("npm", "ci", *options, folder=where)
    if code:
        pytest.skip(f"npm cannot install the SDK: {err.strip().splitlines()[-1:]}")
    return where


def test_the_lock_file_names_no_registry():
    lock = (FOLDER / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    assert "://" not in lock
    assert json.loads(lock)["packages"]["node_modules/openai"]["integrity"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "more"),
    [
        ("client.js", {"plan": {"order": ["a", "b"], "labels": {}}, "models": ["emulated"]}),
        ("langchain.js", {}),
    ],
)
async def test_clients_in_typescript(folder, program, more):
    async with served(EmulatedEngine(answer=answer)) as door:
        url = f"{door.base_url}/v1"
        code, out, err = await ran("node", program, folder=folder, BASE_URL=url)
        shown = [one["messages"][0]["content"] for one in door.bodies()]
    assert (code, err) == (0, "")
    told = json.loads(out)
    if more:
        assert told["plan"].pop("expected_cached_tokens") > 0
    assert told == {
        "plain": "In France, they say.",
        "text": "In France, they say.",
        "call": "look_up",
        "parsed": {"name": "Paris"},
        "error": ["BadRequestError", 400, "invalid_request_error"],
        **more,
    }
    assert all(text.startswith("a says") for text in shown)


@pytest.mark.slow
async def test_the_guides_example_for_typescript(folder):
    async with served(EmulatedEngine(answer=answer)) as door:
        (folder / "example.mjs").write_text(example(r"```typescript\n(.*?)```", door))
        code, out, err = await ran("node", "example.mjs", folder=folder)
        shown = door.bodies()[0]["messages"][0]["content"]
    assert (code, out, err) == (0, "In France, they say.", "")
    assert "Paris\nThe Seine" in shown


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_the_guides_example_for_curl(tmp_path):
    async with served(EmulatedEngine(answer=answer)) as door:
        command = example(r"^\$ (curl [^\n]*)", door)
        code, out, _ = await ran("sh", "-c", command, folder=tmp_path)
    assert code == 0
    assert json.loads(out)["ctxreuse"]["order"] == ["p", "r"]
