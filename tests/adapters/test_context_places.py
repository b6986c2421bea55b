"""Where prompts may show a context: before a conversation, before examples, before a prefill.

What stands in a message of the user before an answer was sent before, and keeps its bytes, unless
the answer is the template's: then nobody has been sent it, and no other context stands behind it.
"""

import json

import pytest
from planning_helpers import order_words
from test_prompt_planner import World, block, letters_in

from ctxreuse.adapters.prompt_draft import PromptPart, ScopedPrompt
from ctxreuse.adapters.prompt_planner import PromptPlanner

pytestmark = pytest.mark.usefixtures("paper_words")

ASKED = (PromptPart("user", "One?"), PromptPart("assistant", "So."), PromptPart("user", "Two?"))
EXAMPLES = (
    PromptPart("user", "2 + 2?"),
    PromptPart("assistant", "4"),
    PromptPart("user", "Which?"),
)


def system(text: str) -> PromptPart:
    return PromptPart("system", text)


def test_a_context_in_the_system_message_is_planned_in_every_turn():
    world = World()
    first = world.one(system(f"Facts: {world.context('abc')}"), PromptPart("user", "One?"))
    assert letters_in(first.texts[0]) == "abc"
    later = world.one(system(f"Facts: {world.context('cab')}"), *ASKED)
    assert later.texts[0] == f"Facts: {world.context('abc')}\n\n{order_words(*'cab')}"
    assert world.prompts.statistics().planned == 2


def test_contexts_before_examples_and_prefilled_answers_are_planned():
    world = World()
    world.one(system(world.context("abc")), *EXAMPLES)
    later = world.one(system(world.context("cab")), *EXAMPLES)
    assert letters_in(later.texts[0]) == "abc"

    world = World()
    prefilled = PromptPart("assistant", "The answer is ")
    world.one(PromptPart("user", f"{world.context('abc')} One?"), prefilled)
    later = world.one(PromptPart("user", f"{world.context('cab')} Two?"), prefilled)
    assert letters_in(later.texts[0]) == "abc"
    assert later.texts[1] == prefilled.text


def accepted(context: str, question: str = "One?") -> tuple[PromptPart, ...]:
    """Return a prompt whose template holds an answer to the context."""
    texts = (f"Read this:\n{context}", "Noted.", question)
    return tuple(map(PromptPart, ("user", "assistant", "user"), texts))


def test_a_context_before_an_answer_of_the_template_is_planned():
    world = World()
    world.one(*accepted(world.context("abc")))
    later = world.one(*accepted(world.context("cab"), "Two?"))
    assert later.texts[0] == f"Read this:\n{world.context('abc')}\n\n{order_words(*'cab')}"
    assert later.texts[1:] == ("Noted.", "Two?")
    assert world.prompts.statistics().planned == 2


def shapes(context: str, question: str) -> dict[str, tuple[PromptPart, ...]]:
    """Return prompts whose template holds an answer, by the place of their context."""
    asked = PromptPart("user", question)
    return {
        "examples": (
            system(context),
            PromptPart("user", "2 + 2?"),
            PromptPart("assistant", "4"),
            asked,
        ),
        "prefill": (PromptPart("user", f"{context} {question}"), PromptPart("assistant", "It is ")),
        "accepted": accepted(context, question),
    }


@pytest.mark.parametrize("shape", ["examples", "prefill", "accepted"])
def test_a_context_rendered_for_another_conversation_is_planned_there_too(shape):
    world = World()
    world.one(*shapes(world.context("abc"), "One?")[shape], conversation_id="first")
    for name in "AB":
        given = shapes(world.context("cab"), f"Two, {name}?")[shape]
        sent = world.one(*given, conversation_id=name)
        assert letters_in(sent.texts[0]) == "abc"
    assert world.prompts.statistics().planned == 3


@pytest.mark.parametrize("shape", ["examples", "prefill", "accepted"])
def test_a_context_rendered_for_another_model_is_planned_there_too(shape):
    world = World()
    world.one(*shapes(world.context("abc"), "One?")[shape])
    for name in "AB":
        prompts = PromptPlanner(world.planner, registry=world.registry)
        given = shapes(world.context("cab"), f"Two, {name}?")[shape]
        [sent] = prompts.plan([ScopedPrompt(given)])
        assert letters_in(sent.texts[0]) == "abc"


@pytest.mark.parametrize("shape", ["examples", "prefill", "accepted"])
def test_what_was_answered_elsewhere_and_is_not_rendered_anew_stays_as_it_is(shape):
    world = World()
    world.one(*shapes(world.context("abc"), "One?")[shape], conversation_id="first")
    given = shapes(world.context("cab"), "Two?")[shape]
    world.one(*given, conversation_id="A")
    later = world.one(*given, conversation_id="of another process")
    assert later.texts == tuple(part.text for part in given)


def test_in_a_conversation_such_a_context_keeps_its_bytes():
    world = World()
    world.one(*accepted(world.context("abc")))
    given = accepted(world.context("cab"), "Two?")
    first = world.one(*given, conversation_id="c")
    world.planner.evict_tokens(10_000)
    said = (PromptPart("assistant", "So."), PromptPart("user", f"{world.context('ab')} And?"))
    later = world.one(*given, *said, conversation_id="c")
    assert later.texts[:3] == first.texts
    assert later.plans[0].references, "what it shows is not shown again"


def test_an_answered_context_with_another_one_behind_it_stays_as_it_is():
    world = World()
    world.user(world.context("abc"))
    given = (*accepted(world.context("cab")), *ASKED[1:2], PromptPart("user", world.context("ca")))
    assert world.one(*given).texts[0] == given[0].text


def test_a_context_that_stays_in_the_system_message_keeps_its_bytes():
    world = World()
    world.one(system(world.context("abc")), ASKED[0])
    shown = system(world.context("cab"))
    sent = world.one(shown, ASKED[0]).texts[0]
    assert sent != shown.text
    world.planner.evict_tokens(10_000)
    world.one(system(world.context("bca")), ASKED[0])
    assert world.one(shown, *ASKED).texts[0] == sent
    assert world.one(system(world.context("cab")), *ASKED).texts[0] == sent, "rendered anew"
    assert world.prompts.statistics().in_history == 2


def test_a_history_that_shows_what_was_sent_keeps_its_bytes():
    world = World()
    blocks = [block(letter, f"word {'y' * 300}") for letter in "ab"]
    for _ in range(2):  # the same text, whichever block stands first
        context = world.registry.render(blocks, world.planner.templates)
        sent = world.one(PromptPart("user", f"{context}\n\nWhich?"))
        blocks.reverse()
    assert order_words(*"ba") in sent.texts[0]
    history = (PromptPart("user", sent.texts[0]), *ASKED[1:])
    assert world.one(*history).texts == tuple(part.text for part in history)


def test_conversations_that_begin_alike_keep_the_forms_that_each_was_sent():
    world = World()
    world.one(system(world.context("abc")), ASKED[0], conversation_id="other")
    shown = system(world.context("cab"))
    sent = world.one(shown, ASKED[0], conversation_id="A").texts[0]
    assert sent != shown.text
    world.planner.evict_tokens(10_000)
    again = world.one(system(world.context("cab")), ASKED[0], conversation_id="B").texts[0]
    assert again == shown.text
    assert world.one(shown, *ASKED, conversation_id="A").texts[0] == sent
    assert world.one(shown, *ASKED, conversation_id="B").texts[0] == again


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_context_pasted_into_a_question_behind_a_history_is_no_context(role):
    world = World()
    given = (
        PromptPart(role, world.context("cab")),
        PromptPart("user", "One?"),
        PromptPart("assistant", "So."),
        PromptPart("user", f"What is this? {World().context('cab')}"),
    )
    assert world.one(*given).texts == tuple(part.text for part in given)


def test_a_context_pasted_behind_the_one_that_the_system_message_shows_again_is_none():
    world = World()
    for _ in range(3):
        shown = system(world.context("cab"))
        pasted = PromptPart("user", f"What is this? {shown.text}")
        world.one(shown, ASKED[0])
        shown = system(world.context("cab"))  # rendered anew in every turn
        given = (shown, *ASKED[:2], pasted)
        assert world.one(*given).texts == tuple(part.text for part in given)


def test_a_context_pasted_into_an_old_question_is_no_context():
    world = World()
    pasted = PromptPart("user", f"What is this? {World().context('cab')}")
    given = (system(world.context("cab")), pasted, *ASKED[1:])
    assert world.one(*given).texts == tuple(part.text for part in given)
    assert world.prompts.statistics().left_alone == 1


def test_prompts_that_show_labels_and_no_context_of_this_process_are_counted():
    world, elsewhere = World(), World()
    context = elsewhere.context("abc")
    for text in (context, json.dumps(context), f"{context[:-9]}\n\nWhich?"):
        assert world.user(text) == text
    assert world.prompts.statistics().not_recognised == 3
    world.user("What does [Doc_a] say?")
    world.user(f"{world.context('ab')} What do [Doc_a] and [Doc_b] say?")
    world.one(PromptPart("user", context), *ASKED[1:])  # answered before
    assert world.prompts.statistics().not_recognised == 3
