"""OwnStack: a server and workers for one run, with its data in the run's folder."""

import os
import re
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from headwater.schemas import keys
from redis import Redis

from ..embedded import EmbeddedServer
from ..errors import ProducerError
from ..owned_worker import OwnedWorker

_READY_TIMEOUT_S = 600.0
"""Of a large model that is read from a slow disk."""
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05
"""Between two looks for the model's card, which a worker writes without telling anybody."""
_LEASE_S = 5.0
"""Nothing but our own death kills our workers: their jobs may be taken up again soon."""
_MAX_DEATHS = 6
_DEATHS_WITHIN_S = 600.0
"""More deaths of workers in so short a time are no accident."""
_STREAM_TTL_S = 7 * 24 * 3600
"""A run that was killed on Friday goes on on Monday with what is in its streams."""


class OwnStack:
    """An embedded server that keeps its data in a folder, and workers; a context manager.

    Killed, it leaves nothing running: the workers hand their jobs back, then the server ends.
    """

    def __init__(self, model: str, folder: Path, num_workers: int, max_batch: int | None) -> None:
        self.alias = alias_of(model)
        self._model = model
        self._folder = folder
        self._num_workers = num_workers
        self._max_batch = max_batch
        self._exits = ExitStack()
        self._workers: list[OwnedWorker] = []
        self._deaths: deque[float] = deque()
        self._lifeline: int

    def __enter__(self) -> Self:
        with self._exits as exits:
            server = exits.enter_context(EmbeddedServer(data_dir=self._folder / "server"))
            self.url, self._lifeline = server.url, server.lifeline
            with Redis.from_url(self.url) as redis:
                # What an earlier worker said of the model may not hold any more.
                redis.delete(keys.model_card_key(self.alias))
            for number in range(self._num_workers):
                self._workers.append(self._start(number))
            exits.callback(self.stop_workers)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def wait_until_ready(self) -> None:
        """Wait until a worker serves; raises ProducerError."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        with Redis.from_url(self.url) as redis:
            while not redis.exists(keys.model_card_key(self.alias)):
                self._check()
                if time.monotonic() > deadline:
                    raise ProducerError(f"no worker is ready after {_READY_TIMEOUT_S:.0f} s")
                time.sleep(_POLL_S)

    def keep_running(self) -> None:
        """Start workers in the place of those that died; raises ProducerError for too many.

        A job that kills its worker does so three times at most, then it fails.
        """
        for number, worker in enumerate(self._workers):
            if worker.process.poll() is None:
                continue
            now = time.monotonic()
            self._deaths.append(now)
            while now - self._deaths[0] > _DEATHS_WITHIN_S:
                self._deaths.popleft()
            if len(self._deaths) > _MAX_DEATHS:
                self._check()
            worker.stop(0)
            self._workers[number] = self._start(number)

    def _check(self) -> None:
        for worker in self._workers:
            code = worker.process.poll()
            if code is not None:
                raise ProducerError(
                    f"a worker ended with code {code}: {worker.last_words} (its log: {worker.log})"
                )

    def stop_workers(self) -> None:
        """End the workers; the server goes on. Harmless when repeated."""
        while self._workers:
            self._workers.pop().stop(_STOP_TIMEOUT_S)

    def _start(self, number: int) -> OwnedWorker:
        limits = {
            "--model": self._model,
            "--alias": self.alias,
            "--redis": self.url,
            "--lease-s": str(_LEASE_S),
            # What can't be finished is handed back with its tokens: nothing is worth a wait.
            "--drain-s": "0",
        }
        if self._max_batch is not None:
            limits["--max-batch"] = str(self._max_batch)
        if self._num_workers > 1:
            limits["--cpu-threads"] = str(max(1, (os.cpu_count() or 1) // self._num_workers))
        return OwnedWorker(
            [part for option in limits.items() for part in option],
            self._folder / f"worker-{number + 1}.log",
            keep_open=[self._lifeline],
            environment=self._environment(number),
        )

    def _environment(self, number: int) -> dict[str, str]:
        own = {"HEADWATER_STREAM_TTL_S": str(_STREAM_TTL_S)}
        if self._num_workers > 1:
            # Each gets a device of its own, of those that we may see.
            visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
            own["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)] if visible else str(number)
        return own


def alias_of(model: str) -> str:
    """Return a name for jobs to ask for, made of the model's own."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(model).name).strip("-")[:64] or "model"
