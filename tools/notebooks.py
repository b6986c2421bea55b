"""Execute the notebooks of `notebooks/`, each in a fresh kernel.

    python tools/notebooks.py run [NAME...]     fail at the first that raises or warns
    python tools/notebooks.py write [NAME...]   write what the cells show into the files

`run` changes no file. `write` asks the emulated engine, whatever CTXREUSE_BASE_URL says, and leaves
out of the files what differs from run to run: times, and where they ran.
"""

from __future__ import annotations

import base64
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import nbformat
import typer
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
TIMEOUT_S = 300
TIMEOUT_OF_A_SERVER_S = 3600  # a small one needs minutes for what is emulated in seconds
LARGEST_PICTURE = 150 * 1024

_PATH = re.compile(r"(?<![\w.:/<])(?:/(?:home|root|tmp|var|usr|opt|etc|work|Users)/|[A-Z]:\\)\w")
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}

app = typer.Typer(
    help=__doc__, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


class NotebookError(Exception):
    """A notebook fails, or its file does not show what it should; the message says which cell."""


@app.command()
def run(names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None) -> None:
    """Execute notebooks, all if none is named, and change no file."""
    _each(names, dict(os.environ), keep=False)


@app.command()
def write(names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None) -> None:
    """Execute notebooks, all if none is named, and write their outputs into them."""
    environment = {key: value for key, value in os.environ.items() if key != "CTXREUSE_BASE_URL"}
    _each(names, environment, keep=True)


def find(names: Sequence[str] | None = None) -> list[Path]:
    """Return the notebooks with these names, or names that begin so, in order; None is all."""
    paths = sorted(FOLDER.glob("*.ipynb"), key=lambda path: _place(path.name))
    if not names:
        return paths
    chosen = [path for path in paths if path.name.startswith(tuple(names))]
    for name in names:
        if not any(path.name.startswith(name) for path in chosen):
            raise NotebookError(f"there is no notebook {name}; there are {[p.name for p in paths]}")
    return chosen


def execute(path: Path, environment: dict[str, str]) -> NotebookNode:
    """Return a notebook as it is after it was executed; the file stays as it is.

    Args:
        path: The file.
        environment: The environment variables of its kernel.

    Raises:
        NotebookError: If a cell raises, takes too long, or writes to stderr, as warnings do.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as home:  # no start-up files and no history of a user's own
        # other users of the machine could listen in on TCP, so the kernel warns of it
        sockets = {} if os.name == "nt" else {"transport": "ipc", "ip": f"{home}/kernel"}
        at_most = TIMEOUT_OF_A_SERVER_S if "CTXREUSE_BASE_URL" in environment else TIMEOUT_S
        end = time.monotonic() + at_most
        client = NotebookClient(
            notebook,
            timeout_func=lambda cell: max(1, end - time.monotonic()),
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
            config=Config(KernelManager=sockets),
        )
        try:
            client.execute(env=environment | {"IPYTHONDIR": home})
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failed = [number for number, cell in _code(notebook) if _has_run(cell)]
            raise NotebookError(f"{path.name}, cell {max(failed, default=0)}: {error}") from error
    for number, cell in _code(notebook):
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                raise NotebookError(f"{path.name}, cell {number} warns:\n{output.text}")
    return notebook


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Return an executed notebook without what differs from run to run."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = NotebookNode(kernelspec=_KERNEL, language_info={"name": "python"})
    for number, cell in enumerate(notebook.cells, start=1):
        cell.setdefault("id", f"cell-{number:02}")
        cell.metadata = NotebookNode(
            {key: value for key, value in cell.metadata.items() if key == "tags"}
        )
    for count, (_, cell) in enumerate(_code(notebook), start=1):
        cell.execution_count = count
        cell.outputs = list(_joined(cell.outputs))
        for output in cell.outputs:
            if "metadata" in output:
                output.metadata = NotebookNode()
            if output.output_type == "execute_result":
                output.execution_count = count
    return notebook


def faults(notebook: NotebookNode) -> list[str]:
    """Return what a notebook's file must not hold, as sentences that name the cell."""
    found = []
    here = (str(FOLDER.parent), str(Path.home()), sys.prefix, platform.node())
    for number, cell in _code(notebook):
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"cell {number} shows an error: {output.ename}")
            shown = "\n".join(_texts(output))
            if match := _PATH.search(shown):
                found.append(f"cell {number} shows an absolute path: {match.group()}")
            elif any(len(name) > 5 and name in shown for name in here):
                found.append(f"cell {number} shows where it ran")
            picture = base64.b64decode(output.get("data", {}).get("image/png", ""))
            if len(picture) > LARGEST_PICTURE:
                found.append(f"cell {number} shows a picture of {len(picture):,} bytes")
    return found


def _each(names: Sequence[str] | None, environment: dict[str, str], *, keep: bool) -> None:
    """Execute notebooks, say how long each takes, and exit with 1 at the first that fails."""
    # making its list of fonts, once a machine, matplotlib warns that this takes a moment
    import matplotlib.font_manager  # noqa: F401

    whole = 0.0
    try:
        for path in find(names):
            started = time.perf_counter()
            notebook = execute(path, environment)
            seconds = time.perf_counter() - started
            whole += seconds
            _keep(path, notebook) if keep else _compare(path, notebook)
            print(f"{seconds:6.1f} s  {path.name}", flush=True)
    except NotebookError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    print(f"{whole:6.1f} s  in all")


def _keep(path: Path, notebook: NotebookNode) -> None:
    """Write an executed notebook."""
    notebook = cleaned(notebook)
    if found := faults(notebook):
        raise NotebookError(f"{path.name} is not written: {'; '.join(found)}")
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def _compare(path: Path, executed: NotebookNode) -> None:
    """Raise NotebookError if a file lacks outputs of cells that have some, or has others."""
    kept = nbformat.read(path, as_version=4)
    for (number, old), (_, new) in zip(_code(kept), _code(executed), strict=True):
        if _kinds(old) != _kinds(new):
            raise NotebookError(
                f"{path.name}, cell {number} shows {_kinds(new) or 'nothing'} and the file has "
                f"{_kinds(old) or 'nothing'}: make notebooks-write"
            )


def _kinds(cell: NotebookNode) -> list[str]:
    return [output.output_type for output in _joined(cell.outputs)]


def _joined(outputs: Sequence[NotebookNode]) -> Iterator[NotebookNode]:
    """Yield outputs; neighbouring pieces of a stream, cut by chance, become one."""
    last: NotebookNode | None = None
    for output in outputs:
        both = last is not None and last.output_type == output.output_type == "stream"
        if last is not None and both and last.name == output.name:
            last.text += output.text
            continue
        if last is not None:
            yield last
        last = NotebookNode(output)
    if last is not None:
        yield last


def _texts(output: NotebookNode) -> Iterator[str]:
    if output.output_type == "stream":
        yield output.text
    for kind, shown in output.get("data", {}).items():
        if not kind.startswith("image/"):
            yield shown if isinstance(shown, str) else repr(shown)


def _code(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """Yield the code cells with their places among all cells, counted from 1."""
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "code":
            yield number, cell


def _has_run(cell: NotebookNode) -> bool:
    return "iopub.execute_input" in cell.metadata.get("execution", {})


def _place(name: str) -> tuple[int, str]:
    """Return what notebooks are sorted by: the number that their names begin with."""
    digits = re.match(r"\d+", name)
    return (int(digits.group()) if digits else sys.maxsize, name)


if __name__ == "__main__":
    app()
