"""The adapters inside LlamaIndex's own engines, executors and workflows."""

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from llamaindex_helpers import LetterRetriever, RecordingLLM
from python_processes import python

from ctxreuse import ReusePlanner, request_context
from ctxreuse.context.scope import current_scope
from llamaindex_ctxreuse import ReuseLLM, ReusePostprocessor, ReuseRetriever, format_context


def letters(prompt: str) -> str:
    return "".join(part.rpartition("\n")[2].strip()[-1:] for part in prompt.split(" says: ")[:-1])


ANNOTATION = "Read documents 3, 2, 1 first."


class TestQueryEngine:
    @pytest.mark.parametrize("adapter", ["postprocessor", "retriever"])
    @pytest.mark.parametrize("is_chat_model", [True, False])
    async def test_an_unchanged_query_engine_shows_a_planned_context(self, adapter, is_chat_model):
        inner = RecordingLLM(is_chat_model=is_chat_model)
        if adapter == "postprocessor":
            engine = RetrieverQueryEngine.from_args(
                LetterRetriever(),
                llm=inner,
                node_postprocessors=[ReusePostprocessor(annotation=True)],
            )
        else:
            retriever = ReuseRetriever(LetterRetriever(), annotation=True)
            engine = RetrieverQueryEngine.from_args(retriever, llm=inner)
        engine.query("abc first?")
        response = engine.query("cba second?")
        assert str(response) == "answer 2"
        assert [letters(prompt) for prompt in inner.prompts] == ["abc", "abc"]
        assert ANNOTATION in inner.prompts[1]
        assert inner.prompts[1].index(ANNOTATION) < inner.prompts[1].index("cba second?")
        assert [node.score for node in response.source_nodes] == [0.8, 0.9, 1.0, 0.8]
        await engine.aquery("bca third?")
        assert letters(inner.prompts[2]) == "abc"


class Retrieved(Event):
    nodes: list[Any]


class Asking(Workflow):
    """Retrieves, plans and asks in steps of their own."""

    def __init__(self, llm: ReuseLLM, planner: ReusePlanner) -> None:
        super().__init__(timeout=10)
        self.llm = llm
        self.postprocessor = ReusePostprocessor(planner=planner, metadata_mode=MetadataMode.NONE)
        self.tenants: list[str | None] = []

    @step
    async def retrieve(self, event: StartEvent) -> Retrieved:
        self.tenants.append(current_scope().tenant)
        nodes = await LetterRetriever().aretrieve(event.query)
        return Retrieved(nodes=await self.postprocessor.apostprocess_nodes(nodes))

    @step
    def note(self, event: Retrieved) -> StopEvent:
        self.tenants.append(current_scope().tenant)
        text = f"{format_context(event.nodes, metadata_mode=MetadataMode.NONE)}\n\nWhich?"
        answer = self.llm.chat([ChatMessage(role="user", content=text)])
        return StopEvent(result=answer.message.content)


class TestWorkflow:
    async def test_steps_plan_in_their_requests_name(self, inner):
        workflow = Asking(ReuseLLM(inner=inner, window_s=0, send_cache_salt=True), ReusePlanner())
        for tenant, query in (("one", "abc"), ("two", "cba"), ("one", "cba")):
            with request_context(tenant=tenant):
                await workflow.run(query=query)
        assert workflow.tenants == ["one", "one", "two", "two", "one", "one"]
        assert [letters(prompt) for prompt in inner.prompts] == ["abc", "cba", "abc"]
        salts = [options["extra_body"]["cache_salt"] for options in inner.options]
        assert salts[0] == salts[2] != salts[1]


class TestPackage:
    def test_without_the_extra_the_import_names_the_command(self):
        code = (
            "import sys\n"
            "sys.modules['llama_index'] = None\n"
            "sys.modules['llama_index.core'] = None\n"
            "try:\n"
            "    import llamaindex_ctxreuse\n"
            "except ImportError as error:\n"
            "    print(error)\n"
        )
        assert "[llamaindex]" in python(code).stdout
