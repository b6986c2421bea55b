"""What was retrieved comes back in planned order: the same objects, as many as came."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.context.scope import RequestScope
from ctxreuse.pipeline.document_turn import DocumentPlanner, ItemKind, RetrievedItems
from ctxreuse.pipeline.known_texts import Form
from ctxreuse.pipeline.prompt_turn import PromptPart, PromptPlanner, ScopedPrompt
from virtual_clock import run_in_virtual_time


@dataclass(eq=False)
class Item:
    """A document as frameworks have them: changeable, with values of its own."""

    name: str
    score: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.name.upper()} is a river. " + f"It flows through {self.name}. " * 20


def by_score(items: Sequence[Item]) -> list[Item]:
    return sorted(items, key=lambda one: -one.score)


def kind(**options: Any) -> ItemKind[Item]:
    return ItemKind(
        block_of=lambda one: ContextBlock(text=one.text),
        forms_of=lambda items: [[one.text for one in items]],
        annotation_of=lambda words, items: Item(words, metadata={"of": len(items)}),
        **options,
    )


def documents(planner: ReusePlanner | None = None, **options: Any) -> DocumentPlanner[Item]:
    ranked = options.pop("ranked", list)
    made = ReusePlanner() if planner is None else planner
    return DocumentPlanner(made, kind(ranked=ranked), "ReuseRetriever", **options)


@pytest.mark.parametrize("drop_repeats", [False, True])
def test_in_shadow_mode_items_come_as_given_and_count_as_unseen(drop_repeats):
    planner = ReusePlanner(mode="shadow")
    planned = documents(planner, ranked=by_score, drop_repeats=drop_repeats, annotation=True)
    for names in ("abc", "cba", "bab"):
        items = [Item(name, ord(name)) for name in names]
        assert planned.plan(retrieved(items)) == items
    assert (planner.savings.unseen, planner.savings.requests) == (3, 0)


def items_of(names: str) -> list[Item]:
    return [Item(name) for name in names]


def retrieved(items: Sequence[Item], tenant: str = "") -> RetrievedItems[Item]:
    return RetrievedItems(items, "Which?", RequestScope(tenant))


def plan(made: DocumentPlanner[Item], names: str, tenant: str = "") -> str:
    return names_of(made.plan(retrieved(items_of(names), tenant)))


def names_of(items: Sequence[Item]) -> str:
    return "".join(one.name for one in items)


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=7), max_size=5), st.booleans())
def test_as_many_come_back_as_came(contexts, drop_repeats):
    made = documents(drop_repeats=drop_repeats)
    for names in contexts:
        given_items = items_of("".join(names))
        planned = made.plan(retrieved(given_items))
        unique = len(set(names))
        assert len(set(names_of(planned[:unique]))) == unique, "repeats stand behind"
        assert {id(one) for one in planned} <= {id(one) for one in given_items}
        assert len({id(one) for one in planned}) == len(planned)
        assert len(planned) == (unique if drop_repeats else len(names))


def test_items_that_do_not_come_best_first_are_ranked_as_they_say():
    made = documents(annotation=True, ranked=by_score)
    names, scores = "abc", (0.1, 0.9, 0.5)
    planned = made.plan(retrieved([Item(*one) for one in zip(names, scores, strict=True)]))
    assert names_of(planned) == "bca"
    planned = made.plan(retrieved([Item("c", 0.1), Item("a", 0.9), Item("b", 0.5)]))
    assert names_of(planned) == "bcaRead documents 3, 1, 2 first."


@pytest.mark.parametrize("is_own", [True, False])
def test_the_wrapper_of_the_model_plans_the_same_texts_anew(is_own, planner):
    made = documents(planner)
    plan(made, "abc")
    model = planner if is_own else ReusePlanner()
    items = made.plan(retrieved(items_of("cab")))
    text = "Facts:\n" + "\n\n".join(one.text for one in items) + "\n\nWhich?"
    [planned] = PromptPlanner(model).plan([ScopedPrompt((PromptPart("user", text),))])
    assert planner.statistics().requests == 2, "its own plan stands in place of the retriever's"
    assert (model.savings.requests, planner.savings.unseen) == (1, 1 if is_own else 2)
    [own] = planned.plans
    assert [block.text[0] for block in own.request.blocks] == ["C", "A", "B"], "best first"


def test_several_queries_are_planned_together():
    batch = [retrieved(items_of(names)) for names in ("abx", "cdy", "bza", "wdc")]
    planned = [names_of(one) for one in documents().plan_batch(batch)]
    assert [one[:2] for one in planned] == ["ab", "cd", "ab", "cd"]
    assert list(map(sorted, planned)) == list(map(sorted, ("abx", "cdy", "bza", "wdc")))


@pytest.mark.parametrize("names", [("abx", "bza"), ("cdy", "wdc")])
def test_calls_at_the_same_time_are_planned_together(names):
    made = documents()

    async def both() -> list[list[Item]]:
        return list(await asyncio.gather(*(made.aplan(retrieved(items_of(one))) for one in names)))

    planned = [names_of(one) for one in run_in_virtual_time(both())]
    assert planned[0][:2] == planned[1][:2]
    assert list(map(sorted, planned)) == list(map(sorted, names))


def test_what_is_no_text_goes_through_as_it_came():
    made = documents()
    broken = [Item("a"), Item(7)]  # type: ignore[arg-type]
    assert made.plan(retrieved(broken)) == broken
    assert made.fail_open.faults == 1
    assert plan(made, "ab") == "ab"


def test_what_can_be_read_once_only_is_read_once():
    made = documents()
    assert names_of(made.plan(retrieved(iter(items_of("abc"))))) == "abc"  # type: ignore[arg-type]
    assert made.plan(retrieved([])) == []


def test_neighbours_of_a_document_stay_in_reading_order():
    def followed(items: Sequence[Item]) -> list[Form]:
        follower = {"f": "g", "b": "c"}
        return [Form(one.text, None, one.name, follower.get(one.name)) for one in items]

    made = DocumentPlanner(ReusePlanner(), kind(followed=followed), "Test")
    for names in ("gbfc", "fgbc"):
        [planned] = made.plan_batch([retrieved(items_of(names))])
    assert names_of(planned) == "fgbc"
