"""LangChain's callbacks, told of the agents' calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import patch_config

from chain_of_agents.observer import ObservedCall, Observer


class LangChainObserver(Observer):
    """Tells LangChain's callbacks of each agent's call, as a run inside the chain's."""

    def __init__(
        self, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
    ) -> None:
        self._run_manager = run_manager
        self._config = config

    @asynccontextmanager
    async def call(self, name: str, question: str) -> AsyncIterator[ObservedCall]:
        """Watch an agent's call: a run inside the chain's."""
        manager = self._run_manager.get_child()
        run = await manager.on_chain_start(None, {"question": question}, name=name)
        call = ObservedCall(patch_config(self._config, callbacks=run.get_child()))
        try:
            yield call
        except BaseException as error:
            await run.on_chain_error(error)
            raise
        reply = call.reply
        await run.on_chain_end({} if reply is None else {"note": reply.text})
