"""What the tests of the agent middleware share: agents, scripted models, and tools."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import count, pairwise
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, create_retriever_tool
from langchain_document_helpers import LetterRetriever, document, text_of
from langgraph.checkpoint.memory import InMemorySaver
from planning_helpers import location_words

from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseMiddleware
from langchain_ctxreuse.agents.planned_messages import sent_messages

A, B, C, D, E = (text_of(letter) for letter in "abcde")
numbers = count()


def see(letter: str) -> str:
    return location_words(f"id-{letter}")


class Scripted(FakeMessagesListChatModel):
    """Answers as scripted, and notes what a provider would be sent."""

    seen: list[list[dict[str, Any]]] = []  # noqa: RUF012  # pydantic copies it

    def bind_tools(self, tools: Any, **kwargs: Any) -> Scripted:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.seen.append(deepcopy(convert_to_openai_messages(messages)))
        return super()._generate(messages, *args, **kwargs)


def calls(*queries: str, name: str = "search") -> AIMessage:
    """Return a model's answer that calls a tool for each query, all at once."""
    return AIMessage(
        "",
        tool_calls=[
            {"name": name, "args": {"query": query}, "id": f"call-{next(numbers)}"}
            for query in queries
        ],
    )


def search_tool(retriever: Any = None, **arguments: Any) -> BaseTool:
    """Return a retriever tool for one document a letter of the query."""
    arguments = {"response_format": "content_and_artifact", **arguments}
    return create_retriever_tool(
        retriever or LetterRetriever(), "search", "Finds documents.", **arguments
    )


def agent_with(
    middleware: ReuseMiddleware | Sequence[AgentMiddleware[Any, Any, Any]],
    answers: Sequence[AIMessage],
    *tools: BaseTool,
    checkpointer: Any = None,
) -> tuple[Any, Scripted]:
    model = Scripted(responses=list(answers), seen=[])
    agent = create_agent(
        model,
        list(tools),
        system_prompt="Be brief.",
        middleware=[middleware] if isinstance(middleware, ReuseMiddleware) else list(middleware),
        checkpointer=checkpointer or InMemorySaver(),
    )
    return agent, model


def ask(agent: Any, text: Any, thread: str = "t1", **configurable: Any) -> list[BaseMessage]:
    """Ask an agent; return the messages of its state."""
    config: RunnableConfig = {"configurable": {"thread_id": thread, **configurable}}
    messages: list[BaseMessage] = agent.invoke({"messages": [HumanMessage(text)]}, config)[
        "messages"
    ]
    return messages


def results(messages: Sequence[BaseMessage]) -> list[Any]:
    return [message.content for message in messages if isinstance(message, ToolMessage)]


def sent(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the messages of a state as a model gets them."""
    return sent_messages(messages, ReusePlanner().templates)[0]


def is_append_only(seen: Sequence[Sequence[Any]]) -> bool:
    """Return whether each call's messages begin with all of the call before."""
    return all(list(after[: len(before)]) == list(before) for before, after in pairwise(seen))


def done(text: str = "Done.") -> AIMessage:
    return AIMessage(text)


def result(message_id: str, letters: str) -> ToolMessage:
    return ToolMessage(
        "\n\n".join(map(text_of, letters)),
        artifact=[document(letter) for letter in letters],
        tool_call_id=f"call-{message_id}",
        name="search",
        id=message_id,
    )
