"""Whether a program ever computes more tokens with ctxreuse than without: a matrix of programs.

Each program of `loss_programs.py` asks the questions of `loss_traffic.py`, without ctxreuse and as
its guide says. Whole prompts go through a tokenizer of OpenAI's and a simulated prefix cache
without bounds; what is not found there is computed. Lengths are in tokens. Run with
`make bench-never-a-loss`; a few minutes. The cells at the end are on public data and are not looked
at when defaults are chosen; they need the folder that CTXREUSE_DATA names.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from loss_programs import CONVERSATIONS, ONE_SHOT, PLACEMENTS, Program, Served
from loss_traffic import Asked, Traffic, traffic
from shared import data_folder, new_parser, new_table, read_named_trace

QUESTIONS = 240
MOST = 1.01
MEAN = 0.85
_LONG = 20


class Shape(NamedTuple):
    """What a program is asked, and by how many workers it is answered."""

    kind: Traffic  # who asks
    tokens: int  # how long documents are
    k: int  # how many are retrieved for a question
    workers: int = 1  # how many processes answer


_SHAPES = (
    Shape("unique", 256, 8),
    Shape("repeated", 128, 10, 4),
    Shape("unique", 64, 20),
    Shape("alone", 64, 5),
    Shape("repeated", 1_024, 3),
    Shape("unique", 512, 5, 4),
    Shape("unique", 32, 50),
    Shape("alone", 32, 10, 4),
    Shape("repeated", 32, 20),
    Shape("unique", 128, 30),
    Shape("alone", 256, 8),
    Shape("repeated", 64, 5),
)
_IN_CONVERSATIONS = (
    Shape("conversations", 256, 5),
    Shape("conversations", 64, 10),
    Shape("conversations", 32, 20, 4),
    Shape("conversations", 512, 3),
    Shape("conversations", 128, 8, 4),
)


class Cell(NamedTuple):
    """A program and what it is asked."""

    program: Program
    shape: Shape
    asked: Callable[[], Sequence[Asked]]  # made when it is wanted
    name: str = ""

    def ratio(self) -> tuple[int, int, int, int]:
        """Return the tokens computed, and those of the longest prompt: plain, plain, ours, ours."""
        figures: list[int] = []
        asked = self.asked()
        for is_ours in (False, True):
            engine = Served()
            self.program.run(asked, is_ours=is_ours, workers=self.shape.workers, engine=engine)
            figures += engine.usage.prefilled_tokens, engine.longest
        return figures[0], figures[1], figures[2], figures[3]


def cells(shapes_each: int, questions: int) -> Iterator[Cell]:
    """Yield the cells: each program with some of the shapes, each shape with some programs."""
    for programs, shapes in ((ONE_SHOT, _SHAPES), (CONVERSATIONS, _IN_CONVERSATIONS)):
        waiting = cycle(shapes)
        for program in programs:
            for shape in islice(waiting, shapes_each):
                kind, tokens, k, _ = shape
                yield Cell(program, shape, partial(traffic, kind, tokens, k, questions))
            next(waiting)  # so that neighbours in the lists do not always meet


def kept_out(questions: int) -> Iterator[Cell]:
    """Yield the cells on public data, if it is there."""
    if not os.environ.get("CTXREUSE_DATA"):
        return
    data = data_folder("xquad", "locomo", "mtrag")
    for name in ("xquad_k5", "xquad_k15", "locomo_k20", "mtrag_k5"):
        trace, _ = read_named_trace(data, name)
        named = {one.conversation_id: f"c{n}" for n, one in enumerate(trace)}
        is_conversation = any(one.turn for one in trace)
        asked = [
            Asked(
                f"{one.query} ({n})",
                tuple(one.blocks),
                named[one.conversation_id] if is_conversation else None,
                one.turn,
            )
            for n, one in enumerate(trace[:questions])
        ]
        k = int(name.rpartition("k")[2])
        for program in CONVERSATIONS if is_conversation else ONE_SHOT:
            kind: Traffic = "conversations" if is_conversation else "unique"
            yield Cell(program, Shape(kind, 0, k), partial(list, asked), name)


def placements() -> Iterator[Cell]:
    """Yield the cells of memories in each place: LoCoMo, question by question and in conversations.

    A user's questions, 20 at a time, are a conversation there.
    """
    if not os.environ.get("CTXREUSE_DATA"):
        return
    trace, _ = read_named_trace(data_folder("locomo"), "locomo_k20")
    trace = sorted(trace, key=lambda one: str(one.conversation_id))
    alone, turns = [], []
    for n, one in enumerate(trace):
        question = f"{one.query} ({n})"
        alone.append(Asked(question, tuple(one.blocks)))
        turns.append(Asked(question, tuple(one.blocks), f"c{n // _LONG}", n % _LONG))
    for program in PLACEMENTS:
        some = partial(list, alone[:QUESTIONS])
        yield Cell(program, Shape("unique", 0, 20), some, "LoCoMo")
        some = partial(list, turns[: 2 * QUESTIONS])
        yield Cell(program, Shape("conversations", 0, 20), some, "LoCoMo, 20 turns")


def measure(console: Console, title: str, wanted: Sequence[Cell]) -> list[float]:
    """Print a table of cells; return for each how much is computed, of what is without ctxreuse."""
    ratios = []
    table = new_table(
        title,
        ["framework", "program", "questions"],
        ["tokens", "k", "workers", "plain", "with ctxreuse", "ratio", "longest prompt"],
    )
    for cell in track(wanted, title, console=console, transient=True):
        plain, plain_longest, ours, longest = cell.ratio()
        ratios.append(ours / plain)
        kind, tokens, k, workers = cell.shape
        table.add_row(
            cell.program.framework,
            cell.program.name,
            cell.name or kind,
            str(tokens or ""),
            str(k),
            str(workers),
            f"{plain:,}",
            f"{ours:,}",
            f"{'[red]' if ratios[-1] > MOST else ''}{ratios[-1]:.3f}",
            f"{longest / plain_longest:.2f}",
        )
    console.print(table)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    losses = sum(ratio > MOST for ratio in ratios)
    console.print(
        f"{len(ratios)} programs: geometric mean {mean:.3f} (wanted: below {MEAN}), "
        f"worst {max(ratios):.3f}; {losses} compute more than {MOST} of plain\n"
    )
    return ratios


def main() -> None:
    """Print the tables."""
    parser = new_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer questions and cells")
    parser.add_argument("--program", default="", help="only programs whose name holds this")
    options = parser.parse_args()
    questions, shapes_each = (120, 1) if options.quick else (QUESTIONS, 4)
    warnings.simplefilter("ignore", DeprecationWarning)
    console = Console(width=140)
    for title, all_cells in (
        ("tokens computed", cells(shapes_each, questions)),
        ("kept out of the tuning: public data", kept_out(questions)),
        ("where memories stand", placements()),
    ):
        wanted = [
            one
            for one in all_cells
            if options.program in f"{one.program.framework} {one.program.name}"
        ]
        if wanted:
            measure(console, title, wanted)


if __name__ == "__main__":
    main()
