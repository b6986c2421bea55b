import pytest

from ctxreuse.measure.results.tables import Interval, bootstrap_interval


def test_the_interval_is_that_of_normal_theory_and_equal_scores_have_no_spread():
    scores = [0.0, 1.0] * 200  # the mean's standard error is 0.5 / sqrt(400) = 0.025
    interval = bootstrap_interval(scores)
    assert interval == bootstrap_interval(scores)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.004)
    assert interval.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.004)
    assert bootstrap_interval([0.25] * 3) == Interval(0.25, 0.25, 0.25)


def test_all_samples_are_drawn_where_they_do_not_fit_at_once():
    interval = bootstrap_interval([0.0, 1.0] * 300_000, resamples=3)
    assert interval.mean == 0.5
    assert 0.49 < interval.low <= interval.high < 0.51
