"""What varies in front of the contexts of a recording is found, and what does not is left alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock
from ctxreuse.measure.doctor.examination import check_fronts
from ctxreuse.measure.doctor.findings import Finding, Verdict, finding_lines
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.verdict import verdict
from ctxreuse.measure.traces.recorded_prompts import read_recording
from ctxreuse.measure.traces.recording import PromptRecorder, TraceRecorder
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.measure.traces.varying_fronts import fronts_that_differ

HELP = "You help people with questions about rivers, and answer from the documents alone."
IDS = [f"9f86d081-884c-4d63-a15a-{number:012x}" for number in range(1_000, 1_020)]
NAMES = ["Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi", "Ivan", "Judy"]


RAG = (
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved "
    "context to answer the question. If you don't know the answer, just say that you don't know. "
    "Use three sentences maximum and keep the answer concise.\nQuestion: {question} \n"
    "Context: {context} \nAnswer:"
)
"""The prompt of LangChain's tutorial."""


def rag_recording(folder: Path, template: str, *, length: int = 30) -> list[TraceRequest]:
    """Record 40 prompts of a client; documents come in any order, four of ten each time."""
    random = Random(7)
    river = "A river number {0} in the land of {0} goes by town {0} and bridge {0} to the sea {0}. "
    documents = [river.format(f"x{number}") * length for number in range(10)]
    with TraceRecorder(folder) as recorder:
        prompts = PromptRecorder(recorder)
        for number in range(40):
            context = "\n\n".join(random.sample(documents, 4))
            question = f"Where does river {number} meet the {number}th town?"
            text = template.format(question=question, context=context)
            prompts.note([{"role": "user", "content": text}], {})
    return read_recording(str(folder))[1]


@pytest.mark.parametrize("length", [1, 2, 5, 30])
def test_a_question_before_the_documents_is_found(tmp_path, length):
    trace = rag_recording(tmp_path, RAG, length=length)
    finding = check_fronts(trace)
    assert finding.verdict is Verdict.PROBLEM
    assert "40 forms of the first paragraph in 40 requests" in finding.found
    assert "--source openai" not in finding.remedy
    assert fronts_that_differ(trace) == 40
    said = verdict(measure_savings(EstimateConfig(trace=str(tmp_path))))
    assert said.sentence.startswith(
        "Nothing can be gained as it is: in 40 of 40 prompts something that differs stands before "
        "the documents. Once that is mended: "
    )


@pytest.mark.parametrize("length", [1, 2, 5, 30])
def test_a_question_behind_the_documents_is_none_in_front(tmp_path, length):
    trace = rag_recording(tmp_path, "{context}\n\n{question}", length=length)
    finding = check_fronts(trace)
    assert finding.verdict is Verdict.OK  # whole prompts were recorded: there is nothing to advise
    assert finding.remedy == ""
    assert fronts_that_differ(trace) is None


def test_a_document_is_no_front_although_all_are_alike(tmp_path):
    with TraceRecorder(tmp_path) as recorder:
        for number in range(5):
            recorder.record([f"Case {number}, page {page}. " * 40 for page in range(3)], "Which?")
    assert fronts_that_differ(read_recording(str(tmp_path))[1]) is None
    assert verdict(measure_savings(EstimateConfig(trace=str(tmp_path)))).sentence.startswith(
        "Nothing to gain here, "
    )


def test_turns_begin_with_their_history_and_tenants_may_have_texts_of_their_own():
    trace = with_systems([f"{HELP} You speak with user {number}." for number in range(20)])
    assert fronts_that_differ(trace) == 20
    assert fronts_that_differ([*trace, replace(trace[0], request_id="later", turn=1)]) is None
    systems = [f"{HELP} You work for {one}." for one in "ababababab"]
    assert check_fronts(with_systems(systems, "ababababab")).verdict is Verdict.OK
    assert check_fronts(with_systems(systems[:4])).verdict is Verdict.PROBLEM


def traced(texts: Iterable[str], *contents: str) -> list[TraceRequest]:
    return [
        TraceRequest(number, "?", tuple(map(block, [*([text] if text else []), *contents])))
        for number, text in enumerate(texts)
    ]


def block(text: str) -> ContextBlock:
    return ContextBlock(id=text, text=text)


def with_systems(systems: Iterable[str | None], tenants: str = "") -> list[TraceRequest]:
    return [
        TraceRequest(
            number,
            "?",
            (block("a document"), block("another one")),
            system=system,
            tenant=tenants[number] if tenants else "",
        )
        for number, system in enumerate(systems)
    ]


def figures(finding: Finding) -> tuple[Verdict, dict[str, object]]:
    return finding.verdict, dict(finding.figures)


@pytest.mark.parametrize(
    ("systems", "shown"),
    [
        (
            [f"{HELP} It is 12:{minute:02} now." for minute in range(20)],
            "“alone. It is” is followed by “12:00” and by “12:01”",
        ),
        ([f"{HELP} Session: {one}." for one in IDS], "“documents alone. Session:”"),
        ([f"Help {one}. {HELP}" for one in NAMES], "“Help” is followed by"),
        ([f"{one}: {HELP}" for one in NAMES], "it begins with “Alice:” and with"),
        ([f"{HELP} Mail to {one}@example.org." for one in NAMES], "“alone. Mail to”"),
        ([f"{HELP} Ticket {number}." for number in range(10, 30)], "“10.” and by “11.”"),
        ([f"Today is {one}. {HELP}" for one in ("Monday", "Tuesday")] * 2, ""),
    ],
)
def test_what_varies_is_named_and_shown_with_the_words_before_it(systems, shown):
    found = check_fronts(with_systems(systems))
    assert found.verdict is Verdict.PROBLEM
    assert found.remedy.startswith("say it behind the documents")
    assert shown in found.found
    assert (found.figures["forms"], found.figures["requests"]) == (len(set(systems)), len(systems))


def test_texts_that_vary_part_at_the_first_place_though_one_is_of_another_kind():
    systems = [f"Hello {one}. {HELP} Ticket {n}." for n, one in enumerate(NAMES)]
    found = check_fronts(with_systems(systems))
    assert "“Hello” is followed by “Alice.” and by “Bob.”" in found.found
    odd = HELP.replace("You help people", "They assist all men")
    found = check_fronts(with_systems([*(f"{HELP} It is {n}:15." for n in range(10, 30)), odd]))
    assert "“alone. It is” is followed by “10:15.”" in found.found


@pytest.mark.parametrize(
    "systems",
    [
        [HELP] * 20,
        [HELP],
        [*[f"{HELP} It is Monday."] * 20, *[f"{HELP} It is Tuesday."] * 20],  # once a day
        [HELP, "Translate into French, word by word."] * 10,  # two set-ups
        [HELP, "Translate into French, word by word.", "Write code that compiles, and tests."],
    ],
)
def test_what_varies_seldom_or_is_of_several_set_ups_is_well(systems):
    assert check_fronts(with_systems(systems)).verdict is Verdict.OK


def test_a_first_paragraph_that_varies_is_a_problem_and_recordings_of_retrievers_show_none():
    openings = [f"Today is 2026-11-{day}. Answer from these documents:" for day in range(10, 30)]
    found = check_fronts(traced(openings, "The Seine.", "The Loire."))
    assert found.verdict is Verdict.PROBLEM
    assert "20 forms of the first paragraph in 20 requests" in found.found
    found = check_fronts(with_systems([None] * 5))
    assert figures(found) == (Verdict.UNKNOWN, {"requests": 5})
    assert "--source openai" in found.remedy
    assert check_fronts([]).verdict is Verdict.UNKNOWN


def test_documents_and_history_in_front_are_no_openings():
    documents = [f"Product {n}: a fine thing for house and garden." for n in range(20)]
    requests = [
        TraceRequest(n, "?", (block(one), block(documents[n - 1]), block(documents[n - 2])))
        for n, one in enumerate(documents)
    ]
    assert check_fronts(requests).verdict is Verdict.UNKNOWN
    requests = [TraceRequest(n, "?", (), turn=n, system=f"{HELP} {n}") for n in range(10)]
    assert check_fronts(requests).verdict is Verdict.OK


@pytest.mark.parametrize(("forms", "verdict"), [(1, "ok"), (2, "ok"), (20, "problem")])
def test_a_recording_without_texts_says_how_many_there_are(tmp_path, forms, verdict):
    with TraceRecorder(tmp_path / "recording", hash_only=True) as recorder:
        for number in range(40):
            recorder.record(["a text", "another"], system=f"{HELP} {number % forms}")
    found = check_fronts(read_recording(str(tmp_path / "recording"))[1])
    told = {name: found.figures[name] for name in ("requests", "forms")}
    assert (str(found.verdict), told) == (verdict, {"requests": 40, "forms": forms})
    assert HELP not in found.found


def test_few_words_are_shown_and_long_ones_are_cut():
    secret = "s" * 500
    found = check_fronts(with_systems([f"{HELP} {secret}{n} {secret}" for n in range(20)]))
    assert len(found.found) < 250


texts = st.text(max_size=40) | st.sampled_from([HELP, HELP + " 1", HELP + " 2", ""])


@given(st.lists(st.tuples(texts | st.none(), st.lists(texts, max_size=3), st.sampled_from("ab"))))
def test_any_trace_has_a_finding_that_counts_its_requests(requests):
    trace = [
        TraceRequest(n, "?", tuple(map(block, blocks)), system=system, tenant=tenant)
        for n, (system, blocks, tenant) in enumerate(requests)
    ]
    found = check_fronts(trace)
    assert found.check == "in front of the contexts"
    assert int(found.figures["requests"] or 0) <= len(trace)
    assert found.verdict is not Verdict.PROBLEM or found.remedy
    assert all(line.isprintable() for line in finding_lines([found]))


def test_hostile_traces_take_bounded_work():
    many = with_systems([f"{n} " + " ".join(f"w{n}-{i}" for i in range(3_000)) for n in range(600)])
    alike = with_systems([f"{'x' * 200_000}{n}" for n in range(300)])
    for trace in (many, alike):
        started = time.process_time()
        check_fronts(trace)
        assert time.process_time() - started < 5
