"""The contestants of scenario overhead: a worker on a real server, and its loop alone."""

import threading
import time
from collections.abc import Callable

from headwater.schemas import WorkerStatus

from ..assembly import LoopSettings, build_loop
from ..engine.loading import load_model
from ..engine.parity import choose_runner
from ..engine_thread import EngineThread, Stop
from ..loop import EventSink, GenerationLoop
from ..messages import Admit, Claim, Message
from ..metrics import WorkerMetrics
from ..settings import WorkerSettings
from ..station import Station
from .overhead import OverheadSettings
from .record import RecordingSink
from .report import Figures
from .scenario import BenchError, Contest, OpenQueue, Peer
from .workload import ALIAS, Prompts, make_job

_TIMEOUT_S = 600.0
_WORKER_ID = "bench"


def prepare(settings: OverheadSettings, open_queue: OpenQueue) -> Contest:
    """Load the model, on the thread that measures."""
    bench = _Bench(settings, open_queue)
    direct = Peer("the loop without Redis", "this commit", bench.direct)
    return Contest(ours=bench.through_redis, peers=(direct,), ratio=_ratio, in_pairs=True)


def _ratio(ours: Figures, peer: Figures) -> Figures:
    key = "generated_tokens_per_s"
    return {"throughput": ours[key] / peer[key]}


class _Bench:
    """One loaded model, which both sides run on this thread."""

    def __init__(self, settings: OverheadSettings, open_queue: OpenQueue) -> None:
        self._settings = settings
        self._open_queue = open_queue
        self._loaded = load_model(settings.model)
        self._runner = choose_runner(
            self._loaded.model, self._loaded.vocab_size, config=self._loaded.config
        )
        prompts = Prompts(self._loaded.vocab_size)
        self._jobs = [
            make_job(
                f"job-{index}",
                prompts.tokens(prompts.length(settings.shortest, settings.longest)),
                settings.new_tokens,
            )
            for index in range(settings.jobs)
        ]

    def direct(self) -> Figures:
        """Give the loop all jobs at once and step it until they have ended."""
        sink = RecordingSink(time.perf_counter)
        loop = self._loop(sink)
        started = time.perf_counter()
        for each in self._jobs:
            loop.admit(Claim(job=each, queue_name="", execution_id="", attempt=1))
        while len(sink.ended) < len(self._jobs):
            loop.step()
        wall_s = time.perf_counter() - started
        while not loop.is_idle:
            loop.step()
        return self._figures(loop, wall_s)

    def through_redis(self) -> Figures:
        """Submit all jobs to a worker that claims them; the last end in Redis stops the clock."""
        with self._open_queue() as queue:
            worker = _Worker(queue.url, self._settings, self._loop)
            started = time.perf_counter()
            queue.submit(self._jobs)
            ended = worker.run_until_closed()
        return self._figures(worker.loop, ended - started)

    def _loop(self, sink: EventSink) -> GenerationLoop:
        settings = LoopSettings(
            alias=ALIAS,
            max_batch=self._settings.batch,
            prefill_chunk=self._settings.prefill_chunk,
        )
        return build_loop(self._loaded, settings, sink, WorkerMetrics(), runner=self._runner)

    def _figures(self, loop: GenerationLoop, wall_s: float) -> Figures:
        num_tokens = loop.figures.num_generated_tokens
        if num_tokens != len(self._jobs) * self._settings.new_tokens:
            raise BenchError(f"{num_tokens} tokens came: the jobs did not run as they should")
        return {
            "wall_s": wall_s,
            "prompt_tokens": float(loop.figures.num_prompt_tokens),
            "prompt_tokens_computed": float(loop.figures.num_computed_prompt_tokens),
            "generated_tokens": float(num_tokens),
            "generated_tokens_per_s": num_tokens / wall_s,
        }


class _Worker:
    """The real worker's threads, with the engine's work on the calling one."""

    def __init__(
        self,
        url: str,
        settings: OverheadSettings,
        build: Callable[[EventSink], GenerationLoop],
    ) -> None:
        self._num_jobs = settings.jobs
        self._held: list[Message] = []
        self._are_admitted = threading.Event()
        self._is_closed = False
        self._closed_at_s = 0.0
        self._death: BaseException | None = None
        self._station = Station(
            WorkerSettings(model=settings.model, alias=ALIAS, redis=url, max_batch=settings.batch),
            _WORKER_ID,
            post=self._post,
            step_s=lambda: self.loop.figures.step_s,
            metrics=WorkerMetrics(),
            on_death=self._on_death,
        )
        publisher = self._station.publisher
        # Before the clock runs: the thread that calls must be the one that loaded the model.
        self.loop = build(publisher)
        self._engine = EngineThread(lambda: self.loop, publisher, on_death=self._on_death)
        self._station.open(
            lambda: WorkerStatus(worker_id=_WORKER_ID), lambda: self.loop.cache_control.report
        )

    def run_until_closed(self) -> float:
        """Run the jobs; return when the last one's end was in Redis, by time.perf_counter."""
        waiter = threading.Thread(target=self._stop_when_closed)
        waiter.start()
        self._engine.run()
        waiter.join()
        self._station.close()
        if self._death is not None or not self._is_closed:
            raise BenchError(f"the worker did not end the jobs: {self._death!r}")
        return self._closed_at_s

    def _stop_when_closed(self) -> None:
        self._are_admitted.wait(_TIMEOUT_S)
        self._is_closed = self._station.publisher.wait_until_closed(_TIMEOUT_S)
        self._closed_at_s = time.perf_counter()
        self._engine.post(Stop())

    def _post(self, message: Message) -> None:
        """Let the engine begin when all jobs are claimed: both sides run the same batches.

        The clock runs meanwhile: claiming is a part of what Redis costs.
        """
        if self._are_admitted.is_set():
            self._engine.post(message)
            return
        self._held.append(message)
        if sum(isinstance(each, Admit) for each in self._held) == self._num_jobs:
            for each in self._held:
                self._engine.post(each)
            self._are_admitted.set()

    def _on_death(self, error: BaseException) -> None:
        self._death = error
        self._are_admitted.set()
        self._engine.post(Stop())
