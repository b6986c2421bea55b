"""Chain-of-Agents over engines with prefix caches: workers read, a manager answers from notes.

A wrong type or value raises `InvalidRequestError` everywhere.
"""

from ctxreuse.errors import MissingExtraError

try:
    from chain_of_agents.chain import ChainOfAgents
    from chain_of_agents.chain_prompts import ChainPrompts
    from chain_of_agents.trace.answer import Answer, ManagerError, Trace, UnreadError
    from chain_of_agents.trace.steps import Step
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] in ("langchain_core", "langchain_text_splitters"):
        raise MissingExtraError("chain_of_agents", "agents") from error
    raise

__all__ = [
    "Answer",
    "ChainOfAgents",
    "ChainPrompts",
    "ManagerError",
    "Step",
    "Trace",
    "UnreadError",
]
