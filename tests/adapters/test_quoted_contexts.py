"""Adversarial documents, questions and histories of several tenants: what is sent, and to whom.

Texts are put together from pieces of templates, from renderings of other tenants and from the
tenant's own earlier ones. Contexts stand behind a history, in a system message before it, before a
prefilled answer, or are answered by the application itself. Whatever the texts say, a prompt is
sent as given but for the contexts that the application put there, and no tenant notices another.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, get_args

from hypothesis import event, given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.adapters.prompt_draft import PromptPart, ScopedPrompt
from ctxreuse.adapters.prompt_planner import PlannedPrompt, PromptPlanner
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.rendering import render_turn
from ctxreuse.context.scope import RequestScope
from ctxreuse.planning.plan import Plan

WORDS = [
    "The T",
    "The Tagus",
    "x",
    " ",
    "",
    "[Doc_A/0/0] ",
    "[Doc_/0/0] ",
    "\n\n",
    "\n\n[Doc_A/0/1] ",
    "Question: ",
    "\n\nQuestion: ",
    "Context: ",
    "Please read the context in the following priority order: [Doc_A/0/1] > [Doc_A/0/0] and answer "
    "the question.",
    "Please refer to [Doc_A/0/0] in the previous conversation.",
    "Long: " + "y" * 400,
    "Other: " + "z" * 400,
]

TEMPLATES = [
    ["{context}\n\nQuestion: {question}"],
    ["Question: {question}\n\n{context}"],
    ["Context: {context} \nAnswer: {question}"],
    ["<context>{context}</context>{question}"],
    ["{context}", "{question}"],
    ["{question}", "{context}"],
]
Shape = Literal["behind", "in front", "prefilled", "accepted"]
"""Where the context stands: behind the history, in a system message before it, before the beginning
of an answer, or before words that the application puts into the model's mouth."""
# a number names an earlier rendering, of any tenant, counted from the latest
texts = st.lists(st.sampled_from(WORDS) | st.integers(0, 3), max_size=4)


@dataclass(frozen=True)
class Asked:
    """A request to an application: its texts, as pieces."""

    tenant: str
    documents: list[list[str | int]]
    ids: int
    question: list[str | int]
    template: list[str]
    goes_on: bool
    shape: Shape = "behind"


requests = st.builds(
    Asked,
    tenant=st.sampled_from(["A", "B", ""]),
    documents=st.lists(texts, max_size=3),
    ids=st.integers(0, 1),
    question=texts,
    template=st.sampled_from(TEMPLATES),
    goes_on=st.booleans(),
    shape=st.sampled_from(get_args(Shape)),
)


@dataclass
class Given:
    """A prompt as an application gives it, and where it put the context.

    Attributes:
        parts: Role and text of each message.
        part: Which message shows the context.
        start: Where in it.
        context: The context's text.
        blocks: What it was rendered from.
    """

    tenant: str
    parts: list[PromptPart]
    part: int
    start: int
    context: str
    blocks: list[ContextBlock]
    conversation: str | None

    @property
    def prompt(self) -> ScopedPrompt:
        return ScopedPrompt(tuple(self.parts), RequestScope(self.tenant, self.conversation))

    @property
    def place(self) -> tuple[Any, ...]:
        """Everything before the context."""
        before = [(one.role, one.text) for one in self.parts[: self.part]]
        here = self.parts[self.part]
        return (self.tenant, *before, here.role, here.text[: self.start], self.context)


@dataclass
class Application:
    """Serves several tenants with one planner, and remembers where it put contexts."""

    planner: ReusePlanner = field(default_factory=ReusePlanner)
    registry: ContextRegistry = field(default_factory=ContextRegistry)
    rendered: list[tuple[str, str, list[ContextBlock]]] = field(default_factory=list)
    places: set[tuple[Any, ...]] = field(default_factory=set)
    said: dict[str, list[PromptPart]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompts = PromptPlanner(self.planner, registry=self.registry)

    def text(self, pieces: Sequence[str | int], tenant: str | None = None) -> str:
        """Put a text together; with a tenant, of nobody else's renderings."""
        own = [text for of, text, _ in self.rendered if tenant in (None, of)]
        words = [
            one if isinstance(one, str) else own[-1 - one] if one < len(own) else ""
            for one in pieces
        ]
        return "".join(words)

    def render(self, asked: Asked, alone: bool = False) -> tuple[str, list[ContextBlock]]:
        tenant = asked.tenant if alone else None
        blocks = [
            ContextBlock(id=f"{asked.tenant}/{asked.ids}/{number}", text=self.text(one, tenant))
            for number, one in enumerate(asked.documents)
        ]
        text = self.registry.render(blocks, self.planner.templates, asked.tenant)
        self.rendered.append((asked.tenant, text, blocks))
        return text, blocks

    def prompt(
        self, asked: Asked, context: str, blocks: list[ContextBlock], alone: bool = False
    ) -> Given:
        question = self.text(asked.question, asked.tenant if alone else None)
        said = self.said.get(asked.tenant, []) if asked.goes_on else []
        template = asked.template
        if asked.shape in ("in front", "accepted"):
            template = ["{context}", "{question}"]
        parts: list[PromptPart] = []
        if asked.shape != "in front":
            parts += said
        part = start = 0
        for number, words in enumerate(template):
            before, _, behind = words.partition("{context}")
            if "{context}" in words:
                part = len(parts)
                before = before.replace("{question}", question)
                start = len(before)
                text = before + context + behind.replace("{question}", question)
            else:
                text = words.replace("{question}", question)
            is_first_of_two = number == 0 and len(template) == 2 and asked.shape != "accepted"
            is_system = is_first_of_two and (asked.shape == "in front" or not said)
            parts.append(PromptPart("system" if is_system else "user", text))
            if number == 0 and asked.shape == "accepted":
                parts.append(PromptPart("assistant", "Noted."))
            if number == 0 and asked.shape == "in front":
                parts += said
        if asked.shape == "prefilled":
            parts.append(PromptPart("assistant", "That is "))
        conversation = "c" if asked.goes_on else None
        return Given(asked.tenant, parts, part, start, context, blocks, conversation)

    def answer(self, given: Given) -> None:
        self.places.add(given.place)
        self.said[given.tenant] = [*given.parts[-3:], PromptPart("assistant", "So.")]

    def ask(self, asked: Asked, alone: bool = False) -> tuple[Given, PlannedPrompt]:
        given = self.prompt(asked, *self.render(asked, alone), alone)
        [planned] = self.prompts.plan([given.prompt])
        return given, planned

    def check(self, given: Given, planned: PlannedPrompt) -> None:
        """Check that what is sent is what was given but for contexts that were put there."""
        end = len(given.parts) - (given.parts[-1].role == "assistant")
        said = [n for n, one in enumerate(given.parts[:end]) if one.role == "assistant"]
        first = said[-1] + 1 if said else 0  # the messages before are shown as they were sent
        allowed = self.allowed(given)
        here = [
            one
            for one in allowed
            if one[0] >= first
            or given.parts[one[0]].role == "system"
            or one[:2] == (given.part, given.start)  # the template may hold the answer
        ]
        forms = [
            render_turn(one.parts, one.order_annotation, "", one.templates) for one in planned.plans
        ]
        for chosen in combinations(here, len(forms)):
            if self.is_sent(given, planned, first, chosen, forms, allowed):
                break
        else:
            raise AssertionError((given, allowed, planned))
        for (part, start, text), plan in zip(chosen, planned.plans, strict=True):
            shown = sorted((one.id, one.text) for one in plan.request.blocks)
            is_here = (part, start) == (given.part, given.start)
            sources = [given.blocks] if is_here else self.sources(given.tenant, text)
            unique = [sorted({(one.id, one.text) for one in blocks}) for blocks in sources]
            assert shown in unique
            assert all(str(one).startswith(f"{given.tenant}/") for one in plan.labels.values())

    def is_sent(
        self,
        given: Given,
        planned: PlannedPrompt,
        first: int,
        chosen: Sequence[tuple[int, int, str]],
        forms: Sequence[str],
        allowed: Sequence[tuple[int, int, str]],
    ) -> bool:
        """Return whether a prompt is sent with forms at the chosen places, and else as given.

        In messages before the `first` that no answer follows, a context that was put there may
        stand as it was sent.
        """
        wanted = self.with_forms(given, chosen, forms)
        is_last_said = given.parts[-1].role == "assistant"
        return all(
            sent == text
            or (
                (number < first or is_last_said)
                and number not in [part for part, _, _ in chosen]
                and self.is_replayed(given, planned, number, allowed)
            )
            for number, (sent, text) in enumerate(zip(planned.texts, wanted, strict=True))
        )

    def is_replayed(
        self,
        given: Given,
        planned: PlannedPrompt,
        number: int,
        allowed: Sequence[tuple[int, int, str]],
    ) -> bool:
        """Return whether a message is shown as given but for a context that was put there."""
        text, sent = given.parts[number].text, planned.texts[number]
        around = [
            (text[:start], text[start + len(context) :])
            for at, start, context in allowed
            if at == number
        ]
        return any(
            len(sent) >= len(before) + len(behind)
            and sent.startswith(before)
            and sent.endswith(behind)
            for before, behind in around
        )

    def sources(self, tenant: str, text: str) -> list[list[ContextBlock]]:
        return [blocks for of, shown, blocks in self.rendered if (of, shown) == (tenant, text)]

    def allowed(self, given: Given) -> list[tuple[int, int, str]]:
        """Return where contexts may stand: where this prompt's was put, or one before.

        Everything before it is the same there, so that it is the same prompt up to its end. Where
        an answer follows at such a place, nobody can tell a later turn, which shows the same
        documents again, from a template that holds the answer and a question that quotes them.
        """
        found = {(given.part, given.start, given.context)}
        if given.place in self.places:
            found |= {
                (number, quoted.start(), given.context)
                for number, part in enumerate(given.parts)
                if number > given.part + 1 and (given.context or not part.text)
                for quoted in re.finditer(re.escape(given.context), part.text)
            }
        for place in self.places:
            tenant, *before, role, opening, context = place
            number = len(before)
            if tenant != given.tenant or number >= len(given.parts):
                continue
            here = given.parts[number]
            same = [(one.role, one.text) for one in given.parts[:number]] == before
            if same and here.role == role and here.text.startswith(opening + context):
                found.add((number, len(opening), context))
        return sorted(found)

    def with_forms(
        self, given: Given, chosen: Sequence[tuple[int, int, str]], forms: Sequence[str]
    ) -> tuple[str, ...]:
        texts = [part.text for part in given.parts]
        for (part, start, context), form in reversed(list(zip(chosen, forms, strict=True))):
            texts[part] = texts[part][:start] + form + texts[part][start + len(context) :]
        return tuple(texts)


def noted(planned: PlannedPrompt) -> tuple[Any, ...]:
    """Return what a tenant can see of a prompt that was planned."""
    return planned.texts, [seen(plan) for plan in planned.plans]


def seen(plan: Plan) -> tuple[Any, ...]:
    return (
        plan.blocks,
        plan.references,
        dict(plan.labels),
        plan.order_annotation,
        plan.expected_cached_tokens,
    )


@given(st.lists(requests, max_size=6))
def test_prompts_are_sent_as_given_but_for_contexts_that_were_put_there(asked):
    application = Application()
    for one in asked:
        given_prompt, planned = application.ask(one)
        application.check(given_prompt, planned)
        event(f"{len(planned.plans)} planned")
        application.answer(given_prompt)


@given(st.lists(st.lists(requests, min_size=1, max_size=4), max_size=3))
def test_batches_are_sent_as_given_but_for_contexts_that_were_put_there(batches):
    application = Application()
    for batch in batches:
        contexts = [application.render(one) for one in batch]
        prompts = [
            application.prompt(replaced(one), *context)
            for one, context in zip(batch, contexts, strict=True)
        ]
        sent = application.prompts.plan([one.prompt for one in prompts])
        for given_prompt in prompts:
            application.places.add(given_prompt.place)
        for planned in sent:
            application.check(prompts[planned.position], planned)


def replaced(asked: Asked) -> Asked:
    """Return a request that is a first turn."""
    return replace(asked, goes_on=False)


@given(st.lists(requests, max_size=6))
def test_what_a_tenant_gets_does_not_depend_on_another_tenant(asked):
    together, alone = Application(), Application()
    for one in asked:
        before = together.prompts.statistics()
        given_prompt, planned = together.ask(one, alone=True)
        after = together.prompts.statistics()
        together.answer(given_prompt)
        if one.tenant != "A":
            continue
        before_alone = alone.prompts.statistics()
        same_prompt, same = alone.ask(one, alone=True)
        after_alone = alone.prompts.statistics()
        alone.answer(same_prompt)
        assert given_prompt == same_prompt
        assert noted(planned) == noted(same)
        for name in ("planned", "left_alone", "too_long"):
            assert getattr(after, name) - getattr(before, name) == (
                getattr(after_alone, name) - getattr(before_alone, name)
            )


@given(
    st.lists(
        st.tuples(st.sampled_from("AB"), st.permutations("abcd"), st.sampled_from(get_args(Shape))),
        max_size=8,
    )
)
def test_every_context_of_an_honest_program_is_planned(asked):
    application = Application()
    for number, (tenant, letters, shape) in enumerate(asked):
        documents: list[list[str | int]] = [[f"{letter}: {letter * 400}"] for letter in letters]
        ids = number % 2
        template = TEMPLATES[number % len(TEMPLATES)]
        one = Asked(tenant, documents, ids, [f"{number}?"], template, False, shape)
        _, planned = application.ask(one)
        # at a place before an answer that has shown it, it is sent as it was sent then
        assert len(planned.plans) == 1 or shape != "behind"
    statistics = application.prompts.statistics()
    assert statistics.planned + statistics.in_history == len(asked)
    assert statistics.left_alone == 0
