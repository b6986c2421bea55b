"""Programs that mix what is planned in several places: each text stands once, a ranking is one."""

from dataclasses import replace

import pytest
from langchain.agents import create_agent
from langchain_agent_helpers import Scripted, ask, calls, done, results, sent
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.tools import tool
from langchain_model_helpers import RecordingModel, letters_in
from mem0_stores import FakeMemory, lettered
from planning_helpers import location_words, order_words

from ctxreuse import PAPER_TEMPLATES, ReusePlanner, request_context
from ctxreuse.adapters import rendered_contexts
from ctxreuse.adapters.issued_plans import SEARCHED_TEXTS
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware, format_context
from mem0_ctxreuse import ReuseMemory

pytestmark = pytest.mark.usefixtures("paper_words")

TEMPLATES = replace(PAPER_TEMPLATES, label="[Doc_{id}]")


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    rendered_contexts._shared_registry.cache_clear()
    SEARCHED_TEXTS._forget_all()


def documents(letters: str) -> list[Document]:
    return [Document(f"{letter} says: {letter * 400}", id=letter) for letter in letters]


@pytest.mark.parametrize("template", ["{memories}\n\n{found}", "{found}\n\n{memories}"])
@pytest.mark.parametrize("tenant", [None, "acme"])
def test_memories_and_documents_in_one_prompt_are_both_planned(template, tenant):
    inner = RecordingModel()
    model = ReuseChatModel(inner=inner, window_s=0)
    memory = ReuseMemory(FakeMemory(lettered("xyz")))
    with request_context(tenant=tenant):
        for letters in ("abc", "cab"):
            memories = str(memory.context("Which?", filters={"user_id": "alice"}))
            found = format_context(documents(letters))
            asked = template.format(memories=memories, found=found)
            model.invoke(f"{asked}\n\nWhich?")
            assert sorted(letters_in(inner.calls[-1].text)) == list("abcxyz")
    statistics = model.prompt_statistics
    assert (statistics.planned, statistics.planned_before) == (2, 2)


def test_memories_that_a_search_has_put_in_order_keep_their_ranking():
    inner = RecordingModel()
    model = ReuseChatModel(inner=inner, window_s=0)
    memory = ReuseMemory(FakeMemory(lettered("abc")), planner=ReusePlanner())

    def asked(kept: str = "abcdefgh") -> str:
        found = memory.search("Which?", filters={"user_id": "alice"})["results"]
        shown = [document for one in found for document in documents(one["memory"][0])]
        shown = [one for one in shown if one.id in kept]
        model.invoke(f"{format_context(shown, TEMPLATES)}\n\nWhich?")
        return inner.calls[-1].text

    asked()
    memory.memory.found = lettered("cabd")
    assert order_words(*"cabd") in asked()
    assert letters_in(inner.calls[-1].text) == "abcd"
    assert order_words(*"ca") in asked("ac")
    assert model.prompt_statistics.planned_before == 2


def test_memories_that_the_application_ranks_anew_have_its_ranking():
    inner = RecordingModel()
    model = ReuseChatModel(inner=inner, window_s=0)
    memory = ReuseMemory(FakeMemory(lettered("abc")))
    found = memory.search("Which?", filters={"user_id": "alice"})["results"]
    shown = [Document(one["memory"]) for one in reversed(found)]
    model.invoke(f"{format_context(shown)}\n\nWhich?")
    assert letters_in(inner.calls[-1].text) == "cba"
    assert model.prompt_statistics.planned == 1


def test_a_tenants_search_says_nothing_of_another_tenants_documents():
    memory = ReuseMemory(FakeMemory(lettered("abc")))
    with request_context(tenant="A"):
        memory.search("Which?")
        memory.memory.found = lettered("cab")
        memory.search("Which?")
    with request_context(tenant="B"):
        shown = format_context([Document(one["memory"]) for one in lettered("abc")])
    assert "priority order" not in shown


def texts_of_results(messages: list[BaseMessage]) -> list[str]:
    return list(map(str, results(messages)))


@pytest.mark.parametrize("artifact", [False, True])
def test_a_tool_that_formats_its_documents_shows_each_under_one_label(artifact):
    found = {"one": "ab", "two": "cb"}
    middleware = ReuseMiddleware(tools=["search"])
    if artifact:

        @tool("search", response_format="content_and_artifact")
        def search(query: str) -> tuple[str, list[Document]]:
            """Search."""
            return format_context(documents(found[query]), TEMPLATES), documents(found[query])

    else:

        @tool("search")
        def search(query: str) -> str:
            """Search."""
            return format_context(documents(found[query]), TEMPLATES)

    model = Scripted(responses=[calls("one"), calls("two"), done()])
    agent = create_agent(model, [search], middleware=[middleware])
    first, second = texts_of_results(sent(ask(agent, "Which?")))
    assert first == format_context(documents("ab"), TEMPLATES)
    [c] = documents("c")
    assert second == f"[Doc_c] {c.page_content}\n\n{location_words('b')}"
