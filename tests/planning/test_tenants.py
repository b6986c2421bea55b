from helpers import check_index, keys, shape
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.memory.prefix_index import Evicted, IndexStatistics, PartSize
from ctxreuse.memory.tenants import Bounds, Tenants


class Service:
    def __init__(self, capacity_tokens=None, **bounds):
        self.tenants = Tenants(capacity_tokens, Bounds(**bounds))
        self.now = 0

    def send(self, tenant, letters, request_id):
        self.now += 1
        weights = [1] * len(letters)
        with self.tenants.holding(tenant) as state:
            state.index.insert(None, keys(letters), weights, request_id, self.now)
            state.recent.add(keys(letters))

    def shapes(self, *names):
        return {name: shape(self.tenants.state(name).index) for name in names}


def test_all_tenants_together_hold_no_more_than_the_capacity():
    service = Service(capacity_tokens=6)
    service.send("one", "abcdefgh", 1)
    assert service.shapes("one") == {"one": {"abcdef": [1]}}
    service.send("two", "ab", 2)
    assert service.shapes("one", "two") == {"one": {"abcd": [1]}, "two": {"ab": [2]}}
    service.send("two", "cd", 3)
    assert service.shapes("one", "two") == {"one": {"abc": [1]}, "two": {"a": [2], "cd": [3]}}
    service.send("three", "x", 4)  # of equals, the one that sent first gives way
    assert service.shapes("one", "two") == {"one": {"ab": [1]}, "two": {"a": [2], "cd": [3]}}
    assert service.tenants.statistics().parts["index_tokens"] == PartSize(6, 6)
    assert service.tenants.evict([1], "one").tokens == 2


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.text("abcdefgh", min_size=1, max_size=6))),
    st.integers(0, 30),
)
def test_who_holds_no_more_than_an_equal_share_of_the_capacity_loses_nothing(sent, capacity):
    service, alone = Service(capacity_tokens=capacity), Service()
    most = dict.fromkeys("xyz", 0)
    for number, (tenant, letters) in enumerate(sent):
        for one in (service, alone):
            one.send(tenant, "".join(dict.fromkeys(letters)), number)
        most[tenant] = max(most[tenant], alone.tenants.state(tenant).index.tokens)
        tokens = [service.tenants.state(name).index.tokens for name in "xyz"]
        assert sum(tokens) == service.tenants.statistics().tokens <= capacity
    small = [name for name in "xyz" if most[name] <= capacity // 3]
    assert service.shapes(*small) == alone.shapes(*small)
    for name in "xyz":
        check_index(service.tenants.state(name).index)


def test_the_least_recently_active_tenant_is_forgotten_first():
    service = Service(tenants=2)
    service.send("one", "a", 1)
    service.send("two", "b", 2)
    service.send("one", "c", 3)
    service.send("three", "d", 4)
    assert service.tenants.statistics().requests == 3
    assert service.tenants.evict([1, 2, 3, 4]) == Evicted(3, 3, (2,))


def test_whoever_has_most_gives_up_its_oldest_when_all_together_hold_too_many_nodes():
    service = Service(index_nodes=3)
    service.send("one", "a", 1)
    service.send("two", "b", 2)
    service.send("one", "c", 3)
    assert service.tenants.statistics() == IndexStatistics(3, 3, 3)
    service.send("three", "d", 4)
    assert service.shapes("one", "two", "three") == {
        "one": {"c": [3]},
        "two": {"b": [2]},
        "three": {"d": [4]},
    }


def test_a_name_of_many_characters_counts_as_several_tenants():
    service = Service(tenants=4)
    for tenant in ("one", "two", "t" * 130):
        service.send(tenant, "a", 1)
    assert service.tenants.statistics().parts["tenants"] == PartSize(4, 4)
    assert service.tenants.known("one") is None


sends = st.tuples(
    st.sampled_from(["one", "two", "three"]),
    st.lists(st.sampled_from("abc"), unique=True).map("".join),
    st.integers(0, 9),
)


@given(st.lists(sends, max_size=20), st.integers(0, 5), st.integers(1, 3), st.integers(0, 8))
def test_all_tenants_together_stay_within_the_bounds(requests, max_nodes, max_tenants, gone):
    service = Service(index_nodes=max_nodes, tenants=max_tenants)
    for tenant, letters, request_id in requests:
        service.send(tenant, letters, request_id)
        assert service.tenants.statistics().nodes <= max_nodes
    before = service.tenants.statistics().tokens
    assert service.tenants.evict_tokens(gone) == Evicted(0, min(gone, before), ())
    assert service.tenants.statistics().tokens == max(0, before - gone)
    for tenant in ("one", "two", "three"):
        check_index(service.tenants.state(tenant).index)


def test_a_tenant_that_a_fork_has_emptied_has_nothing_to_give_up():
    service = Service(sent_messages=2)
    for tenant, messages in (("one", b"ab"), ("two", b"c")):
        with service.tenants.holding(tenant) as state:
            for number in messages:
                state.log.edits.put(bytes([number]), b"")
        if tenant == "one":
            state._forget()  # as in a child, where another thread was changing it
    assert service.tenants.statistics().parts["sent_messages"] == PartSize(1, 2)
