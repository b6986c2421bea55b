from ctxreuse.memory.points import WriteLedger


def after(prompts: int, gained: int = 0) -> WriteLedger:
    """Return a ledger after prompts that read and wrote nothing, of 1,000 tokens each."""
    ledger = WriteLedger(0.25, 0.9)
    for number in range(prompts):
        ledger.note(1_000, 0, 0, gained if number == 0 else 0)
    return ledger


def test_the_first_prompts_may_write_one_of_them_whole():
    assert after(0).most(1_000) == 1_000
    assert after(15).most(500) == 1_000
    assert after(16).most(1_000) == 0
    ledger = after(1)
    ledger.note(1_000, 0, 900)
    assert ledger.most(1_000) == 100


def test_what_would_have_been_gained_may_be_paid_in_part_up_to_two_writes():
    assert after(20, gained=1_000).most(1_000) == 900  # of 0.9 a token a quarter, at 0.25 a token
    most = after(20, gained=100_000).most(1_000)
    assert 2_000 < most < 2_100


def test_losses_of_a_policy_without_limits_need_not_be_made_up_for():
    ledger = after(20)
    ledger.note(1_000, 0, 0, 0, 100_000)
    ledger.note(1_000, 0, 0, 1_000, 0)
    assert ledger.most(1_000) == 900


def test_what_was_saved_may_be_spent():
    ledger = after(20)
    ledger.note(1_000, 1_000, 0)
    assert (ledger.saved, ledger.most(1_000)) == (900, 3_600)


def test_an_early_loss_is_forgiven_in_the_end():
    ledger = after(20, gained=100_000)
    ledger.note(1_000, 0, int(ledger.most(1_000)))
    assert ledger.most(1_000) < 2
    for _ in range(2_000):
        ledger.note(1_000, 0, 0)
    assert ledger.most(1_000) > 1_000


def test_writing_that_costs_nothing_has_no_limit():
    assert WriteLedger(0.0, 0.9).most(1_000) == float("inf")
