import gc
import importlib
import os
import sys
from threading import Event, Thread
from typing import Any
from weakref import ref

import pytest
from forked import in_children

from ctxreuse.context.fork_safety import (
    ForkSafeLock,
    importing_late,
    process_name,
    renew_after_fork,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Register:
    """A state in two parts, which a fork can find out of step."""

    def __init__(self) -> None:
        self.lock = ForkSafeLock(self.forget)
        self.forget()

    def forget(self) -> None:
        self.names: list[str] = []
        self.count = 0


def test_a_state_that_another_thread_was_changing_is_empty_in_a_child_and_the_lock_is_free(caplog):
    register = Register()
    is_half_changed, may_go_on = Event(), Event()

    def change() -> None:
        with register.lock:
            register.names.append("a")
            is_half_changed.set()
            may_go_on.wait()
            register.count += 1

    def child(number: int) -> tuple[list[str], int, list[str]]:
        with register.lock:
            return register.names, register.count, caplog.messages

    thread = Thread(target=change)
    thread.start()
    is_half_changed.wait()
    answers = in_children(2, child)
    may_go_on.set()
    thread.join()
    log = "Register was in use by another thread when this process was forked; it is empty here"
    assert answers == [([], 0, [log])] * 2
    assert (register.names, register.count) == (["a"], 1)


def test_a_state_that_nobody_was_changing_is_a_childs_too():
    register = Register()
    register.names.append("a")

    def child(number: int) -> list[str]:
        with register.lock:
            return register.names

    assert in_children(1, child) == [["a"]]


def test_a_thread_that_forks_inside_its_own_lock_goes_on_with_its_change_in_the_child():
    register = Register()

    def child(number: int) -> list[str]:
        register.names.append("b")
        return register.names

    with register.lock:
        register.names.append("a")
        assert in_children(1, child) == [["a", "b"]]
    with register.lock:
        assert register.names == ["a"]


def test_locks_and_methods_to_call_after_a_fork_do_not_keep_their_owners_alive():
    register = Register()
    renew_after_fork(register.forget)
    gc.disable()  # no cycle either
    try:
        owner = ref(register)
        del register
        assert owner() is None
    finally:
        gc.enable()


def test_each_child_and_grandchild_has_a_name_of_its_own():
    def child(number: int) -> list[str]:
        return [process_name(), *in_children(2, lambda number: process_name())]

    assert process_name() == ""
    names = [name for names in in_children(3, child) for name in names]
    assert len(set(names)) == 9
    assert all(name.endswith(".") for name in names)
    first = names[0]
    assert names[:3] == [first, f"{first}1.", f"{first}2."]


def test_threads_that_fork_at_the_same_time_name_their_children_apart():
    names: list[str] = []

    def fork() -> None:
        names.extend(in_children(5, lambda number: process_name()))

    threads = [Thread(target=fork) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 15


def test_a_fork_waits_for_a_late_import_that_another_thread_has_begun(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text(
        "import import_signals\nimport_signals.begun.set()\nimport_signals.go_on.wait()\n"
    )
    signals: Any = type(sys)("import_signals")
    signals.begun, signals.go_on = Event(), Event()
    monkeypatch.setitem(sys.modules, "import_signals", signals)
    monkeypatch.syspath_prepend(tmp_path)

    def import_late() -> None:
        with importing_late:
            importlib.import_module("imported_late")

    importing = Thread(target=import_late)
    importing.start()
    signals.begun.wait()
    children: list[str] = []
    forking = Thread(
        target=lambda: children.extend(
            in_children(1, lambda number: importlib.import_module("imported_late").__name__)
        )
    )
    forking.start()
    signals.go_on.set()
    forking.join()
    importing.join()
    del sys.modules["imported_late"]
    assert children == ["imported_late"]


def test_the_parent_of_a_child_that_was_forked_by_no_python_code_is_told_apart_by_its_pid(
    monkeypatch,
):
    """A server in C runs the hooks of the child, and may not run those before the fork."""
    import ctxreuse.context.fork_safety as fork_safety

    monkeypatch.setattr(fork_safety, "_name", "")
    fork_safety._renew_all()
    assert process_name() == f"{os.getpid()}."
