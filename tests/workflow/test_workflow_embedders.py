"""Embedders: static, TF-IDF with SVD, sentence-transformers (its interface), LangChain's."""

import sys

import numpy as np
import pytest
from python_processes import python

from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.workflow.models import embedders
from ctxreuse.workflow.models.embedders import (
    Embedder,
    LangChainEmbedder,
    TfidfEmbedder,
    WordLlamaEmbedder,
    checked_embedder,
)

TEXTS = [
    "Paris is the capital of France.",
    "Rome is the capital of Italy.",
    "The river Seine flows through Paris.",
    "The Tiber flows through Rome.",
    "Cats hunt mice, and dogs hunt cats.",
]


def nearest(embedder, query):
    scores = embedder.embed([query]) @ embedder.embed(TEXTS).T
    return TEXTS[int(scores.argmax())]


@pytest.fixture(scope="module")
def words():
    return WordLlamaEmbedder()


def test_its_vectors_are_those_of_the_package_whose_weights_it_reads(words):
    # first numbers of WordLlama.load().embed(["river in Paris", "The Seine"], norm=True)
    vectors = words.embed(["river in Paris", "The Seine"])
    assert (vectors.shape, vectors.dtype, words.dimension) == ((2, 256), np.float32, 256)
    expected = [[0.01175603, -0.01331524, -0.06775159], [-0.07613108, 0.00484399, -0.08685172]]
    np.testing.assert_allclose(vectors[:, :3], expected, atol=1e-6)
    np.testing.assert_array_equal(words.embed(["The Seine"]), vectors[1:])


def test_vectors_do_not_depend_on_other_texts_and_have_length_1_but_for_none(words):
    texts = [*TEXTS, "", "Seine " * 1000]
    np.testing.assert_array_equal(
        words.embed(texts), np.concatenate([words.embed([text]) for text in texts])
    )
    vectors = words.embed(["\ud800", "\x00", "日本", "x" * 100_000, ""])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 1, 1, 0], atol=1e-6)
    assert words.embed([]).shape == (0, 256)
    assert nearest(words, "Which stream runs by the Louvre?") == TEXTS[2]
    assert nearest(words, "pets") == TEXTS[4]


STATIC = """
import logging, socket, sys
from ctxreuse.workflow import WordLlamaEmbedder

def refuse(*_): raise OSError("no network")

socket.socket.connect = socket.getaddrinfo = refuse

WordLlamaEmbedder().embed(["The Seine"])
print("wordllama" in sys.modules, logging.getLogger().handlers)
"""


def test_it_reads_weights_alone_and_asks_no_network(tmp_path):
    done = python(STATIC, HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == ("False []\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["wordllama", "safetensors.numpy", "tokenizers"])
def test_each_package_of_static_embeddings_may_be_missing(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    find_spec = embedders.find_spec
    monkeypatch.setattr(
        embedders, "find_spec", lambda name: None if name == module else find_spec(name)
    )
    with pytest.raises(MissingExtraError, match=r"WordLlamaEmbedder needs .*\[embeddings\]"):
        WordLlamaEmbedder()


def test_a_query_is_nearest_to_its_text_and_there_are_no_more_dimensions_than_words_or_texts():
    embedder = TfidfEmbedder(TEXTS, dimensions=4)
    assert nearest(embedder, "Which river flows through Paris?") == TEXTS[2]
    assert nearest(embedder, "What do dogs hunt?") == TEXTS[4]
    assert TfidfEmbedder(TEXTS, 256).dimension == 5
    assert TfidfEmbedder(["cats", "dogs", "cats dogs"], 256).dimension == 2
    assert TfidfEmbedder(["cats dogs"], 256).embed(["birds"]).tolist() == [[0.0]]
    assert TfidfEmbedder(TEXTS, 3).embed([]).shape == (0, 3)


def test_vectors_are_those_of_scikit_learns_own_pipeline_and_zero_for_unknown_words():
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer

    pipeline = make_pipeline(
        TfidfVectorizer(sublinear_tf=True, stop_words="english"),
        TruncatedSVD(4, random_state=0),
        Normalizer(),
    )
    expected = pipeline.fit_transform(TEXTS)
    vectors = TfidfEmbedder(TEXTS, 4).embed([*TEXTS, "", "Unknown words."])
    np.testing.assert_allclose(vectors, [*expected, [0] * 4, [0] * 4], atol=1e-5)
    assert (vectors.dtype, vectors.flags.c_contiguous) == (np.float32, True)


FEW = [[], [""], ["the of and"], ["cats", "the cats"]]
NO_TEXTS = ["one text", b"bytes", [1], [None]]


@pytest.mark.parametrize(
    ("arguments", "embedded", "message"),
    [((few,), [], f"the {len(few)} texts have fewer than 2") for few in FEW]
    + [((TEXTS,), wrong, "texts must be a list of str, not") for wrong in NO_TEXTS]
    + [((TEXTS, wrong), [], "dimensions must be an integer from 1") for wrong in (0, 1.5, None)],
)
def test_texts_and_dimensions_that_will_not_do_are_refused(arguments, embedded, message):
    with pytest.raises(InvalidRequestError, match=message):
        TfidfEmbedder(*arguments).embed(embedded)


def test_scikit_learn_may_be_missing(monkeypatch):
    for name in [one for one in sys.modules if one.startswith("sklearn")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    with pytest.raises(MissingExtraError, match=r"TfidfEmbedder needs .*\[workflow\]"):
        TfidfEmbedder(TEXTS)


class Letters:
    def embed_query(self, text):
        return [float(text.count(letter)) for letter in "abc"]


def test_langchain_embeddings_are_asked_for_queries():
    embedder = LangChainEmbedder(Letters())
    assert embedder.dimension == 3
    queries = embedder.embed(["abba", "c"])
    assert (queries.tolist(), queries.dtype) == ([[2, 2, 0], [0, 0, 1]], np.float32)
    assert embedder.embed([]).shape == (0, 3)

    from langchain_core.embeddings import DeterministicFakeEmbedding

    fake = DeterministicFakeEmbedding(size=4)
    vectors = LangChainEmbedder(fake).embed(["one", "two"])
    expected = [fake.embed_query("one"), fake.embed_query("two")]
    np.testing.assert_array_equal(vectors, np.array(expected, np.float32))


def test_a_dimension_that_is_given_is_not_asked_for():
    class Asked(Letters):
        def embed_query(self, text):
            raise LookupError("asked")

    embedder = LangChainEmbedder(Asked(), dimension=3)
    assert embedder.dimension == 3
    with pytest.raises(LookupError, match="asked"):
        embedder.embed(["text"])


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([1.0, 2.0], r"embed_query must return shape \(2, 3\), not \(2, 2\)"),
        ([[1.0] * 3], r"embed_query must return shape \(2, 3\), not \(2, 1, 3\)"),
        (["a", "b", "c"], "embed_query must return vectors of equal length, not list"),
        (None, "embed_query must return"),
        ([float("nan")] * 3, "embed_query returned numbers that are not finite"),
    ],
)
def test_wrong_vectors_are_refused(vectors, message):
    class Wrong(Letters):
        def embed_query(self, text):
            return vectors

    with pytest.raises(InvalidRequestError, match=message):
        LangChainEmbedder(Wrong(), dimension=3).embed(["text", "another"])


@pytest.mark.parametrize("embeddings", [None, object(), Letters])
def test_what_is_no_embeddings_is_refused(embeddings):
    with pytest.raises(InvalidRequestError, match=r"must be LangChain Embeddings with embed_query"):
        LangChainEmbedder(embeddings)


def test_all_are_embedders_and_other_things_are_not():
    for embedder in (WordLlamaEmbedder(), TfidfEmbedder(TEXTS), LangChainEmbedder(Letters())):
        assert isinstance(embedder, Embedder)
        assert checked_embedder(embedder) is embedder
    for wrong in (None, "name", TfidfEmbedder):
        with pytest.raises(InvalidRequestError, match="embedder must have dimension and embed"):
            checked_embedder(wrong)
