"""Settings by environment variables, for those who cannot change a program."""

import logging

import pytest
from langchain_core.language_models import FakeListChatModel

from ctxreuse import ReusePlanner
from ctxreuse.pipeline.environment import default_planner, planner_for
from ctxreuse.serving import EnginePool
from langchain_ctxreuse import ReuseChatModel

NAMES = ("MODE", "CAPACITY_TOKENS", "SHARED_LOG", "SHARED_LOG_SECRET")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(f"CTXREUSE_{name}", raising=False)


def wrapped():
    return ReuseChatModel(inner=FakeListChatModel(responses=["ok"]))


@pytest.mark.parametrize(("value", "mode"), [("", "active"), ("Shadow ", "shadow")])
def test_a_wrapped_model_does_as_the_environment_says(monkeypatch, value, mode):
    monkeypatch.setenv("CTXREUSE_MODE", value)
    model = wrapped()
    assert model.planner.savings.mode == mode
    assert model.invoke("Why?").content == "ok"
    pool = EnginePool(["http://engine.invalid/v1"], model="m")
    assert [planner.savings.mode for planner in pool.planners.values()] == [mode]


def test_a_program_that_makes_a_planner_decides_and_shadow_mode_shares_nothing(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("CTXREUSE_MODE", "shadow")
    own = ReusePlanner()
    assert own.savings.mode == "active"
    assert planner_for(own) is own
    path = tmp_path / "sent.sqlite"
    variables = {"CTXREUSE_MODE": "shadow", "CTXREUSE_SHARED_LOG": str(path)}
    assert default_planner(variables).shared_log is None
    assert not path.exists()


def test_capacity_and_shared_log_are_read(tmp_path):
    path = tmp_path / "sent.sqlite"
    variables = {"CTXREUSE_CAPACITY_TOKENS": "200_000", "CTXREUSE_SHARED_LOG": str(path)}
    planner = default_planner(variables)
    assert planner._settings.capacity_tokens == 200_000
    assert planner.catch_up(timeout_s=10)
    assert planner.sharing.told == 0
    assert path.exists()
    assert default_planner({}).shared_log is None
    assert default_planner({"CTXREUSE_CAPACITY_TOKENS": ""})._settings.capacity_tokens is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MODE", "shadwo", "it is 'shadwo' (str); set it to active or shadow, or unset it"),
        ("CAPACITY_TOKENS", "many", "it is 'many' (str); set it to the number of tokens that"),
        ("CAPACITY_TOKENS", "-1", "it is '-1' (str); set it to the number of tokens that"),
        ("CAPACITY_TOKENS", "9" * 5_000, "set it to the number of tokens that"),
        ("SHARED_LOG", "/no/such/folder/log", "/no/such/folder/log"),
        (
            "SHARED_LOG",
            "redis://user:pass-word@cache.invalid/0",
            "CTXREUSE_SHARED_LOG_SECRET is not set; set that to the same secret in all processes",
        ),
    ],
)
def test_a_wrong_value_is_named_once_and_fails_nobody(caplog, name, value, said):
    variable = f"CTXREUSE_{name}"
    with caplog.at_level(logging.ERROR, "ctxreuse"):
        for _ in range(2):
            planner = default_planner({variable: value})
    assert planner.savings.mode == ("shadow" if name == "MODE" else "active")
    assert planner._settings.capacity_tokens is None
    assert planner.shared_log is None
    [record] = caplog.records
    message = record.getMessage()
    assert message.startswith(f"The environment variable {variable} is wrong: ")
    assert said in message
    assert "pass-word" not in message
    assert len(message) < 400
