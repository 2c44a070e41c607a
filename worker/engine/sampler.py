"""The next token of every row: one graph for the batch, one uniform number a draw.

A draw walks the kept tokens in descending order of their logits, ties by token id, until
their cumulative weight passes the uniform number. Filters look at the distribution at
temperature 1 and the temperature comes last, as in mlx_lm.sample_utils, so each filter keeps
a prefix of that order and the walk needs the head of it only. What changes the distribution
comes before the filters: logit bias, repetition, presence and frequency penalty (mlx-lm's
order), then the ids that are ruled out, then the grammars' masks.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from headwater.schemas import SamplingParams

from ..sequence import Sequence
from .adjust import Bans, Biases
from .draws import stream_key, uniforms
from .filters import Filters, choose, choose_among_all
from .masks import GrammarMasks
from .penalties import Penalties

SAMPLER_VERSION: Final = 1
"""Changes whenever the same job could get other tokens: a resume then restarts."""

NOT_FINITE: Final = -1
"""Stands for the token of a row whose logits are not finite."""

NO_TOKEN: Final = -2
"""Stands for the token of a row that may have none: every id is ruled out."""


class Sampler:
    """Samples by each job's own parameters; the same draw at any row of any batch.

    What depends on the rows alone is built when the rows change, not every step.
    """

    def __init__(self, vocabulary_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocabulary_size = vocabulary_size
        # Configs name end tokens that an unpadded output layer does not have.
        self._eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocabulary_size)
        self._batch = _BatchParameters((), vocabulary_size, self._eos_token_ids)

    def sample(
        self, logits: mx.array, rows: Seq[Sequence], last_tokens: mx.array | None = None
    ) -> mx.array:
        """Return the next token of each row, (rows,) int32, NOT_FINITE or NO_TOKEN for none.

        *logits* is (rows, vocabulary); *last_tokens* (rows,) is each row's newest token where a
        row may have one that the host has not read. The result is lazy unless a row draws
        without a small top-k: then the device is asked whether the head of the order was enough.
        Where the device is the CPU, rows that draw are never lazy.
        """
        batch = self._parameters(rows)
        logits = logits.astype(mx.float32)
        is_sound = mx.isfinite(mx.max(logits, axis=-1))
        indices = np.fromiter((row.num_output_tokens for row in rows), np.uint64, len(rows))
        logits = batch.adjust(logits, last_tokens)
        allowed = batch.masks.apply(batch.ban(logits, indices))
        tokens = batch.choose(allowed, indices)
        if allowed is not logits:
            tokens = mx.where(mx.max(allowed, axis=-1) > -mx.inf, tokens, NO_TOKEN)
        return mx.where(is_sound, tokens, NOT_FINITE)

    def _parameters(self, rows: Seq[Sequence]) -> "_BatchParameters":
        if self._batch.rows != tuple(rows):
            self._batch = _BatchParameters(tuple(rows), self.vocabulary_size, self._eos_token_ids)
        return self._batch


class _BatchParameters:
    """What sampling needs to know of a set of rows, as arrays."""

    def __init__(
        self, rows: tuple[Sequence, ...], vocabulary_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.rows = rows
        is_random = [row.job.sampling.temperature > 0 for row in rows]
        self._random = np.flatnonzero(np.array(is_random, dtype=bool))
        drawing = [rows[index] for index in self._random]
        self._drawing = [row.job.sampling for row in drawing]
        self._filters = Filters.of(self._drawing, vocabulary_size) if drawing else None
        self._keys = np.array([stream_key(row.job, row.choice) for row in drawing], np.uint64)
        self._biases = Biases(rows)
        self._penalties = Penalties(rows)
        self._bad_ids = Bans([row.job.sampling.bad_token_ids for row in rows])
        self._min_tokens = np.array([row.job.min_tokens for row in rows], np.uint64)
        self.masks = GrammarMasks(rows, vocabulary_size)
        self._ends = Bans([_end_ids(row, eos_token_ids) for row in rows])

    def choose(self, logits: mx.array, indices: npt.NDArray[np.uint64]) -> mx.array:
        """Take the likeliest token, or draw one; *indices* are those of the output tokens."""
        if self._filters is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        numbers = mx.array(uniforms(self._keys, indices[self._random]))[:, None]
        if len(self._drawing) == len(self.rows):
            return _draw(logits, self._filters, numbers, self._drawing)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        place = mx.array(self._random.astype(np.int32))
        tokens[place] = _draw(logits[place], self._filters, numbers, self._drawing)
        return tokens

    def adjust(self, logits: mx.array, last_tokens: mx.array | None) -> mx.array:
        """Add biases, then penalties: the order of mlx_lm.sample_utils."""
        return self._penalties.apply(self._biases.apply(logits), last_tokens)

    def ban(self, logits: mx.array, indices: npt.NDArray[np.uint64]) -> mx.array:
        """Rule out bad ids, and those that would end a row before its min_tokens.

        Returns *logits* itself where there is nothing to rule out.
        """
        logits = self._bad_ids.apply(logits, np.ones(len(self.rows), dtype=bool))
        return self._ends.apply(logits, indices < self._min_tokens)


def _end_ids(row: Sequence, eos_token_ids: frozenset[int]) -> list[int]:
    if row.job.min_tokens == 0:
        return []
    ends = set(row.job.stop_token_ids)
    return sorted(ends if row.job.ignore_eos else ends | eos_token_ids)


def _draw(
    logits: mx.array, filters: Filters, uniform: mx.array, params: Seq[SamplingParams]
) -> mx.array:
    """Draw one token a row; logits (rows, vocabulary), result (rows,) int32.

    Rows for which the head of the order was not enough look at more of it, then at all.
    """
    choice = choose(logits, filters, uniform)
    if filters.is_head_enough:
        return choice.tokens
    doubtful = np.flatnonzero(~np.array(choice.is_sure))
    if not doubtful.size:
        return choice.tokens
    rows = mx.array(doubtful.astype(np.int32))
    own = [params[index] for index in doubtful.tolist()]
    rest = Filters.of(own, filters.vocabulary_size)
    longer = filters.longer_head
    tokens = choice.tokens
    tokens[rows] = (
        choose_among_all(logits[rows], rest, uniform[rows])
        if longer is None
        else _draw(logits[rows], rest._replace(head=longer), uniform[rows], own)
    )
    return tokens
