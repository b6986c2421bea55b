"""How long code and words are."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def lines(paths: Iterable[Path]) -> int:
    """Return the number of lines in files."""
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def words(paths: Iterable[Path]) -> int:
    """Return the number of words in files."""
    return sum(len(path.read_text().split()) for path in paths)


def code_lines(path: Path) -> int:
    """Return the lines of a file without blanks, comments, docstrings and imports."""
    text = path.read_text()
    left_out = _lines_apart(text)
    return sum(
        bool(line.strip()) and line.strip()[0] != "#" and number not in left_out
        for number, line in enumerate(text.splitlines(), 1)
    )


def code_tokens(path: Path) -> int:
    """Return the number of tokens of a file without comments, layout, docstrings and imports."""
    text = path.read_text()
    left_out = _lines_apart(text)
    return sum(
        token.type not in _NO_CODE and token.start[0] not in left_out
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def function_lengths(parsed: Iterable[ast.Module]) -> list[int]:
    """Return the lines of each function, docstring included, ascending."""
    return sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in parsed
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def _lines_apart(text: str) -> set[int]:
    """Return the lines of docstrings, those of attributes included, and of imports."""
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
