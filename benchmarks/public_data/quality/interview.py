"""Asks an engine prompts, several at a time, and keeps each answer as it comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ctxreuse.errors import EngineError
from ctxreuse.serving import EngineClient
from public_data.quality.answer_file import AnswerFile, KeptAnswer
from public_data.quality.arms import ArmPrompt
from public_data.quality.question_sets import QuestionId

_HELLO = ({"role": "user", "content": "Hello."},)
_LOST_AFTER = 8
"""Requests in a row to which the engine does not answer at all."""


class OutOfTimeError(Exception):
    """The hours are used up."""


@dataclass(slots=True)
class Interview:
    """Asks one model."""

    client: EngineClient
    kept: AnswerFile
    concurrency: int
    is_over: Callable[[], bool]
    on_answer: Callable[[], object]
    model: str = ""
    context_tokens: int | None = None
    asked: int = 0
    _takes_salts: bool = True
    _lost: int = 0
    _failure: BaseException | None = field(default=None)

    async def begin(self) -> None:
        """Learn what the engine serves, and send what nobody measures: first requests are slow."""
        self.model = await self.client.model()
        try:
            await self.client.complete(_HELLO, cache_salt="hello", max_tokens=1)
        except EngineError as error:
            if error.status is None or not 400 <= error.status < 500:
                raise
            self._takes_salts = False  # not vLLM
            await self.client.complete(_HELLO, max_tokens=1)
        try:
            self.context_tokens = await self.client.context_window()
        except EngineError:
            self.context_tokens = None

    async def ask(
        self, prompts: Sequence[ArmPrompt], failures: Counter[str]
    ) -> dict[QuestionId, KeptAnswer]:
        """Return the answers to prompts, as many as come."""
        answers: dict[QuestionId, KeptAnswer] = {}
        is_again = any(prompt.repetition for prompt in prompts)
        waiting = iter(sorted(prompts, key=lambda prompt: prompt.text, reverse=is_again))
        workers = (self._work(waiting, answers, failures) for _ in range(self.concurrency))
        await asyncio.gather(*workers)
        if self._failure is not None:
            raise self._failure
        return answers

    async def _work(
        self,
        waiting: Iterator[ArmPrompt],
        answers: dict[QuestionId, KeptAnswer],
        failures: Counter[str],
    ) -> None:
        for prompt in waiting:
            key = prompt.key(self.model)
            answer = self.kept.get(key)
            try:
                if answer is None:
                    answer = await self._answer(prompt, failures)
                    if answer is not None:
                        self.kept.keep(key, answer)
                        self.asked += 1
                        self.on_answer()
            except Exception as error:  # raised by `ask`, once no worker is at work any more
                self._failure = self._failure or error
            if self._failure is not None:
                return
            if answer is not None:
                answers[prompt.question] = answer

    async def _answer(self, prompt: ArmPrompt, failures: Counter[str]) -> KeptAnswer | None:
        if self.is_over():
            raise OutOfTimeError
        # arms of the same prompts find caches of their own, else the engine would compute nothing
        salt = f"again {prompt.repetition}" if prompt.repetition and self._takes_salts else None
        try:
            answer = await self.client.complete(
                list(prompt.messages),
                cache_salt=salt,
                max_tokens=prompt.answer_tokens,
                temperature=0,
            )
        except EngineError as error:
            failures[_reason(error)] += 1
            refused = error.status is not None and error.status < 500
            self._lost = 0 if refused else self._lost + 1
            if self._lost >= _LOST_AFTER:
                raise
            return None
        self._lost = 0
        return KeptAnswer(
            answer.text,
            answer.prompt_tokens,
            answer.cached_tokens,
            round(answer.total_s, 3),
            answer.finish_reason == "length",
        )


def _reason(error: EngineError) -> str:
    """Return a failure in words that do not differ from prompt to prompt."""
    if error.status == 400:
        return "refused (400), as prompts are that are longer than the model's context"
    return str(error)
