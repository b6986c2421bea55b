"""The verdict: one sentence on what planning saves, the same in text, JSON and page."""

import json
from dataclasses import replace

import pytest
from cli_helpers import run, words
from planning_helpers import write_jsonl

from ctxreuse.cache import CacheUsage
from ctxreuse.errors import InputFileError
from ctxreuse.measure.replay.estimate import TraceSummary
from ctxreuse.measure.replay.prompt_ways import WRAPPED, MeasuredWay, PromptWays
from ctxreuse.measure.replay.run_result import RunResult
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results import FirstCause, results_of
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
    strategy = {"as": "none", "papers'": "paper"}.get(policy.split()[0], "reuse")
    is_short = more.pop("deduplicated", False)
    return RunResult(
        policy, strategy, mode, is_short, capacity, 0.1, (100,) * 10, (cached,) * 10, **more
    )


def results(*runs, repeated=900, **more):
    trace = TraceSummary(10, 0, 0, 10, 100, 1_000, repeated)
    measured = results_of("some", "blocks", trace, runs, (), {}, **more)
    return replace(measured, prefill_tokens_per_s=more.get("prefill_tokens_per_s", 1_000.0))


def test_a_saving_names_policy_cache_seconds_and_money():
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
        "Planned together, all requests as one batch: 62% fewer.",
    ]
    assert said.as_json()["seconds_per_1000_requests"] == 40.0
    assert said.as_json()["money_per_1000_requests"] == 0.06


def test_what_order_and_de_duplication_save_is_said_for_a_small_cache_too():
    runs = [of("as retrieved", 20), of("ctxreuse, online", 40)]
    runs += [of("ctxreuse, online", 60, deduplicated=True)]
    runs += [
        replace(run, cached_tokens=(15 + 5 * n,) * 10, capacity_tokens=50)
        for n, run in enumerate(runs)
    ]
    runs += [replace(run, capacity_tokens=500) for run in runs[:3]]
    also = verdict(results(*runs)).also
    assert also[:2] == (
        "With an unlimited cache: 50% fewer, 400 tokens for 800; the order -25%, de-duplication "
        "-25%.",
        "With a cache of 50 tokens: 12% fewer, 750 tokens for 850; the order -6%, de-duplication "
        "-6%.",
    )


@pytest.mark.parametrize(
    ("policy", "more", "said"),
    [
        (
            "papers' order, online",
            {},
            'papers\' order, online, 62% fewer, 300 tokens (strategy="paper")',
        ),
        (
            "papers' order, online",
            {"deduplicated": True},
            'papers\' order, online, de-duplicated, 62% fewer, 300 tokens (strategy="paper")',
        ),
        (
            "as retrieved",
            {"deduplicated": True},
            'as retrieved, de-duplicated, 62% fewer, 300 tokens (strategy="none")',
        ),
        ("papers' order, batch", {}, None),  # it knows all requests beforehand
        ("ctxreuse, batch", {}, None),
    ],
)
def test_an_order_that_does_better_than_ours_is_named_with_its_setting(policy, more, said):
    runs = [of("as retrieved", 20), of("ctxreuse, online", 60), of(policy, 70, **more)]
    also = verdict(results(*runs)).also
    named = f"With an unlimited cache: 50% fewer, 400 tokens for 800; better: {said}."
    assert [line for line in also if "better" in line] == [named] * (said is not None)


def test_a_batch_that_does_better_than_ours_is_named_beside_ours():
    runs = [of("as retrieved", 20), of("ctxreuse, online", 60), of("ctxreuse, batch", 70)]
    also = verdict(results(*runs, of("papers' order, batch", 72))).also
    assert also[-1] == (
        "Planned together, all requests as one batch: 62% fewer; better: papers' order, batch, 65% "
        'fewer, 280 tokens (strategy="paper").'
    )


def test_the_retrievers_order_is_named_where_ours_computes_more():
    also = verdict(results(of("as retrieved", 20), of("ctxreuse, online", 18))).also
    assert also[0].endswith('better: as retrieved, 0% fewer, 800 tokens (strategy="none").')


@pytest.mark.parametrize("cached", [70, 50])
def test_of_whole_prompts_an_order_that_does_better_on_the_documents_alone_is_named(cached):
    runs = [of("as retrieved", 20), of("ctxreuse, online", 60), of("papers' order, online", cached)]
    ways = [MeasuredWay(WRAPPED, CacheUsage(prompt_tokens=1_000, cached_tokens=500))]
    plain = MeasuredWay("as they are", CacheUsage(prompt_tokens=1_000))
    of_prompts = PromptWays(plain, ways[0], tuple(ways), 10, "langchain", are_memories=False)
    also = verdict(replace(results(*runs), prompts=of_prompts)).also
    named = "Of the documents alone, better: papers' order, online, 62% fewer, 300 tokens "
    assert also == ((f'{named}(strategy="paper").',) if cached > 60 else ())


def test_what_differs_in_front_comes_first():
    measured = results(of("as retrieved", 20), of("ctxreuse, online", 60))
    causes = (FirstCause("something differs", "put it behind"), FirstCause("a time", "drop it"))
    said = verdict(replace(measured, causes_first=causes))
    assert said.sentence.startswith(
        "Nothing can be gained as it is: something differs; a time. Once that is mended: 50% fewer "
    )
    assert said.next_step == "put it behind; then drop it; then record again."
    assert not said.is_gain


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


def test_where_only_a_batch_saves_the_verdict_is_about_it():
    said = verdict(
        results(of("as retrieved", 20), of("ctxreuse, online", 20), of("ctxreuse, batch", 40))
    )
    assert said.sentence.startswith("25% fewer prompt tokens to compute with ctxreuse, batch (one")
    assert "plan_batch" in said.next_step


def test_of_a_small_saving_it_is_said_that_it_is_small():
    small = verdict(results(of("as retrieved", 20), of("ctxreuse, online", 23)))
    assert small.also[0] == "Small: probably not worth it."
    large = verdict(results(of("as retrieved", 20), of("ctxreuse, batch", 70)))
    assert large.also[0].startswith("Worth trying; ")


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
    assert said.also == ()


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
    html = tmp_path / "report.html"
    options = ("--prices", prices, "--prefill-rate", "500", "--html", html)
    code, out, err = run("estimate", trace, *options)
    assert code == 0, err
    sentence = words(out.partition("\nNext: ")[0])
    assert sentence.startswith("64% fewer prompt tokens to compute with ctxreuse, online (one ")
    assert "384 ms less prefill a request and 0.28 EUR less per 1,000 requests (at" in sentence
    assert "prices of 2026-11-01 from our contract" in sentence
    _, out, _ = run("estimate", trace, "--json", *options)
    assert json.loads(out)["verdict"]["sentence"] == sentence
    assert sentence in words(html.read_text())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "no JSON"),
        ("[]", "it must be an object"),
        (
            json.dumps(PRICES | {"input": -1}),
            "field 'input' is -1 (int); it must be a number from 0",
        ),
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


@pytest.mark.parametrize("command", ["estimate", "report"])
def test_a_report_that_could_not_be_written_is_named_before_the_work(run, tmp_path, command):
    path = tmp_path / "no" / "folder"
    code, _, err = run(command, tmp_path / "nowhere", "-o", path)
    assert (code, err.startswith(f"ctxreuse: {path}: cannot be written: ")) == (2, True)
