import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cache import CacheUsage, PrefixCacheSimulator
from ctxreuse.errors import InvalidRequestError


class ListOfBlocks:
    """The cache that the simulator's docstring describes, written the slow way.

    A queue of block numbers, the next to be taken first; beside it what each block holds: the
    salt and all tokens from the start of the prompt to the block's end.
    """

    def __init__(self, blocks, block_size, states="everywhere"):
        self.size = block_size
        self.states = None if states == "everywhere" else set()
        self.total = blocks
        self.queue = list(range(blocks))
        self.holds = []  # (block number, content), in the order in which they were filled

    def serve(self, tokens, salt="", generated=()):
        computed = tokens + generated[:-1]
        needed = (len(computed) + self.size - 1) // self.size
        if needed > self.total:
            return 0
        hits = []
        for end in range(self.size, len(tokens), self.size):  # the last token is always computed
            copies = [number for number, held in self.holds if held == (salt, tokens[:end])]
            if not copies:
                break
            hits.append(copies[0])
        met = len(hits) * self.size
        while self.states is not None and hits:
            if (salt, tokens[: len(hits) * self.size]) in self.states:
                break
            hits.pop()
        for number in hits:
            self.queue.remove(number)
        blocks = list(hits)
        while len(blocks) < needed:
            number = self.queue.pop(0)
            self.holds = [entry for entry in self.holds if entry[0] != number]
            blocks.append(number)
        if self.states is not None:  # a block's state goes with it, and does not come back
            self.states &= {content for _, content in self.holds}
        full = len(computed) // self.size
        for position in range(len(hits), full):
            content = (salt, computed[: (position + 1) * self.size])
            self.holds.append((blocks[position], content))
        if self.states is not None:
            last = max(0, len(tokens) - 1) // self.size * self.size
            self.states |= {(salt, tokens[:end]) for end in (met, last) if end}
        self.queue = blocks[full:] + self.queue + blocks[:full][::-1]
        return len(hits) * self.size


def served(cache, *prompts):
    return [cache.serve(list(prompt)).cached_tokens for prompt in prompts]


states = st.sampled_from(["everywhere", "junctions"])
prompts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=12),
        st.sampled_from(("", "", "s")),
        st.lists(st.integers(0, 1), max_size=4),
    ),
    max_size=14,
)


@examples(400)
@given(prompts, st.integers(1, 4), st.none() | st.integers(0, 30), st.booleans(), states)
def test_it_serves_what_a_slow_reference_serves(prompts, block_size, capacity, null_block, states):
    cache = PrefixCacheSimulator(capacity, block_size, null_block=null_block, states=states)
    if capacity is None:
        blocks = sum(len(tokens) + len(answer) + 1 for tokens, _, answer in prompts)
    else:
        blocks = max(0, capacity // block_size - null_block)
    reference = ListOfBlocks(blocks, block_size, states)
    for tokens, salt, answer in prompts:
        cached = reference.serve(tuple(tokens), salt, tuple(answer))
        usage = cache.serve(tokens, salt, generated=answer)
        assert usage == CacheUsage(len(tokens), cached)


@examples(200)
@given(
    st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=14),
    st.integers(1, 4),
    st.none() | st.integers(0, 30),
)
def test_prompts_known_by_their_hashes_are_served_as_their_tokens(prompts, block_size, capacity):
    by_tokens = PrefixCacheSimulator(capacity, block_size)
    by_hashes = PrefixCacheSimulator(capacity, block_size)
    for prompt in prompts:
        ends = range(block_size, len(prompt) + 1, block_size)
        hashes = [bytes(prompt[:end]) for end in ends]
        assert by_hashes.serve_hashed(hashes, len(prompt)) == by_tokens.serve(prompt)


@pytest.mark.parametrize(
    ("hashes", "tokens", "problem"),
    [
        ([b"a"], 8, "hashes must be one for each of the 2 full blocks of the prompt, not 1"),
        ([b"a"], 3, "hashes must be one for each of the 0 full blocks of the prompt, not 1"),
        ([1], 4, "each of hashes must be bytes, not 1 (int)"),
        (b"a", 4, "hashes must be a list, each bytes, not b'a' (bytes)"),
        ([], -1, "prompt_tokens must be an integer from 0, not -1 (int)"),
    ],
)
def test_hashes_that_are_no_prompt_are_refused(hashes, tokens, problem):
    with pytest.raises(InvalidRequestError) as caught:
        PrefixCacheSimulator(block_size=4).serve_hashed(hashes, tokens)
    assert str(caught.value) == problem


def test_a_prompt_may_be_any_sequence_of_any_tokens():
    cache = PrefixCacheSimulator(block_size=2)
    assert [cache.serve(p).cached_tokens for p in (range(5), (0, 1, 2), [0, 1, 2, 3, -1])] == [
        0,
        2,
        4,
    ]
    assert cache.serve([2**62, 2**62, 1]) == CacheUsage(3, 0)
    assert cache.serve([2**62, 2**62, 2]) == CacheUsage(3, 2)


def test_blocks_have_16_tokens_unless_told():
    cache = PrefixCacheSimulator()
    assert served(cache, range(40), range(40)) == [0, 32]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer from 1, not 0 (int)"),
        (
            {"capacity_tokens": -1},
            "capacity_tokens must be an integer from 0 or None, not -1 (int)",
        ),
    ],
)
def test_sizes_out_of_range_are_refused(arguments, message):
    with pytest.raises(InvalidRequestError) as caught:
        PrefixCacheSimulator(**arguments)
    assert str(caught.value) == message


def test_usage_adds_up():
    total = CacheUsage(10, 4) + CacheUsage(30, 6)
    assert total == CacheUsage(40, 10)
    assert total - CacheUsage(30, 6) == CacheUsage(10, 4)
    assert (total.prefilled_tokens, total.hit_ratio) == (30, 0.25)
    assert (CacheUsage().prefilled_tokens, CacheUsage().hit_ratio) == (0, 0.0)


def state(cache):
    """Return everything that a cache knows, to see that something left it as it was."""
    copies = {content: list(blocks) for content, blocks in cache._blocks_with.items()}
    return list(cache._free), cache._empty, dict(cache._users), dict(cache._hash_of), copies


def check_blocks(cache, running, blocks):
    """Check that every block is empty, free or held, and held as often as prompts hold it."""
    held = [block for one in running for block in one._held]
    assert cache._users == {block: held.count(block) for block in held}
    assert not cache._free.keys() & cache._users.keys()
    assert len(cache._free) + cache._empty + len(cache._users) == blocks
    assert cache._free.keys() <= cache._hash_of.keys() <= cache._free.keys() | cache._users.keys()
    named = {block: content for content, all_ in cache._blocks_with.items() for block in all_}
    assert named == cache._hash_of


starts_and_finishes = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 5), st.booleans())
    | st.integers(0, 9),
    max_size=30,
)


@examples(100)
@given(starts_and_finishes, st.integers(1, 4), st.integers(0, 12))
def test_what_runs_keeps_its_blocks_until_it_ends_and_then_all_are_free(steps, size, blocks):
    cache = PrefixCacheSimulator(blocks * size, size)
    running = []

    def finish(one):
        held, contents = one._held, [cache._hash_of.get(block) for block in one._held]
        assert contents[: len(one._hashes)] == one._hashes  # nobody took them while it ran
        assert len(held) == len(set(held))
        answered = answers[id(one)]
        cache.finish(one, [1] * answered)

    answers = {}
    for step in steps:
        if isinstance(step, int):
            if running:
                finish(running.pop(step % len(running)))
        else:
            tokens, room, uses_room = step
            before = state(cache)
            one = cache.start(tokens, room_for=room)
            if one is None:
                assert state(cache) == before
            else:
                running.append(one)
                answers[id(one)] = room if uses_room else 0
        check_blocks(cache, running, blocks)
    while running:
        finish(running.pop())
        check_blocks(cache, running, blocks)
    assert len(cache._free) + cache._empty == blocks
    assert cache.start([5] * (blocks * size)) is not None


def test_a_prompt_that_is_aborted_leaves_what_was_computed_of_it():
    for uncomputed, cached in ((0, 8), (1, 6), (2, 6), (3, 4), (8, 0)):
        cache = PrefixCacheSimulator(capacity_tokens=10, block_size=2)
        running = cache.start(range(8))
        cache.finish(running, uncomputed=uncomputed)
        check_blocks(cache, [], 5)
        assert cache.serve(range(9)).cached_tokens == cached


def test_an_aborted_prompt_leaves_the_other_copies_of_its_blocks_alone():
    cache = PrefixCacheSimulator(block_size=2)
    cache.serve(b"abcd")
    running = cache.start(b"abcd")
    assert running.usage.cached_tokens == 2
    cache.finish(running, uncomputed=2)
    assert cache.serve(b"abcde").cached_tokens == 4


def test_a_prompt_fits_if_the_whole_cache_holds_it_with_its_answer():
    cache = PrefixCacheSimulator(capacity_tokens=8, block_size=4)
    assert [cache.fits(tokens) for tokens in (0, 8, 9)] == [True, True, False]
    assert [cache.fits(6, answer) for answer in (0, 3, 4)] == [True, True, False]
    cache.start(range(8))
    assert cache.fits(8)  # not now, but some time
    assert PrefixCacheSimulator().fits(10**9, 10**9)
    assert not PrefixCacheSimulator(0).fits(1)
    assert not PrefixCacheSimulator(8, block_size=4, null_block=True).fits(5)
