"""Rows computed together over shared prefixes that are stored once."""

from collections import Counter
from collections.abc import Sequence as Seq
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ...sequence import Sequence
from ..prefill_reader import PrefillReader, forward_with_reader
from ..projection import Projection
from ..row_runner import check_range
from ..runner import CacheKind, DeviceSegment, Segment
from ..segments import KVSegment, LayerKV, copy_tokens
from . import attention
from .group import MAX_ABSORBED_TOKENS, Group, Row
from .layout import depth_first, pack


class SharedPrefixRunner:
    """A ModelRunner for models whose layers all hold plain keys and values.

    A segment is the shared node: rows attached with the same segment object share its memory
    and its products. TypeError for models with windows, recurrence or caches of their own.
    """

    cache_kind = CacheKind.SEGMENTS
    shares_prefix = True

    def __init__(self, model: Module) -> None:
        caches = make_prompt_cache(model)
        if not all(type(cache) is KVCache for cache in caches):
            names = sorted({type(cache).__name__ for cache in caches})
            raise TypeError(f"prefixes of such caches can't be shared ({', '.join(names)})")
        attention.install()
        self._model = model
        self._projection = Projection(model)
        self._num_layers = len(caches)
        self._rows: dict[Sequence, Row] = {}
        self.num_real_tokens = 0
        self.num_padded_tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' own buffers, capacity included."""
        return sum(array.nbytes for array in self.state(list(self._rows)))

    @property
    def pad_share(self) -> float:
        """Share of all tokens computed so far that were pads."""
        return self.num_padded_tokens / max(1, self.num_padded_tokens + self.num_real_tokens)

    def attach(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Give *sequence* a row that refers to *prefix*."""
        self._rows[sequence] = Row(cast(Seq[KVSegment], prefix))

    def detach(self, sequence: Sequence) -> None:
        """Drop the row; unknown sequences are ignored.

        Memory inside of a group goes when the rest of it computes next.
        """
        row = self._rows.pop(sequence, None)
        if row is not None:
            row.leave()

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
        """Compute the next *chunks* of *rows*, chunks of similar length in one forward."""
        lengths = [len(chunk) for chunk in chunks]
        order: list[int] = []
        logits = []
        for members in pack(lengths):
            width = lengths[members[0]]
            padded = [[*chunks[i], *[0] * (width - lengths[i])] for i in members]
            logits.append(
                self._forward(
                    [rows[i] for i in members],
                    mx.array(padded),
                    [lengths[i] for i in members],
                    reader,
                )
            )
            order += members
        return _reorder(mx.concatenate(logits), _inverse(order))

    def decode(self, rows: Seq[Sequence], tokens: mx.array) -> mx.array:
        """Compute one token a row, all rows in one forward."""
        return self._forward(rows, tokens[:, None], [1] * len(rows))

    def state(self, rows: Seq[Sequence]) -> list[mx.array]:
        """Return the buffers of the groups that *rows* are in."""
        groups = {id(group): group for row in rows if (group := self._rows[row].group)}
        return [array for group in groups.values() for array in group.arrays]

    def extract(self, sequence: Sequence, start: int, end: int) -> DeviceSegment:
        """Copy tokens [start, end), shared or own."""
        row = self._rows[sequence]
        check_range(start, end, row.num_tokens)
        return KVSegment(
            tuple(_copy_layer(row, layer, start, end) for layer in range(self._num_layers))
        )

    def rebase(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Refer to *prefix* and drop the row's own copy of it.

        A prefix that is not longer than what the row shares already changes nothing; nor does
        one that adds so little that the row would take it back when it next joins a group.
        """
        old = self._rows[sequence]
        row = Row(cast(Seq[KVSegment], prefix))
        is_longer = row.prefix[: len(old.prefix)] == old.prefix
        num_added = row.num_shared - old.num_shared
        if num_added < 0 or (is_longer and num_added <= MAX_ABSORBED_TOKENS):
            return
        check_range(0, row.num_shared, old.num_tokens)
        dropped = row.num_shared - old.num_shared
        row.num_own = old.num_own - dropped
        row.group = _without(old, dropped, self._num_layers, row)
        old.leave()
        self._rows[sequence] = row

    def _forward(
        self,
        rows: Seq[Sequence],
        tokens: mx.array,
        num_new: Seq[int],
        reader: PrefillReader | None = None,
    ) -> mx.array:
        """Compute right-padded *tokens* (rows, width); logits after each row's last real one."""
        ordered, order = self._group(rows)
        lengths = [num_new[index] for index in order]
        ordered.begin(lengths)
        self.num_real_tokens += sum(lengths)
        self.num_padded_tokens += tokens.size - sum(lengths)
        if reader is not None:
            read = forward_with_reader(
                self._projection,
                lambda: self._model(_reorder(tokens, order), cache=ordered.layers),
                [rows[index] for index in order],
                lengths,
                reader,
            )
            return _reorder(read, _inverse(order))
        last = mx.array(lengths)[:, None, None] - 1
        with self._projection.only(lambda hidden: mx.take_along_axis(hidden, last, axis=1)):
            logits: mx.array = self._model(_reorder(tokens, order), cache=ordered.layers)
        if logits.shape[1] != 1:
            logits = mx.take_along_axis(logits, last, axis=1)
        return _reorder(logits[:, 0], _inverse(order))

    def _group(self, rows: Seq[Sequence]) -> tuple[Group, list[int]]:
        """Return the group of exactly *rows*, and their indices in its order."""
        members = [self._rows[sequence] for sequence in rows]
        group = members[0].group
        if group is None or not group.is_exactly(members):
            rows_of_all = self._rows.values()
            num_users = Counter(id(segment) for row in rows_of_all for segment in row.prefix)
            for row in members:
                row.absorb(num_users)
            order = depth_first([row.prefix for row in members])
            return Group([members[index] for index in order], self._num_layers), order
        place = {id(row): index for index, row in enumerate(members)}
        return group, [place[id(row)] for row in group.rows]


def _without(old: Row, dropped: int, num_layers: int, row: Row) -> Group | None:
    """Return a group of *row* alone, with the own tokens of *old* behind *dropped*."""
    if row.num_own == 0:
        return None
    group = Group([row], 0)
    group.adopt([old.own(layer, dropped, old.num_own) for layer in range(num_layers)])
    return group


def _copy_layer(row: Row, layer: int, start: int, end: int) -> LayerKV:
    """Copy tokens [start, end) of one layer into memory of their own."""
    pieces, first = [], 0
    for kv in [*(segment.layers[layer] for segment in row.prefix), *row.own_pieces(layer)]:
        num_tokens = kv.keys.shape[2]
        pieces.append((first, num_tokens, kv))
        first += num_tokens
    copies = [
        [copy_tokens(array, max(0, start - at), min(num, end - at)) for array in kv]
        for at, num, kv in pieces
        if max(at, start) < min(at + num, end)
    ]
    return LayerKV(*(mx.concatenate(list(part), axis=2) for part in zip(*copies, strict=True)))


def _reorder(array: mx.array, order: Seq[int]) -> mx.array:
    """Permute rows; the usual case, already in order, costs nothing."""
    return array if list(order) == list(range(len(order))) else array[mx.array(list(order))]


def _inverse(order: Seq[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
