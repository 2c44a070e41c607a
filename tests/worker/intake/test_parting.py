import pytest
from headwater.worker.errors import EngineUnsound
from headwater.worker.parting import let_go
from redis import Redis

from .conftest import Station, Stations, Submit, part, types_of


@pytest.fixture
def dying(station: Stations, submit: Submit) -> tuple[Station, str, str]:
    """A station with a job that has told something, and one that has not."""
    worker = station()
    told, silent = submit(), submit()
    for _ in range(2):
        worker.claim()
    worker.publisher.delta(told, [part(0, 1)])
    while told in {claim.job_id for claim in worker.publisher.silent_claims()}:
        pass
    return worker, told, silent


def test_a_job_that_may_have_ended_the_thread_is_not_cleared_of_its_strikes(
    redis: Redis, dying: tuple[Station, str, str]
) -> None:
    worker, told, silent = dying

    let_go(worker.publisher, KeyError("a bug"))

    assert worker.publisher.wait_until_closed(10)
    assert types_of(redis, told) == ["started", "delta", "released"]
    assert types_of(redis, silent) == ["started"]


def test_an_unsound_engine_is_no_jobs_fault(redis: Redis, dying: tuple[Station, str, str]) -> None:
    worker, told, silent = dying

    let_go(worker.publisher, EngineUnsound("the device is gone"))

    assert worker.publisher.wait_until_closed(10)
    assert types_of(redis, told)[-1] == types_of(redis, silent)[-1] == "released"
