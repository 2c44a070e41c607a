"""A real worker and a real producer behind a connection that loses replies and breaks."""

from collections.abc import Iterator

import pytest
from headwater.producer.client import Producer, SubmitSettings
from headwater.producer.embedded import EmbeddedServer
from headwater.schemas import Finished

from tests.faults.conftest import StartWorker, check_end, check_no_lasting_key, job, result_of
from tests.worker.intake.proxy import LossyProxy

NUM_JOBS = 12
SHARE = 0.02


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[LossyProxy]:
    port = int(server.url.rsplit(":", 1)[1].removesuffix("/0"))
    lossy = LossyProxy(port, seed=5)
    yield lossy
    lossy.close()


@pytest.mark.parametrize("fault", ["loss", "cut"])
def test_lost_replies_and_cut_connections_cost_no_job_and_no_token(
    producer: Producer, start_worker: StartWorker, proxy: LossyProxy, fault: str
) -> None:
    worker = start_worker("--lease-s", "2", url=f"redis://127.0.0.1:{proxy.port}/0")
    undisturbed = result_of(producer, producer.submit(job())).choices[0]

    with Producer(f"redis://127.0.0.1:{proxy.port}/0", SubmitSettings(check_model=False)) as lossy:
        setattr(proxy, fault, SHARE)
        job_ids = producer.submit_many([job() for _ in range(NUM_JOBS)])
        results = [result_of(lossy, job_id) for job_id in job_ids]
    setattr(proxy, fault, 0.0)

    assert proxy.num_lost + proxy.num_cut > 0
    for result in results:
        assert isinstance(result.end, Finished)
        assert result.choices[0] == undisturbed
    assert worker.stop() == 0
    for job_id in job_ids:
        check_end(producer, job_id)
    check_no_lasting_key(producer)
