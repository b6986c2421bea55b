import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cache import BlockLevelCache, CacheUsage
from ctxreuse.cache.simulator import block_key


class DictOfPrefixes:
    """A prefix tree with one entry a prefix; a prefix is dropped when nothing stands behind it."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.last_use = {}  # (group, *blocks) -> when
        self.now = 0

    def serve(self, blocks, tokens, group):
        self.now += 1
        prefixes = [(group, *blocks[:end]) for end in range(1, len(blocks) + 1)]
        cached = [prefix in self.last_use for prefix in prefixes]
        hits = cached.index(False) if False in cached else len(cached)
        for prefix, weight in zip(prefixes, tokens, strict=True):
            self.last_use[prefix] = (self.now, weight)
        while self.capacity is not None and self.size() > self.capacity:
            parents = {prefix[:-1] for prefix in self.last_use}
            leaves = [prefix for prefix in self.last_use if prefix not in parents]
            del self.last_use[min(leaves, key=self.last_use.__getitem__)]
        return CacheUsage(sum(tokens), sum(tokens[:hits]))

    def size(self):
        return sum(weight for _, weight in self.last_use.values())


WEIGHTS = (0, 1, 2, 5, 9)  # of blocks 0 to 4

prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=5), st.sampled_from((None, None, "s", 1))),
    max_size=25,
)


@examples(400)
@given(prompts, st.none() | st.integers(0, 40))
def test_it_serves_what_a_naive_prefix_tree_serves(prompts, capacity):
    cache, reference = BlockLevelCache(capacity), DictOfPrefixes(capacity)
    for numbers, group in prompts:
        tokens = [WEIGHTS[number] for number in numbers]
        blocks = [block_key(str(number)) for number in numbers]
        assert cache.serve(blocks, tokens, group) == reference.serve(blocks, tokens, group)


def served(cache, *prompts):
    return [cache.serve([block_key(c) for c in p], [1] * len(p)).cached_tokens for p in prompts]


def test_a_block_is_served_if_everything_before_it_is():
    assert served(BlockLevelCache(), "abc", "abd", "bc", "abcd", "", "abdx") == [0, 2, 0, 3, 0, 3]


def test_the_last_blocks_of_the_least_recently_used_prompt_go_first():
    assert served(BlockLevelCache(4), "abc", "xy", "abcd") == [0, 0, 2]
    assert served(BlockLevelCache(6), "abc", "def", "abc", "xy", "abcz", "def") == [
        0,
        0,
        3,
        0,
        3,
        0,
    ]


def test_a_prompt_larger_than_the_cache_leaves_its_beginning():
    assert served(BlockLevelCache(2), "abcd", "abcd", "abx") == [0, 2, 2]


def test_a_cache_for_nothing_serves_nothing():
    assert served(BlockLevelCache(0), "a", "a", "") == [0, 0, 0]


def test_groups_share_nothing():
    cache = BlockLevelCache()
    groups = [None, "", ("t", None), ("t", "s"), None, ("t", "s")]
    assert [cache.serve([block_key("a")], [7], group).cached_tokens for group in groups] == [
        0,
        0,
        0,
        0,
        7,
        7,
    ]


def test_usage_is_counted_in_tokens():
    cache = BlockLevelCache()
    keys = [block_key(name) for name in "abc"]
    assert cache.serve(keys, [5, 0, 20]) == CacheUsage(25, 0)
    assert cache.serve(keys[:2] + keys[:1], [5, 0, 5]) == CacheUsage(10, 5)


@pytest.mark.parametrize("length", [1, 5_000])
def test_long_prompts_and_many_of_them_need_no_deep_recursion(length):
    cache = BlockLevelCache(10_000)
    blocks = [block_key(str(n)) for n in range(length)]
    for end in range(1, length + 1, max(1, length // 50)):
        cache.serve(blocks[:end], [1] * end)
    assert cache.serve(blocks, [1] * length).cached_tokens >= length - length // 50
