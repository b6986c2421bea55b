"""The verdict: one sentence on what planning saves, the same in text, JSON and page."""

import json
from dataclasses import replace

import pytest
from cli_helpers import words
from planning_helpers import write_jsonl

from ctxreuse.errors import InputFileError
from ctxreuse.measure.replay.simulate import RunResult, TraceSummary
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results import FirstCause, results_of
from ctxreuse.measure.results.tables import estimate_output
from ctxreuse.measure.results.verdict import verdict
from ctxreuse.rules.cache_rules import cache_profile

PRICES = {
    "input": 2.0,
    "cached_input": 0.5,
    "currency": "EUR",
    "date": "2026-11-01",
    "source": "our contract",
}


def of(policy, cached, capacity=None, **more):
    mode = "offline" if "batch" in policy else "online"
    strategy = {"as": "none", "papers'": "paper"}.get(policy.split()[0], "reuse")
    is_short = more.pop("deduplicated", False)
    return RunResult(
        policy, strategy, mode, is_short, capacity, 0.1, (100,) * 10, (cached,) * 10, **more
    )


def results(*runs, repeated=900, **more):
    trace = TraceSummary(10, 0, 0, 10, 100, 1_000, repeated)
    measured = results_of("some", "blocks", trace, runs, (), {}, **more)
    return replace(measured, prefill_tokens_per_s=more.get("prefill_tokens_per_s", 1_000.0))


def test_what_differs_in_front_comes_first():
    measured = results(of("as retrieved", 20), of("ctxreuse, online", 60))
    causes = (FirstCause("something differs", "put it behind"), FirstCause("a time", "drop it"))
    said = verdict(replace(measured, causes_first=causes))
    assert said.sentence.startswith(
        "Nothing can be gained as it is: something differs; a time. Once that is mended: 50% fewer "
    )
    assert said.next_step == "put it behind; then drop it; then record again."
    assert not said.is_gain


SENTENCES = {
    "online": "document tokens to compute with ctxreuse, online",
    "batch": "document tokens to compute with ctxreuse, batch",
    "wrap": "Next: wrap the model (ReuseChatModel for LangChain, ReuseLLM for LlamaIndex",
    "planner": "with planner=ReusePlanner(",
    "prime": ", prime=True)",
    "collect": "plan_batch(requests).",
    "collect_primed": "plan_batch(requests, primes=True).",
    "large": "Worth trying; it shows most",
    "small": "Small: probably not worth it.",
    "words": "Words that ctxreuse adds: about",
    "together": "Planned together, all requests as one batch:",
    "no_request": "there is no request",
    "one_request": "there is one request",
    "no_documents": "No verdict: none of 2 requests has documents. Of what clients send, these",
    "retrieved": "Next: record what is retrieved: without --source, or with TraceRecorder",
    "nothing_again": "hardly any block comes again: 0.0% of the block tokens",
    "lost": "the cache has lost blocks before they come again",
    "larger_cache": "Next: give the engine's cache more memory",
    "served": "the retriever's order already has",
    "apart": "requests share blocks but not enough of them together: ",
    "stay": "Next: change nothing;",
    "record": "Next: record some:",
    "front": "Nothing can be gained as it is: in 3 of 3 prompts something that differs",
    "front_first": "Next: put what differs (",
    "bill": "lower input bill than as sent today with",
    "bill_unmarked": "lower input bill than as retrieved with",
    "body": "and send plan.body()",
    "blocks": 'and send plan.body("anthropic")',
    "no_body": ", alone or in ReuseChatModel",
    "in_order": "and send the plans in their order.",
    "unread_marks": "lower without planning: the provider's own breakpoint",
    "long": "Only 3 of 7 prompts reach the minimum of",
    "too_short": "prompts are shorter than the minimum of",
    "longer": "Next: bring prompts above the minimum",
    "read_already": "too little is read that is not read already: ",
    "free": "times an uncached token, writing nothing extra.",
    "paid": "it pays if a written token is read 0.28 times on average; a single breakpoint, if",
    "never_pays": "times an uncached token, reading 1: it never pays.",
    "no_time": "No request has a timestamp",
    "times": "2 of 5 requests have no timestamp: they count as sent",
    "no_answer": "no request says how long its answer is",
    "answers": "only 1 of 5 requests say how long its answer is",
}  # words by which to know each sentence of an estimate without whole prompts

SHUFFLED = "abcd dcba badc"
FORKED = "ab ac ad ae ba"
MIXED = f"{SHUFFLED} a b c d"
STATES = "vllm(states=junctions)"
NEVER_CHEAPER = replace(cache_profile("anthropic"), read_factor=1.0)


def system(number):
    return {"system": f"Now {number} help all people here."}


def turn(number):
    return {"conversation_id": number // 2, "turn": number % 2}


def always(number):
    return {"timestamp": 1_000, "output_tokens": 3}


def often(number):
    return {"timestamp": 1_000} if number > 1 else {"output_tokens": 3} if number else {}


@pytest.mark.parametrize(
    ("rows", "tokens", "more", "cache", "wanted"),
    [
        ("abc cba bac", 100, None, (), "online wrap large words"),
        ("ab cd ba dc", 100, None, (200,), "batch collect large words"),
        ("ai ga", 400, None, (300,), "lost larger_cache"),
        ("ai ga", 400, None, (800, 300), "online wrap large words"),
        ("", 100, None, (), "no_request record"),
        ("abc", 100, None, (), "one_request stay"),
        ("ab cd ef", 100, None, (), "nothing_again stay"),
        ("ab ab ab", 100, None, (), "served stay"),
        ("abc cba bac", 100, system, (), "online large words front front_first"),
        ("ab cd ef", 100, system, (), "nothing_again stay"),
        ("ab ba", 0, system, (), "no_documents retrieved"),
        ("ab ba", 0, system, "openai", "no_documents retrieved paid no_time no_answer"),
        ("fb eb", 20, None, (), "batch collect small words"),
        ("fd de bd eb", 400, None, (400,), "online wrap large words together"),
        ("abc cbd bac cba", 100, turn, (), "online wrap large words"),
        ("bd db cd", 100, None, (), "online wrap large words together"),
        ("ad ca bc bd", 400, None, STATES, "online wrap planner prime large words together"),
        ("ae ed", 400, None, STATES, "batch collect_primed large words"),
        ("ac da", 100, None, STATES, "words apart stay"),
        (SHUFFLED, 900, None, "anthropic", "words together bill blocks paid no_time no_answer"),
        (SHUFFLED, 900, always, "openai", "words together bill body unread_marks paid"),
        (SHUFFLED, 900, always, "deepseek", "words bill_unmarked no_body free"),
        (FORKED, 900, often, "openai", "words bill in_order unread_marks paid times answers"),
        ("ab ab ab ab", 900, always, "openai", "served stay paid"),
        ("ab cd ea", 900, always, "anthropic", "stay read_already paid"),
        ("ab cd ef", 900, always, "openai", "nothing_again stay unread_marks paid"),
        ("ab", 900, always, NEVER_CHEAPER, "one_request stay never_pays"),
        ("", 900, always, "anthropic", "no_request record paid no_time"),
        ("ab ba ab", 100, always, "anthropic", "too_short longer paid"),
        (MIXED, 300, always, "anthropic(minimum=1024)", "words together bill blocks long paid"),
    ],
)
def test_each_sentence_is_said_only_of_traffic_it_is_true_of(
    tmp_path, rows, tokens, more, cache, wanted
):
    """Each word is a request, and each of its letters a document."""
    asked = {"capacity_tokens": cache} if isinstance(cache, tuple) else {"cache": cache}
    corpus = [
        {"id": one, "text": f"text {one}", "tokens": tokens} for one in sorted({*rows} - {" "})
    ]
    write_jsonl(tmp_path / "corpus.jsonl", *corpus)
    lines = [
        {"request_id": number, "query": "?", "blocks": list(one)} | (more(number) if more else {})
        for number, one in enumerate(rows.split())
    ]
    path = write_jsonl(tmp_path / "trace.jsonl", *lines)
    measured = measure_savings(EstimateConfig(trace=str(path), **asked))
    text = "\n".join(one for one in estimate_output(measured) if isinstance(one, str))
    assert {name for name, part in SENTENCES.items() if part in text} == set(wanted.split()), text


def test_nothing_as_retrieved_is_no_verdict():
    for policy in ("ctxreuse, online", "as retrieved"):
        assert verdict(results(of(policy, 1))).sentence.startswith("No verdict: the order of ")


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
    html = tmp_path / "report.html"
    options = ("--prices", prices, "--prefill-rate", "500", "--html", html)
    code, out, err = run("estimate", trace, *options)
    assert code == 0, err
    sentence = words(out.partition("\nNext: ")[0])
    assert sentence.startswith("64% fewer document tokens to compute with ctxreuse, online (one ")
    assert "384 ms less prefill a request and 0.28 EUR less per 1,000 requests (at" in sentence
    assert "prices of 2026-11-01 from our contract" in sentence
    _, out, _ = run("estimate", trace, "--json", *options)
    told = json.loads(out)["verdict"]
    assert told["sentence"] == sentence
    assert told["seconds_per_1000_requests"] == pytest.approx(384)
    assert told["money_per_1000_requests"] == pytest.approx(0.284)
    assert sentence in words(html.read_text())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "no JSON"),
        ("[]", "it must be an object"),
        (json.dumps(PRICES | {"input": -1}), "field 'input' is -1 (int); it must be a number"),
        (json.dumps(PRICES | {"written_input": "5"}), "field 'written_input' is '5' (str)"),
        (json.dumps(PRICES | {"written_input": {"5m": -1}}), "written_input: field '5m' is -1"),
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
