"""A log in a real Redis server: whatever becomes of the server, planners go on and catch up."""

import logging
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from planning_helpers import assert_keeps_the_promises
from redis_servers import PASSWORD, RedisServer, certificate, free_port, redis_server
from shared_logs import asked, caught_up, order, sharing, until

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError, MissingExtraError, SharedLogError
from ctxreuse.sharing import RedisLog

pytestmark = pytest.mark.usefixtures("paper_words")

SECRET = "a secret of at least 16 bytes"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as one:
        yield one


def log_at(url: str, **options: Any) -> RedisLog:
    return RedisLog(url, **{"secret": SECRET, "timeout_s": 2.0, **options})


def said(caplog: pytest.LogCaptureFixture, log: RedisLog) -> str:
    """Return the only line on a log; planners of tests before may speak of theirs."""
    lines = [record.getMessage() for record in caplog.records if record.name == "ctxreuse"]
    [one] = [line for line in lines if repr(log) in line]
    return one


def assert_goes_on_alone(planner: ReusePlanner) -> None:
    for letters in ("abc", "cab", "bca"):
        plan = planner.plan(asked(letters))
        assert_keeps_the_promises(plan)
        assert order(plan) == "abc"


def test_a_server_that_is_away_at_the_start_is_caught_up_with(server, caplog):
    server.stop()
    log = log_at(server.url)
    one, other = sharing(log)
    assert_goes_on_alone(one)
    until(lambda: one.sharing.faults > 1 and other.sharing.faults == 0)
    assert one.sharing.untold == 3
    assert "there is no connection" in said(caplog, log)
    server.start()
    caught_up(one, other)
    assert order(other.plan(asked("bac"))) == "abc"
    assert (one.sharing.lost, one.sharing.untold) == (0, 0)


@pytest.mark.parametrize("how", ["FLUSHALL", "XTRIM", "an earlier clock"])
def test_a_stream_that_loses_what_was_read_is_read_on(server, caplog, how):
    client = redis.Redis.from_url(server.url)
    one, other = sharing(log_at(server.url))
    one.plan(asked("abc"))
    caught_up(one, other)
    if how == "XTRIM":
        one.plan(asked("def"))
        caught_up(one)
        client.xtrim("ctxreuse", 0, approximate=False)
    else:
        client.flushall()
    if how == "an earlier clock":  # of the machine that the server has moved to
        for number in (5, 6):
            client.xadd("ctxreuse", {"other": "entry"}, id=f"{number}-0")
        caught_up(other)
        assert other.sharing.gaps == 1
        client.xtrim("ctxreuse", 0, approximate=False)
    one.plan(asked("xyz"))
    caught_up(one, other)
    assert order(other.plan(asked("zyx"))) == "xyz"
    assert other.sharing.gaps >= 1
    assert other.sharing.faults == 0
    lines = [record.getMessage() for record in caplog.records if "emptied" in record.getMessage()]
    assert len(lines) <= 2, "each planner says it once"


def test_an_idle_planner_fetches_nothing_that_it_knows(server):
    client = redis.Redis.from_url(server.url)
    planners = sharing(log_at(server.url))
    planners[0].plan(asked([f"text {number}" for number in range(5_000)]))
    caught_up(*planners)
    before = client.info("stats")["total_net_output_bytes"]
    for _ in range(3):
        caught_up(*planners)
    assert client.info("stats")["total_net_output_bytes"] - before < 20_000  # an entry has 120,000


def _fill(client: redis.Redis) -> None:
    client.xadd("ctxreuse", {"a": "b"}, id="-".join([str(2**64 - 1)] * 2))
    client.xtrim("ctxreuse", maxlen=0)


SPOILT: dict[str, Any] = {
    "no stream; name another one": lambda client: client.set("ctxreuse", "a text"),
    "out of memory; give it more": lambda client: client.config_set("maxmemory", "1"),
    "read-only replica; name the primary": lambda client: (
        client.config_set("replica-serve-stale-data", "yes"),
        client.replicaof("127.0.0.1", str(free_port())),
    ),
    "may not do this; allow XADD": lambda client: client.acl_setuser(
        "default", enabled=True, commands=["+@all", "-xadd"], keys=["*"]
    ),
    "password is wrong": lambda client: client.config_set("requirepass", PASSWORD),
    "no such database; mend the number in the URL": None,
    "under the last id there is; delete the stream": _fill,
}


@pytest.mark.parametrize("reason", SPOILT)
def test_a_server_that_refuses_costs_no_plan_and_the_log_says_why(server, caplog, reason):
    url, spoil = server.url, SPOILT[reason]
    if spoil is None:
        url = url.partition("?")[0] + "?db=99"
    else:
        spoil(redis.Redis.from_url(url))
    log = log_at(url)
    planner = ReusePlanner(shared_log=log)
    assert_goes_on_alone(planner)
    until(lambda: planner.sharing.faults > 1)
    assert reason in said(caplog, log)
    assert "says" not in said(caplog, log)
    with pytest.raises(SharedLogError, match=reason):
        log.append([b"one"])


def test_entries_of_others_are_left_out_and_another_secret_is_said(server, caplog):
    client = redis.Redis.from_url(server.url)
    client.xadd("ctxreuse", {"a field": "of another program"})
    client.xadd("ctxreuse", {b"\xff\x00": b"\xff" * 100_000})
    ours, theirs = (
        ReusePlanner(shared_log=log_at(server.url, secret=secret))
        for secret in (SECRET, "another secret, by mistake")
    )
    ours.plan(asked("abc"))
    caught_up(ours, theirs)
    assert order(theirs.plan(asked("cba"))) == "cba"
    assert theirs.sharing.taken_in == 0
    assert theirs.sharing.unreadable == 3
    lines = [one.getMessage() for one in caplog.records]
    assert len([one for one in lines if "another secret" in one]) == 1
    assert not any("damaged" in one for one in lines)
    assert any(
        "an entry that no planner with its key has written; it is left" in one for one in lines
    )


def test_the_server_holds_no_text_and_no_plain_digest(server):
    [planner] = sharing(log_at(server.url), 1)
    planner.plan(asked("abc", tenant="a tenant", system="a system text"))
    caught_up(planner)
    client = redis.Redis.from_url(server.url)
    assert client.keys() == [b"ctxreuse"]
    held = b"".join(
        part for _, fields in client.xrange("ctxreuse") for one in fields.items() for part in one
    )
    for text in (b"says", b"a tenant", b"a system text", b"aaaa", b"request-0", SECRET.encode()):
        assert text not in held
    assert asked("a").blocks[0].key not in held


def test_a_user_needs_no_other_rights_than_the_documented_ones(server):
    redis.Redis.from_url(server.url).acl_setuser(
        "planner",
        enabled=True,
        passwords=[f"+{PASSWORD}"],
        commands=["-@all", "+xadd", "+xlen", "+xrange", "+multi", "+exec"],
        keys=["ctxreuse*"],
    )
    path = server.url.removeprefix("unix://")
    one, other = sharing(log_at(f"unix://planner:{PASSWORD}@{path}"))
    one.plan(asked("abc"))
    caught_up(one, other)
    assert order(other.plan(asked("cba"))) == "abc"
    assert one.sharing.faults == other.sharing.faults == 0


def test_no_password_and_no_secret_is_shown(caplog, tmp_path):
    url = f"redis://user:{PASSWORD}@127.0.0.1:{free_port()}/0"
    log = log_at(url)
    planner = ReusePlanner(shared_log=log)
    with caplog.at_level(logging.DEBUG):
        planner.plan(asked("abc"))
        until(lambda: planner.sharing.faults > 0)
    shown = [repr(log), str(log), said(caplog, log)]
    with pytest.raises(SharedLogError) as caught:
        log.read("", 1)
    error: BaseException | None = caught.value
    while error is not None:
        shown.append(str(error))
        error = error.__cause__ or error.__context__
    for one in shown:
        assert PASSWORD not in one
        assert SECRET not in one
    assert repr(log).startswith("RedisLog('redis://127.0.0.1:")
    assert pickle.loads(pickle.dumps(log)).secret == log.secret


@pytest.mark.parametrize(
    "url",
    [
        3, None, b"redis://user:pass-word-of-the-server@host", "", "host:6379", "http://host/",
        "redis:host", f"redis://user:{PASSWORD}/x@host:port", "redis://host:99999999",
        "redis://host?db=x", "redis://host?protocol=x", "redis://[host",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_showing_a_password(url):
    with pytest.raises(InvalidRequestError, match="url") as caught:
        log_at(url)
    assert PASSWORD not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "option", ["decode_responses=true", "socket_timeout=0", "password=x", "ssl_cert_reqs=none"]
)
def test_options_that_would_break_it_are_refused(option):
    with pytest.raises(InvalidRequestError, match=option.split("=")[0]):
        log_at(f"rediss://host?{option}")


@pytest.mark.parametrize("secret", ["", "short", b"15 bytes, so no", None, 3])
def test_a_secret_that_can_be_guessed_is_refused(secret):
    with pytest.raises(InvalidRequestError, match="secret") as caught:
        log_at("redis://host", secret=secret)
    assert "so no" not in str(caught.value)


def test_other_arguments_are_checked():
    for wrong in ({"stream": 3}, {"max_entries": 0}, {"timeout_s": 0}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            log_at("redis://host", **wrong)


def test_without_the_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"\[redis\]"):
        log_at("redis://host")


def test_tls_checks_the_certificate_and_the_name(tmp_path):
    made, key = certificate(tmp_path)
    port = free_port()
    options = (
        "--tls-port", str(port), "--tls-cert-file", str(made), "--tls-key-file", str(key),
        "--tls-ca-cert-file", str(made), "--tls-auth-clients", "no", "--bind", "127.0.0.1",
        "--requirepass", PASSWORD,
    )  # fmt: skip
    with redis_server(tmp_path, *options):
        url = f"rediss://:{PASSWORD}@localhost:{port}/0"
        one, other = sharing(log_at(f"{url}?ssl_ca_certs={made}"))
        one.plan(asked("abc"))
        caught_up(one, other)
        assert order(other.plan(asked("cba"))) == "abc"
        with pytest.raises(SharedLogError, match="no connection"):
            log_at(url).read("", 1)  # nobody knows who has signed it
        by_number = url.replace("localhost", "127.0.0.1")
        with pytest.raises(SharedLogError, match="no connection"):
            log_at(f"{by_number}?ssl_ca_certs={made}").read("", 1)  # it is for another name
