"""Planning time of two checkouts, measured in turn: the ratio of each pair, and its median.

    python benchmarks/planning_pairs.py ../before . --repeats 20

Each measurement is a process of its own, which plans a trace of CTXREUSE_DATA online (one request
after the other) and as one batch. The checkouts take turns, so that what slows the machine down
slows both; time is that of the process, without what others do meanwhile. `--nodes 1000000` also
measures inserts into a context index of that many nodes, with the collections of garbage that they
cause, and searches in it.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

TRACES = ("xquad_k15", "mtrag_k10", "locomo_k20")
SEARCHES = 20_000


def main() -> None:
    """Measure pairs, and print a line for each trace and mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--repeats", type=int, default=10, help="number of pairs, from 2")
    parser.add_argument("--traces", nargs="+", default=TRACES, metavar="NAME", help="as xquad_k15")
    parser.add_argument("--nodes", type=int, default=0, help="of a context index; 0: none")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error("--repeats must be at least 2")
    from shared import data_folder  # here: a checkout's process imports its own package alone

    os.environ["CTXREUSE_DATA"] = str(data_folder())
    checkouts = [arguments.old.resolve(), arguments.new.resolve()]
    programs = {
        trace: (f"planning_pairs.plan({{checkout!r}}, {trace!r})", ("online", "batch"))
        for trace in arguments.traces
    }
    if arguments.nodes:
        program = f"planning_pairs.fill({{checkout!r}}, {arguments.nodes})"
        programs[f"{arguments.nodes:,} nodes"] = program, ("insert", "search")
    print(f"{'trace':<16}{'time of':<8}{'old ms':>9}{'new ms':>9}{'new/old':>9}  middle half")
    for title, (program, modes) in programs.items():
        pairs = []
        for number in range(arguments.repeats):
            in_turn = checkouts[:: -1 if number % 2 else 1]
            measured = {checkout: _measured(checkout, program) for checkout in in_turn}
            pairs.append([measured[checkout] for checkout in checkouts])
        for mode in modes:
            old, new = ([one[mode] for one in some] for some in zip(*pairs, strict=True))
            ratios = [after / before for before, after in zip(old, new, strict=True)]
            low, _, high = quantiles(ratios, n=4, method="inclusive")
            print(
                f"{title:<16}{mode:<8}{median(old):>9.1f}{median(new):>9.1f}"
                f"{median(ratios):>9.3f}  {low:.3f} to {high:.3f}",
                flush=True,
            )


def _measured(checkout: Path, program: str) -> dict[str, float]:
    """Return the milliseconds that a new process of a checkout prints, by what they went into."""
    program = f"import planning_pairs; {program.format(checkout=str(checkout))}"
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


def fill(checkout: str, nodes: int) -> None:
    """Insert contexts into an index until it has a number of nodes, search it, and print as JSON.

    Popular blocks recur as in `speed.py`. Former versions take the root where later ones take the
    system text, and search from a node without its tree.
    """
    from ctxreuse.context.blocks import BlockKey
    from ctxreuse.index.path_search import heaviest_path
    from ctxreuse.index.radix_tree import ContextIndex

    _check_package(checkout)
    source, index = random.Random(1), ContextIndex(max_nodes=10 * nodes)

    def drawn() -> dict[BlockKey, int]:
        numbers = sorted({min(int(source.paretovariate(0.5)), 200_000) for _ in range(8)})
        return {BlockKey(f"{one:016}".encode()): 100 + one % 200 for one in numbers}

    takes_root = "root" in inspect.signature(ContextIndex.insert).parameters
    number = inserted = 0
    inserting = 0.0
    gc.collect()
    while inserted < nodes:
        contexts = [([*one], [*one.values()]) for one in (drawn() for _ in range(1_000))]
        started = time.process_time()
        for keys, weights in contexts:
            number += 1
            beginning = index.root(None) if takes_root else None
            index.insert(beginning, keys, weights, f"request-{number}", number)
        inserting += time.process_time() - started
        inserted = index.statistics().nodes
    looked_for, root = [drawn() for _ in range(SEARCHES)], index.root(None)
    before = () if takes_root else (index.tree,)
    started = time.process_time()
    for one in looked_for:
        heaviest_path(*before, root, one)
    searching = time.process_time() - started
    print(json.dumps({"insert": 1e3 * inserting, "search": 1e3 * searching}))


def _check_package(checkout: str) -> None:
    import ctxreuse

    if Path(ctxreuse.__file__).parent != Path(checkout, "ctxreuse"):
        sys.exit(f"there is no package ctxreuse in {checkout}")


if __name__ == "__main__":
    main()
