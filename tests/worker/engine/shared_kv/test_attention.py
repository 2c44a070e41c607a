"""Attention over one shared segment, however it is cut into passes."""

import mlx.core as mx
import pytest
from headwater.worker.engine.segments import LayerKV
from headwater.worker.engine.shared_kv import attention
from headwater.worker.engine.shared_kv.batch import LayerSpan


@pytest.mark.parametrize("is_masked", [False, True])
def test_heads_one_by_one_get_what_they_get_together(
    is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU many scores are computed a head at a time."""
    drawn = [mx.random.normal((1, 3, 20, 8), key=mx.random.key(seed)) for seed in range(2)]
    queries = mx.random.normal((5, 6, 4, 8), key=mx.random.key(2))
    mask = mx.random.uniform(shape=(5, 1, 4, 20), key=mx.random.key(3)) > 0.3
    span = LayerSpan(LayerKV(*drawn), 0, 5, mask if is_masked else None)
    together = attention._span(queries, span, 3)

    monkeypatch.setattr(attention, "_MAX_SCORES", 0)
    apart = attention._span(queries, span, 3)

    for ours, expected in zip(apart, together, strict=True):
        assert ours.shape == expected.shape
        assert mx.allclose(ours, expected, atol=1e-5)
    keys, values = (mx.repeat(array, 2, axis=1) for array in drawn)
    exact = mx.fast.scaled_dot_product_attention(
        queries,
        mx.repeat(keys, 5, axis=0),
        mx.repeat(values, 5, axis=0),
        scale=1.0,
        mask=mask if is_masked else None,
    )
    assert mx.allclose(apart.output, exact, atol=1e-5)
