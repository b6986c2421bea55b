"""Shows that plans and prompts have not changed by a byte.

`write` keeps what the cases in `golden_cases` return in `tests/golden`; `check` runs them again and
compares. To be used around changes that are to leave behaviour alone:

    python tools/golden.py check                # everything
    python tools/golden.py check core langchain # some areas
    python tools/golden.py write core           # where a change was meant; read the diff

The area `traces` reads the data in the folder `$CTXREUSE_DATA`; its files hold digests only.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from golden_cases.recording import Case, Cases, as_json

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
AREAS = (
    "core",
    "langchain",
    "llamaindex",
    "mem0",
    "agents",
    "serving",
    "workflow",
    "commands",
    "traces",
)
_SHOWN_LINES = 24
_WIDTH = 150


def main() -> int:
    """Run the command; return the exit status."""
    options = _options()
    for folder in ("tests/support", "benchmarks", "integrations", "agents", ""):
        sys.path.insert(0, str(ROOT / folder))
    begun = time.perf_counter()
    act = _write if options.command == "write" else _check
    differ = [area for area in _areas(options) if not act(area, options)]
    print(f"{time.perf_counter() - begun:.0f} s")
    if differ:
        print("differs: " + ", ".join(differ))
    return 1 if differ else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("command", choices=["write", "check"])
    parser.add_argument("areas", nargs="*", metavar="area", help=", ".join(AREAS))
    parser.add_argument("--quick", action="store_true", help="leave out cases that take long")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="where the files are kept")
    options = parser.parse_intermixed_args()
    for area in options.areas:
        if area not in AREAS:
            parser.error(f"there is no area {area!r}; choose from {', '.join(AREAS)}")
    if options.quick and options.command == "write":
        parser.error("--quick is for check; a file is written whole")
    return options


def _areas(options: argparse.Namespace) -> Iterator[str]:
    for area in options.areas or AREAS:
        if area == "traces" and not os.environ.get("CTXREUSE_DATA"):
            print(f"{area}: skipped; set CTXREUSE_DATA to the folder of the data")
        else:
            yield area


def _cases(area: str) -> Cases:
    cases: Cases = import_module(f"golden_cases.{area}").CASES
    return cases


def _write(area: str, options: argparse.Namespace) -> bool:
    found = {name: case() for name, case in _cases(area).items()}
    options.golden.mkdir(exist_ok=True)
    file: Path = options.golden / f"{area}.json"
    file.write_text(as_json(found) + "\n", encoding="utf-8", newline="\n")
    print(f"{area}: {len(found)} cases, {file.stat().st_size:,} bytes")
    return True


def _check(area: str, options: argparse.Namespace) -> bool:
    """Compare an area; return whether all is equal."""
    kept = json.loads((options.golden / f"{area}.json").read_text(encoding="utf-8"))
    cases = _cases(area)
    equal = True
    for name in {**cases, **kept}:
        if options.quick and name in cases.slow:
            continue
        begun = time.perf_counter()
        before = as_json(kept[name]) if name in kept else ""
        now = _now(cases[name]) if name in cases else ""
        seconds = time.perf_counter() - begun
        verdict = "equal" if before == now else "DIFFERENT"
        print(f"{area}.{name}: {verdict} ({seconds:.1f} s)", flush=True)
        if before != now:
            equal = False
            print("\n".join(_first_differences(before, now)), flush=True)
    return equal


def _now(case: Case) -> str:
    """Return what a case returns now; where it fails, how."""
    try:
        return as_json(case())
    except Exception:
        return traceback.format_exc()


def _first_differences(before: str, now: str) -> Iterator[str]:
    diff = difflib.unified_diff(_folded(before), _folded(now), "kept", "now", n=2, lineterm="")
    for number, line in enumerate(diff):
        if number == _SHOWN_LINES:
            yield "  ..."
            return
        yield f"  {line}"


def _folded(text: str) -> list[str]:
    """Return lines with long ones cut, so that a difference is shown with what is near it."""
    return [
        line[start : start + _WIDTH]
        for line in text.split("\n")
        for start in range(0, max(len(line), 1), _WIDTH)
    ]


if __name__ == "__main__":
    sys.exit(main())
