"""A manual, and what is asked about it: chapters of CPython's language reference."""

from __future__ import annotations

import numpy as np

from ctxreuse import ContextBlock
from ctxreuse.measure.demo.demo_run import QUESTIONS, python_reference_blocks
from ctxreuse.workflow import WordLlamaEmbedder

_CHAPTERS = {
    *("attribute-access", "calls", "class", "compound", "customization"),
    *("dict", "exceptions", "function", "global", "naming"),
    *("nonlocal", "raise", "try", "typesmapping", "with"),
}
_CHARACTERS = 800


def manual() -> list[ContextBlock]:
    """Return the pieces of 15 chapters, of up to 800 characters each."""
    return [block for block in python_reference_blocks(_CHARACTERS) if _chapter(block) in _CHAPTERS]


def _chapter(block: ContextBlock) -> str:
    return str(block.id).partition("#")[0]


def embedder() -> WordLlamaEmbedder:
    """Return a small embedding model, whose weights come in a package."""
    return WordLlamaEmbedder()


def questions() -> list[str]:
    """Return the demo's questions for which the whole reference has most in these chapters."""
    blocks = python_reference_blocks(_CHARACTERS)
    embed = embedder().embed
    likeness = embed([question.query for question in QUESTIONS]) @ embed([b.text for b in blocks]).T
    best_three = np.argsort(-likeness, axis=1)[:, :3]
    return [
        question.query
        for question, found in zip(QUESTIONS, best_three, strict=True)
        if sum(_chapter(blocks[place]) in _CHAPTERS for place in found) >= 2
    ]


def conversation() -> list[str]:
    """Return the six questions of one user about exceptions."""
    return [question.query for question in QUESTIONS if question.conversation_id == "chat-04"]
