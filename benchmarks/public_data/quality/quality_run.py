"""The quality benchmark, from its options to its results."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from ctxreuse.errors import EngineError, InvalidRequestError, describe
from ctxreuse.measure.options import option
from ctxreuse.serving import EngineClient
from public_data.benchmark import DataConfig
from public_data.quality.answer_file import AnswerFile, KeptAnswer
from public_data.quality.arms import (
    DEDUPLICATED,
    Arm,
    ArmPrompt,
    ArmPrompts,
    annotation_words,
    arms_of,
)
from public_data.quality.interview import Interview, OutOfTimeError
from public_data.quality.quality_results import (
    ENGINE_GONE,
    INTERRUPTED,
    ArmAnswers,
    QualityResults,
    Scored,
    SetResult,
    change,
)
from public_data.quality.question_sets import QuestionId, QuestionSet

ROUND = 50
"""Questions that all arms are asked before the next ones come: what is compared stays complete."""

_LINE_EVERY_S = 30.0

Report = Callable[[str], object]
"""Takes lines of progress."""


@dataclass(frozen=True, kw_only=True)
class QualityConfig(DataConfig):
    """What is asked, and for how long."""

    question_set: Sequence[str] = option(
        "xquad-k5, xquad-k15, locomo-k20, mtrag-k5 of the folder of public data, or "
        "python-reference; several may be given. Without it, all of the folder.",
        (),
    )
    questions: int | None = option(
        "Questions a set that the main arms are asked: as retrieved, reordered, annotated, best "
        "first (annotated or not), de-duplicated. Without it 612, 200, 200 and 100 of the four "
        "sets, and all of others.",
        None,
        min=1,
    )
    other_questions: int | None = option(
        "Questions a set that the other arms are asked. Without it, 100.", None, min=1
    )
    arm: Sequence[str] = option(
        "An arm to compare with the answers as retrieved; several may be given: reordered; "
        "annotated; best first (reordered behind the best block, keep_best); best first, "
        "annotated; de-duplicated; as retrieved, again (how far answers differ by themselves); "
        "reversed; shuffled (how much order matters at all to this model); annotated: NAME. "
        "Without it, all.",
        (),
    )
    system: str | None = option(
        "A system text instead of the set's own, which asks for the shortest phrase.", None
    )
    hours: float | None = option("Stop after so many hours; run it again to go on.", None)
    answers: Path | None = option(
        "The file that keeps answers by prompt, for the next run to go on from. Without it, "
        "answers.jsonl in the output's folder.",
        None,
    )
    concurrency: int = option("Prompts at a time.", 4, min=1)

    def __post_init__(self) -> None:
        if self.base_url is None:
            raise InvalidRequestError(
                "quality asks an engine; start one (make vllm) and name it: --base-url "
                "http://127.0.0.1:8000/v1"
            )
        if self.hours is not None and not 0 < self.hours < float("inf"):
            raise InvalidRequestError(f"--hours must be more than 0, not {describe(self.hours)}")

    def chosen_sets(self, sets: Sequence[QuestionSet]) -> Iterator[QuestionSet]:
        """Yield the sets as they are asked: in random order, with the numbers asked for."""
        for one in sets:
            fields: dict[str, Any] = {
                name: value
                for name in ("questions", "other_questions", "system", "answer_tokens")
                if (value := getattr(self, name)) is not None
            }
            yield replace(one.shuffled(self.seed), **fields)

    def settings(self) -> dict[str, Any]:
        """Return what a reader of the results should know of it."""
        names = ("questions", "other_questions", "hours", "concurrency", "seed")
        return {name: getattr(self, name) for name in names}


def run_quality(
    config: QualityConfig,
    sets: Sequence[QuestionSet],
    report: Report,
    clock: Callable[[], float] = time.monotonic,
) -> QualityResults:
    """Ask the questions of all sets, in rounds, until a limit is reached or it is interrupted."""
    assert config.base_url is not None, "checked"
    client = EngineClient(config.base_url, config.model, api_key=config.api_key)
    with AnswerFile(config.answers or Path("answers.jsonl")) as kept, asyncio.Runner() as runner:
        benchmark = _Benchmark(config, client, kept, report, clock)
        try:
            stopped = runner.run(benchmark.ask(list(config.chosen_sets(sets))))
        except KeyboardInterrupt:
            if not benchmark.sets:
                raise
            stopped = INTERRUPTED
        finally:
            runner.run(client.aclose())
        return benchmark.results(stopped)


class _AskedSet:
    """A question set while it is asked."""

    def __init__(
        self, questions: QuestionSet, numbers: Sequence[int], arms: Sequence[Arm], seed: int
    ) -> None:
        self.questions = questions
        self.arms = arms
        self.prompts = ArmPrompts(questions, seed)
        self.answers = [ArmAnswers(arm.name, annotation_words(arm)) for arm in arms]
        self.failures = [Counter[str]() for _ in arms]
        self.histories: dict[int, list[str]] = {}
        self.base_texts: dict[QuestionId, str] = {}
        self.seconds = 0.0
        self.new_cells = 0
        """Answers of this run to scored questions, those included that another arm was given."""
        self._sizes = {number: len(questions.scored(number)) for number in numbers}
        self._rounds = list(self._split(numbers))

    def _split(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield the conversations of each round."""
        part: list[int] = []
        scored = 0
        for number in numbers:
            part.append(number)
            scored += self._sizes[number]
            if scored >= ROUND:
                yield part
                part, scored = [], 0
        if part:
            yield part

    def scored_turns(self, number: int) -> list[int]:
        """Return which turns of a conversation are scored, from 0."""
        references = self.questions.references
        turns = self.questions.conversations[number]
        return [turn for turn, one in enumerate(turns) if one.request_id in references]

    def goes_on(self, number: int) -> bool:
        """Return whether any arm is asked something in a round."""
        return number < len(self._rounds) and bool(self.asked_in(number, self.arms[0]))

    def asked_in(self, number: int, arm: Arm) -> list[int]:
        """Return the conversations that an arm is asked in a round."""
        if arm is self.arms[0] and len(self.arms) > 1:  # as many as any other needs
            return max((self.asked_in(number, one) for one in self.arms[1:]), key=len)
        before = sum(self._sizes[one] for part in self._rounds[:number] for one in part)
        chosen = []
        for one in self._rounds[number]:
            if before >= self._most(arm):
                break
            chosen.append(one)
            before += self._sizes[one]
        return chosen

    def left(self) -> int:
        """Return how many questions remain to be asked, over all arms, at most."""
        return sum(
            max(0, sum(self._sizes[one] for one in self.asked(arm)) - len(answers.scored))
            for arm, answers in zip(self.arms, self.answers, strict=True)
        )

    def asked(self, arm: Arm) -> Iterator[int]:
        """Yield the conversations that an arm is asked in all rounds."""
        for number in range(len(self._rounds)):
            yield from self.asked_in(number, arm)

    def _most(self, arm: Arm) -> int:
        return self.questions.questions if arm.is_main else self.questions.other_questions

    def result(self) -> SetResult:
        """Return what has come out so far."""
        for arm, failures in zip(self.answers, self.failures, strict=True):
            arm.failures = dict(failures)
            arm.scored = {
                one.request_id: arm.scored[one.request_id]
                for part in self._rounds
                for number in part
                for one in self.questions.scored(number)
                if one.request_id in arm.scored
            }
        return SetResult(
            self.questions.name,
            self.questions.system,
            self.questions.answer_tokens,
            tuple(self.answers),
        )


class _Benchmark:
    """A run of the benchmark."""

    def __init__(
        self,
        config: QualityConfig,
        client: EngineClient,
        kept: AnswerFile,
        report: Report,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._kept = kept
        self._report = report
        self._clock = clock
        self._began = self._last_line = clock()
        self._place = ""
        self.interview = Interview(
            client, kept, config.concurrency, self._is_over, self._after_answer
        )
        self.sets: list[_AskedSet] = []
        self._left_out: list[str] = []

    async def ask(self, sets: Sequence[QuestionSet]) -> str:
        """Ask all rounds; return why that ended, in words."""
        chosen = [(one, arms_of(self._config.arm, has_turns=one.has_turns)) for one in sets]
        await self.interview.begin()
        for questions, arms in chosen:
            if DEDUPLICATED.name in self._config.arm and DEDUPLICATED not in arms:
                self._left_out.append(
                    f"{questions.name}: the arm {DEDUPLICATED.name} needs conversations, and these "
                    "are single questions"
                )
            numbers = self._fitting(questions)
            self.sets.append(_AskedSet(questions, numbers, arms, self._config.seed))
        for asked in self.sets:
            self._recall(asked)
        self._report(
            f"{self.interview.model}: {sum(asked.left() for asked in self.sets):,} answers to ask "
            f"for at most; {self._kept.earlier:,} are kept in {self._kept.path}"
        )
        try:
            for number in count():
                going_on = [asked for asked in self.sets if asked.goes_on(number)]
                if not going_on:
                    break
                for asked in going_on:
                    await self._ask_round(asked, number)
        except OutOfTimeError:
            return f"--hours {self._config.hours:g} are used up"
        except EngineError as error:
            if not self.interview.asked:
                raise
            return f"{ENGINE_GONE}: {error}"
        return "every arm was asked all"

    def results(self, stopped: str) -> QualityResults:
        """Return what has come out so far."""
        unanswered = sum(one.total() for asked in self.sets for one in asked.failures)
        is_over = stopped.startswith("every arm")
        if is_over and unanswered:
            stopped += (
                f"; {unanswered:,} prompts were not answered, and are asked again the next time"
            )
        return QualityResults(
            model=self.interview.model,
            sets=tuple(asked.result() for asked in self.sets),
            stopped=stopped,
            is_complete=is_over and not unanswered,
            settings=self._config.settings(),
            asked=self.interview.asked,
            seconds=self._clock() - self._began,
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        notes = [f"{self.interview.asked:,} answers are new; all are kept in {self._kept.path}."]
        notes += self._left_out
        if any(asked.questions.has_turns for asked in self.sets):
            notes.append(
                "In conversations, the history of every arm holds the answers that were given as "
                "retrieved, and later turns keep the retriever's order: arms differ in the first "
                "turn's order, and in what is de-duplicated."
            )
        return tuple(notes)

    def _fitting(self, questions: QuestionSet) -> list[int]:
        numbers = questions.fitting(self.interview.context_tokens)
        if not numbers:
            raise InvalidRequestError(
                f"{questions.name}: no question with a right answer fits the model's "
                f"{self.interview.context_tokens:,} tokens; serve it with a longer context "
                "(--max-model-len)"
            )
        scored = len(questions.fitting(None))
        if len(numbers) < scored:
            kind = "conversations" if questions.has_turns else "questions"
            self._left_out.append(
                f"{questions.name}: {scored - len(numbers):,} of {scored:,} {kind} do not fit the "
                f"model's {self.interview.context_tokens:,} tokens and were not asked; serve it "
                "with a longer context (--max-model-len) to ask them, too"
            )
        return numbers

    async def _ask_round(self, asked: _AskedSet, number: int) -> None:
        asked_before = self.interview.asked
        for place, arm in enumerate(asked.arms):
            numbers = asked.asked_in(number, arm)
            self._place = f"{asked.questions.name}, {arm.name}"
            began, answers_before = self._clock(), len(asked.answers[place].scored)
            new_before = self.interview.asked
            try:
                if place == 0:
                    await self._ask_base(asked, numbers)
                else:
                    await self._ask_arm(asked, place, numbers)
            finally:
                if self.interview.asked > new_before:
                    asked.seconds += self._clock() - began
                    asked.new_cells += len(asked.answers[place].scored) - answers_before
        if self.interview.asked > asked_before:
            self._report_round(asked)

    def _recall(self, asked: _AskedSet) -> None:
        """Note the answers that are kept, so that they count from the beginning."""
        for place, arm in enumerate(asked.arms):
            for one in asked.asked(arm):
                if place == 0:
                    self._recall_base(asked, one)
                prompts = list(self._scored_prompts(asked, arm, one))
                kept = [self._note(asked, place, prompt) for prompt in prompts]
                if place > 0 and not (kept and all(kept)):
                    break

    def _recall_base(self, asked: _AskedSet, number: int) -> None:
        """Note the history of a conversation, if all of it is kept."""
        answers: list[str] = []
        for _ in range(asked.scored_turns(number)[-1] + 1):
            prompt = self._turn(asked, asked.arms[0], number, answers)
            answer = self._kept.get(prompt.key(self.interview.model))
            if answer is None:
                return
            answers.append(answer.said)
        asked.histories[number] = answers

    async def _ask_base(self, asked: _AskedSet, numbers: Sequence[int]) -> None:
        """Ask every turn up to the last scored one; the answers become all arms' history."""
        histories = {number: list[str]() for number in numbers}
        waiting = list(numbers)
        arm = asked.arms[0]
        while waiting:
            turns = {one: self._turn(asked, arm, one, histories[one]) for one in waiting}
            answers = await self._answers(asked, 0, list(turns.values()))
            going_on = []
            for number, prompt in turns.items():
                answer = answers.get(prompt.question)
                if answer is None:
                    continue
                histories[number].append(answer.said)
                if len(histories[number]) > asked.scored_turns(number)[-1]:
                    asked.histories[number] = histories[number]
                else:
                    going_on.append(number)
            waiting = going_on

    async def _ask_arm(self, asked: _AskedSet, place: int, numbers: Sequence[int]) -> None:
        prompts = [
            prompt
            for number in numbers
            for prompt in self._scored_prompts(asked, asked.arms[place], number)
        ]
        await self._answers(asked, place, prompts)

    def _scored_prompts(self, asked: _AskedSet, arm: Arm, number: int) -> Iterator[ArmPrompt]:
        """Yield a conversation's prompts for scored turns; none if its history is not known."""
        if number in asked.histories:
            scored = {one.request_id for one in asked.questions.scored(number)}
            for prompt in asked.prompts.turns(arm, number, asked.histories[number][:-1]):
                if prompt.question in scored:
                    yield prompt

    def _turn(self, asked: _AskedSet, arm: Arm, number: int, answers: Sequence[str]) -> ArmPrompt:
        *_, prompt = asked.prompts.turns(arm, number, answers)
        return prompt

    async def _answers(
        self, asked: _AskedSet, place: int, prompts: Sequence[ArmPrompt]
    ) -> dict[QuestionId, KeptAnswer]:
        """Ask prompts, and note the scores of those whose right answer is known."""
        is_whole = False
        try:
            answers = await self.interview.ask(prompts, asked.failures[place])
            is_whole = True
        finally:  # after an interruption it is as with answers that are recalled
            for prompt in prompts:
                if not self._note(asked, place, prompt) and place > 0 and not is_whole:
                    break
        return answers

    def _note(self, asked: _AskedSet, place: int, prompt: ArmPrompt) -> bool:
        """Note the score of an answer, if there is one; return whether there is."""
        references = asked.questions.references.get(prompt.question)
        answer = self._kept.get(prompt.key(self.interview.model))
        if references is None or answer is None:
            return answer is not None
        base_text = asked.base_texts.setdefault(prompt.question, prompt.text)
        asked.answers[place].scored[prompt.question] = Scored.of(
            answer.said,
            references,
            is_other_prompt=prompt.text != base_text,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            seconds=answer.seconds,
            is_cut_off=answer.is_cut_off,
        )
        return True

    # time and progress

    def _is_over(self) -> bool:
        hours = self._config.hours
        return hours is not None and self._clock() - self._began >= 3_600 * hours

    def _after_answer(self) -> None:
        now = self._clock()
        if now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self._report(f"{self._place}: {self.interview.asked:,} new answers{self._forecast()}")

    def _report_round(self, asked: _AskedSet) -> None:
        self._last_line = self._clock()
        base = asked.answers[0]
        parts = [f"{asked.questions.name}: {len(base.scored):,} questions"]
        for arm in asked.answers[1:]:
            known = change(arm, base)
            if known is not None and arm.name in ("reordered", "annotated", "de-duplicated"):
                parts.append(f"{arm.name} {known.mean:+.3f} [{known.low:+.3f}, {known.high:+.3f}]")
        self._report("; ".join(parts) + self._forecast())

    def _forecast(self) -> str:
        """Return how long the rest takes, as fast as the answers of this run came."""
        known = [asked for asked in self.sets if asked.new_cells]
        if not known:
            return ""
        mean = sum(one.seconds for one in known) / sum(one.new_cells for one in known)
        left = sum(
            asked.left() * (asked.seconds / asked.new_cells if asked.new_cells else mean)
            for asked in self.sets
        )
        if self._config.hours is not None:
            left = min(left, 3_600 * self._config.hours - (self._clock() - self._began))
        minutes = max(0, round(left / 60))
        return f"; {mean:.1f} s an answer, at most {minutes // 60} h {minutes % 60:02d} min left"
