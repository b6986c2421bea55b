from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.workflow.vector_search.sessions import SearchRecord, Sessions, reordered

clusters = st.lists(st.integers(0, 20), unique=True, max_size=12)


def record(probed: list[int], found_in: list[int]) -> SearchRecord:
    return SearchRecord(
        np.zeros(2, dtype=np.float32),
        np.array(probed, dtype=np.int64),
        np.arange(len(found_in)),
        np.array(found_in, dtype=np.int64),
    )


@given(clusters, clusters, st.lists(st.integers(0, 20), max_size=20))
def test_where_the_last_search_found_something_comes_first_then_where_it_looked(
    new: list[int], probed: list[int], found_in: list[int]
) -> None:
    given_ = np.array(new, dtype=np.int64)
    found = [one for one in new if one in found_in]
    looked = [one for one in new if one in probed and one not in found_in]
    rest = [one for one in new if one not in probed and one not in found_in]
    assert reordered(given_, record(probed, found_in)).tolist() == found + looked + rest
    assert given_.tolist() == new


def test_without_a_last_search_the_order_stays() -> None:
    given_ = np.array([3, 1, 2], dtype=np.int64)
    assert reordered(given_, None) is given_


def test_the_session_that_was_not_used_for_longest_is_forgotten() -> None:
    sessions = Sessions(most=2)
    records = {name: record([1], [1]) for name in "abc"}
    sessions.put("a", records["a"])
    sessions.put("b", records["b"])
    assert sessions.get("a") is records["a"]
    sessions.put("c", records["c"])
    assert [sessions.get(name) for name in "abc"] == [records["a"], None, records["c"]]
    sessions.put("a", records["b"])
    assert sessions.get("a") is records["b"]
