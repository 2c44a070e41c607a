"""The contestants of scenario restart: a worker that fills a directory, and the one after it."""

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from ..assembly import LoopSettings, build_loop
from ..loop import GenerationLoop
from ..messages import Claim
from ..metrics import WorkerMetrics
from .record import RecordingSink
from .report import Figures
from .restart import RestartSettings
from .scenario import Contest, Peer
from .sides import Lab
from .workload import ALIAS, Prompts, make_job

_WARMUP_SEED = 1_000_003
_WARMUP_TOKENS = 128


def prepare(settings: RestartSettings) -> Contest:
    """Let one worker fill a directory and end, and another start; the first one is the peer."""
    lab = Lab(settings.model)
    vocab_size = lab.loaded.vocab_size
    systems = [
        Prompts(vocab_size, seed).tokens(settings.system_tokens) for seed in range(settings.prompts)
    ]

    def jobs(seed: int) -> list[tuple[int, ...]]:
        own = Prompts(vocab_size, 1_000 + seed)
        return [system + own.tokens(settings.own_tokens) for system in systems]

    cold: list[Figures] = []

    def warm() -> Figures:
        with TemporaryDirectory(prefix="headwater-bench-") as folder:
            cold.append(_Life(lab, Path(folder)).serve(jobs(1), settings.new_tokens))
            return _Life(lab, Path(folder)).serve(jobs(2), settings.new_tokens)

    def ratio(ours: Figures, peer: Figures) -> Figures:
        return {
            "ttft_warm_over_cold": ours["ttft_p50_ms"] / peer["ttft_p50_ms"],
            "computed_warm_over_cold": (
                ours["prompt_tokens_computed"] / peer["prompt_tokens_computed"]
            ),
        }

    # Measured already, by the turn of ours just before.
    first = Peer("headwater, first start", "this commit", lambda: cold[-1])
    return Contest(warm, (first,), ratio)


class _Life:
    """A worker's loop from its start to its end."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self._sink = RecordingSink(time.perf_counter)
        self._loop: GenerationLoop = build_loop(
            lab.loaded,
            LoopSettings(alias=ALIAS, cache_dir=directory),
            self._sink,
            WorkerMetrics(),
            runner=lab.runner,
        )
        warmup = Prompts(lab.loaded.vocab_size, _WARMUP_SEED).tokens(_WARMUP_TOKENS)
        self._run("warm-up", warmup, 4)

    def serve(self, prompts: list[tuple[int, ...]], num_new_tokens: int) -> Figures:
        """Run one job after the other, end, and return the figures."""
        before = self._loop.figures.num_computed_prompt_tokens
        ttft_ms = [
            1e3 * self._run(f"job-{index}", prompt, num_new_tokens)
            for index, prompt in enumerate(prompts)
        ]
        if self._loop.cold is not None:
            self._loop.cold.close()
        return {
            "ttft_p50_ms": statistics.median(ttft_ms),
            "ttft_max_ms": max(ttft_ms),
            "prompt_tokens": float(sum(map(len, prompts))),
            "prompt_tokens_computed": float(self._loop.figures.num_computed_prompt_tokens - before),
        }

    def _run(self, job_id: str, prompt: tuple[int, ...], num_new_tokens: int) -> float:
        """Run a job to its end; return the seconds to its first token."""
        started = time.perf_counter()
        job = make_job(job_id, prompt, num_new_tokens)
        self._loop.admit(Claim(job=job, queue_name="", execution_id="", attempt=1))
        while self._loop.num_jobs or not self._loop.is_idle:
            if self._loop.is_idle and self._loop.cold is not None:
                self._loop.cold.wait()
            else:
                self._loop.step()
        return self._sink.record.times[job_id][0] - started
