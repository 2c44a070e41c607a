"""Where rows whose state can't be cut later leave copies of it, and who goes on from them."""

from collections.abc import Callable
from typing import Any

import pytest
from headwater.worker.scheduler import SchedulerSettings
from headwater.worker.segment import CacheKind

Make = Callable[..., Any]


def prompt(tag: int, num_tokens: int) -> list[int]:
    return [tag * 1_000_000 + index for index in range(num_tokens)]


@pytest.fixture
def worker(make_worker: Make) -> Any:
    return make_worker(
        kind=CacheKind.SNAPSHOTS,
        settings=SchedulerSettings(snapshot_stride=32, max_prefill_tokens=10_000),
    )


def test_a_state_is_kept_at_every_stride_and_before_the_prompts_last_token(
    worker: Any, make_sequence: Make
) -> None:
    sequence = make_sequence(prompt(1, 100), max_tokens=1)
    worker.add(sequence)
    commits = []
    while not worker.scheduler.is_idle or worker.unread:
        worker.step()
        commits += [(commit.start, commit.end) for commit in worker.plan.commits]

    assert commits == [(0, 32), (32, 64), (64, 96), (96, 99)]


def test_another_prompt_goes_on_from_the_deepest_stride_below_the_fork(
    worker: Any, make_sequence: Make
) -> None:
    worker.add(make_sequence(prompt(1, 100), max_tokens=1))
    worker.run()
    other = make_sequence([*prompt(1, 90), *prompt(2, 20)], max_tokens=1)
    worker.add(other)
    worker.run()

    assert other.num_cached_tokens == 64


def test_the_next_turn_goes_on_where_the_last_answer_ended(
    worker: Any, make_sequence: Make
) -> None:
    first = make_sequence(prompt(1, 50), max_tokens=8)
    worker.add(first)
    worker.run()
    tokens = [*first.job.prompt_token_ids, *first.output_token_ids]
    second = make_sequence([*tokens, *prompt(2, 5)], max_tokens=1)
    worker.add(second)
    worker.run()

    # The last token was never fed back.
    assert second.num_cached_tokens == len(tokens) - 1


def test_prompts_that_arrive_together_compute_what_they_share_once(
    worker: Any, make_sequence: Make
) -> None:
    shared = prompt(1, 75)
    worker.add(*(make_sequence([*shared, *prompt(tag, 10)]) for tag in range(2, 10)))
    worker.run()

    assert worker.engine.num_prompt_tokens == 75 + 8 * 10
    worker.check_baseline()


def test_an_identical_prompt_computes_its_last_token_only(worker: Any, make_sequence: Make) -> None:
    worker.add(make_sequence(prompt(1, 80)))
    worker.run()
    before = worker.engine.num_prompt_tokens
    worker.add(make_sequence(prompt(1, 80)))
    worker.run()

    assert worker.engine.num_prompt_tokens == before + 1
