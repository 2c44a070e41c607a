"""exp of scores below their peak is that of float32, whatever they are."""

import mlx.core as mx
import numpy as np
import pytest
from headwater.worker.engine.shared_kv.exponential import exp_below_one


@pytest.mark.parametrize("scale", [1e-6, 0.1, 1, 10, 40])
def test_it_is_exp_to_the_last_bits(scale: float) -> None:
    """Against double precision, over all sizes that matter."""
    x = -np.abs(np.random.default_rng(1).normal(0, scale, 20_000)).astype(np.float32)

    ours = np.array(exp_below_one(mx.array(x))).astype(np.float64)

    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(ours - exact)) < 1.5e-7
    assert np.max(np.abs(ours - exact) / np.maximum(exact, 1e-6)) < 2e-6


def test_at_the_peak_it_is_one() -> None:
    """One key alone gets the whole weight."""
    assert exp_below_one(mx.zeros((3,))).tolist() == pytest.approx([1.0] * 3, abs=1e-8)


@pytest.mark.parametrize("x", [-88.0, -1e4, -3.4e38, -float("inf")])
def test_what_is_out_of_sight_weighs_nothing(x: float) -> None:
    """Masked scores are the lowest finite number, or infinitely low."""
    assert 0 <= exp_below_one(mx.array([x])).item() < 1e-37


def test_a_broken_score_stays_broken() -> None:
    """Whoever computes NaN has to find it in the logits."""
    assert np.isnan(exp_below_one(mx.array([float("nan")])).item())
