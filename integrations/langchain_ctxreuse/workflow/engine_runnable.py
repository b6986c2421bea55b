"""The Runnable that all workflows in LangChain are."""

from __future__ import annotations

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from ctxreuse.serving.aio.runnable_bridge import Input, Output, RunnableBridge


class EngineRunnable(RunnableBridge[Input, Output, RunnableConfig], Runnable[Input, Output]):
    """Runs on a workflow engine, for asynchronous and sync callers.

    `batch` gives all inputs to the engine at once, which runs as many at a time as it takes.
    """

    def _configs(
        self, config: RunnableConfig | list[RunnableConfig] | None, count: int
    ) -> list[RunnableConfig]:
        return get_config_list(config, count)
