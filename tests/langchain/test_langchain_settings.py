"""Settings of what is made already: they take effect, or they are refused."""

from typing import Any

import pytest
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda
from pydantic import ValidationError

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from langchain_ctxreuse import ReuseChatModel, ReuseCompressor, ReuseRetriever, format_context

TEXTS = ["a says: " + "a" * 400, "b says: " + "b" * 400, "c says: " + "c" * 400]


def found(*positions: int) -> RunnableLambda[str, list[Document]]:
    return RunnableLambda(lambda query: [Document(TEXTS[n]) for n in positions or (0, 1, 2)])


def chat_model(**options: Any) -> ReuseChatModel:
    options = {"window_s": 0, **options}
    return ReuseChatModel(inner=FakeListChatModel(responses=["Yes."]), **options)


def has_planned(planner: ReusePlanner) -> bool:
    return planner.statistics().tokens > 0


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (chat_model(), ("planner", "window_s", "strategy")),
        (ReuseCompressor(), ("planner", "annotation")),
        (ReuseRetriever(retriever=found()), ("planner", "annotation")),
    ],
)
def test_settings_are_not_set_in_vain(made, names):
    for name in names:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(made, name, getattr(made, name))


def test_a_copy_of_a_model_has_the_planner_that_it_is_given():
    first, second = ReusePlanner(), ReusePlanner()
    model = chat_model(planner=first)
    changed = model.model_copy(update={"planner": second})
    changed.invoke(format_context([Document(text) for text in TEXTS]) + "\n\nWhich?")
    assert (has_planned(first), has_planned(second)) == (False, True)
    model.invoke(format_context([Document(text) for text in TEXTS]) + "\n\nWhich?")
    assert has_planned(first)
    assert model.model_copy(update={"tags": ["t"]}).prompt_statistics == model.prompt_statistics


@pytest.mark.parametrize("update", [{"window_s": -1}, {"strategy": "none at all"}, {"planner": 3}])
def test_a_model_and_a_copy_are_checked(update):
    for make in (lambda: chat_model(**update), lambda: chat_model().model_copy(update=update)):
        with pytest.raises((InvalidRequestError, ValueError), match=r"window|strategy|planner"):
            make()


def test_a_copy_of_a_retriever_has_the_settings_that_it_is_given():
    first, second = ReusePlanner(), ReusePlanner()
    retriever = ReuseRetriever(retriever=found(), planner=first)
    changed = retriever.model_copy(update={"planner": second})
    changed.invoke("Which?")
    assert (has_planned(first), has_planned(second)) == (False, True)
    again = changed.model_copy(update={"retriever": found(2, 1, 0)})
    assert len(again.invoke("Which?")) == 3
    noted = again.model_copy(update={"annotation": True})
    assert len(noted.invoke("Which?")) == 4, "they are ranked behind"


class Warm(FakeListChatModel):
    temperature: float = 0.0

    def _call(self, *args: Any, **kwargs: Any) -> str:
        return f"At {self.temperature}."


async def test_a_config_may_set_fields_of_the_model_inside():
    inner = Warm(responses=[])
    first, second = ReusePlanner(), ReusePlanner()
    model = ReuseChatModel(inner=inner, planner=first, window_s=0)
    fields = {"temperature": ConfigurableField(id="heat"), "planner": ConfigurableField(id="plan")}
    chosen = model.configurable_fields(**fields)
    prompt = format_context([Document(text) for text in TEXTS]) + "\n\nWhich?"
    config: Any = {"configurable": {"heat": 0.5, "plan": second}}
    assert chosen.invoke(prompt, config).content == "At 0.5."
    assert (has_planned(first), has_planned(second)) == (False, True)
    assert chosen.invoke("Which?").content == "At 0.0."
    assert (await chosen.ainvoke("Which?", config)).content == "At 0.5."
    assert [one.content for one in chosen.batch(["1", "2"], [{}, config])] == ["At 0.0.", "At 0.5."]
    assert chosen.with_config(config).bind(stop=["."]).invoke("Which?").content == "At 0.5."
    assert {one.id for one in chosen.config_specs} == {"heat", "plan"}
    again = model.configurable_fields(temperature=fields["temperature"])
    again = again.configurable_fields(planner=fields["planner"])
    assert again.invoke("Which?", config).content == "At 0.5."
    assert inner.temperature == 0.0
    with pytest.raises(ValueError, match="nothing"):
        model.configurable_fields(nothing=fields["planner"], temperature=fields["temperature"])


class Some(BaseRetriever):
    k: int = 3

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(text) for text in TEXTS[: self.k]]


def test_fields_of_the_retriever_inside_are_set_in_a_copy_and_by_a_config():
    inside = Some()
    retriever = ReuseRetriever(retriever=inside)
    assert len(retriever.model_copy(update={"k": 1}).invoke("Which?")) == 1
    field = ConfigurableField(id="k")
    for made in (
        retriever.configurable_fields(k=field),
        ReuseRetriever(retriever=inside.configurable_fields(k=field)),
        ReuseRetriever(retriever=inside.configurable_fields(k=field)).configurable_fields(k=field),
    ):
        assert len(made.invoke("Which?", {"configurable": {"k": 2}})) == 2
        assert len(made.invoke("Which?")) == 3
        assert list(map(len, made.batch(["1", "2"], {"configurable": {"k": 1}}))) == [1, 1]


@pytest.mark.parametrize(
    "made", [chat_model(), ReuseCompressor(), ReuseRetriever(retriever=Some())]
)
def test_a_copy_holds_no_setting_that_nobody_reads(made):
    with pytest.raises(InvalidRequestError, match="'windows_s' is no setting of Reuse"):
        made.model_copy(update={"windows_s": 1})


def history_aware(retriever: Any) -> Any:
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("user", "{input}"), ("user", "A search query?")]
    )
    return create_history_aware_retriever(
        FakeListChatModel(responses=["the query"]), retriever, prompt
    )


def test_a_history_aware_retriever_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"create_history_aware_retriever\(llm, ReuseRetriever"):
        ReuseRetriever(retriever=history_aware(found()))


def test_a_retriever_inside_a_history_aware_one_plans():
    answer = RunnableLambda(lambda given: "Yes.")
    planner = ReusePlanner()
    inside = ReuseRetriever(retriever=found(), planner=planner)
    chain = create_retrieval_chain(history_aware(inside), answer)
    result = chain.invoke({"input": "Which?", "chat_history": [("user", "Hello."), ("ai", "Hi.")]})
    assert len(result["context"]) == 3
    assert has_planned(planner)


BINDINGS = [
    lambda made: made,
    lambda made: made.bind(stop=["."]),
    lambda made: made.with_config(tags=["again"]).bind(stop=["."]),
    lambda made: made.configurable_fields(planner=ConfigurableField(id="planner")),
]


@pytest.mark.parametrize("bound", BINDINGS)
def test_what_is_wrapped_already_is_refused(bound):
    with pytest.raises(ValueError, match="inner is a ReuseChatModel already; pass what it wraps"):
        ReuseChatModel(inner=bound(chat_model()))
    with pytest.raises(ValueError, match="retriever is a ReuseRetriever already; pass what it"):
        ReuseRetriever(retriever=bound(ReuseRetriever(retriever=found())))
