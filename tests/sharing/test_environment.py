"""Settings by environment variables, for those who cannot change a program."""

import logging
import pickle

import pytest
from langchain_core.language_models import FakeListChatModel

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.measure.replay.policies import OURS_ONLINE
from ctxreuse.pipeline.engine_options import planner_for
from ctxreuse.serving import EnginePool
from ctxreuse.sharing import SQLiteLog
from ctxreuse.sharing.environment import _say
from langchain_ctxreuse import ReuseChatModel

NAMES = ("MODE", "CAPACITY_TOKENS", "SHARED_LOG", "SHARED_LOG_SECRET")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(f"CTXREUSE_{name}", raising=False)
    _say.cache_clear()


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


def test_a_program_s_planners_do_as_the_environment_says_and_commands_not(monkeypatch, tmp_path):
    """What the program sets in code holds; that the variable is not used is said once."""
    path, texts = tmp_path / "sent.sqlite", ["the Seine " * 40, "the Tiber " * 40]
    monkeypatch.setenv("CTXREUSE_MODE", "shadow")
    monkeypatch.setenv("CTXREUSE_CAPACITY_TOKENS", "200_000")
    planner = ReusePlanner()
    for order in (texts, texts[::-1]):
        assert (
            planner.plan(ContextRequest(order, "?")).messages()[-1]["content"].startswith(order[0])
        )
    assert planner_for(planner) is planner
    copied = pickle.loads(pickle.dumps(planner))
    assert [one.mode for one in (planner, copied, planner.sibling())] == ["shadow"] * 3
    assert copied._settings.capacity_tokens == planner._settings.capacity_tokens == 200_000
    commands = OURS_ONLINE.planner(deduplicate=True, capacity_tokens=None)
    assert (commands.mode, commands._settings.capacity_tokens) == ("active", None)
    monkeypatch.setenv("CTXREUSE_SHARED_LOG", str(path))
    assert ReusePlanner(shared_log=SQLiteLog(tmp_path / "other")).shared_log is None
    assert not path.exists()


def test_a_variable_that_is_not_used_is_said_once(monkeypatch, caplog, tmp_path):
    log = SQLiteLog(tmp_path / "own")
    variables = {"MODE": "shadow", "CAPACITY_TOKENS": "7", "SHARED_LOG": str(tmp_path / "other")}
    for name, value in variables.items():
        monkeypatch.setenv(f"CTXREUSE_{name}", value)
    for _ in range(2):
        planner = ReusePlanner(mode="active", capacity_tokens=9, shared_log=log)
        assert (planner.mode, planner._settings.capacity_tokens) == ("active", 9)
        assert planner.shared_log is log
    unused = "The environment variable CTXREUSE_{} is set and not used: the program sets it in code"
    assert caplog.messages == [f"{unused.format(name)}." for name in variables]
    _say.cache_clear()
    ReusePlanner(mode="shadow", capacity_tokens=7)  # as the variables say
    assert [one.endswith("mode nothing is shared.") for one in caplog.messages[3:]] == [True]


def test_a_misspelt_variable_is_named_once(monkeypatch, caplog):
    monkeypatch.setenv("CTXREUSE_SHARD_LOG", "x")
    monkeypatch.setenv("CTXREUSE_OF_THE_PROGRAM", "x")
    for _ in range(2):
        ReusePlanner()
    assert [one.getMessage() for one in caplog.records] == [
        "The environment variable CTXREUSE_SHARD_LOG is unknown and not used "
        "(did you mean 'SHARED_LOG'?)."
    ]


@pytest.mark.parametrize(
    ("name", "value"), [("MODE", "shadow"), ("SHARED_LOG", "{folder}/sent.sqlite")]
)
def test_a_program_that_saves_its_planner_goes_on_with_any(
    monkeypatch, caplog, tmp_path, name, value
):
    monkeypatch.setenv(f"CTXREUSE_{name}", value.format(folder=tmp_path))
    file = tmp_path / "sent.planner"
    planner = ReusePlanner.load(file)  # missing, and nothing fails
    planner.save(file)
    assert not file.exists()
    assert "no file is saved or loaded" in caplog.text


def test_capacity_and_shared_log_are_read(monkeypatch, tmp_path):
    path = tmp_path / "sent.sqlite"
    monkeypatch.setenv("CTXREUSE_CAPACITY_TOKENS", " ")
    assert ReusePlanner()._settings.capacity_tokens is None
    monkeypatch.setenv("CTXREUSE_SHARED_LOG", str(path))
    planner = ReusePlanner()
    assert planner.catch_up(timeout_s=10)
    assert planner.sharing.told == 0
    assert path.exists()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MODE", "shadwo", "there is no mode 'shadwo' (str); choose one of 'active', 'shadow'"),
        ("CAPACITY_TOKENS", "many", "it is 'many' (str); set it to the number of tokens that"),
        ("CAPACITY_TOKENS", "-1", "it is '-1' (str); set it to the number of tokens that"),
        ("CAPACITY_TOKENS", "9" * 5_000, "set it to the number of tokens that"),
        ("CAPACITY_TOKENS", "0_0", "it is '0_0' (str); set it to the number of tokens that"),
        ("SHARED_LOG", "/no/such/folder/log", "/no/such/folder/log"),
        (
            "SHARED_LOG",
            "redis://user:pass-word@cache.invalid/0",
            "CTXREUSE_SHARED_LOG_SECRET is not set; set that to the same secret in all processes",
        ),
        ("SHARED_LOG", "postgres://user:pass-word@h/0", "url is 'postgres://h/0'; give one such"),
    ],
)
def test_a_wrong_value_is_named_once_and_fails_nobody(monkeypatch, caplog, name, value, said):
    variable = f"CTXREUSE_{name}"
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.ERROR, "ctxreuse"):
        for _ in range(2):
            planner = ReusePlanner()
    assert planner.savings.mode == ("shadow" if name == "MODE" else "active")
    assert (planner._settings.capacity_tokens, planner.shared_log) == (None, None)
    for one in (planner, planner.sibling("an engine")):
        assert one.catch_up() == (not one.sharing.faults) == (name != "SHARED_LOG")
    [message] = caplog.messages
    assert message.startswith(f"The environment variable {variable} is wrong: ")
    assert said in message
    assert "pass-word" not in message
    assert len(message) < 400
