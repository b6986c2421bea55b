import pytest
from hypothesis import given
from hypothesis import strategies as st
from workflow_interpreter import interpret

from ctxreuse import ContextBlock
from ctxreuse.workflow.errors import GraphError
from ctxreuse.workflow.graph.nodes import Generation
from ctxreuse.workflow.graph.state import State
from ctxreuse.workflow.library import hyde, irg, multistep, one_shot, recomp
from ctxreuse.workflow.runtime.workflow_run import certain_successor

WORKFLOWS = (one_shot, hyde, recomp, irg, multistep)


class Backend:
    """A model that says what it is told to, one thing after the other, and a search that finds k.

    Attributes:
        asked: What the model was asked.
        queries: What was searched for.
    """

    def __init__(self, *says):
        self.says = list(says)
        self.asked = []
        self.queries = []

    def llm(self, asked):
        self.asked.append(asked)
        return self.says.pop(0) if self.says else f"said {len(self.asked)}"

    def retrieve(self, query, k):
        self.queries.append(query)
        found = len(self.queries)
        return [ContextBlock(id=f"{found}.{rank}", text=f"found {found}") for rank in range(k)]

    def run(self, graph, text="Why?"):
        return interpret(graph.compile(), text, self.llm, self.retrieve)

    @property
    def prompts(self):
        return [asked.prompt.query for asked in self.asked]

    @property
    def read(self):
        return [[block.id for block in asked.prompt.blocks] for asked in self.asked]


def test_one_shot_answers_from_what_it_finds_or_says_that_nothing_was_found():
    backend = Backend("Because.")
    run = backend.run(one_shot(k=2))
    assert run.visits == ["search", "answer"]
    assert backend.queries == ["Why?"]
    assert backend.prompts == ["You are given the documents above.\n\nQuestion: Why?\n\nAnswer:"]
    assert backend.read == [["1.0", "1.1"]]
    assert run.answer == "Because."
    backend = Backend()
    interpret(one_shot().compile(), "Why?", backend.llm, lambda query, k: [])
    assert backend.prompts == ["You are given no documents.\n\nQuestion: Why?\n\nAnswer:"]


def test_hyde_searches_for_an_imagined_answer():
    backend = Backend("It is so.", "Because.")
    run = backend.run(hyde(k=1))
    assert run.visits == ["hypothesis", "search", "answer"]
    assert backend.queries == ["It is so."]
    assert backend.prompts == [
        "Question: Why?\n\nWrite a passage that answers the question.",
        "You are given the documents above.\n\nQuestion: Why?\n\nAnswer:",
    ]
    assert backend.read == [[], ["1.0"]]
    assert run.answer == "Because."


def test_recomp_answers_from_a_summary_of_what_was_found():
    backend = Backend("In short.", "Because.")
    run = backend.run(recomp(k=2))
    assert run.visits == ["search", "compress", "answer"]
    assert backend.queries == ["Why?"]
    assert backend.prompts == [
        "You are given the documents above.\n\nQuestion: Why?\n\nSummary:",
        "Summary of documents:\nIn short.\n\nQuestion: Why?\n\nAnswer:",
    ]
    assert backend.read == [["1.0", "1.1"], []]
    assert run.answer == "Because."


def test_irg_searches_with_the_last_answer_in_every_later_round():
    backend = Backend("First.", "Second.", "Third.")
    run = backend.run(irg(k=1))
    assert run.visits == ["search", "answer"] + 2 * ["search_again", "answer"]
    assert backend.queries == ["Why?", "Why?\nFirst.", "Why?\nSecond."]
    assert set(backend.prompts) == {
        "You are given the documents above.\n\nQuestion: Why?\n\nAnswer:"
    }
    assert backend.read == [["1.0"], ["2.0"], ["3.0"]]
    assert run.answer == "Third."


@given(st.integers(1, 6))
def test_irg_goes_as_many_rounds_as_it_is_told_to(rounds):
    run = Backend().run(irg(rounds=rounds))
    assert run.answer == f"said {rounds}"
    assert len(run.visits) == 2 * rounds


def test_multistep_asks_until_nothing_is_left_to_ask():
    backend = Backend("Who?", "Ann\nwho lived.", " Where? ", "In Rome.", "None.", "Ann in Rome.")
    run = backend.run(multistep(k=1))
    one_step = ["plan", "search", "find", "note"]
    assert run.visits == [*one_step, *one_step, "plan", "answer"]
    assert backend.queries == ["Who?", " Where? "]
    first, second = "- Who? Ann who lived.", "- Where? In Rome."
    planned = (
        "Question: Why?\n\nKnown facts:\n{}\n\n"
        "Write the next sub-question, or None if no more facts are needed.\n\nSub-question:"
    )
    found = "You are given the documents above.\n\nQuestion: {}\n\nAnswer:"
    assert backend.prompts == [
        planned.format("(none)"),
        found.format("Who?"),
        planned.format(first),
        found.format(" Where? "),
        planned.format(f"{first}\n{second}"),
        f"Known facts:\n{first}\n{second}\n\nQuestion: Why?\n\nAnswer:",
    ]
    assert backend.read == [[], ["1.0"], [], ["2.0"], [], []]
    assert run.answer == "Ann in Rome."


def test_multistep_answers_at_once_where_nothing_needs_to_be_asked():
    backend = Backend("No further questions are needed.", "Because.")
    run = backend.run(multistep())
    assert run.visits == ["plan", "answer"]
    assert backend.prompts[-1] == "Known facts:\n(none)\n\nQuestion: Why?\n\nAnswer:"


@given(st.integers(1, 6))
def test_multistep_asks_no_more_than_it_may(max_steps):
    run = Backend().run(multistep(max_steps=max_steps))
    assert run.visits == ["plan", "search", "find", "note"] * max_steps + ["answer"]


@given(st.sampled_from(WORKFLOWS), st.lists(st.text()), st.text())
def test_every_workflow_ends_whatever_the_model_says(workflow, says, question):
    run = Backend(*says).run(workflow(), question)
    assert run.visits[-1] == "answer"
    assert len(run.visits) <= 13


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_parameters_reach_every_generation(workflow):
    def params_of(graph):
        nodes = graph.compile().nodes.values()
        return [dict(node.params) for node in nodes if isinstance(node, Generation)]

    for params in params_of(workflow()):
        assert set(params) == {"temperature", "max_tokens"}
        assert params["temperature"] == 0.0
        assert 40 <= params["max_tokens"] <= 160
    given = {"max_tokens": 7, "seed": 1}
    assert all(
        params == {"temperature": 0.0, "max_tokens": 7, "seed": 1}
        for params in params_of(workflow(params=given))
    )


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_workflow_has_its_function_as_its_name_and_unchanging_texts_in_front(workflow):
    graph = workflow().compile()
    assert (graph.name, graph.inputs) == (workflow.__name__, ("input",))
    assert graph.answer == "answer"

    backend = Backend()
    backend.run(workflow(), "one")
    systems = [asked.system for asked in backend.asked]
    backend.asked.clear()
    backend.run(workflow(), "another")
    assert [asked.system for asked in backend.asked] == systems
    assert all(systems)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: irg(rounds=0), "rounds must be an integer from 1, not 0 (int)"),
        (lambda: multistep(max_steps="3"), "max_steps must be an integer from 1, not '3' (str)"),
        (lambda: one_shot(k=0), "k of node 'search' must be an integer from 1, not 0 (int)"),
        (
            lambda: hyde(params=100),
            "params must be a dict such as {'max_tokens': 100}, not 100 (int)",
        ),
    ],
)
def test_a_wrong_argument_is_refused(make, message):
    with pytest.raises(GraphError) as caught:
        make()
    assert str(caught.value) == message


def test_the_speculation_that_each_workflow_allows():
    graph = one_shot().compile()
    assert certain_successor(graph, "search", State()).name == "answer"
    graph = hyde().compile()
    assert certain_successor(graph, "hypothesis", State()).name == "search"
    graph = irg().compile()
    assert certain_successor(graph, "answer", State()).name == "search_again"
    assert certain_successor(graph, "search_again", State()).name == "answer"
    graph = multistep().compile()
    assert certain_successor(graph, "plan", State()) is None
    assert certain_successor(graph, "search", State()).name == "find"
