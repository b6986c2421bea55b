"""`ctxreuse bench --part quality`: arms, prompts, scores, limits, and going on where it stopped."""

import json
import os
import re
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from block_labels import label, labelled, located
from cli_helpers import words
from public_data_helpers import workload
from served_engines import URL

from ctxreuse import ContextBlock
from ctxreuse.errors import EngineError, InputFileError, InvalidRequestError
from ctxreuse.measure.traces.trace_files import TraceRequest
from public_data.quality.answer_file import AnswerFile, KeptAnswer
from public_data.quality.arms import (
    ANNOTATED,
    AS_RETRIEVED,
    BEST_FIRST,
    BEST_FIRST_ANNOTATED,
    DEDUPLICATED,
    REORDERED,
    TRIALS,
    Annotation,
    Arm,
    ArmPrompts,
    arms_of,
)
from public_data.quality.quality_results import ArmAnswers, Scored, change, quality_output
from public_data.quality.quality_run import QualityConfig, run_quality
from public_data.quality.question_sets import (
    SHORT_ANSWERS,
    QuestionSet,
    set_of_workload,
    standard_sets,
)
from public_data.quality.scoring import normalize_answer

TOWNS = [
    ContextBlock(id=f"t{number}", text=f"Town {number} has the code c{number}. " + "Water. " * 60)
    for number in range(8)
]
LABEL = re.compile(r"\[[A-Z]{4}\] (?=Town)")
FIRST_CODE = re.compile(r"(?:\A|\n\n)(?:\[[A-Z]{4}\] )?Town \d has the code (c\d)")


def questions(number=12, **fields):
    """Questions whose right answer is the code of the town that was retrieved first."""
    conversations = []
    for one in range(number):
        blocks = tuple(TOWNS[(one + step) % 8] for step in (0, 1, 2))
        request = TraceRequest(f"q{one}", f"What is the code, {one}?", blocks)
        conversations.append((request,))
    references = {f"q{one}": [f"c{one % 8}"] for one in range(number)}
    return QuestionSet("towns", tuple(conversations), references, questions=number, **fields)


def chats(number=4):
    """Conversations of two turns, the second of which shows a block again and is scored."""
    conversations = [
        tuple(
            TraceRequest(f"c{one}-{turn}", f"And {turn}?", blocks, f"c{one}", turn)
            for turn, blocks in enumerate(
                ((TOWNS[one], TOWNS[one + 1]), (TOWNS[one + 1], TOWNS[one + 2]))
            )
        )
        for one in range(number)
    ]
    return QuestionSet(
        "chats", tuple(conversations), {f"c{one}-1": ["no"] for one in range(number)}
    )


def reads_the_first(body):
    """Answer as a model that reads nothing but the first document."""
    found = FIRST_CODE.search(body["messages"][-1]["content"])
    return found[1] if found else "Hello."


def config(tmp_path, **fields):
    return QualityConfig(base_url=URL, answers=tmp_path / "answers.jsonl", **fields)


def measured(tmp_path, sets=None, lines=None, **fields):
    report = (lambda _: None) if lines is None else lines.append
    return run_quality(config(tmp_path, **fields), [questions()] if sets is None else sets, report)


def by_name(result):
    return {arm.name: arm for arm in result.arms}


def test_a_model_that_reads_only_the_first_document_is_found_out(served, tmp_path):
    served(answer=reads_the_first)
    (result,) = measured(tmp_path).sets
    arms = by_name(result)
    assert [arm.name for arm in result.arms] == [
        *("as retrieved", "reordered", "annotated", "best first", "best first, annotated"),
        *("as retrieved, again", "reversed", "shuffled"),
        *(f"annotated: {name}" for name in TRIALS),
    ]
    assert {len(arm.scored) for arm in result.arms} == {12}
    assert [one.f1 for one in arms["as retrieved"].scored.values()] == [1.0] * 12
    assert change(arms["reversed"], arms["as retrieved"]).mean == -1.0
    again = change(arms["as retrieved, again"], arms["as retrieved"])
    assert (again.low, again.mean, again.high) == (0.0, 0.0, 0.0)
    moved = [one for one in arms["reordered"].scored.values() if one.is_other_prompt]
    assert 0 < len(moved) < 12
    assert change(arms["reordered"], arms["as retrieved"]).mean < 0
    assert not any(one.is_other_prompt for one in arms["as retrieved, again"].scored.values())


def test_prompts_are_greedy_short_and_in_each_arm_in_order_of_their_beginnings(served, tmp_path):
    engine = served(answer="c1")
    measured(tmp_path, arm=["reordered"], concurrency=1)
    bodies = engine.requests[1:]
    assert {body["temperature"] for body in bodies} == {0}
    assert {body["max_tokens"] for body in bodies} == {32}
    assert {body["messages"][0]["content"] for body in bodies} == {SHORT_ANSWERS}
    asked = [body["messages"][-1]["content"] for body in bodies]
    assert asked[:12] == sorted(asked[:12])
    assert asked[12:] == sorted(asked[12:])
    assert all(one != other for one, other in pairwise(asked))


def test_the_same_prompts_are_asked_again_backwards_and_in_a_cache_of_their_own(served, tmp_path):
    engine = served(answer="c1")
    measured(tmp_path, arm=["as retrieved, again"], concurrency=1)
    bodies = engine.requests[1:]
    plain = [body["messages"] for body in bodies if "cache_salt" not in body]
    again = [body["messages"] for body in bodies if "cache_salt" in body]
    assert (len(plain), again) == (12, plain[::-1])


def test_an_engine_that_refuses_salts_is_asked_without(served, tmp_path):
    engine = served(answer="c1", fail=lambda _, body: 400 if "cache_salt" in body else None)
    (result,) = measured(tmp_path, arm=["as retrieved, again"]).sets
    assert [len(arm.scored) for arm in result.arms] == [12, 12]
    assert not any("cache_salt" in body for body in engine.requests[1:])


def test_the_same_prompt_is_asked_once(served, tmp_path):
    engine = served(answer="c1")
    alone = [(TraceRequest(f"q{one}", "Which?", (TOWNS[one],)),) for one in range(4)]
    names = {f"q{one}": ["c1"] for one in range(4)}
    (result,) = measured(tmp_path, [QuestionSet("alone", tuple(alone), names)]).sets
    # a greeting, as retrieved, once more, and under labels
    assert len(engine.requests) == 1 + 4 + 4 + 4
    assert {len(arm.scored) for arm in result.arms} == {4}


# conversations


def test_every_arm_has_the_same_answers_in_its_history(served, tmp_path):
    engine = served(answer=lambda body: f"said {len(body['messages'])}")
    (result,) = measured(tmp_path, [chats()]).sets
    arms = by_name(result)
    assert {len(arm.scored) for arm in result.arms} == {4}
    assert "de-duplicated" in arms
    later = [body["messages"] for body in engine.requests if len(body["messages"]) > 2]
    assert {messages[-2]["content"] for messages in later} == {"said 2"}
    first = [body for body in engine.requests[1:] if len(body["messages"]) == 2]
    assert len(first) == 4  # no other arm needs the first turns' answers


def test_de_duplicated_prompts_leave_out_what_was_shown_and_not_what_was_asked_before():
    prompts = ArmPrompts(chats(), 0)
    (_, plain), (_, short) = (
        list(prompts.turns(arm, 0, ["yes"])) for arm in (ANNOTATED, DEDUPLICATED)
    )
    assert plain.messages[-1]["content"].count("Town 1 has") == 1
    assert short.messages[-1]["content"].count("Town 1 has") == 0
    assert f"\n\n{located(TOWNS[1].text)}\n\n" in short.messages[-1]["content"]

    whole, few = ArmPrompts(chats(), 0), ArmPrompts(chats(), 0)
    for arm in arms_of([], has_turns=True):
        for number in range(4):
            list(whole.turns(arm, number, ["yes"]))
        assert list(whole.turns(arm, 2, ["yes"])) == list(few.turns(arm, 2, ["yes"]))
    asked = questions()
    assert not asked.has_turns
    assert DEDUPLICATED not in arms_of([], has_turns=False)
    assert DEDUPLICATED in arms_of([], has_turns=True)


# annotations


@pytest.fixture
def moved():
    """A question whose blocks are reordered, and what makes its prompts."""
    prompts = ArmPrompts(questions(), 0)
    for number in range(12):
        plain, other = (last(prompts, arm, number) for arm in (AS_RETRIEVED, REORDERED))
        if plain != other:
            return prompts, number
    raise AssertionError("nothing was reordered")


def last(prompts, arm, number):
    return list(prompts.turns(arm, number, []))[-1].messages[-1]["content"]


def test_an_annotated_prompt_is_the_planners_own_and_names_the_best_first(moved):
    prompts, number = moved
    bare, annotated = (last(prompts, arm, number) for arm in (REORDERED, ANNOTATED))
    *blocks, words, question = annotated.split("\n\n")
    assert re.fullmatch(r"Read documents \d, \d, \d first\.", words)
    assert "\n\n".join([*blocks, question]) == bare

    best = TOWNS[number % 8].text
    arm = Arm("trial", "reuse", annotation=Annotation("{best} {numbers}"), is_annotated=True)
    content = last(prompts, arm, number)
    *shown, words, _ = content.split("\n\n")
    first = shown.index(labelled(best)) + 1
    assert re.fullmatch(rf"{re.escape(label(best))} {first}, \d, \d", words)


def test_the_best_block_is_the_first_in_the_arms_that_keep_it_there():
    orders = ((0, 1, 2, 3), (0, 3, 2, 1), (4, 3, 2, 1))
    asked = [
        (TraceRequest(f"q{one}", "Which?", tuple(TOWNS[town] for town in order)),)
        for one, order in enumerate(orders)
    ]
    references = {f"q{one}": ["c0"] for one in range(3)}
    prompts = ArmPrompts(QuestionSet("towns", tuple(asked), references), 0)
    for arm in (BEST_FIRST, BEST_FIRST_ANNOTATED):
        shown = [re.findall(r"Town (\d)", last(prompts, arm, one)) for one in range(3)]
        assert shown == [list("0123"), list("0123"), list("4321")]
    assert "Read documents" not in last(prompts, BEST_FIRST, 1)
    assert "\n\nRead documents 1, 4, 3 first.\n\n" in last(prompts, BEST_FIRST_ANNOTATED, 1)


@pytest.mark.parametrize(
    ("annotation", "place", "shown"),
    [
        (Annotation("Best first: {numbers}"), -2, r"Best first: \d, \d, \d"),
        (Annotation("Best: {labels}"), -2, r"Best: \[\w{4}\], \[\w{4}\], \[\w{4}\]"),
        (Annotation("Best: {best}", "after the question"), -1, r"Best: \[\w{4}\]"),
        (Annotation("Best: {top}.", "before the documents"), 0, r"Best: \d, \d, \d\."),
    ],
)
def test_an_annotation_under_trial_stands_where_it_says(moved, annotation, place, shown):
    prompts, number = moved
    arm = Arm("trial", "reuse", annotation=annotation, is_annotated=True)
    parts = last(prompts, arm, number).split("\n\n")
    assert re.fullmatch(shown, parts.pop(place))
    assert all(map(LABEL.match, parts[:3])) == ("w{4}" in shown)
    bare = [LABEL.sub("", part) for part in parts]
    assert "\n\n".join(bare) == last(prompts, REORDERED, number)


def test_a_context_in_the_retrievers_order_needs_no_annotation():
    alone = ((TraceRequest("q", "Which?", tuple(TOWNS[:2])),),)
    prompts = ArmPrompts(QuestionSet("one", alone, {"q": ["c0"]}), 0)
    arms = [arm for arm in arms_of([], has_turns=False) if arm.is_annotated]
    assert len(arms) == 2 + len(TRIALS)
    shown = {LABEL.sub("", last(prompts, arm, 0)) for arm in arms}
    assert shown == {last(prompts, AS_RETRIEVED, 0)}


def test_the_planners_and_all_short_annotations_have_at_most_half_of_the_papers_length(moved):
    prompts, number = moved
    bare = last(prompts, REORDERED, number)
    lengths = {
        name: len(LABEL.sub("", last(prompts, Arm(name, "reuse", annotation=one), number)))
        - len(bare)
        for name, one in TRIALS.items()
    }
    papers = lengths.pop("papers")
    lengths["the planner's"] = len(last(prompts, ANNOTATED, number)) - len(bare)
    assert 0 < max(lengths.values()) <= papers / 2


# limits, and going on


def test_a_stopped_run_goes_on_without_asking_again(served, tmp_path):
    first = served(answer=reads_the_first)
    few = measured(tmp_path, questions=5, other_questions=2)
    assert {name: len(arm.scored) for name, arm in by_name(few.sets[0]).items()} == {
        **dict.fromkeys(("as retrieved", "reordered", "annotated"), 5),
        **dict.fromkeys(("best first", "best first, annotated"), 5),
        **dict.fromkeys(("as retrieved, again", "reversed", "shuffled"), 2),
        **{f"annotated: {name}": 2 for name in TRIALS},
    }
    second = served(answer=reads_the_first)
    all_of_them = measured(tmp_path)
    asked = [json.dumps(body) for engine in (first, second) for body in engine.requests[1:]]
    assert len(asked) == len(set(asked))
    third = served(answer="something else")
    again = measured(tmp_path)
    assert len(third.requests) == 1
    assert (again.asked, again.sets) == (0, all_of_them.sets)
    for name, arm in by_name(few.sets[0]).items():
        known = by_name(all_of_them.sets[0])[name].scored
        assert list(arm.scored.values()) == list(known.values())[: len(arm.scored)]


def test_another_limit_model_or_system_text_is_another_prompt(served, tmp_path):
    served(answer="c1")
    measured(tmp_path, arm=["reordered"])
    for fields in (
        *({"system": "Briefly."}, {"sets": [questions(answer_tokens=8)]}),
        {"answer_tokens": 9},
    ):
        served(answer="c2")
        assert measured(tmp_path, arm=["reordered"], **fields).asked > 12
    served(answer="c2", model="another")
    assert measured(tmp_path, arm=["reordered"]).asked > 12


@pytest.fixture
def ctrl_c():
    """Return what the keys do, also where the tests run in the background, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_shows_and_keeps_what_there_is(served, tmp_path, ctrl_c):
    def answer(body):
        if len(engine.requests) == 10:
            ctrl_c()
        return reads_the_first(body)

    engine = served(answer=answer)
    results = measured(tmp_path, concurrency=1)
    assert (results.stopped, results.exit_code) == ("interrupted", 130)
    assert not results.is_complete
    answered = len(by_name(results.sets[0])["as retrieved"].scored)
    assert 0 < answered < 12
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == answered
    served(answer=reads_the_first)
    assert measured(tmp_path).is_complete


def timed(served, tmp_path, seconds, sets=None, report=lambda _: None, **fields):
    """Return the results of a run on whose clock each request takes so many seconds."""
    engine = served(answer=reads_the_first)
    sets = [questions()] if sets is None else sets
    clock = lambda: seconds * len(engine.requests)  # noqa: E731
    return run_quality(config(tmp_path, **fields), sets, report, clock)


def stopped_at_once(served, tmp_path, sets, **fields):
    results = timed(served, tmp_path, 60.0, sets, hours=0.001, **fields)
    assert results.asked == 0
    assert results.stopped == "--hours 0.001 are used up"
    return results


def test_what_is_kept_counts_even_if_the_next_run_stops_at_once(served, tmp_path):
    served(answer=reads_the_first)
    sets = [questions(), chats()]
    first = measured(tmp_path, sets, questions=4, other_questions=2)
    second = stopped_at_once(served, tmp_path, sets)
    for before, after in zip(first.sets, second.sets, strict=True):
        for arm, again in zip(before.arms, after.arms, strict=True):
            assert list(again.scored.items())[: len(arm.scored)] == list(arm.scored.items())


def test_an_arm_that_was_not_asked_gets_no_answers_for_prompts_that_are_alike(served, tmp_path):
    served(answer=reads_the_first)
    (whole,) = measured(tmp_path, arm=["reordered"]).sets
    changed = [one.is_other_prompt for one in whole.arms[1].scored.values()]
    assert 0 < changed.count(False) < 12
    (tmp_path / "answers.jsonl").unlink()
    served(answer=reads_the_first)
    measured(tmp_path, arm=["as retrieved"])
    (plain, other) = stopped_at_once(served, tmp_path, None, arm=["reordered"]).sets[0].arms
    assert (len(plain.scored), len(other.scored)) == (12, changed.index(True))


def test_answers_stand_in_the_order_of_the_questions(served, tmp_path):
    served(answer=reads_the_first)
    measured(tmp_path, arm=["reordered"], questions=3)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_text("".join(lines[1:]))  # one is asked later than others
    (result,) = measured(tmp_path, arm=["reordered"]).sets
    asked = [one.request_id for (one,) in questions().shuffled(0).conversations]
    assert [list(arm.scored) for arm in result.arms] == [asked, asked]


def test_hours_end_a_run(served, tmp_path):
    results = timed(served, tmp_path, 200.0, hours=1, concurrency=1)
    assert results.stopped == "--hours 1 are used up"
    assert results.asked == 17  # the eighteenth request is the first, which greets the engine
    assert results.exit_code == 0


def test_progress_tells_how_long_it_takes(served, tmp_path):
    lines = []
    timed(served, tmp_path, 10.0, report=lines.append, arm=["reordered"])
    assert lines[0].startswith("emulated: 24 answers to ask for at most; 0 are kept in ")
    assert any(
        re.search(r"^towns, reordered: .* s an answer, at most 0 h 0\d min left", one)
        for one in lines
    )
    assert re.search(
        r"^towns: 12 questions; reordered -0\.\d+ \[.*at most 0 h 00 min left$", lines[-1]
    )


# what goes wrong


def test_prompts_that_are_too_long_are_counted(served, tmp_path):
    served(answer="c1", fail=lambda number, _: 400 if number in (3, 5) else None)
    results = measured(tmp_path, arm=["reordered"], concurrency=1)
    (plain, other) = results.sets[0].arms
    assert (len(plain.scored), len(other.scored)) == (10, 10)
    assert list(plain.failures.values()) == [2]
    assert results.exit_code == 1
    assert not results.is_complete
    assert results.stopped == (
        "every arm was asked all; 2 prompts were not answered, and are asked again the next time"
    )


def test_an_engine_that_goes_away_ends_the_run(served, tmp_path):
    served(answer="c1", fail=lambda number, _: "refuse" if number > 6 else None)
    results = measured(tmp_path, concurrency=8)
    assert results.stopped.startswith("the engine no longer answers: ")
    assert (results.exit_code, results.asked) == (1, 6)


def test_an_engine_that_never_answers_is_an_error(served, tmp_path):
    served(fail=lambda *_: "refuse")
    with pytest.raises(EngineError):
        measured(tmp_path)


def test_questions_that_do_not_fit_the_model_or_cannot_be_scored_are_not_asked():
    asked = chats()
    assert asked.fitting(None) == [0, 1, 2, 3]
    assert asked.fitting(100) == []
    assert replace(asked, references={"c2-0": ["no"]}).fitting(None) == [2]


def test_conversations_that_do_not_fit_the_model_are_told_of(served, tmp_path):
    served(answer="no", max_model_len=1_000)
    asked = chats()
    long = replace(TOWNS[7], text="Water. " * 1_000)
    (first, second), *others = asked.conversations
    longer = (replace(first, blocks=(long,)), second)
    one_is_longer = replace(asked, conversations=(longer, *others))
    results = measured(tmp_path, [one_is_longer, questions()], arm=["reordered"])
    assert [len(one.base.scored) for one in results.sets] == [3, 12]
    assert [one for one in results.notes if "fit" in one] == [
        "chats: 1 of 4 conversations do not fit the model's 1,000 tokens and were not asked; serve "
        "it with a longer context (--max-model-len) to ask them, too"
    ]


def test_an_arm_of_conversations_is_not_left_out_of_questions_silently(served, tmp_path):
    served(answer="no")
    results = measured(tmp_path, [questions()], arm=["de-duplicated"])
    assert [arm.name for arm in results.sets[0].arms] == ["as retrieved"]
    (said,) = [one for one in results.notes if "needs conversations" in one]
    assert said.endswith(
        ": the arm de-duplicated needs conversations, and these are single questions"
    )


def test_nothing_is_asked_behind_the_last_turn_that_is_scored(served, tmp_path):
    engine = served(answer="no")
    first_turns = replace(chats(), references={f"c{one}-0": ["no"] for one in range(4)})
    (result,) = measured(tmp_path, [first_turns], arm=["de-duplicated"]).sets
    assert {len(arm.scored) for arm in result.arms} == {4}
    assert {len(body["messages"]) for body in engine.requests[1:]} == {2}


def test_a_model_that_is_too_small_for_all_questions_is_an_error(served, tmp_path, monkeypatch):
    async def small(_):
        return 100

    served()
    monkeypatch.setattr("ctxreuse.serving.EngineClient.context_window", small)
    with pytest.raises(
        InvalidRequestError, match=r"chats: no question .* fits the model's 100 tokens"
    ):
        measured(tmp_path, [chats()])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"arm": ["upside down"]},
            "there is no arm 'upside down' (str); there are: as retrieved; ",
        ),
        ({"hours": 0.0}, "--hours must be more than 0"),
    ],
)
def test_wrong_options_are_named_before_anything_is_asked(served, tmp_path, fields, problem):
    engine = served()
    with pytest.raises(InvalidRequestError, match=re.escape(problem)):
        measured(tmp_path, **fields)
    assert engine.requests == []


# the file of answers


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    with AnswerFile(path) as kept:
        kept.keep("a", KeptAnswer("one", 10, 4, 0.5))
        kept.keep("b", KeptAnswer("t\u2028wo\n\ud800"))
    whole = path.read_bytes()
    assert whole.count(b"\n") == 2
    for cut in range(whole.index(b"\n") + 2, len(whole)):
        path.write_bytes(whole[:cut])
        with AnswerFile(path) as kept:
            assert (kept.earlier, kept.get("b")) == (1, None)
            kept.keep("c", KeptAnswer("three"))
        with AnswerFile(path) as kept:
            assert [kept.get(key).text for key in "ac"] == ["one", "three"]
    path.write_bytes(whole)
    with AnswerFile(path) as kept:
        assert kept.get("a") == KeptAnswer("one", 10, 4, 0.5)
        assert kept.get("b").text == "t\u2028wo\n\ud800"
    assert path.stat().st_mode & 0o777 == 0o600 or os.name == "nt"


@pytest.mark.parametrize(
    "text", ["my notes", "my notes\n", '{"name": 1}\n', '{"key": "a"}\n', "[1]\n"]
)
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(InputFileError, match=re.escape(str(path))), AnswerFile(path):
        pass
    assert path.read_text() == text


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")
def test_two_runs_do_not_write_one_file(served, tmp_path):
    """Each would ask all that the other asks, for hours."""
    path = tmp_path / "answers.jsonl"
    engine = served(answer="c1")
    with AnswerFile(path) as kept:
        kept.keep("a", KeptAnswer("one"))
        with path.open("ab") as torn:
            torn.write(b'{"key": "b')  # as of an answer that is just being written
        with pytest.raises(InputFileError, match="another run is writing it"):
            measured(tmp_path)
        assert engine.requests == []
        assert path.read_bytes().endswith(b'{"key": "b')
    assert measured(tmp_path, arm=["as retrieved"]).asked == 12


def test_a_folder_is_no_file_of_answers_and_lines_of_earlier_versions_are_read(tmp_path):
    with pytest.raises(InputFileError, match="cannot be"), AnswerFile(tmp_path):
        pass
    path = tmp_path / "answers.jsonl"
    path.write_text('{"key": "a", "text": "one", "prompt_tokens": 3, "seconds": 0.5}\n')
    with AnswerFile(path) as kept:
        assert kept.get("a") == KeptAnswer("one", 3, None, 0.5, None)


# statistics


def answers(scores, name="arm"):
    scored = {number: Scored("x", one, one, one) for number, one in enumerate(scores)}
    return ArmAnswers(name, scored=scored)


def test_changes_are_paired_over_common_questions():
    base, other = answers([1.0, 0.0, 0.5, 1.0]), answers([0.5, 0.5, 0.5])
    assert other.differences(base, "f1") == [-0.5, 0.5, 0.0]
    assert change(other, base).mean == 0.0
    assert change(answers([]), base) is None


# what a model thinks, and answers without an end


def test_what_a_model_thinks_is_not_its_answer(served, tmp_path):
    """It names the right answer in any order, so a score of it would hide what order does."""

    def thinks(body):
        right = re.search(r"What is the code, (\d+)", body["messages"][-1]["content"])
        thought = f"<think>Not c{int(right[1]) % 8}?</think>\n\n" if right else ""
        return thought + reads_the_first(body)

    served(answer=thinks)
    (result,) = measured(tmp_path, arm=["reversed"]).sets
    plain, other = (list(arm.scored.values()) for arm in result.arms)
    assert [(one.f1, one.exact) for one in plain] == [(1.0, 1.0)] * 12
    assert [(one.f1, one.contained) for one in other] == [(0.0, 0.0)] * 12
    assert "<think>" in (tmp_path / "answers.jsonl").read_text()


def test_a_thought_stands_in_no_history(served, tmp_path):
    engine = served(answer=lambda body: "<think>Hm.</think>\n\nYes.")
    measured(tmp_path, [chats()])
    said = [one["content"] for body in engine.requests for one in body["messages"][2:-1:2]]
    assert set(said) == {"Yes."}
    served(answer="no")
    assert measured(tmp_path, [chats()]).asked == 0


def test_answers_that_were_cut_off_or_are_empty_are_counted(served, tmp_path):
    def answer(body):
        if "again" in body.get("cache_salt", ""):
            return "one two three four five"
        return "" if "code, 1" in body["messages"][-1]["content"] else "c1"

    for _ in range(2):  # the second time the answers are those that were kept
        served(answer=answer)
        results = measured(tmp_path, arm=["as retrieved, again"], answer_tokens=3)
        shown = [one for one in quality_output(results) if isinstance(one, str)]
        assert (
            "towns: 12 of 24 answers were cut off at 3 tokens; give them room (--answer-tokens)"
            in shown
        )
        empty = [one for one in shown if " are empty" in one]
        assert empty == [
            "towns: 3 of 24 answers are empty, as those are of a model that is still thinking at "
            "its last token; give it room (--answer-tokens), or have it not think"
        ]


# question sets


def test_the_embedded_questions_can_be_answered_from_what_is_found():
    (asked,) = standard_sets(None, [])
    assert asked.name == "python-reference"
    assert len(asked.conversations) == 39
    for ((traced,),) in zip(asked.conversations, strict=True):
        texts = f" {normalize_answer(' '.join(block.text for block in traced.blocks))} "
        right = map(normalize_answer, asked.references[traced.request_id])
        assert any(f" {one} " in texts for one in right), traced.query
        assert all(map(normalize_answer, asked.references[traced.request_id]))


@pytest.mark.skipif("CTXREUSE_DATA" not in os.environ, reason="no public data")
def test_the_public_sets_are_read():
    sets = standard_sets(Path(os.environ["CTXREUSE_DATA"]), [])
    assert [(one.name, one.questions, one.has_turns) for one in sets] == [
        ("xquad-k5", 612, False),
        ("xquad-k15", 200, False),
        ("locomo-k20", 200, False),
        ("mtrag-k5", 100, True),
    ]
    for one in sets:
        assert len(one.fitting(32_768)) >= one.questions


def test_the_order_is_random_and_that_of_the_seed():
    asked = questions()
    assert asked.shuffled(0) == asked.shuffled(0) != asked.shuffled(1)
    assert sorted(one.request_id for (one,) in asked.shuffled(1).conversations) == sorted(
        one.request_id for (one,) in asked.conversations
    )


def test_unknown_sets_are_named_and_questions_without_answers_cannot_be_scored():
    with pytest.raises(InvalidRequestError, match=r"there is no question set 'xquad'.*xquad-k5"):
        standard_sets(Path(), ["xquad"])
    with pytest.raises(InvalidRequestError, match="CTXREUSE_DATA"):
        standard_sets(None, ["xquad-k5"])
    with pytest.raises(InputFileError, match="there is no such folder"):
        standard_sets(Path("/no/such/folder"), ["xquad-k5"])
    with pytest.raises(InvalidRequestError, match="no question has right answers"):
        set_of_workload(replace(workload(), references={}), 8)


# the command


def options(tmp_path, *more):
    return ("quality", *more, "--base-url", URL, "-o", tmp_path / "out")


def test_the_command_asks_a_users_questions_and_writes_what_came_out(run, served, folder, tmp_path):
    served(answer="Yes.")
    code, out, err = run(*options(tmp_path, "jsonl", "--data", folder, "--k", "3"))
    assert code == 0, err
    shown = words(out)
    assert "towns, bm25, k=3: 15 questions, emulated" in shown
    assert "How good the answers are" in shown
    assert "de-duplicated" in shown
    assert "Stopped: every arm was asked all." in shown
    assert "Arms find each other's prompts in the engine's cache" in shown
    written = json.loads((tmp_path / "out" / "quality.json").read_text())
    (result,) = written["sets"]
    assert (written["model"], written["is_complete"]) == ("emulated", True)
    assert {arm["scores"]["f1"]["mean"] for arm in result["arms"]} == {1.0}
    assert {arm["questions"] for arm in result["arms"]} == {15}
    assert result["arms"][0]["answers"][0]["answer"] == "Yes."
    code, out, err = run(*options(tmp_path, "jsonl", "--data", folder, "--k", "3"))
    assert "0 answers are new; all are kept in" in words(out)


def test_without_public_data_it_asks_about_python_and_says_so(run, served, tmp_path, monkeypatch):
    monkeypatch.delenv("CTXREUSE_DATA", raising=False)
    served(answer="pass")
    code, out, err = run(*options(tmp_path, "--questions", "2", "--arm", "reordered"))
    assert code == 0, err
    assert "asking python-reference" in err
    assert "python-reference: 2 questions, emulated" in words(out)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "quality asks an engine"),
        (("jsonl", "--base-url", URL), "name the files' format and where they are"),
        (("jsonl", "--base-url", URL, "--question-set", "xquad-k5"), "leave one of the two out"),
        (("--base-url", URL, "--question-set", "xquad"), "there is no question set 'xquad'"),
    ],
)
def test_mistakes_are_explained(run, tmp_path, arguments, problem):
    code, _, err = run("quality", *arguments, "-o", tmp_path / "out")
    assert code == 2
    assert problem in err
