"""Putting the engine thread's parts together: from a loaded model to a loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog

from .admission import ModelLimits
from .channel_family import ChannelFamily
from .cold_prefixes import ColdPrefixes
from .disk_tier import DiskFolder, DiskTier
from .engine.adapters import AdaptedModel, AdapterRunner, adapt
from .engine.channel_families import AUTO, infer_family
from .engine.device import is_asynchronous
from .engine.engine import Engine
from .engine.kv_quantization import KVQuantization, QuantizedRunner, choose_quantization
from .engine.loading import LoadedModel
from .engine.memory import default_budget_bytes, example_segment, measure_row_cost
from .engine.parity import choose_runner
from .engine.runner import DeviceSegment, ModelRunner
from .engine.sampler import SAMPLER_VERSION, Sampler
from .engine.segment_codec import SegmentCodec
from .engine.segments import flatten
from .engine.states import takes_state
from .grammars import Grammars
from .job_opening import JobOpener
from .loop import EventSink, GenerationLoop
from .metrics import WorkerMetrics
from .prefix_cache import PrefixCache
from .scheduler import Footprint, Scheduler, SchedulerSettings
from .text import Vocabulary

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What the loop is told of the worker's settings."""

    alias: str = "demo"
    max_batch: int = 32
    target_itl_ms: float = 400.0
    prefill_chunk: int | None = None
    kv_budget_bytes: int | None = None
    """None: a share of the memory that is free now."""
    kv_bits: int | None = None
    """None: keys and values are floats."""
    cache_dir: Path | None = None
    """None: prefixes are kept in memory only."""
    cache_disk_bytes: int = 10 * 2**30
    snapshot_stride: int = 512
    max_wait_s: float = 30.0
    checkpoint_s: float = 5.0
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Directories of LoRA adapters, by alias."""
    reasoning: str = AUTO
    tool_parser: str = AUTO


def build_loop(
    loaded: LoadedModel,
    settings: LoopSettings,
    sink: EventSink,
    metrics: WorkerMetrics,
    *,
    runner: ModelRunner | None = None,
    wake: Callable[[], None] = lambda: None,
) -> GenerationLoop:
    """Return a loop over *loaded*; call it on the thread that loaded the model.

    *wake* is called from another thread when an idle loop has something to do.

    Without a *runner*, one that has no rows, the fastest right one is chosen; raises
    EngineUnsound when the model computes nonsense, StartupError when its keys and values can't
    be quantized as the settings want it.
    """
    quantization = None
    if settings.kv_bits is not None:
        quantization = choose_quantization(loaded.model, settings.kv_bits)
        # Nothing that was computed with floats may be taken for it, or the other way round.
        loaded = replace(loaded, fingerprint=f"{loaded.fingerprint} {quantization.name}")
    base = runner or _choose_runner(loaded, quantization)
    adapted = {
        alias: adapt(loaded.model, loaded.fingerprint, Path(directory).expanduser())
        for alias, directory in settings.adapters.items()
    }
    cache: PrefixCache[DeviceSegment] = PrefixCache(base.cache_kind)
    scheduler = Scheduler(
        cache,
        _policy(base, loaded, settings),
        model_key=loaded.fingerprint,
        adapter_keys={alias: each.fingerprint for alias, each in adapted.items()},
    )
    return GenerationLoop(
        Engine(
            _with_adapters(base, adapted, quantization),
            Sampler(loaded.vocab_size, loaded.eos_token_ids),
        ),
        scheduler,
        _opener(loaded, settings),
        _limits(loaded, settings),
        sink,
        metrics,
        pipelined=is_asynchronous(),
        checkpoint_s=settings.checkpoint_s,
        cold=_cold_prefixes(loaded, settings, base, cache, scheduler, wake),
    )


def _policy(runner: ModelRunner, loaded: LoadedModel, settings: LoopSettings) -> SchedulerSettings:
    return SchedulerSettings(
        max_batch=settings.max_batch,
        max_bytes=settings.kv_budget_bytes or default_budget_bytes(),
        footprint=Footprint(**measure_row_cost(runner, loaded)._asdict()),
        target_itl_ms=settings.target_itl_ms,
        prefill_chunk=settings.prefill_chunk,
        snapshot_stride=settings.snapshot_stride,
        max_wait_s=settings.max_wait_s,
        # What is on disk survives this worker's death: it gets there as soon as it can.
        keeps_prompts=settings.cache_dir is not None,
    )


def _opener(loaded: LoadedModel, settings: LoopSettings) -> JobOpener:
    vocabulary = Vocabulary(loaded.tokenizer)
    family = channel_family(loaded, settings.reasoning, settings.tool_parser)
    return JobOpener(
        vocabulary,
        loaded.eos_token_ids,
        SAMPLER_VERSION,
        loaded.vocab_size,
        Grammars(vocabulary, loaded.vocab_size, loaded.eos_token_ids, family),
        family,
    )


def channel_family(
    loaded: LoadedModel, reasoning: str = AUTO, tool_parser: str = AUTO
) -> ChannelFamily | None:
    """Return how the model marks reasoning and tool calls; raises StartupError."""
    return infer_family(
        loaded.tokenizer_files, loaded.tokenizer, reasoning=reasoning, tool_parser=tool_parser
    )


def _limits(loaded: LoadedModel, settings: LoopSettings) -> ModelLimits:
    return ModelLimits(
        alias=settings.alias,
        vocab_size=loaded.vocab_size,
        context_length=loaded.context_length,
        tokenizer_fingerprint=loaded.tokenizer_files.fingerprint,
        adapters=tuple(settings.adapters),
    )


def _choose_runner(loaded: LoadedModel, quantization: KVQuantization | None) -> ModelRunner:
    if quantization is not None:
        return QuantizedRunner(loaded.model, quantization)
    return choose_runner(loaded.model, loaded.vocab_size, config=loaded.config)


def _with_adapters(
    base: ModelRunner, adapted: Mapping[str, AdaptedModel], quantization: KVQuantization | None
) -> ModelRunner:
    if not adapted:
        return base
    # What is right for the model is right for its twins.
    like: Callable[[Any], ModelRunner] = type(base)
    if quantization is not None:
        like = partial(QuantizedRunner, quantization=quantization)
    return AdapterRunner(base, {alias: like(each.model) for alias, each in adapted.items()})


def _cold_prefixes(
    loaded: LoadedModel,
    settings: LoopSettings,
    runner: ModelRunner,
    cache: PrefixCache[DeviceSegment],
    scheduler: Scheduler[DeviceSegment],
    wake: Callable[[], None],
) -> ColdPrefixes | None:
    if settings.cache_dir is None:
        return None
    if not all(takes_state(cache) for cache in flatten(loaded.new_caches())):
        log.warning(
            "no_disk_tier",
            reason="this model's caches can't be given what was stored",
            advice="prefixes are kept in memory only; drop --cache-dir",
        )
        return None
    # Files outlive the libraries that they were computed with, and the runner.
    kind = runner.cache_kind.name.lower()
    fingerprint = f"{loaded.fingerprint} mlx-lm {metadata.version('mlx-lm')} {kind}"
    folder = DiskFolder(settings.cache_dir, fingerprint)
    tier = DiskTier(folder, fingerprint, settings.cache_disk_bytes)
    codec = SegmentCodec(loaded.new_caches(), example_segment(runner))
    return ColdPrefixes(tier, codec, cache, scheduler, wake)
