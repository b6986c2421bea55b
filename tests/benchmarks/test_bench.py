"""The benchmark on public data: what is sent, who takes part, and what comes out."""

import csv
import json
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from importlib.abc import MetaPathFinder

import pytest
from block_labels import ranked
from cli_helpers import words
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import write_jsonl
from public_data_helpers import DATASET, nothing, workload
from served_engines import URL

from ctxreuse import ContextBlock
from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.replay.plan_file import plan_under
from ctxreuse.measure.replay.policies import POLICIES
from ctxreuse.measure.replay.simulate import Replay, Run
from ctxreuse.measure.traces.trace_files import TraceRequest
from public_data.benchmark import BenchConfig, Part, RunMatrix, cut
from public_data.benchmark import run as run_bench
from public_data.datasets import Dataset, Passage, Question
from public_data.peers.frameworks import framework_policies
from public_data.peers.published_pilot import PublishedContextPilot
from public_data.stored_results import read_results, write_results
from public_data.workload import make_workload, retrieve, sample


@given(sessions=st.integers(1, 20), seed=st.integers(0, 100))
def test_every_question_arrives_once_and_turns_stay_in_order(sessions, seed):
    sent = workload()
    trace = sent.trace(sessions, seed)
    assert sorted(one.request_id for one in trace) == sorted(one.id for one in DATASET.questions)
    for turns in sent.conversations:
        ids = [one.request_id for one in turns]
        assert [one.request_id for one in trace if one.request_id in ids] == ids
    running = set()
    for place, one in enumerate(trace):
        key = one.conversation_id or one.request_id
        running.add(key)
        assert len(running) <= sessions
        if all((later.conversation_id or later.request_id) != key for later in trace[place + 1 :]):
            running.remove(key)


def test_questions_may_arrive_as_the_files_have_them():
    backwards = replace(DATASET, questions=DATASET.questions[::-1])
    assert [one.request_id for one in workload().in_order()] == [
        one.id for one in DATASET.questions
    ]
    sent = workload(backwards).in_order()
    assert [one.request_id for one in sent[-6:]] == ["q5", "q4", "q3", "q2", "q1", "q0"]
    for turns in workload().conversations:
        ids = [one.request_id for one in turns]
        assert [one.request_id for one in sent if one.request_id in ids] == ids
    matrix = RunMatrix(workload(), POLICIES, [None], 2, [2], [2], None)
    assert matrix.trace() == cut(workload().in_order(), 2)


def test_the_same_seed_gives_the_same_order_and_without_chance_the_first_come_first():
    assert workload().trace(4, 7) == workload().trace(4, 7)
    assert workload().trace(4, 7) != workload().trace(4, 8)
    assert [one.id for one in sample(DATASET, 3, None).questions] == ["q0", "q1", "q2"]
    turns = replace(DATASET, questions=DATASET.questions[6:])
    with pytest.raises(InvalidRequestError, match=r"2 requests are less than .* 3 turns"):
        sample(turns, 2, 0)


@given(most=st.integers(1, 20), seed=st.integers(0, 100))
def test_a_sample_has_whole_conversations(most, seed):
    questions = sample(DATASET, most, seed).questions
    assert len(questions) <= most
    for conversation in {one.conversation_id for one in questions} - {None}:
        whole = [one for one in DATASET.questions if one.conversation_id == conversation]
        assert [one for one in questions if one.conversation_id == conversation] == whole


@pytest.mark.parametrize("how", ["bm25", "faiss"])
def test_the_town_that_is_asked_for_is_found_first(how):
    found = retrieve(DATASET, how, 2, nothing)
    assert {blocks[0].id for blocks in found.values()} <= {one.id for one in DATASET.passages}
    asked = retrieve(
        replace(DATASET, questions=(Question("q", "Where is Prague?"),)), how, 2, nothing
    )
    assert asked["q"][0].id == "d2"


def test_only_passages_of_the_scope_are_found():
    dataset = Dataset(
        "two",
        (Passage("a", "a red house", "one"), Passage("b", "a red house, too", "two")),
        (Question("q1", "Which house is red?", scope="two"), Question("q2", "Which house is red?")),
    )
    found = retrieve(dataset, "bm25", 5, nothing)
    assert [block.id for block in found["q1"]] == ["b"]
    assert {block.id for block in found["q2"]} == {"a", "b"}


def test_retrievers_of_frameworks_are_asked(tmp_path, monkeypatch):
    pytest.importorskip("langchain_core")
    pytest.importorskip("llama_index.core")
    (tmp_path / "own_retrievers.py").write_text(
        "from langchain_core.documents import Document\n"
        "from langchain_core.runnables import RunnableLambda\n"
        "from llama_index.core.schema import NodeWithScore, TextNode\n"
        "chain = RunnableLambda(lambda query: [Document(query, id='x'), Document('b', id='y')])\n"
        "class Nodes:\n"
        "    def __init__(self, passages):\n"
        "        self.passages = passages\n"
        "    def retrieve(self, query):\n"
        "        return [NodeWithScore(node=TextNode(id_=one.id, text=one.text), score=1.0)"
        " for one in self.passages]\n"
        "broken = RunnableLambda(lambda query: 'text')\n"
        "number = lambda passages: 7\n"
    )
    monkeypatch.chdir(tmp_path)
    one = replace(DATASET, questions=(Question("q", "Why?"),))
    assert retrieve(one, "own_retrievers:chain", 1, nothing)["q"] == [
        ContextBlock(id="x", text="Why?")
    ]
    found = retrieve(one, "own_retrievers:Nodes", 2, nothing)["q"]
    assert found == [ContextBlock(id=one.id, text=one.text) for one in DATASET.passages[:2]]
    for name, problem in (
        ("own_retrievers:broken", "must return a list, not str"),
        ("own_retrievers:number", "none of the methods invoke, retrieve"),
        ("own_retrievers:missing", "missing"),
        ("no_such_module_at_all:x", "no_such_module_at_all"),
        ("bm52", "there is no retriever"),
    ):
        with pytest.raises(InvalidRequestError, match=problem):
            retrieve(one, name, 1, nothing)


def test_recall_counts_answers_in_what_was_retrieved_and_ids_have_one_text():
    assert workload(k=6).recall == 1.0
    assert workload(replace(DATASET, questions=(Question("q", "Pisa"),))).recall is None
    dataset = replace(DATASET, questions=(Question("q", "Why?", blocks=("d3", "d1", "d2")),))
    assert [block.id for block in retrieve(dataset, "bm25", 2, nothing)["q"]] == ["d3", "d1"]
    questions = (Question("q1", "?"), Question("q2", "?"))
    found = {"q1": [ContextBlock(id=1, text="a")], "q2": [ContextBlock(id=1, text="b")]}
    with pytest.raises(InvalidRequestError, match=r"id 1 .int. to two texts"):
        make_workload("two", questions, found)


def test_frameworks_put_the_best_at_the_ends():
    pytest.importorskip("langchain_community")
    pytest.importorskip("llama_index.core")
    missing: list[str] = []
    blocks = tuple(ContextBlock(id=number, text=str(number)) for number in range(5))
    policies = list(framework_policies(missing))
    for policy in policies:
        (sent,) = policy.reordered(Run(policy, [TraceRequest("q", "?", blocks)])).requests
        assert [block.id for block in sent.blocks] == [0, 2, 4, 3, 1]
    assert [policy.name for policy in policies] == [
        "LangChain LongContextReorder",
        "LlamaIndex LongContextReorder",
    ]
    assert not missing


class Without(MetaPathFinder):
    """Makes some packages as if they were not installed."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, fullname, path, target=None):
        if fullname in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def test_a_framework_that_is_not_there_is_named(monkeypatch):
    gone = ("langchain_community", "llama_index.core")
    for name in [one for one in sys.modules if one.startswith(gone)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.meta_path", [Without(gone), *sys.meta_path])
    missing: list[str] = []
    assert list(framework_policies(missing)) == []
    assert missing == [
        "LangChain LongContextReorder took no part: pip install langchain-community",
        "LlamaIndex LongContextReorder took no part: pip install llama-index-core",
    ]


PILOT = """
__version__ = "0"
class ContextPilot:
    def __init__(self, use_gpu):
        print("noise")
    def reorder(self, contexts, conversation_id=None):
        {body}
"""


@pytest.fixture
def contextpilot(tmp_path, monkeypatch):
    """Return a function that makes the policies of a package that does what it is told."""

    def make(body):
        (tmp_path / "contextpilot.py").write_text(PILOT.format(body=body))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return PublishedContextPilot(sys.executable).policies()

    return make


def test_contextpilots_order_is_sent_with_the_retrievers_ranking(contextpilot):
    online, batch = contextpilot(
        "return [one[::-1] for one in contexts][::-1], list(range(len(contexts)))[::-1]"
    )
    trace = workload().trace(2, 0)
    asked = {one.request_id: one.blocks for one in trace}
    reordered = online.reordered(Run(online, trace, deduplicate=False))
    assert [one.request_id for one in reordered.requests] == list(asked)
    assert all(one.blocks == asked[one.request_id][::-1] for one in reordered.requests)
    assert reordered.wrong == 0
    planner = online.planner(deduplicate=False, capacity_tokens=None)
    planned = plan_under(online, reordered.requests, planner)
    for request, plan in zip(reordered.requests, planned, strict=True):
        best = [block.text for block in asked[request.request_id]]
        assert plan.order_annotation == ranked(*best)
    scheduled = batch.reordered(Run(batch, trace)).requests
    assert sorted(one.request_id for one in scheduled) == sorted(asked)
    for one in scheduled:
        step = -1 if one.turn == 0 else 1
        assert one.blocks == asked[one.request_id][::step]


def test_a_peer_that_loses_documents_is_counted_and_corrected(contextpilot):
    online, _ = contextpilot("return [one[1:] for one in contexts], list(range(len(contexts)))")
    trace = workload().trace(2, 0)
    reordered = online.reordered(Run(online, trace, deduplicate=False))
    assert reordered.wrong == len(trace)
    assert list(reordered.requests) == trace


def test_a_contextpilot_that_fails_is_named(contextpilot):
    online, _ = contextpilot("raise RuntimeError('no luck')")
    with pytest.raises(
        InvalidRequestError, match=r"exit code 1 \(RuntimeError: no luck\); it needs"
    ):
        online.reordered(Run(online, workload().trace(2, 0)))
    (missing, _) = PublishedContextPilot("/no/such/python").policies()
    with pytest.raises(InvalidRequestError, match="No such file"):
        missing.reordered(Run(missing, workload().trace(2, 0)))


def test_every_part_is_measured():
    matrix = RunMatrix(workload(), [], [None, 100], 3, [2, 3], [2, 4], 0)
    runs = matrix.runs(list(Part))
    sessions = [run for run in runs if run.part is Part.sessions]
    assert [run.sessions for run in sessions] == [2, 2, 2, 4, 4, 4]
    assert {run.capacity_tokens for run in sessions} == {100}
    ablations = {run.policy.name for run in runs if run.part is Part.ablations}
    assert "ctxreuse, batch, ordered but not scheduled" in ablations
    assert "ctxreuse, online, not de-duplicated" in ablations
    single = replace(DATASET, questions=DATASET.questions[:6])
    independent = RunMatrix(workload(single), [], [None], 3, [3], [2], 0).runs(list(Part))
    assert {run.part for run in independent} == {Part.ablations}
    assert not any(run.deduplicate for run in independent)


def options(folder, tmp_path, *more):
    return ("bench", "jsonl", "--data", folder, "--k", "3", "-o", tmp_path / "out", *more)


def test_results_are_written_shown_and_the_same_again(run, folder, tmp_path):
    html = tmp_path / "report.html"
    code, out, err = run(*options(folder, tmp_path, "--capacity-tokens", "300", "--html", html))
    assert code == 0, err
    shown = words(out)
    assert "towns, bm25, k=3: 15 requests (9 of them turns of 3 conversations)" in shown
    assert "Hit ratio by conversations at a time, with a cache of 300 tokens" in shown
    assert "One idea less" in shown
    assert "ordering moves first turns only" in shown
    assert "reuse bound" in shown
    results = read_results(tmp_path / "out" / "results.json")
    assert {one.part for one in results.runs} == set(Part)
    assert {len(one.prompt_tokens) for one in results.runs} == {15}
    with (tmp_path / "out" / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["cached_tokens"]) for line in lines] == [
        one.total.cached_tokens for one in results.runs
    ]
    assert "<h2>One idea less" in html.read_text()
    old = tmp_path / "old.json"
    write_results(results, old)
    code, out, _ = run(*options(folder, tmp_path, "--capacity-tokens", "300", "--compare", old))
    runs = len(results.runs)
    assert f"{runs} of {runs} runs are exactly as before" in words(out)


def test_a_config_makes_the_results_that_the_command_writes(run, folder, tmp_path):
    run(*options(folder, tmp_path, "--part", "policies", "--capacity-tokens", "300"))
    written = read_results(tmp_path / "out" / "results.json")
    config = BenchConfig(
        dataset="jsonl", data=folder, k=3, part=[Part.policies], capacity_tokens=[300]
    )
    steps = []

    @contextmanager
    def progress(task, number):
        steps.append([task, number, 0])
        yield lambda: steps[-1].__setitem__(2, steps[-1][2] + 1)

    results, references = run_bench(config, progress)
    assert references["q0"] == ("yes",)
    assert without_times(results) == without_times(written)
    assert [task for task, *_ in steps] == ["reading", "retrieving", "measuring"]
    assert all(number == done for _, number, done in steps[1:])
    assert not any(one.planned for one in results.runs)


def without_times(results):
    runs = tuple(replace(one, planning_ms=0.0) for one in results.runs)
    return replace(results, runs=runs, command="", date="", python="")


def test_results_of_one_file_keep_their_format(run, folder, tmp_path):
    run(*options(folder, tmp_path, "--part", "policies"))
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(written) == [
        *("format", "title", "level", "trace", "runs", "tree", "misses", "version", "bounds"),
        *("settings", "notes", "cache_tokens", "prefill_tokens_per_s", "prices"),
        *("command", "date", "python", "causes", "causes_first", "prompts", "hides_texts"),
    ]
    assert {tuple(one) for one in written["runs"]} == {
        (
            *("policy", "strategy", "mode", "deduplicated", "capacity_tokens", "planning_ms"),
            *("prompt_tokens", "cached_tokens", "part", "k", "sessions"),
            *("request_ids", "first_token_s", "answers", "failures", "word_tokens"),
        )
    }


def test_a_comparison_says_what_changed(run, folder, tmp_path):
    run(*options(folder, tmp_path, "--part", "policies"))
    old = tmp_path / "old.json"
    results = read_results(tmp_path / "out" / "results.json")
    first, *others = results.runs
    worse = replace(first, cached_tokens=(0,) * len(first.cached_tokens))
    gone = replace(first, policy="somebody else's")
    write_results(replace(results, runs=(worse, *others[1:], gone)), old)
    _, out, _ = run(
        *options(folder, tmp_path, "--part", "policies", "--seed", "0", "--compare", old)
    )
    shown = words(out)
    assert "no longer measured: policies: somebody else's" in shown
    assert "not measured before: policies: as retrieved, de-duplicated" in shown
    assert "+0." in shown
    _, out, _ = run(
        *options(folder, tmp_path, "--part", "policies", "--seed", "1", "--compare", old)
    )
    assert "not the same setting: seed was 0, is 1" in words(out)


def test_a_comparison_of_other_things_says_so(run, folder, tmp_path):
    run(*options(folder, tmp_path, "--part", "k", "--at-k", "2", "--tokenizer", "blocks"))
    old = tmp_path / "old.json"
    results = read_results(tmp_path / "out" / "results.json")
    write_results(replace(results, title="[/]their [bold]towns"), old)
    code, out, err = run(*options(folder, tmp_path, "--part", "policies", "--compare", old))
    assert code == 0, err
    shown = words(out)
    assert "not the same setting: title was [/]their [bold]towns, is towns, bm25, k=3" in shown
    assert "not the same setting: counted in was blocks, is tokens" in shown
    assert "not the same setting: tokenizer was blocks, is words" in shown
    assert f"no longer measured: k, all {len(results.runs)} runs" in shown
    assert shown.count("no longer measured") == shown.count("not measured before") == 1


def test_policies_can_be_chosen_and_what_is_given_twice_is_measured_once(run, folder, tmp_path):
    twice = ("--part", "policies", "--capacity-tokens", "300") * 2
    code, _, err = run(*options(folder, tmp_path, *twice))
    assert code == 0, err
    runs = read_results(tmp_path / "out" / "results.json").runs
    measured = [(run.policy, run.deduplicated, run.capacity_tokens) for run in runs]
    assert len(measured) == len(set(measured))
    run(*options(folder, tmp_path, "--part", "policies", "--policy", "ctxreuse, batch"))
    results = read_results(tmp_path / "out" / "results.json")
    assert {one.policy for one in results.runs} == {"as retrieved", "ctxreuse, batch"}


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_read(run, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        code, _, err = run("bench", "jsonl", "--data", tmp_path / "nothing", "-o", path)
        assert (code, err.startswith(f"public_data: {path}: cannot be written: ")) == (2, True)


class Stopped(KeyboardInterrupt):
    """Ctrl-C."""


def stopping_after(monkeypatch, runs):
    """Have Ctrl-C come after some runs; return the names of those that are measured."""
    whole, seen = Replay.measure, []

    def measure(self, run):
        if len(seen) == runs:
            raise Stopped
        seen.append(run.policy.name)
        return whole(self, run)

    monkeypatch.setattr(Replay, "measure", measure)
    return seen


def test_a_benchmark_that_was_stopped_goes_on_where_it_was(run, folder, tmp_path, monkeypatch):
    command = options(folder, tmp_path, "--capacity-tokens", "300")
    run(*command)
    whole = read_results(tmp_path / "out" / "results.json")
    with monkeypatch.context() as patch:
        stopping_after(patch, 9)
        code, _, err = run(*command)
    assert code == 130
    assert "stopped; what is complete is kept in" in err
    kept = tmp_path / "out" / "unfinished.jsonl"
    assert kept.stat().st_mode & 0o777 == 0o600
    with kept.open("ab") as file:
        file.write(b'\n{"key": ["half of a li')
    with monkeypatch.context() as patch:
        again = stopping_after(patch, -1)
        code, _, err = run(*command)
    assert code == 0, err
    assert "9 of them are kept in" in err
    assert len(again) == len(whole.runs) - 9
    assert not kept.exists()
    results = read_results(tmp_path / "out" / "results.json")
    assert without_times(results) == without_times(whole)


def test_another_benchmark_starts_anew(run, folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stopping_after(patch, 3)
        run(*options(folder, tmp_path))
    code, _, err = run(*options(folder, tmp_path, "--part", "policies", "--seed", "1"))
    assert code == 0
    assert "are kept in" not in err


def test_a_part_that_is_complete_is_shown_at_once(run, folder, tmp_path, monkeypatch):
    policies = options(folder, tmp_path, "--capacity-tokens", "300", "--part", "policies")
    run(*policies)
    of_part = len(read_results(tmp_path / "out" / "results.json").runs)
    with monkeypatch.context() as patch:
        stopping_after(patch, of_part)
        run(*options(folder, tmp_path, "--capacity-tokens", "300"))
    with monkeypatch.context() as patch:
        again = stopping_after(patch, 0)
        code, _, err = run(*policies)
    assert (code, again) == (0, []), err
    assert read_results(tmp_path / "out" / "results.json").tree.children


def test_a_long_benchmark_says_how_long_it_takes(folder):
    said = []
    now = iter(range(0, 100_000, 60))
    config = BenchConfig(dataset="jsonl", data=folder, k=3, part=[Part.k])
    run_bench(config, announce=said.append, clock=lambda: next(now))
    first, forecast = said
    assert re.fullmatch(r"\d+ runs, \d+ requests in all", first)
    runs = int(first.split()[0])
    assert forecast == (
        f"this will take about {60 * (runs - 1):,} s, {runs - 1} minutes; Ctrl-C stops it"
    )


def test_long_documents_of_ones_own_are_cut(run, tmp_path):
    paragraph = "The Seine flows through Paris, and the Loire does not.\n\n"
    corpus = [
        {"id": "long", "text": paragraph * 60},
        {"id": "short", "text": "The Tiber flows through Rome."},
    ]
    write_jsonl(tmp_path / "corpus.jsonl", *corpus)
    queries = [{"id": n, "question": "Which river flows through Paris?"} for n in range(2)]
    write_jsonl(tmp_path / "queries.jsonl", *queries)
    command = ("bench", "jsonl", "--data", tmp_path, "-o", tmp_path / "out", "--part", "policies")
    code, out, err = run(*command, "--chunk-tokens", "100")
    assert code == 0, err
    assert "1 documents of more than 200 tokens were cut into 9 pieces" in words(out)
    assert read_results(tmp_path / "out" / "results.json").trace.blocks == 10
    _, out, _ = run(*command, "--chunk-tokens", "1000")
    assert "were cut into" not in out


def test_blocks_can_be_counted_with_the_words_on_them_instead_of_prompts(run, folder, tmp_path):
    run(*options(folder, tmp_path, "--tokenizer", "blocks", "--part", "ablations"))
    results = read_results(tmp_path / "out" / "results.json")
    assert results.level == "blocks"
    by_name = {one.policy: one for one in results.runs if one.capacity_tokens is None}
    whole, plain = (by_name[f"ctxreuse, batch{less}"] for less in ("", ", not annotated"))
    assert whole.word_tokens > plain.word_tokens
    assert whole.total.prefilled_tokens > plain.total.prefilled_tokens


@pytest.mark.parametrize("part", ["k", "sessions", "ablations"])
def test_a_part_alone_makes_a_report(run, folder, tmp_path, part):
    html = tmp_path / "report.html"
    code, out, err = run(
        *options(folder, tmp_path, "--part", part, "--independent", "--html", html)
    )
    assert code == 0, err
    assert "Traceback" not in err
    assert ("for no question is a turn" in words(out)) == (part == "sessions")
    assert ("<figure" in html.read_text()) == (part != "sessions")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("nonsense",), "there is no data set 'nonsense'"),
        (("jsonl", "--retriever", "bm52"), "there is no retriever"),
        (("jsonl", "--compare", "/no/such/file"), "cannot be read"),
        (("jsonl", "--policy", "ctxreuse"), "there is no policy 'ctxreuse' (str); there are: as "),
        (("jsonl", "--tokenizer", "/no/such/file"), "tokenizer"),
    ],
)
def test_mistakes_are_explained(run, folder, tmp_path, arguments, problem):
    code, _, err = run("bench", *arguments, "--data", folder, "-o", tmp_path / "out")
    assert code == 2
    assert problem in err


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["anthropic(minimum=64)", "gemini(minimum=64)"])
def test_on_a_hosted_cache_it_measures_the_bill(run, folder, tmp_path, cache):
    arguments = ["bench", "jsonl", "--data", folder, "--k", 3, "--seed", 1, "--cache", cache]
    arguments += ["-o", tmp_path / "out", "--html", tmp_path / "page.html"]
    code, out, _ = run(*arguments)
    assert code == 0
    assert f"The bill with {cache}" in out
    assert "lower input bill than" in out or "Nothing to gain" in out
    said = json.loads(run(*arguments, "--json")[1])
    assert {run["part"] for run in said["runs"]} == set(Part)
    rows = said["bill"]["rows"]
    today = [row for row in rows if row["policy"] == "as sent today"]
    assert len(today) == ("anthropic" in cache)
    assert {row["policy"] for row in rows} >= {one.name for one in POLICIES}
    assert said["settings"]["cache"] == cache
    stored = read_results(tmp_path / "out" / "results.json")
    assert [run.billed for run in stored.runs if run.part == Part.k]
    assert f"The bill with {cache}" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("more", [["--capacity-tokens", 9], ["--base-url", "http://x"]])
def test_a_hosted_cache_has_no_size_and_no_engine(run, folder, tmp_path, more):
    arguments = ["bench", "jsonl", "--data", folder, "--cache", "openai", "-o", tmp_path / "out"]
    code, _, err = run(*arguments, *more)
    assert (code, "is a provider's cache; leave them out" in err) == (2, True)


def test_without_a_data_set_there_is_nothing_to_measure(run, tmp_path):
    code, _, err = run("bench", "-o", tmp_path / "out")
    assert (code, "name the files' format and where they are" in err) == (2, True)


def test_an_engines_answers_are_scored_and_shown(run, folder, tmp_path, served):
    served(answer="No.</think>Yes.")  # what a model thinks is not scored
    html = tmp_path / "report.html"
    parts = ("--part", "policies", "--part", "sessions", "--at-sessions", "32")
    code, out, err = run(*options(folder, tmp_path, "--base-url", URL, *parts, "--html", html))
    assert code == 0, err
    shown = words(out)
    assert "What the engine reported" in shown
    assert "without what a chat shows" in shown
    assert "How good the answers are" in shown
    assert "1.000 [1.000, 1.000]" in shown
    assert "ctxreuse, online (32)" in shown
    results = read_results(tmp_path / "out" / "results.json")
    assert results.level == "engine"
    assert "as measured" in html.read_text()
    with (tmp_path / "out" / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["f1"] for line in lines} == {"1.0"}
    short = options(folder, tmp_path, "--base-url", URL, *parts[:2], "--answer-tokens", "1")
    assert "How good the answers are" not in run(*short)[1]
