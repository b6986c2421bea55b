"""What stands in flat arrays behaves as what Python has for it."""

import gc
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.flat_arrays import FlatOrderedDict, HashedNumbers, LinkedNumbers
from tests.support.helpers import check_hashed_numbers

keys = st.integers(0, 6)
steps = st.lists(
    st.tuples(st.sampled_from(["set", "move", "pop", "popitem"]), keys, st.booleans()), max_size=40
)


@given(steps)
def test_a_flat_dictionary_is_an_ordered_one(done):
    flat, plain = FlatOrderedDict(), OrderedDict()
    for number, (step, key, last) in enumerate(done):
        if step == "set":
            flat[key] = plain[key] = (number, "value")
        elif step == "move" and key in plain:
            flat.move_to_end(key)
            plain.move_to_end(key)
        elif step == "pop":
            assert flat.pop(key, "none") == plain.pop(key, "none")
        elif step == "popitem" and plain:
            assert flat.popitem(last=last) == plain.popitem(last=last)
        assert list(flat) == list(plain)
        assert list(flat.values()) == list(plain.values())
        assert len(flat) == len(plain)
        assert [flat.get(one) for one in range(7)] == [plain.get(one) for one in range(7)]
        assert [one in flat for one in range(7)] == [one in plain for one in range(7)]


def test_an_empty_one_has_no_item_to_pop():
    with pytest.raises(KeyError, match="it is empty"):
        FlatOrderedDict().popitem()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30))
def test_linked_numbers_are_a_list(done):
    linked, plain = LinkedNumbers(), []
    for number, older in done:
        if number in plain:
            plain.remove(number)
            linked.remove(number)
        elif older == 0 or older in plain:
            plain.insert(plain.index(older) + 1 if older else 0, number)
            if plain[-1] == number:
                linked.append(number)
            else:
                linked.add(number, older)
        assert list(linked) == plain
        assert (linked.oldest, linked.newest) == ((plain[0], plain[-1]) if plain else (0, 0))


@pytest.mark.usefixtures("new_objects_only")
def test_a_collection_of_garbage_looks_at_nothing_that_a_flat_dictionary_holds():
    flat = FlatOrderedDict()
    gc.collect()
    before = len(gc.get_objects())
    for number in range(10_000):
        flat[f"{number}"] = number, (b"bytes", "text")
    for _ in range(3):
        gc.collect()
    assert len(gc.get_objects()) < before + 100
    assert sum(len(gc.get_referents(one)) for one in (flat, flat._keys, flat._values)) < 100


hashes = st.integers(-40, 40) | st.integers(-(2**63), 2**63 - 1)  # many in one chain


@given(st.lists(st.tuples(hashes, st.booleans()), max_size=120))
def test_numbers_are_found_by_their_hashes_and_by_no_others(done):
    numbers, number_of, free = HashedNumbers(), {}, []
    for hashed, is_removed in done:
        if hashed in number_of and is_removed:
            numbers.remove(number_of[hashed])
            free.append(number_of.pop(hashed))
        elif hashed not in number_of:
            number_of[hashed] = free.pop() if free else len(number_of) + 1
            numbers.add(number_of[hashed], hashed)
    check_hashed_numbers(numbers, set(number_of.values()))
    for hashed in {*range(-41, 42), *(one for one, _ in done)}:
        assert numbers.find(hashed) == number_of.get(hashed, 0)


def test_a_number_is_found_while_another_thread_adds_and_removes_others():
    numbers = HashedNumbers()
    for number in range(1, 101):
        numbers.add(number, hash(("kept", number)))

    def change() -> None:
        for number in range(101, 30_101):
            numbers.add(number, hash(("other", number)))
            if number % 3:
                numbers.remove(number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            changed = pool.submit(change)
            while not changed.done():
                assert [numbers.find(hash(("kept", one))) for one in (1, 50, 100)] == [1, 50, 100]
            changed.result()
    finally:
        sys.setswitchinterval(before)


def test_a_change_that_was_interrupted_stops_nobody():
    numbers = HashedNumbers()
    numbers.add(1, 5)
    numbers._changes += 1  # as Ctrl-C may leave it
    assert [numbers.find(5), numbers.find(6)] == [1, 0]
