"""Fresh virtual environments, outside the repository, in which a release is tried.

uv makes them in seconds, out of its cache. It does not read pip's settings, so that what they say
of indexes, folders of wheels and certificates is told to it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
_SEPARATORS = {"UV_FIND_LINKS": ","}
_SECTIONS = ("global", "install", ":env:")  # later ones win, as for pip


class ReleaseError(Exception):
    """A step of the check failed; the message ends with what it said."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment."""

    folder: Path  # where it is
    settings: Mapping[str, str]  # variables that uv runs with

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def install(self, *arguments: str, folder: Path = ROOT) -> None:
        """Install with `uv pip install`; dependency groups are those of the project there."""
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
        called = [*command, "--python", str(self.python), *arguments]
        run(called, folder=folder, more=self.settings)


def make_environment(folder: Path, python: str = sys.executable) -> Environment:
    """Make an empty environment of an interpreter, or a version that uv finds, such as "3.12"."""
    settings = uv_settings(_pip_settings(), os.environ)
    run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", python, str(folder)])
    return Environment(folder, settings)


def uv_settings(pip_lines: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return pip's settings as the variables that tell uv the same.

    The lines are what `pip config list` prints: `section.name='value'`. What is set in the
    environment already stays as it is.
    """
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in pip_lines:
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in found and name in _UV_NAMES:
            found[section][name] = ast.literal_eval(value)
    said = {name: value for section in _SECTIONS for name, value in found[section].items()}
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip does: the best of all indexes
    for name, value in said.items():
        variable = _UV_NAMES[name]
        settings[variable] = _SEPARATORS.get(variable, " ").join(value.split())
    return {name: value for name, value in settings.items() if name not in environment}


def run(command: list[str], *, folder: Path = ROOT, more: Mapping[str, str] | None = None) -> str:
    """Run a program without what would show it this repository's sources; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | dict(more or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)}\n{done.stdout[-3000:]}")
    return done.stdout


def build(target: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, in a folder; return where they are."""
    run([sys.executable, "-m", "build", "--outdir", str(target), str(ROOT)])
    [sdist], [wheel] = target.glob("*.tar.gz"), target.glob("*.whl")
    return sdist, wheel


def _pip_settings() -> list[str]:
    return run([sys.executable, "-m", "pip", "config", "list"]).splitlines()
