"""Chain-of-Agents on a real engine: what an agent has read is cached, whatever the question."""

from __future__ import annotations

from uuid import uuid4

import pytest
from engine import Engine

from chain_of_agents import Answer, ChainOfAgents
from chain_of_agents.requests import Mode

TOPICS = ("the harbour", "the library", "the observatory", "the tannery")
QUESTIONS = ("Which building is the oldest?", "Which building has a tower of brick?")


def document(topic: str) -> str:
    """Return a text that fills some cache blocks."""
    return " ".join(f"Page {page} of the record tells of {topic}." for page in range(30))


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
async def test_documents_asked_about_again_in_another_order_come_from_the_cache(
    engine: Engine, mode: Mode
) -> None:
    documents = [document(topic) for topic in TOPICS]
    chain = ChainOfAgents(
        engine.base_url,
        mode=mode,
        note_tokens=16,
        answer_tokens=16,
        params={"temperature": 0, "extra_body": {"cache_salt": uuid4().hex}},
    )
    async with chain:
        answers: list[Answer] = []
        for question, given in zip(QUESTIONS, (documents, documents[::-1]), strict=True):
            answers.append(await chain.ainvoke({"question": question, "documents": given}))
    first, again = (answer.trace for answer in answers)
    print(f"{mode}: {again.cached_tokens} of {again.prompt_tokens} prompt tokens cached")
    for trace, answer in zip((first, again), answers, strict=True):
        assert answer.strip()
        assert trace.failures == ()
        assert len(trace.workers) == len(documents)
    assert [step.agent for step in again.workers] == [step.agent for step in first.workers][::-1]
    for step, text in zip(again.workers, documents[::-1], strict=True):
        # all but the last, part-filled block of the document
        assert step.cached_tokens is not None
        assert step.cached_tokens > engine.count_tokens(text) - 2 * engine.block_size
