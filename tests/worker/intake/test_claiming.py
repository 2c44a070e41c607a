"""Which job is claimed next, and when none is."""

import pytest
from headwater.schemas import (
    keys,
)
from redis import Redis

from .conftest import (
    FINISHED,
    QUEUE,
    Stations,
    Submit,
)


def test_nothing_is_claimed_beyond_the_capacity(station: Stations, submit: Submit) -> None:
    for _ in range(3):
        submit()
    worker = station(max_claims=2)
    worker.claim()
    worker.claim()

    assert not worker.claim_next()


def test_nothing_is_claimed_while_rq_is_suspended(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    submit()
    worker = station()
    redis.set("rq:suspended", 1)

    assert not worker.claim_next()
    redis.delete("rq:suspended")
    assert worker.claim()


def test_higher_classes_come_first_and_namespaces_take_turns(
    station: Stations, submit: Submit
) -> None:
    for _ in range(4):
        submit(namespace="loud")
    quiet = submit(namespace="quiet")
    urgent = submit(priority="high", namespace="loud")
    worker = station()

    order = [worker.claim().job_id for _ in range(3)]

    assert order[0] == urgent
    assert quiet in order[1:3]


def test_an_empty_queue_leaves_the_active_ones_and_comes_back(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    job_id = submit()
    worker = station()
    worker.claim()
    worker.maintenance.run_once()
    assert redis.smembers(keys.active_queues_key("m")) == {QUEUE.encode()}
    worker.publisher.end(job_id, FINISHED)
    assert worker.publisher.wait_until_closed(10)

    worker.maintenance.run_once()
    assert redis.smembers(keys.active_queues_key("m")) == set()
    again = submit()

    assert worker.claim().job_id == again


@pytest.mark.parametrize("status", [None, "canceled", "started"])
def test_an_id_whose_job_is_not_queued_is_dropped_at_once(
    redis: Redis, station: Stations, submit: Submit, status: str | None
) -> None:
    """A cancelled job, one that is gone, or one that was listed twice lies nowhere any more."""
    job_id = submit()
    if status is None:
        redis.delete(f"rq:job:{job_id}")
    else:
        redis.hset(f"rq:job:{job_id}", "status", status)

    assert station().claim_next()

    assert redis.llen(f"rq:queue:{QUEUE}") == 0
    assert redis.llen(f"rq:queue:{QUEUE}:intermediate") == 0
