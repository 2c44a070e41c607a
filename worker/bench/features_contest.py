"""The contestants of scenario features: one engine, and three kinds of batches."""

import statistics
import time
from collections.abc import Sequence as Seq

from headwater.schemas import GenerationJob, JsonSchemaFormat, SamplingParams

from ..engine.device import is_asynchronous
from ..engine.engine import Engine
from ..engine.sampler import Sampler
from ..grammars import Grammars
from ..sequence import ScheduledSequence, Sequence
from ..text import Vocabulary
from .environment import version
from .features import FeaturesSettings
from .report import Figures
from .scenario import Contest, Peer
from .sides import Lab
from .workload import Prompts, make_job

_NUM_UNTIMED = 2


def prepare(settings: FeaturesSettings) -> Contest:
    """Load the model once, for all batches."""
    bench = _Bench(settings)
    peer = Peer("headwater, greedy", version("headwater") or "", bench.greedy)
    return Contest(ours=bench.ours, peers=(peer,), ratio=_ratio, in_pairs=True)


def _ratio(ours: Figures, greedy: Figures) -> Figures:
    return {
        "step_time": ours["step_p50_ms"] / greedy["step_p50_ms"],
        "schema_step_time": ours["schema_step_p50_ms"] / greedy["step_p50_ms"],
    }


class _Bench:
    def __init__(self, settings: FeaturesSettings) -> None:
        self._settings = settings
        lab = Lab(settings.model)
        loaded = lab.loaded
        self._engine = Engine(lab.runner, Sampler(loaded.vocab_size, loaded.eos_token_ids))
        vocabulary = Vocabulary(loaded.tokenizer)
        self._grammars = Grammars(vocabulary, loaded.vocab_size, loaded.eos_token_ids)
        prompts = Prompts(loaded.vocab_size)
        num_new = settings.steps + _NUM_UNTIMED + 2
        self._jobs = [
            make_job(f"row-{index}", prompts.tokens(settings.prompt_tokens), num_new)
            for index in range(settings.rows)
        ]

    def ours(self) -> Figures:
        """Measure a batch of rows that all sample differently, then one of schemas."""
        sampled = self._timed([Sequence(_sampling(job, i)) for i, job in enumerate(self._jobs)])
        jobs = [
            job.model_copy(update={"response_format": _format(index)})
            for index, job in enumerate(self._jobs)
        ]
        enforced = self._timed(
            [Sequence(job, constraint=self._grammars.start(job)) for job in jobs]
        )
        return {
            **_figures(sampled, len(self._jobs)),
            "schema_step_p50_ms": statistics.median(enforced) * 1e3,
        }

    def greedy(self) -> Figures:
        """Measure a batch of greedy rows."""
        return _figures(self._timed([Sequence(job) for job in self._jobs]), len(self._jobs))

    def _timed(self, rows: Seq[Sequence]) -> list[float]:
        """Return the seconds of each step, launched as the worker's loop does."""
        engine = self._engine
        for row in rows:
            engine.attach(row)
        step = engine.launch([ScheduledSequence(row, row.num_pending_tokens) for row in rows], [])
        times = []
        for _ in range(_NUM_UNTIMED + self._settings.steps):
            started = time.perf_counter()
            if is_asynchronous() and not step.is_awaited:
                step, due = engine.launch([], rows), step
                due.read()
            else:
                step.read()
                step = engine.launch([], rows)
            times.append(time.perf_counter() - started)
        step.read()
        for row in rows:
            engine.detach(row)
        return times[_NUM_UNTIMED:]


def _figures(step_s: list[float], num_rows: int) -> Figures:
    return {
        "wall_s": sum(step_s),
        "generated_tokens": float(len(step_s) * num_rows),
        "generated_tokens_per_s": len(step_s) * num_rows / sum(step_s),
        "step_p50_ms": statistics.median(step_s) * 1e3,
    }


def _sampling(job: GenerationJob, index: int) -> GenerationJob:
    """Return *job* with settings that no other row has, each of the features in some of them."""
    sampling = SamplingParams(
        temperature=0.6 + index / 32,
        top_k=(0, 20, 50, 200)[index % 4],
        top_p=(0.95, 1.0, 0.9)[index % 3],
        min_p=(0.0, 0.05)[index % 2],
        repetition_penalty=1.0 + index / 64,
        repetition_window=8 + index,
        presence_penalty=index / 32,
        frequency_penalty=index / 48,
        logit_bias={100 + index: 1.5, 7 * index: -2.0},
        bad_token_ids=(3 * index, 3 * index + 1),
        seed=index,
    )
    return job.model_copy(update={"sampling": sampling})


def _format(index: int) -> JsonSchemaFormat:
    """Return a schema that no other row has and that takes more steps than are measured."""
    item = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": index},
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", f"colour {index}"]}},
        },
        "required": ["id", "name", "tags"],
        "additionalProperties": False,
    }
    return JsonSchemaFormat(json_schema={"type": "array", "items": item, "minItems": 50})
