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


@pytest.mark.parametrize("length", [1, 5_000])
def test_long_prompts_and_many_of_them_need_no_deep_recursion(length):
    cache = BlockLevelCache(10_000)
    blocks = [block_key(str(n)) for n in range(length)]
    for end in range(1, length + 1, max(1, length // 50)):
        cache.serve(blocks[:end], [1] * end)
    assert cache.serve(blocks, [1] * length).cached_tokens >= length - length // 50
