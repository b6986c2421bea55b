"""`ctxreuse doctor` on logs in a real Redis server, called as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_servers import PASSWORD, RedisServer, free_port, redis_server
from shared_logs import asked, caught_up, sharing

from ctxreuse.measure.doctor.probe import LogWatch
from ctxreuse.sharing import RedisLog

SECRET = "a secret of at least 16 bytes"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as one:
        yield one


@pytest.fixture
def examine(run: Any) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return a function that runs the command; it gives the exit code and the only check."""

    def examine_log(*arguments: Any) -> tuple[int, dict[str, Any]]:
        code, out, err = run("doctor", *arguments, "--watch", "0.05", "--timeout", "2", "--json")
        assert SECRET not in out + err
        assert PASSWORD not in out + err
        [check] = json.loads(out)["checks"]
        return code, check

    return examine_log


def written_by(url: str, planners: int, secret: str = SECRET, **options: Any) -> None:
    group = sharing(RedisLog(url, secret=secret, **options), planners)
    for planner in group:
        for letters in ("abc", "cab", "xyz"):
            planner.plan(asked(letters))
    caught_up(*group)


def test_planners_are_counted_without_their_secret(server: RedisServer, examine: Any) -> None:
    written_by(server.url, 3)
    code, check = examine("--shared-log", server.url, "--workers", 3)
    assert (code, check["verdict"]) == (0, "ok")
    assert check["found"] == "3 planners wrote the latest of 9 entries of the log"
    assert check["figures"]["log_entries"] == 9
    code, check = examine("--shared-log", server.url, "--workers", 4)
    assert (code, check["verdict"]) == (1, "problem")
    assert "4 processes should" in check["found"]
    assert "RedisLog(url, secret=...)" in check["remedy"]


def test_the_address_may_come_from_the_environment(
    server: RedisServer, examine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.Redis.from_url(server.url).config_set("requirepass", PASSWORD)
    url = server.url.replace("unix://", f"unix://:{PASSWORD}@")
    written_by(url, 2)
    monkeypatch.setenv("CTXREUSE_SHARED_LOG", url)
    code, check = examine("--workers", 2)
    assert (code, check["found"]) == (0, "2 planners wrote the latest of 6 entries of the log")


def test_a_log_of_one_engine_of_a_pool_has_its_own_stream(
    server: RedisServer, examine: Any
) -> None:
    written_by(server.url, 2, stream="answers:engine-1")
    code, check = examine("--shared-log", server.url, "--stream", "answers:engine-1")
    assert (code, check["figures"]["log_writers"]) == (0, 2)
    code, check = examine("--shared-log", server.url, "--stream", "answers:engine-2")
    assert code == 1
    assert "no process has written to it" in check["found"]


def test_processes_with_different_secrets_are_a_problem(server: RedisServer, examine: Any) -> None:
    written_by(server.url, 1)
    written_by(server.url, 1, "another secret, by mistake")
    code, check = examine("--shared-log", server.url, "--workers", 2)
    assert code == 1
    assert "2 secrets" in check["found"]
    assert "the same secret" in check["remedy"]


def test_entries_that_no_planner_wrote_are_a_problem(server: RedisServer, examine: Any) -> None:
    written_by(server.url, 1)
    client = redis.Redis.from_url(server.url)
    client.xadd("ctxreuse", {"a field": "of another program"})
    [(_, fields)] = client.xrange("ctxreuse", count=1)
    client.xadd("ctxreuse", {name: b"\x03" + entry[1:] for name, entry in fields.items()})
    code, check = examine("--shared-log", server.url)
    assert code == 1
    assert "2 of the latest entries of the log cannot be read" in check["found"]


def test_what_comes_while_it_looks_is_counted_once(server: RedisServer) -> None:
    written_by(server.url, 1)
    log = LogWatch(server.url)
    log.read()
    written_by(server.url, 1)
    log.end()
    assert (log.appended, log.entries, log.writers, log.secrets) == (3, 6, 2, 1)


def test_a_server_away_or_refusing_is_a_problem_with_why(server: RedisServer, examine: Any) -> None:
    away = f"redis://user:{PASSWORD}@127.0.0.1:{free_port()}/0"
    code, check = examine("--shared-log", away)
    assert code == 1
    assert check["found"].endswith("there is no connection")
    assert check["remedy"] == "start the server, or mend the URL"
    redis.Redis.from_url(server.url).config_set("requirepass", PASSWORD)
    code, check = examine("--shared-log", server.url)
    assert code == 1
    assert check["found"].endswith("the user or password is wrong")
    assert check["remedy"] == "mend the URL"


@pytest.mark.parametrize(
    "url",
    ["redis://host:99999999", f"postgres://:{PASSWORD}@host", f"redis://:{PASSWORD}@host?x=y"],
)
def test_an_address_that_is_none_is_a_line_that_shows_no_password(run: Any, url: str) -> None:
    code, out, err = run("doctor", "--shared-log", url)
    assert (code, out) == (2, "")
    assert err.startswith("ctxreuse: url has" if "?" in url else "ctxreuse: url is")
    assert PASSWORD not in err


def test_a_stream_of_a_file_is_refused(run: Any, tmp_path: Path) -> None:
    code, _, err = run("doctor", "--shared-log", tmp_path / "sent.sqlite", "--stream", "answers")
    assert code == 2
    assert "--stream" in err
