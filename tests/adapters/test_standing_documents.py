"""Documents that an application has joined into a prompt itself: found for certain, or left."""

from collections import Counter
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.adapters import standing_documents as standing_documents_module
from ctxreuse.adapters.prompt_draft import PromptPart, ScopedPrompt
from ctxreuse.adapters.prompt_planner import PromptPlanner
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.adapters.standing_documents import names_places, standing_documents
from ctxreuse.context.scope import RequestScope

pytestmark = pytest.mark.usefixtures("paper_words")

A, B, C = (f"{name} is a river. " * 30 + "So it is." for name in ("Seine", "Tiber", "Rhine"))
DOCUMENTS = [A, B, C]


@pytest.mark.parametrize("separator", ["\n\n", "\n", " \r\n\r\n", "\n\n---\n\n", "\n=====\n"])
@pytest.mark.parametrize(("before", "behind"), [("", ""), ("Read: ", "\n\nWhich?"), ("(", ")")])
def test_joined_documents_are_found(separator, before, behind):
    joined = separator.join(DOCUMENTS)
    found = standing_documents(before + joined + behind, DOCUMENTS)
    assert found is not None
    assert found.text == joined
    assert [joined[start:end] for _, start, end in found.spans] == DOCUMENTS


def test_white_space_at_the_ends_may_be_missing_and_blank_documents_too():
    given_texts = [f"{A}\n", "  \n", B, f"\t{C}  "]
    found = standing_documents("\n\n".join([A, B, C]), given_texts)
    assert found is not None
    assert [number for number, _, _ in found.spans] == [0, 2, 3]
    whole = "\n".join(given_texts[2:])
    kept = standing_documents(whole, given_texts[2:])
    assert kept is not None
    assert kept.text == whole, "where it stands, it belongs to the document"


@pytest.mark.parametrize(
    "text",
    [
        "\n\n".join([A, C, B]),
        "\n\n".join([A, B]),
        "\n\n".join([A, B, C[:-2]]),
        f"{A}\n\n{B}\n{C}",
        f"{A}\n\n{B}\n\nand\n\n{C}",
        f"1. {A}\n2. {B}\n3. {C}",
        f"Source: x\n{A}\n\nSource: x\n{B}\n\nSource: x\n{C}",
        f"<p>{A}</p>\n<p>{B}</p>\n<p>{C}</p>",
        f'["{A}", "{B}", "{C}"]',
        f"- {A}\n- {B}\n- {C}",
        " ".join(DOCUMENTS),
        "\n\n".join(DOCUMENTS * 2),
        f"{A}\n\n{B}\n\n{C} Is it so? {A}\n\n{B}\n\n{C}",
        "",
    ],
)
def test_what_is_not_certain_is_left(text):
    assert standing_documents(text, DOCUMENTS) is None


def test_one_document_alone_is_left_and_equal_ones_beside_others_are_found():
    assert standing_documents(A, [A]) is None
    assert standing_documents(f"{A}\n\n{A}", [A, f" {A}"]) is None

    twice = standing_documents(f"{A}\n\n{A}\n\n{B}", [A, A, B])
    assert twice is not None
    assert [number for number, _, _ in twice.spans] == [0, 1, 2]
    assert standing_documents(f"{A}\n\n{B}", [A, A, B]) is None
    assert standing_documents("", []) is None


def test_a_question_that_names_the_first_document_does_not_hide_the_others():
    joined = "\n\n".join(DOCUMENTS)
    found = standing_documents(f"What follows {A}?\n{joined}", DOCUMENTS)
    assert found is not None
    assert found.text == joined


SHORT = st.text(alphabet="ab\n -", max_size=6)


@given(SHORT, st.lists(SHORT, max_size=4), st.sampled_from(["\n", "\n\n", " ", "\n-\n"]), SHORT)
@example("", ["a", "a\n\na"], "\n\n", "")
def test_what_is_found_is_the_documents_in_order_with_line_breaks_between(
    before, documents, separator, behind
):
    text = before + separator.join(documents) + behind
    found = standing_documents(text, documents)
    if found is None:
        return
    assert text.count(found.text) == 1
    assert [number for number, _, _ in found.spans] == [
        number for number, one in enumerate(documents) if one.strip()
    ]
    end = 0
    between = set()
    for number, start, stop in found.spans:
        assert found.text[start:stop].strip() == documents[number].strip()
        between.add(found.text[end:start] if start else "\n")
        end = stop
    assert end == len(found.text)
    assert len(between - {"\n"}) <= 1
    assert not any(character in one for one in between for character in "ab")


def blocks(texts: list[str]) -> tuple[ContextBlock, ...]:
    return tuple(ContextBlock(id=f"id of {text}", text=text) for text in texts)


def prompt(text: str, retrieved: list[list[str]], tenant: str = "") -> ScopedPrompt:
    return ScopedPrompt(
        (PromptPart("user", text),), RequestScope(tenant=tenant), tuple(map(blocks, retrieved))
    )


def planner() -> PromptPlanner:
    return PromptPlanner(registry=ContextRegistry())


def sent(planner: PromptPlanner, *prompts: ScopedPrompt) -> list[str]:
    planned = sorted(planner.plan(prompts), key=lambda one: one.position)
    return ["\n".join(one.texts) for one in planned]


def asking(texts: list[str], question: str = "Which?") -> str:
    return "\n\n".join([*texts, question])


@pytest.fixture
def one() -> PromptPlanner:
    """A planner that has sent two documents."""
    made = planner()
    sent(made, prompt(asking([A, B]), [[A, B]]))
    return made


WORDS = (
    "Please read the context in the following priority order: 3 > 2 > 1 and answer the question."
)


def test_joined_documents_stay_as_they_are_unless_they_are_moved():
    one = planner()
    first = asking([A, B])
    assert sent(one, prompt(first, [[A, B]])) == [first]
    [text] = sent(one, prompt(asking([C, B, A], "Who?"), [[C, B, A]]))
    assert text == "\n\n".join([A, B, C, WORDS, "Who?"])
    assert one.statistics().planned == 2
    assert one.statistics().without_context == 0


def test_what_stands_between_documents_stands_there_when_they_are_moved():
    one = planner()
    for documents in ([A, B], [C, B, A]):
        text = "<docs>" + "\n---\n".join(documents) + "</docs>"
        [shown] = sent(one, prompt(text, [documents]))
    assert shown == f"<docs>{A}\n---\n{B}\n---\n{C}\n\n{WORDS}</docs>"


def test_without_annotations_no_place_is_said():
    one = PromptPlanner(ReusePlanner(annotate=False), registry=ContextRegistry())
    sent(one, prompt(asking([A, B]), [[A, B]]))
    assert sent(one, prompt(asking([C, B, A]), [[C, B, A]])) == [asking([A, B, C])]


@pytest.mark.parametrize(
    ("before", "behind"), [("", " It goes on."), ("It begins. ", ""), ("so", ""), ("", "s")]
)
def test_a_longer_text_is_not_torn_apart(before, behind):
    assert standing_documents(before + "\n\n".join(DOCUMENTS) + behind, DOCUMENTS) is None


def test_of_several_lists_the_longest_is_planned_and_none_beside_another_one(one):
    inner = asking([C, B, A], "Who?")
    assert sent(one, prompt(inner, [[C, B], [C, B, A], [A, C]])) != [inner]
    beside = "Rivers:\n" + asking([C, B, A], "Lakes:\na lake\n\nanother lake\n\nWho?")
    assert sent(one, prompt(beside, [[C, B, A], ["a lake", "another lake"]])) == [beside]


def test_a_prompt_is_planned_in_a_conversation_as_it_is_outside(one):
    texts = []
    for conversation in (None, "c"):
        parts = (PromptPart("user", asking([C, B, A])),)
        scope = RequestScope("", conversation)
        [planned] = one.plan([ScopedPrompt(parts, scope, (blocks([C, B, A]),))])
        texts.append(planned.texts)
    assert texts[0] == texts[1] == ("\n\n".join([A, B, C, WORDS, "Which?"]),)


def test_what_was_joined_makes_no_later_search_longer():
    registry = ContextRegistry()
    one = PromptPlanner(registry=registry)
    for number in range(50):
        texts = [f"{number} {A}", f"{number} {B}"]
        sent(one, prompt(asking(texts), [texts]))
    assert len(registry) == 0


@pytest.mark.parametrize("tenant", ["", "other"])
def test_only_the_prompt_for_which_they_were_retrieved_counts(one, tenant):
    sent(one, prompt(asking([C, B, A]), [[C, B, A]]))
    pasted = asking([C, B, A])
    assert sent(one, prompt(pasted, [], tenant)) == [pasted]
    assert sent(one, prompt(pasted, [[A, B]], tenant)) == [pasted]
    assert one.statistics().in_other_scope == 0, "and no remedy is named that is none"


def test_a_retry_is_planned_as_the_first_time(one):
    again = prompt(asking([C, B, A]), [[C, B, A]])
    assert sent(one, again) == sent(one, again)
    assert one.statistics().planned == 3


def test_what_was_sent_is_sent_again_in_the_history_of_any_later_run(one):
    text = asking([C, B, A])
    [first] = sent(one, prompt(text, [[C, B, A]]))
    parts = tuple(map(PromptPart, ("user", "assistant", "user"), (text, "So.", "And then?")))
    [later] = one.plan([ScopedPrompt(parts)])
    assert later.texts == (first, "So.", "And then?")


def test_they_are_planned_before_an_answer_that_the_template_holds():
    one = planner()
    shown = []
    for documents in ([A, B], [C, B, A]):
        parts = (asking(documents), "Noted.", "Which?")
        roles = ("user", "assistant", "user")
        given = ScopedPrompt(
            tuple(map(PromptPart, roles, parts)), RequestScope(), (blocks(documents),)
        )
        [planned] = one.plan([given])
        shown.append(planned.texts)
    assert shown[1] == ("\n\n".join([A, B, C, WORDS, "Which?"]), "Noted.", "Which?")
    assert one.plan([given])[0].texts == shown[1]


def test_beside_labels_and_beside_a_quotation_they_are_left(one):
    for text in (
        asking([C, B, A], "What does [Doc_1] say?"),
        asking(["[Doc_x] A lake is none.", C, B, A]),
        asking([C, B, A]) + "\n\nIs that " + asking([C, B, A]),
    ):
        assert sent(one, prompt(text, [[C, B, A]])) == [text]


@pytest.mark.parametrize("length", [5, 60])
def test_documents_shorter_than_the_words_that_rank_them_are_left(length):
    one = planner()
    texts = [f"{name} " * length for name in "abc"]
    sent(one, prompt(asking(texts), [texts]))
    again = asking([*texts[::-1]])
    [shown] = sent(one, prompt(again, [texts[::-1]]))
    assert (shown == again) is (length == 5)
    assert one.statistics().too_short == (2 if length == 5 else 0)
    assert one.statistics().without_context == 0


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("Cite what you use:\n\n", "Which?"),
        ("", "Which? Give the number of the passage."),
        ("", "Sources: a.txt, b.txt, c.txt"),
        ("Main document (best match):\n\n", "Which?"),
        ("Read the chunks in this order:\n\n", "Which?"),
        ("", "What does document 2 say?"),
        ("", "Mark statements with [1] and so on. Which?"),
        ("Zitiere genau:\n\n", "Which?"),
    ],
)
def test_documents_that_words_may_tell_by_their_places_stay(before, behind):
    one = planner()
    sent(one, prompt(before + asking([A, B], behind), [[A, B]]))
    text = before + asking([C, B, A], behind)
    assert sent(one, prompt(text, [[C, B, A]])) == [text]
    assert one.statistics().kept_in_place == 2
    assert one.statistics().without_context == 0


@pytest.mark.parametrize(
    "head",
    [
        "Use the following pieces of retrieved context to answer the question. If you do not know "
        "the answer, just say so. Use three sentences maximum.\n\n",
        "Context information is below.\n---------------------\n",
        "Context information from multiple sources is below.\n",
        "Answer the question based only on the following context:\n\n",
        "Article 5 of the first contract, in order to be clear:\n",
    ],
)
def test_the_usual_templates_name_no_places(head):
    assert not names_places(head)


def test_with_another_retrieved_document_beside_them_they_stay(one):
    faq = "How long is a river? That depends."
    for text in (f"{faq}\n\n{asking([C, B, A])}", asking([C, B, A, faq])):
        assert sent(one, prompt(text, [[C, B, A], [faq]])) == [text]
    assert one.statistics().kept_in_place == 2


@pytest.mark.parametrize("kind", ["integer", "string"])
def test_where_an_answer_may_be_the_places_of_documents_they_stay(kind):
    one = planner()
    field = {"type": "array", "items": {"type": kind}}
    tools = PromptPart.of_value("system", {"tools": [{"properties": {"used": field}}]})
    for documents in ([A, B], [C, B, A]):
        parts = (tools, PromptPart("user", asking(documents)))
        [planned] = one.plan([ScopedPrompt(parts, RequestScope(), (blocks(documents),))])
    assert (planned.texts[1] == asking([C, B, A])) is (kind == "integer")


PIECES = st.text(alphabet="ab [Doc_1]\n", max_size=9)


def lines(text, separator):
    return Counter(filter(None, map(str.strip, text.replace(separator, "\n").split("\n"))))


def repeated(documents):
    stripped = [one.strip() for one in documents]
    return [one for number, one in enumerate(stripped) if one in stripped[:number]]


@given(
    st.lists(st.tuples(st.lists(PIECES, max_size=5), PIECES, PIECES), min_size=1, max_size=4),
    st.sampled_from(["\n\n", "\n", " "]),
)
def test_each_document_is_sent_once_and_the_words_around_stay(asked, separator):
    one = planner()
    for documents, before, behind in asked:
        text = before + separator.join(documents) + behind
        with mock.patch.object(standing_documents_module, "_LEAST_LENGTH", 0):
            [shown] = one.plan([prompt(text, [documents])])
        for plan in shown.plans:
            assert {block.text.strip() for block in plan.blocks} == {
                text.strip() for text in documents if text.strip()
            }
            joined = standing_documents(text, documents)
            assert joined is not None
            start = text.index(joined.text)
            behind_all = text[start + len(joined.text) :]
            sent = shown.texts[0]
            assert sent.startswith(text[:start])
            assert sent.endswith(behind_all)
            sent_lines = lines(sent[start : len(sent) - len(behind_all)], separator)
            once = lines(joined.text, separator) - lines("\n".join(repeated(documents)), separator)
            assert all(sent_lines[line] >= times for line, times in once.items())
        if not shown.plans:
            assert shown.texts == (text,)
