"""The verdict: one sentence on what planning saves, the same in text, JSON and page."""

import json
from dataclasses import replace

import pytest
from cli_helpers import run, words
from planning_helpers import write_jsonl

from ctxreuse.errors import InputFileError
from ctxreuse.measure.replay.estimate import TraceSummary
from ctxreuse.measure.replay.run_result import RunResult
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results_file import Results, results_of
from ctxreuse.measure.results.verdict import verdict

__all__ = ["run"]

PRICES = {
    "input": 2.0,
    "cached_input": 0.5,
    "currency": "EUR",
    "date": "2026-11-01",
    "source": "our contract",
}


def of(policy, cached, capacity=None, **more):
    """Return a run of ten requests with 100 tokens each."""
    mode = "offline" if "batch" in policy else "online"
    strategy = "none" if policy == "as retrieved" else "reuse"
    return RunResult(
        policy, strategy, mode, False, capacity, 0.1, (100,) * 10, (cached,) * 10, **more
    )


def results(*runs, repeated=900, **more):
    trace = TraceSummary(10, 0, 0, 10, 100, 1_000, repeated)
    measured = results_of("some", "blocks", trace, runs, (), {}, **more)
    return replace(measured, prefill_tokens_per_s=more.get("prefill_tokens_per_s", 1_000.0))


def test_a_saving_names_policy_cache_workers_seconds_and_money():
    said = verdict(
        results(
            of("as retrieved", 20),
            of("ctxreuse, online", 60),
            of("ctxreuse, batch", 70),
            prices=Prices(**PRICES),
        )
    )
    assert list(said.lines()) == [
        "50% fewer prompt tokens to compute with ctxreuse, online (one worker, an unlimited "
        "cache): 40 ms less prefill a request and 0.06 EUR less per 1,000 requests (at 1,000 "
        "tokens a second; prices of 2026-11-01 from our contract).",
        "Next: wrap the model (ReuseChatModel for LangChain, ReuseLLM for LlamaIndex); in your "
        "template, {context} must stand before {question}. Or plan with ReusePlanner(); "
        'ReusePlanner(mode="shadow") counts first and changes nothing.',
        "Worth trying; it shows most where prompts are long and answers short.",
        "Planned together, all requests as one batch (ctxreuse, batch): 62% fewer (one worker, an "
        "unlimited cache).",
    ]
    assert said.as_json()["seconds_per_1000_requests"] == 40.0
    assert said.as_json()["money_per_1000_requests"] == 0.06


def test_what_differs_in_front_comes_first_and_documents_outside_of_runs_need_format_context():
    measured = results(of("as retrieved", 20), of("ctxreuse, online", 60))
    said = verdict(replace(measured, different_fronts=measured.trace.requests))
    number = measured.trace.requests
    assert said.sentence.startswith(
        f"In {number} of {number} prompts something that differs stands before the documents: "
        "nothing can be gained until it stands behind them. From then on: 50% fewer "
    )
    assert "{context} must stand before {question}" in said.next_step
    assert not said.is_gain

    measured = results(of("as retrieved", 20), of("ctxreuse, online", 60))
    said = verdict(replace(measured, outside_runs=1))
    assert (
        "for LlamaIndex) and put the documents in with format_context; in your " in said.next_step
    )


def test_what_de_duplication_gives_by_itself_is_said():
    shorter = replace(of("as retrieved", 40), deduplicated=True)
    ours = replace(of("ctxreuse, online", 60), deduplicated=True)
    said = verdict(results(of("as retrieved", 20), shorter, ours))
    assert "ctxreuse, online, de-duplicated (one worker" in said.sentence
    assert said.also[1:] == (
        "Of it, leaving out what a conversation shows already gives 25% fewer in the retriever's "
        "order, too.",
    )


def test_the_cache_that_was_asked_for_decides():
    runs = (
        of("as retrieved", 20),
        of("as retrieved", 10, 500),
        of("ctxreuse, online", 60),
        of("ctxreuse, online", 19, 500),
    )
    said = verdict(results(*runs, cache_tokens=500))
    assert said.sentence.startswith(
        "10% fewer prompt tokens to compute with ctxreuse, online (one worker, a cache of 500 "
        "tokens): 9 ms less"
    )
    assert said.also[1:] == ("The same with other caches: 50% fewer with an unlimited cache.",)


def test_where_only_a_batch_saves_the_verdict_is_about_it():
    said = verdict(
        results(of("as retrieved", 20), of("ctxreuse, online", 20), of("ctxreuse, batch", 40))
    )
    assert said.sentence.startswith("25% fewer prompt tokens to compute with ctxreuse, batch (one")
    assert "plan_batch" in said.next_step


def test_several_workers_are_told_what_holds_for_them():
    said = verdict(
        results(
            of("as retrieved", 20),
            of("ctxreuse, online", 60),
            of("4 workers, no log", 12, workers=4),
            of("4 workers, shared log", 52, workers=4),
        )
    )
    assert said.sentence.startswith(
        "10% more prompt tokens to compute with 4 workers as they are, which share no log; 40% "
        "fewer with a shared one (an unlimited cache): 32 ms less prefill a request ("
    )
    assert "CTXREUSE_SHARED_LOG" in said.next_step
    assert said.also == ("Worth trying; it shows most where prompts are long and answers short.",)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (70, "Small: probably not worth it for single requests; a batch gives 62%."),
        (23, "Small: probably not worth it for single requests; a batch gives no more."),
    ],
)
def test_of_a_small_saving_it_is_said_that_it_is_small(batch, words):
    runs = of("as retrieved", 20), of("ctxreuse, online", 23), of("ctxreuse, batch", batch)
    assert verdict(results(*runs)).also[0] == words
    assert verdict(results(*runs[:1], runs[2])).also[0] == (
        "Small: probably not worth it."
        if batch == 23
        else "Worth trying; it shows most where prompts are long and answers short."
    )


def test_words_that_are_added_are_named():
    ours = of("ctxreuse, online", 60, word_tokens=1_234)
    also = verdict(results(of("as retrieved", 20), ours)).also
    assert also[1] == "Words that ctxreuse adds: about 1,234 tokens in 10 requests, counted."


@pytest.mark.parametrize(
    ("cached", "more", "reason"),
    [
        ((0, 0), {"repeated": 0}, "hardly any block comes again: 0.0% of the block tokens"),
        (
            (89, 89),
            {},
            "the retriever's order already has 89% of the prompt tokens served, of 90% that were "
            "sent before",
        ),
        (
            (20, 18),
            {},
            "requests share blocks but not enough of them together: ctxreuse, online computes 2.5% "
            "more prompt tokens than as retrieved",
        ),
    ],
)
def test_nothing_to_gain_says_why(cached, more, reason):
    before, after = cached
    said = verdict(results(of("as retrieved", before), of("ctxreuse, online", after), **more))
    assert said.sentence == (
        f"Nothing to gain here, because {reason} (one worker, an unlimited cache)."
    )
    assert (said.is_gain, said.as_json()["is_gain"]) == (False, False)


def test_a_cache_that_is_too_small_is_the_reason():
    runs = (
        of("as retrieved", 20),
        of("as retrieved", 0, 50),
        of("ctxreuse, online", 60),
        of("ctxreuse, online", 0, 50),
    )
    said = verdict(results(*runs, cache_tokens=50))
    assert (
        "because the cache has lost blocks before they come again (one worker, a cache of 50"
        in (said.sentence)
    )
    assert said.also == ("The same with other caches: 50% fewer with an unlimited cache.",)


def test_nothing_as_retrieved_is_no_verdict():
    assert verdict(results(of("ctxreuse, online", 1))).sentence.startswith("No verdict: nothing")
    assert verdict(results(of("as retrieved", 1))).sentence.startswith("No verdict: no policy")


def test_an_engine_answers_only_some():
    names = tuple(map(str, range(10)))
    engine = {"first_token_s": (0.1,) * 10, "request_ids": names}
    whole = of("as retrieved", 20, **engine)
    some = of("ctxreuse, online", 60, **engine).only(set(names[:5]))
    said = verdict(replace(results(whole, some), level="engine", prefill_tokens_per_s=None))
    assert said.sentence == (
        "50% fewer prompt tokens to compute with ctxreuse, online (one worker, the engine's own "
        "cache)."
    )
    assert said.as_json()["requests"] == 5


@pytest.fixture
def trace(tmp_path):
    corpus = [{"id": n, "text": f"text {n}", "tokens": 100} for n in range(3)]
    write_jsonl(tmp_path / "corpus.jsonl", *corpus)
    orders = ([0, 1, 2], [2, 1, 0], [1, 0, 2])
    lines = [{"request_id": n, "query": "?", "blocks": one} for n, one in enumerate(orders)]
    return write_jsonl(tmp_path / "trace.jsonl", *lines)


def test_text_json_and_page_say_the_same(run, trace, tmp_path):
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    html, stored = tmp_path / "report.html", tmp_path / "results.json"
    options = ("--prices", prices, "--prefill-rate", "500", "--html", html, "--results", stored)
    code, out, err = run("estimate", trace, *options)
    assert code == 0, err
    sentence = words(out.partition("\nNext: ")[0])
    assert sentence.startswith("64% fewer prompt tokens to compute with ctxreuse, online (one ")
    assert "384 ms less prefill a request and 0.28 EUR less per 1,000 requests (at" in sentence
    assert "prices of 2026-11-01 from our contract" in sentence
    _, out, _ = run("estimate", trace, "--json", *options)
    assert json.loads(out)["verdict"]["sentence"] == sentence
    assert verdict(Results.read(stored)).sentence == sentence
    assert sentence in words(html.read_text())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "no JSON"),
        ("[]", "it must be an object"),
        (json.dumps(PRICES | {"input": -1}), "input is -1 (int); it must be"),
        ('{"input": 1}', "cached_input is missing; prices are a JSON object such as"),
    ],
)
def test_prices_that_are_none_are_named_before_the_work(run, tmp_path, content, problem):
    path = tmp_path / "prices.json"
    path.write_text(content)
    with pytest.raises(InputFileError, match=r"prices\.json"):
        Prices.read(path)
    code, _, err = run("estimate", tmp_path / "nowhere", "--prices", path)
    assert (code, problem in err) == (2, True), err


@pytest.mark.parametrize("option", ["--html", "--results"])
def test_a_report_that_could_not_be_written_is_named_before_the_work(run, tmp_path, option):
    path = tmp_path / "no" / "folder"
    code, _, err = run("estimate", tmp_path / "nowhere", option, path)
    assert (code, err.startswith(f"ctxreuse: {path}: cannot be written: ")) == (2, True)
