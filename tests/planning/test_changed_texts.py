"""A planner counts texts of one id that differ from request to request, and says it once."""

import logging

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.planner import _say_texts_change

TEXT = "The old bridge over the river was built in winter by people of the harbour town nearby"


def documents(moment):
    for name in ("north", "south", "east"):
        yield ContextBlock(id=name, text=f"Retrieved at 10:{moment:02}\n{TEXT} {name}")


def asked(planner, *moments, tenant=""):
    for moment in moments:
        planner.plan(ContextRequest(documents(moment), "Which?", tenant=tenant))
    return planner.savings.changed_texts


def test_texts_that_change_are_counted_and_said_once(caplog):
    _say_texts_change.cache_clear()
    planner = ReusePlanner()
    with caplog.at_level(logging.WARNING, "ctxreuse"):
        assert asked(planner, *range(20)) == 3 * 19
        asked(planner, *range(20))
        asked(planner, 1)
    [record] = caplog.records
    assert record.getMessage().startswith("20 texts of documents differ from others of the same id")
    assert "bridge" not in record.getMessage()
    planner.reset_savings()
    assert planner.savings.changed_texts == 0


def test_texts_that_stay_are_not_counted(planner):
    assert asked(planner, 3, 3, 4, 3, 4) == 3
    assert asked(ReusePlanner(), *[7] * 200) == 0
    assert asked(ReusePlanner(), 1, tenant="a") == 0


def test_tenants_and_chunks_of_one_document_are_several(planner):
    assert asked(planner, 1, tenant="a") == asked(planner, 2, tenant="b") == 0
    chunks = [ContextBlock(id="book", text=f"{TEXT} {n}") for n in range(9)]
    for n in range(6):
        planner.plan(ContextRequest(chunks[n : n + 3], "Which?"))
    assert planner.savings.changed_texts == 0
