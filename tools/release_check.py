"""Whether what would be published can be installed and used.

    python tools/release_check.py                   all extras but gpu, each alone; none; all
    python tools/release_check.py --extra report    these extras only
    python tools/release_check.py --extra gpu       torch is gigabytes, so only when asked for

Builds sdist and wheel, looks at what they hold, and uses every feature (`installed_features.py`) in
a fresh environment per extra: what the extra is for works, and what needs another one says so with
the pip command.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import Annotated, Any

import typer
from installed_features import FAILS, FEATURES, SAYS_SO, WORKS, Feature
from release_environments import ROOT, ReleaseError, build, make_environment, run
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

NO_EXTRA = ""
ALL = "all"
GPU = "gpu"
_NOT_IN_ALL = {GPU, "litellm", "ray"}
_NEEDS = {GPU: "gpu,workflow"}
"""Extras that extend another one, with which they are installed."""

PACKAGES = (
    "ctxreuse",
    "langchain_ctxreuse",
    "llamaindex_ctxreuse",
    "mem0_ctxreuse",
    "chain_of_agents",
    "chain_of_agents_ctxreuse",
)
IN_SDIST = (
    *("tests", "tests_vllm", "tools", "examples", "benchmarks", "docs"),
    *("Makefile", "README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE"),
    *("SECURITY.md", "pyproject.toml"),
)
_RUBBISH = re.compile(r"(^|/)(\.[^/]+|__pycache__|dist|demo-output|[^/]+\.(pyc|egg-info))(/|$)")
_RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)[^)]*\)")


@dataclass(frozen=True, slots=True)
class ExtraResult:
    """How the features went with an extra: for each feature, its state and what was said."""

    extra: str
    states: dict[str, tuple[str, str]]

    @property
    def faults(self) -> list[str]:
        """Why this extra cannot be released; nothing where it can."""
        faults = []
        for feature in FEATURES:
            state, said = self.states.get(feature.name, (FAILS, "it was not tried"))
            fault = fault_of(feature, self.extra, state, said)
            if fault:
                faults.append(f"[{self.extra}] {feature.name}: {fault}")
        return faults


def fault_of(feature: Feature, extra: str, state: str, said: str) -> str:
    """Say what is wrong with how a feature went where one extra is installed; "" if nothing is."""
    if state == FAILS:
        return said
    must_work = not feature.extras or extra in feature.extras
    must_work = must_work or (extra == ALL and not _NOT_IN_ALL & set(feature.extras))
    if must_work and state != WORKS:
        return f"does not work, though its extra is installed: {said}"
    if extra == NO_EXTRA and feature.extras and state != SAYS_SO:
        return f"works without an extra, so that its extra {feature.extras} is for nothing"
    return ""


def faults_of_wheel(names: Iterable[str]) -> list[str]:
    """Return what is missing among the files in a wheel, or should not be there."""
    names = set(names)
    wanted = [f"{package}/{name}" for package in PACKAGES for name in ("__init__.py", "py.typed")]
    sources = [ROOT, ROOT / "integrations", ROOT / "agents"]
    for source in sources:
        for package in PACKAGES:
            wanted += [
                str(path.relative_to(source).as_posix())
                for path in (source / package).rglob("*")
                if path.is_file() and not _RUBBISH.search(path.relative_to(source).as_posix())
            ]
    tops = {name.partition("/")[0] for name in names}
    others = sorted(top for top in tops if top not in PACKAGES and not top.endswith(".dist-info"))
    faults = [f"the wheel lacks {name}" for name in sorted(set(wanted) - names)]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        faults.append("the wheel lacks the licence")
    return faults + [f"the wheel holds {name}" for name in [*others, *_rubbish(names)]]


def faults_of_sdist(names: Iterable[str]) -> list[str]:
    """Return what is missing in an sdist, or should not be there; without the folder around all."""
    names = set(names)
    tops = {name.partition("/")[0] for name in names}
    faults = [f"the sdist lacks {name}" for name in IN_SDIST if name not in tops]
    return faults + [f"the sdist holds {name}" for name in _rubbish(names)]


def _rubbish(names: Iterable[str]) -> list[str]:
    # hatchling puts .gitignore into an sdist, so that a wheel built from it leaves out the same
    own = re.compile(r"\.gitignore|tests/.*/\.npmrc")
    return sorted(name for name in names if not own.fullmatch(name) and _RUBBISH.search(name))


def _look_into(sdist: Path, wheel: Path) -> list[str]:
    """Return the faults of what was built."""
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        [metadata] = (name for name in names if name.endswith(".dist-info/METADATA"))
        page = str(message_from_bytes(packed.read(metadata)).get_payload())
    with tarfile.open(sdist) as packed_sources:
        inner = [name.partition("/")[2] for name in packed_sources.getnames()]
    faults = faults_of_wheel(names) + faults_of_sdist(inner)
    links = _RELATIVE_LINK.findall(re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    faults += [f"the page of the package links to a file: {link}" for link in links]
    run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
    return faults


def _try(extra: str, wheel: Path, folder: Path, python: str) -> ExtraResult:
    environment = make_environment(folder / "venv", python)
    named = _NEEDS.get(extra, extra)
    environment.install(f"{wheel}[{named}]" if named else str(wheel))
    work = folder / "work"
    work.mkdir()
    tool = Path(__file__).with_name("installed_features.py")
    printed = run([str(environment.python), "-I", str(tool)], folder=work)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"feature"')]
    return ExtraResult(extra, {one["feature"]: (one["state"], one["said"]) for one in lines})


def _chosen(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ReleaseError(f"there is no extra {unknown[0]!r}; there are {', '.join(known)}")
    used = {extra for feature in FEATURES for extra in feature.extras}
    unused = [name for name in known if name not in used and name != ALL]
    if unused:
        raise ReleaseError(f"tools/installed_features.py uses nothing of the extra {unused[0]!r}")
    return list(wanted) or [NO_EXTRA, *(name for name in known if name != GPU)]


def _table(tried: Sequence[ExtraResult]) -> Table:
    marks = {WORKS: "[green]works[/]", SAYS_SO: "[dim]says so[/]", FAILS: "[red]fails[/]"}
    table = Table(
        title="features with each extra alone", caption="says so: names the extra it needs"
    )
    table.add_column("feature")
    for one in tried:
        table.add_column(one.extra or "none")
    for feature in FEATURES:
        states = (one.states.get(feature.name, (FAILS, ""))[0] for one in tried)
        table.add_row(feature.name, *(marks[state] for state in states))
    return table


def without_address(project: dict[str, Any]) -> list[str]:
    """Return the names in `project.urls` whose address is a placeholder."""
    return [name for name, url in project["urls"].items() if ".invalid/" in url]


def main(
    extra: Annotated[
        list[str] | None,
        typer.Option(help="Try this extra only; several may be given. Without it all but gpu."),
    ] = None,
    python: Annotated[
        str, typer.Option(help="An interpreter, or a version that uv finds.")
    ] = sys.executable,
    jobs: Annotated[int, typer.Option(min=1, help="Environments that are tried at once.")] = 2,
    dist: Annotated[
        Path | None, typer.Option(help="Keep what was built here, an empty folder.")
    ] = None,
) -> None:
    """Build the package, install it with each extra alone, and use it."""
    console = Console() if Console().is_terminal else Console(width=200)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tried: list[ExtraResult] = []
    try:
        chosen = _chosen(extra or [], list(project["optional-dependencies"]))
        with (
            tempfile.TemporaryDirectory(prefix="ctxreuse-release-") as name,
            Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress,
            ThreadPoolExecutor(jobs) as pool,
        ):
            task = progress.add_task("building", total=len(chosen) + 1)
            sdist, wheel = build(dist or Path(name) / "dist")
            faults = _look_into(sdist, wheel)
            progress.update(task, advance=1, description="installing and using")
            waiting = []
            for one in chosen:
                folder = Path(name) / (one or "none")
                folder.mkdir()
                waiting.append(pool.submit(_try, one, wheel, folder, python))
            for done in as_completed(waiting):
                tried.append(done.result())
                progress.update(task, advance=1, description=f"tried {tried[-1].extra or 'none'}")
    except ReleaseError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    tried.sort(key=lambda one: chosen.index(one.extra))
    console.print(_table(tried))
    faults += [fault for one in tried for fault in one.faults]
    for fault in faults:
        console.print(fault, style="red", markup=False, highlight=False)
    if faults:
        raise typer.Exit(1)
    if missing := without_address(project):
        console.print(f"before it is uploaded, project.urls needs: {', '.join(missing)}")
    console.print(f"{sdist.name} and {wheel.name} can be released")


if __name__ == "__main__":
    typer.run(main)
