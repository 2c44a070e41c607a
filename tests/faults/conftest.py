"""Real worker processes that stop at a named stage, a tiny model, and servers of their own."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson
import pytest
from headwater.producer.client import Producer, SubmitSettings, new_job
from headwater.producer.embedded import EmbeddedServer
from headwater.producer.result import GenerationResult, collect
from headwater.schemas import END_TYPES, GenerationJob, StreamEntry, keys
from headwater.worker.engine.random_model import write_random_model
from headwater.worker.streams import JobStreams
from rq import Queue

ROOT = Path(__file__).parents[2]
ALIAS = "tiny"
LEASE_S = 1.0
NUM_TOKENS = 24
PROMPT = tuple(range(40, 70))
QUEUE = f"{ALIAS}.normal.default"

DRIVER = """
import sys
from headwater.worker.engine import blas
blas.preload()

def stop_before(owner, name, stage, when=lambda *args, **kwargs: True, always=False):
    '''Say at the first fitting call, or *always*, that *stage* is reached, and go on when told.'''
    method, is_armed = getattr(owner, name), True
    def stopping(*args, **kwargs):
        nonlocal is_armed
        if is_armed and when(*args, **kwargs):
            is_armed = always
            print('STAGE', stage, file=sys.stderr, flush=True)
            sys.stdin.readline()
        return method(*args, **kwargs)
    setattr(owner, name, stopping)
"""

STAGES = {
    "booked": """
from headwater.worker.intake.claimer import Claimer
stop_before(Claimer, '_begin', 'booked')
""",
    "claimed": """
from headwater.worker.loop import GenerationLoop
stop_before(GenerationLoop, 'admit', 'claimed')
""",
    "prefill": """
from headwater.worker.engine.engine import Engine
stop_before(Engine, 'launch', 'prefill')
""",
    "decode": """
from headwater.worker.loop import GenerationLoop
stop_before(GenerationLoop, '_after_tokens', 'decode',
            lambda loop, run, now: len(run.choices[0].sequence.output_token_ids) == 9)
""",
    "finishing": """
from headwater.worker.loop import GenerationLoop
stop_before(GenerationLoop, '_send_end', 'finishing')
""",
    "finalizing": """
from headwater.worker.booking.finalize import Finalizer
stop_before(Finalizer, '_write', 'finalizing')
""",
    "finalized": """
from headwater.worker.publisher import Publisher
stop_before(Publisher, 'forget', 'finalized')
""",
}
"""By name: code that makes a worker stop there, in the order in which a job passes them."""


@dataclass
class FaultyWorker:
    """A worker process, what it logs, and the stage at which it stands."""

    process: "subprocess.Popen[str]"
    log: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _has_ended: bool = False

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, event: str, *, count: int = 1) -> None:
        """Wait until it has logged *event* so many times."""
        self.wait_for_line(f'"event": "{event}"', count=count)

    def wait_for_stage(self, *, count: int = 1) -> None:
        """Wait until the worker has come to its stage so many times."""
        self.wait_for_line("STAGE", count=count)

    def num_logged(self, event: str) -> int:
        """Return how often it has logged *event* so far."""
        return sum(f'"event": "{event}"' in line for line in self.log)

    def go_on(self) -> None:
        """Let it leave its stage."""
        self._stdin.write("\n")
        self._stdin.flush()

    def send(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        code = self.process.wait(60)
        self._reader.join()
        return code

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal and return its exit code."""
        self.send(number)
        return self.wait()

    def discard(self) -> None:
        """Make sure that it is gone."""
        self.process.kill()
        self.wait()
        self._stdin.close()

    @property
    def _stdin(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                with self._news:
                    self.log.append(line)
                    self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def wait_for_line(self, words: str, *, count: int = 1) -> None:
        """Wait until so many lines of its standard error hold *words*."""

        def is_there() -> bool:
            return sum(words in line for line in self.log) >= count

        with self._news:
            self._news.wait_for(lambda: self._has_ended or is_there(), 120)
            assert is_there(), "".join(self.log)


StartWorker = Callable[..., FaultyWorker]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model on disk."""
    return write_random_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def format_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, with a token of two letters: response formats can be enforced on it."""
    folder = write_random_model(tmp_path_factory.mktemp("formats"))
    path = folder / "tokenizer.json"
    tokenizer = orjson.loads(path.read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    rarest = max(vocabulary, key=lambda token: (len(token) == 1, vocabulary[token]))
    vocabulary["th"] = vocabulary.pop(rarest)
    tokenizer["model"]["merges"] = [["t", "h"]]
    path.write_bytes(orjson.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """An own server for the module."""
    with EmbeddedServer() as own:
        yield own


@pytest.fixture
def producer(server: EmbeddedServer) -> Iterator[Producer]:
    """A producer on an empty database."""
    with Producer(server.url, SubmitSettings(check_model=False)) as mine:
        mine.redis.flushall()
        yield mine


@pytest.fixture
def start_worker(server: EmbeddedServer, model: Path) -> Iterator[StartWorker]:
    """Start workers that are gone when the test ends."""
    with worker_starter(server.url, model) as start:
        yield start


@contextmanager
def worker_starter(server_url: str, model: Path) -> Iterator[StartWorker]:
    """Yield what starts workers that are gone at the end.

    *before* is Python that runs in the worker's process first, with DRIVER's names; the start
    is over when the worker has logged the event *waits_for*.
    """
    started: list[FaultyWorker] = []

    def start(
        *options: str, before: str = "", url: str | None = None, waits_for: str = "ready"
    ) -> FaultyWorker:
        code = f"{DRIVER}\n{before}\nfrom headwater.producer.cli import main\nmain()"
        command = [sys.executable, "-c", code, "worker", "--redis", url or server_url]
        process = subprocess.Popen(
            [
                *command,
                "--model",
                str(model),
                "--alias",
                ALIAS,
                "--lease-s",
                str(LEASE_S),
                *options,
            ],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"HEADWATER_LOG_JSON": "true"},
        )
        started.append(FaultyWorker(process))
        started[-1].wait_for(waits_for)
        return started[-1]

    try:
        yield start
    finally:
        for worker in started:
            worker.discard()


def job(**fields: object) -> GenerationJob:
    """Return the job whose undisturbed output the tests know."""
    values: dict[str, object] = {"max_tokens": NUM_TOKENS, "ignore_eos": True} | fields
    return new_job(ALIAS, PROMPT, **values)


def result_of(producer: Producer, job_id: str) -> GenerationResult:
    """Wait for a job's end and return its output."""
    return collect(producer.tail(job_id))


def entries_of(producer: Producer, job_id: str) -> list[StreamEntry]:
    """Return a job's stream."""
    return JobStreams(producer.redis).read(job_id)


def types_of(producer: Producer, job_id: str) -> list[str]:
    """Return the types of a stream's entries."""
    return [entry.event.type for entry in entries_of(producer, job_id)]


def check_end(producer: Producer, job_id: str) -> None:
    """One end, at the end, and nothing left in RQ that runs or waits."""
    entries = entries_of(producer, job_id)
    assert [isinstance(entry.event, END_TYPES) for entry in entries].count(True) == 1
    assert entries[-1].is_end
    queue = Queue(QUEUE, connection=producer.redis)
    assert queue.count == 0
    assert queue.started_job_registry.count == 0
    assert producer.redis.llen(f"rq:queue:{QUEUE}:intermediate") == 0
    assert not list(producer.redis.scan_iter(f"rq:execution:{job_id}:*"))


def check_no_lasting_key(producer: Producer) -> None:
    """Every key expires, but for RQ's own sets of names and what tells of waiting work."""
    lasting = {key for key in producer.redis.scan_iter() if producer.redis.ttl(key) == -1}
    shared = {b"rq:queues", b"rq:workers", keys.active_queues_key(ALIAS).encode()}
    assert {key for key in lasting if not key.startswith(b"rq:workers:")} <= shared
