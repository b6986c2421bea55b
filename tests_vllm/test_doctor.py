"""`ctxreuse doctor` finds a real server healthy, and sees the prompts of others."""

from __future__ import annotations

import threading

from engine import Engine

from ctxreuse.measure.doctor.examination import examine
from ctxreuse.measure.doctor.findings import Verdict
from ctxreuse.measure.doctor.probe import DoctorConfig


def test_a_server_that_is_started_as_documented_is_healthy(engine: Engine) -> None:
    announced: list[str] = []
    config = DoctorConfig(base_url=engine.base_url, quiet_s=0.2, timeout_s=300)
    found = {one.check: one for one in examine(config, announced.append)}
    assert {one.verdict for one in found.values()} == {Verdict.OK}, found
    assert len(announced) == 1
    cached = found["prefix cache"].figures["cached_tokens"]
    prompt = found["prefix cache"].figures["prompt_tokens"]
    assert isinstance(cached, int)
    assert isinstance(prompt, int)
    assert cached == (prompt - 1) // engine.block_size * engine.block_size


def test_prompts_of_others_are_seen_while_it_is_quiet(engine: Engine) -> None:
    other = threading.Timer(1.0, engine.chat, [[{"role": "user", "content": "Hello. " * 40}]])
    other.start()
    config = DoctorConfig(metrics_url=f"{engine.root_url}/metrics", quiet_s=5)
    found = {one.check: one for one in examine(config, print)}
    other.join()
    assert found["metrics"].verdict is Verdict.OK
    assert found["other processes"].verdict is Verdict.UNKNOWN
    assert found["other processes"].figures["foreign_prompt_tokens"]
