"""The gate that lets the house shrink only: numbers of the code, each with its ceiling and its aim.

    python tools/house.py                   the numbers; ends with 1 where one is above its ceiling
    python tools/house.py --write           write lower numbers down as the new ceilings
    python tools/house.py --list workflow   the functions of a journey, in order

Ceilings and aims stand in `tools/house.json`. A number may be above its ceiling by its `slack` (a
share), where noise or the timing of threads moves it. `--write` never raises a ceiling: who raises
one does so by hand, and gives the reason in its `why`. A ceiling that rose since the version that
was committed before, under the same `why`, counts as a fault.

Product code is the `*.py` of `ctxreuse`, `integrations` and `agents`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from house_measures import structure as layout
from house_measures.growth import PACKAGES, growing_places
from house_measures.journeys import JOURNEYS, lower_trip
from house_measures.overhead import invoke_overhead
from house_measures.recorder import Trip
from house_measures.sizes import code_lines, code_tokens, function_lengths, lines, words

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = Path(__file__).with_name("house.json")
IMPORT_ROOTS = (".", "integrations", "agents")
PRODUCT = ("ctxreuse", "integrations", "agents")
EXAMPLE_POLICY = "examples/policy_by_id.py"
TEST_TIMES = ".cache/test.xml"  # what `make test` writes


@dataclass(frozen=True, slots=True)
class Number:
    """A measured number, and what it counts where that helps."""

    value: float | None  # None where it could not be measured
    details: Any = ()


@dataclass(frozen=True, slots=True)
class Ceiling:
    """How high a number may be."""

    ceiling: float
    aim: float
    slack: float = 0.0  # a share of the ceiling
    why: str = ""  # the reason for which it was raised last

    def holds(self, value: float) -> bool:
        """Return whether a number is low enough."""
        return value <= self.ceiling * (1 + self.slack)

    def is_beaten_by(self, value: float) -> bool:
        """Return whether a number is lower by more than noise."""
        return value < self.ceiling * (1 - self.slack)


def measured() -> dict[str, Number]:
    """Measure everything that has a ceiling, and time what `make test` took last."""
    return {**_sizes(), **_structure(), **_journeys(), **_running()}


def _sizes() -> dict[str, Number]:
    product = _files(*PRODUCT)
    tree = layout.Tree.of(ROOT, PRODUCT, IMPORT_ROOTS)
    lengths = function_lengths(tree.parsed.values())
    return {
        "product lines": Number(lines(product)),
        "product lines of code": Number(sum(map(code_lines, product))),
        "product tokens of code": Number(sum(map(code_tokens, product))),
        "function lines, 95th percentile": Number(lengths[int(0.95 * len(lengths))]),
        "function lines, longest": Number(lengths[-1]),
        "lines of tests": Number(lines(_files("tests"))),
        "lines of benchmarks and tools": Number(lines(_files("benchmarks", "tools"))),
        "words of docs": Number(words(sorted((ROOT / "docs").rglob("*.md")))),
        "lines of README": Number(lines([ROOT / "README.md"])),
    }


def _files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _structure() -> dict[str, Number]:
    tree = layout.Tree.of(ROOT, PRODUCT, IMPORT_ROOTS)
    imports = tree.imports()
    shown = layout.entries(ROOT / "ctxreuse")
    tight = layout.cycles(layout.graph_of(imports, "module"))
    every = layout.cycles(layout.graph_of(imports, "module", "TYPE_CHECKING", "function"))
    folders = layout.files_by_folder(ROOT, PRODUCT)
    classes, modules = layout.shared_class_names(tree), layout.shared_module_names(tree)
    names, naming = layout.exported_names(tree), layout.files_with(tree, "paper")
    policy = layout.product_names(ROOT / EXAMPLE_POLICY, PACKAGES)
    return {
        "entries of ctxreuse": Number(len(shown), shown),
        "layers of the import contract": Number(layout.contract_layers(ROOT)),
        "circles of imports": Number(len(tight), tight),
        "circles by late imports": Number(len(every) - len(tight), every),
        "files in the fullest folder": Number(max(folders.values()), folders),
        "class names that stand twice": Number(len(classes), classes),
        "module names that stand twice": Number(len(modules), modules),
        "exported names": Number(len(names), names),
        "names that a policy imports": Number(len(policy), policy),
        "files that name a policy": Number(len(naming), naming),
    }


def _journeys() -> dict[str, Number]:
    numbers = {}
    for name, journey in JOURNEYS.items():
        size = lower_trip(journey, ROOT, PRODUCT).size
        numbers[f"{name}: functions"] = Number(size.functions)
        numbers[f"{name}: files"] = Number(size.files)
        if name == "invoke":
            numbers[f"{name}: calls"] = Number(size.calls)
    return numbers


def _running() -> dict[str, Number]:
    places = growing_places()
    return {
        "places of the planner that keep": Number(len(places["planner"]), places["planner"]),
        "places of adapters that keep": Number(len(places["adapters"]), places["adapters"]),
        "invoke: processor time, x plain": Number(round(invoke_overhead(), 2)),
        "make test, last run, s": Number(_test_seconds()),
    }


def _test_seconds() -> float | None:
    path = ROOT / TEST_TIMES
    if not path.exists():
        return None
    suite = ET.parse(path).find("testsuite")
    return None if suite is None else round(float(suite.attrib["time"]), 1)


def read(text: str) -> dict[str, Ceiling]:
    """Read ceilings by the names of their numbers."""
    return {name: Ceiling(**one) for name, one in json.loads(text).items()}


def faults(numbers: Mapping[str, Number], ceilings: Mapping[str, Ceiling]) -> Iterator[str]:
    """Yield what is above its ceiling and by how much, and what has none."""
    for name in sorted(numbers.keys() ^ ceilings.keys()):
        missing = f"not in {CEILINGS.name}" if name in numbers else "not measured any more"
        yield f"{name}: {missing}"
    for name in (one for one in numbers if one in ceilings):
        value, limit = numbers[name].value, ceilings[name]
        if value is not None and not limit.holds(value):
            slack = f" and its slack of {limit.slack:.0%}" if limit.slack else ""
            over = value - limit.ceiling
            yield f"{name}: {value:,} is {over:,.10g} above its ceiling of {limit.ceiling:,}{slack}"


def silent_raises(versions: list[Mapping[str, Ceiling]]) -> Iterator[str]:
    """Yield the ceilings that rose from one version to the next without another reason."""
    for before, after in pairwise(versions):
        for name in before.keys() & after.keys():
            old, new = before[name], after[name]
            if new.ceiling > old.ceiling and new.why == old.why:
                rise = f"from {old.ceiling:,} to {new.ceiling:,}"
                yield f"{name}: its ceiling rose {rise} without another why"


def versions() -> list[Mapping[str, Ceiling]]:
    """Return the committed versions of the ceilings, the oldest first, and the file itself."""
    path = CEILINGS.relative_to(ROOT).as_posix()

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    commits = git("log", "--reverse", "--format=%H", "--", path).split()
    texts = [git("show", f"{commit}:{path}") for commit in commits]
    return [read(text) for text in (*filter(None, texts), CEILINGS.read_text())]


def lowered(
    numbers: Mapping[str, Number], ceilings: Mapping[str, Ceiling]
) -> dict[str, dict[str, Any]]:
    """Return the ceilings as JSON holds them, those that were beaten at the lower number."""
    rows = {}
    for name, limit in ceilings.items():
        value = numbers[name].value if name in numbers else None
        is_lower = value is not None and limit.is_beaten_by(value)
        row = {"ceiling": value if is_lower else limit.ceiling, "aim": limit.aim}
        row |= {key: getattr(limit, key) for key in ("slack", "why") if getattr(limit, key)}
        rows[name] = row
    return rows


def main() -> int:
    """Print what was asked for; return 1 where a number is above its ceiling."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write lower numbers down")
    parser.add_argument("--brief", action="store_true", help="print no details")
    parser.add_argument("--list", choices=JOURNEYS, metavar="JOURNEY", help="list its functions")
    arguments = parser.parse_args()
    for folder in reversed(IMPORT_ROOTS):
        sys.path.insert(0, str(ROOT / folder))
    warnings.simplefilter("ignore")  # the frameworks' own
    if arguments.list:
        print_trip(lower_trip(JOURNEYS[arguments.list], ROOT, PRODUCT))
        return 0
    numbers, ceilings = measured(), read(CEILINGS.read_text())
    if not arguments.brief:
        print_details(numbers)
    print_numbers(numbers, ceilings)
    found = [*faults(numbers, ceilings), *silent_raises(versions())]
    if arguments.write:
        CEILINGS.write_text(json.dumps(lowered(numbers, ceilings), indent=2) + "\n")
    elif any(
        ceilings[name].is_beaten_by(one.value)
        for name, one in numbers.items()
        if name in ceilings and one.value is not None
    ):
        print("\nSome are lower than their ceilings: `make house-write` writes that down.")
    for fault in found:
        print(fault, file=sys.stderr)
    return bool(found)


def print_numbers(numbers: Mapping[str, Number], ceilings: Mapping[str, Ceiling]) -> None:
    """Print the numbers, each with its ceiling and its aim."""
    print(f"{'':<36}{'measured':>10}{'ceiling':>10}{'aim':>10}")
    for name, one in numbers.items():
        limit = ceilings.get(name)
        value = "unknown" if one.value is None else f"{one.value:,}"
        rest = f"{limit.ceiling:>10,}{limit.aim:>10,}" if limit else f"{'none':>10}"
        is_reached = limit is not None and one.value is not None and one.value <= limit.aim
        print(f"{name:<36}{value:>10}{rest}{'  reached' if is_reached else ''}")


def print_details(numbers: Mapping[str, Number]) -> None:
    """Print what the numbers count."""
    for name, one in numbers.items():
        if one.details:
            print(f"{name}:")
            for line in _lines(one.details):
                print(f"  {line}")
            print()


def _lines(details: Any) -> Iterator[str]:
    if isinstance(details, Mapping):
        for name, value in details.items():
            yield f"{name}: {', '.join(value) if isinstance(value, list) else value}"
    else:
        yield from (one if isinstance(one, str) else ", ".join(one) for one in details)


def print_trip(trip: Trip) -> None:
    """Print a journey's functions in order; those of standing threads with a star."""
    number = count(1)
    for stop, entries in trip.stops.items():
        print(f"{next(number) if entries.own else '*':>4}  {stop}")
    size, whole = trip.size, trip.whole_size
    print(
        f"{size.functions} functions in {size.files} files, {size.calls} calls; {whole.functions} "
        f"functions with the inner model, and with threads that stood before (*)"
    )


if __name__ == "__main__":
    sys.exit(main())
