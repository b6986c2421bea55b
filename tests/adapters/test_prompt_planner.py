import gc
import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from planning_helpers import order_words

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.adapters import prompt_planner
from ctxreuse.adapters.issued_plans import IssuedPlans, Turn
from ctxreuse.adapters.prompt_draft import PromptPart, ScopedPrompt
from ctxreuse.adapters.prompt_planner import PlannedPrompt, PromptPlanner, as_given, planner_or_new
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.rendering import Templates
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError, UnknownStrategyError

pytestmark = pytest.mark.usefixtures("paper_words")


def block(letter: str, text: str | None = None) -> ContextBlock:
    return ContextBlock(id=letter, text=f"{letter}: {letter * 300}" if text is None else text)


class World:
    """A planner with its own registry, so that tests cannot see each other's contexts."""

    def __init__(self, planner: ReusePlanner | None = None, strategy: Any = "reuse") -> None:
        self.planner = ReusePlanner() if planner is None else planner
        self.registry = ContextRegistry()
        self.prompts = PromptPlanner(self.planner, strategy, self.registry)

    def context(self, letters: str, tenant: str = "") -> str:
        blocks = [block(letter) for letter in letters]
        return self.registry.render(blocks, self.planner.templates, tenant)

    def plan(self, *prompts: ScopedPrompt) -> list[PlannedPrompt]:
        return self.prompts.plan(prompts)

    def one(self, *parts: PromptPart, **scope: Any) -> PlannedPrompt:
        [planned] = self.plan(ScopedPrompt(parts, RequestScope(**scope)))
        return planned

    def user(self, text: str, **scope: Any) -> str:
        """Plan a prompt of one message; return what is sent."""
        [text] = self.one(PromptPart("user", text), **scope).texts
        return text


def letters_in(text: str) -> str:
    """Return the blocks that a text shows, in order."""
    return "".join(found[1] for found in re.finditer(r"([a-z]): \1{300}", text))


def test_a_recognised_context_is_planned_where_it_stands():
    world = World()
    world.user(world.context("abc"))
    sent = world.user(f"Read this:\n\n{world.context('cab')}\n\nWhich?")
    assert sent == f"Read this:\n\n{world.context('cab')}\n\nWhich?", "another opening, other root"
    sent = world.user(f"{world.context('cab')}\n\nWhich?")
    assert sent == f"{world.context('abc')}\n\n{order_words(*'cab')}\n\nWhich?"


def test_only_what_was_rendered_here_is_planned_and_surrogates_too():
    world, other = World(), World()
    world.user(world.context("abc"))
    assert world.user(other.context("cab")) == other.context("cab")
    world = World()
    text = f"\ud800 {world.context('ab')} \udfff"
    assert world.user(text) == text
    calls = [ScopedPrompt((PromptPart("system", "s"), PromptPart("user", "u"))), ScopedPrompt(())]
    assert as_given(calls) == [PlannedPrompt(0, ("s", "u")), PlannedPrompt(1, ())]


def test_calls_without_a_context_are_given_back_as_they_are():
    world = World()
    parts = (
        PromptPart("system", "Be brief."),
        PromptPart("user", "Hi!"),
        PromptPart("user", ""),
    )
    assert world.one(*parts) == PlannedPrompt(0, ("Be brief.", "Hi!", ""), ())
    assert world.plan() == []
    assert world.plan(ScopedPrompt(())) == [PlannedPrompt(0, ())]


@given(before=st.text(), between=st.text(min_size=1), behind=st.text())
def test_text_around_contexts_stays_as_it_is(before, between, behind):
    assume(not re.match(r"\w", between) and not re.match(r"\w", behind))

    world = World()
    world.user(before + world.context("abc"))
    sent = world.user(before + world.context("cab") + between + world.context("de") + behind)
    moved = f"{world.context('abc')}\n\n{order_words(*'cab')}"
    assert sent == before + moved + between + world.context("de") + behind


@given(st.text(alphabet="[Doc_xyz] ab\n:", max_size=40), st.text(max_size=20))
def test_no_document_is_lost_or_altered(text, other):
    world = World()
    documents = [block("x", text), block("y", other), block("z", "end")]
    world.user(world.registry.render(documents))
    planned = world.one(PromptPart("user", world.registry.render(documents[::-1])))
    [plan] = planned.plans
    assert sorted((one.id, one.text) for one in plan.blocks) == sorted(
        (one.id, one.text) for one in documents
    )
    for label, one in zip(plan.labels, plan.blocks, strict=True):
        assert f"{label} {one.text}" in planned.texts[0]


def test_a_document_that_poses_as_a_context_stays_whole():
    world = World()
    world.user(world.context("abc"))
    posing = block("p", world.context("cab"))
    rendered = world.registry.render([block("q"), posing])
    sent = world.user(rendered)
    assert sent == rendered
    assert posing.text in sent


def test_a_context_that_was_planned_before_is_only_scheduled():
    world = World()
    world.user(world.context("cab"))
    planned = f"{world.context('abc')}\n\n{order_words(*'cab')}"
    world.registry.remember_planned(planned)
    assert world.one(PromptPart("user", f"{planned}\n\nWhich?")) == PlannedPrompt(
        0, (f"{planned}\n\nWhich?",)
    )


def test_every_label_of_the_prompt_can_be_looked_up():
    world = World()
    planned = world.one(PromptPart("user", world.context("abc") + "\n\n" + world.context("de")))
    assert [dict(plan.labels) for plan in planned.plans] == [
        {"[Doc_a]": "a", "[Doc_b]": "b", "[Doc_c]": "c"},
        {"[Doc_d]": "d", "[Doc_e]": "e"},
    ]
    for plan in planned.plans:
        for label, block_id in plan.labels.items():
            assert f"{label} {block_id}: " in planned.texts[0]


def test_several_contexts_are_planned_from_left_to_right_and_in_several_messages():
    world = World()
    text = f"A {world.context('ab')} B {world.context('cd')} C"
    assert world.user(text) == text

    world = World()
    planned = world.one(
        PromptPart("system", f"Facts: {world.context('ab')}"),
        PromptPart("user", f"{world.context('cd')}\n\nWhich?"),
    )
    assert [letters_in(text) for text in planned.texts] == ["ab", "cd"]
    assert "[Doc_c] c: " in planned.texts[1]
    assert len(planned.plans) == 2


def test_an_answered_turn_is_shown_again_as_it_was_sent():
    world = World()
    world.user(world.context("abc"))
    question = f"{world.context('cab')}\n\nWhich?"
    sent = world.user(question)
    assert sent != question
    later = world.one(
        PromptPart("user", question), PromptPart("assistant", "That."), PromptPart("user", "Why?")
    )
    assert later.texts == (sent, "That.", "Why?")
    assert later.plans == ()


def test_turns_of_other_processes_and_what_the_assistant_repeats_stay_as_they_are():
    world = World()
    world.user(world.context("abc"))
    question = f"{World().context('cab')}\n\nWhich?"
    later = world.one(
        PromptPart("user", question), PromptPart("assistant", "That."), PromptPart("user", "Why?")
    )
    assert later.texts == (question, "That.", "Why?")

    world = World()
    parts = (
        PromptPart("user", world.context("abc")),
        PromptPart("assistant", world.context("cab")),
        PromptPart("user", "Why?"),
    )
    assert world.one(*parts).texts == (world.context("abc"), world.context("cab"), "Why?")


def test_a_conversation_that_grows_is_sent_as_a_prefix_of_itself():
    world = World()
    world.user(world.context("abcdef"), conversation_id="other")
    said: list[PromptPart] = []
    before: tuple[str, ...] = ()
    for number, letters in enumerate(["cab", "bad", "fed", "abc"]):
        said.append(PromptPart("user", f"{world.context(letters)}\n\nQuestion {number}?"))
        planned = world.one(*said, conversation_id="c1")
        assert planned.texts[: len(before)] == before
        said.append(PromptPart("assistant", f"Answer {number}."))
        before = (*planned.texts, f"Answer {number}.")


@pytest.mark.parametrize("conversation_id", ["c1", None])
def test_a_later_turn_leaves_out_what_the_conversation_shows(conversation_id):
    world = World()
    first = PromptPart("user", f"{world.context('abc')}\n\nWhich?")
    world.one(first, conversation_id=conversation_id)
    later = world.one(
        first,
        PromptPart("assistant", "That."),
        PromptPart("user", f"{world.context('bd')}\n\nWhy?"),
        conversation_id=conversation_id,
    )
    assert later.texts[2] == (
        "Please refer to [Doc_b] in the previous conversation.\n\n"
        f"[Doc_d] {block('d').text}\n\nWhy?"
    )
    [plan] = later.plans
    assert plan.references == ("b",)


def test_a_turn_that_the_user_has_edited_is_not_referred_to():
    world = World()
    world.one(PromptPart("user", f"{world.context('abc')}\n\nWhich?"), conversation_id="c1")
    later = world.one(
        PromptPart("user", "Never mind."),
        PromptPart("assistant", "Fine."),
        PromptPart("user", f"{world.context('bd')}\n\nWhy?"),
        conversation_id="c1",
    )
    assert letters_in(later.texts[2]) == "bd"


def test_the_first_turn_is_ordered_like_any_context_and_unlabelled_blocks_are_shown_again():
    world = World()
    parts = (PromptPart("system", "Be brief."), PromptPart("user", "Facts:"))
    world.one(*parts, PromptPart("user", world.context("abc")), conversation_id="c1")
    planned = world.one(*parts, PromptPart("user", world.context("cab")), conversation_id="c2")
    assert letters_in(planned.texts[2]) == "abc"

    world = World()
    parts = PromptPart("user", f"{block('b').text}\n\nIs it so?"), PromptPart("assistant", "No.")
    turn = PromptPart("user", f"{world.context('bd')}\n\nWhy?")
    later = world.one(*parts, turn, conversation_id="c1")
    assert later.texts[2] == turn.text


def test_a_tenants_answered_turn_is_not_shown_in_another_tenants_form():
    world = World()
    world.user(world.context("abc", "one"), tenant="one")
    question = world.context("cab", "one")
    assert letters_in(world.user(question, tenant="one")) == "abc"
    answered = (
        PromptPart("user", question),
        PromptPart("assistant", "A."),
        PromptPart("user", "Why?"),
    )
    assert letters_in(world.one(*answered, tenant="two").texts[0]) == "cab"
    assert letters_in(world.one(*answered, tenant="one").texts[0]) == "abc"


def test_calls_that_wait_together_are_planned_as_one_batch():
    world = World()
    texts = [
        f"{world.context(letters)}\n\nQ{number}?"
        for number, letters in enumerate(["abx", "cdy", "bza", "wdc"])
    ]
    planned = world.plan(*(ScopedPrompt((PromptPart("user", text),)) for text in texts))
    assert [one.position for one in planned] == [0, 2, 1, 3]
    assert [letters_in(one.texts[0]) for one in planned] == ["abx", "abz", "cdy", "cdw"]
    for one in planned:
        assert sorted(letters_in(one.texts[0])) == sorted(letters_in(texts[one.position]))
        assert one.texts[0].endswith(f"Q{one.position}?")


def test_prompts_without_contexts_are_scheduled_by_common_beginnings_of_their_tenant():
    world = World()
    prompts = ["x" * 100 + "1", "y" * 100, "x" * 100 + "2", "z"]
    planned = world.plan(*(ScopedPrompt((PromptPart("user", text),)) for text in prompts))
    assert [one.position for one in planned] == [0, 2, 1, 3]
    assert [one.texts[0] for one in planned] == [prompts[one.position] for one in planned]
    scopes = [RequestScope(tenant=name) for name in ("t1", "t2", "t1")]
    calls = [ScopedPrompt((PromptPart("user", "x" * 500),), scope) for scope in scopes]
    assert [one.position for one in world.plan(*calls)] == [0, 2, 1]


@given(st.lists(st.sampled_from(["abc", "cab", "xyz", "", "zb"]), max_size=8))
def test_each_call_comes_back_once(contexts):
    world = World()
    calls = [
        ScopedPrompt((PromptPart("user", world.context(letters) + "?"),)) for letters in contexts
    ]
    planned = world.plan(*calls)
    assert sorted(one.position for one in planned) == list(range(len(contexts)))
    for one in planned:
        assert sorted(letters_in(one.texts[0])) == sorted(contexts[one.position])


def test_a_call_that_was_not_sent_can_be_taken_back():
    world = World()
    [planned] = world.plan(ScopedPrompt((PromptPart("user", world.context("abc")),)))
    assert world.planner.statistics().requests == 1
    world.prompts.forget(planned.plans)
    world.prompts.forget(planned.plans)
    assert world.planner.statistics().requests == 0
    assert letters_in(world.user(world.context("cab"))) == "cab"


def test_taking_back_a_call_leaves_another_tenants_request_of_the_same_id_alone():
    world = World()
    ours, theirs = (
        world.one(PromptPart("user", world.context("abc", tenant)), tenant=tenant)
        for tenant in "ab"
    )
    assert ours.plans[0].request_id == theirs.plans[0].request_id
    world.prompts.forget(theirs.plans)
    assert world.planner.evict([ours.plans[0].request_id], "b").requests == 0
    assert world.planner.evict([ours.plans[0].request_id], "a").requests == 1


def test_templates_strategy_and_planner_are_used_as_they_are_given():
    templates = Templates(label="<{id}>", block="{label}\n{text}", separator="\n---\n")
    world = World(ReusePlanner(templates=templates))
    sent = world.user(f"{world.registry.render([block('a'), block('b')])} Which?")
    assert sent == f"<a>\n{block('a').text}\n---\n<b>\n{block('b').text} Which?"
    world = World(strategy="none")
    world.user(world.context("abc"))
    assert world.user(world.context("cab")) == world.context("cab")
    planner = ReusePlanner()
    assert planner_or_new(planner) is planner
    assert isinstance(planner_or_new(None), ReusePlanner)
    assert planner_or_new(None) is not planner_or_new(None)


@pytest.mark.parametrize("planner", ["planner", 3, ReusePlanner])
def test_a_planner_of_another_type_is_refused(planner):
    with pytest.raises(InvalidRequestError, match=r"planner must be a ctxreuse\.ReusePlanner"):
        planner_or_new(planner)
    with pytest.raises(InvalidRequestError, match=r"leave it out"):
        PromptPlanner(planner)


def test_other_registries_and_strategies_are_refused():
    with pytest.raises(InvalidRequestError, match="registry must be a ContextRegistry or None"):
        PromptPlanner(ReusePlanner(), registry="shared")
    with pytest.raises(UnknownStrategyError, match="no strategy 'fast'"):
        PromptPlanner(ReusePlanner(), "fast")


def test_many_sent_forms_are_forgotten_again(monkeypatch):
    monkeypatch.setattr("ctxreuse.adapters.prompt_planner._REMEMBERED_CHARACTERS", 3_000)
    world = World()
    world.user(world.context("abc"))
    questions: Sequence[str] = [f"{number} {world.context('cab')}" for number in range(5)]
    for question in questions:
        world.user(question)
    held = world.prompts.statistics()
    assert held.sent_texts == 2
    assert 2 * 900 < held.sent_characters <= 3_000


asked = st.lists(st.tuples(st.sampled_from("AB"), st.text("abcde", max_size=4)), max_size=3)


@given(st.lists(asked, max_size=6))
@example([[("A", "eb"), ("B", "")], [("A", "cb"), ("B", "a")]])
def test_who_asks_at_the_same_time_does_not_change_what_another_tenant_is_sent(batches):
    def sent_to_a(batches: list[list[tuple[str, str]]]) -> list[tuple[str, ...]]:
        world, texts = World(), []
        for batch in batches:
            prompts = [
                ScopedPrompt((PromptPart("user", world.context(letters, who)),), RequestScope(who))
                for who, letters in batch
            ]
            texts += [one.texts for one in world.plan(*prompts) if batch[one.position][0] == "A"]
        return texts

    assert sent_to_a(batches) == sent_to_a([[one for one in b if one[0] == "A"] for b in batches])


def test_a_planner_that_finds_nothing_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(prompt_planner, "ISSUED_PLANS", IssuedPlans())
    prompt_planner._log_nothing_found.cache_clear()
    planner = PromptPlanner(registry=ContextRegistry())
    bare = ScopedPrompt((PromptPart("user", "The Seine flows through Paris. Which?"),))
    planner.plan([bare] * 19)
    assert not caplog.records
    for _ in range(3):
        planner.plan([bare])
    [record] = caplog.records
    assert "format_context" in record.getMessage()
    assert "Seine" not in record.getMessage()
    assert planner.statistics().without_context == 22


def test_a_planner_beside_a_retriever_that_plans_does_not_complain(caplog, monkeypatch):
    monkeypatch.setattr(prompt_planner, "ISSUED_PLANS", issued := IssuedPlans())
    prompt_planner._log_nothing_found.cache_clear()
    issued.issue({"blocks": ["a"]}, Turn("", None, None), 1)
    bare = ScopedPrompt((PromptPart("user", "The Seine flows through Paris. Which?"),))
    PromptPlanner(registry=ContextRegistry()).plan([bare] * 30)
    assert not caplog.records


def test_a_planner_that_has_found_a_context_does_not_complain(caplog):
    prompt_planner._log_nothing_found.cache_clear()
    registry = ContextRegistry()
    planner = PromptPlanner(registry=registry)
    context = registry.render([ContextBlock(id="a", text="text a")])
    planner.plan([ScopedPrompt((PromptPart("user", f"{context}\n\nWhich?"),))])
    planner.plan([ScopedPrompt((PromptPart("user", "And?"),))] * 30)
    assert not caplog.records
    assert planner.statistics().without_context == 30


@pytest.mark.usefixtures("new_objects_only")
def test_what_is_remembered_of_a_prompt_is_few_objects_for_the_collector():
    world = World()

    def objects_behind(number: int) -> int:
        letters = "".join(chr(ord("a") + (number * step) % 23) for step in (1, 2, 3, 4, 5, 6, 7, 8))
        world.user(f"{world.context(letters)}\n\nWhich {number}?")
        for _ in range(3):  # it finds out from the inside what it need not look into
            gc.collect()
        return len(gc.get_objects())

    objects_behind(1)
    counts = [objects_behind(number) for number in range(2, 12)]
    # what other tests have left may come and go meanwhile
    assert median(after - before for before, after in pairwise(counts)) <= 18


def test_words_that_rank_documents_of_nobody_here_are_no_plan(monkeypatch):
    monkeypatch.setattr(prompt_planner, "ISSUED_PLANS", IssuedPlans())
    world = World()
    world.user(f"a\n\nb\n\n{world.planner.templates.order_annotation(['2', '1'])}")
    statistics = world.prompts.statistics()
    assert (statistics.planned_before, statistics.without_context) == (0, 1)
