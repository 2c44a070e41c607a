"""Rows decoded together on mlx-lm's own batch caches, prefilled one at a time."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from ..sequence import Sequence
from .prefill_reader import PrefillReader
from .projection import Projection
from .row_runner import Row, check_range, check_state_position, is_batchable
from .runner import MLX_LM_ALLOCATION, CacheKind, DeviceSegment, Segment, prefill_then_decode
from .segments import classify, extract_kv, flatten, state_arrays
from .states import StateSegment


class MergedRunner:
    """A ModelRunner on BatchKVCache and its kin.

    A row prefills on caches of its own. Its first decode merges it into the batch, where it
    stays until it leaves: joining pads and copies the batch, leaving copies what stays, so
    the joins and the leaves of a step are each made in one go, at the next decode.
    """

    shares_prefix = False
    allocation = MLX_LM_ALLOCATION

    def __init__(self, model: Module) -> None:
        caches = make_prompt_cache(model)
        if not is_batchable(caches):
            names = sorted({type(leaf).__name__ for leaf in flatten(caches)})
            raise TypeError(f"mlx-lm has no batch form of this model's caches ({', '.join(names)})")
        self._model = model
        self._projection = Projection(model)
        self._single: dict[Sequence, Row] = {}
        self._batch = _Batch(model)
        self.cache_kind = classify(caches)

    @property
    def nbytes(self) -> int:
        """Bytes held by the rows, capacity and padding included."""
        return self._batch.nbytes + sum(row.nbytes for row in self._single.values())

    @property
    def padding(self) -> None:
        """Nothing that this runner could tell."""
        return None

    def attach(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Give *sequence* a row that starts with a copy of *prefix*."""
        self._single[sequence] = Row(self._model, self._projection, self.cache_kind, prefix)

    def detach(self, sequence: Sequence) -> None:
        """Drop the row; unknown sequences are ignored.

        The memory of a row in the batch goes with the next decode.
        """
        self._single.pop(sequence, None)
        self._batch.discard(sequence)

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
        self._take_out(sequence for sequence in rows if sequence in self._batch)
        logits = [
            self._single[sequence].prefill(sequence, chunk, reader)
            for sequence, chunk in zip(rows, chunks, strict=True)
        ]
        return mx.concatenate(logits)

    def decode(self, rows: Seq[Sequence], tokens: mx.array) -> mx.array:
        """Compute one token a row, all rows in one forward."""
        wanted = set(rows)
        self._take_out(sequence for sequence in self._batch.rows if sequence not in wanted)
        self._batch.compact()
        self._batch.join({row: self._single.pop(row) for row in rows if row in self._single})
        return self._batch.forward(rows, tokens)

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
        """Return the arrays of the rows' caches, the whole batch's where one is in it."""
        arrays = self._batch.arrays if any(row in self._batch for row in rows) else []
        single = (self._single[row].caches for row in rows if row in self._single)
        return arrays + [array for caches in single for array in state_arrays(caches)]

    def extract(self, sequence: Sequence, start: int, end: int) -> DeviceSegment:
        """Copy tokens [start, end) of a row, with its state at *end*."""
        if sequence in self._single:
            return self._single[sequence].extract(start, end)
        num_tokens = self._batch.num_tokens(sequence)
        check_range(start, end, num_tokens)
        if self.cache_kind is CacheKind.SEGMENTS:
            return self._batch.extract_kv(sequence, start, end)
        check_state_position(end, num_tokens)
        return StateSegment.capture(self._batch.extract(sequence), start, end)

    def rebase(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Nothing: every row owns all its keys and values."""

    def _take_out(self, leaving: Iterable[Sequence]) -> None:
        """Give rows that the batch goes on without caches of their own again."""
        for sequence in list(leaving):
            row = Row(self._model, self._projection, self.cache_kind, ())
            row.caches = self._batch.extract(sequence)
            row.num_tokens = self._batch.num_tokens(sequence)
            self._single[sequence] = row
            self._batch.discard(sequence)


class _Batch:
    """The merged caches, and which row of them belongs to whom."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._caches: list[Any] = []
        self._rows: list[Sequence | None] = []  # None: left, still in the arrays
        self._lengths: dict[Sequence, int] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._lengths

    @property
    def rows(self) -> list[Sequence]:
        """The rows that have not left, in the order of the arrays."""
        return [row for row in self._rows if row is not None]

    @property
    def arrays(self) -> list[mx.array]:
        """Everything held."""
        return state_arrays(self._caches)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays)

    def num_tokens(self, sequence: Sequence) -> int:
        """Tokens that the row has computed."""
        return self._lengths[sequence]

    def discard(self, sequence: Sequence) -> None:
        """Mark a row as gone; an empty batch is dropped at once."""
        if self._lengths.pop(sequence, None) is None:
            return
        self._rows[self._rows.index(sequence)] = None
        if not self._lengths:
            self._caches, self._rows = [], []

    def compact(self) -> None:
        """Copy the rows that stay, if any has left."""
        keep = [index for index, row in enumerate(self._rows) if row is not None]
        if len(keep) < len(self._rows):
            for cache in self._caches:
                cache.filter(keep)
            self._rows = [self._rows[index] for index in keep]

    def join(self, joining: dict[Sequence, Row]) -> None:
        """Merge single rows and append them to the batch."""
        if not joining:
            return
        rows = list(joining.values())
        merged = [
            layer[0].merge(list(layer)) for layer in zip(*(r.caches for r in rows), strict=True)
        ]
        if self._caches:
            for cache, other in zip(self._caches, merged, strict=True):
                cache.extend(other)
        else:
            self._caches = merged
        self._rows += joining
        self._lengths |= {sequence: row.num_tokens for sequence, row in joining.items()}

    def forward(self, rows: Seq[Sequence], tokens: mx.array) -> mx.array:
        """Compute one token of every row; logits (len(rows), vocabulary) in *rows*' order."""
        place = {sequence: index for index, sequence in enumerate(rows)}
        order = [place[sequence] for sequence in self.rows]
        for sequence in rows:
            self._lengths[sequence] += 1
        in_order = order == list(range(len(rows)))
        tokens = tokens if in_order else tokens[mx.array(order)]
        logits: mx.array = self._model(tokens[:, None], cache=self._caches)
        if in_order:
            return logits[:, -1]
        back = sorted(range(len(order)), key=order.__getitem__)
        return logits[:, -1][mx.array(back)]

    def extract(self, sequence: Sequence) -> list[Any]:
        """Return single caches with a copy of the row."""
        index = self._rows.index(sequence)
        return [cache.extract(index) for cache in self._caches]

    def extract_kv(self, sequence: Sequence, start: int, end: int) -> DeviceSegment:
        """Copy tokens [start, end) of a row of plain caches."""
        # What every row has in front of its tokens follows from the lengths: asking the
        # cache for its padding would wait for the device.
        width = next(flatten(self._caches)).size()
        first = width - self._lengths[sequence]
        return extract_kv(self._caches, start, end, row=self._rows.index(sequence), first=first)
