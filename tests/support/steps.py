"""How much work a call does, counted in steps: the same on any machine, however busy it is."""

import sys
import threading


def steps(call):
    """Return how many lines of Python, and functions of libraries, a call runs in this thread."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    def profile(frame, event, argument):
        nonlocal count
        count += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    assert threading.current_thread() is threading.main_thread()
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


def growth(prepare, size):
    """Return by what the steps of a call grow when its input is twice as large.

    Args:
        prepare: From a size to the call; its own work does not count.
        size: The smaller size.
    """
    smaller, larger = steps(prepare(size)), steps(prepare(2 * size))
    return larger / smaller
