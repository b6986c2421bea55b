import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.workflow.vector_search.handle import SearchRecord

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
    new, probed, found_in
):
    given_ = np.array(new, dtype=np.int64)
    found = [one for one in new if one in found_in]
    looked = [one for one in new if one in probed and one not in found_in]
    rest = [one for one in new if one not in probed and one not in found_in]
    assert record(probed, found_in).reordered(given_).tolist() == found + looked + rest
    assert given_.tolist() == new
