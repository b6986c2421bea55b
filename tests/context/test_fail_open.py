import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.fail_open import FailOpen

SECRET = "what the user asked"


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError(SECRET)

    __repr__ = __str__


def failing(error):
    def work():
        raise error

    return work


def failing_because_of(text):
    def work():
        try:
            {}[text]
        except KeyError as error:
            raise ValueError(f"no {text}") from error

    return work


def plain():
    return "plain"


def everything_in(record):
    """Return all that any handler or formatter could write of a record."""
    formatter = logging.Formatter("%(asctime)s %(pathname)s %(funcName)s %(message)s")
    return f"{formatter.format(record)} {vars(record)!r} {record.exc_text} {record.stack_info}"


def test_work_that_fails_is_replaced_logged_once_and_counted(caplog):
    fail_open = FailOpen("ReuseRetriever")
    for faults in (1, 2, 3):
        assert fail_open.attempt(failing(LookupError(SECRET)), plain) == "plain"
        assert fail_open.faults == faults
    assert fail_open.attempt(lambda: "planned", plain) == "planned"
    assert fail_open.faults == 3
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ctxreuse", logging.WARNING)
    line = failing.__code__.co_firstlineno + 2  # where it was raised
    assert record.getMessage() == (
        f"ReuseRetriever: planning failed with LookupError at test_fail_open.py:{line}; documents "
        "go through as retrieved. Further faults are only counted."
    )


def test_the_line_says_what_happens_instead(caplog):
    FailOpen("ReuseChatModel", "calls go through as given").attempt(failing(OSError()), plain)
    assert "ReuseChatModel: planning failed with OSError at " in caplog.text
    assert "; calls go through as given. " in caplog.text
    assert "documents" not in caplog.text


@given(st.text(min_size=4).map(lambda text: f"<{text}>"))
def test_no_text_of_the_error_or_its_causes_is_logged(text):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("ctxreuse")
    logger.addHandler(handler)
    try:
        for work in (failing(RuntimeError(text)), failing_because_of(text)):
            assert FailOpen("ReuseRetriever").attempt(work, plain) == "plain"
    finally:
        logger.removeHandler(handler)
    assert [record.exc_info for record in records] == [None, None]
    for record in records:
        written = everything_in(record)
        assert text not in written
        assert repr(text)[1:-1] not in written


def test_an_error_that_cannot_be_printed_is_a_fault_like_others(caplog):
    assert FailOpen("c").attempt(failing(UnprintableError()), plain) == "plain"
    assert "c: planning failed with UnprintableError at test_fail_open.py:" in caplog.text
    assert SECRET not in caplog.text


def test_endless_recursion_is_a_fault_like_others(caplog):
    def endless():
        return endless()

    assert FailOpen("c").attempt(endless, plain) == "plain"
    assert "with RecursionError at test_fail_open.py:" in caplog.text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_ends_the_program_or_the_task_passes_uncounted(caplog, kind):
    fail_open = FailOpen("c")
    with pytest.raises(kind):
        fail_open.attempt(failing(kind()), plain)
    assert (fail_open.faults, caplog.records) == (0, [])


def test_a_fault_of_the_replacement_is_the_callers(caplog):
    fail_open = FailOpen("c")
    with pytest.raises(LookupError, match="instead"):
        fail_open.attempt(failing(ValueError()), failing(LookupError("instead")))
    assert fail_open.faults == 1


def test_a_fault_met_elsewhere_can_be_noted(caplog):
    fail_open = FailOpen("c")
    fail_open.note(ValueError(SECRET))
    fail_open.note(ValueError(SECRET))
    assert fail_open.faults == 2
    assert caplog.messages == [
        "c: planning failed with ValueError at ?; documents go through as retrieved. "
        "Further faults are only counted."
    ]


def test_faults_of_many_threads_are_all_counted_and_logged_once(caplog):
    fail_open, together = FailOpen("c"), threading.Barrier(8)

    def serve(_):
        together.wait(timeout=10)
        return [fail_open.attempt(failing(ValueError()), plain) for _ in range(50)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(serve, range(8)))
    assert answers == [["plain"] * 50] * 8
    assert fail_open.faults == 400
    assert len(caplog.records) == 1
