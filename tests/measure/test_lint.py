"""What keeps a cache from hitting is found in a trace, with what it costs; what is well is not."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock
from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.lint import LintReport, lint
from ctxreuse.measure.replay.explain_plan import REMEDIES
from ctxreuse.measure.traces.sent_calls import SentCall
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.memory.explanations import Cause
from ctxreuse.rules.cache_rules import READY_PROFILES, cache_profile

HELP = "You help people with questions about rivers. " * 100  # 1,125 tokens
TOOLS = ("search#1", "sum#2")
ANTHROPIC = cache_profile("anthropic")
CORPUS = {name: ContextBlock(id=name, text=name, tokens=600) for name in "abcdefgh"}


def traced(number, letters="ab", *, system="Help.", marks=(), sent=(), **fields):
    """Return a request with documents of 600 tokens each; `sent` None is not known."""
    call = None if sent is None else SentCall(model="m", **dict(sent))
    return TraceRequest(
        number,
        f"Question {number}?",
        tuple(CORPUS[letter] for letter in letters),
        system=system,
        marks=marks,
        sent=call,
        **fields,
    )


def found(trace, cache=ANTHROPIC):
    """Return check, request, how many show it, and tokens of each finding."""
    report = lint(trace, CORPUS, cache)
    return [(one.check, one.request_id, one.requests, one.tokens) for one in report.findings]


def the_finding(trace, cache=ANTHROPIC):
    (finding,) = lint(trace, CORPUS, cache).findings
    return finding


MARKED = {"marks": (0, 2), "sent": {"marks": {"system": 1, "turn": 1}, "system_tokens": 1_125}}


@pytest.mark.parametrize("cache", READY_PROFILES)
def test_prompts_that_share_all_they_can_are_clean(cache):
    trace = [traced(n, "ab", system=HELP, **MARKED) for n in range(5)]
    assert found(trace, cache_profile(cache)) == []


@pytest.mark.parametrize(
    "value", [lambda n: f"2026-11-25T10:{n:02}:00", lambda n: f"session-{n:04x}", lambda n: str(n)]
)
def test_times_ids_and_counters_in_front_are_found_with_the_request_and_the_cost(value):
    trace = [traced(n, "ab", system=f"{value(n)} {HELP}", **MARKED) for n in range(5)]
    one = the_finding(trace)
    assert (one.check, one.requests) == ("volatile text in front", 4)
    assert one.label == f"Question {one.number - 1}?" == f"Question {one.request_id}?"
    assert f"it begins with “{value(0)}” and with “{value(1)}”" in one.found
    assert one.remedy == "Say it behind the documents, such as in the question."
    # the rest of the system text, and both documents
    assert one.tokens == pytest.approx(4 * (1_125 + 1_200), rel=0.01)
    assert one.cost_tokens == round(1.15 * one.tokens)  # it is written each time, and not read
    assert one.share == pytest.approx(1.15 * 4 / 5, rel=0.05)


def test_what_varies_in_front_of_less_than_the_minimum_costs_nothing():
    marked = {"marks": (1,), "sent": {"marks": {"turn": 1}}}
    trace = [traced(n, "a", system=f"At 10:{n:02}.", **marked) for n in range(5)]
    assert found(trace, cache_profile("anthropic(minimum=1_024)")) == []
    assert [one[0] for one in found(trace, cache_profile("anthropic(minimum=500)"))] == [
        "volatile text in front"
    ]


def test_a_recording_without_texts_shows_how_many_system_texts_there_are():
    trace = [
        traced(n, "ab", system=f"{n:032x}", marks=(0, 2), sent=MARKED["sent"]) for n in range(5)
    ]
    one = the_finding(trace)
    assert (one.check, one.requests, one.tokens) == ("volatile text in front", 4, 4 * 2_325)
    assert "5 forms of the system text in 5 requests" in one.found
    assert "--hash-only" in one.remedy


def test_texts_in_front_are_found_where_prompts_begin_with_them_beside_other_system_texts():
    trace = [traced(n, "ab", system=None, sent=None, front=f"Answer {n}.") for n in range(5)]
    one = the_finding(trace, cache_profile("vllm"))
    assert (one.check, one.requests, one.tokens) == ("volatile text in front", 4, 4 * 1_201)
    assert one.found.startswith("5 forms of the text before the documents in 5 requests")
    assert one.remedy.startswith("Say it behind the documents")


def test_one_or_a_few_texts_before_the_documents_are_not_said_to_be_system_texts():
    trace = [traced(n, "ab", system=None, sent=None, front=f"Help {n % 3}.") for n in range(60)]
    assert found(trace, cache_profile("vllm")) == []
    trace = [traced(n, "ab", system=None, sent=None, front="0" * 16) for n in range(5)]
    assert found(trace, cache_profile("vllm")) == []


def test_tools_in_another_order_are_found():
    sent = {"tool_tokens": 2_000, "marks": {"tools": 1, "turn": 1}}
    orders = [TOOLS, TOOLS, TOOLS[::-1], TOOLS, TOOLS[::-1]]
    trace = [
        traced(n, "a", marks=(1,), sent={**sent, "tools": tools}) for n, tools in enumerate(orders)
    ]
    one = the_finding(trace)
    assert (one.check, one.request_id, one.requests) == ("tools in changing order", 2, 1)
    assert one.tokens == 2_000 + 2 + 600  # the system text and a document, too
    assert one.found == "1 request has the same tools as earlier ones in another order"
    assert one.remedy.startswith("Sort the tools by name")


def test_tools_that_are_others_each_time_are_found_and_two_sets_of_many_requests_are_not():
    sent = {"tool_tokens": 2_000, "marks": {"tools": 1, "turn": 1}}
    others = [
        traced(n, "a", marks=(1,), sent={**sent, "tools": (f"search#{n}",)}) for n in range(5)
    ]
    one = the_finding(others)
    assert (one.check, one.remedy) == ("tools that change", REMEDIES[Cause.other_tools])
    assert one.found == "5 sets of tools in 5 requests with tools"
    two = [
        traced(n, "a", marks=(1,), sent={**sent, "tools": TOOLS[: 1 + n % 2]}) for n in range(30)
    ]
    assert found(two) == []


def test_documents_in_another_order_are_found():
    marked = MARKED | {"marks": (0, 3)}
    trace = [traced(n, letters, **marked) for n, letters in enumerate(("abc", "cab", "abc"))]
    one = the_finding(trace)
    assert (one.check, one.request_id, one.tokens) == ("documents in changing order", 1, 1_800)
    assert one.found == (
        "1 request has documents of an earlier one in another order or place; this one parts from "
        "request 1 “Question 0?” behind 0 of its 3, and 1,800 tokens are computed again"
    )
    assert "plan_batch" in one.remedy
    assert found(trace, cache_profile("anthropic(minimum=4096)")) == []  # none is kept


def test_progress_is_told_and_requests_are_named_by_their_questions_not_by_their_ids():
    trace = [
        replace(traced(f"op-{n}", "abc", system=f"S{n % 2}"), query=f"Where is {n}?")
        for n in range(30)
    ]
    steps, tasks = [], []

    @contextmanager
    def progress(task, number):
        tasks.append((task, number))
        yield lambda: steps.append(1)

    report = lint(trace, CORPUS, progress=progress)
    assert tasks == [("comparing", 30)]
    assert len(steps) == 30
    [one] = report.findings
    assert (one.check, one.remedy) == ("another system text", REMEDIES[Cause.other_system])
    assert one.request_id == "op-1"
    assert "1 “Where is 0?”" in one.found
    assert not any(code in one.found for code in ("op-", "part at block"))


@pytest.mark.parametrize("system", ["Help.", HELP])
def test_marks_that_vanish_are_found(system):
    tokens = 1_125 if system == HELP else 2
    marked = {**MARKED, "sent": {**MARKED["sent"], "system_tokens": tokens}}
    trace = [traced(n, "ab", system=system, **marked) for n in range(3)]
    trace.append(traced(3, "ab", system=system, sent={"system_tokens": tokens}))
    one = the_finding(trace)
    assert (one.check, one.request_id, one.tokens) == ("lost breakpoints", 3, tokens + 1_200)
    assert one.found == "1 request has no breakpoint where an earlier one has some"
    assert one.remedy.startswith("Set the same breakpoints in every request")


def test_prompts_without_marks_or_with_marks_that_nothing_looks_back_for_are_found():
    marked = {"marks": (0,), "sent": {"marks": {"system": 1}, "system_tokens": 1_125}}
    unmarked = {"marks": (), "sent": {"marks": {"turn": 1}, "system_tokens": 1_125, "history": 2}}
    trace = [traced(0, "a", system=HELP, **marked), traced(1, "b", system=HELP, **unmarked)]
    assert found(trace, cache_profile("openai")) == [("lost breakpoints", 1, 1, 1_125)]
    assert found(trace, cache_profile("anthropic")) == []
    trace = [traced(n, "ab", system=HELP, sent={"system_tokens": 1_125}) for n in range(3)]
    assert found(trace) == [("no breakpoint where prompts fork", 1, 2, 2 * 2_325)]
    one = the_finding(trace)
    assert (one.cost_tokens, one.remedy) == (4_185, REMEDIES[Cause.never_written])
    assert one.found == "2 requests have no breakpoint behind what earlier ones begin with, too"


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (cache_profile("anthropic"), "the provider refuses such a request"),
        (cache_profile("openai"), "the provider writes only the latest"),
    ],
)
def test_more_marks_than_the_provider_takes_are_found_first(cache, words):
    sent = [{"marks": {"system": n, "turn": 4}, "system_tokens": 1_125} for n in (1, 5, 2)]
    trace = [traced(0, "abcd", system=HELP, marks=(0, 1, 2, 3, 4), sent=one) for one in sent]
    one = lint(trace, CORPUS, cache).findings[0]
    assert (one.check, one.number, one.requests, one.tokens) == ("too many breakpoints", 2, 3, 0)
    assert one.found == (
        f"3 requests have more breakpoints than {cache.name} takes, 9 instead of 4; {words}"
    )
    assert one.remedy.startswith("Set breakpoints in one place")


def test_a_mark_behind_a_question_is_paid_in_vain_unless_the_conversation_goes_on():
    sent = {"marks": {"turn": 1}, "system_tokens": 2}
    alone = [traced(n, letters, sent=sent) for n, letters in enumerate(("ab", "cd"))]
    one = the_finding(alone)
    assert one.check == "breakpoint behind the question"
    assert one.cost_tokens == round(0.25 * one.tokens)
    assert one.found == (
        "2 requests have a breakpoint behind a question that no later turn repeats: it is written "
        "at 1.25 times the price and never read"
    )
    assert one.remedy.startswith("Set breakpoints behind documents that come again")
    assert one.tokens == 2 * (1_200 + 2 + 3)
    talk = [replace(request, conversation_id="c") for request in alone]
    later = [traced(0, "ab", sent={**sent, "history": 2})]
    for trace in (talk, later):
        assert found(trace) == []
    assert found(alone, cache_profile("openai(life=30m)"))[0][0] == "breakpoint behind the question"
    assert found(alone, cache_profile("gemini(minimum=100)")) == []


@pytest.mark.parametrize(
    ("minimum", "checks"), [(1_024, []), (1_220, ["just under the minimum"]), (4_096, [])]
)
def test_prompts_just_under_the_minimum_are_found(minimum, checks):
    trace = [traced(n, "ab", **MARKED | {"sent": {"marks": {"turn": 1}}}) for n in range(3)]
    report = lint(trace, CORPUS, cache_profile(f"anthropic(minimum={minimum})"))
    assert [one.check for one in report.findings] == checks
    for one in report.findings:
        assert (one.requests, one.tokens) == (2, 2 * 1_202)
        assert one.found == (
            "2 requests have 1,205 to 1,205 tokens in all or in common with earlier ones; "
            "anthropic keeps prefixes from 1,220 tokens on"
        )
        assert "until it has 1,220 tokens" in one.remedy


def test_what_was_sent_too_late_and_what_asked_another_model_are_found():
    late = [
        traced(n, names, timestamp_ms=n * 400_000.0, **MARKED | {"marks": (0, 1)})
        for n, names in enumerate(("ab", "ac"))
    ]
    one = the_finding(late)
    assert (one.check, one.remedy) == ("sent too late", REMEDIES[Cause.expired])
    assert one.found == (
        "It begins as request '1 “Question 0?”' does, for 1 of its 2 blocks (600 of 1,200 block "
        "tokens), but 600 of these tokens were sent more than 300 seconds before, and the cache "
        "(anthropic) keeps them no longer."
    )
    models = [traced(n, "ab", **MARKED) for n in range(2)]
    models[1] = replace(models[1], sent=replace(models[1].sent, model="another"))
    one = the_finding(models)
    assert (one.check, one.remedy) == ("another model", REMEDIES[Cause.other_model])
    assert one.found.endswith(
        "another model was asked, whose cache is another one; they are computed again."
    )


def test_a_conversation_whose_tools_change_computes_its_history_again():
    sent = {"tool_tokens": 2_000, "marks": {"tools": 1, "history": 1}}
    turns = [
        traced(n, "a", sent={**sent, "tools": tools, "history": 2 * n, "history_tokens": 900 * n})
        for n, tools in enumerate((TOOLS, TOOLS, TOOLS[::-1]))
    ]
    one = the_finding([replace(turn, conversation_id="c") for turn in turns])
    assert (one.check, one.request_id) == ("tools in changing order", 2)
    assert one.tokens == 2_000 + 2 + 1_800


def test_what_a_trace_does_not_say_is_not_known_and_no_finding():
    trace = [traced(n, "ab", sent=None, marks=None) for n in range(3)]
    report = lint(trace, CORPUS)
    assert (report.findings, report.cache) == ([], "vllm")
    assert [words.split(";")[0] for words in report.unknown] == [
        "tools, history and breakpoints of 3 requests",
        "breakpoints and minimum: name the provider's cache, such as --cache anthropic",
    ]
    assert report.verdict.startswith("Nothing found in 3 requests")
    assert lint([], {}) == LintReport([], 0, 0, "vllm", report.unknown[1:])
    whole = [replace(one, framework="langchain") for one in trace]
    assert lint(whole, CORPUS).unknown[0].startswith("tools and breakpoints of 3 requests;")


def test_whether_documents_change_is_not_known_of_a_recording_without_texts():
    hidden = (ContextBlock(id="a", text="", tokens=40),)
    report = lint([TraceRequest(n, "?", hidden) for n in range(3)], {"a": hidden[0]})
    assert report.unknown[1].endswith(
        "change from request to request; record some requests without --hash-only"
    )


def test_arguments_that_are_none_are_named():
    with pytest.raises(InvalidRequestError, match="TraceRequest"):
        lint([7], CORPUS)
    with pytest.raises(InvalidRequestError, match="cache must be CacheRules"):
        lint([], CORPUS, "anthropic")
    with pytest.raises(InvalidRequestError, match="progress must be a function"):
        lint([], CORPUS, progress=-1)


calls = st.builds(
    SentCall,
    model=st.sampled_from(["", "m"]),
    key=st.sampled_from(["", "k"]),
    tools=st.sampled_from([(), TOOLS, TOOLS[::-1], TOOLS[:1]]),
    tool_tokens=st.integers(0, 3_000),
    system_tokens=st.none() | st.integers(0, 3_000),
    history=st.integers(0, 4),
    history_tokens=st.integers(0, 3_000),
    marks=st.dictionaries(
        st.sampled_from(["tools", "system", "history", "turn"]), st.integers(1, 5)
    ),
)
requests = st.builds(
    lambda letters, system, marks, sent, time: TraceRequest(
        0,
        "Which?",
        tuple(CORPUS[letter] for letter in letters),
        system=system,
        marks=None if marks is None else tuple(sorted(m for m in marks if m <= len(letters))),
        sent=sent,
        timestamp_ms=time,
    ),
    st.lists(st.sampled_from("abcd"), unique=True),
    st.sampled_from([None, "", "Help.", "At 10:00. Help.", "At 10:01. Help.", "0" * 32]),
    st.none() | st.sets(st.integers(0, 4)),
    st.none() | calls,
    st.none() | st.floats(0, 10**7),
)


@given(
    st.lists(requests, max_size=8),
    st.sampled_from([cache_profile("vllm"), cache_profile("anthropic"), cache_profile("openai")]),
)
def test_findings_cost_no_more_than_the_prompts_and_name_a_request(trace, cache):
    trace = [replace(one, request_id=number) for number, one in enumerate(trace)]
    report = lint(trace, CORPUS, replace(cache, minimum=min(cache.minimum, 600)))
    assert report.requests == len(trace)
    for one in report.findings:
        assert trace[one.number - 1].request_id == one.request_id
        assert 0 < one.requests <= len(trace)
        assert 0 <= one.tokens <= report.prompt_tokens
        assert 0 <= one.share <= cache.write_factor
        assert one.remedy.endswith(".")
    assert report.as_json()["findings"] == report.as_json()["findings"]
    assert len(list(report.output())) >= 1
