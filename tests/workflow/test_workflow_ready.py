import pytest
from hypothesis import given
from hypothesis import strategies as st
from workflow_interpreter import interpret

from ctxreuse import ContextBlock
from ctxreuse.workflow.errors import GraphError
from ctxreuse.workflow.graph.nodes import Generation
from ctxreuse.workflow.library import asks_nothing, hyde, irg, multistep, one_shot, recomp

WORKFLOWS = (one_shot, hyde, recomp, irg, multistep)


class Backend:
    """A model that says what it is told to, one after the other, and a search that finds k."""

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
        return [asked.query for asked in self.asked]

    @property
    def read(self):
        return [[block.id for block in asked.blocks] for asked in self.asked]


GIVEN = "You are given the documents above.\n\nQuestion: {}\n\nAnswer:"
PLANNED = (
    "Question: Why?\n\nKnown facts:\n{}\n\n"
    "Write the next sub-question, or None if no more facts are needed.\n\nSub-question:"
)
KNOWN = "Known facts:\n{}\n\nQuestion: Why?\n\nAnswer:"
FACTS = "- Who? Ann who lived.", "- Where? In Rome."


@pytest.mark.parametrize(
    ("graph", "says", "visits", "queries", "prompts", "read"),
    [
        (
            one_shot(k=2), [],
            "search answer",
            ["Why?"],
            [GIVEN.format("Why?")],
            [["1.0", "1.1"]],
        ),
        (
            hyde(k=1), ["It is so."],
            "hypothesis search answer",
            ["It is so."],
            [
                "Question: Why?\n\nWrite a passage that answers the question.",
                GIVEN.format("Why?"),
            ],
            [[], ["1.0"]],
        ),
        (
            recomp(k=2), ["In short."],
            "search compress answer",
            ["Why?"],
            [
                "You are given the documents above.\n\nQuestion: Why?\n\nSummary:",
                "Summary of documents:\nIn short.\n\nQuestion: Why?\n\nAnswer:",
            ],
            [["1.0", "1.1"], []],
        ),
        (
            irg(k=1), ["First.", "Second."],
            "search answer search_again answer search_again answer",
            ["Why?", "Why?\nFirst.", "Why?\nSecond."],
            [GIVEN.format("Why?")] * 3,
            [["1.0"], ["2.0"], ["3.0"]],
        ),
        (
            multistep(k=1), ["Who?", "Ann\nwho lived.", " Where? ", "In Rome.", "None."],
            "plan search find note plan search find note plan answer",
            ["Who?", " Where? "],
            [
                PLANNED.format("(none)"), GIVEN.format("Who?"),
                PLANNED.format(FACTS[0]), GIVEN.format(" Where? "),
                PLANNED.format("\n".join(FACTS)), KNOWN.format("\n".join(FACTS)),
            ],
            [[], ["1.0"], [], ["2.0"], [], []],
        ),
        (
            multistep(), ["No further questions are needed."],
            "plan answer",
            [],
            [PLANNED.format("(none)"), KNOWN.format("(none)")],
            [[], []],
        ),
    ],
    ids=["one shot", "hyde", "recomp", "irg", "multistep", "multistep, nothing to ask"],
)  # fmt: skip
def test_what_each_workflow_searches_for_and_asks(graph, says, visits, queries, prompts, read):
    backend = Backend(*says, "Because.")
    run = backend.run(graph)
    assert (run.visits, run.answer) == (visits.split(), "Because.")
    assert (backend.queries, backend.prompts, backend.read) == (queries, prompts, read)


def test_one_shot_says_where_nothing_was_found():
    backend = Backend()
    interpret(one_shot().compile(), "Why?", backend.llm, lambda query, k: [])
    assert backend.prompts == ["You are given no documents.\n\nQuestion: Why?\n\nAnswer:"]


@given(st.integers(1, 6))
def test_irg_goes_as_many_rounds_as_it_is_told_to(rounds):
    run = Backend().run(irg(rounds=rounds))
    assert run.answer == f"said {rounds}"
    assert len(run.visits) == 2 * rounds


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
        (lambda: irg(rounds=0), "rounds must be an integer from 1, not 0"),
        (lambda: multistep(max_steps="3"), "max_steps must be an integer from 1, not '3'"),
        (lambda: one_shot(k=0), "k of node 'search' must be an integer from 1, not 0"),
        (lambda: hyde(params=100), "params must be a dict such as {'max_tokens': 100}, not 100"),
    ],
)
def test_a_wrong_argument_is_refused(make, message):
    with pytest.raises(GraphError, match=message):
        make()


NOTHING = """\
None
 "None"
**None**
NONE!\t
None, the facts suffice.
None - all is known
None are needed.
Done.
N/A
No
no more sub-questions
No further questions are needed.
Nothing else is needed.
Sub-question: None
Sub-question:
Next subquestion: none.
**Sub-question 2:** None"""
QUESTIONS = """\
Who wrote it?
None of the Beatles was born where?
None of the members
No. of people in Paris
Nothing Compares 2 U singer
no one who lived there
Sub-question: Who wrote it?
Nonesuch Palace's builder
Is there no further heir?
No more heroes, by whom?
1990
谁?"""


@pytest.mark.parametrize(
    "text", ["", " \n", "...", "None\n\nThe facts tell it. Is that enough?", *NOTHING.split("\n")]
)
def test_a_model_that_has_no_more_to_ask_is_understood(text):
    assert asks_nothing(text)


@pytest.mark.parametrize(
    "text", ["Sub-question:\nWho wrote it?", "Who is it?\n\nNone", *QUESTIONS.split("\n")]
)
def test_a_question_is_not_taken_for_the_end(text):
    assert not asks_nothing(text)


@given(st.text())
def test_any_text_is_one_or_the_other_and_one_line_with_a_question_mark_is_a_question(text):
    assert asks_nothing(text) in (True, False)
    line = " ".join(text.split())
    assert not asks_nothing(f"Who is {line}?")
