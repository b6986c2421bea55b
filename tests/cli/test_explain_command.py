"""`ctxreuse explain`, called as a user calls it, and the explanations behind it."""

import json
from functools import partial

import pytest
from cli_helpers import words
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import block, plan_trace, write_jsonl

from ctxreuse import ReusePlanner
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.measure.replay import explain_plan as explaining
from ctxreuse.measure.replay.explain_plan import explain_plan, explanation_json
from ctxreuse.measure.replay.plan_file import PlannedRequest, read_plan
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.memory.explanations import Cause, explain
from ctxreuse.memory.sent_log import SentEntry

CORPUS = {number: block(number, 100) for number in range(1, 10)}


def planned(request_id, block_ids, **fields):
    parts = tuple((f"[Doc_{name}]", name, None) for name in block_ids)
    return PlannedRequest(request_id, parts, **fields)


def explained(*requests):
    return list(explain_plan(requests, CORPUS))


def causes(*requests):
    return [one.cause for one in explained(*requests)]


@pytest.fixture
def explain_command(run):
    return partial(run, "explain")


@pytest.fixture
def corpus(tmp_path):
    lines = [{"id": i, "text": one.text, "tokens": one.tokens} for i, one in CORPUS.items()]
    return write_jsonl(tmp_path / "corpus.jsonl", *lines)


PLAN = [
    {"request_id": "a", "blocks": [1, 2, 3]},
    {"request_id": "b", "blocks": [1, 3, 2], "expected_cached_tokens": 100},
    {"request_id": 4, "blocks": [1, 2], "expected_cached_tokens": 0},
    {"request_id": "s", "blocks": [1, 2, 3], "system": "a secret system"},
    {"request_id": "t", "blocks": [1, 2], "tenant": "a secret tenant"},
    {"request_id": "later", "blocks": [5], "query": "a secret question", "after": "a"},
    {"request_id": "e", "blocks": []},
]


@pytest.fixture
def plan(tmp_path):
    return write_jsonl(tmp_path / "plan.jsonl", *PLAN)


def rows(table):
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


# plan files


def test_every_cause_that_a_plan_file_can_show():
    short = planned("short", (1, 2))
    corpus = {**CORPUS, 1: block(1, 8)}
    requests = [planned("a", (1, 3)), short]
    found = [one.cause for one in explain_plan(requests, corpus)]
    assert found == [Cause.new_blocks, Cause.too_short]
    assert causes(
        planned("a", (1, 2)),
        planned("b", (1, 2)),
        planned("c", (2, 1)),
        planned("d", (1, 2), expected_cached_tokens=100),
        planned("e", (1, 2), expected_cached_tokens=200),
        planned("f", (1, 2), system="S"),
        planned("g", (1, 2), tenant="T", system="T"),
        planned("h", ()),
        planned("i", (1, 2), after="a"),
        planned("j", (1, 9)),
        planned("k", (1, 9, 5), expected_cached_tokens=300),
        planned("l", (3, 5, 4), expected_cached_tokens=200),
    ) == [
        Cause.new_blocks,
        Cause.hit,
        Cause.other_order,
        Cause.evicted,
        Cause.hit,
        Cause.other_system,
        Cause.other_tenant,
        Cause.empty,
        Cause.later_turn,
        Cause.new_blocks,
        Cause.hit,
        Cause.older_prompt,
    ]


def test_what_was_left_out_or_is_not_counted_is_no_part_of_a_comparison():
    later = planned("b", (2,), after="a", conversation_id="c", turn=1)
    reference = ("[Doc_1]", 1, "Please refer to [Doc_1].")
    later = PlannedRequest(**{**fields_of(later), "parts": (reference, *later.parts)})
    (_, explanation) = explained(planned("a", (1,)), later)
    assert (explanation.closest, explanation.block) == ("a", 2)
    assert "its own 1 blocks (100 tokens)" in explanation.words

    corpus = {1: block(1), 2: block(2)}
    requests = [planned("a", (1, 2)), planned("b", (1, 2))]
    explanation = list(explain_plan(requests, corpus))[1]
    assert explanation.shared_tokens == 6  # 9 characters a text, some four a token
    assert explanation.cause is Cause.too_short


def fields_of(request):
    return {name: getattr(request, name) for name in PlannedRequest.__dataclass_fields__}


requests_of_plans = st.builds(
    lambda ids, fields: (ids, fields),
    st.lists(st.integers(1, 6), unique=True, max_size=4),
    st.fixed_dictionaries(
        {"system": st.sampled_from((None, None, "S")), "tenant": st.sampled_from(("", "", "T"))},
        optional={"expected_cached_tokens": st.none() | st.integers(0, 400)},
    ),
)


def compared_with_all(requests):
    before, wanted = [], []
    for request in requests:
        sent = SentEntry(
            request_id=request.request_id,
            tenant=request.tenant,
            system=request.system,
            is_later_turn=request.after is not None,
            after=request.after,
            keys=tuple(CORPUS[name].key for name in request.blocks),
            ids=tuple(request.blocks),
            tokens=(100,) * len(request.blocks),
            front_tokens=estimate_tokens(request.system or ""),
        )
        expected = request.expected_cached_tokens
        wanted.append(explain(sent, before, expected, across_tenants=True))
        before.append(sent)
    return wanted


@given(st.lists(requests_of_plans, max_size=12), st.data())
def test_looking_at_related_prompts_only_finds_what_looking_at_all_finds(named, data):
    requests = []
    for number, (ids, fields) in enumerate(named):
        after = data.draw(st.none() | st.integers(0, number - 1)) if number else None
        requests.append(planned(number, ids, **fields, after=after))
    assert explained(*requests) == compared_with_all(requests)


@pytest.mark.parametrize("latest", [0, 1])
@given(named=st.lists(requests_of_plans, max_size=12))
def test_however_few_prompts_are_looked_at_the_longest_common_beginning_is_found(latest, named):
    requests = [planned(number, ids, **fields) for number, (ids, fields) in enumerate(named)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explaining, "_LATEST", latest)
        answers = explained(*requests)
    for one, wanted in zip(answers, compared_with_all(requests), strict=True):
        assert one.shared_blocks == wanted.shared_blocks
        assert one.shared_tokens == wanted.shared_tokens
        assert (one.closest is None) == (wanted.closest is None)
        elsewhere = (Cause.hit, Cause.other_system, Cause.other_tenant, Cause.older_prompt)
        if one.cause in elsewhere or wanted.cause in elsewhere:
            assert (one.cause, one.lost_tokens) == (wanted.cause, wanted.lost_tokens)


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("conversations", [False, True])
@given(
    contexts=st.lists(
        st.tuples(
            st.lists(st.integers(1, 7), unique=True, max_size=4).map(tuple),
            st.sampled_from((None, None, "c", "d")),
            st.sampled_from(("", "T")),
        ),
        max_size=8,
    )
)
def test_a_planned_trace_is_explained_as_its_plans_expect(mode, conversations, contexts):
    trace = [
        TraceRequest(
            f"r{number}",
            f"{number}?",
            tuple(CORPUS[name] for name in ids),
            conversation_id=conversation,
            turn=number,
            tenant=tenant,
        )
        for number, (ids, conversation, tenant) in enumerate(contexts)
    ]
    requests = plan_trace(trace, ReusePlanner(), mode, conversations=conversations)
    answers = explained(*requests)
    assert [one.request_id for one in answers] == [request.request_id for request in requests]
    for request, explanation in zip(requests, answers, strict=True):
        assert explanation.cause is not Cause.evicted
        assert (explanation.cause is Cause.later_turn) == (request.after is not None)
        assert explanation.shared_tokens == request.expected_cached_tokens
        assert 0 <= explanation.lost_tokens <= 100 * len(request.blocks)


# the command


def test_json_is_an_object_a_request_in_execution_order(explain_command, plan, corpus):
    code, out, err = explain_command("--plan", plan, "--corpus", corpus, "--json")
    assert (code, err) == (0, "")
    answers = [json.loads(line) for line in out.splitlines()]
    assert [(one["request_id"], one["cause"]) for one in answers] == [
        ("a", "new blocks"),
        ("b", "other order"),
        (4, "evicted"),
        ("s", "other system text"),
        ("t", "other tenant"),
        ("later", "later turn"),
        ("e", "no blocks"),
    ]
    assert answers[1] == {
        "request_id": "b",
        "cause": "other order",
        "closest": "a",
        "shared_blocks": 1,
        "shared_tokens": 100,
        "block": 3,
        "other_block": 2,
        "lost_tokens": 200,
        "words": "It begins as request 'a' does, for 1 of its 3 blocks (100 of 300 block tokens). "
        "They part at block 3, where the earlier prompt has 2. From there on blocks with 200 "
        "tokens stand in the earlier prompt, too, but in another order or place: "
        "they are computed again.",
        "reason": "messages",
    }
    expected = [explanation_json(one) for one in explain_plan(read_plan(plan), CORPUS)]
    assert answers == expected


def test_one_request_is_told_in_words(explain_command, plan, corpus):
    assert explain_command("--plan", plan, "--corpus", corpus, "--request", 4) == (
        0,
        "4: evicted\n"
        "It begins as request 'a' does, for 2 of its 2 blocks (200 of 200 block tokens), "
        "but 200 of these tokens have left the cache since. This prompt ends there.\n",
        "",
    )


def test_one_request_can_be_told_as_json_if_it_is_known(explain_command, plan, corpus):
    code, out, _ = explain_command("--plan", plan, "--corpus", corpus, "--request", "s", "--json")
    assert code == 0
    (line,) = out.splitlines()
    assert json.loads(line)["words"] == (
        "Request 'a' began with the same 3 blocks (300 tokens), but another text stands before "
        "them; they are computed again."
    )

    assert explain_command("--plan", plan, "--corpus", corpus, "--request", "ghost") == (
        2,
        "",
        f"ctxreuse: {plan}: there is no request 'ghost'; see its request_id fields\n",
    )


def test_a_table_for_people_says_which_causes_and_requests_cost_most(explain_command, plan, corpus):
    code, out, err = explain_command("--plan", plan, "--corpus", corpus)
    assert (code, err) == (0, "")
    assert "Why requests hit or miss" in words(out)
    assert "Requests that lost most" in words(out)
    assert rows(out) == [
        ["other system text", "1", "300"],
        ["evicted", "1", "200"],
        ["other order", "1", "200"],
        ["other tenant", "1", "200"],
        ["later turn", "1", "0"],
        ["new blocks", "1", "0"],
        ["no blocks", "1", "0"],
        ["s", "other system text", "a", "0 tokens", "1", "300"],
        ["b", "other order", "a", "100 tokens", "3", "200"],
        ["4", "evicted", "a", "200 tokens", "its end", "200"],
        ["t", "other tenant", "None", "0 tokens", "1", "200"],
    ]


@pytest.mark.parametrize(("worst", "listed"), [(0, []), (1, ["s"]), (2, ["s", "b"])])
def test_the_list_of_requests_can_be_shortened(explain_command, plan, corpus, worst, listed):
    _, out, _ = explain_command("--plan", plan, "--corpus", corpus, "--worst", worst)
    assert [row[0] for row in rows(out)[7:]] == listed
    assert ("Requests that lost most" in words(out)) == bool(listed)


def test_at_most_ten_requests_that_lost_something_are_listed(explain_command, tmp_path, corpus):
    requests = [{"request_id": f"r{n}", "blocks": [n % 2 + 1, 2 - n % 2]} for n in range(14)]
    systems = [{**one, "system": f"system {n}"} for n, one in enumerate(requests)]
    plan = write_jsonl(tmp_path / "plan.jsonl", *systems)
    _, out, _ = explain_command("--plan", plan, "--corpus", corpus)
    assert rows(out)[:2] == [["other system text", "12", "2,400"], ["new blocks", "2", "0"]]
    assert len(rows(out)) == 2 + 10


def test_names_are_shown_as_they_are_and_are_no_markup(explain_command, tmp_path, corpus):
    first, second = "[bold]a[/bold]", "[/red]"
    lines = {"request_id": first, "blocks": [1, 2]}, {"request_id": second, "blocks": [2, 1]}
    plan = write_jsonl(tmp_path / "plan.jsonl", *lines)
    code, out, _ = explain_command("--plan", plan, "--corpus", corpus)
    assert code == 0
    assert rows(out)[2] == ["[/red]", "other order", "[bold]a[/bold]", "0 tokens", "2", "200"]
    _, out, _ = explain_command("--plan", plan, "--corpus", corpus, "--request", "[/red]")
    assert out.startswith(
        "[/red]: other order\n"
        "No earlier prompt begins as it does; the closest is request '[bold]a[/bold]'. "
    )


def test_names_that_no_terminal_can_print_are_shown_with_a_question_mark(explain_command, tmp_path):
    first, second, block_id = "\ud800 a", "b \udfff", "\udead"
    lines = [{"id": name, "text": f"text of {name}", "tokens": 100} for name in (block_id, "c")]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", *lines)
    requests = [
        {"request_id": first, "blocks": [block_id, "c"], "system": "\ud800"},
        {"request_id": second, "blocks": ["c", block_id], "system": "\ud800"},
        {"request_id": "b ?", "blocks": [block_id], "tenant": "\ud800"},
    ]
    plan = write_jsonl(tmp_path / "plan.jsonl", *requests)
    code, out, err = explain_command("--plan", plan, "--corpus", corpus)
    assert (code, err) == (0, "")
    assert rows(out)[3:] == [
        ["b ?", "other order", "? a", "0 tokens", "c", "200"],
        ["b ?", "other tenant", "None", "0 tokens", "?", "100"],
    ]
    code, out, err = explain_command("--plan", plan, "--corpus", corpus, "--request", second)
    assert (code, err) == (0, "")
    assert out == (
        "b ?: other order\n"
        "It begins as request '\\ud800 a' does, for its system text alone (1 tokens). They part at "
        "block 'c', where the earlier prompt has '\\udead'. From there on blocks with 200 tokens "
        "stand in the earlier prompt, too, but in another order or place: "
        "they are computed again.\n"
    )
    code, out, err = explain_command("--plan", plan, "--corpus", corpus, "--json")
    assert (code, err) == (0, "")
    names = [(one["request_id"], one["closest"]) for one in map(json.loads, out.splitlines())]
    assert names == [(first, None), (second, first), ("b ?", None)]


def test_very_long_names_are_cut_in_the_words_only(explain_command, tmp_path):
    long = "x" * 5_000
    corpus = write_jsonl(tmp_path / "corpus.jsonl", {"id": long, "text": "a", "tokens": 100})
    requests = [{"request_id": long, "blocks": [long]}, {"request_id": 10**4000, "blocks": [long]}]
    plan = write_jsonl(tmp_path / "plan.jsonl", *requests)
    _, out, _ = explain_command("--plan", plan, "--corpus", corpus, "--json")
    told = json.loads(out.splitlines()[1])
    assert (told["request_id"], told["closest"]) == (10**4000, long)
    assert told["words"].startswith(f"It begins as request '{'x' * 58}… does, for 1 of its 1 ")


def test_an_empty_plan_is_explained(explain_command, corpus, tmp_path):
    empty = write_jsonl(tmp_path / "plan.jsonl")
    assert explain_command("--plan", empty, "--corpus", corpus, "--json") == (0, "", "")
    code, out, err = explain_command("--plan", empty, "--corpus", corpus)
    assert (code, rows(out), err) == (0, [], "")


def test_no_text_of_documents_questions_or_system_is_told(explain_command, tmp_path):
    lines = [{"id": n, "text": f"a secret {n}", "tokens": 100} for n in range(1, 10)]
    corpus = write_jsonl(tmp_path / "secrets.jsonl", *lines)
    requests = [{**line, "query": "a secret question"} for line in PLAN]
    plan = write_jsonl(tmp_path / "plan.jsonl", *requests)
    names = [str(line["request_id"]) for line in PLAN]
    for options in ((), ("--json",), *(("--request", name) for name in names)):
        code, out, err = explain_command("--plan", plan, "--corpus", corpus, *options)
        assert (code, err) == (0, "")
        assert out
        assert "secret" not in out


# usage


@pytest.mark.parametrize("options", [(), ("--json",), ("--request", "0")])
def test_a_broken_plan_exits_with_2_and_prints_nothing(explain_command, corpus, tmp_path, options):
    lines = ({"request_id": 0, "blocks": [1]}, {"request_id": 1, "blocks": ["ghost"]})
    plan = write_jsonl(tmp_path / "plan.jsonl", *lines)
    code, out, err = explain_command("--plan", plan, "--corpus", corpus, *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"ctxreuse: {plan}:2: block 'ghost' (str) is not in the corpus; ")
    assert err.count("\n") == 1
