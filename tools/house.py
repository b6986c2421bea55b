"""How far the code is from its five aims: layout, names, size and journeys, as numbers.

    python tools/house.py                   the numbers, each with its aim
    python tools/house.py --json            the same for programs
    python tools/house.py --list workflow   the functions of a journey
    python tools/house.py --root OTHER      another checkout

Product code is the `*.py` of `ctxreuse`, `integrations` and `agents` in this repository.

An import counts wherever it stands: at a module's top ("module"), under `TYPE_CHECKING`
("TYPE_CHECKING"), in a function ("function"), or as a string that is the dotted name of a product
module and no package ("name"). `from package import Name` imports the package's `__init__` and,
through its re-exports, the module that defines the name; a re-exporting `__init__` is an importer
like any other file. Importing `a.b` does not count as importing `a`. Cycles are strongly connected
files; those of module-level imports alone are printed apart from those that need imports of the
kinds "TYPE_CHECKING" or "function". Imports by name make no cycle.

A class name stands more than once if it does so without leading underscores, nested classes
included. Of module names, those of files are compared; what a file shares with a folder is printed
apart.

A journey is counted from the public call to the inner model and back, by a profiler hook: the
distinct functions and methods of product code that are entered, nested ones and properties
included. Not counted are lambdas, comprehensions and dunder methods (`__init__`, `__enter__`, ...),
and what a dataclass generates. Each is run several times on objects of its own, first once without
counting, so that imports and filled caches do not count; the median is printed. Threads that the
call starts count. Threads that stood before it (the workers of a warm engine) are printed apart,
since timing decides what they get to do. The inner model does not count: neither LangChain's fake
one nor the emulated engine of this package, which stands for a server; what is entered with it is
printed apart, too.

    plan       `ReusePlanner.plan` of a context of four blocks, one of them new, in another order
               than before, with an index of four contexts.
    langchain  From documents to answers: `format_context` of six contexts, a `ReuseChatModel`
               around a fake model, `batch` of the six prompts.
    batch      Of that, only `batch`; it has no aim of its own.
    workflow   `WorkflowEngine.run` of `one_shot` in a conversation, with a planner, a
               `VectorRetriever` and an `EmulatedLLM`, on an engine that has answered a question.
    agents     `ChainOfAgents.ainvoke`, the second question of a conversation about six documents,
               two workers, over an `EnginePool` of two `EmulatedEngine`s.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import sys
import threading
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple, TypeAlias

ROOT = Path(__file__).resolve().parent.parent
IMPORT_ROOTS = (".", "integrations", "agents")
"""The folders of the repository that imports begin at."""
PRODUCT = ("ctxreuse", "integrations", "agents")

MOST_ENTRIES = 16
MOST_FILES_IN_A_FOLDER = 12
MOST_LAYERS = 13
MOST_SHARED_NAMES = 5
MOST_LINES = 36_500
UNCOMPARED = {"__init__", "__main__", "errors"}
"""Module names that may stand in every package."""

INNER_MODEL = (
    "ctxreuse/serving/emulation/",
    "ctxreuse/cache/simulator.py",
    "ctxreuse/workflow/models/emulated_llm.py",
)
"""Where the code of the emulated engine begins with."""

_TIMES = 21  # a workflow differs by ten functions from run to run

Kind: TypeAlias = Literal["module", "TYPE_CHECKING", "function", "name"]
"""Where an import stands."""

Graph: TypeAlias = Mapping[str, Collection[str]]
"""From each module to those that it imports."""


class Import(NamedTuple):
    """One module imports another."""

    importer: str
    imported: str
    kind: Kind


class Size(NamedTuple):
    """How much of the product code a journey goes through."""

    functions: int
    files: int

    def __str__(self) -> str:
        return f"{self.functions} functions in {self.files} files"


@dataclass(frozen=True, slots=True)
class Tree:
    """The modules of some folders, by their dotted names.

    Attributes:
        paths: Their files.
        parsed: Their syntax.
    """

    paths: Mapping[str, Path]
    parsed: Mapping[str, ast.Module] = field(repr=False)

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

    def is_empty_package(self, module: str) -> bool:
        """Return whether a module is an `__init__` that holds at most a docstring."""
        body = self.parsed[module].body
        return self.is_package(module) and all(isinstance(one, ast.Expr) for one in body)

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


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest way down through the imports; a cycle is one step, joined by " + "."""
    step = {module: " + ".join(cycle) for cycle in cycles(graph) for module in cycle}
    below: dict[str, set[str]] = defaultdict(set)
    for module, imported in graph.items():
        top = step.get(module, module)
        below[top] |= {step.get(other, other) for other in imported} - {top}

    @cache
    def chain(top: str) -> tuple[str, ...]:
        return (top, *max(map(chain, sorted(below.get(top, ()))), key=len, default=()))

    return list(max(map(chain, sorted(below)), key=len, default=()))


def with_one_importer_at_most(tree: Tree, imports: Iterable[Import]) -> tuple[list[str], list[str]]:
    """Return the modules that no other file, or only one, imports; the empty `__init__` apart."""
    importers: dict[str, set[str]] = defaultdict(set)
    for one in imports:
        importers[one.imported].add(one.importer)
    lonely = [module for module in tree.paths if len(importers[module]) <= 1]
    empty = [module for module in lonely if tree.is_empty_package(module)]
    return [module for module in lonely if module not in empty], empty


def shared_class_names(tree: Tree) -> dict[str, list[str]]:
    """Return the class names that stand more than once, with the modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, parsed in tree.parsed.items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def shared_module_names(tree: Tree) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the file names that stand more than once, and those that are a folder's, too."""
    files: dict[str, list[str]] = defaultdict(list)
    folders: dict[str, list[str]] = defaultdict(list)
    for module, path in tree.paths.items():
        name = module.rpartition(".")[2]
        if path.stem not in UNCOMPARED:
            files[name].append(module)
        elif path.stem == "__init__":
            folders[name].append(module)
    twice = {name: where for name, where in sorted(files.items()) if len(where) > 1}
    beside = {
        name: [*folders[name], *files[name]]
        for name in sorted(folders)
        if len(folders[name]) + len(files[name]) > 1 and name not in twice
    }
    return twice, beside


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


class Recorder:
    """Notes which functions of product code are entered while it is told to.

    Made before the objects that are measured: a thread is seen only if it began after that.
    """

    def __init__(self, root: Path, folders: Iterable[str]) -> None:
        self._prefix = f"{root}/"
        self._folders = tuple(f"{root / folder}/" for folder in folders)
        self._standing: set[int | None] = set()
        self._entered: dict[CodeType, bool] | None = None
        self._recorded: dict[CodeType, bool] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread, and those that begin from now on."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is entered in here."""
        here = threading.get_ident()
        self._standing = {one.ident for one in threading.enumerate()} - {here}
        self._entered = {}
        try:
            yield
        finally:
            self._recorded, self._entered = self._entered, None

    def trip(self) -> Trip:
        """Return what was noted last."""
        stops: dict[Stop, bool] = {}
        for code, is_standing in self._recorded.items():
            stop = Stop(code.co_filename.removeprefix(self._prefix), code.co_qualname)
            stops[stop] = stops.get(stop, True) and is_standing
        return Trip(stops)

    def _hook(self, frame: FrameType, event: str, argument: object) -> None:
        entered, code = self._entered, frame.f_code
        if event != "call" or entered is None or not code.co_filename.startswith(self._folders):
            return
        name = code.co_name
        if not (name.startswith("<") or (name.startswith("__") and name.endswith("__"))):
            is_standing = threading.get_ident() in self._standing
            entered[code] = entered.get(code, True) and is_standing


class Stop(NamedTuple):
    """A function that a journey enters."""

    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


@dataclass(frozen=True, slots=True)
class Trip:
    """One run of a journey.

    Attributes:
        stops: What was entered, in order of first entry; and whether only by threads that stood
            before the call.
    """

    stops: Mapping[Stop, bool]

    @property
    def size(self) -> Size:
        """Without the inner model, and without the threads that stood before the call."""
        stops = [stop for stop, is_standing in self.stops.items() if not is_standing]
        return _size([stop for stop in stops if not stop.file.startswith(INNER_MODEL)])

    @property
    def whole_size(self) -> Size:
        """With both."""
        return _size(self.stops)


def _size(stops: Collection[Stop]) -> Size:
    return Size(len(stops), len({stop.file for stop in stops}))


def plan_journey(recorder: Recorder) -> None:
    """Plan one context that arrives."""
    from ctxreuse import ContextBlock, ContextRequest, ReusePlanner

    def request(letters: str) -> ContextRequest:
        blocks = [ContextBlock(id=letter, text=_passage(letter)) for letter in letters]
        return ContextRequest(blocks, "Which?")

    planner = ReusePlanner()
    for letters in ("abc", "bcd", "xyz", "abx"):
        planner.plan(request(letters))
    arriving = request("cabq")
    with recorder.recording():
        planner.plan(arriving)


def langchain_journey(recorder: Recorder) -> None:
    """Format documents, wrap a model, and send a batch."""
    with recorder.recording():
        prompts = _langchain_prompts()
        _langchain_model().batch(prompts)


def batch_journey(recorder: Recorder) -> None:
    """Send a batch."""
    model, prompts = _langchain_model(), _langchain_prompts()
    with recorder.recording():
        model.batch(prompts)


def _langchain_model() -> Any:
    from langchain_core.language_models import FakeListChatModel

    from langchain_ctxreuse import ReuseChatModel

    return ReuseChatModel(inner=FakeListChatModel(responses=["In France."]))


def _langchain_prompts() -> list[Any]:
    from langchain_core.documents import Document

    from langchain_ctxreuse import format_context

    contexts = ("abc", "xyz", "bca", "zyx", "mno", "cab")
    return [
        f"{format_context([Document(_passage(letter)) for letter in letters])}\n\nWhich?"
        for letters in contexts
    ]


async def workflow_journey(recorder: Recorder) -> None:
    """Answer a question from what a search finds."""
    import faiss

    from ctxreuse import ReusePlanner, request_context
    from ctxreuse.workflow import (
        EmulatedLLM,
        TfidfEmbedder,
        VectorRetriever,
        WorkflowEngine,
        one_shot,
    )

    texts = [
        "Paris is the capital of France.",
        "The Seine flows through Paris into the English Channel.",
        "Rome is the capital of Italy.",
        "The Tiber flows through Rome.",
        "Lisbon is the capital of Portugal.",
        "The Tagus flows through Lisbon into the Atlantic.",
    ]
    embedder = TfidfEmbedder.fit(texts, dimensions=5)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(embedder.dimension), embedder.dimension, 2)
    index.cp.min_points_per_centroid = 1  # there are few texts
    vectors = embedder.embed(texts)
    index.train(vectors)
    index.add(vectors)
    llm = EmulatedLLM(lambda messages: "The Seine flows through Paris.", speed=100)
    retriever = VectorRetriever(index, texts, embedder, nprobe=2)
    graph = one_shot(k=2)
    async with WorkflowEngine(llm, retriever, ReusePlanner()) as engine:
        await engine.run(graph, "Which river flows through Rome?")
        with recorder.recording(), request_context(conversation_id="c", tenant="t"):
            await engine.run(graph, "Which river flows through Paris?")


async def agents_journey(recorder: Recorder) -> None:
    """Answer the second question of a conversation about documents."""
    import httpx

    from chain_of_agents import ChainOfAgents
    from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool

    def connector(engine: EmulatedEngine) -> Callable[[], EngineClient]:
        transport = engine.transport()
        return lambda: EngineClient(
            "http://engine", http_client=httpx.AsyncClient(transport=transport)
        )

    engines = {name: connector(EmulatedEngine(answer="A note.")) for name in ("a", "b")}
    conversation = {"documents": list(map(_passage, "abcdef")), "conversation_id": "c"}
    async with ChainOfAgents(llm=EnginePool(engines), workers=2) as chain:
        await chain.ainvoke({"question": "Who?", **conversation})
        with recorder.recording():
            await chain.ainvoke({"question": "Which?", **conversation})


def _passage(letter: str) -> str:
    return f"{letter} says: " + letter * 400  # long enough that moving it pays


Journey: TypeAlias = Callable[[Recorder], Coroutine[Any, Any, None] | None]

JOURNEYS: dict[str, tuple[Journey, Size | None]] = {
    "plan": (plan_journey, Size(25, 8)),
    "langchain": (langchain_journey, Size(80, 18)),
    "batch": (batch_journey, None),
    "workflow": (workflow_journey, Size(110, 25)),
    "agents": (agents_journey, Size(120, 25)),
}
"""What each does, and its aim."""


def median_trip(journey: Journey, root: Path = ROOT, times: int = _TIMES) -> Trip:
    """Return the trip of median size out of several, after one that is not counted."""
    recorder = Recorder(root, PRODUCT)
    trips = []
    with recorder.installed():
        for _ in range(times + 1):
            if (running := journey(recorder)) is not None:
                asyncio.run(running)
            trips.append(recorder.trip())
    return sorted(trips[1:], key=lambda trip: trip.size)[times // 2]


@dataclass(frozen=True, slots=True)
class Aim:
    """One measured aim.

    Attributes:
        what: What is measured.
        measured: How it is.
        details: What to look at.
        aim: How it shall be; None is no aim.
        is_reached: Whether it is so.
    """

    what: str
    measured: Any
    details: Any = ()
    aim: str | None = None
    is_reached: bool | None = None


def at_most(what: str, measured: int, most: int, details: Any = ()) -> Aim:
    """Return an aim that a number does not pass another."""
    aim = f"at most {most:,}" if most else "0"
    return Aim(what, measured, details, aim, measured <= most)


def layout(imports: set[Import], root: Path = ROOT) -> list[Aim]:
    """Measure the first aim: folders, layers and cycles."""
    shown = entries(root / "ctxreuse")
    folders = files_by_folder(root, PRODUCT)
    full = {name: files for name, files in folders.items() if files > MOST_FILES_IN_A_FOLDER}
    of_folders = {name: str(files) + " !" * (name in full) for name, files in folders.items()}
    chain = longest_chain(graph_of(imports, "module"))
    tight = cycles(graph_of(imports, "module"))
    every = cycles(graph_of(imports, "module", "TYPE_CHECKING", "function"))
    loose = [cycle for cycle in every if cycle not in tight]
    mend = [
        f"{one.importer} imports {one.imported} ({one.kind})"
        for one in sorted(imports)
        for cycle in loose
        if one.importer in cycle and one.imported in cycle and one.kind != "module"
    ]
    return [
        at_most("entries of ctxreuse", len(shown), MOST_ENTRIES, shown),
        at_most(f"folders with over {MOST_FILES_IN_A_FOLDER} files", len(full), 0, of_folders),
        at_most("layers of the contract", contract_layers(root), MOST_LAYERS),
        Aim("longest chain of imports", len(chain), chain),
        at_most("cycles of module-level imports", len(tight), 0, list(map(list, tight))),
        at_most("cycles by other imports", len(loose), 0, mend),
    ]


def names(tree: Tree) -> list[Aim]:
    """Measure the second aim: what a name means."""
    classes = shared_class_names(tree)
    modules, beside = shared_module_names(tree)
    return [
        at_most("class names more than once", len(classes), MOST_SHARED_NAMES, classes),
        at_most("module names more than once", len(modules), MOST_SHARED_NAMES, modules),
        Aim("folder names that a module has, too", len(beside), beside),
    ]


def sizes(tree: Tree, imports: set[Import]) -> list[Aim]:
    """Measure the third aim: files and lines."""
    lonely, empty = with_one_importer_at_most(tree, imports)
    lines = sum(len(path.read_bytes().splitlines()) for path in tree.paths.values())
    aim, is_reached = f"under a third of {len(tree.paths)}", len(lonely) < len(tree.paths) / 3
    return [
        Aim("files with at most one importer", len(lonely), lonely, aim, is_reached),
        Aim("such __init__ with a docstring only", len(empty), empty),
        Aim("files", len(tree.paths)),
        at_most("lines", lines, MOST_LINES),
    ]


def journeys(root: Path) -> list[Aim]:
    """Measure the fourth aim: what a call goes through."""
    measured = []
    for name, (journey, aim) in JOURNEYS.items():
        trip = median_trip(journey, root)
        size, whole = trip.size, trip.whole_size
        is_reached = aim and size.functions <= aim.functions and size.files <= aim.files
        more = f"{whole} with the inner model and threads that stood before"
        details = [] if whole == size else [more]
        measured.append(Aim(name, size, details, aim and str(aim), is_reached))
    return measured


def measure(root: Path) -> dict[str, list[Aim]]:
    """Measure all that can be counted of a checkout."""
    tree = Tree.of(root, PRODUCT, IMPORT_ROOTS)
    imports = tree.imports()
    return {
        "1. layout": layout(imports, root),
        "2. names": names(tree),
        "3. size": sizes(tree, imports),
        "4. journeys": journeys(root),
    }


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--list", choices=JOURNEYS, metavar="NAME", help="list a journey's functions"
    )
    parser.add_argument("--brief", action="store_true", help="print the numbers only")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout to measure")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    for folder in reversed(IMPORT_ROOTS):
        sys.path.insert(0, str(root / folder))
    warnings.simplefilter("ignore")  # the frameworks' own
    if arguments.list:
        print_trip(median_trip(JOURNEYS[arguments.list][0], root))
    elif arguments.json:
        measured = measure(root)
        print(json.dumps({title: list(map(as_json, aims)) for title, aims in measured.items()}))
    else:
        print_aims(measure(root), brief=arguments.brief)


def print_trip(trip: Trip) -> None:
    """Print a journey's functions in order; those of standing threads with a star."""
    number = count(1)
    for stop, is_standing in trip.stops.items():
        print(f"{'*' if is_standing else next(number):>4}  {stop}")
    whole = f"{trip.whole_size} with the inner model, and with threads that stood before (*)"
    print(f"{trip.size}; {whole}")


def as_json(aim: Aim) -> dict[str, Any]:
    """Return an aim as JSON holds it."""
    measured = aim.measured._asdict() if isinstance(aim.measured, Size) else aim.measured
    return {**{name: getattr(aim, name) for name in Aim.__slots__}, "measured": measured}


def print_aims(measured: Mapping[str, list[Aim]], *, brief: bool) -> None:
    """Print the numbers, each with its aim, and then what to look at."""
    for title, aims in measured.items():
        print(title)
        for one in aims:
            mark = {True: "reached", False: "not yet", None: ""}[one.is_reached]
            aim = one.aim or ""
            print(f"  {one.what:<36} {one.measured!s:<27} {aim:<26} {mark}".rstrip())
    print("5. plans, prompts and hit ratios\n  the tests say whether they are unchanged")
    for one in (one for aims in measured.values() for one in aims if one.details and not brief):
        print(f"\n{one.what}:")
        for line in _lines(one.details):
            print(f"  {line}")


def _lines(details: Mapping[str, Any] | Iterable[Any]) -> Iterator[str]:
    if isinstance(details, Mapping):
        for name, value in details.items():
            yield f"{name}: {value if isinstance(value, str) else ', '.join(value)}"
    else:
        yield from (one if isinstance(one, str) else ", ".join(one) for one in details)


if __name__ == "__main__":
    main()
