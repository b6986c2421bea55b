"""Contexts are found for certain, or left: a message is never sent with a text out of its place.

Every judgement is the same. An application renders its documents; the message with its contexts in
another order must be what it had rendered of the documents in that order, or be left as it is.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import pytest
from example_counts import slow_unless
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock
from ctxreuse.pipeline import context_finder
from ctxreuse.pipeline.context_finder import Context, FoundContexts, contexts_in, is_sequence
from ctxreuse.pipeline.known_texts import Form, KnownTexts, TextList

WORDS = ["river", "ferry", "market", "bridge", "summer", "school", "tower", "garden", "letter"]


@dataclass(frozen=True)
class Document:
    number: int
    text: str
    title: str
    source: str


Render = Callable[[Sequence[Document]], str]


def documents(number: int, random: Random, sentences: int = 2) -> list[Document]:
    def sentence() -> str:
        return " ".join(random.choices(WORDS, k=7)).capitalize() + "."

    return [
        Document(n, " ".join(sentence() for _ in range(sentences)), f"Title {n}", f"file-{n}.md")
        for n in range(number)
    ]


FIVE = documents(5, Random(1))
A, B, C, D, E = (one.text for one in FIVE)


def found_in(message: str, *lists: Sequence[str | Form], root: str | None = None) -> FoundContexts:
    known = KnownTexts()
    for texts in lists:
        known.add("", texts)
    found = contexts_in(known, "", message, root)
    assert found is not None
    return found


def in_order(context: Context, order: Sequence[int]) -> str:
    """Return the message with the texts in another order; what is between them stays."""
    pieces, end = list[str](), 0
    for (start, behind, _), place in zip(context.spans, order, strict=True):
        pieces += context.message[end:start], context.texts[place]
        end = behind
    return "".join([*pieces, context.message[end:]])


def rotated(message: str, *lists: Sequence[str | Form]) -> str | None:
    """Return a message with the texts of its only context moved up by one; None without one."""
    contexts = found_in(message, *lists).contexts
    if not contexts:
        return None
    [context] = contexts
    places = range(len(context.spans))
    assert in_order(context, places) == message
    return in_order(context, [*places[1:], 0])


def is_moved(render: Render, given: Sequence[Document], random: Random | None = None) -> bool:
    """Return whether a context is found, which may then be put into any order."""
    message = render(given)
    contexts = found_in(message, [one.text for one in given]).contexts
    if not contexts:
        return False
    [context] = contexts
    if context_finder.reason_in_place(context, []) == "twice":
        return False
    order = list(range(len(context.spans)))
    (random or Random(1)).shuffle(order)
    at = {one.text.strip(): place for place, one in enumerate(given)}
    shown = [at[text.strip()] for text in context.texts]
    wanted = list(given)
    for place, moved in zip(shown, order, strict=True):
        wanted[place] = given[shown[moved]]
    sent = in_order(context, order)
    assert sent == render(wanted), f"{sent}\n=======\n{render(wanted)}"
    return True


@pytest.mark.parametrize("around", [("   ", ""), ("\t", " "), ("", "  "), ("  ", "\n\n")])
@pytest.mark.parametrize("is_stripped", [False, True])
@pytest.mark.parametrize("separator", ["\n\n", "\n---\n"])
def test_texts_with_whitespace_of_their_own_are_found(around, is_stripped, separator):
    before, behind = around
    own = [A, f"{before}{B}{behind}", C, f"{before}{D}"]
    shown = [one.strip() for one in own] if is_stripped else own
    [context] = found_in(separator.join([*shown, "Which?"]), own).contexts
    assert in_order(context, [3, 1, 0, 2]) == separator.join(
        [shown[3], shown[1], shown[0], shown[2], "Which?"]
    )


def listed(item: str, separator: str = "\n", front: str = "", end: str = "\n\nWhich?") -> Render:
    def render(given: Sequence[Document]) -> str:
        items = [item.format(**vars(one)) for one in given]
        return front + separator.join(items) + end

    return render


@pytest.mark.parametrize(
    "render",
    [
        listed("- {text}"),
        listed("* {text}"),
        listed("\u2022 {text}", front="Known:\n"),
        listed("<doc>{text}</doc>", front="<docs>", end="</docs> Which?"),
        listed("<doc><text>\n{text}\n</text></doc>", separator=""),
        listed("{text}", "<SEP>"),
        listed("{text}", ",\n", front="[", end="]"),
        listed("{text}", "<hr/>"),
        lambda given: json.dumps([one.text for one in given]),
        lambda given: json.dumps({"found": [one.text for one in given], "n": 3}, indent=2),
        lambda given: str([one.text for one in given]).replace("'", '"'),
    ],
)
def test_lists_tags_and_json_with_nothing_else_between_are_found(render):
    assert is_moved(render, FIVE)
    assert is_moved(render, FIVE[:2])


@pytest.mark.parametrize(
    "item",
    [
        "Source: {source}\n{text}",
        "### {title}\n{text}",
        "[{number}] {text}",
        "{number}. {text}",
        "{text}\n(Source: {source})",
        "{text} [{source}]",
        "<doc id='{number}'>{text}</doc>",
        "<doc{number}>{text}</doc{number}>",
        "- {title}: {text}",
        "{text} \u2605\u2605\u2605",
    ],
)
@pytest.mark.parametrize("separator", ["\n", "\n\n"])
def test_what_the_application_wrote_between_them_leaves_them_in_place(item, separator):
    for number in (2, 5):
        assert not is_moved(listed(item, separator), FIVE[:number])
    found = found_in(listed(item, separator)(FIVE), [one.text for one in FIVE])
    assert found[:2] == ((), True)


@pytest.mark.parametrize(
    "message",
    [
        f"<policy>{A}</policy>\n<manual>{B}</manual>",
        f"<first>{A}\n<second>{B}",
        f"{A} \u2605\u2605\u2605\n{B} \u2605",
        f"{A} {B}",
        f"{A}{B}",
        f"{A}: {B}",
        f"{A} - {B}",
        f"{A}, {B}",
        f"{A}\nbut\n{B}",
        f"{A}\n2\n{B}",
    ],
)
def test_two_documents_with_names_ratings_or_words_are_left(message):
    assert rotated(message, [A, B]) is None


def test_texts_inside_longer_ones_stay_there():
    whole = f"{A}\n\n{B}"
    assert rotated(f"{whole}\n\n{C}", [whole, C], [A, B]) == f"{C}\n\n{whole}"
    assert found_in(whole, [whole], [A, B])[:2] == ((), False)


@pytest.mark.parametrize(
    "message",
    [
        f"{A}\n\n{B}\n\nAnd these:\n\n{C}\n\n{D}",
        f"Best:\n{A}\n\nOther:\n{B}\n\n{C}",
        f"{A}\n\n{B}\n{C}",
    ],
)
def test_a_list_in_pieces_stays_and_pieces_of_several_lists_do_not(message):
    assert found_in(message, [A, B, C, D])[:2] == ((), True)
    found = found_in(message, [A], [B], [C], [D])
    assert found.contexts
    assert {text for one in found.contexts for text in one.texts} <= {A, B, C, D}


def test_two_lists_in_one_message_are_two_contexts():
    found = found_in(f"One:\n{A}\n{B}\n\nTwo:\n{C}\n{D}\n", [A, B], [C, D])
    assert [one.texts for one in found.contexts] == [[A, B], [C, D]]
    assert [one.separator for one in found.contexts] == ["\n", "\n"]
    assert [(one.start, one.end) for one in found.contexts] == [
        (5, 5 + len(f"{A}\n{B}")),
        (len(f"One:\n{A}\n{B}\n\nTwo:\n"), len(f"One:\n{A}\n{B}\n\nTwo:\n{C}\n{D}")),
    ]


def test_of_several_lists_that_of_the_run_counts():
    known = KnownTexts()
    known.add("", [A, B], TextList("one"))
    known.add("", [A, B, C], TextList("two"))
    message = f"{A}\n{B}\n\nBut:\n{C}"
    for root, contexts in (("one", 1), ("two", 0), ("three", 0), (None, 0)):
        found = contexts_in(known, "", message, root)
        assert found is not None
        assert len(found.contexts) == contexts


@pytest.mark.parametrize(
    ("end", "number"), [("", 3), (" Which?", 3), ("\n", 3), ("s", 2), ("</doc>", 3), (" \n", 3)]
)
def test_a_last_text_that_goes_on_in_a_word_is_another_one(end, number):
    [context] = found_in(f"{A}\n{B}\n{C}{end}", [A, B, C]).contexts
    assert len(context.spans) == number
    bare = C.rstrip(".")
    [context] = found_in(f"{A}\n{B}\n{bare} and more", [A, B, bare]).contexts
    assert context.texts == [A, B]


def test_one_text_or_one_repeated_is_no_context():
    for message in (A, f"{A}\n{A}", "", f"{A}\n{A}s"):
        assert found_in(message, [A])[:2] == ((), False)


def test_a_repeat_at_an_end_may_be_a_quotation_and_stays():
    assert rotated(f"{A}\n{B}\n{B}\n{C}", [A, B, C]) == f"{B}\n{B}\n{C}\n{A}"
    for front in ("", "Best: "):
        assert rotated(f"{front}{A}\n{B}\n{C}\n{A}s", [A, B, C]) == f"{front}{A}\n{C}\n{B}\n{A}s"
        message = f"{front}{A}\n{B}\n{A}\n{C}\n{C}"
        assert rotated(message, [A, B, C]) == f"{front}{A}\n{A}\n{C}\n{B}\n{C}"


def test_only_what_was_rendered_with_us_counts_where_that_is_asked_for():
    known = KnownTexts()
    known.add_seen("", [[Form(A), Form(B)]])
    message = f"{A}\n{B}"
    for rendered_only, contexts in ((False, 1), (True, 0)):
        found = contexts_in(known, "", message, rendered_only=rendered_only)
        assert found is not None
        assert len(found.contexts) == contexts
    known.add("", [Form(A), Form(B)])
    found = contexts_in(known, "", message, rendered_only=True)
    assert found is not None
    assert len(found.contexts) == 1


def test_labelled_texts_are_blocks_without_their_label():
    forms = [Form(f"[{n}] {text}", ContextBlock(text=text)) for n, text in enumerate([A, B, C])]
    [context] = found_in("\n".join(one.text for one in forms), forms).contexts
    assert context.is_labelled
    assert [one.text for one in context.blocks] == [A, B, C]
    [context] = found_in("\n".join([forms[0].text, B]), forms, [B]).contexts
    assert not context.is_labelled


def named(*names: int) -> Context:
    forms = [Form(one.text, name=one.number, follower=one.number + 1) for one in FIVE]
    [context] = found_in("\n".join(FIVE[n].text for n in names), forms).contexts
    return context


@pytest.mark.parametrize(
    ("names", "expected"),
    [((0, 1, 2), True), ((0, 1, 4), True), ((1, 0), False), ((0, 2), False), ((0, 1, 3, 2), False)],
)
def test_neighbours_in_reading_order_are_a_sequence(names, expected):
    assert is_sequence([one.known.form for one in named(*names).spans]) is expected


LINES = st.lists(st.sampled_from(["x" * 12, "y" * 12, "z" * 12, "-" * 12, "", "\n", "<a>"]))


@given(st.lists(LINES.map("\n".join), max_size=4), LINES.map("\n".join), st.sampled_from("\n|"))
def test_whatever_is_known_spans_are_known_texts_in_order(texts, message, separator):
    message = separator.join([message, *texts])
    for context in found_in(message, texts).contexts:
        assert len(set(context.texts)) > 1
        ends = [place for start, end, _ in context.spans for place in (start, end)]
        assert ends == sorted(ends)
        assert all(message[start:end] == one.form.text for start, end, one in context.spans)
        between = {message[a.end : b.start] for a, b in pairwise(context.spans)}
        assert between == {context.separator}


ITEMS = [
    "{text}",
    "{text}",
    "- {text}",
    "<p>{text}</p>",
    "<a><b>{text}</b></a>",
    "Q: {title}\nA: {text}",
    "{title}\n{text}",
    "{number}) {text}",
    "#{number}: {text}",
    "({source}) {text}",
    "{text}\n-- {source}",
    "{text} (see {source})",
    "{text}\n{number}",
    '<d n="{number}">{text}</d>',
    "<t>{title}</t><c>{text}</c>",
    '"{text}"',
    "'{source}': \"{text}\"",
    "**{title}**\n\n{text}\n\n*{source}*",
    "| {source} | {text} |",
    "title: {title}\nfile: {source}\n\n{text}",
    "{text}{text}",
    "Again: {text}\n{text}",
]
FRONTS = [
    "",
    "You help.\n",
    "Data: ",
    "<all>\n",
    "- Be kind.\n- {text}\n",
    "1) Look here.\n\n",
    "[\n",
    "***\n",
    "Seen before: {text}\n\n",
    "file: none\n\n",
    "> ",
]
ENDS = [
    "",
    "\nWho?",
    "\n\nWho?",
    " Who?",
    "\n</all>",
    "\n]",
    "\n***\nEnd.",
    "\n- Answer.",
    "\n\nAgain: {text}",
    "\n2) Answer.",
    "s",
    " (end)",
]
INDENTS = ["", "", "   ", "\t"]
SEPARATORS = ["\n", "\n\n", "\n***\n", "", " ", ", ", ",\n", "\n<hr>\n", " --- ", "\n\n\n"]


@pytest.mark.parametrize("number", slow_unless(["1000", "20000"], "1000"))
def test_no_random_prompt_is_sent_wrong(number):
    random, moved = Random(number), 0
    for _ in range(int(number)):
        given = documents(random.randint(2, 7), random, random.randint(1, 3))
        if random.random() < 0.2:
            given = [replace(one, text=random.choice(INDENTS) + one.text) for one in given]
        quoted = random.choice(given).text  # stands in front or behind, whatever moves

        def around(pieces: list[str], random: Random = random, quoted: str = quoted) -> str:
            return random.choice(pieces).replace("{text}", quoted)

        render = listed(
            random.choice(ITEMS), random.choice(SEPARATORS), around(FRONTS), around(ENDS)
        )
        moved += is_moved(render, given, random)
    assert moved > int(number) / 20, "some are moved"
