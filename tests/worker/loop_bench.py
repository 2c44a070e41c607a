"""A loop on a tiny model, and a list where the publisher would be."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from headwater.schemas import DeltaPart, End, GenerationJob, PositionLogprobs
from headwater.worker.admission import ModelLimits
from headwater.worker.channel_family import ChannelFamily
from headwater.worker.engine.engine import Engine
from headwater.worker.engine.merged_runner import MergedRunner
from headwater.worker.engine.runner import ModelRunner
from headwater.worker.engine.sampler import SAMPLER_VERSION, Sampler
from headwater.worker.grammars import Grammars
from headwater.worker.job_opening import JobOpener
from headwater.worker.loop import GenerationLoop
from headwater.worker.messages import Claim
from headwater.worker.metrics import WorkerMetrics
from headwater.worker.prefix_cache import PrefixCache
from headwater.worker.scheduler import Footprint, Scheduler, SchedulerSettings
from headwater.worker.text import Vocabulary
from tokenizers import Tokenizer, decoders, models

from tests.tiny_models import VOCABULARY_SIZE, tiny_model

PROMPT = (5, 9, 17, 3, 44, 9)


@dataclass
class ListSink:
    """Remembers every event, by job."""

    parts: dict[str, list[DeltaPart]] = field(default_factory=dict)
    ends: dict[str, End] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)

    def delta(self, job_id: str, parts: Iterable[DeltaPart]) -> None:
        assert job_id not in self.ends
        self.parts.setdefault(job_id, []).extend(parts)

    def restart(self, job_id: str) -> None:
        self.restarted.append(job_id)

    def end(self, job_id: str, end: End) -> None:
        assert job_id not in self.ends
        self.ends[job_id] = end

    def release(self, job_id: str, reason: str) -> None:
        self.released.append(job_id)

    def tokens(self, job_id: str) -> list[int]:
        return list(chain.from_iterable(part.token_ids for part in self.parts.get(job_id, [])))

    def text(self, job_id: str) -> str:
        spans = chain.from_iterable(part.text for part in self.parts.get(job_id, []))
        return "".join(span.text for span in spans)


@dataclass
class Bench:
    """A loop on a tiny model, and a clock that the test moves."""

    pipelined: bool = True
    runner: Callable[[Any], ModelRunner] = MergedRunner
    alter: Callable[[Any], Any] = lambda model: model
    family: ChannelFamily | None = None
    adapters: tuple[str, ...] = ()
    max_batch: int = 4
    now: float = 0.0

    def __post_init__(self) -> None:
        self.model = self.alter(tiny_model("llama"))
        self.sink = ListSink()
        self.metrics = WorkerMetrics()
        runner = self.runner(self.model)
        self.cache: PrefixCache[Any] = PrefixCache(runner.cache_kind)
        self.scheduler = Scheduler(
            self.cache,
            SchedulerSettings(
                max_batch=self.max_batch,
                footprint=Footprint(shares_prefix=runner.shares_prefix),
            ),
            adapter_keys={alias: alias for alias in self.adapters},
        )
        self.engine = Engine(runner, Sampler(VOCABULARY_SIZE, ()))
        vocabulary = Vocabulary(one_character_tokenizer())
        self.loop = GenerationLoop(
            self.engine,
            self.scheduler,
            JobOpener(
                vocabulary,
                (),
                SAMPLER_VERSION,
                VOCABULARY_SIZE,
                Grammars(vocabulary, VOCABULARY_SIZE, ()),
                self.family,
            ),
            ModelLimits("tiny", VOCABULARY_SIZE, 256, "sha256:tiny", self.adapters),
            self.sink,
            self.metrics,
            pipelined=self.pipelined,
            clock=lambda: self.now,
        )

    def run(self, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if self.loop.is_idle:
                self.cache.check_integrity()
                return
            self.loop.step()
        raise AssertionError("the loop does not come to rest")


def one_character_tokenizer() -> Tokenizer:
    """One character a token: the text shows the tokens."""
    vocabulary = {chr(0x4E00 + index): index for index in range(VOCABULARY_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def text_of(token_ids: Iterable[int]) -> str:
    return "".join(chr(0x4E00 + token) for token in token_ids)


def claim(job_id: str = "j", *, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Claim:
    in_claim = {
        name: fields.pop(name)
        for name in ("history", "sampler_version", "strikes", "first_started_ms", "begun_at_ms")
        if name in fields
    }
    values = {"max_tokens": 8} | fields
    job = GenerationJob(job_id=job_id, model="tiny", prompt_token_ids=prompt, **values)
    return Claim(job=job, queue_name="q", execution_id="e", attempt=1, **in_claim)


def by_choice(parts: Iterable[DeltaPart]) -> dict[int, list[int]]:
    outputs: dict[int, list[int]] = {}
    for part in parts:
        outputs.setdefault(part.choice, []).extend(part.token_ids)
    return outputs


def logprobs_of(parts: Iterable[DeltaPart]) -> list[PositionLogprobs]:
    return [each for part in parts for each in part.logprobs or ()]
