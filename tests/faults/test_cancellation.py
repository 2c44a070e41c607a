"""A job that another process cancels at every stage of its life."""

import subprocess
import sys

import pytest
from headwater.producer.client import Producer
from headwater.producer.embedded import EmbeddedServer
from headwater.schemas import Cancelled, Finished

from tests.faults.conftest import (
    ROOT,
    STAGES,
    StartWorker,
    check_end,
    check_no_lasting_key,
    entries_of,
    job,
    result_of,
)

CANCELLABLE = ("booked", "claimed", "prefill", "decode")
"""Before these stages are left, the end is still open."""


def _cancel_elsewhere(url: str, job_id: str) -> None:
    command = [sys.executable, "-m", "headwater.producer.cli", "cancel", job_id, "--redis", url]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    "stage",
    [
        "claimed",
        "decode",
        *(
            pytest.param(stage, marks=pytest.mark.long)
            for stage in STAGES
            if stage not in ("claimed", "decode")
        ),
    ],
)
def test_a_cancelled_job_has_one_end_whenever_it_was_cancelled(
    server: EmbeddedServer, producer: Producer, start_worker: StartWorker, stage: str
) -> None:
    worker = start_worker(before=STAGES[stage])
    # Far longer than a lifetime of this test, where the end is still open.
    is_open = stage in CANCELLABLE
    job_id = producer.submit(job(max_tokens=4000 if is_open else 24))
    worker.wait_for_stage()

    _cancel_elsewhere(server.url, job_id)
    worker.go_on()

    end = result_of(producer, job_id).end
    assert isinstance(end, Cancelled if is_open else (Cancelled, Finished))
    # The worker has nothing of it left, and takes the next one.
    again = producer.submit(job())
    assert isinstance(result_of(producer, again).end, Finished)
    assert worker.stop() == 0
    assert entries_of(producer, job_id)[-1].event == end
    check_end(producer, job_id)
    check_no_lasting_key(producer)
