"""Bills of hosted caches: the same requests, sent in several ways."""

import json
import re
from dataclasses import replace

import pytest
from caching_provider import Provider, count_tokens
from cli_helpers import words
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import write_jsonl

from ctxreuse import ContextBlock, cache_profile
from ctxreuse.errors import InputFileError, InvalidRequestError
from ctxreuse.measure.replay.plan_file import ANSWER, replayed
from ctxreuse.measure.replay.policies import OURS_BATCH, OURS_ONLINE, TODAY, tried_policies
from ctxreuse.measure.replay.prompts import said_tokens
from ctxreuse.measure.replay.simulate import Replay, Run
from ctxreuse.measure.report import page
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.rules.cache_rules import CacheRules, TimeToLive, profile_spec

BLOCKS = {name: ContextBlock(id=name, text=f"{name} " * 12, tokens=12) for name in "abcdef"}
PRICES = {"input": 4, "currency": "EUR", "date": "2026-11-01", "source": "our contract"}
PROFILES = ["openai(minimum=24)", "anthropic(minimum=24)", "anthropic(minimum=24, life=1h)"]
PROFILES += ["openai-before-5.6(minimum=24)", "gemini(minimum=24)"]
EXACT = [profile for profile in PROFILES if "openai(" in profile or "anthropic" in profile]


class Words:
    def encode(self, sequence, *, add_special_tokens=False):
        return type("Encoding", (), {"ids": [0] * count_tokens(sequence)})()


@st.composite
def traces(draw, in_conversations=True):
    requests, now = [], 0
    for number in range(draw(st.integers(1, 10))):
        now += 1_000 * draw(st.sampled_from([0, 1, 299, 300, 1_800, 3_600]))
        names = draw(st.lists(st.sampled_from("abcdef"), max_size=5, unique=True))
        conversation = draw(st.sampled_from([None, None, "c", "d"])) if in_conversations else None
        requests.append(
            TraceRequest(
                number,
                f"Which {number}?",
                tuple(BLOCKS[name] for name in names),
                conversation_id=conversation,
                turn=number,
                system=draw(st.sampled_from([None, "Be brief. " * 10])),
                timestamp_ms=draw(st.sampled_from([None, float(now)])),
            )
        )
    return requests


@examples(60)
@given(traces(), st.sampled_from(PROFILES), st.booleans())
def test_the_parts_of_a_bill_are_the_prompts(trace, spec, by_words):
    profile = cache_profile(spec)
    replay = Replay(trace, BLOCKS, Words() if by_words else None, cache=profile)
    lengths = set()
    for policy in tried_policies(profile):
        result = replay.measure(Run(policy, trace, deduplicate=False))
        tokens = result.billed
        assert min(tokens.uncached, tokens.read, result.never_read) >= 0
        assert all(number > 0 for number in tokens.written.values())
        assert result.never_read <= tokens.written_tokens
        assert tokens.prompt_tokens == sum(result.prompt_tokens)
        assert tokens.written.keys() <= {profile.time_to_live.name}
        if not by_words:  # the words that a policy adds come on top
            said: dict[object, int] = {}
            for one in result.planned:
                said[one.request_id] = said_tokens(one) + said.get(one.after, 0)
            lengths.add(tokens.prompt_tokens - sum(said.values()))
    assert len(lengths) == (not by_words)


@examples(60)
@given(
    traces(in_conversations=False),
    st.sampled_from(EXACT),
    st.sampled_from([OURS_ONLINE, OURS_BATCH, TODAY]),
)
def test_a_provider_that_gets_the_bodies_charges_the_same(trace, spec, policy):
    profile = cache_profile(spec)
    form = "anthropic" if profile.look_back else "openai"
    provider = Provider(form, profile.minimum)
    planned, usages, now = [], [], 0.0
    for step in replayed(policy, trace, Run(policy, trace).planner(profile)):
        request, plan, step.answer = step.planned, step.plan, ANSWER
        planned.append(request)
        if policy.mode == "online" and request.timestamp_ms is not None:
            now = max(now, request.timestamp_ms / 1_000)
        sent = plan if policy.is_marked else replace(plan, marks=())
        body = sent.body(form)
        body.pop("prompt_cache_key", None)  # all of a tenant's are taken to be in one place
        if not policy.is_marked:
            body.pop("prompt_cache_options", None)
        if plan.content or plan.request.system:
            usages.append(provider.take(body, now))
    run = Run(policy, trace)
    billed, _ = Replay((), BLOCKS, Words(), cache=profile).billed(planned, run)
    assert [(one.uncached, one.read, one.written) for one in billed] == [
        (one.uncached, one.read, one.written) for one in usages
    ]


def test_a_conversation_reads_the_turn_before_as_it_is_sent_today():
    names = ("ab", "cd", "ef")
    trace = [
        TraceRequest(n, f"{n}?", tuple(BLOCKS[one] for one in name), "c", turn=n)
        for n, name in enumerate(names)
    ]
    openai, anthropic = (cache_profile(f"{one}(minimum=24)") for one in ("openai", "anthropic"))
    today = Replay(trace, BLOCKS, cache=openai).measure(Run(TODAY, trace, deduplicate=False))
    assert today.cached_tokens == (0, 24, 48)
    assert today.billed.written == {"30m": 72}
    assert today.never_read == 24
    unmarked = Replay(trace, BLOCKS, cache=anthropic).measure(Run(TODAY, trace, deduplicate=False))
    assert (unmarked.cached_tokens, unmarked.billed.written) == ((0, 0, 0), {})
    run = Run(OURS_ONLINE, trace, deduplicate=False)
    marked = Replay(trace, BLOCKS, cache=anthropic).measure(run)
    assert (marked.cached_tokens, marked.billed.written) == ((0, 24, 48), {"5m": 72})


def test_what_has_expired_is_written_again():
    trace = [
        TraceRequest(n, f"{n}?", tuple(BLOCKS[one] for one in "abc"), timestamp_ms=60_000.0 * at)
        for n, at in enumerate((0, 1, 2, 9, 10))
    ]
    profile = cache_profile("anthropic(minimum=24)")
    result = Replay(trace, BLOCKS, cache=profile).measure(Run(OURS_ONLINE, trace))
    timeless = [replace(one, timestamp_ms=None) for one in trace]
    forever = Replay(timeless, BLOCKS, cache=profile).measure(Run(OURS_ONLINE, timeless))
    assert result.total.cached_tokens < forever.total.cached_tokens
    assert result.cached_tokens[3] == 0


def test_prices_that_are_missing_follow_from_the_profile():
    prices = Prices.of("here", PRICES, cache_profile("anthropic(life=1h)"))
    assert prices.cached_input == pytest.approx(0.4)
    assert prices.written_input == {"5m": 5.0, "1h": 8.0}
    assert prices.derived == ("cached_input", "written_input 5m", "written_input 1h")
    said = PRICES | {"cached_input": 1, "written_input": 9, "output": 20}
    prices = Prices.of("here", said, cache_profile("anthropic(life=1h)"))
    assert prices.written_input == {"1h": 9.0, "5m": 5.0}
    assert prices.derived == ("written_input 5m",)
    assert Prices.of("here", prices.as_json()) == replace(prices, derived=())
    by_life = PRICES | {"cached_input": 1, "written_input": {"5m": 6, "1h": 9}}
    assert not Prices.of("here", by_life, cache_profile("anthropic")).derived
    with pytest.raises(InputFileError, match="cached_input is missing"):
        Prices.of("here", PRICES)


@pytest.fixture
def folder(tmp_path):
    """A trace of long blocks that comes in two orders, its prices, and one of short blocks."""
    blocks = {"a": 600, "b": 500, "c": 400, "d": 300}
    write_jsonl(
        tmp_path / "corpus.jsonl",
        *({"id": name, "text": name, "tokens": tokens} for name, tokens in blocks.items()),
    )
    orders = ("abc", "cab", "bcad", "abcd", "dcba", "cba", "acb", "bac", "cabd", "abc")
    write_jsonl(
        tmp_path / "trace.jsonl",
        *(
            {"request_id": n, "query": f"{n}?", "blocks": list(order), "output_tokens": 50}
            for n, order in enumerate(orders)
        ),
    )
    write_jsonl(
        tmp_path / "short.jsonl",
        *({"request_id": n, "query": f"{n}?", "blocks": ["a", "d"]} for n in range(10)),
    )
    (tmp_path / "prices.json").write_text(json.dumps(PRICES | {"output": 20}))
    return tmp_path


def test_a_bill_in_words_table_and_numbers(run, folder):
    arguments = ["estimate", folder / "trace.jsonl", "--cache", "openai"]
    arguments += ["--prices", folder / "prices.json"]
    code, out, _ = run(*arguments)
    assert code == 0
    assert words(out).startswith("75% lower input bill than as sent today with ctxreuse, online (")
    for said in (
        "(cache profile openai): 0.32 instead of 1.25 of the uncached price; 6.05 EUR less per "
        "1,000 requests (prices of 2026-11-01 from our contract).",
        'Next: plan with ReusePlanner(cache="openai") and send plan.body(), which has the',
        "20% lower without planning: the provider's own breakpoint at the end of each prompt",
        "Writing costs 1.25 times an uncached token, reading 0.1: it pays if a written token is "
        "read 0.28 times on average; a single breakpoint, if it is read once.",
        "input 4, cached_input 0.4 (from the profile), written_input 30m 5 (from the profile), "
        "output 20.",
        "No request has a timestamp, so nothing expires.",
        "prefixes of 1,024 tokens and more are kept",
    ):
        assert said in words(out)
    assert "Answers are left out" not in out
    said = json.loads(run(*arguments, "--json")[1])
    rows = {row["policy"]: row for row in said["bill"]["rows"]}
    assert list(rows) == ["as sent today", "as retrieved", "ctxreuse, online", "ctxreuse, batch"]
    for row in rows.values():
        written = sum(row["written_tokens"].values())
        paid = row["uncached_tokens"] + 0.1 * row["read_tokens"] + 1.25 * written
        assert row["uncached_tokens"] + row["read_tokens"] + written == row["prompt_tokens"]
        uncached = rows["as retrieved"]["prompt_tokens"]  # without words of ours
        assert row["bill_to_uncached"] == pytest.approx(paid / uncached, abs=1e-6)
        money = (4 * paid + 20 * said["bill"]["output_tokens"]) / 1e6 * 1_000 / 10
        assert row["money_per_1000_requests"] == pytest.approx(money, abs=1e-5)
    assert said["bill"]["output_tokens"] == 500
    assert said["verdict"]["cache"] == "openai"
    assert said["verdict"]["bill_to_uncached"] == rows["ctxreuse, online"]["bill_to_uncached"]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_bill_fits(run, folder, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    prices = ["--prices", folder / "prices.json"]
    _, out, _ = run("estimate", folder / "trace.jsonl", "--cache", "anthropic", *prices)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(lines)
    for name in ("uncached", "read", "written", "never", "output", "bill", "EUR a"):
        assert name in shown.replace("un-", "un").replace("out-", "out")
    if width == 80:
        assert "(continued)" not in shown


def test_a_cache_has_rows_for_marks_and_a_minimum_if_it_takes_them(run, folder):
    _, out, _ = run("estimate", folder / "trace.jsonl", "--cache", "openai-before-5.6", "--json")
    said = json.loads(out)
    rows = [row["policy"] for row in said["bill"]["rows"]]
    assert rows == ["as retrieved", "ctxreuse, online", "ctxreuse, batch"]
    _, out, _ = run("estimate", folder / "trace.jsonl", "--cache", "openai-before-5.6")
    assert "lower input bill than as retrieved with ctxreuse, online" in words(out)
    assert "never" not in out

    _, out, _ = run("estimate", folder / "short.jsonl", "--cache", "openai")
    assert words(out).startswith(
        "Nothing to gain: prompts are shorter than the minimum of openai, 1,024 tokens; their "
        "median is 900, and 0 of 10 reach it (cache profile openai). Next: bring prompts above "
        "the minimum:"
    )
    _, out, _ = run("estimate", folder / "short.jsonl", "--cache", "anthropic(minimum=512)")
    assert words(out).startswith("70% lower input bill than as sent today with ctxreuse, online")


def test_results_and_page_say_the_same(run, folder):
    html = folder / "page.html"
    arguments = ["--cache", "anthropic(life=1h)", "--prices", folder / "prices.json"]
    arguments += ["--html", html]
    cache = cache_profile("anthropic(life=1h)")
    prices = Prices.read(folder / "prices.json", cache)
    measured = EstimateConfig(trace=str(folder / "trace.jsonl"), cache=cache, prices=prices)
    stored = measure_savings(measured, for_report=True)
    _, out, _ = run("estimate", folder / "trace.jsonl", *arguments)
    sentence = words(out).partition(" Next: ")[0]
    shown = html.read_text()
    assert sentence in words(shown.replace("&#34;", '"'))
    assert "The bill with anthropic(life=1h)" in shown
    assert page(stored).count("<table") == shown.count("<table")
    with pytest.raises(InvalidRequestError, match="each of more must be a Table"):
        page(stored, [b"text"])
    for name in ("as sent today", "breakpoints only", "ctxreuse, online", "ctxreuse, batch"):
        assert f"<td>{name}</td>" in shown


def test_prices_that_are_others_than_the_profile_says_are_told(run, folder):
    (folder / "prices.json").write_text(json.dumps(PRICES | {"cached_input": 1}))
    arguments = ["estimate", folder / "trace.jsonl", "--cache", "openai"]
    _, out, _ = run(*arguments, "--prices", folder / "prices.json")
    assert (
        "By these prices reading costs 0.25 times the input and writing 1.25; plans and input bill "
        "go by the profile's 0.1 and 1.25."
    ) in words(out)


@pytest.mark.parametrize("more", [["--capacity-tokens", "9"], ["--prefill-rate", "2"]])
def test_a_provider_s_cache_has_no_size(run, folder, more):
    code, _, err = run("estimate", folder / "trace.jsonl", "--cache", "openai", *more)
    assert code == 2
    assert "are an engine's, and 'openai' is a provider's cache; leave them out" in err


def test_an_engine_with_coarse_blocks_serves_whole_blocks(run, folder):
    arguments = ["estimate", folder / "trace.jsonl", "--json"]
    arguments += ["--capacity-tokens", "100000", "--cache"]
    fine = json.loads(run(*arguments, "vllm")[1])
    coarse = json.loads(run(*arguments, "vllm(block_tokens=1536)")[1])
    ours = [
        next(one["cached_tokens"] for one in said["runs"] if one["policy"] == "ctxreuse, online")
        for said in (fine, coarse)
    ]
    assert "bill" not in coarse
    assert ours[0] > ours[1] >= 0
    assert ours[1] % 1_536 == 0


def test_turns_can_be_taken_as_independent(run, tmp_path):
    write_jsonl(tmp_path / "corpus.jsonl", {"id": "a", "text": "a", "tokens": 2_000})
    turns = [
        {"request_id": n, "query": f"{n}?", "blocks": ["a"], "conversation_id": "c", "turn": n}
        | {"system": f"It is {n} o'clock."}
        for n in range(3)
    ]
    write_jsonl(tmp_path / "trace.jsonl", *turns)
    arguments = ["estimate", tmp_path / "trace.jsonl", "--cache", "openai", "--json"]
    together, apart = (
        json.loads(run(*arguments, *more)[1])["bill"]["rows"][0]["prompt_tokens"]
        for more in ((), ("--independent",))
    )
    assert (together, apart) == (12_012, 6_012)
    assert "in 3 of 3 prompts" in words(run(*arguments[:-1], "--independent")[1])


def test_a_model_s_name_stands_for_its_published_prices(run, folder):
    genai_prices = pytest.importorskip("genai_prices")
    arguments = ["estimate", folder / "trace.jsonl", "--cache", "anthropic(life=1h)", "--prices"]
    _, out, _ = run(*arguments, "claude-sonnet-4-5")
    source = f"from genai-prices {genai_prices.__version__}, anthropic claude-sonnet-4-5"
    assert re.search(rf"Prices of \d{{4}}-\d\d-\d\d {re.escape(source)}, in USD", words(out))
    assert "input 3, cached_input 0.3, written_input 1h 6, output 15." in words(out)
    code, _, err = run(*arguments, "gpt-4.1")
    assert code == 2
    assert "knows no such model of anthropic; give a file of prices" in err


@pytest.mark.parametrize(
    "spec", ["openai", "anthropic(life=1h)", "anthropic(minimum=4096)", "gemini", "vllm"]
)
def test_a_profile_is_told_as_it_is_read(spec):
    assert profile_spec(cache_profile(spec)) == spec
    own = replace(cache_profile(spec), date="today")
    assert profile_spec(own) == own.name


def test_a_profile_of_the_user_s_own_is_billed_by_its_own_factors():
    own = CacheRules(
        name="ours",
        granularity="steps",
        minimum=24,
        times_to_live=(TimeToLive("", None, 1.5),),
        read_factor=0.2,
    )
    trace = [TraceRequest(n, f"{n}?", (BLOCKS["a"], BLOCKS["b"])) for n in range(3)]
    result = Replay(trace, BLOCKS, cache=own).measure(Run(OURS_ONLINE, trace))
    assert result.billed.written == {"": 24}
    assert result.billed.read == 48
    assert result.never_read == 0
    assert result.billed.bill(own) == pytest.approx(24 * 1.5 + 48 * 0.2)
    with pytest.raises(InvalidRequestError, match="is a provider's cache"):
        measure_savings(EstimateConfig(trace="nowhere", cache=own, capacity_tokens=[2]))
