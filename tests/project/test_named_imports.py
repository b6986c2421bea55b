"""What import contracts cannot see: modules named in strings, private names of frameworks."""

import ast
import re
from collections import defaultdict
from contextlib import suppress
from importlib import import_module
from inspect import isclass, signature
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ctxreuse"
FOREIGN = re.compile(
    r"(langchain\w+|langgraph|llama_index|llamaindex_ctxreuse|mem0_ctxreuse|chain_of_agents(?:_ctxreuse)?)"
    r"([.:][\w.:]+)?"
)
"""Packages of frameworks and of their integrations, or something in one."""
HOOKS = re.compile(
    r"_a?(generate|stream|get_relevant_documents|retrieve|postprocess_nodes|get|put|query)"
    r"|_llm_type|_identifying_params|_get_ls_params|_(get|update)_prompts|_get_prompt_modules"
)
"""What LangChain and LlamaIndex document for who derives a class."""
OF_PYTHON = {"_abc_impl", "_asdict", "_is_protocol", "_replace"}


def named(path):
    """Return the foreign modules that a file names in strings."""
    code = ast.parse(path.read_text(encoding="utf-8"))
    strings = (one.value for one in ast.walk(code) if isinstance(one, ast.Constant))
    return {one for one in strings if isinstance(one, str) and FOREIGN.fullmatch(one)}


def test_nothing_of_ctxreuse_names_a_module_of_a_framework_or_an_integration():
    assert not {str(path): names for path in PACKAGE.rglob("*.py") if (names := named(path))}


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ('import_module("langchain_ctxreuse.documents.document_plans")', True),
        ('find_spec("llama_index")', True),
        ('SOURCES = {"one": "llama_index.core:Settings"}', True),
        ('raise MissingExtraError("recording", "langchain")', False),
        ('"""Of LangChain and langchain_core things."""', False),
    ],
)
def test_a_named_module_is_found_wherever_it_stands(tmp_path, text, is_found):
    (tmp_path / "one.py").write_text(text)
    assert bool(named(tmp_path / "one.py")) == is_found


def used(node):
    """Return the names that a node reads of something, or imports."""
    if isinstance(node, ast.Attribute):
        return {node.attr} if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.ImportFrom):
        return {*(one.name for one in node.names), *(node.module or "").split(".")}
    return set()


def asked(node):
    """Return the names that a node asks `getattr` for."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"):
        return set()
    return {one.value for one in node.args[1:2] if isinstance(one, ast.Constant)}


def defined(node):
    if isinstance(getattr(node, "ctx", None), ast.Store):
        return {getattr(node, "attr", ""), getattr(node, "id", "")}
    return {getattr(node, "name", None), getattr(node, "asname", None)}


def overridden(path, root):
    """Return the names of frameworks' classes that the classes of a module define anew."""
    module = import_module(".".join(path.relative_to(root).with_suffix("").parts))
    kinds = filter(isclass, vars(module).values())
    own = [one for one in kinds if one.__module__ == module.__name__]
    bases = [(kind, base) for kind in own for base in kind.__mro__]
    ours = re.compile("builtins|chain_of_agents|ctxreuse|\\w+_ctxreuse")
    return {
        name
        for kind, base in bases
        if not ours.match(base.__module__)
        for name in vars(kind).keys() & vars(base).keys()
    }


def test_private_names_of_frameworks_stand_in_the_table_of_contributing():
    roots = {PACKAGE: ROOT} | {one: one for one in (ROOT / "integrations", ROOT / "agents")}
    files = {path: root for folder, root in roots.items() for path in folder.rglob("*.py")}
    nodes = {one: list(ast.walk(ast.parse(one.read_text(encoding="utf-8")))) for one in files}
    ours = {name for tree in nodes.values() for node in tree for name in defined(node)}
    rows = re.findall(
        r"^\|.*\| `([\w/]+\.py)` \| (.*) \| `tests/[\w/.]+` \|$",
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    listed = {ROOT / path: set(re.findall(r"`(\w+)`", names)) for path, names in rows}
    missing = {}
    for path, root in files.items():
        names = {name for node in nodes[path] for name in used(node)} - ours
        names |= {name for node in nodes[path] for name in asked(node)}
        # nothing of the core derives from a framework's class
        names |= set() if root == ROOT else overridden(path, root)
        names -= OF_PYTHON | listed.get(path, set())
        missing[path] = {
            one for one in names if re.match("_[a-z]", one) and not HOOKS.fullmatch(one)
        }
    assert {path: names for path, names in missing.items() if names} == {}
    for path, names in listed.items():
        assert {one for one in names if one not in path.read_text(encoding="utf-8")} == set()


def test_arguments_that_texts_name_are_those_of_what_they_name():
    """Verdicts, errors and log lines tell users what to write."""
    fronts = ["ctxreuse", "ctxreuse.serving", "langchain_ctxreuse", "llamaindex_ctxreuse"]
    fronts += ["mem0_ctxreuse", "chain_of_agents"]
    known = defaultdict(set)
    for front in map(import_module, fronts):
        for name in front.__all__:
            with suppress(TypeError, ValueError):  # a module, an error
                known[name] |= {*signature(getattr(front, name)).parameters}
    wrong, found = set(), set()
    for path in (
        path
        for root in ("ctxreuse", "integrations", "agents")
        for path in (ROOT / root).rglob("*.py")
    ):
        for one in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(one, ast.Constant) and isinstance(one.value, str)):
                continue
            for name, argument in re.findall(r"\b(\w+)\((\w+)=", one.value):
                if name in known:
                    found.add(name)
                    if argument not in known[name]:
                        wrong.add(f"{path.name}: {name}({argument}=")
    assert wrong == set()
    assert {"ReuseChatModel", "ReuseRetriever", "ReusePlanner"} <= found
