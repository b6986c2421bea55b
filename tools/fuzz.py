"""Feeds hostile inputs to parsers and to all that is public; only documented errors may come out.

    python tools/fuzz.py --seed 7                    # every target, a minute in all
    python tools/fuzz.py --seconds 3600              # a new seed; half of it is for properties
    python tools/fuzz.py --target "sent edits" --inputs 40000
    python tools/fuzz.py --target "kv events" --seed 7 --number 1234     # one input again

Each input follows from the seed, the target's name and the input's number alone. A target accepts
it or refuses it with a `CtxreuseError`. Any other exception, a broken invariant, and more than two
seconds of processor time are faults: the input goes into a file in `--failures`, with the command
that repeats it, and the exit status is 1. From ten minutes on, half of the time is for the property
tests: with new examples each round, of the next seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from fuzz_targets.mutation import Target

ROOT = Path(__file__).resolve().parent.parent
AREAS = (
    "public",
    "core",
    "engines",
    "files",
    "sharing",
    "applications",
    "framework_clients",
    "langchain_models",
    "langchain_documents",
    "langchain_agents",
    "llamaindex_models",
    "llamaindex_nodes",
    "memories",
    "commands",
)
_HANGS_AFTER_S = 60
_SHOWN_FAULTS = 5
_PROPERTIES_FROM_S = 600


class TooSlowError(BaseException):
    """An input took too long; no `except Exception` in the code under test catches it."""


@dataclass
class Counts:
    """What became of a target's inputs; faults by kind and place, with the first number of each."""

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)


def main() -> int:
    """Run the command; return the exit status."""
    options = _options()
    for folder in ("tests/support", "benchmarks", "integrations", "agents", ""):
        sys.path.insert(0, str(ROOT / folder))
    os.environ.setdefault("MEM0_TELEMETRY", "False")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    targets = _targets(options.target)
    has_time = not options.target and options.seconds >= _PROPERTIES_FROM_S
    share = options.seconds / (1 + has_time) / sum(target.weight for target in targets.values())
    total = Counts()
    print(f"seed {options.seed}, {len(targets)} targets, {share:.1f} s for most", flush=True)
    print(f"{'target':<24}{'inputs':>10}{'accepted':>10}{'refused':>10}{'faults':>8}  slowest")
    for name, target in targets.items():
        counts = _fuzzed(name, target, share * target.weight, options)
        _say(name, counts)
        total.inputs += counts.inputs
        total.outcomes.update(counts.outcomes)
        total.slowest_s = max(total.slowest_s, counts.slowest_s)
    _say("all", total)
    failed = _failed_rounds(options.seconds / 2, options.seed) if has_time else 0
    return 1 if total.outcomes["fault"] or failed else 0


def _failed_rounds(seconds: float, seed: int) -> int:
    """Run all property tests again and again, for so long; return how many rounds failed."""
    begun, failed = time.monotonic(), 0
    drawn_anew = {name: value for name, value in os.environ.items() if name != "CI"}
    while time.monotonic() - begun < seconds:
        command = ["-m", "pytest", "-q", "-n", "auto", "-m", "hypothesis", "--hypothesis-seed"]
        print("python", *command, seed, flush=True)
        run = subprocess.run([sys.executable, *command, str(seed)], cwd=ROOT, env=drawn_anew)
        failed += run.returncode != 0
        seed += 1
    return failed


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument(
        "--seed", type=int, default=Random().randrange(2**32), help="new if not given"
    )
    parser.add_argument("--target", action="append", help="one of them; may be repeated")
    parser.add_argument("--inputs", type=int, help="so many for each target, instead of seconds")
    parser.add_argument("--number", type=int, help="only the input with this number")
    parser.add_argument("--failures", type=Path, default=ROOT / "fuzz-failures")
    return parser.parse_args()


def _targets(names: list[str] | None) -> dict[str, Target]:
    known: dict[str, Target] = {}
    for area in AREAS:
        known |= import_module(f"fuzz_targets.{area}").TARGETS
    unknown = set(names or ()) - known.keys()
    if unknown:
        sys.exit(f"there is no target {sorted(unknown)}; choose from {', '.join(known)}")
    return {name: target for name, target in known.items() if not names or name in names}


def _fuzzed(name: str, target: Target, seconds: float, options: argparse.Namespace) -> Counts:
    counts = Counts()
    numbers = count() if options.number is None else iter([options.number])
    begun = None  # the first input may import and prepare much
    for number in numbers:
        if options.inputs is None and options.number is None:
            if begun is None:
                begun = time.monotonic() if number else None
            elif time.monotonic() - begun >= seconds:
                break
        elif options.inputs is not None and number >= options.inputs:
            break
        _fed(name, target, number, counts, options)
    return counts


def _fed(
    name: str, target: Target, number: int, counts: Counts, options: argparse.Namespace
) -> None:
    """Feed one input to a target and count what becomes of it."""
    from ctxreuse.errors import CtxreuseError

    given = target.make(Random(f"{options.seed}:{name}:{number}"))
    counts.inputs += 1
    begun = time.process_time()
    try:
        with _bounded(target.most_seconds):
            target.run(given)
        outcome = "accepted"
    except CtxreuseError:
        outcome = "refused"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # every other one is a fault, which the command reports
        outcome = "fault"
        _report(name, number, given, error, counts, options)
    counts.outcomes[outcome] += 1
    counts.slowest_s = max(counts.slowest_s, time.process_time() - begun)


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """End what takes too long; what cannot be interrupted ends the program with its stack."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    faulthandler.dump_traceback_later(_HANGS_AFTER_S, exit=True)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, before)


def _report(
    name: str,
    number: int,
    given: Any,
    error: BaseException,
    counts: Counts,
    options: argparse.Namespace,
) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        one for one in frames if f"{ROOT}{os.sep}" in one.filename and ".venv" not in one.filename
    ]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    kind = f"{type(error).__name__} at {place}"
    if kind in counts.faults or len(counts.faults) >= _SHOWN_FAULTS:
        return
    counts.faults[kind] = number
    options.failures.mkdir(parents=True, exist_ok=True)
    file = options.failures / f"{name.replace(' ', '-')}-{options.seed}-{number}.txt"
    command = ["python", "tools/fuzz.py", "--target", name, "--seed", str(options.seed)]
    repeat = shlex.join([*command, "--number", str(number)])
    trace = "".join(traceback.format_exception(error))
    words = f"{repeat}\n\n{trace}\n{_shown(given)}\n"
    file.write_text(words, encoding="utf-8", errors="backslashreplace")
    print(f"FAULT {name}: {kind}\n  {repeat}\n  {file}", flush=True)


def _shown(given: Any) -> str:
    try:
        return repr(given)
    except (ValueError, RecursionError) as error:  # too many digits, or too deep
        return f"(the input cannot be shown: {error})"


def _say(name: str, counts: Counts) -> None:
    found = [counts.outcomes[kind] for kind in ("accepted", "refused")]
    print(
        f"{name:<24}{counts.inputs:>10,}{found[0]:>10,}{found[1]:>10,}"
        f"{counts.outcomes['fault']:>8,}  {counts.slowest_s * 1000:.0f} ms",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
