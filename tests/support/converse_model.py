"""A chat model that sends content as langchain-aws's class of this name does, to a stand-in cache.

Texts become `{"text": ...}`, a cache point passes as it is, fields of other providers are dropped,
and the cache points of a tool's result go behind it. Runs of one role are merged.
"""

from collections.abc import Mapping
from typing import Any, Self

from caching_server import CachingServer
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatResult


class ConverseModel(BaseChatModel):
    """Sends messages to a server of `caching_server`, without a socket.

    Attributes:
        server: Reckons by Anthropic's rules, which Claude's on Bedrock are.
        sent: What Converse would get, each call.
    """

    server: Any
    sent: list[dict[str, Any]]

    @classmethod
    def at(cls, server: CachingServer) -> Self:
        return cls(server=server, sent=[])

    @property
    def _llm_type(self) -> str:
        return "amazon_bedrock_converse_chat"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        body = _converse(messages)
        tools = kwargs.get("tools") or []
        self.sent.append({**body, **({"toolConfig": {"tools": tools}} if tools else {})})
        usage = self.server.reckon(as_anthropic(self.sent[-1]), {})
        told = UsageMetadata(
            input_tokens=usage.total,
            output_tokens=1,
            total_tokens=usage.total + 1,
            input_token_details={
                "cache_read": usage.read,
                "cache_creation": sum(usage.written.values()),
            },
        )
        answer = AIMessage(self.server.answer, usage_metadata=told)
        return ChatResult(generations=[ChatGeneration(message=answer)])


class ChatBedrockConverse(ConverseModel):
    """Known by its name."""


class ChatBedrock(ConverseModel):
    """The older class, which is told by a field to use the same API."""

    beta_use_converse_api: bool = False


def _converse(messages: list[BaseMessage]) -> dict[str, Any]:
    system: list[Any] = []
    turns: list[dict[str, Any]] = []
    for message in messages:
        content = _blocks(message.content)
        if isinstance(message, SystemMessage):
            system += content
            continue
        if isinstance(message, ToolMessage):
            said = [one for one in content if "cachePoint" not in one]
            points = [one for one in content if "cachePoint" in one]
            result = {"toolUseId": message.tool_call_id, "content": said}
            content = [{"toolResult": result}, *points]
        role = "assistant" if isinstance(message, AIMessage) else "user"
        assert isinstance(message, (AIMessage, HumanMessage, ToolMessage))
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += content
        else:
            turns.append({"role": role, "content": content})
    return {"system": system, "messages": turns}


def _blocks(content: Any) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for one in [content] if isinstance(content, str) else content:
        if isinstance(one, str):
            blocks.append({"text": one})
        elif one.get("type") == "text":
            blocks.append({"text": one["text"]})
        else:
            assert "cachePoint" in one or "image" in one or "type" in one, one
            blocks.append(dict(one))
    return blocks


def as_anthropic(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Converse gets as Anthropic's protocol says it: a point marks what is before."""
    tools = (body.get("toolConfig") or {}).get("tools") or []
    system = _marked(body.get("system") or [])
    turns = [{**one, "content": _marked(one["content"])} for one in body["messages"]]
    return {"tools": _marked(tools), "system": system, "messages": turns}


def _marked(blocks: list[Any]) -> list[dict[str, Any]]:
    marked: list[dict[str, Any]] = []
    for one in blocks:
        if "cachePoint" not in one:
            said = {"type": "text", "text": one["text"]} if set(one) == {"text"} else dict(one)
            marked.append(said)
            continue
        assert one["cachePoint"]["type"] == "default"
        assert marked, "a cache point has nothing before it"
        assert "cache_control" not in marked[-1], "two cache points stand behind each other"
        life = {"ttl": one["cachePoint"]["ttl"]} if "ttl" in one["cachePoint"] else {}
        marked[-1]["cache_control"] = {"type": "ephemeral", **life}
    return marked
