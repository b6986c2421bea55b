"""The service in `examples/production` runs as it stands: its processes, and what starts them."""

import os
import re
import runpy
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from doc_pages import ROOT
from redis_servers import PASSWORD, free_port, redis_server

from ctxreuse import ContextRequest

EXAMPLE = ROOT / "examples" / "production"
START_S = 90
QUESTIONS = [
    "Which river flows through Paris?",
    "Which river is in Italy, Rome?",
    "Which is the longest river of France?",
    "Which river flows through Lisbon, Portugal?",
]


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < end, "it does not start"
        time.sleep(0.1)


@contextmanager
def uvicorn(app: str, *options: str, **environment: str) -> Iterator[str]:
    """Serve an application of the example; yield its address."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), *options]
    # the example's folder is where the image has it: on the path, and nothing else is
    variables = {**os.environ, **environment, "NO_PROXY": "127.0.0.1"}
    process = subprocess.Popen(
        [*command, "--log-level", "warning", "--app-dir", str(EXAMPLE)], env=variables
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, f"{app} ended with {process.returncode}"
        with suppress(httpx.TransportError):
            return httpx.get(url, timeout=5, trust_env=False).status_code > 0
        return False

    try:
        until(answers)
        yield url
    finally:
        process.terminate()
        process.wait(START_S)


class Asked(NamedTuple):
    question: str
    text: str
    documents: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int
    worker: int


def ask(url: str, question: str) -> Asked:
    reply = httpx.post(f"{url}/ask", json={"text": question}, timeout=30, trust_env=False)
    assert reply.status_code == 200, reply.text
    answer = reply.json() | {"documents": tuple(reply.json()["documents"])}
    return Asked(question, **answer)


@pytest.mark.slow
def test_workers_order_alike_and_a_service_that_starts_again_goes_on(tmp_path):
    with uvicorn("engine:app") as engine:
        shared = {"ENGINE_URL": f"{engine}/v1", "SENT_LOG": str(tmp_path / "sent.sqlite")}
        early: list[Asked] = []
        with uvicorn("app:app", "--workers", "2", **shared) as url:

            def both_have_answered() -> bool:
                early.extend(ask(url, question) for question in QUESTIONS)
                return len({one.worker for one in early}) == 2

            until(both_have_answered)
            time.sleep(0.5)  # what the other has sent takes some hundredths of a second
            late = [ask(url, question) for question in QUESTIONS * 5]
            ready = httpx.get(f"{url}/ready", timeout=30, trust_env=False)
        assert (ready.status_code, ready.json()["log_faults"]) == (200, 0)
        orders = {(one.question, one.documents) for one in late}
        assert len(orders) == len(QUESTIONS), "a question has the same order in both processes"
        assert {one.text for one in late} == {"From the documents."}
        assert all(one.cached_tokens > one.prompt_tokens - 32 for one in late)
        with uvicorn("app:app", **shared) as url:
            again = [ask(url, question) for question in reversed(QUESTIONS)]
    assert {one.worker for one in again}.isdisjoint(one.worker for one in early + late)
    assert {(one.question, one.documents) for one in again} == orders


@pytest.mark.slow
def test_services_of_two_machines_order_alike_through_redis(tmp_path):
    """With the server's settings of the compose file, which allow no more than is needed."""
    settings = tmp_path / "redis.conf"
    content = compose("compose.redis.yaml")["configs"]["redis"]["content"]
    settings.write_text(filled(content, REDIS_PASSWORD=PASSWORD))
    with (
        redis_server(tmp_path, "--include", str(settings)) as redis,
        uvicorn("engine:app") as engine,
    ):
        address = filled(
            service("app", "compose.redis.yaml")["environment"]["SENT_LOG"], REDIS_PASSWORD=PASSWORD
        ).replace("redis://", "unix://")
        shared = {
            "ENGINE_URL": f"{engine}/v1",
            "SENT_LOG": address.replace("redis:6379/0", redis.url.removeprefix("unix://")),
            "SENT_LOG_SECRET": "the same in all services",
        }
        with uvicorn("app:app", **shared) as one, uvicorn("app:app", **shared) as other:
            first = {
                (asked.question, asked.documents) for asked in map(partial(ask, one), QUESTIONS)
            }

            def has_learnt() -> bool:
                ready = httpx.get(f"{other}/ready", timeout=30, trust_env=False).json()
                assert ready["log_faults"] == 0
                return bool(ready["taken_in"] == len(QUESTIONS))

            until(has_learnt)
            second = [ask(other, question) for question in reversed(QUESTIONS)]
    assert {(asked.question, asked.documents) for asked in second} == first
    assert all(asked.cached_tokens > asked.prompt_tokens - 32 for asked in second)


@pytest.mark.slow
def test_it_says_that_the_engine_is_away_and_lives_on(tmp_path):
    nobody = f"http://127.0.0.1:{free_port()}/v1"
    log = str(tmp_path / "sent.sqlite")
    with uvicorn("app:app", ENGINE_URL=nobody, SENT_LOG=log) as url:
        states = {
            path: httpx.get(f"{url}{path}", timeout=60, trust_env=False).status_code
            for path in ("/live", "/ready")
        }
        asked = httpx.post(f"{url}/ask", json={"text": "?"}, timeout=60, trust_env=False)
    assert (states, asked.status_code) == ({"/live": 200, "/ready": 503}, 503)


def test_the_image_does_not_run_as_root():
    names = [name for name, _ in instructions()]
    assert "USER" in names[: names.index("CMD")]
    assert dict(instructions())["USER"] != "root"


def test_a_fault_in_planning_fails_no_question(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SENT_LOG", str(tmp_path / "sent.sqlite"))
    app = runpy.run_path(str(EXAMPLE / "app.py"))
    request = ContextRequest(["a secret text", "another text"], "Which?")

    def fail(*_: object, **__: object) -> None:
        raise KeyError("a secret text")

    monkeypatch.setattr(app["planner"]._planning, "plan", fail)
    plan = app["planned"](request)
    assert [block.text for block in plan.blocks] == ["a secret text", "another text"]
    assert caplog.messages == ["planning failed with KeyError; sent as retrieved"]


CELERY_ASKS = """
from tasks import answer
def asked(names):
    documents = [{"id": name, "text": f"Document {name}. " * 60} for name in names]
    return answer.delay([{"text": "Which?", "documents": documents}]).get(timeout=60)[0]
print(*(asked(names)["cached_tokens"] > 0 for names in ("abc", "cba", "bca", "acb", "cab")))
"""


@pytest.fixture(scope="module")
def celery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install Celery for one process: in the environment, it would lower versions of others."""
    pytest.importorskip("pip", reason="needs pip to install Celery")
    folder = tmp_path_factory.mktemp("celery")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    done = subprocess.run([*install, "celery>=5.4"], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = f"Celery cannot be installed here: {done.stderr.strip()[-300:]}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return folder


@contextmanager
def sent_log(place: str, folder: Path) -> Iterator[dict[str, str]]:
    """Yield the variables that name a log in a file, or in a Redis server."""
    if place == "file":
        yield {"SENT_LOG": str(folder / "sent.sqlite")}
        return
    with redis_server(folder) as redis:
        yield {"SENT_LOG": redis.url, "SENT_LOG_SECRET": "of all services, 32 bytes of it."}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file", "redis"])
def test_celerys_forked_workers_order_alike(tmp_path, celery, place):
    for name in ("broker", "results"):
        (tmp_path / name).mkdir()
    with (
        redis_server(tmp_path / "broker") as broker,
        uvicorn("engine:app") as engine,
        sent_log(place, tmp_path) as log,
    ):
        known = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(map(str, (EXAMPLE, celery, known)))
        variables = {
            **os.environ,
            "PYTHONPATH": path,
            "ENGINE_URL": f"{engine}/v1",
            **log,
            "BROKER_URL": broker.url.replace("unix://", "redis+socket://"),
            "RESULT_URL": f"file://{tmp_path}/results",
        }
        command = [sys.executable, "-m", "celery", "-A", "tasks", "worker"]
        options = ["--pool=prefork", "--concurrency=2", "--loglevel=warning"]
        worker = subprocess.Popen([*command, *options], env=variables)
        try:
            asks = [sys.executable, "-c", CELERY_ASKS]
            asked = subprocess.run(
                asks, env=variables, capture_output=True, text=True, timeout=START_S, check=True
            )
        finally:
            worker.terminate()
            worker.wait(START_S)
    assert asked.stdout.split() == ["False", "True", "True", "True", "True"]


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions: name and what stands behind it."""
    text = (EXAMPLE / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def compose(file: str) -> dict[str, Any]:
    text = (EXAMPLE / file).read_text(encoding="utf-8")
    read: dict[str, Any] = yaml.safe_load(text)
    return read


def service(name: str, file: str = "compose.yaml") -> dict[str, Any]:
    found: dict[str, Any] = compose(file)["services"][name]
    return found


def filled(text: str, **values: str) -> str:
    """Return a text of a compose file with values of variables, or what stands for those unset."""

    def value(found: re.Match[str]) -> str:
        return values.get(found["name"], found["default"] or "")

    return re.sub(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|:\?[^}]*)?\}", value, text)


def test_what_the_image_copies_is_there_and_not_ignored():
    ignored = (EXAMPLE / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY"]
    for source in (one for sources in copied for one in sources):
        assert (ROOT / source).exists(), source
        assert any(source == one or source.startswith(f"{one}/") for one in let_in), source
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = built["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    whole = {one for sources in copied for one in sources}
    assert {package.partition("/")[0] for package in packages} <= whole


def test_what_the_image_installs_exists_and_is_what_the_tests_run_with():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [install] = [rest for name, rest in instructions() if "pip install" in rest]
    packages = re.findall(r'"([^"]+)"', install)
    assert packages[0] == ".[openai,redis]"
    assert {"openai", "redis"} <= set(project["project"]["optional-dependencies"])
    assert set(packages[1:]) <= set(project["dependency-groups"]["dev"])
    for package in packages[1:]:
        assert distribution(package.partition(">=")[0])


def test_ports_and_variables_agree():
    names = dict(instructions())
    port = re.search(r'"--port", "(\d+)"', names["CMD"])
    assert port is not None
    assert names["EXPOSE"] == port[1]
    assert f"127.0.0.1:{port[1]}/live" in names["HEALTHCHECK"]
    app, engine, vllm = service("app"), service("engine"), service("vllm")
    assert app["ports"] == [f"127.0.0.1:{port[1]}:{port[1]}"]
    for one in (engine, vllm):
        assert one["command"][one["command"].index("--port") + 1] == "8000"
    assert app["environment"]["ENGINE_URL"] == "${ENGINE_URL:-http://engine:8000/v1}"
    assert app["build"] == engine["build"]
    context = (EXAMPLE / app["build"]["context"]).resolve()
    assert (context / app["build"]["dockerfile"]).resolve() == EXAMPLE / "Dockerfile"
    program = (EXAMPLE / "app.py").read_text(encoding="utf-8")
    read = set(re.findall(r'os\.environ(?:\.get\(|\[)"(\w+)"', program))
    assert read == set(app["environment"])
    assert names["ENV"] == f"SENT_LOG={app['environment']['SENT_LOG']}"
    folder = names["VOLUME"]
    assert app["volumes"] == [f"sent:{folder}"]
    assert app["environment"]["SENT_LOG"].startswith(f"{folder}/")


def test_the_log_in_redis_fits_the_service_and_needs_its_secrets():
    app, redis = (service(name, "compose.redis.yaml") for name in ("app", "redis"))
    assert set(app["environment"]) <= set(service("app")["environment"])
    for name, variable in (("SENT_LOG", "REDIS_PASSWORD"), ("SENT_LOG_SECRET", "SENT_LOG_SECRET")):
        assert f"${{{variable}:?" in app["environment"][name], "without it nothing starts"
    address = urlsplit(filled(app["environment"]["SENT_LOG"], REDIS_PASSWORD=PASSWORD))
    assert address.hostname in compose("compose.redis.yaml")["services"]
    [port] = redis["ports"]
    assert filled(port) == f"127.0.0.1:{address.port}:{address.port}"
    [mounted] = redis["configs"]
    assert redis["command"][-1] == mounted["target"]
    content = compose("compose.redis.yaml")["configs"][mounted["source"]]["content"]
    assert f"user {address.username} on >${{REDIS_PASSWORD}} ~ctxreuse*" in content
