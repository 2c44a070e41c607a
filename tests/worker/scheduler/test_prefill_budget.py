from headwater.worker.scheduler.prefill import FIRST_BUDGET, MIN_BUDGET, PrefillBudget


def test_a_step_that_took_no_time_is_survived() -> None:
    budget = PrefillBudget(100, 2_048)
    budget.observe(0.0, 128, 3)

    assert budget.num_tokens(3) == 2_048


def test_the_budget_follows_the_measured_rate() -> None:
    budget = PrefillBudget(100, 10_000)
    assert budget.num_tokens(0) == FIRST_BUDGET
    for _ in range(50):
        budget.observe(0.001 * 100, 100, 0)

    # 80 ms of the 100 are planned for, at 1 ms a token.
    assert budget.num_tokens(0) == 80


def test_decoding_rows_take_their_share_of_the_step() -> None:
    budget = PrefillBudget(100, 10_000)
    for _ in range(50):
        budget.observe(0.04, 0, 8)
        budget.observe(0.04 + 0.001 * 100, 100, 8)

    assert budget.num_tokens(8) == 32
    assert budget.num_tokens(0) == 80


def test_prefill_goes_on_where_decoding_alone_takes_the_target() -> None:
    budget = PrefillBudget(10, 10_000)
    budget.observe(0.5, 0, 8)
    budget.observe(0.6, 100, 8)

    assert budget.num_tokens(8) == MIN_BUDGET
