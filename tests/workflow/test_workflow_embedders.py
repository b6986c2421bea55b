"""Embedders: static, TF-IDF with SVD, sentence-transformers (its interface), LangChain's."""

import io
import sys
import zipfile
from types import ModuleType

import numpy as np
import pytest
from python_processes import python

from ctxreuse.errors import InputFileError, InvalidRequestError, MissingExtraError
from ctxreuse.workflow.models import embedders
from ctxreuse.workflow.models.embedders import (
    Embedder,
    LangChainEmbedder,
    SentenceTransformerEmbedder,
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
    scores = embedder.embed([query]) @ embedder.embed_passages(TEXTS).T
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
    np.testing.assert_array_equal(words.embed_passages(["The Seine"]), vectors[1:])


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
    with pytest.raises(MissingExtraError, match=r"static embeddings .*\[embeddings\]"):
        WordLlamaEmbedder()


def test_a_query_is_nearest_to_its_text_and_there_are_no_more_dimensions_than_words_or_texts():
    embedder = TfidfEmbedder.fit(TEXTS, dimensions=4)
    assert nearest(embedder, "Which river flows through Paris?") == TEXTS[2]
    assert nearest(embedder, "What do dogs hunt?") == TEXTS[4]
    assert TfidfEmbedder.fit(TEXTS, 256).dimension == 5
    assert TfidfEmbedder.fit(["cats", "dogs", "cats dogs"], 256).dimension == 2
    assert TfidfEmbedder.fit(["cats dogs"], 256).embed(["birds"]).tolist() == [[0.0]]
    assert TfidfEmbedder.fit(TEXTS, 3).embed([]).shape == (0, 3)


def test_vectors_are_float32_of_length_1_and_the_zero_vector_for_unknown_words():
    embedder = TfidfEmbedder.fit(TEXTS, dimensions=3)
    vectors = embedder.embed([*TEXTS, "", "Unknown words."])
    assert (vectors.shape, vectors.dtype, embedder.dimension) == ((7, 3), np.float32, 3)
    assert vectors.flags.c_contiguous
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1] * 5 + [0] * 2, atol=1e-6)


def test_the_vectors_are_those_of_scikit_learns_own_pipeline():
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
    np.testing.assert_allclose(TfidfEmbedder.fit(TEXTS, 4).embed(TEXTS), expected, atol=1e-5)


def test_a_text_gets_the_same_vector_each_time_saved_and_loaded_too(tmp_path):
    embedder = TfidfEmbedder.fit(TEXTS)
    again = TfidfEmbedder.fit(TEXTS)
    together = embedder.embed(TEXTS)
    assert together.tobytes() == again.embed(TEXTS).tobytes()
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(embedder.embed([text])[0], vector, atol=1e-6)

    texts = [*TEXTS, "Über den Wolken, 北京 и Москва"]
    embedder = TfidfEmbedder.fit(texts, 4)
    embedder.save(tmp_path / "embedder")
    loaded = TfidfEmbedder.load(tmp_path / "embedder")
    assert loaded.dimension == 4
    queries = [*texts, "unknown"]
    assert loaded.embed(queries).tobytes() == embedder.embed(queries).tobytes()


WORDS = np.frombuffer(b"dog\ncat", np.uint8)
TWICE = np.frombuffer(b"dog\ndog", np.uint8)


def other_npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no such file",
        other_npz(words=np.zeros(3, np.uint8)),
        other_npz(
            words=np.frombuffer(b"a\nb", np.uint8), idf=np.ones(3), components=np.ones((1, 2))
        ),
        other_npz(words=np.array([{}]), idf=np.ones(1), components=np.ones((1, 1))),  # a pickle
        other_npz(words=np.array([255], np.uint8), idf=np.ones(1), components=np.ones((1, 1))),
        other_npz(words=WORDS, idf=np.array([1.0, np.nan]), components=np.ones((1, 2))),
        other_npz(words=WORDS, idf=np.ones(2), components=np.full((1, 2), np.inf)),
        other_npz(words=WORDS, idf=np.ones(2), components=np.ones((0, 2))),
        other_npz(words=TWICE, idf=np.ones(2), components=np.ones((1, 2))),
    ],
)
def test_files_that_hold_something_else_are_refused_and_nothing_in_them_is_run(content, tmp_path):
    path = tmp_path / "embedder.npz"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match="cannot be read as a TfidfEmbedder"):
        TfidfEmbedder.load(path)


def test_a_file_that_is_cut_off_or_missing_is_refused(tmp_path):
    path = tmp_path / "embedder.npz"
    TfidfEmbedder.fit(TEXTS, 4).save(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputFileError, match="cannot be read as a TfidfEmbedder"):
        TfidfEmbedder.load(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("words.npy", b"broken")
    for name in (path, tmp_path / "missing"):
        with pytest.raises(InputFileError, match="cannot be read as a TfidfEmbedder"):
            TfidfEmbedder.load(name)


@pytest.mark.parametrize("packer", [zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 99])
def test_a_file_that_is_broken_in_its_packing_or_heading_is_refused(packer, tmp_path):
    path = tmp_path / "embedder.npz"
    TfidfEmbedder.fit(TEXTS, 4).save(path)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    if not packer:  # numpy parses the heading
        members["words.npy"] = members["words.npy"].replace(b"'shape': (", b"'shape': ((")
    with zipfile.ZipFile(path, "w", packer % 99) as file:
        for name, content in members.items():
            file.writestr(name, content)
    broken = bytearray(path.read_bytes())
    if packer == 99:  # a method that does not exist
        for place in (0, broken.index(b"PK\1\2") + 2):
            broken[place + 8] = 99
    elif packer:
        broken[60:80] = b"\xff" * 20
    path.write_bytes(broken)
    with pytest.raises(InputFileError, match="cannot be read as a TfidfEmbedder"):
        TfidfEmbedder.load(path)


@pytest.mark.parametrize("texts", [[], [""], ["the of and"], ["cats", "the cats"]])
def test_texts_with_fewer_than_two_words_that_count_cannot_be_fitted(texts):
    with pytest.raises(InvalidRequestError, match=f"the {len(texts)} texts have fewer than 2"):
        TfidfEmbedder.fit(texts)


@pytest.mark.parametrize("texts", ["one text", b"bytes", [1], [None]])
def test_what_is_no_list_of_texts_is_refused(texts):
    with pytest.raises(InvalidRequestError, match="texts must be a list of str, not"):
        TfidfEmbedder.fit(TEXTS).embed(texts)


@pytest.mark.parametrize("dimensions", [0, 1.5, None])
def test_dimensions_out_of_range_are_refused(dimensions):
    with pytest.raises(InvalidRequestError, match="dimensions must be an integer from 1, not"):
        TfidfEmbedder.fit(TEXTS, dimensions)


class FakeTransformer:
    """Has the one method of a SentenceTransformer that is used, and remembers its calls."""

    def __init__(self, name="given"):
        self.name = name
        self.calls = []

    def encode(self, sentences, **options):
        self.calls.append((sentences, options))
        vectors = np.array([[len(text), text.count("a")] for text in sentences], np.float64)
        if options["normalize_embeddings"]:
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors


def test_queries_and_passages_get_the_prefixes_that_the_model_wants():
    model = FakeTransformer()
    embedder = SentenceTransformerEmbedder(
        model, query_prefix="query: ", passage_prefix="passage: ", batch_size=8, normalize=False
    )
    assert (embedder.dimension, embedder.embed(["a", "aa"]).tolist()) == (2, [[8, 1], [9, 2]])
    vectors = embedder.embed_passages(["a"])
    assert (vectors.tolist(), vectors.dtype) == ([[10, 3]], np.float32)
    options = {
        "batch_size": 8,
        "normalize_embeddings": False,
        "convert_to_numpy": True,
        "show_progress_bar": False,
    }
    assert model.calls[1:] == [
        (["query: a", "query: aa"], options),
        (["passage: a"], options),
    ]


def test_a_model_can_be_named_and_its_vectors_have_length_1_unless_not_wanted(monkeypatch):
    module = ModuleType("sentence_transformers")
    module.SentenceTransformer = FakeTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    embedder = SentenceTransformerEmbedder("some/model")
    assert embedder._model.name == "some/model"
    assert embedder.embed([]).shape == (0, 2)
    vectors = SentenceTransformerEmbedder(FakeTransformer()).embed(["aaa", "b"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1], atol=1e-6)


def test_a_missing_package_and_what_is_no_model_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError) as caught:
        SentenceTransformerEmbedder("some/model")
    assert str(caught.value) == str(
        MissingExtraError("embedding with sentence-transformers", "workflow")
    )
    with pytest.raises(InvalidRequestError, match="model must be a SentenceTransformer or the"):
        SentenceTransformerEmbedder(3)


def test_scikit_learn_may_be_missing(monkeypatch):
    for name in [one for one in sys.modules if one.startswith("sklearn")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    with pytest.raises(MissingExtraError, match=r"\[workflow\]"):
        TfidfEmbedder.fit(TEXTS)


class Letters:
    """Has the two methods of LangChain's Embeddings."""

    def embed_query(self, text):
        return [float(text.count(letter)) for letter in "abc"]

    def embed_documents(self, texts):
        return [[-number for number in self.embed_query(text)] for text in texts]


def test_langchain_embeddings_are_asked_for_queries_and_passages_apart():
    embedder = LangChainEmbedder(Letters())
    assert embedder.dimension == 3
    queries = embedder.embed(["abba", "c"])
    assert (queries.tolist(), queries.dtype) == ([[2, 2, 0], [0, 0, 1]], np.float32)
    assert embedder.embed_passages(["abba"]).tolist() == [[-2, -2, 0]]
    assert embedder.embed([]).shape == (0, 3)
    assert embedder.embed_passages([]).shape == (0, 3)

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
        ([1.0, 2.0], r"embed_documents must return shape \(1, 3\), not \(2,\)"),
        ([[1.0, 2.0]], r"embed_documents must return shape \(1, 3\), not \(1, 2\)"),
        ([[1.0] * 3] * 2, r"embed_documents must return shape \(1, 3\), not \(2, 3\)"),
        ([[1.0], [1.0, 2.0]], "embed_documents must return vectors of equal length, not list"),
        ([["a", "b", "c"]], "embed_documents must return vectors of equal length, not list"),
        (None, "embed_documents must return"),
        ([[float("nan")] * 3], "embed_documents returned numbers that are not finite"),
    ],
)
def test_wrong_vectors_are_refused(vectors, message):
    class Wrong(Letters):
        def embed_documents(self, texts):
            return vectors

    with pytest.raises(InvalidRequestError, match=message):
        LangChainEmbedder(Wrong()).embed_passages(["text"])


@pytest.mark.parametrize("embeddings", [None, object(), Letters])
def test_what_is_no_embeddings_is_refused(embeddings):
    with pytest.raises(InvalidRequestError, match=r"must be LangChain Embeddings with embed_query"):
        LangChainEmbedder(embeddings)


def test_all_are_embedders_and_other_things_are_not():
    for embedder in (
        WordLlamaEmbedder(),
        TfidfEmbedder.fit(TEXTS),
        SentenceTransformerEmbedder(FakeTransformer()),
        LangChainEmbedder(Letters()),
    ):
        assert isinstance(embedder, Embedder)
        assert checked_embedder(embedder) is embedder
    for wrong in (None, "name", TfidfEmbedder):
        with pytest.raises(InvalidRequestError, match="embedder must have dimension and embed"):
            checked_embedder(wrong)
