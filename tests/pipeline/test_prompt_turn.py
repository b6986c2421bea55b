"""What becomes of a prompt: its new contexts are planned once, and sent again as they were sent."""

import gc
import re
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ReusePlanner
from ctxreuse.context.content_parts import joined
from ctxreuse.context.reported_usage import usage_of
from ctxreuse.context.scope import RequestScope
from ctxreuse.pipeline.formatting import joined_forms
from ctxreuse.pipeline.known_texts import Form, known_texts
from ctxreuse.pipeline.model_gateway import ModelGateway
from ctxreuse.pipeline.prompt_turn import (
    PlannedPrompt,
    PromptPart,
    PromptPlanner,
    ScopedPrompt,
    TextPosition,
    marked_contents,
    note_planned,
)

TEXTS = {
    letter: f"{letter.upper()} is a river. "
    + " ".join(f"It flows through {letter}{number}." for number in range(12))
    for letter in "abcdefgh"
}
LONG = {letter: " ".join([text] * 12) for letter, text in TEXTS.items()}
"""Long enough for providers, which keep prefixes from 1,024 tokens on."""


def letters_in(text: str) -> str:
    return "".join(dict.fromkeys(found[1].lower() for found in re.finditer(r"(\w) is a r", text)))


class World:
    """A planner that is asked with documents of one letter."""

    def __init__(self, *, labels: bool = False, strategy: Any = "reuse", **settings: Any) -> None:
        self.planner = ReusePlanner(**settings)
        self.prompts = PromptPlanner(self.planner, strategy)
        self.labels = labels
        self.texts = TEXTS if self.planner.cache.marks == 0 else LONG

    def context(self, letters: str, separator: str = "\n\n", tenant: str = "") -> str:
        texts = [self.texts[letter] for letter in letters]
        forms, templates = [Form(one) for one in texts], self.planner.templates
        none = [None] * len(texts)
        return joined_forms(
            forms, texts, separator, tenant, templates, labels=self.labels, ids=none
        )

    def plan(self, *parts: PromptPart, **scope: Any) -> PlannedPrompt:
        [planned] = self.prompts.plan([ScopedPrompt(parts, RequestScope(**scope))])
        return planned

    def user(self, text: str, **scope: Any) -> str:
        """Plan a prompt of one message; return what is sent."""
        [sent] = self.plan(PromptPart("user", text), **scope).texts
        return sent

    def counts(self) -> dict[str, Any]:
        counted = self.prompts.statistics()
        own = {"planned": counted.planned, "in_history": counted.in_history}
        return {
            name: number
            for name, number in {**own, "not_found": counted.not_found, **counted.in_place}.items()
            if number
        }


@pytest.fixture
def world() -> World:
    return World()


def said(*texts: str) -> tuple[PromptPart, ...]:
    return tuple(PromptPart(("user", "assistant")[n % 2], one) for n, one in enumerate(texts))


def test_no_prompt_and_no_message_may_be_planned(world):
    assert world.prompts.plan([]) == []
    assert world.plan() == PlannedPrompt(0, ())


def test_what_was_left_out_is_written_out_where_its_beginning_is_gone():
    world = World(labels=True)
    first, second = f"{world.context('abc')}\n\nWho?", f"{world.context('bd')}\n\nWhy?"
    assert "See also [" in world.plan(*said(first, "A.", second)).texts[2]
    planned = world.plan(*said(second, "B.", "So?"))
    assert letters_in(planned.texts[0]) == "db"
    assert "See also" not in planned.texts[0]
    assert planned.texts[0].endswith("\n\nWhy?")
    again = world.plan(*said(first, "A.", second, "B.", "So?"))
    assert letters_in(again.texts[2]) == "d", "where it is there again, it is referred to"


def test_the_fronts_of_one_prompt_are_no_changing_words(world):
    contexts = [world.context(letters) for letters in ("ab", "cd", "ef")]
    assert len(world.plan(*said("\n\nAlso:\n".join(contexts))).plans) == 3


@pytest.mark.parametrize("shown", ["<doc>{}</doc>", '- "{}"', "```\n{}\n```"])
def test_words_on_the_order_stand_inside_of_tags_around_and_behind_what_closes_a_text(world, shown):
    for letters in ("abc", "cab"):
        documents = "\n".join(shown.format(world.context(letter)) for letter in letters)
        sent = world.user(f"<docs>\n{documents}</docs>\nWhich?")
    moved = "\n".join(shown.format(TEXTS[letter]) for letter in "abc")
    words = "\n\nRead documents 3, 1, 2 first."
    assert sent == f"<docs>\n{moved}{words}</docs>\nWhich?"


def test_words_of_documents_are_not_the_applications(world):
    dated = [f"{text} The oldest ones are sorted." for text in TEXTS.values()]
    one, other = dated[:2], dated[2:4]
    for texts in (one, other):
        known_texts().add("", texts)
    for question in ("Which?", "Where?", "Who?"):
        parts = PromptPart("user", "\n".join(one)), PromptPart("user", "\n".join(other))
        assert len(world.plan(*parts, PromptPart("user", question)).plans) == 2


def test_words_of_an_earlier_plan_keep_the_order_that_they_speak_of(world):
    world.user(world.context("abc"))
    text = f"{world.context('cab')}\n\nRead documents 2, 3, 1 first."
    assert world.user(text) == text
    assert world.counts() == {"planned": 1, "order": 1}


asked = st.lists(
    st.tuples(st.sampled_from("AB"), st.lists(st.sampled_from("abcde"), unique=True, max_size=4)),
    max_size=3,
)


@given(st.lists(asked, max_size=5))
def test_who_asks_at_the_same_time_does_not_change_what_another_tenant_is_sent(batches):
    def sent_to_a(batches: list[list[tuple[str, list[str]]]]) -> list[tuple[str, ...]]:
        known_texts().forget_all()
        world, texts = World(), []
        for batch in batches:
            prompts = [
                ScopedPrompt(said(world.context("".join(letters), tenant=who)), RequestScope(who))
                for who, letters in batch
            ]
            planned = world.prompts.plan(prompts)
            texts += [one.texts for one in planned if batch[one.position][0] == "A"]
        return texts

    assert sent_to_a(batches) == sent_to_a([[one for one in b if one[0] == "A"] for b in batches])


turns = st.lists(
    st.tuples(
        st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=5), max_size=2),
        st.booleans(),  # whether it goes on with the conversation
    ),
    max_size=6,
)


@given(turns, st.booleans(), st.sampled_from(["\n\n", "\n", "\n\n---\n\n"]))
def test_no_document_is_lost_doubled_or_altered(turns, labels, separator):
    known_texts().forget_all()
    world = World(labels=labels)
    history: list[str] = []
    for contexts, goes_on in turns:
        if not goes_on:
            history = []
        shown = [world.context("".join(one), separator) for one in contexts]
        text = "\n\nAlso:\n".join(["Facts.", *shown, "Which?"])
        planned = world.plan(*said(*history, text))
        sent = planned.texts[-1]
        earlier = "".join(planned.texts[:-1])
        for letter in set("".join("".join(one) for one in contexts)):
            times = sent.count(TEXTS[letter]), text.count(TEXTS[letter])
            is_left_out = labels and times[0] < times[1] and TEXTS[letter] in earlier
            assert times[0] == times[1] or is_left_out
        if not labels:
            rest = [words_around(one, separator) for one in (text, sent)]
            assert rest[0] == rest[1]
        history += [text, "So."]
        assert world.plan(*said(*history, "And?")).texts[len(history) - 2] == sent


def words_around(text: str, separator: str) -> list[str]:
    """Return what a text says besides documents and words on their order."""
    for one in TEXTS.values():
        text = text.replace(one, "#")
    text = re.sub(r"\s*Read documents [\d, ]+ first\.", "", text)
    return text.split("#")


def marks_of(world: World, planned: PlannedPrompt) -> list[list[bool]]:
    """Return where the contents of a prompt have breakpoints, as they are sent."""
    positions = [TextPosition(number, None) for number in range(len(planned.texts))]
    cache = world.planner.cache
    field = "cache_control"
    marked, _ = marked_contents(list(planned.texts), planned.parts, positions, cache, field)
    return [
        [field in part for part in content] if isinstance(content, list) else []
        for content in marked
    ]


@pytest.mark.parametrize("labels", [False, True])
def test_breakpoints_stand_where_prompts_fork_and_are_no_more_than_a_request_may_have(labels):
    world = World(cache="anthropic", labels=labels)
    turns: list[str] = []
    for letters in ("abc", "abd", "abe", "abf", "bag", "bah"):
        planned = world.plan(*said(f"{world.context(letters)}\n\nWhich?"))
        assert [joined(parts) for parts in planned.parts] == list(planned.texts)
    assert letters_in(planned.texts[0])[:2] == "ab"
    [marks] = marks_of(world, planned)
    assert marks[1], "behind the two that all of them begin with"
    assert 1 <= sum(marks) <= world.planner.cache.marks
    before: tuple[str, ...] = ()
    for number, letters in enumerate(["cab", "bad", "fed", "abc", "hgf", "gab"]):
        turns.append(f"{world.context(letters)}\n\nQuestion {number}?")
        planned = world.plan(*said(*turns), conversation_id="c")
        assert [joined(parts) for parts in planned.parts] == list(planned.texts)
        assert planned.texts[: len(before)] == before
        marks_each = marks_of(world, planned)
        assert 1 <= sum(map(sum, marks_each)) <= world.planner.cache.marks
        assert marks_each[-1][-1], "the next turn goes on behind it"
        assert not any(map(any, marks_each[1::2])), "what the model said has none"
        turns.append(f"Answer {number}.")
        before = (*planned.texts, turns[-1])


def test_a_message_that_a_part_of_ours_planned_is_sent_as_it_is(world):
    world.user(world.context("abc"))
    text = world.context("cab")
    note_planned("", "user", text)
    assert world.user(text) == text
    assert world.counts() == {"planned": 2}
    assert world.plan(PromptPart("system", text)).plans, "nobody has planned this one"


class FailsOnce(ReusePlanner):
    """A planner that fails when it is asked for the third time."""

    asked = 0

    def plan(self, *args: Any, **options: Any) -> Any:
        self.asked += 1
        if self.asked == 3:
            raise RuntimeError("secret")
        return super().plan(*args, **options)


async def test_a_fault_at_a_later_context_leaves_nothing_of_the_first():
    planner, world = FailsOnce(), World()
    gateway = ModelGateway(planner, "reuse", 0.0, "ReuseChatModel", "", usage_of)
    first, second = world.context("cab"), world.context("def")
    await gateway.aplan(ScopedPrompt(said(f"{world.context('abc')}\n\nWhich?")))
    parts = PromptPart("user", first), PromptPart("user", second)
    assert (await gateway.aplan(ScopedPrompt(parts))).texts == (first, second)
    assert (gateway.fail_open.faults, planner.statistics().requests) == (1, 1)
    parts = *parts, PromptPart("assistant", "A."), *said("So?")
    later = await gateway.aplan(ScopedPrompt(parts))
    assert later.texts[:2] == (first, second), "as they were sent"


def test_a_message_of_very_many_contexts_is_sent_as_given():
    for number, outcome in ((64, "planned"), (65, "too_long")):
        known_texts().forget_all()
        world, pieces = World(annotate=False), []
        for n in range(number):
            pair = [f"#{n}# {TEXTS[letter]}" for letter in "ab"]
            known_texts().add("", pair)
            pieces.append("\n".join(pair))
        text = "\n\nAlso:\n".join(pieces)
        assert world.user(text) == text
        assert world.counts() == {outcome: 1}


@pytest.mark.usefixtures("new_objects_only")
def test_what_is_remembered_of_a_prompt_is_few_objects_for_the_collector(world):
    def objects_behind(number: int) -> int:
        context = world.context("abcdefgh"[number % 3 :])
        world.user(f"{context}\n\nWhich {number}?")
        for _ in range(3):  # it finds out from the inside what it need not look into
            gc.collect()
        return len(gc.get_objects())

    objects_behind(1)
    counts = [objects_behind(number) for number in range(2, 12)]
    # what other tests have left may come and go meanwhile
    assert median(after - before for before, after in pairwise(counts)) <= 18


def test_a_repeat_stays_where_nothing_else_moves(world):
    for letters in ("abbc", "abbd", "ababe"):
        shown = "\n\n".join(TEXTS[letter] for letter in letters)
        assert world.user(shown) == shown
