"""What holds for every chain, whatever the documents, the settings, and the answers."""

import re
from collections import Counter
from typing import Any

import pytest
from chain_helpers import Agents, documents, is_managers, session, word_count, worker_query
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import ODD_TEXTS
from python_processes import python

from chain_of_agents import ChainPrompts, Trace, UnreadError
from chain_of_agents.chain_prompts import note_after
from chain_of_agents.segments import as_blocks
from ctxreuse import PAPER_TEMPLATES, ContextBlock, ReusePlanner, Templates

MODES = st.sampled_from(["sequential", "parallel"])
PACKINGS = st.sampled_from(["auto", "single", "packed"])
few = examples(40)

texts = (
    st.sampled_from(ODD_TEXTS)
    | st.text(max_size=30)
    | st.integers(0, 30).map(lambda n: f"Text {n} tells of {n}. " * (3 * n))
    | st.integers(1, 4).map(lambda n: "unbroken" * 60 * n)
)
ids = st.sampled_from([None, 0, 1, -7, 10**30, "", "a", "b (1/2)", "\x00", "[Doc_1]"])
blocks = st.builds(ContextBlock, id=ids, text=texts)
some_documents = st.lists(blocks | texts, max_size=7).map(
    lambda found: [*found, "The last one."]  # blank ones alone are refused
)
windows = st.sampled_from([700, 1_000, 8_192])
chain_settings = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 6),
        "mode": MODES,
        "packing": PACKINGS,
        "context_window": windows,
        "segment_tokens": st.sampled_from([None, None, 5, 50]),
        "token_counter": st.sampled_from([None, word_count, lambda text: len(text) // 3]),
    }
)


@few
@given(some_documents, chain_settings)
def test_each_document_is_read_by_exactly_one_worker(given_documents, options):
    agents = Agents(**options)
    trace = agents.run(given_documents)

    unique = as_blocks(given_documents)
    sent = [block for plan in agents.model.plans for block in plan.blocks]
    assert len({block.key for block in sent}) == len(sent)
    assert Counter("".join(one.text for one in sent)) == Counter(
        "".join(one.text for one in unique)
    )
    assert len(sent) >= len(unique)
    read = [document for step in trace.workers for document in step.documents]
    assert Counter(map(repr, read)) == Counter(repr(block.id) for block in sent)
    assert all(plan.references == () for plan in agents.model.plans)


@few
@given(
    st.lists(texts.filter(len), min_size=1, max_size=6, unique=True).filter(
        lambda found: any(map(str.strip, found))
    ),
    chain_settings,
)
def test_pieces_make_up_the_document_and_segments_stand_in_their_order(given_texts, options):
    agents = Agents(**options)
    trace = agents.run([{"id": f"{n}", "text": text} for n, text in enumerate(given_texts)])

    found: dict[int, dict[int, str]] = {}
    for plan in agents.model.plans:
        for block in plan.blocks:
            document, piece = place_of(block.id)
            assert piece not in found.setdefault(document, {})
            found[document][piece] = block.text
    joined = {name: "".join(text for _, text in sorted(one.items())) for name, one in found.items()}
    sendable = [text.encode(errors="replace").decode() for text in given_texts]
    assert joined == dict(enumerate(sendable)), "no engine takes a lone surrogate"
    places = [[place_of(document) for document in step.documents] for step in trace.workers]
    assert [one for segment in places for one in segment[:1]] == sorted(min(one) for one in places)
    assert [step.position for step in trace.workers] == list(range(len(places)))


def place_of(block_id: Any) -> tuple[int, int]:
    name, _, piece = str(block_id).partition(" (")
    return int(name), int(piece.partition("/")[0] or 1)


@few
@given(some_documents, chain_settings, st.text(max_size=300))
def test_no_prompt_with_its_answer_is_longer_than_the_window(given_documents, options, asked):
    agents = Agents(lambda messages: "many words " * 40, **options)
    for turn in range(3):
        read = given_documents[turn:] or given_documents
        agents.run(read, asked, conversation_id="c" if turn else None)
        for prompt in agents.model.prompts:
            length = sum(agents.planner.count_tokens(message["content"]) for message in prompt)
            assert length + 16 <= options["context_window"]


@pytest.mark.parametrize("conversation", [None, "c"])
@pytest.mark.parametrize(
    "templates",
    [Templates(), Templates(most_ranked=None), Templates(most_ranked=6), PAPER_TEMPLATES],
)
@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_words_on_very_many_tiny_documents_make_no_prompt_too_long(templates, conversation, mode):
    def count(text: str) -> int:
        return len(re.findall(r"[A-Za-z]+|\d|\S| (?=\d)", text))

    planner = ReusePlanner(token_counter=count, templates=templates)
    agents = Agents(
        lambda messages: "a note " * 8,
        workers=2,
        mode=mode,
        packing="auto",
        context_window=1_000,
        planner=planner,
    )
    asked = "What says it " * 85  # takes what is kept for a question
    names = [f"d{n} of some words" + " and more" * 8 for n in range(200)]
    orders = []
    for turn in (names[::-1], names[::2], names):
        agents.run(turn, asked, conversation_id=conversation)
        orders += [plan.order_annotation for plan in agents.model.plans]
        for prompt in agents.model.prompts:
            assert sum(count(one["content"]) for one in prompt) + 16 <= 1_000
    assert any(orders)


def test_so_many_notes_that_not_all_fit_are_cut_and_the_manager_s_step_says_so():
    agents = Agents(
        lambda messages: "note of five words here",
        word_count,
        mode="parallel",
        packing="single",
        context_window=2_000,
    )
    trace = agents.run([f"d{n}" for n in range(600)], "word " * 250)

    length = sum(word_count(message["content"]) for message in agents.model.prompts[-1])
    assert length + 16 <= 2_000
    assert len(trace.workers) == 600
    assert trace.steps[-1].remark == "notes were cut to fit the model's context"


ANSWERS = ("", "   ", None, "!!!", "raise", "a note", "another\n\nnote", "  spaces  ", "{note} {0}")


class Script:
    def __init__(self, answers: list[str | None]) -> None:
        self.answers = answers
        self.given: list[str | None] = []

    def __call__(self, messages: Any) -> str | None:
        if is_managers(messages):
            return "the answer"
        reply = self.answers[len(self.given) % len(self.answers)]
        self.given.append(None if reply == "raise" else reply)
        if reply == "raise":
            raise ValueError("no")
        return reply


def is_note(reply: str | None) -> bool:
    return reply is not None and any(character.isalnum() for character in reply)


def asked_of_the_manager(prompts: ChainPrompts, notes: list[tuple[int, str]]) -> str:
    told = [prompts.note.format(worker=number, note=note) for number, note in notes]
    return prompts.final.format(notes="\n\n".join(told) or prompts.no_notes, question="Why?")


def run_unless_nothing_is_read(agents: Agents, script: Script, number: int) -> Trace | None:
    try:
        trace = agents.run(documents(number), "Why?")
    except UnreadError:
        assert not any(map(is_note, script.given))
        assert not any(map(is_managers, agents.model.prompts))
        return None
    assert any(map(is_note, script.given))
    return trace


scripts = st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=6)


@few
@given(st.integers(1, 8), scripts, st.integers(1, 5), PACKINGS)
def test_in_sequence_workers_and_manager_get_the_note_so_far(number, answers, workers, packing):
    script = Script(answers)
    agents = Agents(script, workers=workers, packing=packing, min_read=0)
    trace = run_unless_nothing_is_read(agents, script, number)
    if trace is None:
        return

    prompts, note, last = agents.settings.prompts, "", 0
    for place, reply in enumerate(script.given, 1):
        prompt = agents.model.prompts[place - 1]
        assert prompt[-1]["content"].endswith("\n\n" + worker_query(prompts, "Why?", note))
        assert ("Note of the readers before you:" in prompt[-1]["content"]) == bool(note)
        if reply and is_note(reply):
            after = note_after(prompts, note, reply.strip(), "Why?")
            note, last = (note, last) if after is None else (after, place)
            assert reply.strip() in note
    query = asked_of_the_manager(prompts, [(last, note)] if note else [])
    assert agents.model.prompts[-1][-1]["content"] == query


@few
@given(st.integers(1, 8), scripts, st.integers(1, 5), PACKINGS)
def test_in_parallel_the_manager_gets_answered_notes_in_order(number, answers, workers, packing):
    script = Script(answers)
    agents = Agents(script, workers=workers, packing=packing, mode="parallel", min_read=0)
    trace = run_unless_nothing_is_read(agents, script, number)
    if trace is None:
        return

    prompts = agents.settings.prompts
    for prompt in agents.model.prompts[:-1]:
        assert prompt[-1]["content"].endswith(worker_query(prompts, "Why?", ""))
    notes = [
        (place, reply.strip())
        for place, reply in enumerate(script.given, 1)
        if reply and is_note(reply)
    ]
    query = asked_of_the_manager(prompts, notes)
    assert agents.model.prompts[-1][-1]["content"] == query
    assert [step.position for step in trace.workers] == list(range(len(script.given)))
    assert [step.outcome == "answered" for step in trace.workers] == list(
        map(is_note, script.given)
    )


@few
@given(
    st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=8),
    st.integers(1, 5),
    MODES,
    PACKINGS,
)
def test_prompts_of_the_same_documents_begin_with_the_same_bytes(numbers, workers, mode, packing):
    agents = Agents(workers=workers, mode=mode, packing=packing)
    asked = [documents(10)[number] for number in numbers]
    beginnings = []
    for question in ("Which?", "Why, and since when, and who said so?"):
        agents.run(asked, question)
        beginnings.append(
            [
                (prompt[0]["content"], prompt[1]["content"].rpartition("\n\n")[0].partition(cut)[0])
                for prompt in agents.model.prompts[:-1]
                for cut in ["\n\nNote of the readers" if "Note of" in str(prompt) else "\n\nQuesti"]
            ]
        )
    assert beginnings[0] == beginnings[1]


def test_another_process_assigns_and_prompts_the_same():
    code = "from chain_helpers import session; print(session())"
    elsewhere = python(code, PYTHONHASHSEED="7")
    assert elsewhere.stdout.strip() == session()
