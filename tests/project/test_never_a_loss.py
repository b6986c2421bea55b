"""A small part of the matrix of programs: none computes more with ctxreuse than without."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from never_a_loss import MOST, Cell, cells

QUESTIONS = 80


def _named(cell: Cell) -> str:
    kind, tokens, k, workers = cell.shape
    return f"{cell.program.framework} {cell.program.name}, {kind}, {tokens} x {k}, {workers}"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("cell", [pytest.param(one, id=_named(one)) for one in cells(1, QUESTIONS)])
def test_no_program_computes_more_than_without(cell: Cell) -> None:
    plain, _, ours, _ = cell.ratio()
    gc.collect()  # LlamaIndex's agents leave open connections to it: here, not in another test
    assert 0 < ours <= MOST * plain
