"""A job with strikes: nobody else may be struck when its worker dies again."""

from headwater.schemas import keys
from redis import Redis

from tests.worker.intake.conftest import Stations, Submit, part, types_of, wait_for_entries


def _strike(redis: Redis, station: Stations) -> None:
    """Let a worker die with the first job of the queue."""
    victim = station()
    victim.claim()
    redis.delete(keys.worker_key(victim.worker_id))
    station().maintenance.run_once()


def test_a_struck_job_waits_until_every_other_has_told_something(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    worker = station()
    quiet = submit()
    worker.claim()
    struck = submit()
    _strike(redis, station)

    assert not worker.claim_next()
    assert worker.inbox.empty()
    assert types_of(redis, struck) == ["started"]

    worker.publisher.delta(quiet, [part(0, 1)])
    wait_for_entries(redis, quiet, 2)
    while worker.publisher.silent_claims():
        pass
    claim = worker.claim()
    assert (claim.job_id, claim.strikes) == (struck, 1)


def test_no_job_is_claimed_while_a_struck_one_has_told_nothing(
    redis: Redis, station: Stations, submit: Submit
) -> None:
    struck = submit()
    _strike(redis, station)
    worker = station()
    innocent = submit()
    assert worker.claim().job_id == struck

    assert not worker.claim_next()
    assert types_of(redis, innocent) == []

    worker.publisher.delta(struck, [part(0, 1)])
    wait_for_entries(redis, struck, 3)
    while worker.publisher.silent_claims():
        pass
    assert worker.claim().job_id == innocent
