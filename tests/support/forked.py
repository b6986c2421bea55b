"""Running code in forked children, and threads that keep the parent busy meanwhile."""

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, Pipe, wait
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

BOUND_S = 40.0
"""A child that has not ended by then hangs; a sound one takes a fraction of a second."""


def in_children(
    number: int, work: Callable[[int], Any], load: Callable[[int], object] | None = None
) -> list[Any]:
    """Return what the children of as many forks return.

    Args:
        number: How many children.
        work: What each does, given its number.
        load: What four threads do again and again while this one forks, each given its number.

    Raises:
        AssertionError: Children hang, which are then killed, or have raised.
    """
    with nullcontext() if load is None else _busy_threads(load):
        pipes = dict(_fork(child, work) for child in range(number))
    answers: dict[int, Any] = {}
    until = monotonic() + BOUND_S
    waiting = {pipe: child for child, (_, pipe) in enumerate(pipes.items())}
    while waiting and (ready := wait(list(waiting), max(0.0, until - monotonic()))):
        for pipe in ready:
            child = waiting.pop(pipe)
            try:
                answers[child] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                answers[child] = (False, "the child died")
    for pid in pipes:
        if pipes[pid] in waiting:
            os.kill(pid, signal.SIGUSR1)  # shows where it hangs
            sleep(0.2)
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pipes[pid].close()
    assert not waiting, f"{len(waiting)} of {number} children hang"
    for is_answer, answer in answers.values():
        assert is_answer, answer
    return [answers[child][1] for child in range(number)]


def _fork(child: int, work: Callable[[int], Any]) -> tuple[int, Connection]:
    read, write = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        write.close()
        return pid, read
    sys.dont_write_bytecode = True  # where no file may grow, Python would leave half of it
    try:
        faulthandler.register(signal.SIGUSR1)
        try:
            answer = (True, work(child))
        except BaseException:
            answer = (False, traceback.format_exc())
        write.send_bytes(pickle.dumps(answer))
    finally:
        os._exit(0)


@contextmanager
def _busy_threads(work: Callable[[int], object]) -> Iterator[None]:
    is_over = Event()
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            while not is_over.is_set():
                work(number)
        except BaseException as error:
            errors.append(error)

    running = [Thread(target=run, args=(number,)) for number in range(4)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in running:
            thread.join()
    assert not errors, errors
