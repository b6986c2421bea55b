import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock
from ctxreuse.errors import InvalidRequestError
from ctxreuse.workflow.errors import GraphError, StateKeyError
from ctxreuse.workflow.graph.state import Documents, State, Template

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
    with pytest.raises(StateKeyError, match=r"no 'docs'; it has 'input'\. Read it with state\.get"):
        State({"input": "secret"})["docs"]
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


A, B, C = (ContextBlock(id=name, text=f"text of {name}") for name in "abc")

values = st.text() | st.integers() | st.lists(st.text()) | st.just("{a} {{b}} {a.__class__}")


def text_of(template, **state):
    return Template.parse(template).render_text(state)


def prompt_of(template, **state):
    return Template.parse(template).render_prompt(state)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("", ""),
        ("plain %s $a <b>", "plain %s $a <b>"),
        ("{a}", "1"),
        ("{a}{a} {b}", "11 two"),
        ("{{a}}", "{a}"),
        ("{{{a}}}", "{1}"),
        ("{{{{{a}}}}}", "{{1}}"),
        ('{{"k": "{b}"}}', '{"k": "two"}'),
        ("{ä_1}", "ü"),
    ],
)
def test_variables_are_replaced_and_doubled_braces_are_braces(template, text):
    assert text_of(template, a=1, b="two", ä_1="ü") == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{a.__class__}", "has the variable 'a.__class__'; a variable is the bare name of a key"),
        ("{a[0]}", "has the variable 'a[0]'"),
        ("{a!r}", "has the variable 'a!r'"),
        ("{a:>9}", "has the variable 'a:>9'"),
        ("{a:}", "has the variable 'a:'"),
        ("{}", "has the variable ''"),
        ("{0}", "has the variable '0'"),
        ("{ a}", "has the variable ' a'"),
        ("ab}", "has a lone '}' at character 2; write '}}' for a brace, {name} for a variable"),
        ("{a", "has a lone '{' at character 0"),
        ("{a{b}}", "has a lone '{' at character 0"),
        ("{{a}", "has a lone '}' at character 3"),
        (None, "must be a string, not None (NoneType)"),
        (b"{a}", "must be a string, not b'{a}' (bytes)"),
    ],
)
def test_a_template_that_is_more_than_names_is_refused_with_its_place(template, message):
    with pytest.raises(GraphError) as caught:
        Template.parse(template, "the prompt of node 'x'")
    assert str(caught.value).startswith(f"the prompt of node 'x' {message}")


@given(st.text("{}ab.[0]!: \n", max_size=12))
def test_what_parses_is_what_the_standard_library_reads_without_attributes(text):
    try:
        template = Template.parse(text)
    except GraphError:
        return
    state = {name: f"<{name}>" for name in template.variables}
    assert template.render_text(state) == text.format(**state)
    assert template.render_prompt(state) == (text.format(**state), ())


@given(st.lists(values, min_size=2, max_size=2))
def test_values_are_never_read_as_templates(pair):
    one, other = pair
    shown = ["\n".join(value) if isinstance(value, list) else str(value) for value in pair]
    assert text_of("{a}|{b}|{a}", a=one, b=other) == f"{shown[0]}|{shown[1]}|{shown[0]}"


def test_variables_are_listed_once_and_templates_equal_wherever_they_stand():
    assert Template.parse("{b} {a} {b} {{c}}").variables == ("b", "a")
    assert Template.parse("{a}", "here") == Template.parse("{a}", "there")
    assert Template.parse("{a}") != Template.parse("{{a}}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (1.5, "1.5"),
        (None, "None"),
        (["one", 2], "one\n2"),
        ((), ""),
        (("one", B), "one\ntext of b"),
        (Documents([A, B]), "text of a\n\ntext of b"),
        (Documents(), ""),
        ([A, B], "text of a\n\ntext of b"),
        (A, "text of a"),
    ],
)
def test_a_query_shows_values_as_text(value, text):
    assert text_of("<{key}>", key=value) == f"<{text}>"


@pytest.mark.parametrize("documents", [Documents([A, B]), [A, B], (A, B), Documents([A, B, A])])
def test_a_prompt_refers_to_its_documents_which_stand_before_it(documents):
    assert prompt_of("Answer {input} using {docs}.", input="Why?", docs=documents) == (
        ("Answer Why? using the documents above.", (A, B))
    )


def test_a_prompt_says_where_there_are_no_documents_and_sends_each_once():
    assert prompt_of("You are given {docs}.", docs=Documents()) == (
        ("You are given no documents.", ())
    )
    changed = ContextBlock(id="a", text="another text of a")
    query, blocks = prompt_of(
        "{new} {old} {new}", old=Documents([A, B]), new=Documents([C, B, changed])
    )
    assert query == "the documents above the documents above the documents above"
    assert blocks == (C, B, changed, A)


@pytest.mark.parametrize("render", ["render_text", "render_prompt"])
def test_a_missing_variable_names_place_key_and_remedy(render):
    template = Template.parse("{input} {notes}", "the prompt of node 'plan'")
    with pytest.raises(StateKeyError) as caught:
        getattr(template, render)({"input": ""})
    assert caught.value.key == "notes"
    assert str(caught.value).startswith("the prompt of node 'plan' reads {notes}, which nothing")


def test_documents_stay_documents_when_they_are_sliced_and_show_no_texts():
    documents = Documents([A, B, C])
    assert documents[0] is A
    assert documents[1:] == (B, C)
    assert documents[::-1] + documents[:1] == (C, B, A, A)
    kinds = {type(one) for one in (documents[1:], documents[::-1], documents + documents)}
    assert kinds == {Documents}
    assert repr(Documents([A, B])) == "Documents(2)"
    assert Documents(["x"]) == (ContextBlock(text="x"),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("secret", "documents must be a list of ContextBlock or str, not a value of type str"),
        (A, "documents must be a list of ContextBlock or str, not a value of type ContextBlock"),
        (3, "documents must be a list of ContextBlock or str, not a value of type int"),
        ([3], "a document must be a ContextBlock or str, not 3 (int)"),
    ],
)
def test_what_is_no_list_of_documents_is_refused(given, message):
    with pytest.raises(InvalidRequestError) as caught:
        Documents(given)
    assert str(caught.value).startswith(message)
