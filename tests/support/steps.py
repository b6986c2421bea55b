"""How much work a call does, counted in steps: the same on any machine, however busy it is."""

import sys
import threading


class StepCounter:
    """Counts the lines of Python, and functions of libraries, that run in this thread.

    Attributes:
        count: How many have run so far.
    """

    def __init__(self):
        self.count = 0

    def _trace(self, frame, event, argument):
        self.count += event == "line"
        return self._trace

    def _profile(self, frame, event, argument):
        self.count += event == "c_call"

    def __enter__(self):
        self._before = sys.gettrace(), sys.getprofile()
        assert threading.current_thread() is threading.main_thread()
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self._before[0])
        sys.setprofile(self._before[1])


def steps(call):
    with StepCounter() as counter:
        call()
    return counter.count


def growth(prepare, size):
    """Return by what the steps of a call grow when its input is twice as large.

    Args:
        prepare: From a size to the call; its own work does not count.
        size: The smaller size.
    """
    smaller, larger = steps(prepare(size)), steps(prepare(2 * size))
    return larger / smaller
