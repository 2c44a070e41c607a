"""The bell wakes an intake that would look only much later by itself."""

import dataclasses
from collections.abc import Iterator

import pytest
from headwater.producer.client import Producer
from headwater.worker.intake.intake import Intake
from headwater.worker.intake.listener import Listener
from headwater.worker.messages import Admit, Cancel
from headwater.worker.redis_client import connect
from redis import Redis

from .conftest import Station, Stations, Submit

_NEVER_S = 3600.0


@pytest.fixture
def worker(redis_url: str, station: Stations) -> Iterator[Station]:
    """A station whose intake runs, and looks only when the bell rings."""
    one = station()
    intake = Intake(
        connect(redis_url),
        one.book,
        one.publisher,
        dataclasses.replace(one.settings, longest_trust_s=_NEVER_S),
        post=one.inbox.put,
        step_s=lambda: 0.0,
        hears_bell=lambda: True,
        on_death=one.deaths.append,
    )
    listener = Listener(
        connect(redis_url),
        one.worker_id,
        "m",
        claims=one.publisher.open_claims,
        post=one.inbox.put,
        ring=intake.ring,
        on_death=one.deaths.append,
    )
    listener.start()
    assert listener.is_subscribed.wait(10)
    intake.start()
    yield one
    listener.stop()
    intake.stop()


def test_a_submitted_job_is_claimed_at_once(worker: Station, submit: Submit) -> None:
    for _ in range(3):
        job_id = submit()

        message = worker.inbox.get(timeout=10)

        assert isinstance(message, Admit)
        assert message.claim.job_id == job_id


def test_a_wish_to_cancel_reaches_the_engine_at_once(
    redis: Redis, worker: Station, submit: Submit
) -> None:
    job_id = submit()
    assert isinstance(worker.inbox.get(timeout=10), Admit)

    Producer(redis).cancel(job_id)

    assert worker.inbox.get(timeout=10) == Cancel(job_id)
