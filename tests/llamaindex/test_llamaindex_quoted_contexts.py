"""Contexts are planned for the tenant that rendered them, in every way to call a model."""

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.schema import MetadataMode
from llamaindex_helpers import letter_nodes
from llamaindex_llm_helpers import CHATS, COMPLETIONS, answer_to, sent_words

from ctxreuse import request_context
from llamaindex_ctxreuse import format_context


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
