"""How much memory keys and values may take, and what a row takes of it."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from headwater.schemas import GenerationJob
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..allocation import Allocation
from ..sequence import Sequence
from .loading import LoadedModel
from .prompt_reader import reading_nbytes
from .runner import DeviceSegment, ModelRunner
from .segments import flatten
from .states import StateSegment

_SHARE_OF_DEVICE = 0.8
"""Of what a GPU recommends as its working set, less the weights."""
_SHARE_OF_HOST = 0.5
"""Of what is free in a machine's memory, which others use too."""
_PROBE_TOKENS = (64, 128)


def default_budget_bytes() -> int | None:
    """Return a budget for running keys and values and the prefix cache together.

    None where the machine does not tell how much memory it has.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        info: dict[str, Any] = mx.device_info()
        size = info.get("max_recommended_working_set_size") or info.get("memory_size")
        return int(_SHARE_OF_DEVICE * max(0, size - mx.get_active_memory())) if size else None
    available = _available_bytes()
    return None if available is None else int(_SHARE_OF_HOST * available)


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if line is None else int(line.split()[1]) * 1024


class RowCost(NamedTuple):
    """What rows take in memory."""

    bytes_per_token: int
    bytes_per_row: int
    """Whatever the row's length: recurrent states."""
    bytes_per_window_token: int
    """In layers with a sliding window."""
    window_tokens: int
    """Length of the longest window; 0 where there is none."""
    bytes_per_prefill_token: int
    """Activations, while a forward runs."""
    reading_nbytes: int
    """Logits of a forward in which prompts are read."""
    shares_prefix: bool
    """Whether the prefix cache's segments are not copied into rows."""
    allocation: Allocation


def measure_row_cost(runner: ModelRunner, loaded: LoadedModel) -> RowCost:
    """Measure two short rows."""
    windows = [
        cache.max_size
        for cache in flatten(make_prompt_cache(loaded.model))
        if isinstance(cache, RotatingKVCache)
    ]
    short, long = (_probe(runner, num_tokens) for num_tokens in _PROBE_TOKENS)
    per_token = (_plain_nbytes(long) - _plain_nbytes(short)) // (
        _PROBE_TOKENS[1] - _PROBE_TOKENS[0]
    )
    window_nbytes = _window_nbytes(short)
    return RowCost(
        bytes_per_token=per_token,
        bytes_per_row=max(0, short.nbytes - per_token * _PROBE_TOKENS[0] - window_nbytes),
        bytes_per_window_token=window_nbytes // min(_PROBE_TOKENS[0], *windows) if windows else 0,
        window_tokens=max(windows, default=0),
        bytes_per_prefill_token=_activation_nbytes(loaded.config),
        reading_nbytes=reading_nbytes(loaded.vocab_size),
        shares_prefix=runner.shares_prefix,
        allocation=runner.allocation,
    )


def example_segment(runner: ModelRunner) -> DeviceSegment:
    """Return what the prefix cache would store of a short row."""
    return _probe(runner, _PROBE_TOKENS[0])


def _probe(runner: ModelRunner, num_tokens: int) -> DeviceSegment:
    """Return what the prefix cache would store for a row of *num_tokens*."""
    job = GenerationJob(
        job_id="probe", model="probe", prompt_token_ids=(0,) * num_tokens, max_tokens=1
    )
    probe = Sequence(job)
    runner.attach(probe, ())
    runner.prefill([probe], [job.prompt_token_ids])
    segment = runner.extract(probe, 0, num_tokens)
    mx.eval(segment.arrays)
    runner.detach(probe)
    return segment


def _plain_nbytes(segment: DeviceSegment) -> int:
    """Return the bytes of layers that hold each token's keys and values for good."""
    if not isinstance(segment, StateSegment):
        return segment.nbytes
    return sum(array.nbytes for layer in segment.plain.values() for array in layer)


def _window_nbytes(segment: DeviceSegment) -> int:
    """Return the bytes of layers with a sliding window."""
    states = segment.states or {} if isinstance(segment, StateSegment) else {}
    windows = (cache for cache in states.values() if isinstance(cache, RotatingKVCache))
    return sum(cache.nbytes for cache in windows)


def _activation_nbytes(config: dict[str, Any]) -> int:
    """Return about how many bytes one token of a prefill forward takes while it runs."""
    text = config.get("text_config") or config
    widths = (text.get("hidden_size") or 0, text.get("intermediate_size") or 0)
    # A layer's widest tensors, with room for those that are not freed yet; float32.
    return 4 * (8 * widths[0] + 4 * widths[1])
