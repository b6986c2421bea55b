"""The hook in LiteLLM's own proxy, a process on loopback, before an emulated engine."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager, closing
from importlib.util import find_spec
from secrets import token_hex
from socket import create_server

import httpx
import pytest
from door_helpers import asking, documents
from http_servers import engine_script, listening

from ctxreuse.serving import EmulatedEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("litellm") is None, reason="litellm[proxy] is not installed"),
]
WATCH = """
from litellm.integrations.custom_logger import CustomLogger
from ctxreuse.serving.litellm_hook import hook

class Watch(CustomLogger):
    async def async_log_success_event(self, **told):
        with open("reported", "w") as file:
            file.write(f"{hook.planner.savings.reported.answers} {hook.planner.savings.requests}")

watch = Watch()
"""
PROXY = "from litellm import run_server; run_server()"


@asynccontextmanager
async def proxy(folder, engine):
    served = {"model": "openai/emulated", "api_base": f"{engine.url}/v1", "api_key": "k"}
    callbacks = ["ctxreuse.serving.litellm_hook.hook", "told.watch"]
    config = {
        "model_list": [{"model_name": "emulated", "litellm_params": served}],
        "litellm_settings": {"callbacks": callbacks, "num_retries": 0},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    (folder / "told.py").write_text(WATCH)
    with closing(create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    options = ("--config", "config.yaml", "--port", str(port), "--host", "127.0.0.1")
    key = f"sk-{token_hex(32)}"
    more = {
        "CTXREUSE_KEYS_SECRET": "s",
        "LITELLM_MASTER_KEY": key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "*",
    }
    with open(folder / "log", "w") as log:
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROXY, *options),
            cwd=folder,
            env={**os.environ, **more},
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=30, trust_env=False
    ) as client:
        try:
            for _ in range(240):
                await asyncio.sleep(0.5)
                try:
                    if (await client.get("/health/liveliness")).status_code == 200:
                        break
                except httpx.TransportError:
                    assert running.returncode is None, (folder / "log").read_text()[-3_000:]
            yield client
        finally:
            if running.returncode is None:
                running.terminate()
            await running.wait()


async def test_documents_are_planned_in_litellms_proxy(tmp_path):
    chat = "/v1/chat/completions"
    async with (
        listening(engine_script(EmulatedEngine(fail=[None] * 4 + [400]))) as engines,
        proxy(tmp_path, engines[0]) as client,
    ):
        first = await client.post(chat, json=asking("abc"))
        beside = {"documents": documents("cab"), "tag": "kept"}
        second = await client.post(chat, json=asking(metadata=beside))
        stream = await client.post(chat, json=asking("abc", stream=True))
        own = {"cache_salt": "another's", "extra_body": {"cache_salt": "another's"}}
        plain = await client.post(chat, json=asking(**own))
        refused = await client.post(chat, json=asking("abc"))
        wrong = await client.post(chat, json=asking(documents=3))
        bodies = [json.loads(one.body) for one in engines[0].received if one.method == "POST"]
        for _ in range(100):
            await asyncio.sleep(0.1)
            told = (tmp_path / "reported").read_text() if (tmp_path / "reported").exists() else ""
            if told.startswith("3"):
                break
    assert [one.status_code for one in (first, second, stream, plain)] == [200] * 4
    shown = [one["messages"][-1]["content"] for one in bodies]
    assert [shown[0].index(f"{one} says") for one in "abc"] == [
        shown[1].index(f"{one} says") for one in "abc"
    ]
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    assert stream.text.endswith("data: [DONE]\n\n")
    assert shown[3] == "Which?"
    assert all("documents" not in one for one in bodies)
    assert len({one["cache_salt"] for one in bodies}) == 1
    assert "another's" not in str(bodies)
    assert (refused.status_code, wrong.status_code) == (400, 400)
    assert "documents must be a list" in wrong.text
    assert told == "3 3"
