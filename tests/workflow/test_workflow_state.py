import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import InvalidRequestError
from ctxreuse.workflow.errors import StateKeyError
from ctxreuse.workflow.graph.state import State

keys = st.sampled_from("abc")
writes = st.dictionaries(keys, st.integers(0, 9))
wavefronts = st.lists(st.tuples(writes, st.sets(st.sampled_from("xyz"))), max_size=6)


def test_a_state_is_read_as_a_mapping_and_cannot_be_written():
    state = State({"input": "Why?", "notes": ()})
    assert dict(state) == {"input": "Why?", "notes": ()}
    assert state.get("docs") is None
    assert "docs" not in state
    assert len(state) == 2
    with pytest.raises(TypeError):
        State()["a"] = 1
    with pytest.raises(AttributeError):
        State().a = 1

    given = {"a": 1}
    state = State(given)
    state.commit({"a": 2}, [])
    given["a"] = 3
    assert dict(state) == {"a": 1}
    value = object()
    assert State({"a": value}).commit({"b": value}, [])["a"] is value


def test_a_state_names_its_keys_and_shows_no_values():
    with pytest.raises(StateKeyError) as caught:
        State({"input": "secret"})["docs"]
    assert isinstance(caught.value, KeyError)
    assert str(caught.value) == (
        "the state has no 'docs'; it has 'input'. "
        "Read it with state.get, or give it a value with defaults={...}"
    )
    state = State({"input": "secret"})
    assert repr(state) == "State('input')"
    assert repr(state.overlay({"docs": "secret"})) == "Overlay('input', 'docs')"


@given(writes, wavefronts)
def test_commits_write_and_count_visits_and_leave_earlier_states_alone(first, committed):
    states = [State(first)]
    for written, visited in committed:
        states.append(states[-1].commit(written, visited))
    for number, state in enumerate(states):
        past = committed[:number]
        expected = dict(first)
        for written, _ in past:
            expected |= written
        assert dict(state) == expected
        for node in "xyz":
            assert state.visits(node) == sum(node in visited for _, visited in past)
        assert not state.speculative


@given(writes, writes, writes)
def test_an_overlay_reads_as_the_committed_state_would_but_for_visits(first, second, expected):
    state = State(first).commit(second, ["x"])
    overlay, committed = state.overlay(expected), state.commit(expected, ["x"])
    assert dict(overlay) == dict(committed)
    assert set(overlay) == set(committed)
    assert len(overlay) == len(committed)
    assert overlay.visits("x") == 1
    assert overlay.speculative
    assert dict(state) == first | second


def test_speculation_is_one_stage_deep_and_never_committed_on():
    overlay = State({"a": 1}).overlay({"b": 2})
    with pytest.raises(AssertionError):
        overlay.commit({"c": 3}, [])
    with pytest.raises(AssertionError):
        overlay.overlay({"c": 3})


@pytest.mark.parametrize("wrong", [{"values": 3}, {"visits": "ab"}])
def test_a_state_of_something_else_than_dicts_is_refused(wrong):
    with pytest.raises(InvalidRequestError, match="must be a dict or None"):
        State(**wrong)
