"""The bell wakes an intake that would look much later; without it the intake looks by itself."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from headwater.producer.client import Producer
from headwater.worker.intake.intake import Intake
from headwater.worker.intake.listener import Listener
from headwater.worker.messages import Admit, Cancel
from headwater.worker.redis_client import connect
from redis import Redis

from .conftest import FINISHED, Station, Stations, Submit

_NEVER_S = 3600.0


@contextmanager
def _working(one: Station, *, hears_bell: bool) -> Iterator[None]:
    """Run the station's intake and, where the bell is heard, its listener."""
    intake = Intake(
        connect(one.url),
        one.book,
        one.publisher,
        dataclasses.replace(one.settings, longest_trust_s=_NEVER_S),
        post=one.inbox.put,
        step_s=lambda: 0.0,
        hears_bell=lambda: hears_bell,
        on_death=one.deaths.append,
    )
    listener = Listener(
        connect(one.url),
        one.worker_id,
        "m",
        claims=one.publisher.open_claims,
        post=one.inbox.put,
        ring=intake.ring,
        hurry=one.heartbeat.hurry,
        on_death=one.deaths.append,
    )
    if hears_bell:
        listener.start()
        assert listener.is_subscribed.wait(10)
    intake.start()
    yield
    if hears_bell:
        listener.stop()
    intake.stop()


def test_a_full_worker_goes_on_to_a_job_that_has_rung_before(
    station: Stations, submit: Submit
) -> None:
    one = station(max_claims=1)
    jobs = [submit(), submit()]
    with _working(one, hears_bell=True):
        for job_id in jobs:
            message = one.inbox.get(timeout=10)
            assert isinstance(message, Admit)
            assert message.claim.job_id == job_id
            one.publisher.end(job_id, FINISHED)


@pytest.fixture(params=[True, False], ids=["bell", "pub/sub cut off"])
def worker(station: Stations, request: pytest.FixtureRequest) -> Iterator[Station]:
    """A station that works; with the bell it never looks by itself."""
    one = station()
    with _working(one, hears_bell=request.param):
        yield one


def test_a_submitted_job_is_claimed(worker: Station, submit: Submit) -> None:
    for _ in range(3):
        job_id = submit()

        message = worker.inbox.get(timeout=10)

        assert isinstance(message, Admit)
        assert message.claim.job_id == job_id


def test_a_wish_to_cancel_reaches_the_engine(redis: Redis, worker: Station, submit: Submit) -> None:
    job_id = submit()
    assert isinstance(worker.inbox.get(timeout=10), Admit)

    Producer(redis).cancel(job_id)

    assert worker.inbox.get(timeout=10) == Cancel(job_id)
