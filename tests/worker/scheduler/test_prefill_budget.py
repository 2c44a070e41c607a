from collections.abc import Callable

from headwater.worker.scheduler.placement import Placement
from headwater.worker.scheduler.prefill import (
    CRUMB,
    FIRST_BUDGET,
    MIN_BUDGET,
    PrefillBudget,
    share_out,
)
from headwater.worker.sequence import Sequence

Make = Callable[..., Sequence]


def shares(make_sequence: Make, wants: list[int], budget: int) -> list[int]:
    """Return what each of some sequences, the oldest first, gets of the budget."""
    wanted = [
        (Placement(make_sequence([1]), None, order, (1,)), num) for order, num in enumerate(wants)
    ]
    granted = dict(share_out(wanted, budget))
    return [granted.get(placement, 0) for placement, _ in wanted]


def test_a_step_that_took_no_time_is_survived() -> None:
    budget = PrefillBudget(100, 2_048)
    budget.observe(0.0, 128, 3)

    assert budget.num_tokens(3) == 2_048


def test_the_budget_follows_the_measured_rate() -> None:
    budget = PrefillBudget(100, 10_000)
    assert budget.num_tokens(0) == FIRST_BUDGET
    for _ in range(50):
        budget.observe(0.001 * 100, 100, 0)

    # 90 ms of the 100 are planned for, at 1 ms a token; three times that where nobody decodes. Both
    # are rounded down to a multiple of 16.
    assert budget.num_tokens(1) == 80
    assert budget.num_tokens(0) == 256


def test_decoding_rows_take_their_share_of_the_step() -> None:
    budget = PrefillBudget(200, 10_000)
    for _ in range(50):
        budget.observe(0.08, 0, 8)
        budget.observe(0.08 + 0.001 * 100, 100, 8)

    assert budget.num_tokens(8) == 96
    assert budget.num_tokens(0) == 528


def test_prefill_goes_on_where_decoding_alone_takes_the_target() -> None:
    budget = PrefillBudget(10, 10_000)
    budget.observe(0.5, 0, 8)
    budget.observe(0.6, 100, 8)

    assert budget.num_tokens(8) == MIN_BUDGET


def test_half_is_the_oldests_and_the_shortest_come_first(make_sequence: Make) -> None:
    assert shares(make_sequence, [1_000, 50, 300, 20], 200) == [100, 50, 30, 20]
    assert shares(make_sequence, [1_000, 200, 300, 40], 200) == [100, 60, 0, 40]
    assert shares(make_sequence, [], 200) == []


def test_what_is_left_of_a_budget_goes_to_the_next(make_sequence: Make) -> None:
    assert shares(make_sequence, [40, 1_000], 100) == [40, 60]
    assert shares(make_sequence, [1_000, 30], 100) == [70, 30]


def test_no_prompt_is_computed_in_crumbs_beside_others(make_sequence: Make) -> None:
    left = CRUMB - 1

    assert shares(make_sequence, [100 - left, 1_000], 100) == [100 - left, 0]
    assert shares(make_sequence, [1_000], left) == [left]
