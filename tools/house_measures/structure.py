"""How code is laid out: imports, cycles, names that stand twice, full folders.

An import counts wherever it stands: at a module's top ("module"), under `TYPE_CHECKING`
("TYPE_CHECKING"), in a function ("function"), or as a string that is the dotted name of a product
module and no package ("name"). `from package import Name` imports the package's `__init__` and,
through its re-exports, the module that defines the name. Cycles are strongly connected files.
A class name stands twice if it does so without leading underscores, nested classes included.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

UNCOMPARED = {"__init__", "__main__", "errors"}
"""Module names that may stand in every package."""


Kind: TypeAlias = Literal["module", "TYPE_CHECKING", "function", "name"]


Graph: TypeAlias = Mapping[str, Collection[str]]


class Import(NamedTuple):
    """One module imports another."""

    importer: str
    imported: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Tree:
    """The modules of some folders, by their dotted names."""

    paths: Mapping[str, Path]  # their files
    parsed: Mapping[str, ast.Module] = field(repr=False)  # their syntax

    @classmethod
    def of(cls, root: Path, folders: Iterable[str], import_roots: Iterable[str]) -> Tree:
        """Read the `*.py` of folders, whose imports begin at some of `import_roots`."""
        bases = sorted((root / one for one in import_roots), key=lambda base: -len(base.parts))
        paths = {}
        for folder in folders:
            for path in sorted((root / folder).rglob("*.py")):
                base = next(base for base in bases if path.is_relative_to(base))
                parts = path.relative_to(base).with_suffix("").parts
                paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return cls(paths, {name: ast.parse(path.read_text()) for name, path in paths.items()})

    def is_package(self, module: str) -> bool:
        """Return whether a module is an `__init__`."""
        return self.paths[module].name == "__init__.py"

    def imports(self) -> set[Import]:
        """Return what imports what."""
        reexported = {
            (module, alias.asname or alias.name): (statement.module or "", alias.name)
            for module, tree in self.parsed.items()
            if self.is_package(module)
            for statement, _ in _statements(tree.body)
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
        }
        found = set()
        for module, tree in self.parsed.items():
            for statement, kind in _statements(tree.body):
                for target in self._targets(statement, reexported):
                    found.add(Import(module, target, kind))
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    name = node.value
                    if "." in name and name in self.paths and not self.is_package(name):
                        found.add(Import(module, name, "name"))
        return {one for one in found if one.importer != one.imported}

    def _targets(
        self,
        statement: ast.Import | ast.ImportFrom,
        reexported: Mapping[tuple[str, str], tuple[str, str]],
    ) -> Iterator[str]:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if alias.name in self.paths)
            return
        for alias in statement.names:
            place = (statement.module or "", alias.name)
            seen: set[tuple[str, str]] = set()
            while place[0] in self.paths and place not in seen:
                seen.add(place)
                submodule = ".".join(place)
                yield submodule if submodule in self.paths else place[0]
                if submodule in self.paths or place not in reexported:
                    break
                place = reexported[place]


def _statements(
    nodes: Iterable[ast.AST], kind: Kind = "module"
) -> Iterator[tuple[ast.Import | ast.ImportFrom, Kind]]:
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, kind
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.body, "TYPE_CHECKING")
            yield from _statements(node.orelse, kind)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _statements(ast.iter_child_nodes(node), "function")
        else:
            yield from _statements(ast.iter_child_nodes(node), kind)


def graph_of(imports: Iterable[Import], *kinds: Kind) -> Graph:
    """Return the imports of some kinds as a graph."""
    graph: dict[str, set[str]] = defaultdict(set)
    for one in imports:
        if one.kind in kinds:
            graph[one.importer].add(one.imported)
    return dict(graph)


def cycles(graph: Graph) -> list[tuple[str, ...]]:
    """Return the modules that import each other, directly or not, one tuple for each cycle."""
    reached = {module: _reachable(graph, module) for module in graph}
    found = {
        tuple(sorted(other for other in reach if module in reached.get(other, ())))
        for module, reach in reached.items()
        if module in reach
    }
    return sorted(found)


def _reachable(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    ahead = list(graph.get(start, ()))
    while ahead:
        module = ahead.pop()
        if module not in reached:
            reached.add(module)
            ahead += graph.get(module, ())
    return reached


def shared_class_names(tree: Tree) -> dict[str, list[str]]:
    """Return the class names that stand more than once, with the modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, parsed in tree.parsed.items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def shared_module_names(tree: Tree) -> dict[str, list[str]]:
    """Return the file names that stand more than once, with the modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in tree.paths.items():
        if path.stem not in UNCOMPARED:
            places[path.stem].append(module)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def exported_names(tree: Tree) -> list[str]:
    """Return what the packages' `__all__` list."""
    return [
        f"{module}.{name}"
        for module, parsed in tree.parsed.items()
        if tree.is_package(module)
        for node in parsed.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    ]


def product_names(path: Path, packages: Collection[str]) -> list[str]:
    """Return the names that a file imports from some packages."""
    return sorted(
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages
        for alias in node.names
    )


def files_with(tree: Tree, text: str) -> list[str]:
    """Return the modules that hold a string."""
    return [
        module
        for module, parsed in tree.parsed.items()
        if any(isinstance(one, ast.Constant) and one.value == text for one in ast.walk(parsed))
    ]


def entries(folder: Path) -> list[str]:
    """Return what `ls` shows in a folder, without what only Python's cache has left."""
    return sorted(
        one.name for one in folder.iterdir() if not one.name.startswith(".") and _has(one)
    )


def _has(path: Path) -> bool:
    if path.is_file():
        return True
    return path.name != "__pycache__" and any(map(_has, path.iterdir()))


def files_by_folder(root: Path, folders: Iterable[str]) -> dict[str, int]:
    """Return how many files lie directly in each folder that holds any."""
    counts = {}
    for folder in folders:
        for path in sorted([root / folder, *(root / folder).rglob("*/")]):
            names = [one for one in entries(path) if (path / one).is_file()]
            if names and "__pycache__" not in path.parts:
                counts[path.relative_to(root).as_posix()] = len(names)
    return counts


def contract_layers(root: Path) -> int:
    """Return the number of layers of the import contract that has most of them."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    return max(len(one["layers"]) for one in contracts if one["type"] == "layers")
