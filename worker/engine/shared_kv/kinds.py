"""ModelLayers: which of a model's layers attend, over which window, and which carry a state."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..segments import flatten


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """Caches by their place among the model's, lists of caches flattened."""

    attention: dict[int, int | None]
    """Layers with keys and values, and their sliding windows in tokens; None is unlimited."""
    recurrent: dict[int, int]
    """Layers with a state, and of how many arrays it is."""
    _shape: Any
    """The model's list of caches, with places in their stead."""

    @classmethod
    def of(cls, model: Module) -> "ModelLayers":
        """Look at the caches that the model makes; TypeError where others are among them."""
        caches = make_prompt_cache(model)
        leaves = list(flatten(caches))
        names = sorted({type(leaf).__name__ for leaf in leaves if not _is_known(leaf)})
        if names:
            raise TypeError(f"prefixes of such caches can't be shared ({', '.join(names)})")
        recurrent = {
            place: len(leaf.cache)
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, ArraysCache)
        }
        attention = {
            place: getattr(leaf, "max_size", None)
            for place, leaf in enumerate(leaves)
            if place not in recurrent
        }
        if not attention:
            raise TypeError("a model without keys and values has no prefix to share")
        return cls(attention, recurrent, _places(caches, iter(range(len(leaves)))))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the layers with keys and values."""
        return tuple(self.attention.values())

    def arrange(self, attention: Iterable[Any], recurrent: Iterable[Any]) -> list[Any]:
        """Return caches as the model takes them."""
        leaves = dict(zip(self.attention, attention, strict=True))
        leaves |= zip(self.recurrent, recurrent, strict=True)
        arranged: list[Any] = _arranged(self._shape, leaves)
        return arranged


def _is_known(cache: Any) -> bool:
    """Say whether a cache is mlx-lm's own: a subclass may bend the rules.

    One that keeps its first tokens for ever has another mask.
    """
    if type(cache) is RotatingKVCache:
        return not cache.keep
    return type(cache) in (KVCache, ArraysCache)


def _places(caches: Seq[Any], places: Iterator[int]) -> list[Any]:
    return [
        _places(cache.caches, places) if isinstance(cache, CacheList) else next(places)
        for cache in caches
    ]


_cache_list: Any = CacheList  # untyped


def _arranged(shape: Seq[Any], leaves: dict[int, Any]) -> list[Any]:
    return [
        _cache_list(*_arranged(part, leaves)) if isinstance(part, list) else leaves[part]
        for part in shape
    ]
