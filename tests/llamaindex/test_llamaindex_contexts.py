"""What an application shows of nodes, and its history: known again, moved as it stands, resent."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from block_labels import label
from helpers import contexts_in
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ToolCallBlock
from llama_index.core.memory import ChatMemoryBuffer, Memory
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool
from llamaindex_helpers import (
    LetterRetriever,
    ListChatStore,
    as_prompt,
    labelled,
    letter_nodes,
    letter_text,
    ranked,
)
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from openai_models import clients_of, openai_like

from ctxreuse import Templates
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.emulation.emulated_engine import EmulatedEngine, ToolCall
from llamaindex_ctxreuse import ReuseLLM, cited_nodes, format_context

PLAIN = MetadataMode.NONE
FOUND = "Read documents 3, 2, 1 first."


def texts(letters: str) -> list[str]:
    return [letter_text(letter) for letter in letters]


class TestFormatContext:
    def test_nodes_are_shown_as_llamaindex_shows_them_or_as_a_template_says(self):
        nodes = letter_nodes("ab")
        a, b = texts("ab")
        headed = f"source: a.txt\n\n{a}\n\nsource: b.txt\n\n{b}"
        assert format_context(nodes) == format_context(nodes, metadata_mode="all") == headed
        assert format_context(nodes, metadata_mode=PLAIN) == f"{a}\n\n{b}"
        assert format_context(nodes, "<{source}>{content}", "\n") == f"<a.txt>{a}\n<b.txt>{b}"
        template = "{metadata_str}: {content}"
        assert format_context(nodes[:1], template) == f"source: a.txt: {a}"
        assert format_context(nodes[:1], template, metadata_mode=PLAIN) == f": {a}"
        assert format_context([]) == ""

    def test_labels_are_shown_for_who_asks_for_them_each_text_once(self):
        nodes = letter_nodes("aba")
        text = format_context(nodes, metadata_mode=PLAIN, labels=True)
        assert text == labelled("ab")
        [found] = contexts_in(f"Context:\n{text}\nQuestion?")
        assert [block.text for block in found.blocks] == texts("ab")
        shown = f"source: a.txt\n\n{letter_text('a')}"
        assert format_context(nodes[:1], labels=True) == f"{label(shown)} {shown}"
        own = format_context(nodes[:2], "{content}", label="source")
        assert own == f"a.txt {letter_text('a')}\n\nb.txt {letter_text('b')}"
        ids = Templates(label="[{id}]")
        named = format_context(nodes[:1], "{content}", labels=True, templates=ids)
        assert named == f"[id-a] {letter_text('a')}"

    def test_cited_nodes_are_those_that_the_same_arguments_show(self):
        nodes = letter_nodes("ab")
        shown = f"From b.txt: {letter_text('b')}"
        assert cited_nodes(label(shown), nodes, "From {source}: {content}") == nodes[1:]
        assert cited_nodes(label(shown), nodes) == []
        assert cited_nodes("(b.txt)", nodes, label="source") == nodes[1:]
        assert cited_nodes("See a!", nodes, label=lambda one: one.text[0]) == nodes[:1]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"text_template": "{page}: {content}"}, r"nodes\[0\], id 'id-a': .*'page'.*'source'"),
            ({"text_template": "{content} {"}, "text_template"),
            ({"text_template": "{content}, {}"}, "text_template"),
            ({"text_template": "{source}: {{content}}"}, "must be .* {content} in it"),
            ({"text_template": 3}, r"text_template must be .* not 3 \(int\)"),
            ({"separator": None}, "separator"),
            ({"labels": "yes"}, "labels"),
            ({"label": "page"}, "label is 'page'.*source"),
            ({"metadata_mode": "some"}, r"MetadataMode\.ALL"),
        ],
    )
    def test_what_cannot_be_shown_is_named(self, arguments, message):
        with pytest.raises(InvalidRequestError, match=message):
            format_context(letter_nodes("a"), **arguments)

    @pytest.mark.parametrize("nodes", ["text", None, [TextNode(text="no score")]])
    def test_something_else_than_nodes_is_refused(self, nodes):
        with pytest.raises(InvalidRequestError, match="takes a list of NodeWithScore"):
            format_context(nodes)


def file_nodes(letters: str) -> list[NodeWithScore]:
    """Return the nodes of files, of which one begins and ends with an empty line."""
    nodes = [TextNode(text=f"\n{one}\n" if one[0] == "b" else one) for one in texts(letters)]
    return [NodeWithScore(node=one) for one in nodes]


class FileRetriever(LetterRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return file_nodes(query_bundle.query_str)


class TestPrompts:
    def test_it_can_be_had_for_rendered_nodes_alone(self, inner):
        llm = ReuseLLM(inner=inner, window_s=0, find_retrieved=False)
        for letters in ("abc", "cba"):
            llm.complete(format_context(letter_nodes(letters), metadata_mode=PLAIN, labels=True))
        assert inner.prompts[1] == f"{labelled('abc')}\n\n{ranked('cba')}"

    @pytest.mark.parametrize("is_by_hand", [False, True])
    def test_files_are_moved_as_a_synthesizer_or_a_program_joins_them(self, is_by_hand, inner, llm):
        files = FileRetriever()
        engine = RetrieverQueryEngine.from_args(files, llm=llm)
        for letters in ("abc", "bca", "ba"):
            if is_by_hand:
                shown = "\n\n".join(one.text for one in files.retrieve(letters))
                llm.complete(f"Context:\n{shown}\nQuestion?")
            else:
                engine.query(letters)
        for prompt, letters in zip(inner.prompts, ("abc", "abc", "ab"), strict=True):
            texts = [one.text if is_by_hand else one.text.strip() for one in file_nodes(letters)]
            assert "\n" + "\n\n".join(texts) + "\n" in prompt


def call(form: str) -> dict[str, Any]:
    """Return the fields of a message that calls a tool, as models and stores write it."""
    function = {"name": "search", "arguments": '{"text": "abc", "k": 3}'}
    sent = {"id": "call_1", "type": "function", "function": function}
    if form == "block":
        kwargs = json.loads(function["arguments"])
        block = ToolCallBlock(tool_call_id="call_1", tool_name="search", tool_kwargs=kwargs)
        return {"blocks": [block]}
    if form == "object":
        made: Any = ChatCompletionMessageFunctionToolCall.model_validate(sent)
        return {"blocks": [TextBlock(text="")], "additional_kwargs": {"tool_calls": [made]}}
    return {"additional_kwargs": {"tool_calls": [{**sent, "index": 0}]}}


class TestHistory:
    @pytest.mark.parametrize("before", ["block", "object", "dict"])
    @pytest.mark.parametrize("later", ["block", "object", "dict"])
    def test_a_message_is_the_same_by_what_goes_over_the_wire(self, before, later, inner, llm):
        def chat(form: str) -> list[ChatMessage]:
            return [
                ChatMessage(role="user", content=f"{shown}\n\nWhich?"),
                ChatMessage(role="assistant", **call(form)),
                ChatMessage(role="tool", content="found", additional_kwargs={"tool_call_id": "c"}),
            ]

        llm.complete(f"{format_context(letter_nodes('abc'))}\n\nWhich?")
        shown = format_context(letter_nodes("cba"))
        llm.chat(chat(before)[:1])
        assert FOUND in inner.prompts[-1]
        planned = inner.prompts[-1]
        edits = llm.planner.prompt_records
        llm.chat(chat(before))
        answered = ChatMessage(role="assistant", content="So.")
        llm.chat([*chat(later), answered, ChatMessage(role="user", content="And?")])
        assert inner.prompts[-2].startswith(planned)
        assert as_prompt(inner.chats[-1])[: len(planned)] == planned
        assert edits.counts() == {"planned": 2, "in_history": 2}

    @pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
    @pytest.mark.parametrize("kind", ["buffer", "memory", "saved"])
    def test_each_prompt_of_an_agent_begins_with_the_one_before(self, kind):
        def answer(body: dict[str, Any]) -> Any:
            said = body["messages"][-1]
            asked = json.dumps({"letters": str(said["content"])[:3]})
            return ToolCall("search", asked) if said["role"] == "user" else "So."

        def search(letters: str) -> str:
            """Search."""
            return format_context(letter_nodes(letters))

        async def talk() -> None:
            memory: Any = ChatMemoryBuffer.from_defaults(token_limit=30_000)
            if kind == "memory":
                memory = Memory.from_defaults(chat_store=ListChatStore(), token_limit=30_000)
            for letters in ("abc", "cba", "bac"):
                if kind == "saved":
                    saved = [one.model_dump_json() for one in memory.get_all()]
                    known = list(map(ChatMessage.model_validate_json, saved))
                    memory = ChatMemoryBuffer.from_defaults(token_limit=30_000, chat_history=known)
                agent = FunctionAgent(
                    tools=[FunctionTool.from_defaults(search)], llm=llm, streaming=False
                )
                await agent.run(f"{letters}?", memory=memory)

        engine = EmulatedEngine(answer=answer)
        bare = openai_like(*clients_of(engine.transport()), is_function_calling_model=True)
        llm = ReuseLLM(inner=bare, window_s=0)
        asyncio.run(talk())
        sent = [one["messages"] for one in engine.requests]
        assert len(sent) == 6
        for earlier, one in pairwise(sent):
            assert one[: len(earlier)] == earlier
        assert sum(one["role"] == "tool" for one in sent[-1]) == 3
