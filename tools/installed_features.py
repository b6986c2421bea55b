"""What an installed ctxreuse does: each feature is used once, or says which extra it needs.

    python -I installed_features.py

Runs in an environment that holds the wheel, in a folder where files may be written, and imports
nothing else of this repository. Prints a JSON object a feature: its name, the extras of which each
is enough for it, and how it went.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CLI = "cli"
"""The extra that has the command."""

WORKS = "works"
SAYS_SO = "names its extra"
FAILS = "fails"

_TEXTS = ("The Seine flows through Paris.", "The Tiber flows through Rome.", "Rome is in Italy.")
_QUESTION = "Which river flows through Rome?"
_REMEDY = re.compile(r"pip install (?:-e )?'[^']*\[([\w,-]+)\][^']*'")
_PROGRAMS = {
    "langchain": """
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
class Found(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(text) for text in TEXTS]
Found().invoke(QUESTION)
""",
    "llamaindex": """
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
class Found(BaseRetriever):
    def _retrieve(self, query_bundle):
        return [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
Found().retrieve(QUESTION)
""",
    "openai": """
import openai
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="EMPTY", max_retries=0)
messages = [{"role": "user", "content": "\\n\\n".join([*TEXTS, QUESTION])}]
try:
    client.chat.completions.create(model="M", messages=messages)
except openai.APIConnectionError:
    pass
""",
}
_LONGEST_IMPORT_S = 0.3
_IMPORTS = 15

_IMPORT = """
import sys, time
before = set(sys.modules)
began = time.process_time()
import ctxreuse
took = time.process_time() - began
files = ((name, getattr(sys.modules[name], "__file__", None)) for name in set(sys.modules) - before)
print(took, *sorted({name.partition(".")[0] for name, file in files if "-packages" in str(file)}))
"""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that the package does for whoever has installed enough."""

    name: str  # what it is called in the table
    use: Callable[[], object]  # uses it; raises whatever a user would see
    # each of them alone is enough for it; none are needed where this is empty
    extras: tuple[str, ...] = ()
    on: tuple[str, ...] = ()  # extras that may be named instead, because it builds on them
    # a package that users import themselves: nothing of ours can say that it is missing
    foreign: str = ""


class CommandError(Exception):
    """The command failed; the message is what it said."""


def command(*arguments: str) -> str:
    """Run `ctxreuse` of this environment; return what it printed."""
    program = Path(sys.executable).parent / "ctxreuse"
    done = subprocess.run(
        [str(program), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise CommandError(done.stderr[-2000:])
    return done.stdout


def imports_little() -> None:
    """Import the package in processes of their own: numpy and scipy at most, and soon.

    Time is the processor's, which a busy machine lengthens less than the clock's; one quick import
    of several shows what it takes.
    """
    best = float("inf")
    for _ in range(_IMPORTS):
        done = subprocess.run(
            [sys.executable, "-I", "-c", _IMPORT], capture_output=True, text=True, check=True
        )
        took, *packages = done.stdout.split()
        more = set(packages) - {"ctxreuse", "numpy", "scipy"}
        assert not more, f"import ctxreuse loads {', '.join(sorted(more))}"
        best = min(best, float(took))
        if best < _LONGEST_IMPORT_S:
            return
    raise AssertionError(f"import ctxreuse takes {best:.2f} s at best")


def imports_all_that_needs_nothing() -> None:
    """Import what is public without any extra, and use it."""
    for package in ("cache", "measure", "measure.report", "serving", "sharing", "workflow"):
        _import_names(f"ctxreuse.{package}")
    _import_names("ctxreuse")
    _import_names("mem0_ctxreuse")
    planner = import_module("ctxreuse").ReusePlanner()
    plan = planner.plan(import_module("ctxreuse").ContextRequest(list(_TEXTS), _QUESTION))
    assert {block.text for block in plan.blocks} == set(_TEXTS)


def is_typed() -> None:
    """Look for the markers that tell type checkers to read our annotations."""
    from importlib.metadata import files

    found = {str(path) for path in files("ctxreuse") or ()}
    packages = {path.partition("/")[0] for path in found if path.endswith("/__init__.py")}
    untyped = {package for package in packages if f"{package}/py.typed" not in found}
    assert len(packages) == 6, f"the wheel holds {', '.join(sorted(packages))}"
    assert not untyped, f"no py.typed in {', '.join(sorted(untyped))}"


def plans_and_simulates() -> None:
    """Run the commands that need nothing else, on files of our own."""
    assert "ctxreuse demo" in command("--help")
    corpus, trace = _files()
    files = ("--corpus", corpus)
    command("plan", "--trace", trace, *files, "--mode", "online", "-o", "plan.jsonl")
    assert (
        json.loads(command("simulate", "--plan", "plan.jsonl", *files, "--json"))["requests"] == 4
    )
    command("explain", "--plan", "plan.jsonl", *files)
    command("estimate", trace, *files)


def shows_progress() -> None:
    """Show a progress bar."""
    with import_module("ctxreuse.serving").progress_bar("requests") as progress:
        progress(1, 2)


def demonstrates() -> None:
    """Run the demo."""
    command("demo", "-o", "demo-output")
    assert Path("demo-output/computed_tokens.png").stat().st_size


def reports() -> None:
    """Make a report, and its pictures."""
    corpus, trace = _files()
    command("report", trace, "--corpus", corpus, "-o", "report.html", "--pictures", "pictures")
    assert "</html>" in Path("report.html").read_text(encoding="utf-8")
    assert list(Path("pictures").glob("*.png"))


def knows_prices() -> None:
    """Estimate with a model's published prices."""
    corpus, trace = _files()
    output = command("estimate", trace, "--corpus", corpus, "--prices", "gpt-4.1", "--json")
    assert "genai-prices" in output, output


def asks_a_recording() -> None:
    """Send a recording to an engine that is not there."""
    corpus, trace = _files()
    try:
        command("bench", trace, "--corpus", corpus, "--base-url", "http://127.0.0.1:9/v1")
    except CommandError as error:
        if "127.0.0.1:9" not in str(error):
            raise
    else:
        raise AssertionError("nothing answers there")


def counts_tokens() -> None:
    """Simulate token by token."""
    words = {"[UNK]": 0, "The": 1}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
        "added_tokens": [],
    }
    Path("tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    corpus, trace = _files()
    command("plan", "--trace", trace, "--corpus", corpus, "--mode", "offline", "-o", "plan.jsonl")
    files = ("--plan", "plan.jsonl", "--corpus", corpus)
    counted = command("simulate", *files, "--tokenizer", "tokenizer.json", "--json")
    assert json.loads(counted)["level"] == "token"


def plugs_into_langchain() -> None:
    """Import all of it, and order what a retriever finds."""
    adapters = _import_names("langchain_ctxreuse")
    lambdas = import_module("langchain_core.runnables").RunnableLambda
    document = import_module("langchain_core.documents").Document
    found = [document(page_content=text) for text in _TEXTS]
    chain = adapters.ReuseCompressor()
    ordered = chain.compress_documents(found, _QUESTION)
    shown = (lambdas(lambda _: ordered) | adapters.format_context).invoke(_QUESTION)
    assert all(text in shown for text in _TEXTS)


def plugs_into_llamaindex() -> None:
    """Import all of it, and order what a retriever finds."""
    adapters = _import_names("llamaindex_ctxreuse")
    schema = import_module("llama_index.core.schema")
    found = [schema.NodeWithScore(node=schema.TextNode(text=text), score=1.0) for text in _TEXTS]
    ordered = adapters.ReusePostprocessor().postprocess_nodes(found, query_str=_QUESTION)
    assert {node.node.text for node in ordered} == set(_TEXTS)


def records(source: str) -> None:
    """Record a program that asks once."""
    beginning = f"TEXTS, QUESTION = {_TEXTS!r}, {_QUESTION!r}\n"
    Path("program.py").write_text(beginning + _PROGRAMS[source], encoding="utf-8")
    command("record", "-o", f"recording-{source}", "--source", source, "program.py")
    trace = Path(f"recording-{source}", "trace.jsonl").read_text(encoding="utf-8")
    assert _QUESTION in trace, trace


def wraps_mem0() -> None:
    """Wrap mem0's own class, which is not set up: that would need a model and a store."""
    os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": str(Path("mem0").resolve())}
    stores = import_module("mem0")
    adapters = _import_names("mem0_ctxreuse")
    found = [{"id": str(number), "memory": text} for number, text in enumerate(_TEXTS)]

    class Memory(stores.Memory):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            """Set nothing up."""

        def search(self, *_: object, **__: object) -> dict[str, Any]:
            return {"results": found}

    shown = adapters.ReuseMemory(Memory()).messages(_QUESTION, filters={"user_id": "a"})
    assert all(text in shown[-1]["content"] for text in _TEXTS)


def asks_an_engine() -> None:
    """Plan a batch and send it to an emulated engine."""
    serving = import_module("ctxreuse.serving")
    ctxreuse = import_module("ctxreuse")
    requests = [ctxreuse.ContextRequest(list(_TEXTS), f"Question {n}?") for n in range(3)]

    async def main() -> list[str]:
        planner = ctxreuse.ReusePlanner()
        client = serving.EngineClient("http://engine.invalid/v1", planner=planner)
        await client.aclose()  # built as users build it; what follows needs no socket
        engine = serving.EmulatedEngine(answer="The Tiber.")
        async with import_module("httpx").AsyncClient(transport=engine.transport()) as http:
            client = serving.EngineClient("http://engine.invalid/v1", http_client=http)
            outcomes = await serving.dispatch(client, planner.plan_batch(requests))
            return [str(one.error or one.completion.text) for one in outcomes]

    assert asyncio.run(main()) == ["The Tiber."] * 3


def serves() -> None:
    """Have the command hash a key, and the server plan before an engine that is not there."""
    os.environ["CTXREUSE_KEYS_SECRET"] = "a secret"
    assert len(command("serve", "--hash-key").strip()) == 32
    httpx = import_module("httpx")
    settings = import_module("ctxreuse.cli.serve_command").ServeCommand(
        engines=["http://127.0.0.1:9"]
    )
    planner = import_module("ctxreuse").ReusePlanner()
    app = import_module("ctxreuse.serving.door.app").make_app(planner, settings)
    asked = {"query": _QUESTION, "documents": [{"text": text} for text in _TEXTS]}

    async def main() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            answer = await client.post("http://server.invalid/v1/plan", json=asked)
            return str(answer.json()["text"])

    shown = asyncio.run(main())
    assert all(text in shown for text in _TEXTS)


def plans_in_litellm() -> None:
    """Hand a request to the hook as LiteLLM's proxy does."""
    import_module("litellm")
    hook = import_module("ctxreuse.serving.litellm_hook").hook
    asked = {"messages": [{"role": "user", "content": _QUESTION}], "litellm_call_id": "a"}
    asked["documents"] = [{"text": text} for text in _TEXTS]
    key = SimpleNamespace(team_id=None, token="key")
    sent = asyncio.run(hook.async_pre_call_hook(key, None, asked, "acompletion"))
    assert all(text in sent["messages"][0]["content"] for text in _TEXTS)


def follows_events() -> None:
    """Subscribe to the events of an engine that is not there."""
    cache = import_module("ctxreuse.cache")
    planner = import_module("ctxreuse").ReusePlanner()
    with cache.KVEventSync(planner, "tcp://127.0.0.1:1") as sync:
        assert sync.stats.events == 0


def runs_agents() -> None:
    """Ask agents over a LangChain model, and show what they did."""
    agents = _import_names("chain_of_agents")
    models = import_module("langchain_core.language_models")
    model = models.FakeListChatModel(responses=["The Tiber."])
    answer = agents.ChainOfAgents(llm=model, workers=2).invoke(
        {"question": _QUESTION, "documents": list(_TEXTS)}
    )
    assert str(answer) == "The Tiber."
    assert "The Tiber." in answer.trace.to_html()


def runs_workflows() -> None:
    """Run a ready workflow over vectors and one over words; draw when what ran."""
    workflow = import_module("ctxreuse.workflow")
    keywords = workflow.KeywordRetriever(list(_TEXTS))
    embedder = workflow.TfidfEmbedder(list(_TEXTS), dimensions=2)
    vectors = workflow.VectorRetriever(_index(embedder), list(_TEXTS), embedder)
    for retriever in (keywords, vectors):
        llm = workflow.EmulatedLLM(lambda messages: "The Tiber.", speed=1_000)
        engine = workflow.WorkflowEngine(llm, retriever)
        [result] = engine.run_batch([(workflow.one_shot(k=2), _QUESTION)])
        assert result.answer == "The Tiber."
        engine.timeline("timeline.png")


def embeds_texts() -> None:
    """Find the text that a question is about by its static embedding."""
    embedder = import_module("ctxreuse.workflow").WordLlamaEmbedder()
    likeness = embedder.embed([_QUESTION]) @ embedder.embed(list(_TEXTS)).T
    assert likeness.argmax() == 1


def plans_datasets() -> None:
    """Plan a dataset on a cluster of this machine, or say what is missing."""
    distributed = import_module("ctxreuse.distributed")
    try:
        ray = import_module("ray")
    except ImportError:
        distributed.plan_dataset(None)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    data = import_module("ray.data")
    rows = [{"blocks": list(_TEXTS), "query": _QUESTION}] * 3
    planned = distributed.plan_dataset(data.from_items(rows)).take_all()
    assert [row["plan_position"] for row in planned] == [0, 1, 2]
    ray.shutdown()


def keeps_clusters_on_a_gpu() -> None:
    """Build the tier on torch's CPU device: whether there is a GPU is the machine's matter."""
    workflow = import_module("ctxreuse.workflow")
    embedder = workflow.TfidfEmbedder(list(_TEXTS), dimensions=2)
    index = workflow.IVFIndex(_index(embedder))
    assert workflow.GpuTier(index, 10_000, device="cpu").index is index


def shows_metrics() -> None:
    """Show what a planner has done to Prometheus."""
    telemetry = import_module("ctxreuse.cache.telemetry")
    core = import_module("ctxreuse")
    collector = telemetry.PlannerCollector(core.ReusePlanner())
    assert len(list(collector.collect())) > 20


def writes_spans() -> None:
    """Plan with OpenTelemetry's spans, which nobody keeps."""
    telemetry = import_module("ctxreuse.cache.telemetry")
    core = import_module("ctxreuse")
    planner = core.ReusePlanner(tracing=telemetry.PlannerSpans())
    planner.report_usage(planner.plan(core.ContextRequest(_TEXTS, _QUESTION)), 30, 0)
    assert planner.savings.reported.answers == 1


def shares_through_redis() -> None:
    """Make the log of several machines, and find that nobody listens there."""
    errors = import_module("ctxreuse.errors")
    log = import_module("ctxreuse.sharing").RedisLog(
        "unix:///nowhere/redis.sock", secret="a secret of 22 signs."
    )
    said = ""
    try:
        log.read("", 1)
    except errors.SharedLogError as error:
        said = str(error)
    assert "there is no connection" in said


FEATURES = (
    Feature("import", imports_little),
    Feature("names without extras", imports_all_that_needs_nothing),
    Feature("py.typed", is_typed),
    Feature("commands", plans_and_simulates, (CLI,)),
    Feature("progress bars", shows_progress, (CLI,)),
    Feature("ctxreuse demo", demonstrates, ("demo",), on=(CLI,)),
    Feature("ctxreuse report", reports, ("report",), on=(CLI,)),
    Feature("--prices MODEL", knows_prices, ("prices",), on=(CLI,)),
    Feature("ctxreuse bench", asks_a_recording, ("openai",), on=(CLI,)),
    Feature("--tokenizer", counts_tokens, ("tokenizers", "embeddings", "demo"), on=(CLI,)),
    Feature("langchain_ctxreuse", plugs_into_langchain, ("langchain",)),
    Feature("record --source langchain", partial(records, "langchain"), ("langchain",), on=(CLI,)),
    Feature("llamaindex_ctxreuse", plugs_into_llamaindex, ("llamaindex",)),
    Feature(
        "record --source llamaindex", partial(records, "llamaindex"), ("llamaindex",), on=(CLI,)
    ),
    Feature("mem0_ctxreuse over mem0", wraps_mem0, ("mem0",), foreign="mem0"),
    Feature("EngineClient", asks_an_engine, ("openai",)),
    Feature("record --source openai", partial(records, "openai"), ("openai",), on=(CLI,)),
    Feature("ctxreuse serve", serves, ("serve",), on=(CLI,)),
    Feature("LiteLLM's hook", plans_in_litellm, ("litellm",), foreign="litellm"),
    Feature("PlannerCollector", shows_metrics, ("metrics",)),
    Feature("PlannerSpans", writes_spans, ("metrics",)),
    Feature("KVEventSync", follows_events, ("vllm-events",)),
    Feature("RedisLog", shares_through_redis, ("redis",)),
    Feature("chain_of_agents", runs_agents, ("agents",)),
    Feature("WorkflowEngine", runs_workflows, ("workflow",)),
    Feature("WordLlamaEmbedder", embeds_texts, ("embeddings", "demo")),
    Feature("plan_dataset", plans_datasets, ("ray",)),
    Feature("GpuTier", keeps_clusters_on_a_gpu, ("gpu",), on=("workflow",)),
)


def outcome(feature: Feature) -> tuple[str, str]:
    """Use a feature; return WORKS, SAYS_SO or FAILS, and what was said."""
    try:
        feature.use()
    except (ImportError, CommandError) as error:
        if feature.foreign and getattr(error, "name", None) == feature.foreign:
            return SAYS_SO, str(error)
        named = _REMEDY.findall(str(error))
        if (
            len(named) == 1
            and named[0] in feature.extras + feature.on
            and "Traceback" not in str(error)
        ):
            return SAYS_SO, str(error)
        return FAILS, traceback.format_exc()
    except Exception:  # whatever it is, the table shows it and the check fails
        return FAILS, traceback.format_exc()
    return WORKS, ""


def _import_names(package: str) -> Any:
    module = import_module(package)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
    return module


def _files() -> tuple[str, str]:
    """Write a corpus and a trace of four requests; return their names."""
    blocks = [{"id": str(number), "text": text} for number, text in enumerate(_TEXTS)]
    requests = [
        {
            "request_id": number,
            "query": _QUESTION,
            "blocks": [str((number + n) % 3) for n in (0, 1)],
        }
        for number in range(4)
    ]
    for name, lines in (("corpus.jsonl", blocks), ("trace.jsonl", requests)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        Path(name).write_text(text, encoding="utf-8")
    return "corpus.jsonl", "trace.jsonl"


def _index(embedder: Any) -> Any:
    """Return a faiss index of the texts."""
    faiss = import_module("faiss")
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(embedder.dimension), embedder.dimension, 1)
    vectors = embedder.embed(list(_TEXTS))
    index.train(vectors)
    index.add(vectors)
    return index


def main() -> None:
    """Use all features."""
    for feature in FEATURES:
        state, said = outcome(feature)
        line = {"feature": feature.name, "extras": feature.extras, "state": state, "said": said}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
