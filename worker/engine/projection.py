"""Project only wanted positions onto the vocabulary.

A prefill needs the logits of its last token, and models compute those of all: with a small
model and a large vocabulary that is a fifth of the work. Models have no parameter for it, so
their output layer is told which positions to look at while a forward runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

Select = Callable[[mx.array], mx.array]
"""Takes hidden states (rows, tokens, size) and keeps some of the tokens."""

_MAX_ERROR: Final = 0.05
"""In units of the logits' spread; a wrong position is off by more than one."""


class Projection:
    """A model whose output layer can be told which positions to project.

    A model whose output layer isn't found, or doesn't work on one position as it does on
    many, projects everything as ever: callers must take logits of either width.
    """

    def __init__(self, model: Module) -> None:
        self._layer = _output_layer(model)
        if self._layer is None:
            return
        if self._layer.is_selection_right is None:  # nobody has tried this model yet
            self._layer.is_selection_right = self._is_right(model)
        if not self._layer.is_selection_right:
            self._layer = None

    @property
    def is_selective(self) -> bool:
        """Whether only the wanted positions are computed."""
        return self._layer is not None

    @contextmanager
    def only(self, select: Select) -> Iterator[None]:
        """Project only what *select* keeps, in forwards that run inside."""
        if self._layer is None:
            yield
            return
        self._layer.selection = select
        try:
            yield
        finally:
            self._layer.selection = None

    def _is_right(self, model: Module) -> bool:
        tokens = mx.array([[0, 1, 2]])
        expected = model(tokens, cache=make_prompt_cache(model))[:, -1:]
        with self.only(last_position):
            actual = model(tokens, cache=make_prompt_cache(model))
        if actual.shape != expected.shape:
            return False
        error = mx.max(mx.abs((actual - expected).astype(mx.float32)))
        spread = mx.std(expected.astype(mx.float32))
        return bool(error <= _MAX_ERROR * spread)


def last_position(hidden: mx.array) -> mx.array:
    """Keep the last token of every row."""
    return hidden[:, -1:]


def _output_layer(model: Module) -> Any:
    """Return the one layer that projects onto the vocabulary, made selective, or None."""
    modules: list[tuple[str, Any]] = model.named_modules()  # type: ignore[no-untyped-call]
    named = [(path.rsplit(".", 1)[-1], layer) for path, layer in modules]
    heads = [layer for name, layer in named if name == "lm_head"]
    tied = [layer for _, layer in named if hasattr(layer, "as_linear")]
    found = heads or tied
    if len(found) != 1:
        return None
    (layer,) = found
    if not hasattr(layer, "selection"):
        # A subclass of its own class, so that whoever asks what the layer is gets the answer
        # that it knows (quantized, adapted), and the weights keep their names.
        method = "__call__" if heads else "as_linear"
        layer.__class__ = _selective(type(layer), method)
        layer.selection = layer.is_selection_right = None
    return layer


def _selective(base: type[Any], method: str) -> type[Any]:
    project = getattr(base, method)

    def selected(self: Any, hidden: mx.array, *args: Any) -> Any:
        kept = hidden if self.selection is None else self.selection(hidden)
        return project(self, kept, *args)

    return type(base.__name__, (base,), {method: selected})
