"""A small part of the matrix of programs: none computes more with ctxreuse than without."""

import gc
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from loss_programs import CONVERSATIONS
from loss_traffic import traffic
from never_a_loss import MOST, Cell, Shape, cells

QUESTIONS = 80


def _named(cell: Cell) -> str:
    kind, tokens, k, workers = cell.shape
    return f"{cell.program.framework} {cell.program.name}, {kind}, {tokens} x {k}, {workers}"


def _long_memories() -> list[Cell]:
    """Return conversations on few topics with long memories: plain, they share what is popular."""
    memories = [one for one in CONVERSATIONS if "memor" in one.name or one.framework == "Mem0"]
    assert len(memories) == 3
    shapes = [Shape("conversations", 512, 3), Shape("conversations", 256, 5)]
    return [
        Cell(program, shape, partial(traffic, shape.kind, shape.tokens, shape.k, 3 * QUESTIONS))
        for program in memories
        for shape in shapes
    ]


ALL = [*cells(1, QUESTIONS), *_long_memories()]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            one, id=_named(one), marks=pytest.mark.slow if one.shape.kind == "conversations" else ()
        )
        for one in ALL
    ],
)
def test_no_program_computes_more_than_without(cell):
    plain, _, ours, _ = cell.ratio()
    gc.collect()  # LlamaIndex's agents leave open connections to it: here, not in another test
    assert 0 < ours <= MOST * plain
