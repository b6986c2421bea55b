"""Planning time of two checkouts, measured in turn: the ratio of each pair, and its median.

    python benchmarks/planning_pairs.py ../before . --repeats 20

Each measurement is a process of its own, which plans a trace of CTXREUSE_DATA online (one request
after the other) and as one batch. The checkouts take turns, so that what slows the machine down
slows both; time is that of the process, without what others do meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

TRACES = ("xquad_k15", "mtrag_k10", "locomo_k20")


def main() -> None:
    """Measure pairs, and print a line for each trace and mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--repeats", type=int, default=10, help="number of pairs, from 2")
    parser.add_argument("--traces", nargs="+", default=TRACES, metavar="NAME", help="as xquad_k15")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error("--repeats must be at least 2")
    from shared import data_folder  # here: a checkout's process imports its own package alone

    os.environ["CTXREUSE_DATA"] = str(data_folder())
    checkouts = [arguments.old.resolve(), arguments.new.resolve()]
    print(f"{'trace':<16}{'time of':<8}{'old ms':>9}{'new ms':>9}{'new/old':>9}  middle half")
    for trace in arguments.traces:
        pairs = []
        for number in range(arguments.repeats):
            in_turn = checkouts[:: -1 if number % 2 else 1]
            measured = {checkout: _measured(checkout, trace) for checkout in in_turn}
            pairs.append([measured[checkout] for checkout in checkouts])
        for mode in ("online", "batch"):
            old, new = ([one[mode] for one in some] for some in zip(*pairs, strict=True))
            ratios = [after / before for before, after in zip(old, new, strict=True)]
            low, _, high = quantiles(ratios, n=4, method="inclusive")
            print(
                f"{trace:<16}{mode:<8}{median(old):>9.1f}{median(new):>9.1f}"
                f"{median(ratios):>9.3f}  {low:.3f} to {high:.3f}",
                flush=True,
            )


def _measured(checkout: Path, trace: str) -> dict[str, float]:
    """Return the milliseconds that a new process of a checkout prints, by what they went into."""
    program = f"import planning_pairs; planning_pairs.plan({str(checkout)!r}, {trace!r})"
    path = os.pathsep.join([str(checkout), str(Path(__file__).resolve().parent)])
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{checkout} cannot be measured")
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def plan(checkout: str, trace: str) -> None:
    """Plan a trace with the package of a checkout, and print the milliseconds as JSON.

    Nothing is imported but what every version of the package has.
    """
    import ctxreuse

    _check_package(checkout)
    folder, depth = trace.split("_")
    data = Path(os.environ["CTXREUSE_DATA"]) / folder
    blocks = {
        line["id"]: ctxreuse.ContextBlock(
            id=line["id"], text=line.get("text", ""), tokens=line.get("tokens")
        )
        for line in map(json.loads, (data / "corpus.jsonl").open(encoding="utf-8"))
    }
    requests = [
        ctxreuse.ContextRequest([blocks[one] for one in line["blocks"]], line.get("query", ""))
        for line in map(json.loads, (data / f"trace_{depth}.jsonl").open(encoding="utf-8"))
    ]
    ctxreuse.ReusePlanner().plan_batch(requests[:20])  # imports what planning needs
    planner, milliseconds = ctxreuse.ReusePlanner(), {}
    gc.collect()
    gc.freeze()  # what was read is not collected again and again
    started = time.process_time()
    for request in requests:
        planner.plan(request)
    milliseconds["online"] = 1e3 * (time.process_time() - started)
    planner = ctxreuse.ReusePlanner()
    started = time.process_time()
    planner.plan_batch(requests)
    milliseconds["batch"] = 1e3 * (time.process_time() - started)
    print(json.dumps(milliseconds))


def _check_package(checkout: str) -> None:
    import ctxreuse

    if Path(ctxreuse.__file__).parent != Path(checkout, "ctxreuse"):
        sys.exit(f"there is no package ctxreuse in {checkout}")


if __name__ == "__main__":
    main()
