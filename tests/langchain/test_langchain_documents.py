"""What the package exports, and what it needs."""

import pytest
from langchain_core.documents import Document
from langchain_document_helpers import LetterRetriever, no_sockets
from python_processes import python

import langchain_ctxreuse
from ctxreuse.errors import MissingExtraError
from langchain_ctxreuse import ReuseMiddleware, ReuseRetriever
from langchain_ctxreuse.documents.document_plans import DOCUMENTS

__all__ = ["no_sockets"]


def test_exports_and_representations_say_where_they_are_defined_and_no_planner():
    assert ReuseMiddleware.__module__ == "langchain_ctxreuse.agents.middleware"
    with pytest.raises(AttributeError, match="no attribute 'ReuseNothing'"):
        langchain_ctxreuse.ReuseNothing  # noqa: B018
    assert "planner" not in repr(ReuseRetriever(retriever=LetterRetriever()))


@pytest.mark.parametrize(
    ("missing", "works", "fails", "named"),
    [
        (["langchain", "langgraph"], "ReuseRetriever, format_context", "ReuseMiddleware", ""),
        (["langchain_core"], "", "ReuseMiddleware", "langchain_ctxreuse"),
    ],
)
def test_what_is_missing_is_named_with_the_pip_command(missing, works, fails, named):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        f"{f'from langchain_ctxreuse import {works}' if works else ''}\n"
        "try:\n"
        f"    from langchain_ctxreuse import {fails}\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert python(code).stdout == f"{MissingExtraError(named or fails, 'langchain')}\n"


def test_a_document_is_to_the_index_what_its_text_is():
    named, same, new = (Document("text", id="d"), Document("text"), Document("new"))
    keys = [DOCUMENTS.block_of(one).key for one in (named, same, new)]
    assert keys[0] == keys[1] != keys[2]
