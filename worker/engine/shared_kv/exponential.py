"""exp of scores below their peak, several times faster on a CPU than MLX's own."""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

import mlx.core as mx

from ..device import is_cpu

_LOG2_E: Final = 1.4426950408889634
_COEFFICIENTS: Final = (
    1.0000000005920204,
    0.6931472056005106,
    0.2402264660871389,
    0.055503289975178886,
    0.009618519534356884,
    0.0013399860363037684,
    0.00015337576830683796,
)
"""Of 2^x on [-0.5, 0.5]: least squares of the relative error at Chebyshev nodes; at most 1.9e-9."""
_MIN_EXPONENT: Final = -126
"""Of a normal float32; what is smaller becomes 2^-126, which weighs nothing beside a one."""
_MANTISSA_BITS: Final = 23
_BIAS: Final = 127
_MAX_SHAPES: Final = 256


def exp_below_one(x: mx.array) -> mx.array:
    """Return exp(x) of float32 *x* <= 0, to 1.5e-7 of one; NaN stays NaN.

    MLX's exp calls a function for each number on a CPU (12 ns). This takes operations that a
    compiler turns into vector instructions, fused where there is one: 2 to 3 ns, up to 9 for
    arrays that don't fit into a cache.
    """
    return _compiled(tuple(x.shape))(x) if is_cpu() else mx.exp(x)


@lru_cache(maxsize=_MAX_SHAPES)
def _compiled(_shape: tuple[int, ...]) -> Callable[[mx.array], mx.array]:
    # MLX keeps what it has traced for each shape as long as the function lives.
    compiled: Callable[[mx.array], mx.array] = mx.compile(_by_polynomial)
    return compiled


def _by_polynomial(x: mx.array) -> mx.array:
    """Compute 2^(n + f) = 2^n * 2^f with n an integer: the exponent's bits, and a polynomial."""
    power = mx.maximum(x * _LOG2_E, _MIN_EXPONENT)
    whole = (power - 0.5).astype(mx.int32)  # cuts off towards zero: the nearest, as power <= 0
    rest = power - whole.astype(mx.float32)
    fraction = rest * _COEFFICIENTS[-1] + _COEFFICIENTS[-2]
    for coefficient in reversed(_COEFFICIENTS[:-2]):
        fraction = fraction * rest + coefficient
    return ((whole + _BIAS) << _MANTISSA_BITS).view(mx.float32) * fraction
