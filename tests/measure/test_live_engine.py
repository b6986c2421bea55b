"""`ctxreuse bench --base-url`: a server is asked; an emulated engine answers."""

import re
import time
from dataclasses import replace

import httpx
import pytest
from cli_helpers import run, words
from test_bench import DATASET, folder, nothing, workload

from ctxreuse.errors import EngineError, InvalidRequestError
from ctxreuse.measure.bench import live_engine
from ctxreuse.measure.bench.benchmark import RunMatrix
from ctxreuse.measure.bench.live_engine import TOO_LONG, LiveEngine
from ctxreuse.measure.replay.policies import POLICIES
from ctxreuse.measure.replay.run_result import Part
from ctxreuse.measure.results.results_file import Results
from ctxreuse.measure.results.tables import _first_token_ratio
from ctxreuse.serving import EmulatedEngine

__all__ = ["folder", "run"]

URL = "http://engine.invalid/v1"


@pytest.fixture
def served(monkeypatch):
    """Return a function that has an emulated engine answer at every address."""

    def serve(**options):
        emulated = EmulatedEngine(**options)
        transport = emulated.transport()

        async def handle(_, request):
            return await transport.handle_async_request(request)

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
        return emulated

    return serve


def measured(runs, references=None, advance=nothing):
    with LiveEngine(URL, None, "EMPTY", 8, references or {}, advance) as engine:
        return engine.measure(runs)


def runs_of(part):
    return RunMatrix(workload(), POLICIES, [None], 3, [3], [2, 4], 0).runs([part])


def test_every_policy_asks_everything_of_an_empty_cache(served):
    emulated = served(answer="yes")
    runs = runs_of(Part.policies)
    advanced = []
    references = {one.id: one.answers for one in DATASET.questions[:5]}
    results = measured(runs, references, lambda: advanced.append(1))
    assert len(advanced) == sum(2 * len(run.trace) for run in runs)
    bodies = emulated.requests[2:]  # the first two warm it up
    salts = [body["cache_salt"] for body in bodies]
    assert len(set(salts)) == len(runs)
    for one in results:
        assert sorted(one.request_ids) == sorted(each.id for each in DATASET.questions)
        assert len(one.first_token_s) == 15
        assert one.usages[0].cached_tokens == 0
        assert {score[1:] for score in one.scores} == {(1.0, 1.0)}
        assert len(one.scores) == 5
        assert one.planned
    by_name = {(one.policy, one.deduplicated): one.total for one in results}
    plain = by_name["as retrieved", False]
    best = by_name["ctxreuse, batch", True]
    assert best.prefilled_tokens < plain.prefilled_tokens


def test_what_a_model_thinks_is_not_scored(served):
    served(answer="No.</think>Yes.")
    references = {one.id: one.answers for one in DATASET.questions}
    for one in measured(runs_of(Part.policies)[:2], references):
        assert {score[1:] for score in one.scores} == {(1.0, 1.0)}


@pytest.mark.parametrize("part", [Part.policies, Part.sessions])
def test_runs_that_are_compared_take_turns(served, part):
    emulated = served(answer="yes")
    runs = [run for run in runs_of(part) if part is Part.policies or run.sessions == 2]
    measured(runs)
    salts = [body["cache_salt"] for body in emulated.requests[2:]]
    assert len(salts) == 15 * len(runs)
    together = 8 if part is Part.sessions else 4
    for number in range(15 // together):  # rounds that are full
        sent = salts[number * together * len(runs) :][: together * len(runs)]
        turns = [sent[start : start + together] for start in range(0, len(sent), together)]
        assert [len(set(turn)) for turn in turns] == [1] * len(runs)
        begins = list(dict.fromkeys(salts))[number]
        assert turns[0][0] == begins


def test_a_slow_phase_of_the_machine_bends_no_ratio(served, tmp_path):
    """What is sent first takes ten times as long, whoever sends it."""
    seconds = iter([0.001, 0.001] + [0.05] * 18 + [0.005] * 1_000)

    def wait(_):
        time.sleep(next(seconds))
        return "yes"

    served(answer=wait)
    base, other, last = measured([replace(runs_of(Part.policies)[0]) for _ in range(3)])
    assert max(base.first_token_s) > 5 * min(base.first_token_s)
    assert _first_token_ratio(base, base) == "1.000"
    for one in (other, last):
        ratio, _, _ = map(float, re.findall(r"\d+\.\d+", _first_token_ratio(one, base)))
        assert 0.4 < ratio < 2.5  # one after the other, they would be 3 or more apart


def test_an_error_of_a_run_is_raised_as_it_is(served, monkeypatch):
    served(answer="yes")
    monkeypatch.setattr(live_engine, "next_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured(runs_of(Part.policies)[:2])


def test_the_models_answers_stand_in_the_history(served):
    emulated = served(answer="A bridge.")
    measured(runs_of(Part.policies)[:1])
    later = [body["messages"] for body in emulated.requests if len(body["messages"]) > 1]
    assert later
    assert all(messages[-2] == {"role": "assistant", "content": "A bridge."} for messages in later)


def test_conversations_take_turns(served):
    emulated = served(answer="yes")
    results = measured(runs_of(Part.sessions))
    assert [one.sessions for one in results] == [2, 2, 2, 4, 4, 4]
    assert {len(one.request_ids) for one in results} == {15}
    assert len(emulated.requests) == 2 + 6 * 15


def test_what_does_not_fit_ends_its_conversation(served):
    served(answer="yes", max_model_len=500)
    (result,) = measured(runs_of(Part.policies)[:1])
    assert f" requests not answered: {TOO_LONG}" in "".join(result.notes)
    assert 0 < result.failures <= 15 - len(result.request_ids)
    ids = set(result.request_ids)
    for turns in workload().conversations:
        answered = [one.request_id in ids for one in turns]
        assert answered == sorted(answered, reverse=True)


def test_a_server_that_does_not_say_what_it_had_cached_is_no_use(served):
    served(answer="yes", prompt_tokens_details=False)
    with pytest.raises(InvalidRequestError, match="--enable-prompt-tokens-details"):
        measured(runs_of(Part.policies)[:1])


def test_a_server_may_tell_of_cached_tokens_only_where_there_are_some(served):
    served(answer="yes", prompt_tokens_details="if cached")
    (result,) = measured(runs_of(Part.policies)[:1])
    assert len(result.request_ids) == 15
    assert not result.failures


def test_a_server_that_cannot_tokenize_is_asked_all_the_same(served, monkeypatch):
    served(answer="yes", max_model_len=100_000)

    async def refuse(_self, _prompt):
        raise EngineError("no such route", 404)

    monkeypatch.setattr("ctxreuse.serving.EngineClient.tokenize", refuse)
    (result,) = measured(runs_of(Part.policies)[:1])
    assert len(result.request_ids) == 15


def test_no_server_is_an_error(monkeypatch):
    async def refuse(_, request):
        raise httpx.ConnectError("refused", request=request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", refuse)
    monkeypatch.setattr("asyncio.sleep", _at_once)
    with pytest.raises(EngineError, match=r"engine\.invalid"):
        measured(runs_of(Part.policies)[:1])


async def _at_once(_seconds, result=None):
    return result


def test_the_command_shows_what_the_engine_reported(run, folder, tmp_path, served):
    served(answer="yes")
    html = tmp_path / "report.html"
    code, out, err = run(
        "bench", "jsonl", "--data", folder, "--k", "3", "-o", tmp_path / "out",
        "--base-url", URL, "--part", "policies", "--part", "sessions", "--html", html,
    )  # fmt: skip
    assert code == 0, err
    shown = words(out)
    assert "What the engine reported" in shown
    assert "without what a chat shows" in shown
    assert "1.000 [1.000, 1.000]" in shown
    assert "ctxreuse, online (32)" in shown
    results = Results.read(tmp_path / "out" / "results.json")
    assert results.level == "engine"
    assert "as measured" in html.read_text()
