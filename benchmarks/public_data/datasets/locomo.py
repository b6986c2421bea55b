"""LoCoMo: questions about conversations of many sessions, whose turns are memories.

Maharana et al., "Evaluating Very Long-Term Conversational Memory of LLM Agents" (2024).
`locomo10.json` is a list of samples: `sample_id`, `conversation` (`session_<n>`: a list of turns
with `speaker`, `dia_id`, `text` and perhaps `blip_caption`; `session_<n>_date_time`) and `qa`.
"""

from __future__ import annotations

import re
from pathlib import Path

from ctxreuse.measure.traces.json_lines import JsonLine
from public_data.datasets.dataset import Dataset, Passage, Question
from public_data.datasets.published_files import (
    Source,
    nested,
    nested_records,
    new_name,
    read_records,
    text_of,
    texts_of,
)

_SOURCE = Source(
    "locomo", "a folder with locomo10.json, or that file", "github.com/snap-research/locomo"
)
_SESSION = re.compile(r"session_([0-9]{1,6})")
_TURN = re.compile(r"D:?([0-9]{1,6}):([0-9]{1,6})")


def load_locomo(path: Path, chunk_tokens: int) -> Dataset:
    """Load LoCoMo."""
    file = path
    if path.is_dir() or not path.exists():
        file = _SOURCE.find(path / "locomo10.json", path / "data" / "locomo10.json")
    passages: list[Passage] = []
    questions: list[Question] = []
    samples: set[str] = set()
    for sample in read_records(file):
        sample_id = new_name(sample, "sample_id", samples)
        samples.add(sample_id)
        turns = _turns(sample, sample_id)
        passages += turns
        known = {passage.id for passage in turns}
        for number, line in enumerate(nested_records(sample, "qa")):
            answers = _answers(line)
            questions.append(
                Question(
                    id=f"{sample_id}-q{number}",
                    text=text_of(line, "question"),
                    answers=answers,
                    gold=_evidence(line, sample_id) & known if answers else frozenset(),
                    conversation_id=sample_id,
                    turn=number,
                    scope=sample_id,
                )
            )
    return Dataset(_SOURCE.name, tuple(passages), tuple(questions))


def _turns(sample: JsonLine, sample_id: str) -> list[Passage]:
    conversation = nested(sample, "conversation")
    sessions = {
        int(found.group(1)): name
        for name in conversation.fields
        if (found := _SESSION.fullmatch(name))
    }
    turns: dict[str, Passage] = {}
    for _, session in sorted(sessions.items()):
        date = text_of(conversation, f"{session}_date_time", "").strip()
        for line in nested_records(conversation, session):
            dia_id = new_name(line, "dia_id", turns)
            speaker = text_of(line, "speaker")
            caption = text_of(line, "blip_caption", "").strip()
            words = (
                f"{speaker} ({date}):" if date else f"{speaker}:",
                text_of(line, "text", "").strip(),
                f"[shares {caption}]" if caption else "",
            )
            text = " ".join(filter(None, words))
            turns[dia_id] = Passage(f"{sample_id}/{dia_id}", text, sample_id)
    return list(turns.values())


def _answers(line: JsonLine) -> tuple[str, ...]:
    # years and counts are numbers in the file
    answer = line.get("answer", (str, int, float), "")
    return (str(answer),) if answer != "" else ()


def _evidence(line: JsonLine, sample_id: str) -> frozenset[str]:
    # the file also has "D8:6; D9:17", "D9:1 D4:4 D4:6", "D:11:26", "D30:05" and "D"
    return frozenset(
        f"{sample_id}/D{int(session)}:{int(turn)}"
        for entry in texts_of(line, "evidence")
        for session, turn in _TURN.findall(entry)
    )
