"""A worker that is told to stop at an awkward moment."""

import signal

from headwater.producer.client import Producer
from headwater.producer.embedded import EmbeddedServer
from headwater.schemas import keys

from .conftest import (
    ALIAS,
    QUEUE,
    STAGES,
    StartWorker,
    check_no_lasting_key,
    job,
    result_of,
    types_of,
)


def test_a_job_whose_claim_is_under_way_at_sigterm_is_handed_back(
    producer: Producer, start_worker: StartWorker
) -> None:
    worker = start_worker(before=STAGES["booked"])
    job_id = producer.submit(job())
    worker.wait_for_stage()
    worker.send(signal.SIGTERM)
    worker.wait_for("draining")
    worker.go_on()

    assert worker.wait() == 0
    assert types_of(producer, job_id) == ["started", "released"]
    assert producer.redis.lrange(f"rq:queue:{QUEUE}", 0, -1) == [job_id.encode()]


def test_a_worker_that_is_stopped_while_the_server_is_away_leaves_in_good_order(
    start_worker: StartWorker,
) -> None:
    with EmbeddedServer() as own:
        worker = start_worker(url=own.url)

    assert worker.stop() == 0
    assert "Traceback" not in "".join(worker.log)


def test_the_last_worker_leaves_no_key_that_lasts(
    producer: Producer, start_worker: StartWorker
) -> None:
    worker = start_worker("--lease-s", "60")
    result_of(producer, producer.submit(job()))
    # Long before maintenance, which would take the queue's name away, has its turn.
    assert worker.stop() == 0

    assert not producer.redis.exists(keys.active_queues_key(ALIAS), "rq:queues", "rq:workers")
    check_no_lasting_key(producer)
