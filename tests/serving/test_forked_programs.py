"""Users' programs with several processes: they end by themselves, with answers and no noise."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

APPLICATION = """
import asyncio, logging, multiprocessing, os, signal, sys, threading, time, warnings
warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)  # Python's, of any fork
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables import RunnableLambda
from chain_of_agents import ChainOfAgents
from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving import EngineClient
from ctxreuse.workflow import WorkflowEngine, one_shot
from langchain_ctxreuse import LangChainLLM, RetrieverStage, ReuseChatModel, format_context

planner = ReusePlanner()
model = ReuseChatModel(inner=FakeListChatModel(responses=["Yes."], sleep=0.001), planner=planner)
found = RunnableLambda(lambda query: [Document("one " * 50), Document("two " * 50)])
engine = WorkflowEngine(LangChainLLM(model), RetrieverStage(found), planner)
chain = ChainOfAgents(llm=model, workers=2)

def serve(number):
    context = format_context([Document("three " * 50), Document("four " * 50)])
    answers = [model.invoke(context + "\\n\\nWhich?").text]
    answers += [answer.text for answer in model.batch(["Which?", "What?"])]
    answers += [one.answer for one in engine.run_batch([(one_shot(), "Which?")], progress=False)]
    answers += [str(chain.invoke({"question": "Which?", "documents": ["one", "two"]}))]
    answers += [asyncio.run(model.ainvoke("Which?")).text]
    assert answers == ["Yes."] * 6, answers
    plan = planner.plan(ContextRequest(["one " * 50], "Which?"))
    return plan.request_id
"""

PREFORK = """
serve(0)  # the application is loaded, and has answered
is_over = threading.Event()
def busy():
    while not is_over.is_set():
        serve(0)
threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()

def start_workers(end):
    for number in range(3):
        pid = os.fork()
        if not pid:
            serve(number)
            end(0)
        workers.append(pid)

workers = []
start_workers(sys.exit)  # in the usual way: exit functions, finalizers and all
thread = threading.Thread(target=start_workers, args=(os._exit,))  # replaces workers
thread.start()
thread.join()
async def from_a_loop():
    answering = asyncio.ensure_future(model.ainvoke("Which?"))
    await asyncio.sleep(0)
    pid = os.fork()
    if not pid:
        try:
            serve(2)
            os._exit(0)
        finally:
            os._exit(1)
    workers.append(pid)
    assert (await answering).text == "Yes."
asyncio.run(from_a_loop())
statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
is_over.set()
for thread in threads:
    thread.join()
serve(0)
print(statuses)
"""

POOL = """
def of_another_process(one):
    prompt = format_context(found.invoke("")) + "\\n\\nWhich?"
    return one.invoke(prompt).text, one.planner is planner

if __name__ == "__main__":
    serve(0)
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        ids = pool.map(serve, range(4), chunksize=1)
        print(pool.map(of_another_process, [model] * 2))
        try:
            pool.map(serve, [EngineClient("http://engine", "m")])
        except InvalidRequestError as error:
            print(error)
        pool.close()
        pool.join()
    print(len({planner.plan(ContextRequest([], "Which?")).request_id, *ids}) if
          sys.argv[1] == "fork" else "")
"""


def run(folder: Path, program: str, *arguments: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(APPLICATION + program)
    ended = subprocess.run(
        [sys.executable, path, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    noise = [
        line for line in ended.stderr.splitlines() if "was forked; it is empty here" not in line
    ]
    assert (ended.returncode, noise) == (0, [])
    return ended.stdout.splitlines()


def test_a_server_that_forks_workers_from_threads_and_loops_while_it_answers(tmp_path):
    assert run(tmp_path, PREFORK) == [str([0] * 7)]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_pool_of_processes_shares_wrappers_and_is_told_to_make_its_own_clients(tmp_path, method):
    answers, refusal, ids = run(tmp_path, POOL, method)
    assert answers == str([("Yes.", False)] * 2)
    assert refusal.startswith("EngineClient cannot be copied or pickled")
    assert refusal.endswith("make one in each process, or share this one between threads")
    assert ids == ("5" if method == "fork" else "")
