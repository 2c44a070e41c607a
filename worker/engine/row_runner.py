"""Rows one at a time: right for every model that mlx-lm can generate with, and the slowest."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeAlias, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from ..sequence import Sequence
from .prefill_reader import PrefillReader, forward_with_reader
from .projection import Projection, last_position
from .runner import MLX_LM_ALLOCATION, CacheKind, DeviceSegment, Segment, prefill_then_decode
from .segments import (
    KVSegment,
    QuantizedKVSegment,
    classify,
    extract_kv,
    flatten,
    restore_kv,
    state_arrays,
)
from .states import StateSegment, restore_states

CacheFactory: TypeAlias = Callable[[Module], list[Any]]
"""Makes a row's caches."""


class Row:
    """The caches of one sequence, as mlx-lm's models take them."""

    def __init__(
        self,
        model: Module,
        projection: Projection,
        kind: CacheKind,
        prefix: Seq[Segment],
        make_caches: CacheFactory = make_prompt_cache,
    ) -> None:
        self._model = model
        self._projection = projection
        self._kind = kind
        self.caches = make_caches(model)
        self.num_tokens = sum(segment.num_tokens for segment in prefix)
        if prefix and kind is CacheKind.SNAPSHOTS:
            restore_states(self.caches, cast(Seq[StateSegment], prefix))
        elif prefix:
            restore_kv(self.caches, cast(Seq[KVSegment | QuantizedKVSegment], prefix))

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, capacity included."""
        return sum(array.nbytes for array in state_arrays(self.caches))

    def forward(self, tokens: mx.array) -> mx.array:
        """Compute *tokens*, shape (n,); return the logits after the last, (1, vocabulary)."""
        self.num_tokens += tokens.shape[0]
        with self._projection.only(last_position):
            logits: mx.array = self._model(tokens[None], cache=self.caches)
        return logits[:, -1]

    def prefill(
        self, sequence: Sequence, chunk: Seq[int], reader: PrefillReader | None
    ) -> mx.array:
        """Compute *chunk* of the row's *sequence*; return what forward() does."""
        tokens = mx.array(list(chunk))
        if reader is None:
            return self.forward(tokens)
        self.num_tokens += len(chunk)
        return forward_with_reader(
            self._projection,
            lambda: self._model(tokens[None], cache=self.caches),
            [sequence],
            [len(chunk)],
            reader,
        )

    def extract(self, start: int, end: int) -> DeviceSegment:
        """Copy tokens [start, end); a state's *end* must be the row's length."""
        check_range(start, end, self.num_tokens)
        if self._kind is CacheKind.SEGMENTS:
            return extract_kv(self.caches, start, end)
        check_state_position(end, self.num_tokens)
        return StateSegment.capture(self.caches, start, end)


class RowRunner:
    """A ModelRunner that gives every row a forward of its own."""

    shares_prefix = False
    allocation = MLX_LM_ALLOCATION

    def __init__(self, model: Module, make_caches: CacheFactory = make_prompt_cache) -> None:
        self._model = model
        self._make_caches = make_caches
        self._projection = Projection(model)
        self._rows: dict[Sequence, Row] = {}
        self.cache_kind = classify(make_caches(model))

    @property
    def nbytes(self) -> int:
        """Bytes held by the rows, capacity included."""
        return sum(row.nbytes for row in self._rows.values())

    @property
    def padding(self) -> None:
        """Nothing that this runner could tell."""
        return None

    def attach(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Give *sequence* a row that starts with a copy of *prefix*."""
        self._rows[sequence] = Row(
            self._model, self._projection, self.cache_kind, prefix, self._make_caches
        )

    def detach(self, sequence: Sequence) -> None:
        """Drop the row; unknown sequences are ignored."""
        self._rows.pop(sequence, None)

    @property
    def reads_states(self) -> bool:
        """Whether the output layer can be told what to project."""
        return self._projection.is_selective

    def prefill(
        self,
        rows: Seq[Sequence],
        chunks: Seq[Seq[int]],
        reader: PrefillReader | None = None,
    ) -> mx.array:
        """Compute the next *chunks* of *rows*, one after the other."""
        logits = [
            self._rows[sequence].prefill(sequence, chunk, reader)
            for sequence, chunk in zip(rows, chunks, strict=True)
        ]
        return mx.concatenate(logits)

    def decode(self, rows: Seq[Sequence], tokens: mx.array) -> mx.array:
        """Compute one token a row, one row after the other."""
        return mx.concatenate(
            [
                self._rows[sequence].forward(tokens[index : index + 1])
                for index, sequence in enumerate(rows)
            ]
        )

    def prefill_and_decode(
        self,
        rows: Seq[Sequence],
        chunks: Seq[Seq[int]],
        decoding: Seq[Sequence],
        tokens: mx.array,
    ) -> mx.array:
        """Compute the chunks, then the tokens."""
        return prefill_then_decode(self, rows, chunks, decoding, tokens)

    def state(self, rows: Seq[Sequence]) -> list[mx.array]:
        """Return the arrays of the rows' caches."""
        return [array for row in rows for array in state_arrays(self._rows[row].caches)]

    def extract(self, sequence: Sequence, start: int, end: int) -> DeviceSegment:
        """Copy tokens [start, end) of a row, with its state at *end*."""
        return self._rows[sequence].extract(start, end)

    def rebase(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Nothing: every row owns all its keys and values."""


def check_range(start: int, end: int, num_tokens: int) -> None:
    """IndexError unless [start, end) is a range of the *num_tokens* that a row has computed."""
    if not 0 <= start < end <= num_tokens:
        raise IndexError(f"tokens [{start}, {end}) of a row that has computed {num_tokens}")


def check_state_position(end: int, num_tokens: int) -> None:
    """IndexError unless *end* is where the row stands: a state can't be taken back."""
    if end != num_tokens:
        raise IndexError(f"the state at {end} of a row that has computed {num_tokens}")


def is_batchable(caches: Seq[Any]) -> bool:
    """Say whether mlx-lm can merge such caches; whether it does so rightly is parity's affair.

    A merged rotating cache forgets the tokens that it should keep at the front for ever.
    """
    return all(hasattr(leaf, "merge") and not getattr(leaf, "keep", 0) for leaf in flatten(caches))
