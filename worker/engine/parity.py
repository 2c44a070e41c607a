"""The check at load: do rows computed together get what each gets alone?

mlx-lm batches some families wrongly and in silence, and attention over shared prefixes is not
for every family. A rehearsal on a small random instance of the model's class shows it in no
time, one with a few rows on the real weights is the last word; the fastest runner that agrees
with rows alone is taken.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final, NamedTuple

import mlx.core as mx
import structlog
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..errors import EngineUnsound
from .merged_runner import MergedRunner
from .rehearsal import SMALL, Lengths, rehearse, rehearse_alone
from .row_runner import RowRunner
from .runner import ModelRunner
from .segments import flatten
from .shared_kv.families import family_of, is_built_small, shared_prefix_runner
from .shrinking import VOCABULARY_SIZE, NotShrinkable, small_model

log = structlog.get_logger()

RunnerFactory = Callable[[Module], ModelRunner]

CANDIDATES: Final[tuple[RunnerFactory, ...]] = (shared_prefix_runner, MergedRunner)
"""Fastest first; rows one at a time are the yardstick and the last resort. One that is not made
for a model's family or its kind of cache raises TypeError."""

_SHORT: Final = Lengths(root=4, nested=3, other=None, own=(4, 3, 7, 9))
_MAX_WINDOW: Final = 256
"""Rows on the real weights are longer than the model's window where it is no longer than this."""

_MAX_ERROR: Final = 1e-3
"""A logit's largest difference in float32, in units of the logits' spread where that is wider."""
_MAX_ERROR_16_BIT: Final = 0.05
"""Root mean square of the differences over the logits' spread, with 16-bit weights."""


class Check(NamedTuple):
    """A model to rehearse with, and what every runner has to give."""

    model: Module
    lengths: Lengths
    vocabulary_size: int
    expected: mx.array

    @classmethod
    def of(cls, model: Module, lengths: Lengths, vocabulary_size: int) -> "Check":
        """Compute every row alone."""
        expected = rehearse_alone(model, lengths, vocabulary_size)
        mx.eval(expected)
        return cls(model, lengths, vocabulary_size, expected)

    @property
    def is_sound(self) -> bool:
        """Whether rows alone get logits that mean something."""
        return bool(mx.all(mx.isfinite(self.expected)))

    def fault(self, candidate: RunnerFactory) -> str | None:
        """Say how the candidate's rows differ from rows alone; None when they agree.

        Raises TypeError when the candidate is not made for the model.
        """
        runner = candidate(self.model)
        try:
            actual = rehearse(runner, self.lengths, self.vocabulary_size)
            return _difference(actual, self.expected)
        except Exception as error:  # whatever a family's batched forward raises, it is unfit
            return f"it raised {type(error).__name__}: {error}"


def choose_runner(
    model: Module,
    vocabulary_size: int,
    candidates: Seq[RunnerFactory] = CANDIDATES,
    config: Mapping[str, Any] | None = None,
) -> ModelRunner:
    """Return the first of *candidates* that computes what rows alone compute, else those.

    With the model's *config* a small instance of its class is tried first. Warns about each
    candidate that is wrong. Raises EngineUnsound when rows one at a time do not give finite
    logits: the model can't be served at all.
    """
    checks = [*_small_check(model, config or {}), _real_check(model, vocabulary_size)]
    failed: list[str] = []
    for candidate in candidates:
        name = getattr(candidate, "__name__", repr(candidate))
        try:
            fault = next(_faults(candidate, checks), None)
            if fault is None:
                return candidate(model)
        except TypeError as error:
            # Made for other families or caches: news only if no other candidate is left.
            failed.append(f"{name}: {error}")
            continue
        failed.append(f"{name}: {fault}")
        log.warning("parity_failed", runner=name, reason=fault)
    log.warning(
        "rows_run_one_at_a_time",
        advice="this model's rows can't be batched rightly: throughput will not grow with the"
        " number of jobs; the text is right",
        failed=failed,
    )
    return RowRunner(model)


def _faults(candidate: RunnerFactory, checks: Seq[Check]) -> Iterator[str]:
    for check in checks:
        fault = check.fault(candidate)
        if fault is not None:
            yield fault


def _small_check(model: Module, config: Mapping[str, Any]) -> list[Check]:
    """Return the check on a small instance, if the model's family is known to have one."""
    if not config or not is_built_small(model):
        return []
    try:
        small = small_model(family_of(model), config)
        check = Check.of(small, SMALL, VOCABULARY_SIZE)
    except (NotShrinkable, ValueError, RuntimeError, TypeError, AttributeError) as error:
        # Sizes that a family combines in a way of its own; the real weights will tell.
        log.debug("no_small_instance", reason=str(error))
        return []
    return [check] if check.is_sound else []


def _real_check(model: Module, vocabulary_size: int) -> Check:
    """Return the check on the real weights."""
    caches = flatten(make_prompt_cache(model))
    windows = [cache.max_size for cache in caches if isinstance(cache, RotatingKVCache)]
    window = min(windows, default=0)
    root = _SHORT.root + (window if window <= _MAX_WINDOW else 0)
    check = Check.of(model, _SHORT._replace(root=root), vocabulary_size)
    if not check.is_sound:
        raise EngineUnsound("the model computes logits that are not finite for a short prompt")
    return check


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
