from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.lru_map import LRUMap, PartSize, TenantLRUMap

operations = st.lists(st.tuples(st.sampled_from("pgxl"), st.integers(0, 5), st.integers(0, 9)))


@given(operations, st.integers(1, 4), st.integers(1, 20))
def test_it_keeps_what_a_plain_ordered_dict_would(steps, most, heaviest):
    recent = LRUMap[int, int](most, max_weight=heaviest, weight_of=lambda value: value)
    plain = OrderedDict[int, int]()
    for kind, key, value in steps:
        if kind == "g":
            assert recent.get(key) == plain.get(key)
            if key in plain:
                plain.move_to_end(key)
        elif kind == "l":
            assert recent.peek(key) == plain.get(key)
        elif kind == "x":
            assert recent.pop(key) == plain.pop(key, None)
        else:
            gone = [(key, plain.pop(key))] if key in plain else []
            plain[key] = value
            while len(plain) > 1 and (len(plain) > most or sum(plain.values()) > heaviest):
                gone.append(plain.popitem(last=False))
            assert recent.put(key, value) == gone
        assert list(zip(recent, recent.values(), strict=True)) == list(plain.items())
        assert recent.weight == sum(plain.values())


def test_the_tenant_that_holds_most_forgets_first():
    shared = TenantLRUMap[str, int](4)
    for key in "abc":
        assert shared.put("much", key, 1) == []
    assert shared.put("little", "x", 1) == []
    assert shared.get("much", "a") == 1
    assert shared.put("little", "y", 1) == [("much", "b", 1)]
    assert shared.put("much", "d", 1) == [("much", "c", 1)]
    assert len(shared) == 4
    assert shared.size == PartSize(4, 4)
    assert list(shared.of("much")) == ["a", "d"]
    assert list(shared.of("nobody")) == []


def test_what_is_taken_out_or_weighs_more_than_all_takes_nothing_from_others():
    shared = TenantLRUMap[str, str](max_weight=10, weight_of=len)
    shared.put("small", "a", "123")
    assert shared.put("large", "b", "1" * 11) == [("large", "b", "1" * 11)]
    assert (len(shared), shared.weight_size) == (1, PartSize(3, 10))
    assert shared.put("small", "c", "1" * 11) == [("small", "a", "123")]
    assert shared.weight_size.entries == 11, "the newest stays where there is nobody else"

    shared = TenantLRUMap[str, str](max_weight=5, weight_of=len)
    shared.put("a", "x", "12")
    shared.put("b", "y", "123")
    assert shared.pop("a", "x") == "12"
    assert (shared.pop("a", "x"), shared.pop("nobody", "x")) == (None, None)
    assert (len(shared), shared.weight_size.entries) == (1, 3)
    assert shared.put("a", "z", "12") == []


@given(
    st.lists(st.tuples(st.sampled_from("AB"), st.integers(0, 8), st.integers(0, 6)), max_size=60)
)
def test_a_tenant_within_its_share_loses_nothing(steps):
    shared = TenantLRUMap[int, int](10, max_weight=20, weight_of=lambda weight: weight)
    own: dict[int, int] = {}
    for tenant, key, weight in steps:
        if tenant == "A" and (len({*own, key}) > 5 or sum({**own, key: weight}.values()) > 10):
            continue  # more than an equal share
        shared.put(tenant, key, weight)
        if tenant == "A":
            own[key] = weight
        entries = {key: shared.of("A").peek(key) for key in shared.of("A")}
        assert entries == own
        others = list(shared.of("B").values())
        assert len(shared) == len(own) + len(others) <= 10
        assert shared.weight_size.entries == sum(own.values()) + sum(others)
        assert shared.weight_size.entries <= 20 or len(shared) == 1


def test_long_names_of_tenants_count_as_entries():
    entries: TenantLRUMap[int, str] = TenantLRUMap(10)
    entries.put("short", 1, "kept")
    for number in range(5):
        entries.put(f"{number}" * 200, 1, "text")  # as three entries more
    assert len(entries) == 3
    assert entries.get("short", 1) == "kept"
    assert entries.size == (9, 10)
