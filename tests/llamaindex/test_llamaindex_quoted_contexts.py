"""Contexts are planned for the tenant that rendered them, in every way to call a model."""

from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.schema import MetadataMode
from llamaindex_helpers import letter_nodes
from llamaindex_llm_helpers import CHATS, COMPLETIONS, answer_to, sent_words

from ctxreuse import request_context
from llamaindex_ctxreuse import ReuseLLM, format_context

TEMPLATE = PromptTemplate("{context}\n\nQuestion: {question}")


class Asking(CustomQueryEngine):
    """A query engine that puts nodes into a prompt itself."""

    llm: Any

    def custom_query(self, query_str: str) -> str:
        letters, _, question = query_str.partition(" ")
        nodes = letter_nodes(letters)
        context = format_context(nodes, metadata_mode=MetadataMode.NONE, labels=True)
        return str(self.llm.complete(TEMPLATE.format(context=context, question=question)))


@pytest.mark.parametrize("way", [*CHATS, *COMPLETIONS, "complete_batch", "predict"])
def test_every_call_plans_the_contexts_of_its_tenant(way, inner, llm):
    for tenant, word in (("one", "abc"), ("two", "cab"), ("one", "bca")):
        with request_context(tenant=tenant):
            context = format_context(
                letter_nodes(word), metadata_mode=MetadataMode.NONE, labels=True
            )
            text = f"{context}\n\nWhich?"
            if way == "predict":
                llm.predict(PromptTemplate("{text}"), text=text)
            elif way == "complete_batch":
                llm.complete_batch([text])
            else:
                answer_to(llm, way, text)
    assert sent_words(inner) == ["abc", "cab", "abc"]
    assert llm.prompt_statistics.planned == 3


def test_a_query_engine_plans_no_quotation(inner):
    engine = Asking(llm=ReuseLLM(inner=inner, window_s=0))
    with request_context(tenant="two"):
        engine.query("cab Which?")
    quoted = inner.prompts[0].partition("\n\nQuestion")[0]
    for tenant in ("one", "two"):
        with request_context(tenant=tenant):
            engine.query(f"xyz {quoted} Why?")
        assert f"Question: {quoted} Why?" in inner.prompts[-1]
