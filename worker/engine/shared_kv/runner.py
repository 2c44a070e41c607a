"""Rows computed together over shared prefixes that are stored once."""

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from ...allocation import Allocation
from ...sequence import Sequence
from ..prefill_reader import PrefillReader, forward_with_reader
from ..projection import Projection
from ..row_runner import check_range, check_state_position
from ..runner import CacheKind, DeviceSegment, Padding, Segment, prefill_then_decode
from . import attention
from .coalescing import Coalescer
from .decode import TAIL_TOKENS, DecodeGroup
from .joint import Joint
from .kinds import ModelLayers
from .layout import depth_first, pack
from .pages import MAX_FREE_SHARE, MIN_SLAB_PAGES, PAGE_TOKENS
from .pool import PagePool
from .prefill import PrefillBatch
from .row import MAX_ABSORBED_TOKENS, Row
from .snapshots import shared_parts, state_segment, states_behind


class SharedPrefixRunner:
    """A ModelRunner for models whose layers hold keys and values, or a recurrent state.

    A segment is the shared node: rows attached with the same segment object share its memory
    and its products. Layers with a sliding window hold every token, so that a row can go on
    anywhere, and compute those in their window; where a layer has a state, segments end in one,
    and each row has its own. TypeError for other caches.
    """

    shares_prefix = True
    allocation = Allocation(PAGE_TOKENS, TAIL_TOKENS, MIN_SLAB_PAGES * PAGE_TOKENS, MAX_FREE_SHARE)

    def __init__(self, model: Module) -> None:
        self._layers = ModelLayers.of(model)
        self.cache_kind = CacheKind.SNAPSHOTS if self._layers.recurrent else CacheKind.SEGMENTS
        attention.install()
        self._model = model
        self._projection = Projection(model)
        self._pool = PagePool(len(self._layers.attention))
        self._coalescer = Coalescer()
        self._rows: dict[Sequence, Row] = {}
        self._group: DecodeGroup | None = None
        self._num_prefilled = 0
        self._num_pads = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' own keys, values and states, tails and pages counted whole."""
        return sum(array.nbytes for array in self.state(list(self._rows)))

    @property
    def padding(self) -> Padding:
        """Free pages and the free ends of tails; and the pads of all prefills so far."""
        rows = self._rows.values()
        groups = {id(row.group): row.group for row in rows if row.group is not None}
        private = sum(segment.num_tokens for row in rows for segment in row.private)
        tails = sum(group.num_held_tokens for group in groups.values())
        return Padding(
            num_held=private + tails + self._pool.num_held_tokens,
            num_used=sum(row.num_own for row in rows),
            num_prefilled=self._num_prefilled,
            num_pads=self._num_pads,
        )

    def attach(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Give *sequence* a row that refers to *prefix*."""
        num_layers = len(self._layers.attention)
        states = states_behind(prefix)
        self._rows[sequence] = Row(self._pool, num_layers, shared_parts(prefix), states)

    def detach(self, sequence: Sequence) -> None:
        """Drop the row; unknown sequences are ignored.

        Memory inside of a group goes when the rest of it computes next.
        """
        row = self._rows.pop(sequence, None)
        if row is not None:
            row.leave()
        if not self._rows:
            self._coalescer.clear()

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
        """Compute the next *chunks* of *rows* in one forward, or as a *reader* needs it."""
        if reader is None and not self._layers.recurrent:
            return self._forward_jointly(rows, chunks, (), None)
        order: list[int] = []
        logits = []
        for members in self._packed(rows, chunks):
            logits.append(
                self._prefill([rows[i] for i in members], [chunks[i] for i in members], reader)
            )
            order += members
        return _reorder(mx.concatenate(logits), _inverse(order))

    def prefill_and_decode(
        self,
        rows: Seq[Sequence],
        chunks: Seq[Seq[int]],
        decoding: Seq[Sequence],
        tokens: mx.array,
    ) -> mx.array:
        """Compute *chunks* of *rows* and one token a row of *decoding* in one forward.

        In two where there are recurrent layers: they take a row's tokens in order.
        """
        if self._layers.recurrent:
            return prefill_then_decode(self, rows, chunks, decoding, tokens)
        return self._forward_jointly(rows, chunks, decoding, tokens)

    def decode(self, rows: Seq[Sequence], tokens: mx.array) -> mx.array:
        """Compute one token a row, all rows in one forward."""
        group, order = self._group_of(rows)
        group.begin()
        caches = self._layers.arrange(group.layers, group.states.caches)
        logits = self._forward(_reorder(tokens, order)[:, None], [1] * len(rows), caches)
        return _reorder(logits, _inverse(order))

    def state(self, rows: Seq[Sequence]) -> list[mx.array]:
        """Return what *rows* hold, with the tails of their groups and all pages."""
        members = [self._rows[row] for row in rows]
        private = [array for row in members for array in row.arrays]
        groups = {id(row.group): row.group for row in members if row.group is not None}
        tails = [array for group in groups.values() for array in group.arrays]
        return private + tails + self._pool.arrays + self._coalescer.arrays

    def extract(self, sequence: Sequence, start: int, end: int) -> DeviceSegment:
        """Copy tokens [start, end), shared or own, with the state at *end* where there is one."""
        row = self._rows[sequence]
        check_range(start, end, row.num_tokens)
        if self.cache_kind is CacheKind.SEGMENTS:
            return row.copy(start, end)
        check_state_position(end, row.num_tokens)
        return state_segment(self._layers, row.copy(start, end), row.states)

    def rebase(self, sequence: Sequence, prefix: Seq[Segment]) -> None:
        """Refer to *prefix* and drop the row's own copy of it.

        A prefix that is not longer than what the row shares already changes nothing; nor does
        one that adds so little that the row would take it back when it next joins a group.
        """
        row = self._rows[sequence]
        new = tuple(shared_parts(prefix))
        num_added = sum(segment.num_tokens for segment in new) - row.num_shared
        is_longer = new[: len(row.prefix)] == row.prefix
        if num_added < 0 or (is_longer and num_added <= MAX_ABSORBED_TOKENS):
            return
        check_range(0, row.num_shared + num_added, row.num_tokens)
        if num_added:
            row.drop_own(num_added)
        row.set_prefix(new)

    def _packed(self, rows: Seq[Sequence], chunks: Seq[Seq[int]]) -> list[list[int]]:
        """Return the indices of chunks of similar length, each lot in depth-first order."""
        lots = pack([len(chunk) for chunk in chunks])
        prefixes = [[self._rows[rows[index]].prefix for index in lot] for lot in lots]
        orders = map(depth_first, prefixes)
        return [[lot[place] for place in order] for lot, order in zip(lots, orders, strict=True)]

    def _prefill(
        self, rows: Seq[Sequence], chunks: Seq[Seq[int]], reader: PrefillReader | None
    ) -> mx.array:
        """Compute chunks, right-padded to the longest; rows stand in depth-first order."""
        lengths = [len(chunk) for chunk in chunks]
        width = max(lengths)
        tokens = mx.array([[*chunk, *[0] * (width - len(chunk))] for chunk in chunks])
        batch = PrefillBatch([self._rows[row] for row in rows], lengths, self._layers)
        caches = self._layers.arrange(batch.layers, batch.states.caches)
        if reader is None:
            logits = self._forward(tokens, lengths, caches)
        else:
            logits = forward_with_reader(
                self._projection,
                lambda: self._model(tokens, cache=caches),
                rows,
                lengths,
                reader,
            )
        batch.finish()
        self._num_prefilled += tokens.size
        self._num_pads += tokens.size - sum(lengths)
        return logits

    def _forward_jointly(
        self,
        rows: Seq[Sequence],
        chunks: Seq[Seq[int]],
        decoding: Seq[Sequence],
        tokens: mx.array | None,
    ) -> mx.array:
        """Compute all in one forward; logits after each row's last token, *decoding* last."""
        joint = Joint()
        batches: list[PrefillBatch] = []
        given: list[mx.array] = []
        order: list[int] = []
        for lot in self._packed(rows, chunks):
            members = [self._rows[rows[index]] for index in lot]
            lengths = [len(chunks[index]) for index in lot]
            batches.append(PrefillBatch(members, lengths, self._layers))
            joint.add(batches[-1].layers, [row.num_tokens for row in members], lengths)
            given.append(mx.array([token for i in lot for token in chunks[i]], dtype=mx.int32))
            order += lot
        if tokens is not None:
            group, place = self._group_of(decoding)
            starts = [row.num_tokens for row in group.rows]
            group.begin()
            joint.add(group.layers, starts, [1] * len(starts))
            given.append(_reorder(tokens, place).astype(mx.int32))
            order += [len(rows) + index for index in place]
        logits = self._forward_flat(mx.concatenate(given), joint)
        for batch in batches:
            batch.finish()
        self._num_prefilled += sum(map(len, chunks)) + joint.num_pads
        self._num_pads += joint.num_pads
        return _reorder(logits, _inverse(order))

    def _forward_flat(self, tokens: mx.array, joint: Joint) -> mx.array:
        """Compute *tokens* (tokens,) of all parts; logits after each row's last one."""
        ends = joint.ends
        caches = self._layers.arrange(joint.layers(), ())
        with self._projection.only(lambda hidden: hidden[ends]):
            logits: mx.array = self._model(tokens[:, None], cache=caches)
        if logits.shape[0] != ends.shape[0]:
            logits = logits[ends]
        return logits[:, 0]

    def _forward(self, tokens: mx.array, num_new: Seq[int], caches: list[Any]) -> mx.array:
        """Compute right-padded *tokens* (rows, width); logits after each row's last real one."""
        last = mx.array(list(num_new))[:, None, None] - 1
        with self._projection.only(lambda hidden: mx.take_along_axis(hidden, last, axis=1)):
            logits: mx.array = self._model(tokens, cache=caches)
        if logits.shape[1] != 1:
            logits = mx.take_along_axis(logits, last, axis=1)
        return logits[:, 0]

    def _group_of(self, rows: Seq[Sequence]) -> tuple[DecodeGroup, list[int]]:
        """Return the group of exactly *rows*, and their indices in its order."""
        members = [self._rows[sequence] for sequence in rows]
        if self._group is not None and self._group.is_exactly(members):
            place = {id(row): index for index, row in enumerate(members)}
            return self._group, [place[id(row)] for row in self._group.rows]
        num_users = Counter(id(each) for row in self._rows.values() for each in row.prefix)
        order = depth_first([row.prefix for row in members])
        ordered = [members[index] for index in order]
        self._group = DecodeGroup(ordered, num_users, self._pool, self._coalescer, self._layers)
        return self._group, order


def _reorder(array: mx.array, order: Seq[int]) -> mx.array:
    """Permute rows; the usual case, already in order, costs nothing."""
    return array if list(order) == list(range(len(order))) else array[mx.array(list(order))]


def _inverse(order: Seq[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
