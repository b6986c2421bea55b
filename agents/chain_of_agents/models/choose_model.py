"""The AgentModel for the model, address or pool that a user gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.runnables import Runnable

from chain_of_agents.models.agent_model import AgentModel
from chain_of_agents.models.framework_models import LangChainModel, LlamaIndexModel
from chain_of_agents.models.pool_model import PoolModel
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.pool.engine_pool import EnginePool


def as_model(
    llm: object,
    planner: ReusePlanner,
    concurrency: int,
    params: Mapping[str, Any],
    client: Mapping[str, Any],
) -> AgentModel:
    """Return the AgentModel for what the user gives.

    Args:
        llm: A LangChain chat model, a LlamaIndex LLM, an address or several, or an `EnginePool`.
        planner: Plans the prompts; a pool's replicas get planners with its settings.
        concurrency: Requests that run at a time on each engine.
        params: Sent with each request to an engine.
        client: Arguments of an `EnginePool` that is made here.

    Raises:
        InvalidRequestError: wrong type, or options that belong to another kind of model.
    """
    if isinstance(llm, EnginePool):
        if client:
            raise InvalidRequestError(
                f"{', '.join(client)}: give these to the EnginePool, which is made already"
            )
        return PoolModel(llm, params, owned=False)
    if isinstance(llm, str) or (
        isinstance(llm, Sequence) and llm and all(isinstance(one, str) for one in llm)
    ):
        pool = EnginePool(llm, planner=planner, concurrency=concurrency, **client)
        return PoolModel(pool, params, owned=True)
    if params or client:
        raise InvalidRequestError(
            f"{', '.join([*params, *client])}: these are for addresses; set them on the model"
        )
    if isinstance(llm, Runnable):
        return LangChainModel(llm, planner, concurrency)
    if hasattr(llm, "achat") and hasattr(llm, "metadata"):
        return LlamaIndexModel(llm, planner, concurrency)
    raise InvalidRequestError(
        "llm must be a LangChain chat model, a LlamaIndex LLM, an address such as "
        f"'http://127.0.0.1:8000/v1', a list of addresses or an EnginePool, not {describe(llm)}"
    )
