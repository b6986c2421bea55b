"""The arms of the quality benchmark: ways to show the same blocks, and the prompts that they make.

The first turns of a whole question set are planned as one batch, whatever part of it is asked, so
an arm's prompts do not depend on how many questions are asked, and kept answers stay of use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, TypeAlias

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, PAPER_TEMPLATES
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.planning.plan import Plan
from public_data.quality.question_sets import QuestionId, QuestionSet

Place: TypeAlias = Literal["before the question", "after the question", "before the documents"]
PLACES: tuple[Place, ...] = ("before the question", "after the question", "before the documents")

_FIELDS = ("{labels}", "{numbers}", "{best}", "{top}", "{opening}")
_TOP = 3
_OPENING_WORDS = 6

_Key: TypeAlias = tuple[str, str, bool, bool | None, bool]
Arrangement: TypeAlias = Literal["as retrieved", "reversed", "shuffled"]


@dataclass(frozen=True, slots=True)
class Annotation:
    """An order annotation under trial."""

    words: str
    place: Place = "before the question"
    separator: str = ", "

    def content(self, plan: Plan) -> str:
        """Return the user message of a plan with this annotation instead of the planner's."""
        if plan.order_annotation is None:
            return plan.content
        ranked = list(plan.request.unique_blocks)
        labels = [plan.label_of[key] for key in ranked]
        place_of = {block.key: str(place) for place, block in enumerate(plan.blocks, start=1)}
        numbers = [place_of[key] for key in ranked]
        words = self.words
        for name, text in zip(
            _FIELDS,
            (
                *map(self.separator.join, (labels, numbers)),
                labels[0],
                ", ".join(numbers[:_TOP]),
                " ".join(plan.request.blocks[0].text.split()[:_OPENING_WORDS]),
            ),
            strict=True,
        ):
            words = words.replace(name, text)
        return self._placed(words, plan.with_order_annotation(None))

    @property
    def names_labels(self) -> bool:
        """Whether it names labels rather than places."""
        return "{labels}" in self.words or "{best}" in self.words

    def _placed(self, words: str, plain: Plan) -> str:
        if self.place == "before the question":
            return plain.with_order_annotation(words).content
        parts = [plain.content, words]
        if self.place == "before the documents":
            parts.reverse()
        return plain.templates.separator.join(parts)


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to show the blocks."""

    name: str
    strategy: Strategy = "none"
    arrangement: Arrangement = "as retrieved"
    annotation: Annotation | None = None
    is_annotated: bool = False
    deduplicate: bool = False
    keep_best: bool = False
    is_main: bool = False
    repetition: int = 0

    @property
    def labels(self) -> bool | None:
        """Whether blocks have labels; None where the planner decides."""
        return True if self.annotation is not None and self.annotation.names_labels else None

    def content(self, plan: Plan) -> str:
        """Return the user message for a plan."""
        if self.annotation is not None:
            return self.annotation.content(plan)
        return (plan if self.is_annotated else plan.with_order_annotation(None)).content


AS_RETRIEVED = Arm("as retrieved", is_main=True)
REORDERED = Arm("reordered", "reuse", is_main=True)
ANNOTATED = Arm("annotated", "reuse", is_annotated=True, is_main=True)
BEST_FIRST = Arm("best first", "reuse", keep_best=True, is_main=True)
BEST_FIRST_ANNOTATED = replace(BEST_FIRST, name="best first, annotated", is_annotated=True)
DEDUPLICATED = Arm("de-duplicated", "reuse", is_annotated=True, deduplicate=True, is_main=True)
_OTHERS = (
    Arm("as retrieved, again", repetition=1),
    Arm("reversed", arrangement="reversed"),
    Arm("shuffled", arrangement="shuffled"),
)

TRIALS: Mapping[str, Annotation] = {
    "papers": Annotation(PAPER_TEMPLATES.order.replace("{order}", "{labels}"), separator=" > "),
    "all numbers": Annotation("Most relevant first: {numbers}"),
    "numbers, after": Annotation("Most relevant first: {numbers}", "after the question"),
    "numbers, in front": Annotation("Most relevant first: {numbers}", "before the documents"),
    "top three": Annotation("Most relevant documents: {top}"),
    "best": Annotation("{best} is the most relevant document."),
    "opening": Annotation('Read first: "{opening}..."'),
}
"""Annotations under trial: the papers', and short ones in three places."""


def arms_of(names: Sequence[str], *, has_turns: bool) -> list[Arm]:
    """Return the arms of a question set; as retrieved first."""
    arms = [
        *(AS_RETRIEVED, REORDERED, ANNOTATED, BEST_FIRST, BEST_FIRST_ANNOTATED, DEDUPLICATED),
        *_OTHERS,
        *(
            Arm(f"annotated: {name}", "reuse", annotation=one, is_annotated=True)
            for name, one in TRIALS.items()
        ),
    ]
    known = [arm.name for arm in arms]
    for name in names:
        if name not in known:
            raise InvalidRequestError(
                f"there is no arm {describe(name)}; there are: {'; '.join(known)}"
            )
    chosen = {AS_RETRIEVED.name, *names} if names else set(known)
    return [arm for arm in arms if arm.name in chosen and (has_turns or not arm.deduplicate)]


def annotation_words(arm: Arm) -> str:
    """Return what an arm's prompts say of the retriever's order, in words; "" if nothing."""
    if not arm.is_annotated:
        return ""
    if arm.annotation is None:
        words = DEFAULT_TEMPLATES
        return f"{words.order} ({PLACES[0]}, the best {words.most_ranked})"
    return f"{arm.annotation.words} ({arm.annotation.place})"


@dataclass(frozen=True, slots=True)
class ArmPrompt:
    """A prompt of one arm for one question."""

    question: QuestionId
    messages: tuple[Mapping[str, Any], ...] = field(repr=False)
    answer_tokens: int
    repetition: int = 0

    @property
    def text(self) -> str:
        """All that the model reads, for sorting: prompts that begin alike stand side by side."""
        return "\0".join(str(message["content"]) for message in self.messages)

    def key(self, model: str) -> str:
        """Return what its answer is kept under: a hash of model, prompt and limits."""
        limits = {"max_tokens": self.answer_tokens, "temperature": 0}
        asked = [model, self.messages, limits, self.repetition]
        text = json.dumps(asked, ensure_ascii=True, sort_keys=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()


class ArmPrompts:
    """Makes the prompts of all arms for one question set."""

    def __init__(self, questions: QuestionSet, seed: int) -> None:
        self._questions = questions
        self._seed = seed
        self._planners: dict[_Key, ReusePlanner] = {}
        self._first: dict[_Key, Sequence[Plan]] = {}

    def turns(self, arm: Arm, number: int, answers: Sequence[str]) -> Iterator[ArmPrompt]:
        """Yield an arm's prompts for the turns of a conversation, as far as answers go."""
        conversation = self._questions.conversations[number]
        history: list[dict[str, Any]] = []
        for turn, traced in enumerate(conversation[: len(answers) + 1]):
            plan = (
                self._first_plans(arm)[number] if turn == 0 else self._later(arm, traced, history)
            )
            content = arm.content(plan)
            messages = plan.messages()
            messages[-1]["content"] = content
            yield ArmPrompt(
                traced.request_id,
                tuple(messages),
                self._questions.answer_tokens,
                arm.repetition,
            )
            if turn < len(answers):
                history.append({"role": "user", "content": content})
                history.append({"role": "assistant", "content": answers[turn]})

    def _first_plans(self, arm: Arm) -> Sequence[Plan]:
        key = self._key(arm)
        if key not in self._first:
            requests = [self._request(arm, turns[0], []) for turns in self._questions.conversations]
            batch = self._planner(arm).plan_batch(requests, arm.strategy)
            self._first[key] = batch.in_input_order()
        return self._first[key]

    def _later(self, arm: Arm, traced: TraceRequest, history: list[dict[str, Any]]) -> Plan:
        return self._planner(arm).plan(self._request(arm, traced, list(history)), arm.strategy)

    def _planner(self, arm: Arm) -> ReusePlanner:
        planner = ReusePlanner(
            annotate=True,  # so an order is the same with words on it and without
            deduplicate=arm.deduplicate,
            labels=arm.labels,
            keep_best=arm.keep_best,
        )
        return self._planners.setdefault(self._key(arm), planner)

    def _key(self, arm: Arm) -> _Key:
        return arm.strategy, arm.arrangement, arm.deduplicate, arm.labels, arm.keep_best

    def _request(
        self, arm: Arm, traced: TraceRequest, history: list[dict[str, Any]]
    ) -> ContextRequest:
        blocks = list(traced.blocks)
        match arm.arrangement:
            case "reversed":
                blocks.reverse()
            case "shuffled":
                Random(f"{traced.request_id} {self._seed}").shuffle(blocks)
        is_turn = traced.conversation_id is not None
        return ContextRequest(
            blocks=blocks,
            query=traced.query,
            system=self._questions.system,
            history=history if is_turn else None,
            conversation_id=traced.conversation_id if is_turn else None,
            tenant=traced.tenant,
            request_id=traced.request_id,
        )
