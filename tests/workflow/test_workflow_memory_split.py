import numpy as np
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import InvalidRequestError
from ctxreuse.workflow.memory_split import MemorySplit, ThroughputTable, split_memory


def over_memory(sizes: list[float], completed: list[float]) -> ThroughputTable:
    return ThroughputTable(sizes, [1.0], [[number] for number in completed])


def test_memory_is_split_where_both_throughputs_are_equal():
    generation, retrieval = over_memory([0, 100], [0, 10]), over_memory([0, 100], [0, 30])
    split = split_memory(100, generation, retrieval, arriving_runs=1)
    assert split == MemorySplit(75, 25, 7.5, 7.5, 7.5)
    # stages are counted in runs
    split = split_memory(100, generation, retrieval, arriving_runs=1, retrievals_per_run=3)
    assert split == MemorySplit(50, 50, 5, 5, 5)


def test_the_kv_cache_gets_what_the_engine_needs_and_more_where_splits_are_equally_good():
    generation = over_memory([0, 100], [10, 10])
    retrieval = over_memory([0, 100], [0, 5])
    assert split_memory(100, generation, retrieval, arriving_runs=1).kv_bytes == 0
    split = split_memory(100, generation, retrieval, arriving_runs=1, least_kv_bytes=60)
    assert split == MemorySplit(60, 40, 10, 2, 2)

    generation = over_memory([0, 50, 100], [0, 5, 5])
    retrieval = over_memory([0, 20, 100], [2, 9, 9])
    split = split_memory(100, generation, retrieval, arriving_runs=1)
    assert split.throughput == 5
    assert split.kv_bytes == 91  # 9 bytes are the fewest with which retrieval keeps up
    assert split.retrieval >= 5


def at(table, memory_bytes, arriving):
    """Return the throughput for one memory size and load, in stages a second."""
    return float(np.interp(memory_bytes, table.memory_bytes, table.over_memory(arriving)))


def test_tables_are_interpolated_and_the_load_chooses_their_column():
    table = ThroughputTable([10, 20], [1, 3], [[1, 2], [1, 6]])
    assert at(table, 10, 2) == 1.5
    assert at(table, 15, 3) == 4
    assert at(table, 15, 2) == 2.5
    assert at(table, 0, 0) == 1
    assert at(table, 99, 99) == 6

    generation = ThroughputTable([0, 100], [1, 2], [[1, 0], [1, 2]])
    retrieval = ThroughputTable([0], [1, 2], [[5, 5]])
    calm = split_memory(100, generation, retrieval, arriving_runs=1)
    busy = split_memory(100, generation, retrieval, arriving_runs=1, generations_per_run=2)
    assert (calm.generation, busy.generation) == (1, 1)
    assert split_memory(100, generation, retrieval, arriving_runs=1.5).generation == 1.5


sizes = st.lists(st.integers(0, 220), min_size=1, max_size=5, unique=True).map(sorted)
rates = st.integers(0, 50)


@examples(100)
@given(data=st.data(), total=st.integers(0, 200), least=st.integers(0, 200))
def test_no_other_split_has_a_larger_throughput(data, total, least):
    least = min(least, total)
    tables = []
    for _ in range(2):
        knots = data.draw(sizes)
        tables.append(over_memory(knots, [data.draw(rates) for _ in knots]))
    split = split_memory(total, *tables, arriving_runs=1, least_kv_bytes=least)
    assert split.kv_bytes + split.hot_bytes == total
    assert least <= split.kv_bytes
    throughputs = [
        min(at(tables[0], kv_bytes, 1), at(tables[1], total - kv_bytes, 1))
        for kv_bytes in range(least, total + 1)
    ]
    assert split.throughput == pytest.approx(max(throughputs))
    assert split.throughput == min(split.generation, split.retrieval)
    assert split.generation == at(tables[0], split.kv_bytes, 1)
    assert split.retrieval == at(tables[1], split.hot_bytes, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [1], []), "memory_bytes must hold finite numbers from 0, at least one"),
        (([1, 1], [1], [[1], [1]]), "memory_bytes must be in ascending order"),
        (([-1], [1], [[1]]), "memory_bytes must hold finite numbers from 0"),
        (([1], [2, 1], [[1, 1]]), "arriving must be in ascending order"),
        (([1], [np.nan], [[1]]), "arriving must hold finite numbers"),
        (([1], [1], [[1, 2]]), "completed must hold 1 rows"),
        (([1], [1], []), "completed must hold 1 rows"),
        (([1], [1], [[-1]]), "completed must hold finite numbers from 0"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        ThroughputTable(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_bytes": -1}, "total_bytes must be an integer from 0, not -1"),
        ({"total_bytes": 1.5}, "total_bytes must be an integer from 0"),
        ({"least_kv_bytes": 101}, "least_kv_bytes must be an integer from 0 to 100"),
        ({"arriving_runs": 0}, "arriving_runs must be more than 0, not 0"),
        ({"generations_per_run": float("nan")}, "generations_per_run must be a number from 0"),
        ({"retrievals_per_run": "2"}, "retrievals_per_run must be a number from 0"),
    ],
)
def test_wrong_numbers_are_named(arguments, message):
    table = over_memory([0], [1])
    given_arguments = {"total_bytes": 100, "arriving_runs": 1} | arguments
    with pytest.raises(InvalidRequestError, match=message):
        split_memory(generation=table, retrieval=table, **given_arguments)


@pytest.mark.parametrize("sizes", ["", [None], [10**400], 5, [[1], [2]]])
def test_what_are_no_numbers_are_refused(sizes):
    with pytest.raises(InvalidRequestError, match="memory_bytes must hold finite numbers"):
        ThroughputTable(sizes, [1.0], [[1.0]])
    with pytest.raises(InvalidRequestError, match="completed must hold 1 rows"):
        ThroughputTable([1.0], [1.0], sizes)
    with pytest.raises(InvalidRequestError, match="generation must be a ThroughputTable"):
        split_memory(10, sizes, sizes, arriving_runs=1.0)
