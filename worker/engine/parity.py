"""The check at load: do rows computed together get what each gets alone?

mlx-lm batches some families wrongly and in silence. A few short ragged rows on the real
weights show it; the fastest runner that agrees with rows one at a time is taken.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

import mlx.core as mx
import structlog
from headwater.schemas import GenerationJob
from mlx.nn.layers.base import Module

from ..errors import EngineUnsound
from ..sequence import Sequence
from .merged_runner import MergedRunner
from .row_runner import RowRunner
from .runner import ModelRunner
from .shared_kv.runner import SharedPrefixRunner

log = structlog.get_logger()

RunnerFactory = Callable[[Module], ModelRunner]

CANDIDATES: Final[tuple[RunnerFactory, ...]] = (SharedPrefixRunner, MergedRunner)
"""Fastest first; rows one at a time are the yardstick and the last resort. One that is not made
for a model's kind of cache raises TypeError."""

_PROMPT_LENGTHS: Final = (11, 3, 7, 9)
_SHARED: Final = 4
"""Tokens of the first prompt that the last two start with."""

_MAX_ERROR: Final = 1e-3
"""A logit's largest difference in float32, in units of the logits' spread where that is wider."""
_MAX_ERROR_16_BIT: Final = 0.05
"""Root mean square of the differences over the logits' spread, with 16-bit weights."""


class Disagreement(NamedTuple):
    """How a runner differs from rows one at a time."""

    runner: str
    reason: str


def choose_runner(
    model: Module, vocabulary_size: int, candidates: Seq[RunnerFactory] = CANDIDATES
) -> ModelRunner:
    """Return the first of *candidates* that computes what rows alone compute, else those.

    Warns about each candidate that does not. Raises EngineUnsound when rows one at a time
    do not give finite logits: the model can't be served at all.
    """
    rows = _rows(vocabulary_size)
    expected = _run(RowRunner(model), rows)
    if not mx.all(mx.isfinite(expected)):
        raise EngineUnsound("the model computes logits that are not finite for a short prompt")
    disagreements: list[Disagreement] = []
    for candidate in candidates:
        try:
            runner = candidate(model)
        except TypeError as error:
            # Made for other kinds of caches: news only if no other candidate is left.
            disagreements.append(Disagreement(_name(candidate), str(error)))
            continue
        disagreement = check_runner(runner, _name(candidate), rows, expected)
        if disagreement is None:
            return candidate(model)
        disagreements.append(disagreement)
        log.warning("parity_failed", runner=disagreement.runner, reason=disagreement.reason)
    log.warning(
        "rows_run_one_at_a_time",
        advice="this model's rows can't be batched rightly: throughput will not grow with the"
        " number of jobs; the text is right",
        failed=[f"{runner}: {reason}" for runner, reason in disagreements],
    )
    return RowRunner(model)


def check_runner(
    runner: ModelRunner, name: str, rows: Seq[list[int]], expected: mx.array
) -> Disagreement | None:
    """Compare a fresh runner's logits with *expected*; None when they agree."""
    try:
        actual = _run(runner, rows)
    except Exception as error:  # whatever a family's batched forward raises, it is unfit
        return Disagreement(name, f"it raised {type(error).__name__}: {error}")
    reason = _difference(actual, expected)
    return None if reason is None else Disagreement(name, reason)


def _name(candidate: RunnerFactory) -> str:
    return getattr(candidate, "__name__", repr(candidate))


def _rows(vocabulary_size: int) -> list[list[int]]:
    rng = random.Random(0)  # noqa: S311  # token ids, not secrets
    rows = [[rng.randrange(vocabulary_size) for _ in range(num)] for num in _PROMPT_LENGTHS]
    for row in rows[2:]:
        row[:_SHARED] = rows[0][:_SHARED]
    return rows


def _run(runner: ModelRunner, rows: Seq[list[int]]) -> mx.array:
    """Prefill ragged rows, join and leave; return all logits seen, (positions, vocabulary).

    The tokens are given, so a difference at one step does not change the steps behind it.
    The first row's own tokens become the prefix of the last two, as the prefix cache does it.
    """
    first, second, third, fourth = every = [_sequence(tokens) for tokens in rows]
    runner.attach(first, ())
    runner.prefill([first], [rows[0][:_SHARED]])
    prefix = runner.extract(first, 0, _SHARED)
    runner.attach(second, ())
    runner.attach(third, (prefix,))
    runner.attach(fourth, (prefix,))
    starts = [_SHARED, 0, _SHARED, _SHARED]
    heads = [tokens[start:-2] for tokens, start in zip(rows, starts, strict=True)]
    logits = [runner.prefill(every, heads)]
    given = mx.array([tokens[-2:] for tokens in rows])
    logits.append(runner.decode([first, second], given[:2, 0]))
    logits.append(
        runner.decode(
            [third, first, fourth, second],
            given[mx.array([2, 0, 3, 1]), mx.array([0, 1, 0, 1])],
        )
    )
    runner.detach(first)
    logits.append(runner.decode([fourth, third], given[mx.array([3, 2]), 1]))
    together = mx.concatenate(logits)
    mx.eval(together)
    return together


def _sequence(tokens: Seq[int]) -> Sequence:
    job = GenerationJob(
        job_id="parity", model="parity", prompt_token_ids=tuple(tokens), max_tokens=1
    )
    return Sequence(job)


def _difference(actual: mx.array, expected: mx.array) -> str | None:
    """Say how *actual* is off by more than rounding, or None."""
    spread = float(mx.std(expected.astype(mx.float32)))
    errors = mx.abs(actual.astype(mx.float32) - expected.astype(mx.float32))
    if expected.dtype == mx.float32:
        size, allowed = float(mx.max(errors)), _MAX_ERROR * max(1.0, spread)
    else:
        size, allowed = float(mx.sqrt(mx.mean(mx.square(errors)))), _MAX_ERROR_16_BIT * spread
    # Turned round so that NaN, which no comparison holds for, counts as a difference.
    if size <= allowed:
        return None
    return f"logits are off by {size:.3g}, rounding may make it {allowed:.3g}"
