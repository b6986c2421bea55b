import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from kv_event_helpers import TellingCache, held_tokens

from ctxreuse.cache.kv_events import block_tree
from ctxreuse.cache.kv_events.engine_blocks import EngineBlocks
from ctxreuse.cache.kv_events.event_stream import BlocksStored


@pytest.fixture
def blocks():
    return EngineBlocks()


def put(blocks, *event, **fields):
    return blocks.stored(BlocksStored(*event, **fields))


def told(blocks, events):
    for event in events:
        if event["type"] == "BlockStored":
            extra = event["extra_keys"]
            assert put(
                blocks,
                event["block_hashes"],
                event["parent_block_hash"],
                event["token_ids"],
                event["block_size"],
                extra and [None if keys is None else tuple(keys) for keys in extra],
                event["group_idx"],
            )
        elif event["type"] == "BlockRemoved":
            blocks.removed(event["block_hashes"], event["group_idx"])
        else:
            blocks.cleared()
    return blocks


def stored(blocks, hashes, parent, tokens, **fields):
    """Store blocks of two tokens; hashes and tokens are letters."""
    names = [name.encode() for name in hashes]
    above = None if parent is None else parent.encode()
    return put(blocks, names, above, [ord(letter) for letter in tokens], 2, **fields)


def removed(blocks, hashes, **fields):
    blocks.removed([name.encode() for name in hashes], **fields)


def held(blocks, tokens, **fields):
    return held_tokens(blocks, [ord(letter) for letter in tokens], **fields)


def follow(blocks, name, tokens, **fields):
    return blocks.follow(name, [ord(letter) for letter in tokens], **fields)


def check(blocks):
    """Check that children, parents, starts, followed names and implied blocks agree."""
    for tree in blocks._trees.values():
        for parent, children in tree._children.items():
            assert children
            for link, key in children.items():
                assert (tree._blocks[key].parent, tree._blocks[key].link) == (parent, link)
        for key, block in tree._blocks.items():
            assert tree._children[block.parent][block.link] == key
            assert block.copies >= 1
            assert all(tree._ends[name] == key for name in block.names)
        for name, end in tree._ends.items():
            tokens = 0
            while end is not None:
                block = tree._blocks[end]
                assert name in block.names or tokens
                tokens += tree.size
                end = block.parent
            assert tree.held_by(name) == tokens
        implied = {key for key in tree._blocks if type(key).__name__ == "_Implied"}
        assert set(tree._implied) == implied
        assert not set(tree._unknown_parents) & set(tree._blocks)


def test_salts_and_adapters_are_kept_apart(blocks):
    stored(blocks, "ab", None, "aabb", extra_keys=[("s",), None])
    stored(blocks, "cd", None, "aacc", extra_keys=[("lora",), ("lora",)])
    stored(blocks, "e", None, "aa", extra_keys=[("lora", "s")])
    stored(blocks, "f", "e", "dd", extra_keys=[("lora",)])
    stored(blocks, "g", None, "aa")
    assert held(blocks, "aabb", cache_salt="s") == 4
    assert held(blocks, "aabb", cache_salt="t") == 0
    assert held(blocks, "aabb") == 2
    assert held(blocks, "aacc", lora="lora") == 4
    assert held(blocks, "aadd", lora="lora", cache_salt="s") == 4
    assert held(blocks, "aadd", lora="lora") == 2


def test_an_engine_that_names_no_salts_is_not_asked_about_them(blocks):
    stored(blocks, "x", None, "aa")
    assert held(blocks, "aa", cache_salt="s") == 2


def test_followed_prompts_are_told_when_less_of_them_is_held(blocks):
    stored(blocks, "xyz", None, "aabbcc")
    stored(blocks, "w", "y", "dd")
    names = {"p": "aabbcc", "q": "aabbdd", "r": "aaee", "s": "ff"}
    assert [follow(blocks, name, tokens) for name, tokens in names.items()] == [6, 6, 2, 0]
    assert blocks.take_lowered() == {}
    removed(blocks, "z")
    assert blocks.take_lowered() == {"p": 4}
    removed(blocks, "y")
    assert blocks.take_lowered() == {"p": 2, "q": 2}
    blocks.unfollow("q")
    stored(blocks, "y", "x", "bb")  # more is held again: that is nobody's loss
    assert blocks.take_lowered() == {}
    check(blocks)
    blocks.cleared()
    assert blocks.take_lowered() == {"p": 0, "r": 0, "s": 0}
    check(blocks)


def test_any_unknown_removal_takes_away_what_was_only_implied(blocks):
    stored(blocks, "yz", "unknown", "ccdd")
    follow(blocks, "p", "aabbccdd")
    removed(blocks, "?")
    assert blocks.take_lowered() == {"p": 0}
    assert held(blocks, "aabbccdd") == 0
    check(blocks)
    stored(blocks, "w", "z", "ee")  # built upon again, so all of it stands there
    assert follow(blocks, "p", "aabbccddee") == 10
    check(blocks)


def test_an_unknown_removal_before_the_prompt_is_known_leaves_nothing_to_imply(blocks):
    stored(blocks, "yz", "unknown", "ccdd")
    removed(blocks, "?")
    assert follow(blocks, "p", "aabbccdd") == 0


def test_nothing_is_implied_by_a_prompt_that_goes_on_otherwise_or_in_two_ways(blocks):
    stored(blocks, "y", "unknown", "cc")
    assert follow(blocks, "p", "aabbccdd") == 0  # its last block was not stored there
    stored(blocks, "z", "another", "cc")
    assert follow(blocks, "q", "aabbcc") == 0  # below which of the two?
    check(blocks)


def test_implied_blocks_become_known_when_they_are_told(blocks):
    stored(blocks, "z", "unknown", "cc")
    follow(blocks, "p", "aabbcc")
    assert stored(blocks, ["x", "unknown", "z"], None, "aabbcc")
    check(blocks)
    removed(blocks, "?")
    assert (held(blocks, "aabbcc"), blocks.take_lowered()) == (6, {})
    removed(blocks, "x")
    assert blocks.take_lowered() == {"p": 0}
    check(blocks)


def test_the_hash_of_an_implied_block_is_learned_from_what_is_built_upon_it(blocks):
    stored(blocks, "z", "third", "dd")
    follow(blocks, "p", "aabbccdd")
    stored(blocks, "w", "second", "ee")  # the engine built another prompt on a block before
    assert follow(blocks, "q", "aabbee") == 6
    check(blocks)
    removed(blocks, ["second"])
    assert held(blocks, "aabbee") == 2
    check(blocks)


def test_implied_blocks_count_among_those_remembered():
    blocks = EngineBlocks(max_blocks=3)
    stored(blocks, "z", "unknown", "dd")
    assert follow(blocks, "p", "aabbccdd") == 6  # the oldest block, "z", had to go
    assert len(blocks) == 3
    check(blocks)


def test_only_so_many_unknown_parents_are_remembered_the_latest(monkeypatch):
    monkeypatch.setattr(block_tree, "_UNKNOWN_PARENTS", 2)
    blocks = EngineBlocks()
    for parent, tokens in (("u", "bb"), ("v", "cc"), ("u", "dd"), ("w", "ee")):
        stored(blocks, [tokens], parent, tokens)
    assert [follow(blocks, word, word) for word in ("11bb", "22cc", "33ee")] == [4, 0, 4]
    check(blocks)


def test_a_cleared_cache_implies_nothing(blocks):
    stored(blocks, "z", "unknown", "cc")
    follow(blocks, "p", "aabbcc")
    stored(blocks, "y", "another", "dd")
    blocks.cleared()
    check(blocks)
    removed(blocks, "?")
    assert follow(blocks, "q", "aadd") == 0
    assert blocks.take_lowered() == {"p": 0}


def test_a_groups_blocks_are_of_one_size_until_it_holds_none(blocks):
    assert put(blocks, [b"x", b"y"], None, [1, 2, 3, 4], 2)
    assert not put(blocks, [b"w"], b"y", [7], 1)
    assert (held_tokens(blocks, [1, 2, 3, 4, 7]), blocks.block_size) == (4, 2)
    blocks.cleared()
    assert put(blocks, [b"z"], None, [1, 2, 3, 4, 5, 6], 6)
    assert (held_tokens(blocks, [1, 2, 3, 4, 5, 6, 7]), blocks.block_size) == (6, 6)


def test_groups_of_layers_must_all_hold_a_prompt(blocks):
    stored(blocks, "xy", None, "aabb", group=0)
    stored(blocks, "xy", None, "aabb", group=1)
    follow(blocks, "p", "aabb")
    removed(blocks, "y", group=1)
    assert (held(blocks, "aabb"), blocks.take_lowered()) == (2, {"p": 2})
    assert follow(blocks, "q", "aabb") == 2
    removed(blocks, "y", group=7)
    assert not stored(blocks, "z", None, "", group=1)  # no engine says so
    assert held(blocks, "aabb") == 2


def test_a_prompt_is_held_where_the_layers_that_keep_states_can_go_on(blocks):
    stored(blocks, "wxyz", None, "aabbccdd")
    assert held(blocks, "aabbccdd") == 8
    # a window of three tokens: two blocks in a row, or all from the beginning on
    assert stored(blocks, "yz", None, "aabbccdd", group=1, whole_prompts=False, window=4)
    assert [held(blocks, tokens) for tokens in ("aabbccdd", "aabbcc", "aabb")] == [8, 0, 0]
    stored(blocks, "x", "w", "bb", group=1, whole_prompts=False, window=4)
    assert [held(blocks, tokens) for tokens in ("aabbccdd", "aabbcc", "aabb")] == [8, 6, 0]
    stored(blocks, "w", None, "aa", group=1, whole_prompts=False, window=4)
    assert [held(blocks, tokens) for tokens in ("aabbcc", "aabb", "aa")] == [6, 4, 2]
    # a recurrent layer with larger blocks: one state is enough
    stored(blocks, "x", None, "aabb", group=2, whole_prompts=False)
    assert [held(blocks, tokens) for tokens in ("aabbccdd", "aabb", "aa")] == [4, 4, 0]
    check(blocks)


def test_less_is_held_once_a_state_is_gone_and_its_last_copy_counts(blocks):
    stored(blocks, "wxyz", None, "aabbccdd")
    for _ in range(2):
        stored(blocks, "xz", "v", "aabbccdd", group=1, whole_prompts=False)
    assert [follow(blocks, "p", "aabbccdd"), follow(blocks, "q", "aabb")] == [8, 4]
    removed(blocks, "z", group=1)
    assert (blocks.take_lowered(), held(blocks, "aabbccdd")) == ({}, 8)
    removed(blocks, "z", group=1)
    assert (blocks.take_lowered(), held(blocks, "aabbccdd")) == ({"p": 4}, 4)
    removed(blocks, "x", group=1)
    removed(blocks, "x", group=1)
    assert blocks.take_lowered()["q"] == 0
    blocks.cleared()
    assert len(blocks) == 0


def test_states_are_bounded_the_oldest_go_first():
    blocks = EngineBlocks(max_blocks=3)
    stored(blocks, "wx", None, "aabb")
    stored(blocks, "wx", None, "aabb", group=1, whole_prompts=False)
    follow(blocks, "p", "aabb")
    stored(blocks, "yz", None, "ccddee", group=1, whole_prompts=False)
    assert held(blocks, "aabb") == 4
    stored(blocks, "v", None, "ff", group=1, whole_prompts=False)
    assert (blocks.take_lowered(), held(blocks, "aabb")) == ({"p": 0}, 0)


def test_blocks_without_tokens_are_refused(blocks):
    assert not put(blocks, [b"x"], None, [], 0)
    assert not put(blocks, [b"x"], None, [1, 2, 3], 2)
    assert not put(blocks, [b"x"], None, [1, 2], 2, [None, None])
    assert held_tokens(blocks, [1, 2]) == 0


def test_only_so_many_groups_are_followed(blocks):
    used = [stored(blocks, "x", None, "aa", group=group) for group in range(70)]
    assert used == [True] * 64 + [False] * 6


hashes = st.sampled_from([b"a", b"b", b"c", b"d", 5])
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("stored"),
            st.lists(hashes, max_size=3),
            st.none() | hashes,
            st.lists(st.integers(0, 1), max_size=6),
        ),
        st.tuples(st.just("removed"), st.lists(hashes, max_size=2)),
        st.tuples(st.just("follow"), st.integers(0, 2), st.lists(st.integers(0, 1), max_size=8)),
        st.tuples(st.just("unfollow"), st.integers(0, 2)),
        st.tuples(st.just("cleared")),
    ),
    max_size=14,
)


@examples(300)
@given(steps, st.integers(1, 5), st.integers(1, 2))
def test_any_events_leave_it_consistent(steps, max_blocks, size):
    blocks = EngineBlocks(max_blocks)
    known = {}
    for step, *arguments in steps:
        if step == "stored":
            put(blocks, *arguments, size)
        elif step == "follow":
            known[arguments[0]] = blocks.follow(*arguments)
            assert known[arguments[0]] == held_tokens(blocks, arguments[1])
        else:
            getattr(blocks, step)(*arguments)
            if step == "unfollow":
                known.pop(arguments[0], None)
        check(blocks)
        assert len(blocks) <= max_blocks
        for name, tokens in blocks.take_lowered().items():
            assert tokens <= known[name]
            known[name] = tokens


ROUTE = ((b"a", 0), (b"b", 1), (b"c", 1), (b"d", 0))
"""The blocks of a prompt, one token each."""
PROMPTS = ((0, 1, 1, 0), (0, 1, 0, 1))
calls = st.lists(
    st.sampled_from(
        [
            *[("store", first, end, False) for first in range(4) for end in (first + 1, 4)],
            *[("store", 0, end, True) for end in (1, 2, 4)],
            *[("remove", bytes((key,))) for key in b"abcdebcdbcdd"],
            *[("follow", name, is_salted) for name in (0, 1) for is_salted in (False, True)],
            *[("go on", 0), ("go on", 1)] * 3,
            *[("tell below", name, tokens) for name in (0, 1) for tokens in (1, 2, 3)] * 2,
        ]
    ),
    min_size=3,
    max_size=12,
)


@examples(500)
@given(calls, st.sampled_from((3, 100)))
def test_who_goes_on_or_asks_for_less_news_is_told_the_same(calls, max_blocks):
    blocks, plain = both = [EngineBlocks(max_blocks) for _ in range(2)]
    salts, below = {}, {}
    for step, *arguments in [("store", 0, 3, False), ("follow", 0, True), *calls]:
        match step, *arguments:
            case "store", first, end, is_salted:
                run = ROUTE[first:end]
                parent = ROUTE[first - 1][0] if first else None
                extra = [("s",), *[None] * 3][: len(run)] if is_salted and not first else None
                keys = [key.upper() if extra else key for key, _ in run]
                for one in both:
                    put(one, keys, parent, [bit for _, bit in run], 1, extra)
            case "remove", key:
                for one in both:
                    one.removed([key])
            case "follow", name, is_salted:
                salts[name], below[name] = "s" if is_salted else None, 9
                held = [one.follow(name, PROMPTS[name], cache_salt=salts[name]) for one in both]
                assert held[0] == held[1]
            case "go on", name if name in salts:
                salt, below[name] = salts[name], 9
                held = blocks.follow(name, PROMPTS[name], cache_salt=salt, goes_on=True)
                assert held == plain.follow(name, PROMPTS[name], cache_salt=salt)
            case "tell below", name, tokens if name in salts:
                blocks.tell_below(name, tokens)
                below[name] = min(below[name], tokens)
        check(blocks)
        lowered = plain.take_lowered().items()
        expected = {name: tokens for name, tokens in lowered if tokens < below[name]}
        assert blocks.take_lowered() == expected
        below |= dict.fromkeys(expected, 9)


documents = st.lists(st.integers(0, 4), max_size=4)


def prompts_of(contexts, size):
    for number, context in enumerate(contexts):
        tokens = [10 * document + offset for document in context for offset in range(7)]
        yield [*tokens, *range(1000 * (number + 1), 1000 * (number + 1) + 2 * size)]


@examples(200)
@given(
    st.lists(documents, max_size=12),
    st.integers(1, 4),
    st.integers(2, 40),
    st.booleans(),
    st.sampled_from((None, "s")),
)
def test_a_listener_from_the_start_knows_what_is_held(contexts, size, capacity, reports, salt):
    engine, blocks = TellingCache(capacity, size, reports=reports), EngineBlocks()
    sent = []
    for prompt in prompts_of(contexts, size):
        sent += [prompt, prompt[: -2 * size]]  # and once without its question
        for tokens in sent[-2:]:
            engine.serve(tokens, salt)
        told(blocks, engine.take_events())
        for tokens in sent:
            assert held_tokens(blocks, tokens, cache_salt=salt) == engine.holds(tokens, salt)
    check(blocks)


@examples(300)
@given(st.lists(documents, max_size=14), st.integers(1, 4), st.integers(2, 40), st.integers(0, 13))
def test_a_late_listener_never_believes_more_than_an_engine_holds(contexts, size, capacity, missed):
    engine, blocks = TellingCache(capacity, size), EngineBlocks()
    sent = []
    for number, tokens in enumerate(prompts_of(contexts, size)):
        engine.serve(tokens)
        events = engine.take_events()
        if number < missed:
            continue
        told(blocks, events)
        sent.append(tokens)
        blocks.follow(number, tokens)
        check(blocks)
        for earlier in sent:
            assert held_tokens(blocks, earlier) <= engine.holds(earlier)


def test_a_late_listener_catches_up_with_an_engine_that_evicts_nothing():
    engine, blocks = TellingCache(1000, 4), EngineBlocks()
    contexts = [[1, 2, 3], [1, 2, 4], [1, 0], [1, 2, 3, 0]]
    for number, tokens in enumerate(prompts_of(contexts, 4)):
        engine.serve(tokens)
        events = engine.take_events()
        if number > 0:
            told(blocks, events)
            assert blocks.follow(number, tokens) == engine.holds(tokens) > 0
