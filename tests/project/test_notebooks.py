"""The notebooks' files are whole: valid, executed, free of errors and paths, and listed.

That they run is what `make notebooks` finds out.
"""

import base64
import platform
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w.:/<])(?:/(?:home|root|tmp|var|usr|opt|work|Users)/|[A-Z]:\\)\w")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="a package without notebooks")
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    return nbformat.reads(path.read_text(encoding="utf-8"), as_version=nbformat.NO_CONVERT)


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [out for cell in notebook.cells for out in cell.get("outputs", [])]


def shown_text(output: NotebookNode) -> str:
    texts = [text for kind, text in output.get("data", {}).items() if kind != "image/png"]
    return output.get("text", "") + "\n".join(map(str, texts))


@each_notebook
def test_it_is_valid_in_format_4_5_with_ids_that_last(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert [cell.metadata for cell in notebook.cells if set(cell.metadata) - {"tags"}] == []


@each_notebook
def test_it_was_executed_from_top_to_bottom_without_errors_or_warnings(path):
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {out.output_type for out in outputs(notebook)} >= {"stream", "display_data"}
    assert [out for out in outputs(notebook) if out.output_type == "error"] == []
    assert [out for out in outputs(notebook) if out.get("name") == "stderr"] == []


@each_notebook
def test_it_shows_pictures_texts_of_a_real_model_a_table_and_not_where_it_ran(path):
    notebook = read(path)
    [table] = [out for out in notebook.cells[-1].outputs if "text/markdown" in out.get("data", {})]
    assert table.data["text/markdown"].count("\n|") >= 3
    shown = "\n".join(map(shown_text, outputs(read(path))))
    assert ABSOLUTE.findall(shown) == []
    assert [name for name in (sys.prefix, platform.node()) if len(name) > 5 and name in shown] == []

    pictures = [
        out.data["image/png"] for out in outputs(read(path)) if "image/png" in out.get("data", {})
    ]
    assert pictures
    assert [size for size in map(len, map(base64.b64decode, pictures)) if size > 150 * 1024] == []
    code = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "code")
    assert "Tfidf" not in code


def test_the_readme_lists_each_and_the_first_wraps_the_model_as_the_guide_recommends():
    listed = re.findall(
        r"^- \[(.+)\]\((.+)\): \S", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert listed == [(path.name, path.name) for path in PATHS]
    [path] = FOLDER.glob("1_*.ipynb")
    code = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "code")
    assert "ReuseChatModel(inner=new_llm(), planner=planner)" in code
    assert "ReuseRetriever" not in code
