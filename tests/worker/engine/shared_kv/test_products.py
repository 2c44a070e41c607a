"""A few vectors by a matrix: the same product in whichever form it is computed."""

import mlx.core as mx
import pytest
from headwater.worker.engine.shared_kv.products import multiply, multiply_chosen, num_parts


@pytest.mark.parametrize("num_vectors", [1, 3, 4, 5])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_a_product_does_not_depend_on_its_form(num_vectors: int, dtype: mx.Dtype) -> None:
    """Rows and heads before it are kept apart."""
    left = mx.random.normal((2, 3, num_vectors, 8), key=mx.random.key(1)).astype(dtype)
    right = mx.random.normal((2, 3, 8, 5), key=mx.random.key(2)).astype(dtype)

    ours = multiply(left, right)

    assert ours.shape == (2, 3, num_vectors, 5)
    expected = mx.sum(left[..., None].astype(mx.float32) * right[..., None, :, :], axis=-2)
    assert mx.allclose(
        ours.astype(mx.float32), expected, atol=3e-2 if dtype == mx.float16 else 1e-5
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_matrices_are_chosen_by_index(dtype: mx.Dtype) -> None:
    """Some twice, some not at all."""
    left = mx.random.normal((4, 2, 8), key=mx.random.key(1)).astype(dtype)
    right = mx.random.normal((3, 8, 5), key=mx.random.key(2)).astype(dtype)
    of_left, of_right = mx.array([[3, 0], [1, 1]]), mx.array([[0, 2], [2, 0]])

    ours = multiply_chosen(left, right, of_left, of_right)

    expected = mx.stack(
        [
            mx.stack([left[3] @ right[0], left[0] @ right[2]]),
            mx.stack([left[1] @ right[2], left[1] @ right[0]]),
        ]
    )
    assert mx.allclose(ours, expected, atol=3e-2 if dtype == mx.float16 else 1e-5)


def test_only_few_vectors_of_float32_are_taken_apart() -> None:
    """A BLAS is at its best with many; 16-bit numbers don't go through it on a CPU."""
    assert num_parts(64, mx.float32) == 1
    assert num_parts(3, mx.float16) == 1
