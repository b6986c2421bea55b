"""What import contracts cannot see: modules that are named in strings."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ctxreuse"
FOREIGN = re.compile(
    r"(langchain\w+|langgraph|llama_index|llamaindex_ctxreuse|mem0_ctxreuse|chain_of_agents(?:_ctxreuse)?)"
    r"([.:][\w.:]+)?"
)
"""Packages of frameworks and of their integrations, or something in one."""


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
