"""The worker process: start, drain, stop. The one place that sees threads and signals."""

import os
import secrets
import socket
import time
from contextlib import ExitStack
from typing import Any

import structlog
from headwater.schemas import WorkerStatus
from redis.exceptions import RedisError

from .announcement import Announcement
from .engine_thread import EngineThread, HandBack, Wake
from .errors import LoginRefused
from .health import HealthServer
from .metrics import WorkerMetrics
from .parting import let_go
from .redis_client import connect
from .settings import WorkerSettings
from .startup import Patience
from .station import Station
from .wake_up import WakeUp

log = structlog.get_logger()

_ANNOUNCE_EVERY_S = 3600.0
_LAST_WORDS_S = 10.0
"""How long the end waits for Redis to take what is handed back."""
_STUCK_S = 300.0
"""No step for so long while jobs run is no progress."""


class Worker:
    """One model, one device, one process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._metrics = WorkerMetrics()
        self._started_at = time.time()
        self._signals = 0
        self._death: BaseException | None = None
        self._wake_up = WakeUp()
        self._is_open = False
        """Whether it takes jobs, or has taken some."""
        self._is_draining = False
        self._engine: EngineThread
        self._station = Station(
            settings,
            self.worker_id,
            post=lambda message: self._engine.post(message),
            step_s=lambda: self._engine.step_s,
            metrics=self._metrics,
            on_death=self._on_death,
        )
        self._engine = EngineThread(
            self._build_loop, self._station.publisher, on_death=self._on_death
        )

    def run(self) -> int:
        """Work until SIGTERM or SIGINT, or until a thread dies; return the exit code."""
        with ExitStack() as exits:
            exits.enter_context(self._wake_up.by_signals(self._on_signal))
            # First: a port that is taken must cost neither the model's loading nor jobs.
            if self._settings.metrics_port is not None:
                exits.callback(self._serve_health().close)
            if not self._start():
                return 0
            self._supervise()
            return self._end()

    def _start(self) -> bool:
        """Return whether all is up; False when a signal came first. Raises StartupError."""
        with connect(self._settings.redis) as probe:
            patience = Patience(
                probe, self._settings.connect_timeout_s, goes_on_after=self._goes_on_after
            )
            # Before the model is loaded: a wrong password should cost no minutes.
            if not patience.insist(probe.ping):
                return False
            self._engine.start()
            return self._wait_until_loaded() and patience.insist(self._open)

    def _goes_on_after(self, seconds: float) -> bool:
        self._wake_up.wait(seconds)
        return not self._signals

    def _build_loop(self) -> Any:
        # On the engine thread: whoever loads a model must run it.
        from .assembly import LoopSettings, build_loop, channel_family
        from .engine.loading import load_model

        settings = self._settings
        loaded = load_model(settings.model)
        budget_mb = settings.kv_budget_mb
        loop = build_loop(
            loaded,
            LoopSettings(
                alias=settings.alias,
                max_batch=settings.max_batch,
                target_itl_ms=settings.target_itl_ms,
                prefill_chunk=settings.prefill_chunk,
                kv_budget_bytes=None if budget_mb is None else budget_mb * 2**20,
                kv_bits=settings.kv_bits,
                cache_dir=settings.cache_dir,
                cache_disk_bytes=settings.cache_disk_mb * 2**20,
                snapshot_stride=settings.snapshot_stride,
                max_wait_s=settings.max_wait_s,
                checkpoint_s=settings.checkpoint_s,
                adapters=settings.adapters,
                reasoning=settings.reasoning,
                tool_parser=settings.tool_parser,
            ),
            self._station.publisher,
            self._metrics,
            wake=lambda: self._engine.post(Wake()),
        )
        family = channel_family(loaded, settings.reasoning, settings.tool_parser)
        card = loaded.card(
            settings.alias,
            tuple(settings.adapters),
            enforces_tool_calls=family is not None and family.json_call_markers is not None,
        )
        self._announcement = Announcement(connect(settings.redis), card, loaded.tokenizer_files)
        return loop

    def _wait_until_loaded(self) -> bool:
        """Return whether the model is there; False when a signal came first."""
        self._engine.loop.add_done_callback(lambda _: self._wake_up.wake())
        self._wake_up.wait()
        if self._signals and not self._engine.loop.done():
            return False
        self._engine.loop.result()
        return True

    def _open(self) -> None:
        # First: once the station is open it takes jobs, and a failed start would strike them.
        self._announcement.publish()
        self._station.open(self._status, lambda: self._engine.loop.result().cache_control.report)
        self._announced_s = time.monotonic()
        self._is_open = True
        log.info("ready", worker_id=self.worker_id, alias=self._settings.alias)

    def _supervise(self) -> None:
        while not self._signals and self._death is None:
            self._wake_up.wait(_ANNOUNCE_EVERY_S)
            if time.monotonic() - self._announced_s >= _ANNOUNCE_EVERY_S:
                self._announce_again()

    def _announce_again(self) -> None:
        try:
            self._announcement.publish()
            self._announced_s = time.monotonic()
        except RedisError as error:
            # It holds for days; the next hour will do.
            log.warning("announcement_failed", error=str(error))

    # The end.

    def _end(self) -> int:
        self._is_draining = True
        self._station.drain()
        if self._death is None:
            self._drain()
        self._station.stop_intake()
        if self._death is None:
            self._engine.post(HandBack("the worker stops"))
        else:
            if isinstance(self._death, LoginRefused):
                # Nothing can be handed back; the leases lapse.
                raise self._death
            log.critical("thread_died", exc_info=self._death)
            let_go(self._station.publisher, self._death)
        is_closed = self._station.publisher.wait_until_closed(_LAST_WORDS_S)
        if not is_closed:
            log.error("jobs_left", advice="other workers resume them when the lease has lapsed")
        if self._death is not None:
            return 1
        self._engine.stop()
        if (cold := self._engine.loop.result().cold) is not None:
            cold.close()
        try:
            self._station.close()
        except RedisError as error:
            # The lease and RQ's record of us lapse by themselves.
            log.warning("left_without_a_word", error=str(error))
        generated_tokens = self._engine.loop.result().figures.num_generated_tokens
        log.info("stopped", worker_id=self.worker_id, generated_tokens=generated_tokens)
        return 0 if is_closed else 1

    def _drain(self) -> None:
        """Let running jobs finish, for a while, or until a second signal."""
        deadline = time.monotonic() + self._settings.drain_s
        log.info("draining", jobs=self._station.publisher.num_open)
        while self._station.publisher.num_open and self._signals < 2 and self._death is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._station.publisher.wait_until_closed(min(left, 0.1))

    # What others ask and tell.

    def _on_signal(self) -> None:
        # Only a note: whatever the main thread is in the middle of goes on.
        self._signals += 1

    def _on_death(self, error: BaseException) -> None:
        self._death = error
        self._wake_up.wake()

    def _status(self) -> WorkerStatus:
        figures = self._engine.loop.result().figures
        return WorkerStatus(
            worker_id=self.worker_id,
            alias=self._settings.alias,
            source=self._settings.model,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=self._started_at,
            batch=figures.num_running,
            waiting=figures.num_waiting,
            tokens_per_s=figures.tokens_per_s(time.monotonic()),
            cache_hit_share=figures.cache_hit_share,
            draining=self._is_draining,
        )

    def _serve_health(self) -> HealthServer:
        self._watch_gauges()
        server = HealthServer(
            self._settings.metrics_host,
            self._settings.metrics_port or 0,
            self._metrics.registry,
            alive=self._what_is_dead,
            ready=self._what_is_missing,
        )
        log.info("metrics", host=self._settings.metrics_host, port=server.port)
        return server

    def _watch_gauges(self) -> None:
        """Let what is asked for at a scrape be read then, from the scrape's thread."""
        publisher, metrics = self._station.publisher, self._metrics
        metrics.ready.set_function(lambda: float(self._what_is_missing() is None))
        metrics.lease_age.set_function(lambda: self._station.lease_age_s if self._is_open else 0.0)
        metrics.backlog_seconds.set_function(lambda: publisher.backlog_s)
        metrics.backlog_bytes.set_function(lambda: publisher.backlog_bytes)
        metrics.disk_tier_off.set_function(lambda: float(self._has_lost_disk()))

    def _has_lost_disk(self) -> bool:
        cold = self._engine.loop.result().cold if self._is_open else None
        return cold is not None and cold.is_off

    def _what_is_dead(self) -> str | None:
        if self._death is not None:
            return f"a thread died: {self._death!r}"
        if not self._is_open:
            return None
        loop = self._engine.loop.result()
        idle_s = time.monotonic() - loop.figures.progress_s
        if loop.num_jobs and idle_s > _STUCK_S:
            return f"jobs run, but there was no step for {idle_s:.0f} s"
        return None

    def _what_is_missing(self) -> str | None:
        if not self._is_open:
            return "starting: the model is being loaded, or Redis is waited for"
        if self._is_draining:
            return "draining"
        if self._station.lease_age_s > self._settings.lease_s:
            return "Redis has not confirmed the lease in time"
        return self._what_is_dead()
