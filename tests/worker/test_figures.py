"""What the loop tells Prometheus."""

from collections.abc import Callable

import pytest
from headwater.producer.client import new_job
from headwater.schemas import DeltaPart, Failed
from headwater.worker.engine.shared_kv import SharedPrefixRunner
from headwater.worker.engine.shared_kv.decode import TAIL_TOKENS
from headwater.worker.figures import Figures
from headwater.worker.messages import Claim
from headwater.worker.metrics import WorkerMetrics

from .loop_bench import Bench, claim

KINDS = ("started", "resumed", "restarted")
HISTORY = (DeltaPart(choice=0, start=0, token_ids=(5,), text=()),)


def sample(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"headwater_{name}", labels)


def attempt(*, begun_at_ms: int, **fields: object) -> Claim:
    given = {"queue_name": "q", "execution_id": "e", "attempt": 1} | fields
    job = new_job("m", [1], max_tokens=1)
    return Claim(job=job, first_started_ms=5_000, begun_at_ms=begun_at_ms, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("history", "restarts", "kind"),
    [((), False, "started"), (HISTORY, False, "resumed"), (HISTORY, True, "restarted")],
)
def test_attempts_are_counted_by_what_they_begin_with(
    history: tuple[DeltaPart, ...], restarts: bool, kind: str
) -> None:
    """A fleet whose jobs are resumed all the time loses workers; restarts lose text, too."""
    metrics = WorkerMetrics()

    Figures(metrics).opened(attempt(begun_at_ms=5_000, history=history), restarts=restarts)

    assert sample(metrics, "attempts_total", kind=kind) == 1
    assert sum(sample(metrics, "attempts_total", kind=each) or 0 for each in KINDS) == 1


def test_what_alerts_wait_for_is_there_from_the_start() -> None:
    """A series that begins at 1 never increases: the first dead letter would go unnoticed."""
    metrics = WorkerMetrics()

    assert sample(metrics, "failed_jobs_total", code="poisoned") == 0
    metrics.ended(Failed(code="poisoned", message="its worker died"))
    assert sample(metrics, "failed_jobs_total", code="poisoned") == 1
    assert sample(metrics, "jobs_total", end="failed") == 1


def test_a_jobs_wait_counts_once_however_many_attempts_it_takes() -> None:
    """The wait is from the queue to the first start, not to a later one."""
    metrics = WorkerMetrics()
    figures = Figures(metrics)

    figures.opened(attempt(begun_at_ms=5_000, enqueued_at_ms=2_000), restarts=False)
    figures.opened(attempt(begun_at_ms=9_000, enqueued_at_ms=2_000), restarts=False)

    assert sample(metrics, "queue_wait_seconds_count") == 1
    assert sample(metrics, "queue_wait_seconds_sum") == 3


@pytest.mark.parametrize("pipelined", [True, False])
def test_a_loop_at_rest_runs_nothing_and_tells_what_its_cache_holds(pipelined: bool) -> None:
    """The last word before an idle time stays on the dashboard all that time."""
    bench = Bench(pipelined=pipelined)
    bench.loop.admit(claim(max_tokens=3))
    bench.loop.step()
    assert sample(bench.metrics, "batch_size") == 1
    assert sample(bench.metrics, "kv_bytes")

    bench.run()

    assert sample(bench.metrics, "batch_size") == 0
    assert sample(bench.metrics, "waiting_sequences") == 0
    assert sample(bench.metrics, "kv_bytes") == 0
    assert sample(bench.metrics, "prefix_cache_bytes") == bench.scheduler.cache_nbytes > 0


def test_padding_is_told_as_a_share_of_what_is_held_and_computed() -> None:
    """A row of few tokens has a tail of many; prompts of unlike lengths are padded to one."""
    bench = Bench(runner=SharedPrefixRunner, pipelined=False)
    for job_id, length in (("a", 9), ("b", 10)):
        bench.loop.admit(claim(job_id, prompt=tuple(range(length)), max_tokens=4))
    bench.loop.step()
    bench.now += 1000
    bench.loop.step()

    # Of two tails, 9 + 10 tokens of the prompts and one token each are used.
    assert sample(bench.metrics, "kv_padding_ratio") == pytest.approx(1 - 21 / (2 * TAIL_TOKENS))
    assert sample(bench.metrics, "prefill_padding_ratio") == pytest.approx(1 / 20)


def test_host_work_is_a_step_less_the_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that only waits costs the host nothing."""
    bench = Bench(pipelined=False)
    bench.loop.admit(claim(max_tokens=1))
    _advance(bench, monkeypatch, launch_s=2.0, read_s=5.0)

    bench.loop.step()

    assert sample(bench.metrics, "step_host_seconds_sum") == 2.0
    assert sample(bench.metrics, "step_seconds_sum") == 7.0


def _advance(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, launch_s: float, read_s: float
) -> None:
    """Let the bench's clock go on while a step is launched, and while it is read."""

    def slow(act: Callable[..., object], seconds: float) -> Callable[..., object]:
        def acting(*arguments: object) -> object:
            bench.now += seconds
            return act(*arguments)

        return acting

    launch = bench.engine.launch

    def launching(*arguments: object) -> object:
        step = launch(*arguments)  # type: ignore[arg-type]
        step.read = slow(step.read, read_s)  # type: ignore[method-assign,assignment]
        return step

    monkeypatch.setattr(bench.engine, "launch", slow(launching, launch_s))
