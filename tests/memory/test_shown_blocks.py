import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import assistant
from steps import steps

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.context.blocks import ContextBlock, id_size, text_digest
from ctxreuse.context.rendering import (
    DEFAULT_TEMPLATES,
    SentBlock,
    Templates,
    render_block,
    render_turn,
)
from ctxreuse.memory import conversations as module
from ctxreuse.memory.conversations import Conversations, History

A = ContextBlock(id="a", text="Paris is in France.")
B = ContextBlock(id="b", text="Rome is in Italy.\nIt is old.")
END = 1


def user(content):
    return {"role": "user", "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def turn(blocks, query="Why?", templates=DEFAULT_TEMPLATES):
    """Return the content of a message that shows blocks, given by their ordinals."""
    sent = [SentBlock(templates.block_label(n), block) for n, block in blocks.items()]
    return render_turn(sent, None, query, templates)


def sent_in(*turns, conversation_id="c", **bounds):
    """Return records of one conversation that was sent these turns."""
    conversations = Conversations(**bounds)
    for blocks in turns:
        conversations.remember(conversation_id, blocks.items(), END, None)
    return conversations


def found(conversations, *contents, conversation_id="c", templates=DEFAULT_TEMPLATES):
    """Return what the messages show, and check that both ways to look it up agree."""
    history = conversations.read(conversation_id, [user(one) for one in contents], templates)
    assert set(history.label_of.values()) <= set(history.labels)
    assert history.used >= {
        int(templates.label_pattern.fullmatch(label)[1]) for label in history.labels
    }
    return dict(history.labels)


def test_blocks_that_stand_under_their_labels_are_found():
    conversations = sent_in({1: A, 2: B})
    history = conversations.read("c", [user(turn({1: A, 2: B}))], DEFAULT_TEMPLATES)
    assert history == History(
        {"[Doc_1]": "a", "[Doc_2]": "b"}, {A.key: "[Doc_1]", B.key: "[Doc_2]"}, frozenset({1, 2})
    )


@pytest.mark.parametrize(
    "content",
    [
        "Hello.",
        "",
        turn({2: A}),  # relabelled
        turn({1: B}),  # a branch: another block under the label
        turn({1: A}).replace("France", "Franke"),  # edited
        turn({1: A}).replace("France.", "France!"),
        turn({1: A}).replace("France.", "France. And?"),  # the text goes on
        turn({1: A}).replace("[Doc_1] ", "[Doc_1]  "),
        turn({1: A})[: len("[Doc_1] Paris is in Fr")],  # cut
        turn({1: A})[1:],
        "Paris is in France.",  # without a label
        "You said [Doc_1] Paris is in France.",  # within a line
        "Please refer to [Doc_1] in the previous conversation.",
        parts("[Doc_1] Paris is ", "in France."),  # in two parts
        [{"type": "image_url", "image_url": {"url": turn({1: A})}}],
        None,
    ],
    ids=range(16),
)
def test_a_block_that_does_not_stand_under_its_label_is_not_found(content):
    assert found(sent_in({1: A}), content) == {}


@pytest.mark.parametrize(
    "content",
    [
        "[Doc_1] Paris is in France.",
        "[Doc_1] Paris is in France.\n",
        "Context:\n[Doc_1] Paris is in France.\nQuestion: why?",
        parts("Look.", turn({1: A}), "Why?"),
        [{"type": "image_url", "image_url": {"url": "x"}}, *parts(turn({1: A}))],
    ],
    ids=range(5),
)
def test_a_block_is_found_wherever_it_stands_in_lines_of_its_own(content):
    assert found(sent_in({1: A}), content) == {"[Doc_1]": "a"}


@pytest.mark.parametrize("longer_text", ["Paris\nis big", "Paris\n\nis big", "Parisians", "Paris!"])
@pytest.mark.parametrize("shown", ["short", "long"])
def test_a_block_whose_text_begins_like_anothers_is_not_taken_for_it(longer_text, shown):
    block = {
        "short": ContextBlock(id="short", text="Paris"),
        "long": ContextBlock(id="long", text=longer_text),
    }
    for turns in (("short", "long"), ("long", "short")):
        conversations = sent_in(*[{1: block[name]} for name in turns])
        assert found(conversations, turn({1: block[shown]})) == {"[Doc_1]": shown}


def test_a_block_that_was_sent_twice_is_found_where_it_first_stands():
    conversations = sent_in({1: A}, {2: A})
    history = conversations.read("c", [user(turn({1: A})), user(turn({2: A}))], DEFAULT_TEMPLATES)
    assert history == History(
        {"[Doc_1]": "a", "[Doc_2]": "a"}, {A.key: "[Doc_1]"}, frozenset({1, 2})
    )


@pytest.mark.parametrize(
    "templates",
    [
        Templates(label="#{ordinal}", block="<doc {label}>{text}</doc>"),
        Templates(label="{ordinal}", block="{label}. {text}"),
        Templates(block="Document {label}:\n{text}\n---"),
        Templates(block="{label}{text}"),
        Templates(label="(.*{ordinal}+)", block="$ {label} \\1 {text} ["),
        Templates(separator="\n"),
        Templates(separator=" | "),
        Templates(separator=""),
        Templates(order_position="after_question"),
    ],
    ids=range(9),
)
def test_blocks_are_found_whatever_the_templates(templates):
    content = turn({1: A, 2: B}, templates=templates)
    label_1, label_2 = templates.block_label(1), templates.block_label(2)
    conversations = sent_in({1: A, 2: B})
    assert found(conversations, content, templates=templates) == {label_1: "a", label_2: "b"}
    edited = content.replace("France.", "Franke.")
    assert found(conversations, edited, templates=templates) == {label_2: "b"}


def test_other_templates_than_those_it_was_sent_with_find_nothing():
    conversations = sent_in({1: A})
    assert found(conversations, turn({1: A}), templates=Templates(block="{label}: {text}")) == {}
    assert found(conversations, turn({1: A}), templates=Templates(label="#{ordinal}")) == {}


def test_what_other_conversations_were_sent_is_not_found():
    conversations = sent_in({1: A}, conversation_id=1)
    history = [user(turn({1: A}))]
    for conversation_id in ("1", 2, None):
        assert conversations.read(conversation_id, history, DEFAULT_TEMPLATES) == History(
            {}, {}, frozenset({1})
        )


block_texts = st.text("ab[]Doc_12 \n", max_size=12)


@given(st.lists(block_texts, unique=True, max_size=5), st.integers(1, 3))
def test_whatever_was_rendered_is_found_again(texts, first):
    blocks = {n: ContextBlock(id=n, text=text) for n, text in enumerate(texts, first)}
    history = sent_in(blocks).read("c", [user(turn(blocks))], DEFAULT_TEMPLATES)
    assert {history.label_of.get(block.key) for block in blocks.values()} == {
        f"[Doc_{n}]" for n in blocks
    }


@given(
    st.lists(st.lists(block_texts, max_size=3), max_size=3),
    st.randoms(use_true_random=False),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_whatever_happens_to_the_messages_what_is_found_really_stands_there(
    texts, random, first, last
):
    turns, contents, ordinal = [], [], 1
    for turn_texts in texts:
        blocks = {n: ContextBlock(id=n, text=text) for n, text in enumerate(turn_texts, ordinal)}
        ordinal += len(blocks)
        turns.append(blocks)
        contents.append(turn(blocks)[first:][: last or None])
    random.shuffle(contents)
    history = sent_in(*turns).read("c", [user(one) for one in contents[:2]], DEFAULT_TEMPLATES)
    block_of = {block.key: block for blocks in turns for block in blocks.values()}
    for key, label in history.label_of.items():
        rendered = render_block(label, block_of[key].text, DEFAULT_TEMPLATES)
        assert any(rendered in content for content in contents[:2])


def next_ordinals(number, *contents):
    history = Conversations().read(None, [user(one) for one in contents], DEFAULT_TEMPLATES)
    return history.next_ordinals(number)


@pytest.mark.parametrize(
    ("contents", "ordinals"),
    [
        ([], [1, 2, 3]),
        ([turn({1: A, 2: B})], [3, 4, 5]),
        (["[Doc_2] gone, [Doc_5] too"], [6, 7, 8]),
        (["[Doc_999999999999]"], [1, 2, 3]),
        (["[Doc_999999999999] [Doc_2]", parts("[Doc_4]")], [5, 6, 7]),
        (["[Doc_" + "9" * 100_000 + "]"], [1, 2, 3]),
        (["[Doc_1000000]"], [1_000_001, 1_000_002, 1_000_003]),
        (["[Doc_1000000] [Doc_1000002] [Doc_1000001]"], [1_000_003, 1_000_004, 1_000_005]),
        (["[Doc_0] [Doc_07] [Doc_-8] [doc_9]"], [1, 2, 3]),
    ],
    ids=range(9),
)
def test_ordinals_follow_those_in_the_history(contents, ordinals):
    assert next_ordinals(3, *contents) == ordinals


hostile_labels = st.one_of(
    st.integers(0, 6), st.integers(999_998, 1_000_003), st.integers(0, 10**20)
).map("[Doc_{}]".format)


@given(st.lists(st.lists(hostile_labels | block_texts).map("".join)), st.integers(0, 5))
def test_next_ordinals_ascend_and_collide_with_no_label_in_the_history(contents, number):
    ordinals = next_ordinals(number, *contents)
    assert ordinals == sorted(set(ordinals))
    assert len(ordinals) == number
    for ordinal in ordinals:
        assert ordinal >= 1
        assert f"[Doc_{ordinal}]" not in "\x00".join(contents)


def remember(conversations, *conversation_ids):
    for conversation_id in conversation_ids:
        conversations.remember(conversation_id, [(1, A)], END, None)


def known(conversations, conversation_ids):
    return [
        one for one in conversation_ids if found(conversations, turn({1: A}), conversation_id=one)
    ]


def test_the_least_recently_used_conversation_is_forgotten_first():
    conversations = Conversations(max_conversations=3)
    remember(conversations, "a", "b", "c", "a", "d")
    assert len(conversations) == 3
    assert known(conversations, "abcd") == ["a", "c", "d"]


def test_a_conversation_that_was_idle_for_too_long_is_forgotten():
    conversations = Conversations(max_idle=2)
    remember(conversations, "a", "b", "b")
    assert known(conversations, "ab") == ["a", "b"]
    remember(conversations, "b")
    assert known(conversations, "ab") == ["b"]
    assert len(conversations) == 1


def test_the_oldest_blocks_of_a_conversation_are_forgotten_first():
    other = ContextBlock(id="c", text="Bern")
    conversations = sent_in({1: A}, {2: B}, {1: A, 3: other}, max_blocks=2)
    shown = turn({1: A, 2: B, 3: other})
    assert found(conversations, shown) == {"[Doc_1]": "a", "[Doc_3]": "c"}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=30),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 5),
)
def test_records_stay_within_their_bounds(requests, max_conversations, max_idle, max_blocks):
    conversations = Conversations(max_conversations, max_idle, max_blocks)
    for conversation_id, number in requests:
        sent = [(n, ContextBlock(id=n, text=str(n))) for n in range(1, number + 1)]
        conversations.remember(conversation_id, sent, END, None)
        assert 1 <= len(conversations) <= min(max_conversations, max_idle + 1)
        everything = turn(dict(sent))
        shown = found(conversations, everything, conversation_id=conversation_id)
        assert len(shown) == min(number, max_blocks)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.dictionaries(st.integers(1, 4), st.integers(0, 3))),
        max_size=20,
    ),
    st.integers(0, 4),
)
def test_the_sizes_of_the_ids_are_those_of_what_is_recorded(requests, max_blocks):
    conversations = Conversations(2, max_blocks=max_blocks)
    for conversation_id, numbers in requests:
        sent = [(n, ContextBlock(id="x" * 64 * number, text="")) for n, number in numbers.items()]
        conversations.remember(conversation_id, sent, END, None)
    recorded = [one for name in range(3) for one in conversations.recorded(name).values()]
    assert conversations.shown_size == sum(
        id_size(one.id) for some in recorded for one in some.values()
    )
    for name in range(3):
        conversations.forget(name)
    assert conversations.shown_size == 0


def test_a_turn_takes_the_same_work_however_many_blocks_were_shown_before():
    def turn_after(blocks):
        sent = {n: ContextBlock(id=n, text="") for n in range(blocks)}
        conversations = sent_in(sent)
        return lambda: conversations.remember("c", [(blocks, A)], END, None)

    assert steps(turn_after(1_000)) == steps(turn_after(10))


def test_a_turn_continues_where_its_conversation_last_ended_under_the_same_system_text():
    conversations = Conversations()
    first, second = 1, 2
    conversations.remember("c", [], first, "system")
    assert conversations.end_of("c", "system") == first
    assert conversations.end_of("c", None) is None
    assert conversations.end_of("other", "system") is None
    assert conversations.end_of(None, "system") is None
    conversations.remember("c", [], second, None)
    assert conversations.end_of("c", None) == second


def retried(times, unit="\n[Doc_1] "):
    """Return records of a first turn that was sent again and again, a unit longer each time."""
    return sent_in(
        *({1: ContextBlock(id=n, text="x" * (len(unit) * n))} for n in range(1, times + 1))
    )


def test_the_characters_that_are_hashed_are_bounded_by_the_history(monkeypatch):
    hashed = []

    def counted(text):
        hashed.append(len(text))
        return text_digest(text)

    monkeypatch.setattr(module, "text_digest", counted)
    conversations, text = retried(500), ("\n[Doc_1] " * 2_000).strip()
    history = conversations.read("c", [user(text)], DEFAULT_TEMPLATES)
    assert history.is_cut_short
    assert dict(history.labels) == {}
    assert sum(hashed) <= (1 << 20) + 16 * len(text)


def test_a_block_among_its_retries_is_found():
    conversations = retried(300)
    text = "x" * (9 * 120)
    history = conversations.read("c", [user(f"[Doc_1] {text}\n\nWhy?")], DEFAULT_TEMPLATES)
    assert dict(history.labels) == {"[Doc_1]": 120}
    assert not history.is_cut_short


@given(st.lists(st.sampled_from(["a", "a\n", "\n\n", "[Doc_1] ", "[Doc_2] "]), max_size=12))
def test_a_search_that_is_cut_short_finds_no_other_blocks(pieces):
    text = "[Doc_1] " + "".join(pieces)
    blocks = [ContextBlock(id=n, text="a\n" * n + "a") for n in range(4)]
    conversations = sent_in(*({1: one, 2: blocks[0]} for one in blocks))
    whole = conversations.read("c", [user(text)], DEFAULT_TEMPLATES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LEAST_WORK", 0)
        patch.setattr(module, "_WORK_A_CHARACTER", 1)
        cut = conversations.read("c", [user(text)], DEFAULT_TEMPLATES)
    assert cut.labels.items() <= whole.labels.items()
    assert cut.used == whole.used


@pytest.mark.parametrize("is_own", [True, False])
def test_each_message_is_read_once(monkeypatch, is_own):
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
    assert len(read) == 2 * 29


def block(number):
    return ContextBlock(id=number, text=f"Text {number}. " * 9, tokens=100)
