"""Settings of what is made already: they take effect, or they are refused."""

import copy
import pickle

import pytest
from llama_index.core.llms import MockLLM
from llama_index.core.schema import NodeWithScore, QueryBundle
from llamaindex_helpers import LetterRetriever, letter_nodes
from llamaindex_memory_helpers import LetterMemory, user
from pydantic import ValidationError

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from llamaindex_ctxreuse import (
    ReuseChatEngine,
    ReuseLLM,
    ReuseMemoryBlock,
    ReusePostprocessor,
    ReuseRetriever,
    format_context,
)


def has_planned(planner: ReusePlanner) -> bool:
    return planner.statistics().tokens > 0


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (ReuseLLM(inner=MockLLM()), "planner"),
        (ReuseLLM(inner=MockLLM()), "window_s"),
        (ReusePostprocessor(), "planner"),
        (ReusePostprocessor(), "annotation"),
        (ReusePostprocessor(), "metadata_mode"),
        (ReuseMemoryBlock(memory=LetterMemory()), "planner"),
        (ReuseMemoryBlock(memory=LetterMemory()), "top_k"),
        (ReuseMemoryBlock(memory=LetterMemory()), "filters"),
        (ReuseMemoryBlock(memory=LetterMemory()), "memory"),
    ],
)
def test_settings_are_not_set_in_vain(made, name):
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, name, getattr(made, name))


@pytest.mark.parametrize(
    "made", [ReuseRetriever(LetterRetriever()), ReuseChatEngine(LetterRetriever(), MockLLM())]
)
def test_the_planner_of_a_plain_object_is_not_set_in_vain(made):
    assert isinstance(made.planner, ReusePlanner)
    with pytest.raises(AttributeError):
        made.planner = ReusePlanner()


def test_a_copy_of_a_postprocessor_has_the_settings_that_it_is_given():
    first, second = ReusePlanner(), ReusePlanner()
    made = ReusePostprocessor(planner=first)
    changed = made.model_copy(update={"planner": second, "annotation": True})
    changed.postprocess_nodes(letter_nodes("abc"))
    assert (has_planned(first), has_planned(second)) == (False, True)
    assert len(changed.postprocess_nodes(letter_nodes("cba"))) == 4, "annotations are on"


def test_a_copy_of_a_model_has_the_planner_and_settings_that_it_is_given():
    first, second = ReusePlanner(), ReusePlanner()
    made = ReuseLLM(inner=MockLLM(), planner=first, window_s=0)
    changed = made.model_copy(update={"planner": second})
    changed.complete(format_context(letter_nodes("abc")) + "\n\nWhich?")
    assert (has_planned(first), has_planned(second)) == (False, True)
    with pytest.raises(InvalidRequestError, match="window"):
        made.model_copy(update={"window_s": -1})

    inner = MockLLM(max_tokens=5)
    made = ReuseLLM(inner=inner, window_s=0)
    changed = made.model_copy(update={"max_tokens": 2, "window_s": 0.001})
    assert str(changed.complete("a b c")) == "text text"
    assert (changed.window_s, inner.max_tokens) == (0.001, 5)


def test_settings_of_what_is_inside_are_read_through_the_wrapper_and_set_on_it():
    made = ReuseLLM(inner=MockLLM(max_tokens=5), window_s=0)
    for one in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert one.max_tokens == 5
    assert not hasattr(made, "no_such_setting")
    with pytest.raises(ValueError, match="no field"):
        made.max_tokens = 3

    inside = SomeRetriever()
    made = ReuseRetriever(inside)
    assert made.similarity_top_k == 3
    made.similarity_top_k = 1
    assert inside.similarity_top_k == 1
    assert len(made.retrieve("abc")) == 1
    assert not hasattr(made, "no_such_setting")
    assert copy.deepcopy(made).similarity_top_k == 1


@pytest.mark.parametrize("made", [ReuseLLM(inner=MockLLM()), ReusePostprocessor()])
def test_a_copy_holds_no_setting_that_nobody_reads(made):
    with pytest.raises(InvalidRequestError, match="'windows_s' is no setting of Reuse"):
        made.model_copy(update={"windows_s": 1})


class SomeRetriever(LetterRetriever):
    def __init__(self) -> None:
        super().__init__()
        self.similarity_top_k = 3

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return super()._retrieve(query_bundle)[: self.similarity_top_k]


async def test_a_copy_of_a_memory_block_has_the_settings_that_it_is_given():
    first, second = ReusePlanner(), ReusePlanner()
    made = ReuseMemoryBlock(memory=LetterMemory(), planner=first)
    changed = made.model_copy(update={"planner": second, "top_k": 1})
    text = await changed.aget([user("abc one?")])
    assert text.count("says:") == 1
    assert (has_planned(first), has_planned(second)) == (False, True)
    with pytest.raises(ValueError, match="top_k"):
        made.model_copy(update={"top_k": 0})


def test_what_is_wrapped_already_is_refused():
    with pytest.raises(ValueError, match="inner is a ReuseLLM already; pass what it wraps"):
        ReuseLLM(inner=ReuseLLM(inner=MockLLM()))
    with pytest.raises(InvalidRequestError, match="retriever is a ReuseRetriever already; pass"):
        ReuseRetriever(ReuseRetriever(LetterRetriever()))
