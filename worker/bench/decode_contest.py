"""The contestants of scenario decode: our engine, and mlx-lm's batch generator."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from ..engine.engine import Engine
from ..engine.runner import CacheKind, DeviceSegment
from ..engine.sampler import Sampler
from ..engine.segments import KVSegment, restore_kv
from ..sequence import Sequence
from .decode import DecodeSettings
from .environment import version
from .report import Figures
from .scenario import BenchError, Contest, Peer
from .sides import Lab
from .workload import Prompts, make_job


def prepare(settings: DecodeSettings) -> Contest:
    """Compute the shared prefix once, for both."""
    bench = _Bench(settings)
    peer = Peer("mlx-lm BatchGenerator", version("mlx-lm") or "", bench.mlx_lm)
    return Contest(ours=bench.ours, peers=(peer,), ratio=bench.ratio)


class _Bench:
    def __init__(self, settings: DecodeSettings) -> None:
        self._settings = settings
        self._lab = Lab(settings.model)
        if self._lab.loaded.cache_kind is not CacheKind.SEGMENTS:
            raise BenchError("the scenario needs a model whose keys and values can be cut")
        prompts = Prompts(self._lab.loaded.vocab_size)
        shared = prompts.tokens(settings.shared_tokens)
        self._prompts = [shared + prompts.tokens(1) for _ in range(settings.rows)]
        self._tokens: dict[str, list[list[int]]] = {}
        self._prefix = self._compute_prefix()

    def ratio(self, ours: Figures, peer: Figures) -> Figures:
        """Return ours over the peer's."""
        same = [a == b for a, b in zip(self._tokens["ours"], self._tokens["peer"], strict=True)]
        return {
            "step_time": ours["step_p50_ms"] / peer["step_p50_ms"],
            "kv_bytes": ours["peak_kv_bytes"] / peer["peak_kv_bytes"],
            "same_text": sum(same) / len(same),
        }

    def ours(self) -> Figures:
        """Give every row the prefix's segment, and decode."""
        runner = self._lab.runner
        loaded = self._lab.loaded
        engine = Engine(runner, Sampler(loaded.vocab_size, loaded.eos_token_ids))
        rows = self._sequences()
        for row in rows:
            engine.attach(row, (self._prefix,))
        step_s = self._timed(lambda: engine.launch([], rows).read())
        # What the rows refer to is held once.
        figures = self._figures(step_s, engine.nbytes + self._prefix.nbytes)
        for row in rows:
            engine.detach(row)
        self._tokens["ours"] = [row.output_token_ids for row in rows]
        return figures

    def mlx_lm(self) -> Figures:
        """Give every row caches of its own with the prefix; BatchKVCache.merge copies them."""
        settings = self._settings
        generator: Any = BatchGenerator(
            self._lab.loaded.model,
            completion_batch_size=settings.rows,
            prefill_batch_size=settings.rows,
            max_tokens=settings.steps + 2,
        )
        uids = generator.insert(
            [[prompt[-1]] for prompt in self._prompts],
            caches=[self._caches() for _ in self._prompts],
            all_tokens=[list(prompt[:-1]) for prompt in self._prompts],
        )
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}

        def step() -> None:
            for response in generator.next()[1]:
                tokens[response.uid].append(response.token)

        step()  # merges the caches and computes the first tokens
        step_s = self._timed(step)
        figures = self._figures(step_s, generator.prompt_cache_nbytes)
        mx.synchronize(generator.stream)
        generator.close()
        self._tokens["peer"] = list(tokens.values())
        return figures

    def _timed(self, step: Callable[[], object]) -> list[float]:
        """Return the seconds of each step but the first, which may set things up."""
        times = []
        for _ in range(self._settings.steps + 1):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        return times[1:]

    def _figures(self, step_s: list[float], kv_bytes: int) -> Figures:
        return {
            "wall_s": sum(step_s),
            "generated_tokens": float(len(step_s) * self._settings.rows),
            "generated_tokens_per_s": len(step_s) * self._settings.rows / sum(step_s),
            "step_p50_ms": statistics.median(step_s) * 1e3,
            "peak_kv_bytes": float(kv_bytes),
        }

    def _sequences(self) -> list[Sequence]:
        num_new = self._settings.steps + 2
        return [
            Sequence(make_job(f"row-{index}", prompt, num_new))
            for index, prompt in enumerate(self._prompts)
        ]

    def _compute_prefix(self) -> DeviceSegment:
        runner = self._lab.runner
        row = self._sequences()[0]
        num_tokens = self._settings.shared_tokens
        runner.attach(row, ())
        runner.prefill([row], [row.tokens(0, num_tokens)])
        segment = runner.extract(row, 0, num_tokens)
        mx.eval(segment.arrays)
        runner.detach(row)
        return segment

    def _caches(self) -> list[object]:
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[object] = make_prompt_cache(self._lab.loaded.model)
        assert isinstance(self._prefix, KVSegment)
        restore_kv(caches, [self._prefix])
        return caches
