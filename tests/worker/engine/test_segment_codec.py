"""Segments on their way to host memory and back."""

import mlx.core as mx
import numpy as np
import pytest
from headwater.worker.engine.row_runner import RowRunner
from headwater.worker.engine.segment_codec import ForeignSegment, SegmentCodec, is_finite
from mlx_lm.models.cache import make_prompt_cache

from tests.exactness.workload import sequence
from tests.tiny_models import TINY_FAMILIES, tiny_model

PROMPT = [5, 17, 99, 3, 64, 8, 1, 77, 30, 30, 12, 9, 50, 41, 2, 6, 33, 90, 21, 60]
STATEFUL = ["qwen3_5", "qwen3_next", "gemma3_text", "gpt_oss", "mamba2"]


def computed(runner: RowRunner, ends: list[int]):
    """Return a row that stands behind the last of *ends*, and segments that end at each."""
    row = sequence(PROMPT)
    runner.attach(row, ())
    segments, start = [], 0
    for end in ends:
        runner.prefill([row], [PROMPT[start:end]])
        segments.append(runner.extract(row, start, end))
        start = end
    return row, segments


def codec_of(model, runner: RowRunner) -> SegmentCodec:
    _, (example,) = computed(runner, [7])
    return SegmentCodec(make_prompt_cache(model), example)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_row_goes_on_bit_for_bit_from_segments_that_were_on_the_host(family) -> None:
    model = tiny_model(family)
    runner = RowRunner(model)
    codec = codec_of(model, runner)
    row, segments = computed(runner, [3, 9, 14])
    starts = [0, 3, 9]
    hosts = [
        codec.to_host(segments[: index + 1], start, end)
        for index, (start, end) in enumerate(zip(starts, [3, 9, 14], strict=True))
    ]
    restored = sequence(PROMPT)
    runner.attach(restored, [codec.from_host(host) for host in hosts])
    for chunk in (PROMPT[14:16], PROMPT[16:17], PROMPT[17:]):
        expected = runner.prefill([row], [chunk])
        assert mx.array_equal(runner.prefill([restored], [chunk]), expected)


@pytest.mark.parametrize("family", ["llama", *STATEFUL])
def test_a_range_across_segments_is_put_together(family) -> None:
    model = tiny_model(family)
    runner = RowRunner(model)
    codec = codec_of(model, runner)
    row, segments = computed(runner, [3, 9, 14])
    whole = codec.from_host(codec.to_host(segments, 0, 14))
    restored = sequence(PROMPT)
    runner.attach(restored, [whole])

    assert mx.array_equal(*(runner.prefill([one], [PROMPT[14:]]) for one in (row, restored)))


def test_the_host_copy_is_no_alias_of_the_devices_memory() -> None:
    model = tiny_model("llama")
    runner = RowRunner(model)
    _, segments = computed(runner, [9])
    host = codec_of(model, runner).to_host(segments, 0, 9)
    view = np.asarray(segments[0].layers[0].keys)

    assert np.array_equal(host.arrays["keys.0"], view)
    assert not np.shares_memory(host.arrays["keys.0"], view)


def test_sixteen_bit_floats_that_numpy_does_not_know_keep_their_bits() -> None:
    model = tiny_model("gemma3_text")
    model.set_dtype(mx.bfloat16)
    runner = RowRunner(model)
    codec = codec_of(model, runner)
    _, segments = computed(runner, [12])
    back = codec.from_host(codec.to_host(segments, 0, 12))

    assert {array.dtype for array in back.arrays} == {mx.bfloat16}
    for ours, theirs in zip(back.arrays, segments[0].arrays, strict=True):
        assert mx.array_equal(ours, theirs)


def damaged(host, kind: str):
    arrays = dict(host.arrays)
    name = next(iter(arrays))
    match kind:
        case "missing":
            del arrays[name]
        case "renamed":
            arrays["other"] = arrays.pop(name)
        case "shape":
            arrays[name] = np.concatenate([arrays[name]] * 2, axis=1)
        case "type":
            arrays[name] = arrays[name].astype(np.float16)
        case "tokens":
            return host._replace(num_tokens=host.num_tokens + 1)
    return host._replace(arrays=arrays)


@pytest.mark.parametrize("kind", ["missing", "renamed", "shape", "type", "tokens"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_arrays_of_another_layout_are_refused(family, kind) -> None:
    model = tiny_model(family)
    runner = RowRunner(model)
    codec = codec_of(model, runner)
    _, segments = computed(runner, [9])
    host = codec.to_host(segments, 0, 9)

    with pytest.raises(ForeignSegment):
        codec.from_host(damaged(host, kind))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_seen(dtype, value) -> None:
    model = tiny_model("llama")
    model.set_dtype(dtype)
    runner = RowRunner(model)
    codec = codec_of(model, runner)
    _, segments = computed(runner, [9])
    assert is_finite(codec.to_host(segments, 0, 9))

    segments[0].layers[1].values[0, 1, 3, 2] = value
    assert not is_finite(codec.to_host(segments, 0, 9))
