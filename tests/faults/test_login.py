"""A worker whose password is changed while it runs."""

import pytest
from headwater.producer.client import Producer
from headwater.producer.embedded import EmbeddedServer
from headwater.schemas import Finished

from tests.faults.conftest import (
    STAGES,
    FaultyWorker,
    StartWorker,
    check_end,
    job,
    result_of,
    types_of,
)

USER = "worker"


def _url(server: EmbeddedServer, password: str) -> str:
    return server.url.replace("redis://", f"redis://{USER}:{password}@")


def _set_password(producer: Producer, password: str) -> None:
    """Let nobody in with another one, and cut the connections that are open."""
    redis = producer.redis
    redis.execute_command(
        "ACL", "SETUSER", USER, "on", "resetpass", f">{password}", "~*", "&*", "+@all"
    )
    redis.execute_command("CLIENT", "KILL", "USER", USER)


def _lock_out_in_mid_job(producer: Producer, worker: FaultyWorker) -> str:
    job_id = producer.submit(job())
    worker.wait_for_stage()
    _set_password(producer, "new")
    worker.go_on()
    worker.wait_for("login_refused")
    return job_id


def test_a_worker_that_is_locked_out_says_so_once_and_ends_and_its_job_goes_on(
    server: EmbeddedServer,
    producer: Producer,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can hand nothing back: the heir takes the job over when the lease has lapsed."""
    monkeypatch.setenv("HEADWATER_CONNECT_TIMEOUT_S", "1")
    _set_password(producer, "old")
    worker = start_worker(before=STAGES["decode"], url=_url(server, "old"))

    job_id = _lock_out_in_mid_job(producer, worker)

    assert worker.wait() == 1
    assert worker.num_logged("login_refused") == 1
    assert not any("Traceback" in line for line in worker.log)
    assert "start the worker again with the password" in worker.log[-1]
    heir = start_worker(url=_url(server, "new"))
    assert isinstance(result_of(producer, job_id).end, Finished)
    assert "resumed" in types_of(producer, job_id)
    check_end(producer, job_id)
    assert heir.stop() == 0


@pytest.mark.long
def test_a_worker_that_is_let_in_again_goes_on(
    server: EmbeddedServer, producer: Producer, start_worker: StartWorker
) -> None:
    """The same attempt, if its lease still holds."""
    _set_password(producer, "old")
    worker = start_worker("--lease-s", "60", before=STAGES["decode"], url=_url(server, "old"))
    job_id = _lock_out_in_mid_job(producer, worker)

    _set_password(producer, "old")

    assert isinstance(result_of(producer, job_id).end, Finished)
    assert "resumed" not in types_of(producer, job_id)
    assert worker.stop() == 0
    assert worker.num_logged("login_refused") == 1
