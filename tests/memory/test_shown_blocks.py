import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import assistant
from steps import growth, steps

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.context.blocks import ContextBlock, id_size, text_digest
from ctxreuse.context.content_parts import joined, turn_parts
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, SentBlock, Templates, render_block
from ctxreuse.memory import conversations as module
from ctxreuse.memory.conversations import Conversations, History, Reading

A = ContextBlock(id="a", text="Paris is in France.")
B = ContextBlock(id="b", text="Rome is in Italy.\nIt is old.")
IDS = Templates(label="[{id}]")
END = 1


def label(block, templates=DEFAULT_TEMPLATES):
    return templates.label_of(block)


def user(content):
    return {"role": "user", "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def turn(*blocks, templates=DEFAULT_TEMPLATES):
    sent = [SentBlock(templates.label_of(block), block) for block in blocks]
    return joined(turn_parts(sent, None, "Why?", templates))


class Records(Conversations):
    """Reads messages as a planner does."""

    def read(self, conversation_id, messages, templates):
        return Reading().read(messages, self.recorded(conversation_id), templates)


def sent_in(*turns, conversation_id="c", templates=DEFAULT_TEMPLATES, **bounds):
    """Return records of one conversation that was sent these turns."""
    conversations = Records(**bounds)
    for blocks in turns:
        sent = [(templates.label_of(block), block) for block in blocks]
        conversations.remember(conversation_id, sent, END, None)
    return conversations


def found(conversations, *contents, conversation_id="c", templates=DEFAULT_TEMPLATES):
    """Return what the messages show, and check that both ways to look it up agree."""
    history = conversations.read(conversation_id, [user(one) for one in contents], templates)
    assert set(history.label_of.values()) <= set(history.labels)
    return dict(history.labels)


def test_blocks_that_stand_under_their_labels_are_found():
    history = sent_in([A, B]).read("c", [user(turn(A, B))], DEFAULT_TEMPLATES)
    assert history == History({label(A): "a", label(B): "b"}, {A.key: label(A), B.key: label(B)})


@pytest.mark.parametrize(
    "content",
    [
        "Hello.",
        "",
        turn(A).replace(label(A), label(B)),
        turn(A).replace(A.text, B.text),
        turn(A).replace("France", "Franke"),  # edited
        turn(A).replace("France.", "France!"),
        turn(A).replace("France.", "France. And?"),  # the text goes on
        turn(A).replace("] ", "]  "),
        turn(A)[: len(label(A)) + 10],  # cut
        turn(A)[1:],
        A.text,  # without a label
        f"You said {label(A)} {A.text}",  # within a line
        f"Please refer to {label(A)} in the previous conversation.",
        parts(f"{label(A)} Paris is ", "in France."),  # in two parts
        [{"type": "image_url", "image_url": {"url": turn(A)}}],
        None,
    ],
    ids=range(16),
)
def test_a_block_that_does_not_stand_under_its_label_is_not_found(content):
    assert found(sent_in([A]), content) == {}


@pytest.mark.parametrize(
    "content",
    [
        f"{label(A)} {A.text}",
        f"{label(A)} {A.text}\n",
        f"Context:\n{label(A)} {A.text}\nQuestion: why?",
        parts("Look.", turn(A), "Why?"),
        [{"type": "image_url", "image_url": {"url": "x"}}, *parts(turn(A))],
    ],
    ids=range(5),
)
def test_a_block_is_found_wherever_it_stands_in_lines_of_its_own(content):
    assert found(sent_in([A]), content) == {label(A): "a"}


@pytest.mark.parametrize("longer_text", ["Paris\nis big", "Paris\n\nis big", "Parisians", "Paris!"])
@pytest.mark.parametrize("shown", ["short", "long"])
def test_a_block_whose_text_begins_like_anothers_is_not_taken_for_it(longer_text, shown):
    block = {
        "short": ContextBlock(id="x", text="Paris"),
        "long": ContextBlock(id="x", text=longer_text),
    }
    content = turn(block[shown], templates=IDS)
    for turns in (("short", "long"), ("long", "short")):
        conversations = sent_in(*[[block[name]] for name in turns], templates=IDS)
        history = conversations.read("c", [user(content)], IDS)
        assert history.label_of == {block[shown].key: "[x]"}


@pytest.mark.parametrize(
    "more",
    [
        [user(f"{label(A)} Something else.")],
        [user(f"{label(A)} replaces {label(B)}. And more.")],
        [user(f"Look.\n{label(A)} Paris is")],
        [user(turn(ContextBlock(text=f"What {label(A)} says.")))],
        [assistant(turn(ContextBlock(text="Unknown."))), user(f"{label(A)} {B.text}")],
    ],
    ids=range(5),
)
def test_a_label_that_names_something_else_too_refers_to_nothing(more):
    quoting = ContextBlock(text=f"What {label(A)} says.")
    conversations = sent_in([A, B, quoting])
    before = [user(turn(A, B))]
    assert label(A) in conversations.read("c", before, DEFAULT_TEMPLATES).label_of.values()
    history = conversations.read("c", [*before, *more], DEFAULT_TEMPLATES)
    assert (history.label_of.get(A.key), history.label_of[B.key]) == (None, label(B))


@pytest.mark.parametrize(
    "more",
    [
        user(f"{label(A)} {DEFAULT_TEMPLATES.removed}"),
        user(f"{label(A)} no longer holds; do not use it."),
        user(f"{label(A)} replaces {label(B)}.\n\nWhy?"),
        user(f"What does {label(A)} say?"),
        assistant(f"{label(A)} Paris, it says."),
        user(turn(A)),
    ],
    ids=range(6),
)
def test_a_label_that_is_only_spoken_of_still_names_its_block(more):
    history = sent_in([A]).read("c", [user(turn(A)), more], DEFAULT_TEMPLATES)
    assert history.label_of == {A.key: label(A)}


@pytest.mark.parametrize(
    "templates",
    [
        Templates(label="#{letters}", block="<doc {label}>{text}</doc>"),
        Templates(label="{letters}", block="{label}. {text}"),
        Templates(block="Document {label}:\n{text}\n---"),
        Templates(block="{label}{text}"),
        Templates(label="(.*{letters}+)", block="$ {label} \\1 {text} ["),
        Templates(separator="\n"),
        Templates(separator=" | "),
        Templates(separator=""),
        Templates(order_position="after_question"),
    ],
    ids=range(9),
)
def test_blocks_are_found_whatever_the_templates(templates):
    content = turn(A, B, templates=templates)
    conversations = sent_in([A, B], templates=templates)
    assert found(conversations, content, templates=templates) == {
        label(A, templates): "a",
        label(B, templates): "b",
    }
    edited = content.replace("France.", "Franke.")
    assert found(conversations, edited, templates=templates) == {label(B, templates): "b"}


def test_other_templates_than_those_it_was_sent_with_find_nothing():
    conversations = sent_in([A])
    assert found(conversations, turn(A), templates=Templates(block="{label}: {text}")) == {}
    assert found(conversations, turn(A), templates=Templates(label="#{letters}")) == {}


def test_what_other_conversations_were_sent_is_not_found():
    conversations = sent_in([A], conversation_id=1)
    for conversation_id in ("1", 2, None):
        assert found(conversations, turn(A), conversation_id=conversation_id) == {}


texts = st.text("ab[] \n", max_size=12)
blocks = st.builds(ContextBlock, id=st.sampled_from("ab"), text=texts)


@given(st.lists(texts, unique=True, max_size=5))
def test_whatever_was_rendered_is_found_again(texts):
    blocks = [ContextBlock(id=f"x{n}", text=text) for n, text in enumerate(texts)]
    history = sent_in(blocks, templates=IDS).read("c", [user(turn(*blocks, templates=IDS))], IDS)
    assert history.label_of == {block.key: f"[{block.id}]" for block in blocks}


@given(
    st.lists(st.lists(blocks, max_size=3), max_size=3),
    st.randoms(use_true_random=False),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_whatever_happens_to_messages_what_is_found_stands_there(turns, random, first, last):
    contents = [turn(*blocks, templates=IDS)[first:][: last or None] for blocks in turns]
    random.shuffle(contents)
    history = sent_in(*turns, templates=IDS).read("c", [user(one) for one in contents[:2]], IDS)
    block_of = {block.key: block for blocks in turns for block in blocks}
    for key, name in history.label_of.items():
        rendered = render_block(name, block_of[key].text, IDS)
        assert any(rendered in content for content in contents[:2])


def remember(conversations, *conversation_ids):
    for conversation_id in conversation_ids:
        conversations.remember(conversation_id, [(label(A), A)], END, None)


def known(conversations, conversation_ids):
    return [one for one in conversation_ids if found(conversations, turn(A), conversation_id=one)]


def test_the_least_recently_used_conversation_is_forgotten_first():
    conversations = Records(max_conversations=3)
    remember(conversations, "a", "b", "c", "a", "d")
    assert conversations.size == 3
    assert known(conversations, "abcd") == ["a", "c", "d"]


def test_the_oldest_blocks_of_a_conversation_are_forgotten_first():
    other = ContextBlock(id="c", text="Bern")
    conversations = sent_in([A], [B], [A, other], max_blocks=2)
    assert found(conversations, turn(A, B, other)) == {label(A): "a", label(other): "c"}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=30),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_records_stay_within_their_bounds(requests, max_conversations, max_blocks):
    conversations = Records(max_conversations, max_blocks)
    for conversation_id, number in requests:
        sent = [ContextBlock(id=n, text=str(n)) for n in range(number)]
        labelled = [(label(block), block) for block in sent]
        conversations.remember(conversation_id, labelled, END, None)
        assert 1 <= conversations.size <= max_conversations
        shown = found(conversations, turn(*sent), conversation_id=conversation_id)
        assert len(shown) == min(number, max_blocks)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3))),
        max_size=20,
    ),
    st.integers(0, 4),
)
def test_the_sizes_of_the_ids_are_those_of_what_is_recorded(requests, max_blocks):
    conversations = Records(2, max_blocks=max_blocks)
    for conversation_id, numbers in requests:
        sent = [
            (one, ContextBlock(id="x" * 64 * number, text="")) for one, number in numbers.items()
        ]
        conversations.remember(conversation_id, sent, END, None)
    recorded = [one for name in range(3) for one in conversations.recorded(name).values()]
    assert conversations.shown_size == sum(
        id_size(block_id) for some in recorded for _, block_id, *_ in some
    )
    for name in range(3):
        conversations.forget(name)
    assert conversations.shown_size == 0


def test_a_turn_takes_the_same_work_however_many_blocks_were_shown_before():
    def turn_after(blocks):
        conversations = sent_in([ContextBlock(id=n, text=str(n)) for n in range(blocks)])
        return lambda: conversations.remember("c", [(label(A), A)], END, None)

    assert steps(turn_after(1_000)) == steps(turn_after(10))


def test_texts_under_one_label_take_work_that_grows_with_their_number():
    def turn_of(number):
        sent = [("[x]", ContextBlock(id=n, text=str(n))) for n in range(number)]
        return lambda: Records().remember("c", sent, END, None)

    assert growth(turn_of, 200) < 2.6


def test_a_turn_continues_where_its_conversation_last_ended_under_the_same_system_text():
    conversations = Records()
    first, second = 1, 2
    conversations.remember("c", [], first, "system")
    assert conversations.end_of("c", "system") == first
    assert conversations.end_of("c", None) == 0
    assert conversations.end_of("other", "system") == 0
    assert conversations.end_of(None, "system") == 0
    conversations.remember("c", [], second, None)
    assert conversations.end_of("c", None) == second


def retried(times):
    """Return records of a block that was sent again and again, a unit longer each time."""
    versions = [ContextBlock(id="x", text="x" * 5 * n) for n in range(1, times + 1)]
    return sent_in(*([one] for one in versions), templates=IDS)


def test_the_characters_that_are_hashed_are_bounded_by_the_history(monkeypatch):
    hashed = []

    def counted(text):
        hashed.append(len(text))
        return text_digest(text)

    monkeypatch.setattr(module, "text_digest", counted)
    conversations, text = retried(1_000), ("\n[x] " * 2_000).strip()
    history = conversations.read("c", [user(text)], IDS)
    assert history.is_cut_short
    assert dict(history.labels) == {}
    assert sum(hashed) <= (1 << 20) + 16 * len(text)


def test_a_block_among_its_retries_is_found():
    text = "x" * 5 * 120
    history = retried(300).read("c", [user(f"[x] {text}\n\nWhy?")], IDS)
    assert history.label_of == {ContextBlock(id="x", text=text).key: "[x]"}
    assert not history.is_cut_short


@given(st.lists(st.sampled_from(["a", "a\n", "\n\n", "[x] ", "[y] "]), max_size=12))
def test_a_search_that_is_cut_short_finds_no_other_blocks(pieces):
    versions = [ContextBlock(id="x", text="a\n" * n + "a") for n in range(4)]
    other = ContextBlock(id="y", text="a")
    conversations = sent_in(*([one, other] for one in versions), templates=IDS)
    messages = [user("[x] " + "".join(pieces))]
    whole = conversations.read("c", messages, IDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LEAST_WORK", 0)
        patch.setattr(module, "_WORK_A_CHARACTER", 1)
        cut = conversations.read("c", messages, IDS)
    assert cut.labels.items() <= whole.labels.items()
    assert cut.label_of.items() <= whole.label_of.items()


@pytest.mark.parametrize("is_own", [True, False])
def test_each_message_is_read_once_and_answers_never(monkeypatch, is_own):
    read, read_on = [], module.Reading._read_on
    monkeypatch.setattr(
        module.Reading, "_read_on", lambda *given: (read.append(given[1]), read_on(*given))
    )
    planner = ReusePlanner(labels=True)
    chat, history = planner.conversation("own"), []
    for number in range(30):
        blocks = [block(number), block(number // 2)]
        if is_own:
            plan = chat.plan(blocks, "Which?")
            chat.record("This.")
        else:
            asked = ContextRequest(blocks, "Which?", history=history, conversation_id="foreign")
            plan = planner.plan(asked)
            history = [dict(one) for one in [*history, user(plan.content), assistant("This.")]]
        assert len(plan.references) == (number > 0)
    assert len(read) == 29


def block(number):
    return ContextBlock(id=number, text=f"Text {number}. " * 9, tokens=100)
