"""The engine thread's work: the one place that knows scheduler, engine, text and events."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import structlog
from headwater.schemas import (
    Cancelled,
    DeltaPart,
    End,
    Failed,
    FinishReason,
    GenerationJob,
    JobKind,
)

from .admission import ModelLimits, check
from .cache_control import CacheControl
from .cold_prefixes import ColdPrefixes
from .engine.engine import Engine, FailedRow, PendingStep
from .engine.runner import DeviceSegment
from .errors import EngineUnsound, JobRejected
from .figures import Figures
from .job_opening import JobOpener, Opened
from .job_run import Choice, JobRun
from .messages import Claim
from .metrics import WorkerMetrics
from .scheduler import Commit, Scheduler
from .sequence import PromptReading, Reading, Sequence, TokenOutput
from .text import Stop

log = structlog.get_logger()


class _InFlight(NamedTuple):
    """A launched step whose tokens have not been read."""

    step: PendingStep
    num_prefill_tokens: int
    num_decode_rows: int
    at_s: float


class EventSink(Protocol):
    """Where a job's events go, in order: the publisher, or a list in tests."""

    def delta(self, job_id: str, parts: Iterable[DeltaPart]) -> None:
        """Publish what a job's choices gained."""
        ...

    def restart(self, job_id: str) -> None:
        """Tell readers that the text so far is void."""
        ...

    def end(self, job_id: str, end: End) -> None:
        """Publish the job's end; nothing follows."""
        ...

    def release(self, job_id: str, reason: str) -> None:
        """Hand the job back to its queue; nothing follows from here."""
        ...


class GenerationLoop:
    """Steps all running jobs; everything it does happens on the thread that calls it.

    Pipelined, one step launches the next forward before it reads the tokens of the last one, so
    the device computes while tokens become text and events. The price is a row's last token,
    computed once too often where only its text tells that it is the last. A step with a row under
    a grammar is read first: which tokens may follow depends on it.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler[DeviceSegment],
        opener: JobOpener,
        limits: ModelLimits,
        sink: EventSink,
        metrics: WorkerMetrics,
        *,
        pipelined: bool = True,
        checkpoint_s: float = 5.0,
        cold: ColdPrefixes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._opener = opener
        self._limits = limits
        self._sink = sink
        self.figures = Figures(metrics)
        self._metrics = metrics
        self._pipelined = pipelined
        self._checkpoint_s = checkpoint_s
        self.cold = cold
        """What the disk holds, where there is a disk tier."""
        self.cache_control = CacheControl(scheduler, cold, engine, self.figures, clock)
        """For whoever wants to see what the caches hold, or to empty them."""
        self._clock = clock
        self._runs: dict[str, JobRun] = {}
        self._timed_runs: dict[str, JobRun] = {}
        """Those with a deadline."""
        self._choices: dict[Sequence, tuple[JobRun, Choice]] = {}
        self._in_flight: _InFlight | None = None
        self._awaited_s = 0.0
        """How long this step has waited for the device."""

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._runs)

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values: the running rows' and the prefix cache's."""
        return self._engine.nbytes + self._scheduler.cache_nbytes

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        if self._in_flight is not None or not self._scheduler.is_idle:
            return False
        # A run that nobody schedules waits for the disk, which will wake us.
        return not self._runs if self.cold is None else not self.cold.is_due

    def admit(self, claim: Claim) -> None:
        """Take a job in; one that can't run here ends as failed at once."""
        with self._alone(claim):
            check(claim.job, self._limits)
            self._check_kind(claim.job)
            if claim.is_overdue:
                # Not opened: the text that its last attempt let out as it ended stays valid.
                raise _overdue(claim)
            self._open(claim, self._opener.open(claim))

    def _check_kind(self, job: GenerationJob) -> None:
        if job.kind is JobKind.EMBEDDING and not self._engine.can_embed:
            raise JobRejected(
                "unsupported_kind", f"model {job.model!r} does not show what it computes: no vector"
            )

    def cancel(self, job_id: str) -> None:
        """End a job as cancelled, with the text it has; unknown ids are ignored."""
        run = self._runs.get(job_id)
        if run is not None:
            with self._alone(run.claim):
                self._close(run, Cancelled(metadata=run.job.metadata))

    def drop(self, job_id: str) -> None:
        """Forget a job that is another worker's now; nothing more of it is published."""
        run = self._runs.get(job_id)
        if run is not None:
            log.info("dropped", job_id=job_id, attempt=run.claim.attempt)
            self._forget(run)

    def hand_back(self, reason: str) -> None:
        """Give every job back to its queue, with the tokens read so far published."""
        for run in list(self._runs.values()):
            with self._alone(run.claim):
                self._publish(run)
                self._forget(run)
                self._sink.release(run.job.job_id, reason)

    def step(self) -> None:
        """Launch the next step of what runs, then handle the tokens that are due."""
        now = self._clock()
        self._awaited_s = 0.0
        self._fail_overdue(now)
        if self.cold is not None:
            self._move_prefixes(self.cold, now)
        if self._in_flight is not None and self._in_flight.step.is_awaited:
            self._read(self._in_flight)
            self._in_flight = None
        due, self._in_flight = self._in_flight, self._launch(now)
        if not self._pipelined:
            due, self._in_flight = self._in_flight, None
        if due is not None:
            self._read(due)
        self._tell_figures(now)

    # One step, in its order.

    def _fail_overdue(self, now: float) -> None:
        for run in [run for run in self._timed_runs.values() if run.is_overdue(now)]:
            with self._alone(run.claim):
                self._close(run, _failed(run.claim, _overdue(run.claim)))

    def _move_prefixes(self, cold: ColdPrefixes, now: float) -> None:
        """Let those go on whose prefixes the disk has brought."""
        is_idle = self._in_flight is None
        for sequence in cold.step(is_idle=is_idle):
            if sequence in self._choices:
                self._scheduler.add(sequence, now)

    def _launch(self, now: float) -> _InFlight | None:
        plan = self._scheduler.schedule(now, self._commit, self._engine.nbytes)
        for commit in plan.early_commits:
            self._commit(commit)
        for sequence in plan.detach:
            self._engine.detach(sequence)
        for row in plan.admit:
            self._engine.attach(row.sequence, row.prefix)
        for row in plan.rebase:
            self._engine.rebase(row.sequence, row.prefix)
        self.figures.planned(plan, self._scheduler, now)
        if not plan.has_work:
            return None
        step = self._engine.launch(plan.prefill, plan.decode)
        for commit in plan.commits:
            self._keep(commit)
        return _InFlight(step, plan.num_prefill_tokens, len(plan.decode), now)

    def _keep(self, commit: Commit) -> None:
        """Put a running row's tokens into the prefix cache, and let the row refer to them."""
        prefix = self._commit(commit)
        if prefix:
            self._engine.rebase(commit.sequence, prefix)

    def _commit(self, commit: Commit) -> list[DeviceSegment]:
        """Put a row's tokens into the prefix cache; return what the row may refer to now."""
        if self._engine.has_failed(commit.sequence):
            # The row is gone, or nothing of it is worth keeping.
            return []
        segment = self._engine.extract(commit.sequence, commit.start, commit.end)
        prefix = self._scheduler.commit(commit, segment)
        if self.cold is not None:
            self.cold.committed(commit.sequence, commit.end)
        return prefix

    def _tell_figures(self, began_s: float) -> None:
        now = self._clock()
        self.figures.host(now - began_s - self._awaited_s)
        # The last word before an idle time stays.
        if self.is_idle or self.figures.is_memory_due(now):
            disk_nbytes = self.cold.nbytes if self.cold is not None else 0
            self.figures.memory(self._engine, self._scheduler, disk_nbytes, now)

    def _read(self, launched: _InFlight) -> None:
        began_s = self._clock()
        result = launched.step.read()
        now = self._clock()
        self._awaited_s += now - began_s
        # The device worked on it since it was launched, or since it was done with the last one.
        seconds = now - max(launched.at_s, self.figures.last_read_s)
        self._scheduler.observe(seconds, launched.num_prefill_tokens, launched.num_decode_rows)
        self.figures.stepped(len(result.outputs), now, seconds)
        for failed in result.failed:
            self._fail_row(failed)
        taken = [self._take_token(output, now) for output in result.outputs]
        taken += [self._take_reading(reading, now) for reading in result.readings]
        touched = dict.fromkeys(run for run in taken if run is not None)
        for run in touched:
            if run.job.job_id in self._runs:
                with self._alone(run.claim):
                    self._after_tokens(run, now)

    def _take_token(self, output: TokenOutput, now: float) -> JobRun | None:
        """Give a token to its choice's text; None when nobody waits for it any more."""
        known = self._choices.get(output.sequence)
        if known is None:
            return None
        run, choice = known
        self.figures.token(run, choice.sequence, now)
        with self._alone(run.claim):
            if output.logprobs is not None and choice.logprobs is not None:
                choice.logprobs.push(output.token_id, output.logprobs)
            stop = choice.text.push(output.token_id)
            if stop is not None:
                self._end_choice(choice, stop)
        return run

    def _take_reading(self, reading: Reading | PromptReading, now: float) -> JobRun | None:
        """Give what was read off a prompt to its choice; None when nobody waits for it."""
        known = self._choices.get(reading.sequence)
        if known is None:
            return None
        run, choice = known
        if isinstance(reading, PromptReading):
            self._take_prompt(choice, reading)
            return run
        self.figures.token(run, choice.sequence, now)
        choice.reading = reading
        self._end_choice(choice, Stop(FinishReason.STOP))
        return run

    def _take_prompt(self, choice: Choice, reading: PromptReading) -> None:
        assert choice.prompt is not None
        choice.prompt.push(reading)
        readout = choice.sequence.readout
        # A row that is taken away after this need not read it again.
        choice.sequence.readout = readout and readout.behind(choice.prompt.num_read)

    def _after_tokens(self, run: JobRun, now: float) -> None:
        if run.is_complete:
            self._close(run, run.finished(now))
        elif run.is_publish_due(now):
            run.checkpoint_due_s = now + self._checkpoint_s
            self._publish(run)

    def _fail_row(self, failed: FailedRow) -> None:
        self._scheduler.drop(failed.sequence)
        known = self._choices.get(failed.sequence)
        if known is None:
            return
        run, _ = known
        with self._alone(run.claim):
            self._close(run, _failed(run.claim, failed.error))

    # A job's way in and out.

    @contextmanager
    def _alone(self, claim: Claim) -> Iterator[None]:
        """What goes wrong with one job ends that job, not the thread that runs all the others."""
        try:
            yield
        except EngineUnsound:
            raise
        except Exception as error:  # whatever it is, it came of this job
            run = self._runs.get(claim.job_id)
            if run is not None:
                # Without a last look for text: that may be what raises.
                self._forget(run)
            self._send_end(claim.job_id, _failed(claim, error))

    def _open(self, claim: Claim, opened: Opened) -> None:
        now = self._clock()
        self.figures.opened(claim, restarts=opened.restart_reason is not None)
        if opened.restart_reason is not None:
            log.warning("restarted", job_id=claim.job_id, reason=opened.restart_reason)
            self._sink.restart(claim.job_id)
        parts = zip(opened.sequences, opened.texts, opened.logprobs, strict=True)
        choices = [Choice(*each) for each in parts]
        choices[0].prompt = opened.prompt
        # The first token is always published at once: it clears the job of its strikes.
        run = JobRun(claim, choices, started_s=now, checkpoint_due_s=now)
        if not self._runs:
            self.figures.progress_s = now
        self._runs[claim.job_id] = run
        if claim.job.deadline_s is not None:
            run.deadline_s = now + claim.job.deadline_s - claim.age_s
            self._timed_runs[claim.job_id] = run
        for choice in choices:
            self._choices[choice.sequence] = (run, choice)
            if choice.text.stop is None:
                if self.cold is None or not self.cold.keeps_waiting(choice.sequence):
                    self._scheduler.add(choice.sequence, now)
            else:
                # The last attempt died between its last token and the end.
                self._end_choice(choice, choice.text.stop)
        if run.is_complete:
            self._close(run, run.finished(now))

    def _end_choice(self, choice: Choice, stop: Stop) -> None:
        choice.finish_reason, choice.matched_stop = stop
        self._scheduler.finish(choice.sequence)

    def _close(self, run: JobRun, end: End) -> None:
        """End *run* with all the text it has."""
        for choice in run.open_choices():
            choice.text.finish()
        self._publish(run)
        self._forget(run)
        self._send_end(run.job.job_id, end)

    def _send_end(self, job_id: str, end: End) -> None:
        self._metrics.ended(end)
        self._sink.end(job_id, end)

    def _publish(self, run: JobRun) -> None:
        parts = run.take_parts()
        if parts:
            self._sink.delta(run.job.job_id, parts)

    def _forget(self, run: JobRun) -> None:
        del self._runs[run.job.job_id]
        self._timed_runs.pop(run.job.job_id, None)
        for choice in run.choices:
            del self._choices[choice.sequence]
            if choice.is_open:
                self._scheduler.finish(choice.sequence)


def _overdue(claim: Claim) -> JobRejected:
    return JobRejected("deadline_exceeded", f"not done within {claim.job.deadline_s} s")


def _failed(claim: Claim, error: Exception) -> Failed:
    if isinstance(error, JobRejected):
        log.info("rejected", job_id=claim.job_id, code=error.code)
    else:
        log.error("engine_error", job_id=claim.job_id, exc_info=error)
        error = JobRejected("engine_error", f"{type(error).__name__}: {error}")
    return Failed(
        code=error.code,
        message=str(error),
        retryable=error.retryable,
        metadata=claim.job.metadata,
    )
