"""A worker that is started before its server, or while it goes away."""

from pathlib import Path

from headwater.producer.client import Producer, SubmitSettings
from headwater.producer.embedded import EmbeddedServer, free_port
from headwater.schemas import Finished

from tests.faults.conftest import StartWorker, job, result_of

STOP_AT_LOADED = """
from headwater.worker.service import Worker
stop_before(Worker, '_open', 'loaded')
"""


def test_a_worker_waits_for_a_server_that_comes_later(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    port = free_port()
    worker = start_worker(url=f"redis://127.0.0.1:{port}/0", waits_for="waiting_for_redis")

    with EmbeddedServer(data_dir=tmp_path, port=port) as server:
        worker.wait_for("ready")
        with Producer(server.url, SubmitSettings(check_model=False)) as producer:
            assert isinstance(result_of(producer, producer.submit(job())).end, Finished)
        assert worker.stop() == 0


def test_a_server_that_goes_while_the_model_is_loaded_is_waited_for(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    server = EmbeddedServer(data_dir=tmp_path).start()
    worker = start_worker(url=server.url, before=STOP_AT_LOADED, waits_for="starting")
    worker.wait_for_stage()
    port = int(server.url.rsplit(":", 1)[1].removesuffix("/0"))
    server.stop()
    worker.go_on()
    worker.wait_for("waiting_for_redis")

    with EmbeddedServer(data_dir=tmp_path, port=port):
        worker.wait_for("ready")
        assert worker.stop() == 0


def test_a_worker_that_waits_can_be_told_to_end(start_worker: StartWorker) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    worker = start_worker(url=url, waits_for="waiting_for_redis")

    assert worker.stop() == 0
    assert not worker.num_logged("ready")
