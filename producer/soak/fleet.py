"""What the soak breaks: worker processes and a server with an append-only file."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from headwater.schemas import keys
from redis import Redis

from ..embedded import EmbeddedServer, free_port
from ..errors import ProducerError
from ..status import read_status

ALIAS = "soak"
_READY_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05


class SoakServer:
    """An own server that can be killed and comes back with its data; a context manager."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._port = free_port()
        self._server = self._start()
        self.url = self._server.url

    def __enter__(self) -> "SoakServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def restart(self) -> None:
        """Kill the server and start it again from its append-only file."""
        with Redis.from_url(self.url) as redis:
            os.kill(int(redis.info("server")["process_id"]), signal.SIGKILL)
        self._server.stop()
        self._server = self._start()

    def _start(self) -> EmbeddedServer:
        return EmbeddedServer(data_dir=self._data_dir, port=self._port).start()


@dataclass
class Fleet:
    """Worker processes of one model; a context manager that leaves none behind."""

    url: str
    model: str
    lease_s: float
    logs: Path
    workers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    num_started: int = 0
    last_words: list[str] = field(default_factory=list)
    """The last log line of each worker that ended without being told to."""
    _numbers: list[int] = field(default_factory=list)
    """Of the workers' logs."""

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()

    def start_workers(self, count: int) -> None:
        """Start *count* workers and wait until all of them serve; raises ProducerError."""
        for _ in range(count):
            self.workers.append(self._start())
            self._numbers.append(self.num_started)
        deadline = time.monotonic() + _READY_TIMEOUT_S
        with Redis.from_url(self.url) as redis:
            while self._num_ready(redis) < count:
                if any(worker.poll() is not None for worker in self.workers):
                    raise ProducerError(f"a worker does not start; see {self.logs}")
                if time.monotonic() > deadline:
                    raise ProducerError(f"no worker is ready after {_READY_TIMEOUT_S:.0f} s")
                time.sleep(_POLL_S)

    def kill(self, index: int) -> None:
        """Kill one worker and start another in its place."""
        self.workers[index].kill()
        self.workers[index].wait()
        self._replace(index)

    def pause(self, index: int) -> None:
        """Stop one worker where it stands; it knows nothing of it."""
        self.workers[index].send_signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        """Let a paused worker go on."""
        self.workers[index].send_signal(signal.SIGCONT)

    def replace_ended(self) -> None:
        """Start workers in the place of those that ended on their own."""
        for index, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.last_words.append(self._last_words_of(self._numbers[index]))
                self._replace(index)

    def stop(self) -> None:
        """Let all workers drain and end."""
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            try:
                worker.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.workers.clear()

    def _replace(self, index: int) -> None:
        self.workers[index] = self._start()
        self._numbers[index] = self.num_started

    def _last_words_of(self, number: int) -> str:
        lines = self._log_of(number).read_text("utf-8", "replace").splitlines()
        return lines[-1] if lines else "(none)"

    def _log_of(self, number: int) -> Path:
        return self.logs / f"worker-{number}.log"

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "headwater.producer.cli", "worker"]
        options = ["--model", self.model, "--alias", ALIAS, "--redis", self.url]
        limits = ["--lease-s", str(self.lease_s), "--max-batch", "8", "--cpu-threads", "1"]
        self.num_started += 1
        with self._log_of(self.num_started).open("wb") as log:
            # A session of its own: Ctrl-C reaches it through us, once, when we stop it.
            return subprocess.Popen(  # noqa: S603 - our own command
                [*command, *options, *limits], stderr=log, start_new_session=True
            )

    @staticmethod
    def _num_ready(redis: Redis) -> int:
        if not redis.exists(keys.model_card_key(ALIAS)):
            return 0
        return len(read_status(redis).workers)
