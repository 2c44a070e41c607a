"""States of recurrent layers: each row has its own, and a forward computes them together."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

RowStates = Mapping[int, tuple[mx.array | None, ...]]
"""By layer, the arrays (1, ...) of a row; None, or no layer at all, before its first token."""


class StateBatch:
    """The states of some rows, as mlx-lm's models take them.

    Chunks of unlike lengths are right-padded: on a state that is not empty, left padding would
    change it.
    """

    def __init__(self, sizes: Mapping[int, int], rows: Seq[RowStates]) -> None:
        """*sizes* tells of each recurrent layer how many arrays it has."""
        self._by_layer = {
            layer: _joined(size, [row.get(layer) for row in rows]) for layer, size in sizes.items()
        }

    @property
    def caches(self) -> list[Any]:
        """One a recurrent layer."""
        return list(self._by_layer.values())

    @property
    def arrays(self) -> list[mx.array]:
        """Everything held."""
        return [array for cache in self.caches for array in cache.cache if array is not None]

    def prepare(self, num_new: Seq[int]) -> None:
        """Tell the caches what is pads in the one forward that follows."""
        if min(num_new) < max(num_new):
            for cache in self.caches:
                cache.prepare(lengths=list(num_new))

    def row(self, index: int) -> RowStates:
        """Copy a row's states into memory of their own."""
        return {
            layer: tuple(_row(array, index) for array in cache.cache)
            for layer, cache in self._by_layer.items()
        }


def as_caches(states: RowStates) -> dict[int, Any]:
    """Return mlx-lm's caches of one row."""
    return {layer: _cache(arrays) for layer, arrays in states.items()}


def _joined(size: int, rows: Seq[tuple[mx.array | None, ...] | None]) -> Any:
    of_rows = [(None,) * size if row is None else row for row in rows]
    return _cache([_stacked([row[at] for row in of_rows]) for at in range(size)])


def _cache(arrays: Seq[mx.array | None]) -> Any:
    cache: Any = ArraysCache(len(arrays))
    cache.cache = list(arrays)
    return cache


def _stacked(arrays: Seq[mx.array | None]) -> mx.array | None:
    """Join rows; one without a state starts from zeros, as models do where there is none."""
    like = next((array for array in arrays if array is not None), None)
    if like is None:
        return None
    return mx.concatenate([mx.zeros_like(like) if array is None else array for array in arrays])


def _row(array: mx.array | None, index: int) -> mx.array | None:
    # A gather: a view would keep all rows' states alive.
    return None if array is None else mx.take(array, mx.array([index]), axis=0)
