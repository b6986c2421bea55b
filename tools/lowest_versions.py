"""The test suite with the lowest versions that pyproject.toml allows of all it names.

    python tools/lowest_versions.py [ARGUMENTS FOR PYTEST]

What those packages need in turn, and what the tests use besides, is as new as goes with them. The
suite runs in the sdist, unpacked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from release_environments import ROOT, ReleaseError, build, make_environment
from rich.console import Console

NOT_IN_ALL = ("gpu", "litellm")  # ray is not either, but in the development group
"""Extras that are left out: what they need would raise the others' lowest versions."""

# old versions use what their dependencies have deprecated since; that is no fault of ours
_WARNINGS = ("-W", "default::DeprecationWarning", "-W", "default::PendingDeprecationWarning")
_TYPES = "--ignore=tests/project/test_snippet_types.py"  # old libraries tell other types, or none


def lowest_versions(project: dict[str, Any]) -> list[str]:
    """Return a constraint `name==version` for every direct dependency, of all extras but some."""
    lowest: dict[str, Version] = {}
    for requirement in _requirements(project):
        name = canonicalize_name(requirement.name)
        bounds = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
        if not bounds:
            raise ReleaseError(f"{requirement} has no lower bound; give it one with >=")
        lowest[name] = max([*bounds, *([lowest[name]] if name in lowest else [])])
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


def _requirements(project: dict[str, Any]) -> Iterator[Requirement]:
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in extras if name not in NOT_IN_ALL)]
    for text in (text for texts in lists for text in texts):
        requirement = Requirement(text)
        if requirement.name != project["name"]:  # not the extras that are made of others
            yield requirement


def main(
    arguments: Annotated[list[str] | None, typer.Argument(help="For pytest.")] = None,
    python: Annotated[
        str, typer.Option(help="An interpreter, or a version that uv finds.")
    ] = sys.executable,
) -> None:
    """Run the test suite with the lowest versions that pyproject.toml allows."""
    console = Console()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        with tempfile.TemporaryDirectory(prefix="ctxreuse-lowest-") as name:
            folder = Path(name)
            constraints = folder / "lowest.txt"
            constraints.write_text("\n".join(lowest_versions(project)) + "\n", encoding="utf-8")
            with console.status("building the sdist"):
                sdist, _ = build(folder / "dist")
            with tarfile.open(sdist) as packed:
                packed.extractall(folder, filter="data")
            sources = folder / sdist.name.removesuffix(".tar.gz")
            with console.status("installing the lowest versions"):
                environment = make_environment(folder / "venv", python)
                chosen = ("--constraint", str(constraints), ".[all]", "--group", "dev")
                environment.install(*chosen, folder=sources)
            console.print("lowest versions:", ", ".join(lowest_versions(project)))
            command = [environment.python, "-m", "pytest", *_WARNINGS, _TYPES, *(arguments or [])]
            variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
            code = subprocess.run(command, cwd=sources, env=variables, check=False).returncode
    except ReleaseError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
