"""Atomic retrievers: functions, keyword search, and the fusion of several."""

import asyncio
import functools
import sys
import threading

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock
from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.workflow.errors import WorkflowError
from ctxreuse.workflow.retrievers import (
    CallableRetriever,
    FusedRetriever,
    KeywordRetriever,
    Retriever,
    RetrieverError,
    checked_retriever,
    reciprocal_rank_fusion,
)

BLOCKS = {letter: ContextBlock(id=letter, text=f"text {letter}") for letter in "abcdefgh"}


def blocks(letters):
    return [BLOCKS[letter] for letter in letters]


def word(found):
    return "".join(str(block.id) for block in found)


class Given:
    """Finds what it is told to, as many as are asked for; remembers what it was asked."""

    def __init__(self, letters, before=None):
        self.letters = letters
        self.asked = []
        self.before = before

    async def retrieve(self, query, k):
        self.asked.append((query, k))
        if self.before is not None:
            await self.before()
        return blocks(self.letters)[:k]


async def test_a_function_runs_in_a_thread_and_an_async_one_in_the_event_loop():
    where = []

    def plain(query, k):
        where.append(threading.current_thread())
        return blocks("ab")

    async def asynchronous(query, k):
        return plain(query, k)

    for search in (plain, asynchronous):
        assert await CallableRetriever(search).retrieve("Which?", 5) == tuple(blocks("ab"))
    main = threading.current_thread()
    assert [thread is main for thread in where] == [False, True]


async def test_objects_partials_and_lambdas_around_async_functions_are_awaited():
    async def search(query, k, letters="ab"):
        return blocks(letters)

    class Searcher:
        async def __call__(self, query, k):
            return blocks("cd")

    for one, found in (
        (functools.partial(search, letters="ef"), "ef"),
        (Searcher(), "cd"),
        (Searcher().__call__, "cd"),
        (lambda query, k: search(query, k), "ab"),
    ):
        assert word(await CallableRetriever(one).retrieve("Which?", 5)) == found


async def test_a_function_may_return_texts_and_raise():
    retriever = CallableRetriever(lambda query, k: ["one", BLOCKS["a"], "two"])
    assert await retriever.retrieve("Which?", 2) == (ContextBlock(text="one"), BLOCKS["a"])
    assert len(await retriever.retrieve("Which?", 9)) == 3
    assert await CallableRetriever(lambda query, k: ()).retrieve("Which?", 2) == ()

    def fail(query, k):
        raise LookupError("the store is down")

    with pytest.raises(LookupError, match="the store is down"):
        await CallableRetriever(fail).retrieve("Which?", 2)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("secret", "search must return a list of ContextBlock or str, not str"),
        (None, "search must return a list of ContextBlock or str, not NoneType"),
        ({"a": 1}, "search must return a list of ContextBlock or str, not dict"),
        (["a", 3], "search must return a list of ContextBlock or str, not one with int in it"),
    ],
)
async def test_something_else_is_refused_without_its_text(found, message):
    with pytest.raises(InvalidRequestError) as caught:
        await CallableRetriever(lambda query, k: found).retrieve("Which?", 2)
    assert str(caught.value) == message


def test_what_is_no_retriever_is_refused_with_the_remedy():
    class Blocking:
        def retrieve(self, query, k):
            return []

    good = Given("ab")
    assert isinstance(good, Retriever)
    assert checked_retriever(good) is good
    with pytest.raises(InvalidRequestError, match="search must be a function of a query and k"):
        CallableRetriever("text")
    for wrong in (None, lambda query, k: [], Given):
        with pytest.raises(InvalidRequestError, match="wrap a function in CallableRetriever"):
            checked_retriever(wrong)
    with pytest.raises(InvalidRequestError, match=r"must be an async function; wrap it: Callable"):
        checked_retriever(Blocking())


CORPUS = [
    "Paris is the capital of France.",
    "Rome is the capital of Italy.",
    "The river Seine flows through Paris, and Paris is large.",
    "Cats hunt mice.",
]


async def found_texts(retriever, query, k=9):
    return [block.text for block in await retriever.retrieve(query, k)]


async def test_keyword_search_finds_blocks_that_share_words_best_first_and_each_once():
    retriever = KeywordRetriever(CORPUS)
    assert await found_texts(retriever, "Which capital is Rome?") == [CORPUS[1], CORPUS[0]]
    assert await found_texts(retriever, "Paris", 1) == [CORPUS[2]]
    assert await found_texts(retriever, "dogs") == []
    assert await found_texts(retriever, "the of") == []
    assert await found_texts(retriever, "") == []
    assert await found_texts(retriever, "paris", 0) == []
    first, second = BLOCKS["a"], ContextBlock(id=7, text="another text", tokens=3)
    found = await KeywordRetriever([first, second, first]).retrieve("text", 5)
    assert sorted(map(id, found)) == sorted(map(id, (first, second)))
    retriever = KeywordRetriever([f"word{n} text" for n in range(50)])
    found = await asyncio.gather(*(found_texts(retriever, f"word{n}", 1) for n in range(50)))
    assert found == [[f"word{n} text"] for n in range(50)]


async def test_equally_good_blocks_come_in_the_order_of_the_corpus():
    same = [ContextBlock(id=number, text="cats and dogs") for number in range(30)]
    better = ContextBlock(id="best", text="dogs dogs dogs")
    retriever = KeywordRetriever([*same, better])
    for k in (1, 2, 7, 31, 50):
        found = await retriever.retrieve("dogs", k)
        assert [block.id for block in found] == ["best", *range(30)][:k]


async def test_scores_are_those_of_bm25s():
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(CORPUS, show_progress=False), show_progress=False)
    query = bm25s.tokenize(["capital Paris river"], show_progress=False)
    expected, _ = index.retrieve(query, k=3, corpus=CORPUS, show_progress=False)
    found = await found_texts(KeywordRetriever(CORPUS), "capital Paris river")
    assert found == list(expected[0])


async def test_stopwords_and_stems_are_the_users_choice():
    def without_s(words):
        return [one.removesuffix("s") for one in words]

    plain = KeywordRetriever(CORPUS, stopwords=None)
    assert CORPUS[3] not in await found_texts(plain, "is the cat large")
    assert await found_texts(plain, "the") != []
    assert await found_texts(KeywordRetriever(CORPUS, stopwords=iter(["paris"])), "Paris") == []
    assert await found_texts(KeywordRetriever(CORPUS, stemmer=without_s), "cat") == [CORPUS[3]]


def test_bm25s_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingExtraError, match=r"KeywordRetriever needs .*\[workflow\]"):
        KeywordRetriever(CORPUS)


@pytest.mark.parametrize(
    ("rankings", "fused"),
    [
        ([""], ""),
        (["abc", "abc"], "abc"),
        (["ab", "bc"], "bac"),  # b: 1/62 + 1/61; a: 1/61; c: 1/62
        (["ab", "cd"], "acbd"),  # ties: the better rank, then the earlier ranking
        (["abc", "cba"], "acb"),  # 1/61 + 1/63 > 2/62
        (["abcd", "dabc", "cdab"], "adcb"),
        (["aab", "ba"], "ab"),  # the first place counts
    ],
)
def test_rankings_are_fused_by_rank(rankings, fused):
    assert word(reciprocal_rank_fusion([blocks(one) for one in rankings])) == fused


def test_one_id_with_two_texts_is_two_blocks():
    old, new = ContextBlock(id=1, text="old"), ContextBlock(id=1, text="new")
    assert reciprocal_rank_fusion([[old], [new]]) == (old, new)


words = st.lists(st.sampled_from("abcdefgh"), unique=True).map("".join)


@examples(100)
@given(st.lists(words, max_size=5), st.randoms())
def test_fusion_returns_each_block_once_best_first_whatever_the_rankings_order(rankings, random):
    fused = word(reciprocal_rank_fusion([blocks(one) for one in rankings]))
    assert sorted(fused) == sorted(set("".join(rankings)))

    def score(letter):
        return sum(1 / (61 + one.index(letter)) for one in rankings if letter in one)

    scores = [score(letter) for letter in fused]
    assert scores == pytest.approx(sorted(scores, reverse=True))
    shuffled = random.sample(rankings, len(rankings))
    again = word(reciprocal_rank_fusion([blocks(one) for one in shuffled]))
    assert [round(score(letter), 9) for letter in again] == [round(one, 9) for one in scores]


async def test_several_retrievers_are_asked_side_by_side_and_fused():
    meeting = asyncio.Barrier(2)
    dense, keyword = Given("abcd", meeting.wait), Given("cbef", meeting.wait)
    retriever = FusedRetriever({"dense": dense, "keyword": keyword})
    assert word(await retriever.retrieve("Which?", 2)) == "cb"  # 1/63 + 1/61 > 2/62
    assert dense.asked == keyword.asked == [("Which?", 4)]
    assert checked_retriever(retriever) is retriever


def waiting(ended):
    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    return wait


async def test_one_that_fails_fails_the_stage_by_name_and_the_others_are_cancelled():
    ended = []

    async def fails():
        await asyncio.sleep(0)
        raise LookupError("secret")

    dense, keyword = Given("ab", waiting(ended)), Given("ab", fails)
    retriever = FusedRetriever({"dense": dense, "keyword": keyword})
    with pytest.raises(RetrieverError) as caught:
        await retriever.retrieve("Which?", 2)
    assert str(caught.value).startswith("retriever 'keyword' failed with LookupError; its error")
    assert isinstance(caught.value, WorkflowError)
    assert isinstance(caught.value.__cause__, LookupError)
    assert ended == ["ended"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_when_all_fail_the_first_is_named_and_wrong_results_are_a_failure():
    async def wrong(query, k):
        return "text"

    class Wrong:
        retrieve = staticmethod(wrong)

    with pytest.raises(RetrieverError, match="retriever 'a' failed with InvalidRequestError"):
        await FusedRetriever({"a": Wrong(), "b": Wrong()}).retrieve("Which?", 2)


async def test_a_cancelled_stage_cancels_all_retrievers():
    ended = []
    waits = waiting(ended)
    retriever = FusedRetriever({name: Given("ab", waits) for name in "ab"})
    task = asyncio.create_task(retriever.retrieve("Which?", 2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["ended"] * 2
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("retrievers", "message"),
    [
        ({}, "retrievers must be a dict from names to retrievers"),
        ([Given("a")], "retrievers must be a dict from names to retrievers"),
        ({"dense": 3}, "retriever 'dense' must have retrieve"),
    ],
)
def test_wrong_retrievers_are_refused(retrievers, message):
    with pytest.raises(InvalidRequestError, match=message):
        FusedRetriever(retrievers)


NO_WORDS = "has a word that counts; give blocks with text, or fewer stopwords"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"blocks": "one text"}, "blocks must be a list .* a single text goes into a list of one"),
        ({"blocks": []}, f"none of the 0 blocks {NO_WORDS}"),
        ({"blocks": ["", "the of"]}, f"none of the 2 blocks {NO_WORDS}"),
        ({"stopwords": True}, "stopwords must be the name of a language"),
        ({"stopwords": [7]}, "stopwords must be the name of a language"),
        ({"stopwords": "klingon"}, "bm25s knows no stopwords 'klingon'"),
        ({"stemmer": 0.5}, "stemmer must be a function"),
    ],
)
def test_keyword_search_refuses_what_bm25s_cannot_take(wrong, problem):
    with pytest.raises(InvalidRequestError, match=problem):
        KeywordRetriever(**{"blocks": ["one", "two"], **wrong})
