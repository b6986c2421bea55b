"""When an engine that keeps failing is left alone, on a clock that is moved by hand."""

from ctxreuse.serving.pool.circuit_breaker import CLOSED, HALF_OPEN, OPEN, CircuitBreaker


def opened(now=0.0, **arguments):
    """Return a circuit that has opened at a time, after one failure."""
    circuit = CircuitBreaker(failures=1, **arguments)
    circuit.begin(now)
    assert circuit.fail(now)
    return circuit


def states(circuit, *times):
    return [circuit.state(now) for now in times]


def test_it_rests_from_the_failure_that_opened_it_and_then_admits_one():
    circuit = opened(5.0, open_s=10)
    circuit.fail(9.0)  # one that was sent before: the rest grows no longer
    assert states(circuit, 5.0, 14.9, 15.0, 1e9) == [OPEN, OPEN, HALF_OPEN, HALF_OPEN]
    assert [circuit.admits(now) for now in (5.0, 14.9, 15.0)] == [False, False, True]
    circuit.begin(15.0)
    assert not circuit.admits(15.0)
    assert not circuit.admits(1e9)
    assert circuit.state(16.0) == HALF_OPEN


def test_a_trial_that_succeeds_closes_it_and_the_first_rest_counts_again():
    circuit = opened(open_s=10)
    circuit.begin(10.0)
    circuit.succeed()
    assert circuit.state(10.0) == CLOSED
    circuit.begin(10.0)
    assert circuit.admits(10.0)

    circuit = opened(open_s=10)
    circuit.begin(10.0)
    circuit.fail(10.0)
    circuit.begin(30.0)
    circuit.succeed()
    assert circuit.fail(30.0)
    assert states(circuit, 39.0, 40.0) == [OPEN, HALF_OPEN]


def test_a_trial_that_fails_doubles_the_rest_each_time_but_not_a_longer_first_one():
    circuit, now, rests = opened(open_s=100), 0.0, []
    for _ in range(4):
        rest = next(s for s in range(1, 1_000) if circuit.state(now + s) == HALF_OPEN)
        rests.append(rest)
        now += rest
        assert circuit.admits(now)
        circuit.begin(now)
        assert not circuit.fail(now)  # it was open all the time
        assert circuit.state(now) == OPEN
    assert rests == [100, 200, 300, 300]  # five minutes at most
    circuit = opened(open_s=600)
    circuit.begin(600.0)
    circuit.fail(600.0)
    assert states(circuit, 1_199.0, 1_200.0) == [OPEN, HALF_OPEN]


def test_an_engine_that_does_not_work_rests_at_once_and_no_longer_if_that_is_heard_again():
    circuit = CircuitBreaker(failures=3, open_s=10)
    assert [circuit.fail(now, at_once=True) for now in (5.0, 9.0)] == [True, False]
    assert states(circuit, 5.0, 14.9, 15.0) == [OPEN, OPEN, HALF_OPEN]
