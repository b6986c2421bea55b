"""A batch whose prompts were planned together, in the order in which its calls are started."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from langchain_core.runnables import RunnableConfig

from ctxreuse.pipeline.model_gateway import ModelGateway
from ctxreuse.pipeline.prompt_turn import PlannedPrompt
from langchain_ctxreuse.messages import PromptTexts


class PlannedBatch:
    """Inputs in planned order, and plans until they are taken; the rest is forgotten at its end."""

    def __init__(
        self,
        inputs: Sequence[Any],
        configs: Sequence[RunnableConfig],
        planned: Mapping[int, tuple[PromptTexts, PlannedPrompt]],
        gateway: ModelGateway,
    ) -> None:
        self.positions = list(dict.fromkeys([*planned, *range(len(inputs))]))
        self.inputs = [inputs[position] for position in self.positions]
        self.configs = [configs[position] for position in self.positions]
        self.at_a_time = configs[0].get("max_concurrency") if configs else None
        if self.configs:  # LangChain asks the first one that it gets
            self.configs[0] = {**self.configs[0], "max_concurrency": self.at_a_time}
        self._gateway = gateway
        self._plans: dict[object, deque[PlannedPrompt]] = defaultdict(deque)
        for texts, plan in planned.values():
            self._plans[texts.said].append(plan)

    def take(self, texts: PromptTexts) -> PlannedPrompt | None:
        """Return the plan of a prompt that says the same, once."""
        with suppress(IndexError):
            return self._plans.get(texts.said, deque()).popleft()
        return None

    def __enter__(self) -> PlannedBatch:
        return self

    def __exit__(self, *error: object) -> None:
        for plans in self._plans.values():
            while plans:
                self._gateway.forget(plans.popleft())
