"""Matrix products of a few queries a row, in the form that the device is fastest at."""

from functools import cache as memoize
from typing import Final

import mlx.core as mx

from ..device import is_cpu

_MAX_VECTORS: Final = 4
"""On a CPU, up to so many vectors by a matrix are faster one by one than as a matrix: a BLAS packs
and shares out among its threads what is too small for either. Measured with MKL, 3 x 64 by 64 x 64:
0.4 us a vector against 4 us for the three; beside other work on the cores, 70 us."""


def num_parts(num_vectors: int, dtype: mx.Dtype) -> int:
    """Return into how many products the product of *num_vectors* by a matrix is best cut."""
    is_cut = num_vectors <= _MAX_VECTORS and dtype == mx.float32 and is_cpu()
    return num_vectors if is_cut else 1


def multiply(left: mx.array, right: mx.array) -> mx.array:
    """Multiply (..., M, D) by (..., D, T)."""
    if num_parts(left.shape[-2], left.dtype) == 1:
        return left @ right
    return (left[..., None, :] @ right[..., None, :, :])[..., 0, :]


def multiply_chosen(
    left: mx.array, right: mx.array, of_left: mx.array, of_right: mx.array
) -> mx.array:
    """Multiply matrices of *left*, (N, M, D), by those of *right*, (P, D, T), chosen by index.

    Returns (*of_left.shape, M, T). *right* is not copied where MLX can do without.
    """
    if _can_gather(right.dtype):
        return mx.gather_mm(left, right, of_left, of_right)
    return left[of_left] @ right[of_right]


@memoize
def _can_gather(dtype: mx.Dtype) -> bool:
    """Try: on a CPU it is made for float32 only."""
    ones = mx.ones((1, 1, 1), dtype)
    try:
        mx.eval(mx.gather_mm(ones, ones, mx.array([0]), mx.array([0])))
    except RuntimeError:
        return False
    return True
