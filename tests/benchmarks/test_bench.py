"""The benchmark on public data: what is sent, who takes part, and what comes out."""

import csv
import json
import re
import sys
from contextlib import contextmanager
from dataclasses import replace

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
from ctxreuse.measure.replay.simulate import Run
from ctxreuse.measure.traces.trace_files import TraceRequest
from public_data.benchmark import BenchConfig, Part, RunMatrix, cut
from public_data.benchmark import run as run_bench
from public_data.datasets import Dataset, Passage, Question
from public_data.peers.frameworks import framework_policies
from public_data.peers.published_pilot import PublishedContextPilot
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


def test_a_framework_that_is_not_there_is_named(monkeypatch):
    for name in ("langchain_community.document_transformers", "llama_index.core.postprocessor"):
        monkeypatch.setitem(sys.modules, name, None)
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


def test_results_are_written_and_shown(run, folder, tmp_path):
    html = tmp_path / "report.html"
    code, out, err = run(*options(folder, tmp_path, "--capacity-tokens", "300", "--html", html))
    assert code == 0, err
    shown = words(out)
    assert "towns, bm25, k=3: 15 requests (9 of them turns of 3 conversations)" in shown
    assert "Hit ratio by conversations at a time, with a cache of 300 tokens" in shown
    assert "One idea less" in shown
    assert "ordering moves first turns only" in shown
    assert "reuse bound" in shown
    runs = stored(tmp_path)["runs"]
    assert {one["part"] for one in runs} == set(Part)
    with (tmp_path / "out" / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["requests"] for line in lines} == {"15"}
    assert [int(line["cached_tokens"]) for line in lines] == [one["cached_tokens"] for one in runs]
    assert "<h2>One idea less" in html.read_text()


def stored(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())


def test_a_config_makes_the_results_that_the_command_writes(run, folder, tmp_path):
    run(*options(folder, tmp_path, "--part", "policies", "--capacity-tokens", "300"))
    config = BenchConfig(
        dataset="jsonl", data=folder, k=3, part=[Part.policies], capacity_tokens=[300]
    )
    steps = []

    @contextmanager
    def progress(task, number):
        steps.append([task, number, 0])
        yield lambda: steps[-1].__setitem__(2, steps[-1][2] + 1)

    said = []
    results, references = run_bench(config, progress, said.append)
    assert references["q0"] == ("yes",)
    assert re.fullmatch(r"\d+ runs, \d+ requests in all", "".join(said))
    assert [one.total.cached_tokens for one in results.runs] == [
        one["cached_tokens"] for one in stored(tmp_path)["runs"]
    ]
    assert [task for task, *_ in steps] == ["reading", "retrieving", "measuring"]
    assert all(number == done for _, number, done in steps[1:])
    assert not any(one.planned for one in results.runs)


def test_policies_can_be_chosen_and_what_is_given_twice_is_measured_once(run, folder, tmp_path):
    twice = ("--part", "policies", "--capacity-tokens", "300") * 2
    code, _, err = run(*options(folder, tmp_path, *twice))
    assert code == 0, err
    names = ("policy", "deduplicated", "capacity_tokens")
    measured = [tuple(run[name] for name in names) for run in stored(tmp_path)["runs"]]
    assert len(measured) == len(set(measured))
    run(*options(folder, tmp_path, "--part", "policies", "--policy", "ctxreuse, batch"))
    runs = stored(tmp_path)["runs"]
    assert {one["policy"] for one in runs} == {"as retrieved", "ctxreuse, batch"}


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_read(run, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        code, _, err = run("bench", "jsonl", "--data", tmp_path / "nothing", "-o", path)
        assert (code, err.startswith(f"public_data: {path}: cannot be written: ")) == (2, True)


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
    assert stored(tmp_path)["trace"]["blocks"] == 10
    _, out, _ = run(*command, "--chunk-tokens", "1000")
    assert "were cut into" not in out


def test_blocks_can_be_counted_with_the_words_on_them_instead_of_prompts(run, folder, tmp_path):
    run(*options(folder, tmp_path, "--tokenizer", "blocks", "--part", "ablations"))
    by_name = {one["policy"]: one for one in stored(tmp_path)["runs"] if not one["capacity_tokens"]}
    whole, plain = (by_name[f"ctxreuse, batch{less}"] for less in ("", ", not annotated"))
    assert whole["word_tokens"] > plain["word_tokens"]
    assert whole["prompt_tokens"] > plain["prompt_tokens"]


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
    assert said == stored(tmp_path)
    assert {run["part"] for run in said["runs"]} == set(Part)
    rows = said["bill"]["rows"]
    today = [row for row in rows if row["policy"] == "as sent today"]
    assert len(today) == ("anthropic" in cache)
    assert {row["policy"] for row in rows} >= {one.name for one in POLICIES}
    assert said["settings"]["cache"] == cache
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
    assert "as measured" in html.read_text()
    with (tmp_path / "out" / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["f1"] for line in lines} == {"1.0"}
    short = options(folder, tmp_path, "--base-url", URL, *parts[:2], "--answer-tokens", "1")
    assert "How good the answers are" not in run(*short)[1]
